"""Write the lists of scripts in README.md, mkdocs.yml and docs/ from tools/scripts.yaml.

    python tools/script_lists.py            write them
    python tools/script_lists.py --check    write nothing, print the files that are not current

A list stands between two lines with `scripts: begin` and `scripts: end`. The returns in README.md
come from benchmarks/results/.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import returns_page

DATA = yaml.safe_load((ROOT / "tools" / "scripts.yaml").read_text())
SCRIPTS = DATA["scripts"]


def result(entry: dict) -> str:
    """The return of a script as README.md shows it: `[CartPole-v1](...), 5e5 steps: 490, ...`."""
    if "row" not in entry:
        return entry.get("result", "")
    row = json.loads(returns_page.file_of(entry["row"]).read_text())
    config = returns_page.config_of(entry["row"])
    return f"[{entry['environment']}]({config}), {returns_page.show_return(row)}"


def readme_table() -> list[str]:
    lines = ["| script | use it when | return: mean, worst agent | speed |", "|---|---|---|---|"]
    for name, entry in SCRIPTS.items():
        links = f"[{name}.py]({name}.py), [{entry['title']}](docs/{name}.md)"
        speed = entry.get("speed", "")
        lines.append(f"| {links} | {entry['use_when']} | {result(entry)} | {speed} |")
    return lines


def families() -> list[str]:
    links = {}
    for name, entry in SCRIPTS.items():
        links.setdefault(entry["family"], []).append(f"[{entry['title']}]({name}.md)")
    return [f"- {family}: {'; '.join(links[family])}" for family in links]


def tasks_table() -> list[str]:
    names = {}
    for name, entry in SCRIPTS.items():
        names.setdefault(DATA["tasks"][entry["tasks"]], []).append(name)
    rows = [f"| {', '.join(names[tasks])} | {tasks} |" for tasks in names]
    return ["| scripts | environments |", "|---|---|", *rows]


def navigation() -> list[str]:
    return [f'      - "{entry["title"]}": {name}.md' for name, entry in SCRIPTS.items()]


LISTS = {
    "README.md": readme_table,
    "docs/index.md": families,
    "docs/environments.md": tasks_table,
    "mkdocs.yml": navigation,
}


def with_list(text: str, lines: list[str]) -> str:
    """The text of a file with these lines between its two marks."""
    before, old, after = re.split(r"(?s)(?<=scripts: begin)(.*)(?=scripts: end)", text)
    rest_of_begin, *_, start_of_end = old.split("\n")
    return before + "\n".join([rest_of_begin, *lines, start_of_end]) + after


def not_current() -> dict[str, str]:
    """The files whose list differs, with their new text."""
    texts = {}
    for name, make_list in LISTS.items():
        old = (ROOT / name).read_text()
        lines = make_list()
        if name.endswith(".md"):  # where comments have blank lines around them
            lines = ["", *lines, ""]
        new = with_list(old, lines)
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
