"""`onejit sweep --merge`: the results of all parts of a sweep, as if it had been one sweep."""

import dataclasses
import shlex
import shutil
from pathlib import Path

import numpy as np
import tyro

from onejit.base.clock import Clock
from onejit.run.directory import load_metrics, new_run_dir
from onejit.run.lock import holding
from onejit.run.record import Record, read_record
from onejit.run.write import write_inputs
from onejit.script import command_line, local_modules
from onejit.sweep import results
from onejit.sweep.options import read_part
from onejit.sweep.ranking import best_trials
from onejit.sweep.request import Request, config_of, make_groups, request_of
from onejit.sweep.slice_files import DIVERGED, FINAL_RETURN, FIRST_NOT_FINITE

# options that may differ between the parts of a sweep
OF_A_PART = ("part", "run_dir", "memory", "checkpoint_interval", "track")
SAME = {"sha256": "scripts", "modules": "modules", "random_keys": "kinds of random keys"}


@dataclasses.dataclass(frozen=True)
class MergeOptions:
    """Options that can be given with --merge RUN_DIR RUN_DIR ..."""

    # new directory for the results; runs/SCRIPT/sweep-ENVIRONMENT-TIME-NUMBER by default
    run_dir: Path | None = None
    # use the sweep's copies of the script and of your modules although they were edited
    force: tyro.conf.FlagCreatePairsOff[bool] = False


# --- which parts there are ---


def in_common(record: Record) -> dict:
    """The fields and options that all parts of a sweep have in common."""
    values = record.settings | record.swept | record.options
    return {name: value for name, value in values.items() if name not in OF_A_PART}


def part_of(run_dir: Path, record: Record) -> tuple[int, int]:
    """`(I, N)` of a part that has finished. Raises ValueError."""
    part = record.options.get("part")
    if part is None:
        raise ValueError(f"merge: {run_dir} is not a part of a sweep, which --part makes")
    if record.finished is None:
        raise ValueError(
            f"merge: {run_dir} has not finished; onejit sweep --resume {run_dir} continues it"
        )
    return read_part(part)


def check_same_sweep(record: Record, other: Record, about: str) -> None:
    """Raise ValueError if two parts differ in more than their trials."""
    about = f"merge: {about} are parts of different sweeps"
    for name, what in SAME.items():
        if getattr(record, name) != getattr(other, name):
            raise ValueError(f"{about}, with different {what}")
    values = in_common(record)
    others = in_common(other)
    for name in values | others:
        if values.get(name) != others.get(name):
            raise ValueError(f"{about}, with different --{name.replace('_', '-')}")


def check_parts(run_dirs: list[Path], records: list[Record]) -> None:
    """Raise ValueError unless these are all parts of one sweep."""
    parts = []
    for run_dir, record in zip(run_dirs, records, strict=True):
        parts.append(part_of(run_dir, record))
    for run_dir, record, part in zip(run_dirs, records, parts, strict=True):
        about = f"{run_dirs[0]} and {run_dir}"
        check_same_sweep(records[0], record, about)
        if part[1] != parts[0][1]:
            raise ValueError(f"merge: {about} are of {parts[0][1]} and of {part[1]} parts")
        if parts.count(part) > 1:
            raise ValueError(f"merge: part {part[0]}/{part[1]} is given twice")
    number = parts[0][1]
    for part in range(1, number + 1):
        if (part, number) not in parts:
            raise ValueError(f"merge: part {part}/{number} is missing")


# --- their results ---


def read_trials(request: Request, run_dir: Path) -> dict[int, dict]:
    """All arrays of each trial of a part: `{trial: {name: [seeds, ...]}}`. Raises ValueError."""
    metrics = load_metrics(run_dir)
    trials = {}
    for position, (trial, rows) in enumerate(results.read_csv(run_dir / "results.csv").items()):
        num_updates = config_of(request, trial).num_updates
        arrays = {}
        for name, values in metrics.items():
            if name not in results.OF_TRIALS:
                arrays[name] = values[position, :, :num_updates]
        not_finite = [row["first_update_not_finite"] or -1 for row in rows]
        arrays[FINAL_RETURN] = np.array([row["final_return"] for row in rows], float)
        arrays[FIRST_NOT_FINITE] = np.array(not_finite, int)
        arrays[DIVERGED] = np.array([row["diverged"] == "True" for row in rows])
        trials[trial] = arrays
    return trials


def merged_record(records: list[Record], run_dirs: list[Path], words: list[str]) -> Record:
    """The record of the whole sweep."""
    return dataclasses.replace(
        records[0],
        options=records[0].options | {"part": None},
        command=shlex.join(["onejit", "sweep", "--merge", *words]),
        merged=[str(run_dir) for run_dir in run_dirs],
        steps_done=sum(record.steps_done for record in records),
        steps_total=sum(record.steps_total for record in records),
        num_trials=sum(record.num_trials for record in records),
        seconds=sum([record.seconds for record in records], start=Clock()),
        slices=[],
    )


def main(words: list[str]) -> Path:
    """Merge as the command line says. Returns the new run directory. Raises ValueError, OSError."""
    number = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    run_dirs = [Path(word) for word in words[:number]]
    given = command_line.parse(
        MergeOptions, words[number:], prog="onejit sweep --merge", description=__doc__
    )
    if not run_dirs:
        raise ValueError("merge: needs RUN_DIR RUN_DIR ..., the parts of a sweep")
    records = [read_record(run_dir) for run_dir in run_dirs]
    check_parts(run_dirs, records)

    record = merged_record(records, run_dirs, words)
    request = request_of(run_dirs[0], record, given)
    run_dir = given.run_dir or new_run_dir(request.script, request.config, prefix="sweep-")

    trials = {}
    for part in run_dirs:
        trials |= read_trials(request, part)
    arrays = dict(sorted(trials.items()))
    returns = {trial: of_trial[FINAL_RETURN] for trial, of_trial in arrays.items()}

    def keep_agents(request: Request, _) -> None:
        for trial in best_trials(request):
            name = Path("agents") / f"trial-{trial}"
            part = next(part for part in run_dirs if (part / name).is_dir())
            shutil.copytree(part / name, request.run_dir / name)

    modules = local_modules.read_copies(run_dirs[0], record)
    request = request._replace(
        run_dir=run_dir, record=record, groups=make_groups(request), returns=returns
    )
    with holding(run_dir, is_new=True):
        write_inputs(run_dir, request.config, request.script, modules)
        tables = results.write_files(request, arrays, keep_agents)  # run.json is the last file
    results.show_tables(tables, run_dir)
    return run_dir
