"""run.json: what a run is, and how far it has come."""

import datetime
import hashlib
import json
import math
import os
import shlex
from pathlib import Path

import numpy as np
import yaml

from onejit.base.cores import number_of_cores
from onejit.base.files import reading, write
from onejit.base.packages import versions
from onejit.base.text import plural
from onejit.run.agents import read_agents
from onejit.script.configs import plain
from onejit.script.load import git, source_of
from onejit.script.steps import total_steps


def now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


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
