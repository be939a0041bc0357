"""What the tools share: the script of a name, the record of a run, results written whole, errors in one line."""

import difflib
import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ["Config", "check", "make_env", "make_learner", "make_train", "make_rollout", "report", "main"]
# Some names of the blocks that all scripts share, which a copy from before may lack.
BLOCKS = ["parse", "open_run_dir", "write_results", "use_all_cores", "compile_training"]


def nearest(name, known) -> str:
    """'; did you mean ...?', or nothing where no known name is close."""
    found = difflib.get_close_matches(str(name), list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def load_script(name: str):
    """The module of a script: `ppo` and `ppo.py` are those of the repository, anything else is a path.

    A file in the working directory comes before one of the repository. Raises ValueError.
    """
    file = name if name.endswith(".py") else f"{name}.py"
    path = next((each.resolve() for each in (Path(file), ROOT / file) if each.is_file()), None)
    if path is None:
        known = sorted(each.stem for each in ROOT.glob("*.py"))
        raise ValueError(f"script = {name}: no such file; scripts here are {', '.join(known)}{nearest(name, known)}")
    own_name = f"script_{path.stem}"  # so that a script called json.py does no harm
    loaded = (each for each in map(sys.modules.get, (path.stem, own_name)) if each is not None)
    module = next((each for each in loaded if Path(getattr(each, "__file__", None) or "").resolve() == path), None)
    if module is None:
        spec = importlib.util.spec_from_file_location(own_name, path)
        module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever somebody's file does
            del sys.modules[own_name]
            raise ValueError(f"script = {name}: cannot be imported ({type(error).__name__}: {error})") from error
    for names, problem in ((CONTRACT, "is not a training script"), (BLOCKS, "its blocks are not those of these tools")):
        if missing := [each for each in names if not hasattr(module, each)]:
            sys.modules.pop(own_name, None)
            raise ValueError(f"script = {name}: {problem}, it has no {', '.join(missing)}")
    return module


def read_record(run_dir: Path) -> dict:
    """What run.json of a run directory says; `settings` is in it. Raises ValueError."""
    path = run_dir / "run.json"
    try:
        record = json.loads(path.read_text())
        settings = record["settings"]
        return record | {"settings": {name: settings[name] for name in ["script", "env_name", "num_seeds", *settings]}}
    except FileNotFoundError:
        raise ValueError(f"{run_dir}: is not a run directory, it has no run.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def write(path: Path, content) -> None:
    """Write a file whole or not at all; `content` is a string, or a function that writes to a binary file.

    Raises ValueError where it cannot be written.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            content(file) if callable(content) else file.write(content.encode())
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from error


def run_tool(tool, args=None):
    """Call `tool(args)`; a ValueError, which is the user's mistake, becomes one line on stderr and exit code 2."""
    try:
        return tool(args)
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
