"""run.json: what a run is, and how far it has come."""

import dataclasses
import datetime
import json
import math
import os
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onejit.base.cores import number_of_cores
from onejit.base.files import load_yaml, reading, write
from onejit.base.packages import versions
from onejit.base.text import plural
from onejit.run.agents import read_agents
from onejit.script.configs import plain
from onejit.script.contract import Script
from onejit.script.load import commit_of, source_of
from onejit.script.local_modules import hash_of
from onejit.script.steps import total_steps

Kind = Literal["train", "sweep", "trial", "script"]
SPELLED = {"final_return": "final return", "greedy_return": "greedy return"}  # in run.json
NOT_KEPT = ("num_seeds", "seed", "run_dir")  # the options that `options` leaves out


@dataclasses.dataclass
class Record:
    """run.json: what a run is, and how far it has come.

    What a kind of run does not have is empty here, and not written.
    """

    settings: dict[str, Any]  # the config, script, num_seeds and seed
    # who made it; "trial" are agents that a sweep kept, "script" is a script's own `main`
    kind: Kind = "script"
    command: str | None = None
    started: str | None = None
    device: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    random_keys: str | None = None  # JAX's kind of them
    # what else changes the numbers of a training: {environment variable: value}
    numerics: dict[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    path: str | None = None  # of the script
    sha256: str | None = None
    modules: dict[str, str] = dataclasses.field(default_factory=dict)  # hashes of the user's own
    # of "compile", "train" and "evaluate", over all sessions
    seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    steps_done: int = 0
    steps_total: int = 0
    finished: str | None = None  # the time

    # of `onejit train` and `onejit sweep`
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    # of `onejit train`
    slice: int | None = None  # seeds in a slice
    steps_per_second: float | None = None

    # leaves of the agent that `init` returns with values that are not finite
    not_finite_at_start: list[str] = dataclasses.field(default_factory=list)

    # results of agents
    final_return: dict[str, Any] | None = None
    greedy_return: dict[str, Any] | None = None
    broken_metrics: list[str] = dataclasses.field(default_factory=list)

    # of `onejit sweep`
    # {field: its values or its distribution, as words of the command line}
    swept: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    slices: list[int] = dataclasses.field(default_factory=list)  # their sizes, by program
    owner: str = ""  # of trials in a storage
    numbers: list[int] = dataclasses.field(default_factory=list)  # of the trials in the study
    trials: list[dict] = dataclasses.field(default_factory=list)  # {swept field: value}

    # of a trial
    trial: int | None = None
    rung: int | None = None
    num_updates: int | None = None
    total_updates: int | None = None

    others: dict[str, Any] = dataclasses.field(default_factory=dict)  # of another version

    @classmethod
    def of_stored(cls, stored: dict) -> "Record":
        """The record of what run.json holds."""
        stored = dict(stored)
        settings = stored["settings"]
        names = ["script", "num_seeds", "seed", *settings]
        values: dict[str, Any] = {"settings": {name: settings[name] for name in names}}
        values["seconds"] = defaultdict(float, stored.pop("seconds", {}))
        if "proposed" in stored:  # by Optuna, in version 0.4
            values["trials"] = stored.pop("proposed")
        for field in dataclasses.fields(cls):
            spelled = SPELLED.get(field.name, field.name)
            if spelled in stored and field.name not in ("settings", "others"):
                values[field.name] = stored.pop(spelled)
        del stored["settings"]
        return cls(**values, others=stored)

    def to_store(self) -> dict:
        """What run.json holds."""
        empty = Record(settings={})
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "others" and value != getattr(empty, field.name):
                values[SPELLED.get(field.name, field.name)] = value
        return values | self.others


def now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def numerics() -> dict[str, str]:
    """The settings of JAX and XLA that change the numbers of a training, by their variables."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "").split()
    names = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision")
    values = {name.upper(): str(getattr(jax.config, name)) for name in names}
    of_numbers = [word for word in flags if "device_count" not in word and "dump" not in word]
    return {**values, "XLA_FLAGS": " ".join(sorted(of_numbers))}


def make_record(kind: Kind, script: Script, config, options, command: list[str]) -> Record:
    """The record of a run of `onejit train` or `onejit sweep` that begins."""
    import jax

    path = Path(script.__file__).resolve()
    settings = {"script": path.stem, "num_seeds": options.num_seeds, "seed": options.seed}
    cores = plural(number_of_cores(), "CPU core")
    return Record(
        kind=kind,
        settings=settings | plain(config),
        command=shlex.join(["onejit", *command]),
        started=now(),
        device=f"{jax.device_count()} x {jax.devices()[0].device_kind}, {cores}",
        versions=versions(),
        random_keys=jax.config.jax_default_prng_impl,  # pyright: ignore[reportAttributeAccessIssue]
        numerics=numerics(),
        commit=commit_of(path),
        path=str(path),
        sha256=hash_of(source_of(script)),
        steps_total=total_steps(config, options.num_seeds),
        options={name: value for name, value in vars(options).items() if name not in NOT_KEPT},
    )


def as_json(tree):
    """The tree with "inf" for infinity and "nan" for NaN, which JSON lacks."""
    if isinstance(tree, dict):
        return {name: as_json(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_json(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return tree


def write_record(run_dir: Path, record: Record) -> None:
    text = json.dumps(as_json(record.to_store()), indent=2, allow_nan=False)
    write(run_dir / "run.json", text)


def read_record(run_dir) -> Record:
    """Read run.json. Raises ValueError.

    A script's own `main` writes no run.json. The record of its run has `settings` alone, from other
    files.
    """
    run_dir = Path(run_dir)
    file = run_dir / "run.json"
    if not file.is_file():
        return record_of_main(run_dir)
    with reading(file):
        return Record.of_stored(json.loads(file.read_text()))


def record_of_main(run_dir: Path) -> Record:
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
        settings |= load_yaml(config.read_text())
    # in each agent infinite and in none NaN: it began so, as `main` takes it as well
    infinite = []
    for name, leaf in arrays.items():
        rows = leaf.reshape(len(leaf), -1)
        if np.isinf(rows).any(axis=1).all() and not np.isnan(rows).any():
            infinite.append(name)
    return Record(
        settings={name: as_json(value) for name, value in settings.items()},
        not_finite_at_start=infinite,
    )


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
    total = float(settings["total_timesteps"])  # YAML reads 5e5 as text
    return int(total - warmup) // steps


def updates_to_count(record: Record, metrics: dict) -> int:
    """The updates that a run was meant to have; the last tenth of them is its end."""
    done = metrics["episodes"].shape[1]
    if record.total_updates:  # of a trial that was stopped
        return record.total_updates
    return max(done, planned_updates(record.settings) or 0)


def is_extended(run_dir, record: Record) -> bool:
    """Whether the results are of an earlier end: the run got more steps, and lacks them yet."""
    has_results = Path(run_dir, "agent.safetensors").is_file()
    return record.kind == "train" and record.finished is None and has_results


def share_of_main(run_dir, settings: dict) -> float:
    """The share of its updates that a script's own `main` has done before it was stopped.

    Raises ValueError.
    """
    planned = planned_updates(settings)
    path = Path(run_dir) / "metrics.npz"
    with reading(path), np.load(path) as stored:
        done = stored["episodes"].shape[1]
    if planned is None or done >= planned:
        return 1.0
    return done / planned
