"""Training of the groups of a sweep, slice by slice."""

import contextlib
import dataclasses
import sys
from functools import partial

import numpy as np

from onejit.base import statistics
from onejit.base.files import delete_folder, write
from onejit.base.signals import Stopped
from onejit.base.text import plural
from onejit.engine import compilation, hosts, loop
from onejit.engine.checkpoints import read
from onejit.engine.progress import note_of_returns
from onejit.run import tracking
from onejit.run.agents import as_bytes
from onejit.run.record import write_record
from onejit.script.configs import plain
from onejit.script.steps import timesteps_until
from onejit.sweep.slices import (
    DIVERGED,
    FINAL_RETURN,
    FIRST_NOT_FINITE,
    carry_of_runs,
    finished_slices,
    read_slice,
    runs_of,
    slice_name,
)
from onejit.sweep.swept import show_values
from onejit.sweep.trials import Group, Sweep


class Trainer:
    """Compiles and trains groups of a sweep.

    Groups with the same config share a program, as the batches of Optuna do. Each rung has its own.
    """

    def __init__(self, sweep: Sweep, progress, caught):
        self.sweep = sweep
        self.session = loop.Session(
            record=sweep.record,
            write_record=partial(write_record, sweep.run_dir, sweep.record),
            progress=progress,
            caught=caught,
            watch=partial(note_of_group, sweep, progress),
            checkpoint_interval=sweep.options.checkpoint_interval,
        )
        self.programs = {}  # {rung: program} of the config
        self.numbers = {}  # {(config, rung): number of the program}

    def train_group(self, group: Group) -> None:
        """Train a group, and add it and its returns to `sweep.trials`.

        Raises ValueError, OSError, Stopped.
        """
        sweep = self.sweep
        trials = sweep.trials
        if trials.groups and trials.groups[-1].config != group.config:
            self.programs.clear()  # free their memory before the next one compiles
        index = len(trials.groups)
        trials.groups.append(group)
        for trial in group.trials:
            trials.returns.pop(trial, None)  # of the rung before
        num_runs = len(group.trials) * sweep.options.num_seeds
        done = hosts.only_first(first_runs_done, sweep, group, index)
        size = self.size_of_slices(group, num_runs, done)
        for first in range(0, num_runs, size):
            last = min(first + size, num_runs)
            name = slice_name(index, first, last)
            if first in done:
                self.session.count(group.steps(last - first), restored=True)
                stored = read_slice(sweep.run_dir / "slices" / f"{name}.npz", [FINAL_RETURN])
                note_returns(sweep, group, first, stored[FINAL_RETURN])
                continue
            stop = hosts.latest(self.session.caught)
            if stop:
                raise Stopped(stop)
            program = self.programs[group.rung]
            piece = slice_of_trials(sweep, group, program, first, name)
            trained, state = loop.run(program, piece, self.session)
            hosts.only_first(
                finish_slice, sweep, group, trained, first, name, self.session.progress
            )
            del trained, state, program  # free their memory before the next slice

    def size_of_slices(self, group: Group, num_runs: int, done: list[int]) -> int:
        """The size of a group's slices; compiles their program unless all of them are `done`.

        A resumed group keeps its size. Raises ValueError.
        """
        sizes = self.sweep.record.slices
        number = self.numbers.setdefault((group.config, group.rung), len(self.numbers))
        size = sizes[number] if number < len(sizes) else None
        is_done = size is not None and set(range(0, num_runs, size)) <= set(done)
        if not is_done and group.rung not in self.programs:
            program = compile_group(self.sweep, group, number, size, self.session.progress)
            self.programs[group.rung] = program
        return sizes[number]


def compile_group(
    sweep: Sweep, group: Group, number: int, size: int | None, progress
) -> compilation.Program:
    """The program of this number. Its size is recorded if it is new. Raises ValueError."""
    floats = sweep.search.float_names()
    num_runs = len(group.trials) * sweep.options.num_seeds
    all_updates = group.config.num_updates
    program, description = compilation.compile_slices(
        partial(compilation.compile_slice, sweep.search.script, group.config, floats),
        total=num_runs,
        size=size,
        memory_gib=sweep.options.memory,
        seconds=sweep.record.seconds,
    )
    if size is None:
        sweep.record.slices.append(program.size)
    hosts.only_first(write_record, sweep.run_dir, sweep.record)
    if hosts.is_first():
        trial = sweep.trials.values[group.trials[0]]
        static = {name: value for name, value in trial.items() if name not in floats}
        label = show_values(static) or "float fields only"
        runs = f"{num_runs} runs of {all_updates} updates"
        if sweep.options.halving:
            label += f", rung {group.rung + 1}"
            updates = f"updates {group.first_update} to {group.num_updates} of {all_updates}"
            runs = f"{num_runs} runs, {updates},"
        progress.write(f"group {number} ({label}): {runs} in {description}", file=sys.stdout)
    return program


def first_runs_done(sweep: Sweep, group: Group, index: int) -> list[int]:
    """The first run of each slice of a group that an earlier session has trained.

    A slice whose trials may go on is only done if its last checkpoint is intact.
    """
    done = []
    for file in finished_slices(sweep.run_dir, index):
        checkpoints = sweep.run_dir / "unfinished" / file.stem
        is_needed = group.num_updates < group.config.num_updates and checkpoints.is_dir()
        with contextlib.suppress(OSError):
            if is_needed:
                read(checkpoints / str(group.num_updates))
            done.append(runs_of(file)[0])
    return done


