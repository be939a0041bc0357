"""Write the tables of scripts in README.md and docs/ from tools/scripts.yaml.

    python tools/script_lists.py            write them
    python tools/script_lists.py --check    write nothing, print the files that are not current

A table stands between two lines with `scripts: begin` and `scripts: end`.
"""

import argparse
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
DATA = yaml.safe_load((ROOT / "tools" / "scripts.yaml").read_text())
SCRIPTS = DATA["scripts"]


def link_to_script(name: str) -> str:
    return f"[{name}.py]({name}.py)"


def link_to_section(name: str) -> str:
    """From a page of docs/ to the section about a script."""
    return f"[{name}.py]({SCRIPTS[name]['page']}.md#{name}py)"


def task_rows(link) -> list[list[str]]:
    """The cells of each task: its name, the script to start with, the alternatives."""
    rows = []
    for task, scripts in DATA["tasks"].items():
        first, *others = scripts
        alternatives = ", ".join(f"{link(name)} ({scripts[name]})" for name in others)
        rows.append([task, link(first), alternatives])
    return rows


def pages_of(task: str) -> str:
    """Links from README.md to the pages about the scripts of a task."""
    pages = dict.fromkeys(SCRIPTS[name]["page"] for name in DATA["tasks"][task])
    return ", ".join(f"[{DATA['pages'][page]}](docs/{page}.md)" for page in pages)


def as_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows]]


def tasks_with_pages() -> list[str]:
    header = ["task", "start with", "alternatives", "guide"]
    return as_table(header, [[*row, pages_of(row[0])] for row in task_rows(link_to_script)])


def tasks_with_sections() -> list[str]:
    return as_table(["task", "start with", "alternatives"], task_rows(link_to_section))


def environments() -> list[str]:
    """Which environments each script takes; scripts that take the same ones share a row."""
    names = {}
    for name, entry in SCRIPTS.items():
        names.setdefault(entry["environments"], []).append(name)
    rows = [[", ".join(names[key]), DATA["environments"][key]] for key in names]
    return as_table(["scripts", "environments"], rows)


LISTS = {
    "README.md": tasks_with_pages,
    "docs/index.md": tasks_with_sections,
    "docs/environments.md": environments,
}


def with_list(text: str, lines: list[str]) -> str:
    """The text of a file with these lines between its two marks."""
    before, old, after = re.split(r"(?s)(?<=scripts: begin)(.*)(?=scripts: end)", text)
    rest_of_begin, *_, start_of_end = old.split("\n")
    return before + "\n".join([rest_of_begin, *lines, start_of_end]) + after


def not_current() -> dict[str, str]:
    """The files whose table differs, with their new text."""
    texts = {}
    for name, make_list in LISTS.items():
        old = (ROOT / name).read_text()
        new = with_list(old, ["", *make_list(), ""])  # comments have blank lines around them
        if new != old:
            texts[name] = new
    return texts


def write() -> None:
    for name, text in not_current().items():
        (ROOT / name).write_text(text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        write()
    elif not_current():
        sys.exit(f"not current: {', '.join(not_current())}")


if __name__ == "__main__":
    main()
