"""Copy the blocks that all scripts share from ppo_continuous.py to the other scripts.

    python tools/sync_blocks.py            rewrite the blocks of every top-level script, print the files that changed
    python tools/sync_blocks.py --check    change nothing, print the blocks that differ
    python tools/sync_blocks.py FILE ...   only these files, which may lie anywhere

Exits with 1 where --check finds a difference, with 2 after an error; no file is changed then.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MASTER = ROOT / "ppo_continuous.py"
BEGIN = re.compile(r"# --- block (\w+): the same in every script, copied by tools/sync_blocks\.py ---")
END = re.compile(r"# --- end of block (\w+) ---")
REQUIRED = ["config", "arguments", "results"]  # by block main
MARKER = re.compile(r"#[ -]*(end of )?block\b.*---\s*$")  # a line that means to be one of the two


def find_blocks(lines: list[str]) -> dict[str, slice]:
    """Where each block stands, markers included. Raises ValueError for markers that do not pair."""
    blocks, name, first = {}, None, 0
    for i, line in enumerate(lines):
        if begin := BEGIN.fullmatch(line):
            if name is not None:
                raise ValueError(f"line {i + 1}: block {begin[1]} begins inside block {name}, which has no end")
            name, first = begin[1], i
            if name in blocks:
                raise ValueError(f"line {i + 1}: a second block {name}")
        elif end := END.fullmatch(line):
            if end[1] != name:
                raise ValueError(f"line {i + 1}: end of block {end[1]}, which has not begun")
            blocks[name], name = slice(first, i + 1), None
        elif MARKER.match(line):
            raise ValueError(f"line {i + 1}: not a marker as it should be spelt: {line}")
    if name is not None:
        raise ValueError(f"line {first + 1}: block {name} has no end")
    return blocks


def differing(master_text: str, text: str) -> list[str]:
    """Names of the blocks of `text` that are not as in the master. Raises ValueError for unknown and lacking ones."""
    master, lines = master_text.split("\n"), text.split("\n")
    known, found = find_blocks(master), find_blocks(lines)
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"unknown block {unknown[0]}; known are {', '.join(known)}")
    if lacking := [name for name in REQUIRED if "main" in found and name in known and name not in found]:
        raise ValueError(f"no block {lacking[0]}, which block main needs; add its markers, and its imports at the top")
    return [name for name in found if lines[found[name]] != master[known[name]]]


def sync(master_text: str, text: str) -> str:
    """`text` with its blocks as they are in the master. Raises ValueError."""
    master, lines = master_text.split("\n"), text.split("\n")
    for name in differing(master_text, text):
        lines[find_blocks(lines)[name]] = master[find_blocks(master)[name]]
    return "\n".join(lines)


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="every top-level script where not given")
    parser.add_argument("--check", action="store_true", help="change nothing, print the blocks that differ")
    options = parser.parse_args(args)
    master_text = MASTER.read_text(encoding="utf-8")
    changed, failed = [], False
    for path in options.files or sorted(ROOT.glob("*.py")):
        shown = os.path.relpath(path)
        try:
            text = path.read_text(encoding="utf-8")
            if names := differing(master_text, text):
                changed.append((path, shown, names, sync(master_text, text)))
        except (OSError, ValueError) as error:
            print(f"{shown}: error: {error}", file=sys.stderr)
            failed = True
    for path, shown, names, text in [] if failed and not options.check else changed:
        if options.check:
            print(*[f"{shown}: block {name} differs" for name in names], sep="\n")
        else:
            path.write_text(text, encoding="utf-8")
            print(shown)
    return 2 if failed else int(options.check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
