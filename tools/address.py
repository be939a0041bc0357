"""Write the repository's address, `repo_url` of mkdocs.yml, into the files that need it.

    python tools/address.py            write them
    python tools/address.py --check    write nothing, print the files that are not current

The files are README.md (the badge of the tests), docs/install.md (the line that clones),
docs/walkthrough.ipynb (its first cell) and CITATION.cff. Without an address they have none, and
work in a clone.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_address() -> str:
    return re.search(r'(?m)^repo_url: "(.*?)"', (ROOT / "mkdocs.yml").read_text())[1]


def between_marks(text: str, lines: str) -> str:
    """The text with these lines between its marks `address: begin` and `address: end`."""
    pattern = r"(?s)(<!-- address: begin.*? -->\n).*?(<!-- address: end -->)"
    return re.sub(pattern, lambda match: match[1] + lines + match[2], text)


def badge(text: str, address: str) -> str:
    link = f"{address}/actions/workflows/ci.yml"
    return between_marks(text, f"[![tests]({link}/badge.svg)]({link})\n" if address else "")


def clone_line(text: str, address: str) -> str:
    return between_marks(text, f"\n```\ngit clone {address}\n```\n\n" if address else "")


def first_cell(text: str, address: str) -> str:
    return re.sub(r'REPOSITORY = \\".*?\\"', rf'REPOSITORY = \\"{address}\\"', text)


def citation(text: str, address: str) -> str:
    text = re.sub(r"(?m)^repository-code: .*\n", "", text)
    return text + (f"repository-code: {address}\n" if address else "")


WRITERS = {
    "README.md": badge,
    "docs/install.md": clone_line,
    "docs/walkthrough.ipynb": first_cell,
    "CITATION.cff": citation,
}


def texts(address: str) -> dict[str, str]:
    """The files with this address."""
    found = {}
    for name, write in WRITERS.items():
        found[name] = write((ROOT / name).read_text(encoding="utf-8"), address)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    for name, text in texts(read_address()).items():
        path = ROOT / name
        if text == path.read_text(encoding="utf-8"):
            continue
        if is_check:
            sys.exit(f"{name}: is not current; run tools/address.py")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
