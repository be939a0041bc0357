"""What the tools share: finding a script."""

import difflib
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ("Config", "make_learner", "make_train", "make_rollout", "report", "main")


def choose_thread_pool() -> None:
    """Set NPROC as every script's `main` does: a smaller pool can deadlock XLA on CPUs. Before JAX's backend starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("NPROC", str(max(4, cores)))


def load_script(name: str):
    """The module of a script: `ppo` or `ppo.py` of this repository, or the path of a file. Raises ValueError."""
    path = Path(name)
    if not path.is_file() and path.name == name:
        path = ROOT / f"{path.stem}.py"
    if not path.is_file():
        known = sorted(file.stem for file in ROOT.glob("*.py"))
        found = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {found[0]}?" if found else f"known are {', '.join(known)}, or a path"
        raise ValueError(f"SCRIPT = {name}: no such script; {hint}")
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path.resolve())
    if spec is None:
        raise ValueError(f"SCRIPT = {name}: is not a Python file")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    try:
        spec.loader.exec_module(script)
    except Exception as error:  # of somebody's file: anything
        raise ValueError(f"SCRIPT = {name}: cannot be imported ({type(error).__name__}: {error})") from error
    if missing := [each for each in CONTRACT if not hasattr(script, each)]:
        raise ValueError(f"SCRIPT = {name}: is not a training script, it has no {', '.join(missing)}")
    return script
