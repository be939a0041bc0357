"""The order of the trials of a sweep."""

import numpy as np

from onejit import statistics
from onejit.configs import plain
from onejit.run_directory import task_of
from onejit.sweep.request import Request, config_of


def rank_trials(request: Request) -> dict[str, list[int]]:
    """The finished trials of each environment, best first."""
    places = {}
    for trial, returns in sorted(request.returns.items()):
        if np.isnan(returns).any():
            continue
        task = task_of(plain(config_of(request, trial)))
        place = (-statistics.interquartile_mean(returns), trial)
        places.setdefault(task, []).append(place)
    ranks = {}
    for task, of_task in places.items():
        ranks[task] = [trial for _, trial in sorted(of_task)]
    return ranks


def best_trials(request: Request) -> list[int]:
    """The trials of each environment whose agents are saved."""
    best = []
    for trials in rank_trials(request).values():
        for trial in trials[: request.options.keep]:
            if np.isfinite(statistics.interquartile_mean(request.returns[trial])):
                best.append(trial)
    return best
