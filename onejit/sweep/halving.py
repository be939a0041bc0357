"""Successive halving: the best trials of a rung go on to the next one, and the others stop.

Jamieson & Talwalkar 2016 (arXiv 1502.07943), algorithm 1. All trials of a bracket train to the
first rung. With `--halving ETA` the best 1/ETA of them train from there to the second rung, and so
on until the last rung, which has the full budget. A trial keeps the schedules of the full budget.
"""

import shutil
from collections.abc import Iterator

from onejit import hosts
from onejit.configs import plain
from onejit.run_directory import steps_of, task_of, timesteps_until
from onejit.sweep.ranking import sort_trials
from onejit.sweep.request import Group, Options, Request, config_of, required
from onejit.sweep.slice_files import checkpoints_of, finished_slices, read_slice
from onejit.text import plural


def updates_until(config, timesteps: int) -> int:
    """The updates that end within so many timesteps, warm-up included."""
    return (timesteps - getattr(config, "warmup_timesteps", 0)) // steps_of(config)


def most_rungs(config, eta: int) -> int:
    """The largest number of rungs with which the first rung has at least one update."""
    timesteps = config.total_timesteps
    rungs = 0
    while timesteps > 0 and updates_until(config, timesteps) > 0:
        rungs += 1
        timesteps //= eta
    return rungs


def timesteps_from_first(config, options: Options) -> list[int]:
    """The timesteps of all rungs but the last one, from --first-rung on. Raises ValueError."""
    first = required(options.first_rung)
    eta = required(options.halving)
    total = config.total_timesteps
    if first >= total:
        raise ValueError(f"first_rung = {first}: must be below total_timesteps = {total}")
    if updates_until(config, first) < 1:
        raise ValueError(
            f"first_rung = {first}: must be at least {timesteps_until(config, 1)}, "
            "where the first update ends"
        )
    timesteps = [first]
    while timesteps[-1] * eta < total:
        timesteps.append(timesteps[-1] * eta)
    return timesteps


