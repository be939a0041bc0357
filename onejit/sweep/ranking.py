"""The order of the trials of a sweep."""

import numpy as np

from onejit.base import statistics
from onejit.script.configs import plain, task_of
from onejit.sweep.request import Request, config_of


def last_groups(request: Request) -> dict[int, int]:
    """`{trial: number of the last group that has trained it}`."""
    last = {}
    for number, group in enumerate(request.groups):
        last |= dict.fromkeys(group.trials, number)
    return last


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


def trials_of_tasks(request: Request, trials: list[int]) -> dict[str, list[int]]:
    """The trials of each environment. Returns of different environments cannot be compared."""
    tasks = {}
    for trial in trials:
        tasks.setdefault(task_of(plain(config_of(request, trial))), []).append(trial)
    return tasks


def rank_trials(request: Request) -> dict[str, list[int]]:
    """The finished trials of each environment, best first."""
    returns = sorted(request.returns.items())
    finished = [trial for trial, of_seeds in returns if not np.isnan(of_seeds).any()]
    tasks = trials_of_tasks(request, finished)
    rungs = {trial: request.groups[number].rung for trial, number in last_groups(request).items()}
    return {task: sort_trials(of_task, request.returns, rungs) for task, of_task in tasks.items()}


def best_trials(request: Request) -> list[int]:
    """The trials of each environment whose agents are saved."""
    best = []
    for trials in rank_trials(request).values():
        for trial in trials[: request.options.keep]:
            if np.isfinite(statistics.interquartile_mean(request.returns[trial])):
                best.append(trial)
    return best
