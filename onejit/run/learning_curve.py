"""The learning curve of a run: the return over environment steps."""

import numpy as np
from matplotlib.figure import Figure

from onejit.base import statistics
from onejit.base.labels import as_label
from onejit.script.steps import timesteps_until

POINTS = 100  # of a curve


def learning_curve(config, metrics: dict, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [points], and the mean return up to them [num_seeds, points].

    Each point is the mean over the episodes that ended since the point before, NaN where none did.
    """
    steps = []
    returns = []
    num_updates = metrics["episodes"].shape[1]
    for updates in np.array_split(np.arange(num_updates), min(points, num_updates)):
        part = {name: values[:, updates] for name, values in metrics.items()}
        returns.append(statistics.mean_return(part))
        steps.append(timesteps_until(config, updates[-1] + 1))
    return np.array(steps), np.stack(returns, axis=1)


def draw_learning_curve(config, metrics: dict, title: str, file) -> None:
    """A thin line for each seed, and the mean over seeds with its 95 % bootstrap interval.

    The interval stays within the returns of the seeds, so it never passes what is possible.
    """
    steps, returns = learning_curve(config, metrics)
    mean, low, high = statistics.bootstrap_interval(statistics.mean_over_seeds, returns)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns.T, color="tab:blue", linewidth=0.5, alpha=0.5)
    axes.plot(steps, mean, color="tab:blue", label="mean over seeds")
    label = "95 % bootstrap interval"
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.25, label=label)
    axes.set(title=as_label(title), xlabel="environment steps", ylabel="training return")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)