def timesteps_from_last(config, options: Options, num_trials: int, groups) -> list[int]:
    """The timesteps of all rungs but the last one, which has the full budget. Raises ValueError.

    Without --rungs there are as many as leave at least one trial for the last rung.
    """
    eta = required(options.halving)
    total = config.total_timesteps
    most = min(most_rungs(group.config, eta) for group in groups)
    if options.rungs is not None and options.rungs > most:
        raise ValueError(
            f"rungs = {options.rungs}: with more than {most}, the first rung has no update"
        )
    if most < 2:
        raise ValueError(
            f"halving = {eta}: total_timesteps = {total} has too few updates for two rungs"
        )
    number = options.rungs
    if number is None:
        number = 2
        while number < most and eta**number <= num_trials:
            number += 1
    return [total // eta**i for i in range(number - 1, 0, -1)]


def ends_of_rungs(config, options: Options, num_trials: int, groups) -> list[int]:
    """The update at which each rung ends. `num_trials` is the size of the largest bracket.

    Raises ValueError.
    """
    if options.first_rung is not None:
        timesteps = timesteps_from_first(config, options)
    else:
        timesteps = timesteps_from_last(config, options, num_trials, groups)
    ends = [updates_until(config, steps) for steps in timesteps]
    if ends[-1] >= config.num_updates:
        raise ValueError(
            f"first_rung = {options.first_rung}: the last rung, after {timesteps[-1]} timesteps, "
            "has no update"
        )
    return [*ends, config.num_updates]


def number_left(num_trials: int, eta: int, rung: int) -> int:
    """How many of the trials train in a rung."""
    return max(1, num_trials // eta**rung)


def trials_of_tasks(request: Request, trials: list[int]) -> dict[str, list[int]]:
    """The trials of each environment. Returns of different environments cannot be compared."""
    tasks = {}
    for trial in trials:
        tasks.setdefault(task_of(plain(config_of(request, trial))), []).append(trial)
    return tasks


def sizes_of_brackets(request: Request) -> list[int]:
    """The number of trials of each bracket.

    A bracket has the trials of one environment, or a batch of Optuna.
    """
    options = request.options
    if not options.optuna:
        trials = list(range(len(request.trials)))
        return [len(of_task) for of_task in trials_of_tasks(request, trials).values()]
    samples = required(options.samples)
    sizes = [options.batch] * (samples // options.batch)
    rest = samples % options.batch
    return [*sizes, rest] if rest else sizes


def plan(request: Request, groups: list[Group]) -> int:
    """Environment steps of all rungs. The rungs of compile groups are about the same.

    Raises ValueError if the rungs are not possible.
    """
    options = request.options
    sizes = sizes_of_brackets(request)
    eta = required(options.halving)
    if max(sizes) < eta:
        raise ValueError(
            f"halving = {eta}: needs at least {eta} trials at a time; there are {max(sizes)}"
        )
    for group in groups:
        ends = ends_of_rungs(group.config, options, max(sizes), groups)
    trained = 0
    for size in sizes:
        first = 0
        for rung, last in enumerate(ends):
            number = number_left(size, eta, rung)
            trained += number * (last - first)
            first = last
    return trained * options.num_seeds * steps_of(groups[-1].config)


def describe(request: Request, groups: list[Group]) -> str:
    """The rungs of the first bracket in one line."""
    options = request.options
    size = max(sizes_of_brackets(request))
    config = groups[0].config
    parts = []
    for rung, end in enumerate(ends_of_rungs(config, options, size, groups)):
        trials = plural(number_left(size, required(options.halving), rung), "trial")
        parts.append(f"{trials} to {timesteps_until(config, end):,}")
    return f"halving: {', '.join(parts)} timesteps"


def rungs(request: Request, groups: list[Group]) -> Iterator[Group]:
    """The groups of each rung of a bracket, which consists of `groups`.

    The trials that go on are chosen when the rung before has been trained.
    """
    options = request.options
    num_trials = max(sizes_of_brackets(request))
    ends = [ends_of_rungs(group.config, options, num_trials, groups) for group in groups]
    bracket = [trial for group in groups for trial in group.trials]
    going_on = set(bracket)
    before = {}  # {index of a group: number of its group in the rung before}
    for rung in range(len(ends[0])):
        numbers = {}
        for index, group in enumerate(groups):
            trials = [trial for trial in group.trials if trial in going_on]
            if not trials:
                continue
            numbers[index] = len(request.groups)
            yield Group(
                config=group.config,
                trials=trials,
                rung=rung,
                first_update=ends[index][rung - 1] if rung else 0,
                last_update=ends[index][rung],
                before=before.get(index),
            )
        for number in before.values():  # nobody continues them any more
            hosts.only_first(delete_checkpoints, request, number)
        before = numbers
        if rung + 1 < len(ends[0]):
            trained = list(numbers.values())
            going_on = set(hosts.only_first(choose, request, bracket, rung, trained))


def choose(request: Request, bracket: list[int], rung: int, numbers: list[int]) -> list[int]:
    """The trials of a bracket that go on after a rung, which the groups `numbers` have trained.

    Raises ValueError if there is nothing to choose by.
    """
    trained = {trial for number in numbers for trial in request.groups[number].trials}
    chosen = []
    for of_task in trials_of_tasks(request, bracket).values():
        left = [trial for trial in of_task if trial in trained]
        number = number_left(len(of_task), required(request.options.halving), rung + 1)
        chosen += sort_trials(request, left)[:number]
    if len(chosen) < len(trained) and not any_episode(request, numbers):
        group = request.groups[numbers[0]]
        timesteps = timesteps_until(group.config, group.num_updates)
        raise ValueError(
            f"first_rung: no episode has ended in {timesteps} timesteps; it needs more of them"
        )
    return sorted(chosen)


def any_episode(request: Request, numbers: list[int]) -> bool:
    """Whether an episode has ended in the groups `numbers`."""
    for number in numbers:
        for file in finished_slices(request.run_dir, number):
            if read_slice(file, ["episodes"])["episodes"].any():
                return True
    return False


def delete_checkpoints(request: Request, number: int) -> None:
    """Delete the checkpoints of a group."""
    for folder in checkpoints_of(request.run_dir, number):
        unused = folder.with_name(f"deleted-{folder.name}")  # at once: a kill may come at any time
        shutil.rmtree(unused, ignore_errors=True)
        folder.rename(unused)
        shutil.rmtree(unused)
