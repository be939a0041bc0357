"""The order of the trials of a sweep."""

import numpy as np

from onejit.base import statistics
from onejit.script.configs import plain, task_of
from onejit.sweep.trials import Search, Trials


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


def best_trials(search: Search, trials: Trials) -> list[int]:
    """The trials of each environment whose agents are saved."""
    best = []
    for ranked in rank_trials(search, trials).values():
        for number in ranked[: search.options.keep]:
            if np.isfinite(statistics.interquartile_mean(trials.returns[number])):
                best.append(number)
    return best
