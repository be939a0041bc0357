"""Successive halving: the best trials of a rung go on to the next one, and the others stop.

Jamieson & Talwalkar 2016 (arXiv 1502.07943), algorithm 1. All trials of a bracket train to the
first rung. With `--halving ETA` the best 1/ETA of them train from there to the second rung, and so
on until the last rung, which has the full budget. A trial keeps the schedules of the full budget.
"""

from collections.abc import Callable

from onejit.base.files import delete_folder
from onejit.base.text import plural
from onejit.engine import hosts
from onejit.script.steps import steps_of, timesteps_until
from onejit.sweep.options import Options
from onejit.sweep.slices import checkpoints_of, finished_slices, read_slice
from onejit.sweep.trials import Group, Sweep, sort_trials, trials_of_tasks

# --- rungs ---


def updates_until(config, timesteps: int) -> int:
    """The updates that end within so many timesteps, warm-up included."""
    return (timesteps - timesteps_until(config, 0)) // steps_of(config)


def most_rungs(config, eta: int) -> int:
    """The largest number of rungs with which the first rung has at least one update."""
    timesteps = config.total_timesteps
    rungs = 0
    while timesteps > 0 and updates_until(config, timesteps) > 0:
        rungs += 1
        timesteps //= eta
    return rungs


def ends_of_rungs(config, options: Options, num_trials: int, groups) -> list[int]:
    """The update at which each rung ends. `num_trials` is the size of the largest bracket.

    Without --rungs there are as many as leave at least one trial for the last rung. Raises
    ValueError.
    """
    eta = options.halving
    total = config.total_timesteps
    most = min(most_rungs(group.config, eta) for group in groups)
    if options.rungs > most:
        raise ValueError(
            f"rungs = {options.rungs}: with more than {most}, the first rung has no update"
        )
    if most < 2:
        raise ValueError(
            f"halving = {eta}: total_timesteps = {total} has too few updates for two rungs"
        )
    number = options.rungs
    if not number:
        number = 2
        while number < most and eta**number <= num_trials:
            number += 1
    ends = [updates_until(config, total // eta**i) for i in range(number - 1, 0, -1)]
    return [*ends, config.num_updates]


def number_left(num_trials: int, eta: int, rung: int) -> int:
    """How many of the trials train in a rung."""
    return max(1, num_trials // eta**rung)


def plan(options: Options, groups: list[Group], sizes: list[int]) -> tuple[int, str]:
    """The environment steps of brackets of these sizes, and their rungs in words.

    The rungs of groups are about the same. Raises ValueError if there are too few trials or
    updates.
    """
    eta = options.halving
    if max(sizes) < eta:
        raise ValueError(
            f"halving = {eta}: needs at least {eta} trials at a time; there are {max(sizes)}"
        )
    *_, ends = [ends_of_rungs(group.config, options, max(sizes), groups) for group in groups]
    config = groups[-1].config
    updates = 0  # of one agent of each trial
    rungs = []
    first = 0
    for rung, last in enumerate(ends):
        left = [number_left(size, eta, rung) for size in sizes]
        updates += sum(left) * (last - first)
        rungs.append(f"{plural(max(left), 'trial')} to {timesteps_until(config, last):,}")
        first = last
    steps = updates * options.num_seeds * steps_of(config)
    return steps, f"halving: {', '.join(rungs)} timesteps"


# --- training ---


def train_rungs(
    sweep: Sweep, groups: list[Group], sizes: list[int], train_group: Callable[[Group], None]
) -> None:
    """Train a bracket, which consists of `groups`, rung by rung. Raises ValueError.

    `sizes` are the numbers of trials of which only the best go on.
    """
    ends = [ends_of_rungs(group.config, sweep.options, max(sizes), groups) for group in groups]
    bracket = [trial for group in groups for trial in group.trials]
    left = bracket
    before = {}  # {place in `groups`: number of the group that trained its trials in the last rung}
    for rung in range(len(ends[0])):
        numbers = {}
        for place, group in enumerate(groups):
            trials = [trial for trial in group.trials if trial in left]
            if not trials:
                continue
            numbers[place] = len(sweep.trials.groups)
            continued = Group(
                config=group.config,
                trials=trials,
                rung=rung,
                first_update=ends[place][rung - 1] if rung else 0,
                last_update=ends[place][rung],
                continues=before.get(place),
            )
            train_group(continued)
        for number in before.values():  # nobody continues them any more
            hosts.only_first(delete_checkpoints, sweep, number)
        before = numbers
        if rung + 1 < len(ends[0]):
            left = hosts.only_first(choose, sweep, bracket, list(numbers.values()))


def choose(sweep: Sweep, bracket: list[int], numbers: list[int]) -> list[int]:
    """The trials of a bracket that go on after a rung, which the groups `numbers` have trained.

    Raises ValueError if there is nothing to choose by.
    """
    groups = [sweep.trials.groups[number] for number in numbers]
    rung = groups[0].rung
    trained = {trial for group in groups for trial in group.trials}
    chosen = []
    for of_task in trials_of_tasks(sweep.search, sweep.trials.values, bracket).values():
        left = [trial for trial in of_task if trial in trained]
        number = number_left(len(of_task), sweep.options.halving, rung + 1)
        chosen += sort_trials(left, sweep.trials.returns, dict.fromkeys(left, rung))[:number]
    if len(chosen) < len(trained) and not any_episode(sweep, numbers):
        timesteps = timesteps_until(groups[0].config, groups[0].num_updates)
        raise ValueError(
            f"rungs: no episode has ended in {timesteps} timesteps; with fewer rungs, the first "
            "one is longer"
        )
    return sorted(chosen)


def any_episode(sweep: Sweep, numbers: list[int]) -> bool:
    """Whether an episode has ended in the groups `numbers`."""
    for number in numbers:
        for file in finished_slices(sweep.run_dir, number):
            if read_slice(file, ["episodes"])["episodes"].any():
                return True
    return False


def delete_checkpoints(sweep: Sweep, number: int) -> None:
    """Delete the checkpoints of a group."""
    for folder in checkpoints_of(sweep.run_dir, number):
        delete_folder(folder)
