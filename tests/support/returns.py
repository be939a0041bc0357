"""Returns of sweeps, which count a long episode that still runs."""

import numpy as np


def is_mean_with_running(value: float, total: float, number: int) -> bool:
    """Whether `value` is the mean over the ended episodes, or over these and a running one.

    `total` and `number` are of the ended ones. An agent of the GridWorld has one environment, and
    its rewards are whole numbers, so the return of the running episode is a whole number, too.
    """
    if np.isclose(value, total / number, rtol=1e-5):
        return True
    running = value * (number + 1) - total
    return abs(running - round(running)) < 0.02
