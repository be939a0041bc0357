"""Files of a sweep that has not finished: the metrics and agents of complete slices.

The file `slices/GROUP-FIRST-LAST.npz` has the metrics of the runs [FIRST, LAST) of a group, and
arrays `run.*`, which are not metrics. The file `.safetensors` of the same name has the agents. The
folder `unfinished/GROUP-FIRST-LAST` has the checkpoints of these runs.
"""

from pathlib import Path

import numpy as np
from safetensors import safe_open

from onejit.base.files import delete_folder
from onejit.engine import hosts
from onejit.engine.checkpoints import carry_from, joined, read

FINAL_RETURN = "run.final_return"
FIRST_NOT_FINITE = "run.first_not_finite"
DIVERGED = "run.diverged"


def slice_name(group: int, first: int, last: int) -> str:
    return f"{group}-{first:07d}-{last:07d}"


def runs_of(file: Path) -> tuple[int, int]:
    """The first run of a file, and the one after its last run."""
    _, first, last = file.stem.split("-")
    return int(first), int(last)


def finished_slices(run_dir: Path, group: int) -> list[Path]:
    """The files of complete slices of a group, in the order of runs."""
    return sorted((run_dir / "slices").glob(f"{group}-*.npz"))


def checkpoints_of(run_dir: Path, group: int) -> list[Path]:
    """The folders of checkpoints of a group, in the order of runs."""
    return sorted((run_dir / "unfinished").glob(f"{group}-*"))


def read_slice(file: Path, names=None) -> dict:
    """Arrays of a slice. Raises OSError."""
    try:
        with np.load(file) as stored:
            return {name: stored[name] for name in names or stored.files}
    except Exception as error:  # NumPy raises many kinds
        raise OSError(
            f"{file}: cannot be read; delete it, and `onejit resume` trains it again"
        ) from error


def read_agents_of_runs(run_dir: Path, group: int, wanted: range) -> dict:
    """Arrays of the agents of the runs `wanted` of a group, by dotted names. Raises OSError."""
    parts = []
    found = 0
    for file in sorted((run_dir / "slices").glob(f"{group}-*.safetensors")):
        first, last = runs_of(file)
        rows = slice(max(wanted.start - first, 0), min(wanted.stop, last) - first)
        if rows.start >= rows.stop:
            continue
        found += rows.stop - rows.start
        with safe_open(file, framework="numpy") as stored:
            names = stored.keys()
            parts.append({name: stored.get_slice(name)[rows] for name in names})
    if found < len(wanted):
        raise OSError(f"{run_dir / 'slices'}: lacks agents of group {group}")
    return joined(parts)


def delete_slices(run_dir: Path) -> None:
    for name in ("slices", "unfinished"):
        delete_folder(run_dir / name)


# --- the runs of a rung that go on ---


def carry_of_runs(run_dir: Path, group: int, update: int, runs: np.ndarray, program):
    """The carry of a slice of `program`, from the checkpoints of `group` after an update.

    `runs` [size] are numbers of runs of that group, in ascending order. Raises OSError.
    """
    names = hosts.only_first(lambda: [str(path) for path in checkpoints_of(run_dir, group)])
    parts = []
    found = 0
    for folder in map(Path, names):
        first, last = runs_of(folder)
        rows = runs[(first <= runs) & (runs < last)] - first
        if len(rows):
            arrays = read(folder / str(update))
            parts.append({name: array[rows] for name, array in arrays.items()})
            found += len(rows)
    if found != len(runs):
        raise OSError(f"{run_dir / 'unfinished'}: has no checkpoints of all runs of group {group}")
    return carry_from(joined(parts), program)
