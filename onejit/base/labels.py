"""Text in pictures."""

from matplotlib.font_manager import FontProperties, findfont, get_font

from onejit.base.text import printable


def as_label(text: str) -> str:
    """The text as it is: `$` begins no formula, and a letter that the font lacks is "\\u7acb"."""
    font = get_font(findfont(FontProperties()))
    shown = ""
    for character in printable(text):
        shown += character if font.get_char_index(ord(character)) else ascii(character)[1:-1]
    return shown.replace("$", r"\$")
