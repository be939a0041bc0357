"""List runs with their script, environment, state, progress and return.

    onejit list
    onejit list runs/ppo

A run is finished, running (a process holds its lock) or stopped. The progress of a run is the progress at its last
checkpoint. The return is the mean and the worst final return over seeds.
"""

import os
import time
from pathlib import Path

import numpy as np
import tyro

from onejit import command_line, runs, statistics

AGENTS = "agent.safetensors"
TITLES = ["run", "script", "environment", "seeds", "state", "done", "final return", "changed"]


def find_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, sorted by their last change."""
    found = []
    for place, folders, files in os.walk(folder):
        if "run.json" in files or {AGENTS, "config.yaml"} <= set(files):
            found.append(Path(place))
            folders.clear()  # do not search checkpoints
    return sorted(found, key=changed)


def changed(run_dir: Path) -> float:
    return max(
        path.stat().st_mtime for path in (run_dir / "run.json", run_dir / AGENTS) if path.is_file()
    )


def describe(run_dir: Path) -> list[str]:
    """The row of a run. The row of an unreadable run gives the reason."""
    age = show_age(time.time() - changed(run_dir))
    try:
        record = runs.read_record(run_dir)
        settings = record["settings"]
        what = [settings["script"], runs.task_of(settings), str(settings["num_seeds"])]
        state, done = "running" if runs.is_locked(run_dir) else "stopped", "-"
        if (
            "finished" in record
            or (run_dir / "results.csv").is_file()
            or not (run_dir / "run.json").is_file()
        ):
            state, done = "finished", "100 %"
        if done == "-" and record.get("steps_total"):
            done = f"{100 * record['steps_done'] / record['steps_total']:.0f} %"
        reached = (
            "a sweep"
            if "words" in record
            else returns(run_dir, record)
            if state == "finished"
            else "-"
        )
    except Exception as error:  # many kinds: the record is damaged
        return [
            str(run_dir),
            *"---",
            f"cannot be read: {error}".replace(f"{run_dir}/", "")[:80],
            "-",
            "-",
            age,
        ]
    return [str(run_dir), *what, state, done, reached, age]


def returns(run_dir: Path, record: dict) -> str:
    """Mean and worst return. For a run of a script's own `main` they are computed from its metrics."""
    found = record.get("final return")
    if found is None:
        values, (agents, _) = (
            statistics.final_return(runs.load_metrics(run_dir)),
            runs.read_agents(run_dir / AGENTS),
        )
        values = values[np.isfinite(values) & ~statistics.diverged(agents)]
        found = {"mean": values.mean(), "worst": values.min()} if len(values) else {"mean": None}
    return "none" if found["mean"] is None else f"{found['mean']:.4g}, worst {found['worst']:.4g}"


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
    if not (found := find_runs(folder)):
        raise ValueError(
            f"folder = {folder}: contains no run of a script, onejit train or onejit sweep"
        )
    print(command_line.align([TITLES, *map(describe, found)]))
