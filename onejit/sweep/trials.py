"""What a sweep searches, its trials with their compile groups and returns, and their order."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onejit.base import statistics
from onejit.run.record import Record
from onejit.script.configs import plain, task_of
from onejit.script.contract import Script
from onejit.script.steps import steps_of
from onejit.sweep.options import Options
from onejit.sweep.swept import is_float_field


class Search(NamedTuple):
    """The question: which values of the swept fields are best."""

    script: Script
    config: Any  # the values of the fields that are not swept
    options: Options
    swept: dict[str, list[str]]  # {field: its words on the command line}

    def float_names(self) -> list[str]:
        return [name for name in self.swept if is_float_field(self.script, name)]

    def config_of(self, values: dict):
        """The config of a trial."""
        return dataclasses.replace(self.config, **values)


class Group(NamedTuple):
    """Trials that train in one program, because they differ only in float fields.

    With `--halving` they train from the end of the rung before to the end of this rung.
    """

    config: Any
    trials: list[int]
    rung: int = 0
    first_update: int = 0
    last_update: int | None = None  # the update that ends the rung; None for all updates
    continues: int | None = None  # number of the group that trained them up to `first_update`

    @property
    def num_updates(self) -> int:
        return self.config.num_updates if self.last_update is None else self.last_update

    def steps(self, num_runs: int) -> int:
        """Environment steps of so many runs, without the warm-up."""
        return num_runs * (self.num_updates - self.first_update) * steps_of(self.config)


@dataclasses.dataclass
class Trials:
    """The answer so far."""

    # {swept field: value} of each trial; Optuna's are added when they are proposed
    values: list[dict]
    groups: list[Group] = dataclasses.field(default_factory=list)  # those that have started
    # {trial: final return of each seed}, -inf if not finite, NaN if not known yet; on process 0
    returns: dict = dataclasses.field(default_factory=dict)

    def last_groups(self) -> dict[int, int]:
        """`{trial: number of the last group that has trained it}`."""
        last = {}
        for number, group in enumerate(self.groups):
            last |= dict.fromkeys(group.trials, number)
        return last


class Sweep(NamedTuple):
    """A search, its trials so far, and where they are written."""

    search: Search
    trials: Trials
    run_dir: Path
    record: Record  # run.json

    @property
    def options(self) -> Options:
        return self.search.options


def make_groups(search: Search, values: list[dict], trials: Iterable[int]) -> list[Group]:
    """The groups of some of the trials that have these `values`."""
    floats = search.float_names()
    groups = {}
    for trial in trials:
        static = {name: value for name, value in values[trial].items() if name not in floats}
        key = tuple(static.items())
        if key not in groups:
            groups[key] = Group(search.config_of(static), [])
        groups[key].trials.append(trial)
    return list(groups.values())


# --- their order ---


def score(returns: np.ndarray) -> tuple[float, float]:
    """What trials are compared by: the interquartile mean of returns [seeds], and then their mean.

    Many interquartile means may be equal where returns have a bound, such as 500 on CartPole-v1.
    """
    return float(statistics.interquartile_mean(returns)), float(returns.mean())


def sort_trials(trials: list[int], returns: dict, rungs: dict[int, int]) -> list[int]:
    """Finished trials of an environment, best first.

    Trials without a finite return come last. Other trials are sorted by the rung that they have
    reached with `--halving`, and then by their score.
    """

    def rank(trial):
        interquartile_mean, mean = score(returns[trial])
        return np.isfinite(interquartile_mean), rungs[trial], interquartile_mean, mean, -trial

    return sorted(trials, key=rank, reverse=True)


def trials_of_tasks(search: Search, values: list[dict], numbers) -> dict[str, list[int]]:
    """The trials `numbers` by environment. Returns of different environments cannot be compared."""
    tasks = {}
    for number in numbers:
        task = task_of(plain(search.config_of(values[number])))
        tasks.setdefault(task, []).append(number)
    return tasks


def rank_trials(search: Search, trials: Trials) -> dict[str, list[int]]:
    """The finished trials of each environment, best first."""
    returns = sorted(trials.returns.items())
    finished = [number for number, of_seeds in returns if not np.isnan(of_seeds).any()]
    tasks = trials_of_tasks(search, trials.values, finished)
    rungs = {number: trials.groups[last].rung for number, last in trials.last_groups().items()}
    return {task: sort_trials(of_task, trials.returns, rungs) for task, of_task in tasks.items()}
