"""Run directories: reading what a run has written, and importing its script.

A run directory holds `config.yaml`, `metrics.npz`, `learning_curve.png`, `agent.safetensors` and a
copy of the script. `onejit train` adds `run.json`, evaluations and checkpoints.
"""

import secrets
import time
from pathlib import Path

import numpy as np
import tyro
from flax.traverse_util import unflatten_dict

from onejit.base.files import reading
from onejit.base.text import OptionNeeded
from onejit.run.agents import read_agents
from onejit.run.record import Record, is_extended, read_record
from onejit.script import command_line, local_modules
from onejit.script.configs import env_name_of, read_flags
from onejit.script.contract import Script
from onejit.script.load import find_script, import_from, known_scripts, load_script


def read_config(script: Script, file: Path):
    """Read config.yaml as the script's command line does. Raises ValueError."""
    try:
        words = read_flags(script, ["--config", str(file)])
        return command_line.parse(tyro.conf.FlagConversionOff[script.Config], words)
    except ValueError as error:
        raise ValueError(f"{file}: is not a config of {script.__file__}: {error}") from error


def copy_of_script(run_dir, record: Record, force: bool = False) -> Path | None:
    """The copy of the script in the run directory, or None.

    Raises ValueError if it was edited, unless `force`.
    """
    name = str(record.settings["script"])
    copy = Path(run_dir, f"{name}.py")
    is_bare = Path(name).name == name  # no path to another folder
    if not is_bare or not local_modules.is_inside(copy, run_dir):
        return None
    expected = record.sha256  # a script's own `main` records none
    if expected and not force and local_modules.hash_of(copy.read_bytes()) != expected:
        problem = f"{copy}: has been edited since the run began"
        raise OptionNeeded(problem, "force", "uses the edited script")
    return copy


def find_other_script(run_dir, record: Record, force: bool, trust: bool) -> Path:
    """The script of a run directory that has no copy of it, as a `main` of older versions left it.

    It is onejit's script of this name. With `trust` it may be any other file. Raises ValueError,
    also if run.json has the hash of another version, unless `force`.
    """
    name = str(record.settings["script"])
    if name in known_scripts() and not trust:
        path = known_scripts()[name]
    else:
        path = find_script(name)
        local_modules.check_trust(run_dir, f"its script, {path}", trust)
    expected = record.sha256
    if expected and not force and local_modules.hash_of(path.read_bytes()) != expected:
        problem = (
            f"{run_dir}: the copy of its script is missing, and {path} is another version of it"
        )
        raise OptionNeeded(problem, "force", "uses that version")
    return path


def script_of(run_dir, record: Record, force: bool = False, trust: bool = False) -> Script:
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
        import_from(*[folder for folder in record.folders if Path(folder).is_dir()])
    return load_script(copy)


def script_and_config(run_dir, record: Record, force: bool = False, trust: bool = False):
    """`(script, config)` of a run, as `script_of` imports the script. Raises ValueError."""
    script = script_of(run_dir, record, force, trust)
    config = read_config(script, Path(run_dir) / "config.yaml")
    local_modules.check_environment(run_dir, record, env_name_of(config), trust)
    return script, config


def load_run(run_dir, force: bool = False, file: str = "agent.safetensors", trust: bool = False):
    """`(script, config, agents)` of a finished run of a script or of `onejit train`.

    `script` is a module, and `agents` has NumPy leaves [num_seeds, ...]. The `act` of
    `script.make_policy(config)` takes one of these agents. `file` is the file of agents in the run
    directory.

    Executes the copy of the script in the run directory. `force` accepts a copy that was edited
    since the run began, and `trust` executes files outside of the run directory. Raises ValueError.
    """
    record = read_record(run_dir)
    if record.kind == "sweep":
        raise ValueError(
            f"{run_dir}: is a sweep; its best trials are runs, in {Path(run_dir) / 'agents'}"
        )
    if is_extended(run_dir, record):
        print(f"{run_dir}: was extended and is not finished; these agents are of its earlier end")
    arrays, _ = read_agents(Path(run_dir) / file)
    script, config = script_and_config(run_dir, record, force, trust)
    return script, config, unflatten_dict(arrays, sep=".")


def load_metrics(run_dir) -> dict:
    """`{name: [num_seeds, updates]}`, and what a run has stored of its agents.

    That is `final_return` [num_seeds] of `onejit train` and of a sweep's trials, which older runs
    and a script's own `main` lack, and `evaluation` [num_seeds, episodes] if there is one. Raises
    ValueError.
    """
    path = Path(run_dir) / "metrics.npz"
    with reading(path), np.load(path) as stored:
        metrics = dict(stored)
    for name in ("final_return", "evaluation"):
        file = Path(run_dir) / f"{name}.npy"
        if file.exists():
            with reading(file):
                metrics[name] = np.load(file)
    return metrics


def new_run_dir(script: Script, config, prefix: str = "") -> Path:
    """The default directory of a run: runs/SCRIPT/ENVIRONMENT-TIME-NUMBER."""
    env_name = config.env_name.rpartition(":")[2]
    number = secrets.token_hex(4)  # in containers the numbers of processes are alike
    stamp = f"{prefix}{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{number}"
    return Path("runs", Path(script.__file__).stem, stamp)