def slice_of_trials(sweep: Sweep, group: Group, program, first: int, name: str) -> loop.Slice:
    """The slice of a group from the run `first` on."""
    num_seeds = sweep.options.num_seeds
    runs, numbers = loop.runs_of_slice(first, program.size, len(group.trials) * num_seeds)
    trials = [group.trials[i] for i in numbers // num_seeds]
    floats = {}
    for field in sweep.search.float_names():
        floats[field] = [sweep.trials.values[trial][field] for trial in trials]
    start = None
    if group.continues is not None:
        before = sweep.trials.groups[group.continues]
        position = {trial: i for i, trial in enumerate(before.trials)}
        wanted = np.array([position[trial] for trial in trials]) * num_seeds + numbers % num_seeds
        start = partial(carry_of_runs, sweep.run_dir, group.continues, group.first_update, wanted)
    return loop.Slice(
        config=group.config,
        runs=runs,
        numbers=numbers,
        key_data=loop.seed_keys(sweep.options)[numbers % num_seeds],
        folder=sweep.run_dir / "unfinished" / name,
        floats=floats,
        first_update=group.first_update,
        last_update=group.num_updates,
        start=start,
        save_last=group.num_updates < program.num_updates,  # for the next rung
    )


def note_of_group(sweep: Sweep, progress, piece: loop.Slice, first, last, metrics, _) -> str:
    """What the progress bar says after the updates [first, last) of a slice."""
    ended = statistics.mean_return(metrics)[: len(piece.runs)]
    notes = [note_of_returns(progress, ended)]
    if sweep.options.halving:
        group = sweep.trials.groups[-1]
        notes.insert(0, f"rung {group.rung + 1}, {plural(len(group.trials), 'trial')}")
    return ", ".join(filter(None, notes))


def finish_slice(
    sweep: Sweep, group: Group, trained: loop.Trained, first: int, name: str, progress
) -> None:
    """Write a complete slice, delete its checkpoints, and report runs that are not finite.

    Raises OSError.
    """
    folder = sweep.run_dir / "slices"
    not_finite = first_not_finite(trained.metrics)
    lost = statistics.diverged(trained.agent, sweep.record.not_finite_at_start)
    good = (not_finite < 0) & ~lost
    final = trained.final_return
    returns = np.where(good & np.isfinite(final), final, -np.inf)
    bad_runs = first + np.flatnonzero(~good)
    for position in np.unique(bad_runs // sweep.options.num_seeds):
        trial = group.trials[position]
        values = show_values(sweep.trials.values[trial])
        progress.write(f"not finite: trial {trial} ({values})", file=sys.stderr)
    for trial in note_returns(sweep, group, first, returns):
        track(sweep, group, trial)

    if sweep.options.keep:
        write(folder / f"{name}.safetensors", as_bytes(trained.agent))
    of_runs = {FINAL_RETURN: returns, FIRST_NOT_FINITE: not_finite, DIVERGED: lost}
    write(folder / f"{name}.npz", partial(np.savez, **trained.metrics, **of_runs))
    if group.num_updates == group.config.num_updates:
        delete_folder(sweep.run_dir / "unfinished" / name)
    write_record(sweep.run_dir, sweep.record)


def note_returns(sweep: Sweep, group: Group, first: int, returns) -> list[int]:
    """Note the final returns of the runs from `first` on.

    Returns the trials that have now ended.
    """
    num_seeds = sweep.options.num_seeds
    ended = []
    for run, value in enumerate(returns, start=first):
        trial = group.trials[run // num_seeds]
        if trial not in sweep.trials.returns:
            sweep.trials.returns[trial] = np.full(num_seeds, np.nan)
        sweep.trials.returns[trial][run % num_seeds] = value
        if (run + 1) % num_seeds == 0:
            ended.append(trial)
    return ended


def track(sweep: Sweep, group: Group, trial: int) -> None:
    """Track a trial as a run of the tracker, with a point for each rung. Raises OSError."""
    config = sweep.search.config_of(sweep.trials.values[trial])
    record = dataclasses.replace(sweep.record, settings=sweep.record.settings | plain(config))
    name = f"trial-{trial}"
    done = timesteps_until(config, group.first_update) if group.first_update else 0
    tracker = tracking.open_tracker(sweep.options.track, sweep.run_dir, record, name, done)
    values = tracking.returns_over_seeds("final_return", sweep.trials.returns[trial])
    for field, value in sweep.trials.values[trial].items():
        if isinstance(value, (int, float)):
            values[f"hyperparameters/{field}"] = value
    tracker.log(timesteps_until(config, group.num_updates), tracking.only_finite(values))
    tracker.close()


def first_not_finite(metrics: dict) -> np.ndarray:
    """The first update with a loss that is not finite, or -1: [runs, updates] -> [runs].

    Other metrics may be NaN.
    """
    bad = np.zeros(metrics["episodes"].shape, bool)
    for name, values in metrics.items():
        if name.endswith("loss"):
            bad |= ~np.isfinite(values)
    return np.where(bad.any(axis=-1), bad.argmax(axis=-1), -1)
