"""Text of messages: tables, and suggestions for names that are not known."""

import difflib


def nearest(name, known) -> str:
    """'; did you mean NAME?' with the closest known name, or nothing if none is close."""
    names = [str(other) for other in known]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def align(rows: list[list[str]]) -> str:
    """Align rows of cells as columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
