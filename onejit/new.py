"""Start a project from one of onejit's scripts: a copy under a new name that trains at once.

    onejit new ppo_continuous my_algorithm.py
    uv run my_algorithm.py
    onejit new --list

The copy keeps the script's header, so `uv run` installs what it needs.
"""

import importlib.machinery
import keyword
import re
import sys
import sysconfig
from pathlib import Path

import tyro

from onejit.files import write
from onejit.scripts import known_scripts
from onejit.text import align, nearest

DOCSTRING = re.compile(r'^""".*?"""', re.DOTALL | re.MULTILINE)  # a header of comments precedes it


def docstring_of(text: str) -> str:
    """A script's docstring in its quotes, empty if it has none."""
    found = DOCSTRING.search(text)
    return found[0] if found else ""


def summary(text: str) -> str:
    """The first sentence of a script's docstring."""
    docstring = docstring_of(text).strip('"')
    return re.split(r"\.\s", docstring, maxsplit=1)[0].replace("\n", " ")


def renamed(text: str, old: str, new: str) -> str:
    """The text of a script under a new name.

    The docstring names the original, and its commands start the copy.
    """
    docstring = docstring_of(text)
    mine = re.sub(rf"\bpython {old}\.py", f"python {new}.py", docstring.removeprefix('"""'))
    title = f'"""{new}: say here what it does. It began as a copy of onejit\'s {old}.py.'
    return text.replace(docstring, f"{title}\n\n{mine}", 1)


def is_installed(name: str) -> bool:
    """Whether a package has a module of this name, on which other packages may depend."""
    folders = sysconfig.get_paths()
    places = [folders["purelib"], folders["platlib"]]
    return importlib.machinery.PathFinder.find_spec(name, places) is not None


def check_name(path: Path, text: str) -> None:
    """Raise ValueError if Python cannot import the file name, or if it hides a needed module."""
    needed = set(re.findall(r"(?m)^\s*(?:import|from) (\w+)", text)) | {"onejit"}
    is_name = path.stem.isidentifier() and not keyword.iskeyword(path.stem)
    if not is_name or path.stem in sys.stdlib_module_names | needed or is_installed(path.stem):
        raise ValueError(
            f"path = {path}: must have a name that Python can import and that no other module has"
        )


def print_scripts(scripts: dict[str, Path]) -> None:
    rows = []
    for name, path in scripts.items():
        rows.append([name, summary(path.read_text(encoding="utf-8"))])
    print(align(rows))


def main(
    script: tyro.conf.Positional[str] = "",
    path: tyro.conf.Positional[Path | None] = None,
    list: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> Path | None:
    """Copy a script. Returns the path of the copy. Raises ValueError.

    Args:
        script: name of the script to start from, such as ppo_continuous
        path: new file, or folder for it; my_SCRIPT.py by default
        list: list the scripts to start from
    """
    known = known_scripts()
    if list:
        print_scripts(known)
        return None
    name = script.removesuffix(".py")
    if name not in known:
        names = ", ".join(known)
        raise ValueError(
            f"script = {script}: is not a script of onejit; "
            f"known scripts are {names}{nearest(name, known)}"
        )
    path = path or Path(f"my_{name}.py")
    if path.is_dir():
        path /= f"my_{name}.py"
    if path.suffix != ".py":
        path = path.with_name(f"{path.name}.py")
    text = known[name].read_text(encoding="utf-8")
    check_name(path, text)
    if path.exists():
        raise ValueError(f"path = {path}: already exists")
    write(path, renamed(text, name, path.stem))
    commands = f"`python {path}`, `uv run {path}` or `onejit train {path}`"
    print(f"{path} is a copy of {name}.py. Train it with {commands}.")
    return path
