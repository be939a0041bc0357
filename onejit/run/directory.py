"""Run directories: reading what a run has written, and importing its script.

A run directory holds `config.yaml`, `metrics.npz`, `learning_curve.png`, `agent.safetensors` and a
copy of the script. `onejit train` adds `run.json`, evaluations and checkpoints.
"""

import dataclasses
import secrets
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from onejit.base import statistics
from onejit.base.files import reading
from onejit.run.agents import read_agents
from onejit.run.record import Record, is_extended, read_record
from onejit.script import local_modules
from onejit.script.command_line import arguments_of
from onejit.script.configs import values_of_yaml
from onejit.script.contract import Script
from onejit.script.load import known_scripts, load_script


def read_config(script: Script, file: Path):
    """The config of a run. Raises ValueError."""
    kinds = {name: kind for name, kind, _ in arguments_of(script.Config)}
    about = f"{file}: is not a config of {script.__file__}"
    return script.Config(**values_of_yaml(file, kinds, about))


def script_of(run_dir, record: Record, accept_edited: bool = True) -> Script:
    """Import a run's script and the user's own modules, from their copies in the run directory.

    A run without a copy of its script, as older versions left it, takes onejit's own of this name.
    A copy that was edited since the run began is named. Raises ValueError, also for such a copy
    unless `accept_edited`.
    """
    name = Path(str(record.settings["script"])).name
    path = Path(run_dir, f"{name}.py")
    if not path.is_file():
        if name not in known_scripts():
            raise ValueError(f"{path}: does not exist, and onejit has no script of this name")
        path = known_scripts()[name]
        print(f"{run_dir} has no copy of its script; {path} is used instead")
    edited = local_modules.edited_copies(run_dir, record)
    expected = record.sha256  # a script's own `main` records none
    if expected and local_modules.hash_of(path.read_bytes()) != expected:
        edited.append(path)
    for file in edited:
        problem = f"{file}: is not as it was when the run began"
        if not accept_edited:
            raise ValueError(f"{problem}; --force continues nevertheless")
        print(f"warning: {problem}", file=sys.stderr)
    local_modules.import_copies(run_dir, record)
    return load_script(path)


def script_and_config(run_dir, record: Record, accept_edited: bool = True):
    """`(script, config)` of a run, as `script_of` imports the script. Raises ValueError."""
    script = script_of(run_dir, record, accept_edited)
    return script, read_config(script, Path(run_dir) / "config.yaml")


def with_all_steps(config, record: Record):
    """The config of an extended run. Until it ends, config.yaml belongs to its earlier results."""
    steps = record.settings["total_timesteps"]
    if steps == config.total_timesteps:
        return config
    return dataclasses.replace(config, total_timesteps=steps)


def load_run(run_dir, file: str = "agent.safetensors"):
    """`(script, config, agents)` of a finished run of a script or of `onejit train`.

    `script` is a module, and `agents` has NumPy leaves [num_seeds, ...]. The `act` of
    `script.make_policy(config)` takes one of these agents. `file` is the file of agents in the run
    directory. Executes the copy of the script in the run directory. Raises ValueError.
    """
    record = read_record(run_dir)
    if record.kind == "sweep":
        raise ValueError(
            f"{run_dir}: is a sweep; its best trials are runs, in {Path(run_dir) / 'agents'}"
        )
    if is_extended(run_dir, record):
        print(f"{run_dir}: was extended and is not finished; these agents are of its earlier end")
    arrays, _ = read_agents(Path(run_dir) / file)
    script, config = script_and_config(run_dir, record)
    return script, config, unflatten_dict(arrays, sep=".")


class Results(NamedTuple):
    """What a run has measured."""

    metrics: dict[str, np.ndarray]  # {name: [num_seeds, updates]}
    # [num_seeds]; None for older runs and for a script's own `main`
    final_return: np.ndarray | None
    evaluation: np.ndarray | None  # [num_seeds, episodes], of greedy episodes after training

    def training_return(self, num_updates: int | None = None) -> np.ndarray:
        """The return of each seed at the end of training, without running episodes if not stored.

        See `statistics.at_the_end` for `num_updates`.
        """
        if self.final_return is not None:
            return self.final_return
        return statistics.final_return(self.metrics, num_updates)

    def best_known_return(self) -> tuple[np.ndarray, str]:
        """The evaluation return of each seed if there is one, and what it is in words."""
        if self.evaluation is not None:
            return self.evaluation.mean(axis=1), "the mean of their greedy episodes"
        return self.training_return(), "the return at the end of training"


def load_results(run_dir) -> Results:
    """Raises ValueError."""
    path = Path(run_dir) / "metrics.npz"
    with reading(path), np.load(path) as stored:
        metrics = dict(stored)

    def of_agents(name: str) -> np.ndarray | None:
        file = Path(run_dir) / f"{name}.npy"
        if not file.exists():
            return None
        with reading(file):
            return np.load(file)

    return Results(metrics, of_agents("final_return"), of_agents("evaluation"))


def rank_agents_of_run(run_dir, agents, best: bool = False) -> tuple[np.ndarray, str]:
    """Agents from worst to best, and the criterion; with `best` by their best evaluations.

    Raises ValueError.
    """
    lost = statistics.diverged(agents, read_record(run_dir).not_finite_at_start)
    if len(lost) == 1:
        return np.zeros(1, int), ""
    if best:
        file = Path(run_dir) / "evaluations.npz"
        with reading(file), np.load(file) as stored:
            known = np.where(np.isfinite(stored["returns"]), stored["returns"], -np.inf)
        returns = known.max(axis=1)
        criterion = "their best evaluation in training"
    else:
        returns, criterion = load_results(run_dir).best_known_return()
    return statistics.rank_agents(returns, lost), criterion


def new_run_dir(script: Script, config, prefix: str = "") -> Path:
    """The default directory of a run: runs/SCRIPT/ENVIRONMENT-TIME-RANDOM."""
    env_name = config.env_name.rpartition(":")[2]
    number = secrets.token_hex(4)  # in containers the numbers of processes are alike
    stamp = f"{prefix}{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{number}"
    return Path("runs", Path(script.__file__).stem, stamp)


def checkpoints_of(run_dir, seeds: range, num_seeds: int) -> Path:
    """The folder of the checkpoints of a slice of a run's seeds."""
    folder = Path(run_dir) / "checkpoints"
    return folder if len(seeds) == num_seeds else folder / f"{seeds.start:05d}-{seeds.stop:05d}"
