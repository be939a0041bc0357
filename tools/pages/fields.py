"""The page of all fields: what each script's `Config` has, read from the scripts.

`tools/pages/hooks.py` adds the page to the site when it is built, so it is never out of date.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# All fields: hyperparameters of every script

Every hyperparameter of every script, with its default. On the command line, a field is a flag with
dashes: `num_envs` is `--num-envs 8`. In Python it is an argument: `Config(num_envs=8)`.
`python SCRIPT.py --help` prints the same list.

## Learning rate schedule, discount, networks

The learning rate is `lr`, and `anneal_lr` is the learning rate schedule. The
discount factor is `gamma`. The sizes of the networks are `hidden_sizes`. The number of agents is no
field: `--num-seeds` sets it.
"""


def fields_of(path: Path) -> list[tuple[str, str, str]]:
    """`(name, default, meaning)` of each field. The meaning is the comment behind or above it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    config = next(node for node in classes if node.name == "Config")
    rows = []
    for node in config.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        behind = lines[node.end_lineno - 1][node.end_col_offset :].strip()
        above = lines[node.lineno - 2].strip()
        comment = behind if behind.startswith("#") else above
        rows.append((node.target.id, ast.unparse(node.value), comment.lstrip("# ")))
    return rows


def page() -> str:
    parts = [HEAD]
    for path in sorted(ROOT.glob("*.py")):
        parts.append(f"## {path.name}\n\n| field | default | meaning |\n|---|---|---|")
        for name, default, meaning in fields_of(path):
            shown = "" if default == "FrozenDict()" else f"`{default}`"
            cells = [f"`{name}`", shown, re.sub(r"([|<*])", r"\\\1", meaning)]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page())
