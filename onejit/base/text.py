"""Text of messages and of tables: rows, and suggestions for names that are not known."""

import csv
import difflib
import io
import re
import shlex

LONGEST = 40  # characters of a text in the name of a file


def nearest(name, known, prefix: str = "--") -> str:
    """'; did you mean NAME?' with the closest known name, or nothing if none is close.

    The prefix does not make names closer, and capitals make no difference.
    """
    names = {str(other).removeprefix(prefix).lower(): str(other) for other in known}
    word = str(name).removeprefix(prefix).lower()
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def resume_command(run_dir) -> str:
    """The command that continues a run, to be pasted."""
    return shlex.join(["onejit", "resume", str(run_dir)])


def printable(text: str) -> str:
    """Text without control characters, such as a terminal's escape codes: "\\x1b" in words."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def file_names(texts) -> dict[str, str]:
    """A part of a file's name for each text: short, and unique where small letters are capitals."""
    names = {}
    for text in texts:
        short = re.sub(r"[^-.=0-9A-Za-z]+", "_", text)[:LONGEST]
        taken = [name.lower() for name in names.values()]
        name = short
        number = 1
        while name.lower() in taken:
            number += 1
            name = f"{short}-{number}"
        names[text] = name
    return names


def plural(number: int, noun: str) -> str:
    """'1 seed', '2 seeds'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def align(rows: list[list[str]]) -> str:
    """Align rows of cells as columns of text, without control characters."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_csv(rows) -> str:
    """Rows of values as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
