"""Copy the blocks that all scripts share from their masters to the other scripts.

    python tools/sync_blocks.py            rewrite the shared blocks, print what changed
    python tools/sync_blocks.py --check    change nothing, print the blocks that differ
    python tools/sync_blocks.py FILE ...   only these files, which may lie anywhere

A shared block runs from its banner, `# --- NAME (shared) ---`, to the next banner (a line that
begins with `# --- `) or to the end of the file. A banner without `(shared)` begins a part that
belongs to the script and is left alone. A function or class that the master lacks is never
overwritten. The masters are in ppo_continuous.py, and those that it lacks are in ppo.py. The exit
code is 1 if --check finds a difference, and 2 after an error, which leaves all files as they were.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNER = re.compile(r"# --- (\S.*) \(shared\) ---")


def shared_blocks(text: str) -> dict[str, str]:
    """The text of each shared block by its name, the banner included. Raises ValueError."""
    blocks = {}
    for part in re.split(r"(?m)^(?=# --- )", text)[1:]:
        line = part.split("\n", 1)[0]
        banner = BANNER.fullmatch(line)
        if banner is None and "(shared)" in line:
            raise ValueError(f"a banner that does not end with `(shared) ---`: {line}")
        if banner is None:
            continue
        name = banner[1]
        if name in blocks:
            raise ValueError(f"a second shared block {name!r}")
        blocks[name] = part.rstrip("\n")
    return blocks


def read_masters() -> dict[str, str]:
    masters = {}
    for file in ("ppo.py", "ppo_continuous.py"):  # the second one replaces what both have
        masters |= shared_blocks((ROOT / file).read_text(encoding="utf-8"))
    return masters


def defined(block: str) -> set[str]:
    return set(re.findall(r"(?m)^(?:def|class) (\w+)", block))


def differing(masters: dict[str, str], text: str) -> list[str]:
    """Names of the blocks of `text` that differ from the master.

    Raises ValueError for what must not be overwritten.
    """
    blocks = shared_blocks(text)
    unknown = blocks.keys() - masters.keys()
    if unknown:
        known = ", ".join(map(repr, masters))
        raise ValueError(f"unknown shared block {min(unknown)!r}; known are {known}")
    names = [name for name, block in blocks.items() if block != masters[name]]
    for name in names:
        own = defined(blocks[name]) - defined(masters[name])
        if own:
            raise ValueError(
                f"block {name!r} holds {min(own)}, which the master lacks: put a banner above it"
            )
    return names


def sync(masters: dict[str, str], text: str) -> str:
    """`text` with its shared blocks as they are in the masters. Raises ValueError."""
    blocks = shared_blocks(text)
    for name in differing(masters, text):
        text = text.replace(blocks[name], masters[name])
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
    changes = []
    failed = False
    masters = read_masters()
    for path in options.files or sorted(ROOT.glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
            names = differing(masters, text)
            if names:
                changes.append((path, names, sync(masters, text)))
            if "main" not in shared_blocks(text):
                print(f"{os.path.relpath(path)}: has no shared block 'main'; its own is left alone")
        except (OSError, ValueError) as error:
            print(f"{os.path.relpath(path)}: error: {error}", file=sys.stderr)
            failed = True
    if failed and not options.check:
        return 2
    for path, names, text in changes:
        if not options.check:
            path.write_text(text, encoding="utf-8")
        verb = "differs" if options.check else "updated"
        print(f"{os.path.relpath(path)}: block {', '.join(map(repr, names))} {verb}")
    if failed:
        return 2
    return 1 if options.check and changes else 0


if __name__ == "__main__":
    raise SystemExit(main())
