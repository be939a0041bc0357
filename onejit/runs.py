"""Scripts and run directories: writing and reading.

A run directory holds what a script's `save_results` writes: `config.yaml`, `metrics.npz`, `learning_curve.png` and
`agent.safetensors`. `onejit train` adds a copy of the script, `run.json`, evaluations and checkpoints.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import filelock
import numpy as np
import tyro
import yaml
from flax.traverse_util import unflatten_dict
from safetensors import safe_open

from onejit import command_line

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
CONTRACT = ["Config", "make_learner", "make_train", "make_policy", "report", "make_env", "main"]
OF_MAIN = [
    "mean_return",
    "read_flags",
    "save_results",
]  # what this package uses from the block `main`
OF_THE_TASK = ("env_name", "env_params")
PACKAGES = {
    "brax",
    "craftax",
    "distrax",
    "envpool",
    "flax",
    "gymnasium",
    "gymnax",
    "jax",
    "jaxlib",
    "jaxmarl",
}
PACKAGES |= {
    "jumanji",
    "mctx",
    "mujoco",
    "navix",
    "numpy",
    "optax",
    "pgx",
    "playground",
}  # runs record their versions

# --- scripts ---


def known_scripts() -> dict[str, Path]:
    """The scripts that come with onejit, by name, in the checkout or in the installed package."""
    found = list(PACKAGE.glob("scripts/*.py")) or [
        ROOT / f"{path.name}.py" for path in ROOT.glob("configs/*")
    ]
    return {path.stem: path for path in sorted(found)}


def load_script(name):
    """Import a script. `ppo` and `ppo.py` are files in the working directory or in onejit. Raises ValueError.

    For `env_name: MODULE:NAME`, the script's folder and the working directory are added to `sys.path`.
    """
    file, known = Path(name if str(name).endswith(".py") else f"{name}.py"), known_scripts()
    path = (
        file.resolve()
        if file.is_file()
        else known.get(file.stem)
        if file.name == str(file)
        else None
    )
    if path is None:
        near = command_line.nearest(name, known)
        raise ValueError(
            f"script = {name}: no such file; scripts here are {', '.join(known)}{near}"
        )
    sys.path[:0] = [each for each in (str(path.parent), os.getcwd()) if each not in sys.path]
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    own_name = (
        f"script_{path.stem}_{place}"  # json.py would hide a module; two scripts may share a name
    )
    loaded = (each for each in map(sys.modules.get, (path.stem, own_name)) if each is not None)
    module = next(
        (each for each in loaded if Path(getattr(each, "__file__", None) or "").resolve() == path),
        None,
    )
    if module is None:
        spec = importlib.util.spec_from_file_location(own_name, path)
        module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
        module.SOURCE = (
            path.read_bytes()
        )  # what is executed; a user may edit the file while a run compiles
        try:
            exec(spec.loader.source_to_code(module.SOURCE, path), vars(module))
        except Exception as error:  # of any kind: it is the user's file
            del sys.modules[own_name]
            raise ValueError(
                f"script = {name}: cannot be imported ({type(error).__name__}: {error})"
            ) from error
    if missing := [each for each in CONTRACT + OF_MAIN if not hasattr(module, each)]:
        sys.modules.pop(own_name, None)
        raise ValueError(
            f"script = {name}: is not a training script, it has no {', '.join(missing)}"
        )
    return module


def plain(config) -> dict:
    """A config as a dict for YAML and JSON."""
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in vars(config).items()
    }


def read_config(script, file: Path):
    """Read config.yaml as the script reads it. Raises ValueError."""
    try:
        marked = tyro.conf.FlagConversionOff[script.Config]
        return command_line.parse(marked, command_line.read_flags(script, ["--config", str(file)]))
    except ValueError as error:
        raise ValueError(f"{file}: is not a config of {script.__file__}: {error}") from error


# --- writing ---


def write(path: Path, content) -> None:
    """Write a file completely or not at all. Raises OSError, which names the file.

    `content` is a string, or a function that writes to a binary file.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            content(file) if callable(content) else file.write(content.encode())
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror or error})") from error


