"""List runs with their script, environment, state, progress and return.

    onejit list
    onejit list runs/ppo

A run is finished, running (a process holds its lock) or stopped. The progress of a run is the
progress at its last checkpoint. The return is the mean and the worst training return over seeds.
"""

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import tyro

from onejit.base import statistics
from onejit.base.text import align
from onejit.run.agents import read_agents
from onejit.run.directory import load_results
from onejit.run.lock import is_locked
from onejit.run.record import Record, read_record, share_of_main, updates_to_count
from onejit.script.configs import task_of

AGENTS = "agent.safetensors"
TITLES = ["run", "script", "environment", "seeds", "state", "done", "training return", "changed"]


def find_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, sorted by their last change."""
    run_dirs = []
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in seen:  # a link to a folder around it
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        if "run.json" in files or {AGENTS, "config.yaml"} <= set(files):
            run_dirs.append(Path(place))
            folders.clear()  # do not search checkpoints
    return sorted(run_dirs, key=changed)


def changed(run_dir: Path) -> float:
    """The time of the last change of a run."""
    times = [0.0]  # of a run that is deleted meanwhile
    for path in [run_dir / "run.json", run_dir / AGENTS]:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def progress_of(run_dir: Path, record: Record) -> tuple[bool, str]:
    """Whether a run has finished, and its progress.

    It is the progress at the last checkpoint, or at the end of a script's own `main`.
    """
    if record.kind == "script":
        share = share_of_main(run_dir, record.settings)
        return share == 1.0, f"{100 * share:.0f} %"
    if record.finished is not None:
        return True, "100 %"
    if not record.steps_total:
        return False, "-"
    return False, f"{100 * record.steps_done / record.steps_total:.0f} %"


def row_of(run_dir: Path) -> list[str]:
    """The row of a run. The row of an unreadable run gives the reason."""
    age = show_age(time.time() - changed(run_dir))
    try:
        return [str(run_dir), *cells_of(run_dir), age]
    except Exception as error:  # many kinds: the record is damaged
        reason = f"cannot be read: {error}".replace(f"{run_dir}/", "")[:80]
        return [str(run_dir), "-", "-", "-", reason, "-", "-", age]


def cells_of(run_dir: Path) -> list[str]:
    """The cells between the path of a run and its age."""
    record = read_record(run_dir)
    settings = record.settings
    is_finished, done = progress_of(run_dir, record)
    state = "finished"
    if not is_finished:
        state = "running" if is_locked(run_dir) else "stopped"
    if record.kind == "sweep":
        final_return = "a sweep"
    elif state == "finished" or record.kind == "script":
        final_return = show_returns(run_dir, record)
    else:
        final_return = "-"
    task = task_of(settings)
    seeds = str(settings["num_seeds"])
    return [settings["script"], task, seeds, state, done, final_return]


def show_returns(run_dir: Path, record: Record) -> str:
    """Mean and worst return, and the metrics that are NaN although episodes ended.

    For a run of a script's own `main` they come from its metrics.
    """
    numbers = record.final_return
    broken = record.broken_metrics
    if numbers is None:
        results = load_results(run_dir)
        agents, _ = read_agents(run_dir / AGENTS)
        broken = sorted(statistics.broken_metrics(results.metrics))
        values = results.training_return(updates_to_count(record, results.metrics))
        values = values[
            np.isfinite(values) & ~statistics.diverged(agents, record.not_finite_at_start)
        ]
        numbers = {"mean": None}
        if len(values):
            numbers = {"mean": values.mean(), "worst": values.min()}
    shown = "none"
    if numbers["mean"] is not None:
        shown = f"{numbers['mean']:.4g}, worst agent {numbers['worst']:.4g}"
    if record.kind == "script":  # which does not store running episodes
        shown += " (ended episodes)"
    return ", ".join([shown, *[f"{name} NaN" for name in broken]])


def show_age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def main(folder: tyro.conf.Positional[Path] = Path("runs")) -> None:
    """Print a table of the runs and sweeps below a folder. Raises ValueError.

    Args:
        folder: folder to search, with all its subfolders
    """
    run_dirs = find_runs(folder)
    if not run_dirs:
        raise ValueError(
            f"folder = {folder}: contains no run of a script, onejit train or onejit sweep"
        )
    print(align([TITLES, *[row_of(run_dir) for run_dir in run_dirs]]))
