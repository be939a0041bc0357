"""Copy the blocks that all scripts share from their masters to the other scripts.

    python tests/sync_blocks.py            rewrite the blocks of every top-level script, print what changed
    python tests/sync_blocks.py --check    change nothing, print the blocks that differ
    python tests/sync_blocks.py FILE ...   only these files, which may lie anywhere

A block runs from its banner, `# --- block NAME: ... ---`, to the next banner (a line that begins with `# --- `) or to
the end of the file. With another banner, such as `# --- NAME ---`, it belongs to the script and is left alone. A
function or class that the master has not is never overwritten. ppo_continuous.py holds the masters, ppo.py those of
`discrete`, `scan` and `torso`. Exits with 1 where --check finds a difference, with 2 after an error; no file is changed
then.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNER = re.compile(r"# --- block (\w+): .+ ---")


def find_blocks(text: str) -> dict[str, str]:
    """The text of each block by its name, the banner included. Raises ValueError."""
    blocks = {}
    for part in re.split(r"(?m)^(?=# --- )", text)[1:]:
        line = part.split("\n", 1)[0]
        if banner := BANNER.fullmatch(line):
            if banner[1] in blocks:
                raise ValueError(f"a second block {banner[1]}")
            blocks[banner[1]] = part.rstrip("\n")
        elif line.startswith("# --- block"):
            raise ValueError(f"not a banner as it should be spelt: {line}")
    return blocks


def read_masters() -> dict[str, str]:
    blocks = find_blocks((ROOT / "ppo_continuous.py").read_text(encoding="utf-8"))
    others = find_blocks((ROOT / "ppo.py").read_text(encoding="utf-8"))
    return blocks | {name: others[name] for name in ("discrete", "scan", "torso")}


def defined(block: str) -> set[str]:
    return set(re.findall(r"(?m)^(?:def|class) (\w+)", block))


def differing(masters: dict[str, str], text: str) -> list[str]:
    """Names of the blocks of `text` that are not as in the master. Raises ValueError for what sync must not touch."""
    found = find_blocks(text)
    if unknown := found.keys() - masters.keys():
        raise ValueError(f"unknown block {min(unknown)}; known are {', '.join(masters)}")
    names = [name for name, block in found.items() if block != masters[name]]
    for name in names:
        if own := defined(found[name]) - defined(masters[name]):
            raise ValueError(
                f"block {name} holds {min(own)}, which the master has not: put a banner above it"
            )
    return names


def sync(masters: dict[str, str], text: str) -> str:
    """`text` with its blocks as they are in the masters. Raises ValueError."""
    found = find_blocks(text)
    for name in differing(masters, text):
        text = text.replace(found[name], masters[name])
    return text


def main(args=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="every top-level script where not given"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, print the blocks that differ"
    )
    options = parser.parse_args(args)
    masters = read_masters()
    changed, failed = [], False
    for path in options.files or sorted(ROOT.glob("*.py")):
        shown = os.path.relpath(path)
        try:
            text = path.read_text(encoding="utf-8")
            if names := differing(masters, text):
                changed.append((path, shown, names, sync(masters, text)))
            if "main" not in find_blocks(text):
                print(f"{shown}: block main has no such banner here and is left as it is")
        except (OSError, ValueError) as error:
            print(f"{shown}: error: {error}", file=sys.stderr)
            failed = True
    for path, shown, names, text in [] if failed and not options.check else changed:
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{shown}: block {', '.join(names)} {'differs' if options.check else 'updated'}")
    return 2 if failed else int(options.check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