def versions() -> dict:
    found = {
        each.name: each.version
        for each in importlib.metadata.distributions()
        if each.name in PACKAGES
    }
    return {"python": sys.version.split()[0], **dict(sorted(found.items()))}


def steps_of(config) -> int:
    """Environment steps of one agent in one update."""
    return config.num_envs * config.num_steps


def total_steps(config, num_seeds: int) -> int:
    """Environment steps of a whole run. In evolve_objective `total_timesteps` is of one inner training."""
    return num_seeds * config.num_updates * steps_of(config)


def now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def make_record(script, config, options, command: list[str]) -> dict:
    """The contents of run.json when a run begins: settings, command, script, device, versions, commit."""
    import jax

    path = Path(script.__file__).resolve()
    return {
        "settings": {"script": path.stem, "num_seeds": options.num_seeds, "seed": options.seed}
        | plain(config),
        "command": shlex.join(["onejit", *command]),
        "started": now(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "versions": versions(),
        "commit": git(
            path, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
        ).strip(),  # not a tag
        "path": str(path),
        "sha256": hashlib.sha256(getattr(script, "SOURCE", None) or path.read_bytes()).hexdigest(),
        "folders": [str(path.parent), os.getcwd()],  # where the script may import modules from
        "seconds": {"compile": 0.0, "train": 0.0, "evaluate": 0.0},
        "steps_done": 0,
        "steps_total": total_steps(config, options.num_seeds),
    }


def git(path: Path, *words) -> str:
    """The output of git in the folder of a file; empty without git or a repository."""
    command = ["git", "-C", path.parent, *words]
    return (
        subprocess.run(command, capture_output=True, text=True).stdout
        if shutil.which("git")
        else ""
    )


def check_new(run_dir: Path) -> None:
    """Raise ValueError if a run directory exists: no run is overwritten."""
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise ValueError(f"run_dir = {run_dir}: already exists; --resume {run_dir} continues a run")


def write_config(path: Path, config) -> None:
    write(path, yaml.safe_dump(plain(config), sort_keys=False))


def write_record(run_dir: Path, record: dict) -> None:
    write(run_dir / "run.json", json.dumps(record, indent=2))


def begin_run(run_dir: Path, config, record: dict, script) -> None:
    """Make the run directory with config.yaml, run.json and the script, completely or not at all. Raises ValueError.

    `script.diff` holds the changes of the script since the commit in run.json, unless it was edited meanwhile.
    """
    check_new(run_dir)
    temporary, path = run_dir.with_name(run_dir.name + ".partial"), Path(script.__file__)
    source = getattr(script, "SOURCE", None) or path.read_bytes()
    try:
        write_config(temporary / "config.yaml", config)
        write_record(temporary, record)
        write(temporary / path.name, lambda file: file.write(source))
        if path.read_bytes() == source and (diff := git(path, "diff", "HEAD", "--", path)):
            write(temporary / "script.diff", diff)
        temporary.replace(run_dir)
    except OSError as error:
        raise ValueError(f"run_dir = {run_dir}: cannot be made ({error})") from error


def lock(run_dir: Path):
    """Lock a run directory against other processes, for as long as the result lives. Raises ValueError."""
    held = filelock.FileLock(Path(run_dir) / ".lock")
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(f"{run_dir}: another process is writing into this run") from None
    except OSError as error:
        raise ValueError(f"{run_dir}: cannot be locked ({error})") from error
    return held


def is_locked(run_dir: Path) -> bool:
    """Whether a process is writing into a run directory. Changes nothing."""
    path = Path(run_dir) / ".lock"
    if not path.is_file():  # trying the lock would make the file
        return False
    try:
        with filelock.FileLock(path).acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # the directory is read-only
        return False


# --- reading ---


@contextlib.contextmanager
def reading(path: Path):
    """Raise ValueError if a file of a run is missing or damaged."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: does not exist; it is written when a run ends") from None
    except Exception as error:  # many kinds: of JSON, YAML, NumPy, safetensors and their content
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def read_record(run_dir) -> dict:
    """Read run.json. `settings` are the config, script, num_seeds and seed. Raises ValueError.

    A script's own `main` writes no run.json. The record of its run has `settings` alone, from other files.
    """
    record, agents, config = (
        Path(run_dir) / name for name in ("run.json", "agent.safetensors", "config.yaml")
    )
    if record.is_file():
        with reading(record):
            found = json.loads(record.read_text())
            names = ["script", "num_seeds", "seed", *found["settings"]]
            return found | {"settings": {name: found["settings"][name] for name in names}}
    if not agents.is_file():
        raise ValueError(
            f"{run_dir}: is not a run directory; it has neither run.json nor agent.safetensors"
        )
    arrays, metadata = read_agents(agents)
    with reading(config):
        settings = {"script": metadata["script"], "num_seeds": len(next(iter(arrays.values())))}
        return {
            "settings": settings
            | {"seed": int(metadata["seed"])}
            | yaml.safe_load(config.read_text())
        }


def copy_of_script(run_dir, record: dict, force: bool = False) -> Path | None:
    """The copy of the script in the run directory, or None. Raises ValueError if it was edited, unless `force`."""
    copy = Path(run_dir, f"{record['settings']['script']}.py")
    if not copy.is_file():
        return None
    if not force and hashlib.sha256(copy.read_bytes()).hexdigest() != record.get("sha256"):
        raise ValueError(
            f"{copy}: has been edited since the run began; --force uses the edited script"
        )
    return copy


def script_of(run_dir, record: dict, force: bool = False):
    """Import a run's script, from its copy in the run directory. Raises ValueError if it was edited, unless `force`.

    A script's own `main` leaves no copy. Then the file of that name in the working directory or in onejit is used, and
    a message says this.
    """
    copy = copy_of_script(run_dir, record, force)
    if copy is None:
        script = load_script(record["settings"]["script"])
        print(f"{run_dir} has no copy of its script; {script.__file__} is used instead")
        return script
    known = [
        each for each in record.get("folders", []) if Path(each).is_dir() and each not in sys.path
    ]
    sys.path[:0] = known
    return load_script(copy)


def read_agents(path: Path) -> tuple[dict, dict]:
    """Arrays [num_seeds, ...] by dotted names, and the metadata "script" and "seed". Raises ValueError."""
    with reading(path), safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def load_run(run_dir, force: bool = False, file: str = "agent.safetensors"):
    """`(script, config, agents)` of a finished run of a script or of `onejit train`. Raises ValueError.

    `agents` has NumPy leaves [num_seeds, ...]. The `act` of `make_policy` takes one of these agents.
    """
    record = read_record(run_dir)
    if "words" in record:
        raise ValueError(
            f"{run_dir}: is a sweep; its best trials are runs, in {Path(run_dir) / 'agents'}"
        )
    arrays, _ = read_agents(Path(run_dir) / file)
    script = script_of(run_dir, record, force)
    return (
        script,
        read_config(script, Path(run_dir) / "config.yaml"),
        unflatten_dict(arrays, sep="."),
    )


def task_of(settings: dict) -> str:
    """The environment and its changed parameters."""
    params = settings.get("env_params", {})  # the GridWorld has none
    return " ".join(
        [settings["env_name"], *(f"{name}={value}" for name, value in sorted(params.items()))]
    )


def load_metrics(run_dir) -> dict:
    """`{name: [num_seeds, updates]}`, and `evaluation` [num_seeds, episodes] if there is one. Raises ValueError."""
    path, evaluation = Path(run_dir) / "metrics.npz", Path(run_dir) / "evaluation.npy"
    with reading(path), np.load(path) as stored:
        metrics = dict(stored)
    with reading(evaluation):
        return metrics | ({"evaluation": np.load(evaluation)} if evaluation.exists() else {})
