"""Scripts: finding and importing them. docs/python.md says what a script defines."""

import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

from onejit.base.signals import raising_interrupts
from onejit.base.text import nearest
from onejit.script import contract
from onejit.script.contract import Script

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent


def known_scripts() -> dict[str, Path]:
    """The scripts that come with onejit, by name, in the checkout or in the installed package."""
    paths = list(PACKAGE.glob("scripts/*.py"))
    if not paths:
        paths = [ROOT / f"{folder.name}.py" for folder in ROOT.glob("configs/*")]
    return {path.stem: path for path in sorted(paths)}


def find_script(name) -> Path:
    """The file of a script: in the working directory, or one of onejit's. Raises ValueError."""
    file = Path(name if str(name).endswith(".py") else f"{name}.py")
    if file.is_file():
        return file.resolve()
    known = known_scripts()
    if file.name == str(file) and file.stem in known:
        return known[file.stem]
    names = ", ".join(known)
    raise ValueError(
        f"script = {name}: no such file; scripts here are {names}{nearest(name, known)}"
    )


def import_from(*folders) -> None:
    """Let scripts import modules from these folders, too."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def module_name(path: Path) -> str:
    """A name of its own: json.py would hide a module, and two scripts may share a name."""
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"script_{path.stem}_{place}"


def loaded_module(path: Path):
    """The module of a script that has been imported, or None."""
    for name in (path.stem, module_name(path)):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).resolve() == path:
            return module
    return None


def load_script(name) -> Script:
    """Import a script, such as `ppo`, `ppo.py` or `path/to/mine.py`.

    For `env_name: MODULE:NAME`, the script's folder and the working directory are added to
    `sys.path`. Raises ValueError if it is no script, and whatever the user's own file raises.
    """
    path = find_script(name)
    import_from(str(path.parent), os.getcwd())
    module = loaded_module(path)
    if module is None:
        module = execute(path, name)
    missing = [part for part in contract.NAMES if not hasattr(module, part)]
    if missing:
        sys.modules.pop(module_name(path), None)
        raise ValueError(
            f"script = {name}: is not a training script, it has no {', '.join(missing)}"
        )
    if not dataclasses.is_dataclass(module.Config):
        sys.modules.pop(module_name(path), None)
        raise ValueError(f"script = {name}: its Config must be a dataclass")
    return cast(Script, module)


def execute(path: Path, name):
    """Import a file. An exception of the user's own file keeps its traceback."""
    own_name = module_name(path)
    loader = importlib.machinery.SourceFileLoader(own_name, str(path))
    spec = importlib.util.spec_from_file_location(own_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module
    # what is executed; a user may edit the file while a run compiles
    vars(module)["SOURCE"] = source = path.read_bytes()
    try:
        with raising_interrupts():
            exec(loader.source_to_code(source, path), vars(module))
    except BaseException as error:
        del sys.modules[own_name]
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        if path not in known_scripts().values():
            error.add_note(f"script = {name}: cannot be imported")
            raise
        cause = f"{type(error).__name__}: {error}"  # such as a package that is missing
        raise ValueError(f"script = {name}: cannot be imported ({cause})") from error
    if hasattr(module, "make_env") and b"registered_envs" not in source:
        from onejit.envs.adapter import with_short_names  # starts JAX, as the script did

        vars(module)["make_env"] = with_short_names(module.make_env)
    return module


def source_of(script: Script) -> bytes:
    """The text of a script as it was imported."""
    source = getattr(script, "SOURCE", None)
    return source or Path(script.__file__).read_bytes()


def git(path: Path, *words) -> bytes:
    """The output of git in the folder of a file; empty without git or a repository."""
    if not shutil.which("git"):
        return b""
    command = ["git", "-C", path.parent, *words]
    done = subprocess.run(command, capture_output=True)
    if b"dubious ownership" in done.stderr:
        note = "git trusts no repository of another user; the commit is not recorded"
        print(f"onejit: note: {path.parent}: {note}", file=sys.stderr)
    return done.stdout


def commit_of(path: Path) -> str:
    """The commit of the repository of a file, which tags do not rename; empty without one."""
    words = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return git(path, *words).decode().strip()
