"""The learning curve of a run: the return over environment steps."""

import numpy as np
from matplotlib.figure import Figure

from onejit import statistics


def learning_curve(config, metrics: dict, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [points], and the mean return up to them [num_seeds, points].

    Each point is the mean over the episodes that ended since the point before, NaN where none did.
    """
    num_updates = metrics["episodes"].shape[1]
    steps_per_update = config.num_envs * config.num_steps
    warmup_timesteps = getattr(config, "warmup_timesteps", 0)

    steps = []
    returns = []
    for updates in np.array_split(np.arange(num_updates), min(points, num_updates)):
        part = {name: values[:, updates] for name, values in metrics.items()}
        returns.append(statistics.mean_return(part))
        steps.append(warmup_timesteps + (updates[-1] + 1) * steps_per_update)
    return np.array(steps), np.stack(returns, axis=1)


def draw_learning_curve(config, metrics: dict, title: str, file) -> None:
    """A thin line for each seed, and the mean over seeds with its 95 % interval."""
    steps, returns = learning_curve(config, metrics)
    mean, low, high = statistics.mean_interval(returns)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns.T, color="tab:blue", linewidth=0.5, alpha=0.5)
    axes.plot(steps, mean, color="tab:blue")
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.25)
    axes.set(title=title, xlabel="environment steps", ylabel="episodic return")
    figure.savefig(file, format="png", dpi=150)
