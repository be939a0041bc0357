"""The user's own modules that a run imports: of its environments, and what these import.

A run directory keeps copies of them in the folder `modules`, and run.json has their hashes.
Installed packages are no such modules: run.json has the versions of some.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path

from onejit.script.contract import Script
from onejit.script.load import PACKAGE, import_from, known_scripts, source_of

FOLDER = "modules"


def module_of(env_name: str) -> str:
    """The module in `MODULE:NAME`, or an empty string."""
    return env_name.rpartition(":")[0]


def path_of(module) -> str:
    """Where a copy of a module lies below a folder that modules are imported from."""
    parts = module.__name__.split(".")
    if not hasattr(module, "__path__"):
        parts.pop()
    return Path(*parts, Path(module.__file__).name).as_posix()


def name_of(path: str) -> str:
    """The module whose copy lies at a path: "mine.py", "mine/__init__.py", "mine/part.py"."""
    parts = [*Path(path).parent.parts, Path(path).name.split(".")[0]]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def hash_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


# --- when a run begins ---


def source_of_module(module) -> bytes:
    """The file of a module as it was at the first call: a user may edit it while a run compiles."""
    if not hasattr(module, "__onejit_source__"):
        module.__onejit_source__ = Path(module.__file__).read_bytes()
    return module.__onejit_source__


def imported_names(source: bytes, package: str) -> list[str]:
    """The modules that a file may import, and packages that they are in.

    Some of the names are functions and classes of the modules. Names that a file computes, for
    `importlib.import_module`, are not found.
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            try:
                module = importlib.util.resolve_name(relative, package)
            except ImportError:  # a file without a package cannot import it
                continue
            names.append(module)
            names += [f"{module}.{alias.name}" for alias in node.names]
    return [parent for name in names for parent in with_packages(name)]


def with_packages(name: str) -> list[str]:
    """["a", "a.b", "a.b.c"] of "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def read_sources(script: Script, env_names) -> dict[str, bytes]:
    """`{path: source}` of the user's own modules that a script and its environments import.

    Imports the modules of the environments, `MODULE:NAME`, and raises what this raises.
    """
    waiting = imported_names(source_of(script), package="")
    for env_name in env_names:
        module = module_of(env_name)
        if module:
            importlib.import_module(module)
            waiting += with_packages(module)
    sources = {}
    seen = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in seen or file is None or not is_of_the_user(file):
            continue
        seen.add(name)
        source = source_of_module(module)
        sources[path_of(module)] = source
        if file.endswith(".py"):
            is_package = hasattr(module, "__path__")
            waiting += imported_names(source, name if is_package else name.rpartition(".")[0])
    return sources


def write_copies(run_dir: Path, sources: dict[str, bytes]) -> None:
    """Raises OSError."""
    for path, source in sources.items():
        copy = run_dir / FOLDER / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source)


# --- of a run that has begun ---


def read_copies(run_dir, record) -> dict[str, bytes]:
    """`{path: source}` of the copies of a run."""
    sources = {}
    for path in record.modules:
        copy = Path(run_dir, FOLDER, path)
        if copy.is_file():
            sources[path] = copy.read_bytes()
    return sources


def edited_copies(run_dir, record) -> list[Path]:
    """The copies that were edited or removed since the run began."""
    sources = read_copies(run_dir, record)
    return [
        Path(run_dir, FOLDER, path)
        for path, expected in record.modules.items()
        if path not in sources or hash_of(sources[path]) != expected
    ]


def import_copies(run_dir, record) -> None:
    """Import the copies of a run's modules, so that no other files of their names are imported.

    Raises ValueError if this process has imported another file of a name.
    """
    folder = Path(run_dir, FOLDER).absolute()
    sources = read_copies(run_dir, record)
    if sources:
        import_from(str(folder))
    for path, source in sources.items():
        name = name_of(path)
        module = sys.modules.get(name) or importlib.import_module(name)
        if source_of_module(module) != source:
            raise ValueError(
                f"{folder / path}: this process has imported another module {name}, "
                f"{module.__file__}; use a new process"
            )


STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()


@functools.cache
def installed_in(folder: Path) -> set[str]:
    """What pip has put into a folder, as `pip install --target FOLDER` does: packages, modules."""
    records = folder.glob("*.dist-info/RECORD")
    lines = [line for record in records for line in record.read_text().splitlines()]
    return {line.partition(",")[0].partition("/")[0] for line in lines}


def is_of_the_user(file: str) -> bool:
    """Whether a file of a traceback belongs to neither Python, nor a package, nor onejit."""
    if file.startswith("<"):  # such as <string>
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"}.intersection(path.parts):
        return False
    if any(path.relative_to(folder).parts[0] in installed_in(folder) for folder in path.parents):
        return False
    if path.is_relative_to(STANDARD_LIBRARY) or path.is_relative_to(PACKAGE):
        return False
    return path not in known_scripts().values()
