"""Print the dependencies of pyproject.toml, and those of the extras that are named.

    python tools/requirements.py dev

`make` installs them without the package: tests start scripts where `onejit` cannot be imported.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def of_extra(extra: str) -> list[str]:
    lines = []
    for line in PROJECT["optional-dependencies"][extra]:
        if line.startswith("onejit["):  # another extra
            lines += of_extra(line.removeprefix("onejit[").removesuffix("]"))
        else:
            lines.append(line)
    return lines


print("# Written by `make` from pyproject.toml.")
print(*PROJECT["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*of_extra(extra), sep="\n")
