"""Run directories: the record and the lock of a run, and reading what a run has written.

A run directory holds `config.yaml`, `metrics.npz`, `learning_curve.png` and `agent.safetensors`.
`onejit train` adds a copy of the script, `run.json`, evaluations and checkpoints.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import shlex
import shutil
from pathlib import Path

import filelock
import numpy as np
import tyro
import yaml
from flax.traverse_util import unflatten_dict
from safetensors import safe_open

from onejit import command_line, local_modules
from onejit.configs import plain, read_flags, write_config
from onejit.cores import number_of_cores
from onejit.files import reading, write
from onejit.packages import versions
from onejit.scripts import find_script, git, import_from, known_scripts, load_script, source_of
from onejit.text import plural

OF_THE_TASK = ("env_name", "env_params")


def steps_of(config) -> int:
    """Environment steps of one agent in one update."""
    return config.num_envs * config.num_steps


def total_steps(config, num_seeds: int) -> int:
    """Environment steps of a whole run, without the warm-up."""
    return num_seeds * config.num_updates * steps_of(config)


def timesteps_until(config, num_updates: int) -> int:
    """Environment steps of one agent until so many updates have ended, warm-up included."""
    return getattr(config, "warmup_timesteps", 0) + num_updates * steps_of(config)


def env_name_of(config) -> str:
    return getattr(config, "env_name", "")


def task_of(settings: dict) -> str:
    """The environment and its changed parameters."""
    params = settings.get("env_params", {})  # the GridWorld has none
    changes = [f"{name}={value}" for name, value in sorted(params.items())]
    return " ".join([settings["env_name"], *changes])


def now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


# --- writing ---


def make_record(kind: str, script, config, options, command: list[str]) -> dict:
    """The contents of run.json when a run begins. `kind` is "train" or "sweep"."""
    import jax

    path = Path(script.__file__).resolve()
    settings = {"script": path.stem, "num_seeds": options.num_seeds, "seed": options.seed}
    cores = plural(number_of_cores(), "CPU core")
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {cores}"
    commit = git(path, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")  # no tag
    return {
        "kind": kind,
        "settings": settings | plain(config),
        "command": shlex.join(["onejit", *command]),
        "started": now(),
        "device": device,
        "versions": versions(),
        "random_keys": jax.config.jax_default_prng_impl,  # pyright: ignore[reportAttributeAccessIssue]
        "commit": commit.strip(),
        "path": str(path),
        "sha256": hashlib.sha256(source_of(script)).hexdigest(),
        "folders": [str(path.parent), os.getcwd()],  # where the script may import modules from
        "seconds": {"compile": 0.0, "train": 0.0, "evaluate": 0.0},
        "steps_done": 0,
        "steps_total": total_steps(config, options.num_seeds),
    }


def check_random_numbers(record: dict) -> None:
    """Raise ValueError if JAX's kind of random keys is another than when the run began."""
    import jax

    now = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    before = record.get("random_keys", now)  # a run of a script's own `main` does not say it
    if before != now:
        raise ValueError(
            f"resume: the run has keys of kind {before}, and this process {now}; "
            f"set JAX_DEFAULT_PRNG_IMPL={before}"
        )


def kind_of(record: dict) -> str:
    """Who made a run: "train", "sweep", "trial" for an agent that a sweep kept, or "script"."""
    return record.get("kind", "script")


def as_json(tree):
    """The tree with "inf" for infinity and "nan" for NaN, which JSON lacks."""
    if isinstance(tree, dict):
        return {name: as_json(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_json(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return tree


def write_record(run_dir: Path, record: dict) -> None:
    write(run_dir / "run.json", json.dumps(as_json(record), indent=2, allow_nan=False))


def write_inputs(run_dir: Path, config, script, modules: dict[str, bytes]) -> None:
    """Write config.yaml, the script and the user's modules. Raises OSError.

    `script.diff` holds the changes of the script since the commit in run.json, unless it was edited
    meanwhile. `modules` comes from `local_modules.read_sources`.
    """
    path = Path(script.__file__)
    source = source_of(script)
    diff = git(path, "diff", "HEAD", "--", path) if path.read_bytes() == source else ""
    write_config(run_dir / "config.yaml", config)
    write(run_dir / path.name, lambda file: file.write(source))
    local_modules.write_copies(run_dir, modules)
    if diff:
        write(run_dir / "script.diff", diff)


def begin_run(run_dir: Path, config, record: dict, script, modules: dict[str, bytes]) -> None:
    """Write all that a run needs to be resumed; run.json is the last file. Raises OSError."""
    write_inputs(run_dir, config, script, modules)
    write_record(run_dir, record)


# --- the lock ---


def check_new(run_dir: Path) -> None:
    """Raise ValueError if a run directory holds anything but a lock: no run is overwritten."""
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= {".lock"}:
        return
    if run_dir.exists():
        raise ValueError(f"run_dir = {run_dir}: already exists; --resume {run_dir} continues a run")


def claim(run_dir: Path):
    """Make a new run directory and lock it for as long as the result lives. Raises ValueError.

    An empty directory is taken as it is: it may be a volume or a link.
    """
    check_new(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir = {run_dir}: cannot be made ({error})") from error
    held = lock(run_dir)
    check_new(run_dir)  # another process may have had it until now
    return held


def remove(run_dir: Path) -> None:
    """Remove a run directory in which nothing was begun. A volume or a link stays, empty."""
    for path in run_dir.glob("*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def lock(run_dir: Path):
    """Lock a run directory for as long as the result lives. Raises ValueError."""
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


def read_record(run_dir) -> dict:
    """Read run.json. `settings` are the config, script, num_seeds and seed. Raises ValueError.

    A script's own `main` writes no run.json. The record of its run has `settings` alone, from other
    files.
    """
    run_dir = Path(run_dir)
    file = run_dir / "run.json"
    if not file.is_file():
        return record_of_main(run_dir)
    with reading(file):
        record = json.loads(file.read_text())
        stored = record["settings"]
        names = ["script", "num_seeds", "seed", *stored]
        return record | {"settings": {name: stored[name] for name in names}}


def record_of_main(run_dir: Path) -> dict:
    """The record of a run of a script's own `main`. Raises ValueError."""
    agents = run_dir / "agent.safetensors"
    if not agents.is_file():
        raise ValueError(
            f"{run_dir}: is not a run directory; it has neither run.json nor agent.safetensors"
        )
    arrays, metadata = read_agents(agents)
    config = run_dir / "config.yaml"
    with reading(config):
        settings = {
            "script": metadata["script"],
            "num_seeds": len(next(iter(arrays.values()))),
            "seed": int(metadata["seed"]),
        }
        return {"settings": as_json(settings | yaml.safe_load(config.read_text()))}


def planned_updates(settings: dict) -> int | None:
    """The updates that a script's config asks for, from its fields alone. None if they do not say.

    Steps are counted as onejit's scripts count them, whose code is not executed here.
    """
    if "num_generations" in settings:
        return settings["num_generations"]
    if "num_steps" not in settings or "total_timesteps" not in settings:
        return None
    num_envs = settings.get("num_envs", 1)
    steps = num_envs * settings["num_steps"]
    warmup = math.ceil(settings.get("learning_starts", 0) / steps) * steps
    warmup += num_envs * (settings.get("n_step", 1) - 1)
    return int(settings["total_timesteps"] - warmup) // steps


def is_of_main(run_dir) -> bool:
    """Whether a script's own `main` has written a run; it writes no run.json."""
    return not Path(run_dir, "run.json").is_file()


def share_of_main(run_dir, settings: dict) -> float:
    """The share of its updates that a script's own `main` has done before it was stopped.

    Raises ValueError.
    """
    planned = planned_updates(settings)
    path = Path(run_dir) / "metrics.npz"
    with reading(path), np.load(path) as stored:
        done = stored["episodes"].shape[1]
    if planned is None or done >= planned - 1:  # dqn.py warms up for at least one update
        return 1.0
    return done / planned


def read_config(script, file: Path):
    """Read config.yaml as the script's command line does. Raises ValueError."""
    try:
        words = read_flags(script, ["--config", str(file)])
        return command_line.parse(tyro.conf.FlagConversionOff[script.Config], words)
    except ValueError as error:
        raise ValueError(f"{file}: is not a config of {script.__file__}: {error}") from error


def copy_of_script(run_dir, record: dict, force: bool = False) -> Path | None:
    """The copy of the script in the run directory, or None.

    Raises ValueError if it was edited, unless `force`.
    """
    name = str(record["settings"]["script"])
    copy = Path(run_dir, f"{name}.py")
    is_bare = Path(name).name == name  # no path to another folder
    if not is_bare or not local_modules.is_inside(copy, run_dir):
        return None
    if not force and hashlib.sha256(copy.read_bytes()).hexdigest() != record.get("sha256"):
        raise ValueError(
            f"{copy}: has been edited since the run began; --force uses the edited script"
        )
    return copy


def find_other_script(run_dir, record: dict, force: bool, trust: bool) -> Path:
    """The script of a run directory that has no copy of it, as a script's own `main` leaves it.

    It is onejit's script of this name. With `trust` it may be any other file. Raises ValueError,
    also if run.json has the hash of another version, unless `force`.
    """
    name = str(record["settings"]["script"])
    if name in known_scripts() and not trust:
        path = known_scripts()[name]
    else:
        path = find_script(name)
        local_modules.check_trust(run_dir, f"its script, {path}", trust)
    expected = record.get("sha256")
    if expected and not force and local_modules.hash_of(path.read_bytes()) != expected:
        raise ValueError(
            f"{run_dir}: the copy of its script is missing, and {path} is another version of it; "
            "--force uses that version"
        )
    return path


def script_of(run_dir, record: dict, force: bool = False, trust: bool = False):
    """Import a run's script and the user's own modules, from their copies in the run directory.

    If there is no copy of the script, a message names the script that is used instead. `force`
    accepts copies that were edited since the run began, and another version of a script. `trust`
    executes files outside of the run directory. Raises ValueError.
    """
    local_modules.import_copies(run_dir, record, force)
    copy = copy_of_script(run_dir, record, force)
    if copy is None:
        path = find_other_script(run_dir, record, force, trust)
        print(f"{run_dir} has no copy of its script; {path} is used instead")
        return load_script(path)
    if trust:
        import_from(*[folder for folder in record.get("folders", []) if Path(folder).is_dir()])
    return load_script(copy)


def read_agents(path: Path) -> tuple[dict, dict]:
    """Arrays [num_seeds, ...] by dotted names, and the metadata "script" and "seed".

    Raises ValueError.
    """
    with reading(path), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
        if "run" in metadata:  # versions before 0.3.0 have the entries "script" and "seed"
            stored = yaml.safe_load(metadata["run"])
            metadata = {name: str(value) for name, value in stored.items()}
        return arrays, metadata


def load_run(run_dir, force: bool = False, file: str = "agent.safetensors", trust: bool = False):
    """`(script, config, agents)` of a finished run of a script or of `onejit train`.

    `script` is a module, and `agents` has NumPy leaves [num_seeds, ...]. The `act` of
    `script.make_policy(config)` takes one of these agents. `file` is the file of agents in the run
    directory.

    Executes the copy of the script in the run directory. `force` accepts a copy that was edited
    since the run began, and `trust` executes files outside of the run directory. Raises ValueError.
    """
    record = read_record(run_dir)
    if kind_of(record) == "sweep":
        raise ValueError(
            f"{run_dir}: is a sweep; its best trials are runs, in {Path(run_dir) / 'agents'}"
        )
    arrays, _ = read_agents(Path(run_dir) / file)
    script = script_of(run_dir, record, force, trust)
    config = read_config(script, Path(run_dir) / "config.yaml")
    local_modules.check_environment(run_dir, record, env_name_of(config), trust)
    return script, config, unflatten_dict(arrays, sep=".")


def load_metrics(run_dir) -> dict:
    """`{name: [num_seeds, updates]}`, and `evaluation` [num_seeds, episodes] if there is one.

    Raises ValueError.
    """
    path = Path(run_dir) / "metrics.npz"
    with reading(path), np.load(path) as stored:
        metrics = dict(stored)
    evaluation = Path(run_dir) / "evaluation.npy"
    if evaluation.exists():
        with reading(evaluation):
            metrics["evaluation"] = np.load(evaluation)
    return metrics
