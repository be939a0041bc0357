"""Figures of `onejit sweep`. `ranked` holds the `onejit.sweep.Result` of an environment's trials, best first."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from onejit import statistics
from onejit.runs import steps_of


def show(value) -> str:
    """A value as text for tables, or a trial's values with their fields."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {show(each)}" for name, each in value.items())
    if isinstance(value, (tuple, Mapping)):  # as on the command line
        return ",".join(
            map(str, np.ravel([*value.items()] if isinstance(value, Mapping) else value))
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def interval_over_trials(returns: np.ndarray) -> list:
    """Interquartile mean of all returns [trials, seeds], and its interval. Seeds are drawn jointly."""

    def over_all(drawn):  # [seeds, ..., trials] -> [...]
        return statistics.interquartile_mean(np.concatenate(np.moveaxis(drawn, -1, 0)))

    return statistics.interval(returns.T, over_all)


def draw_curves(script, ranked: list, title: str, file) -> None:
    """Return over steps of the best trials: interquartile mean over seeds and its 95 % interval."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for each in ranked:
        updates = each.metrics["episodes"].shape[1]
        edges, kept = np.unique(np.linspace(0, updates, 51).astype(int)), np.isfinite(each.returns)
        parts = [
            {name: values[:, a:b] for name, values in each.metrics.items()}
            for a, b in itertools.pairwise(edges)
        ]
        curves = np.stack([script.mean_return(part) for part in parts], axis=1)
        curves[~kept] = -np.inf
        whole = np.isfinite(curves[kept]).all(axis=0)  # where each seed has finished an episode
        numbers = np.array(statistics.interval(curves[:, whole]))
        center, low, high = np.where(np.isfinite(numbers), numbers, np.nan)
        steps = getattr(each.config, "warmup_timesteps", 0) + edges[1:][whole] * steps_of(
            each.config
        )
        (line,) = axes.plot(steps, center, label=show(each.values))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(
        title=title,
        xlabel="environment steps per agent",
        ylabel="return of the episodes that ended",
    )
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def place(axes, which: str, name: str, values: list, as_numbers: bool = True) -> np.ndarray:
    """Set up the axis "x" or "y", and return the positions of values: numbers, or indices of other values."""
    how, numbers = {"label": name}, all(type(value) in (int, float) for value in values)
    if numbers and as_numbers:
        how["scale"] = "log" if min(values) > 0 and max(values) / min(values) >= 10 else "linear"
    else:
        known = sorted(set(values), key=None if numbers else show)
        how |= {"ticks": range(len(known)), "ticklabels": map(show, known)}
        values = [known.index(value) for value in values]
    axes.set(**{which + key: value for key, value in how.items()})
    return np.array(values)


def draw_returns(ranked: list, title: str, file) -> None:
    """Final return against each swept field: a point per trial, and the mean per value if trials share values."""
    names, means = list(ranked[0].values), np.array([each.mean for each in ranked])
    returns, shown = np.stack([each.returns for each in ranked]), np.isfinite(means)
    figure = Figure(figsize=(max(5, 4 * len(names)), 4), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True
    ):
        where = place(axes, "x", name, [each.values[name] for each in ranked])
        axes.plot(
            where[shown],
            means[shown],
            "o",
            color="tab:blue",
            alpha=0.5,
            markersize=4,
            label="trial",
        )
        if len(lost := where[~shown]):
            axes.plot(
                lost, 0.0 * lost, "rx", transform=axes.get_xaxis_transform(), label="not finite"
            )
        points = np.unique(where)
        if len(points) < len(where) or len(names) == 1:
            numbers = np.array([interval_over_trials(returns[where == point]) for point in points])
            center, low, high = np.where(np.isfinite(numbers), numbers, np.nan).T
            label = "interquartile mean, 95 % interval"
            axes.errorbar(
                points, center, (center - low, high - center), color="black", capsize=3, label=label
            )
    figure.axes[0].set_ylabel("final return")
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=150)


def draw_heat_map(ranked: list, title: str, file) -> None:
    """Final return over two fields: a coloured point per trial, with its number if the points form a grid."""
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes, means, names = (
        figure.subplots(),
        np.array([each.mean for each in ranked]),
        list(ranked[0].values),
    )
    values = [[each.values[name] for each in ranked] for name in names]
    is_grid = math.prod(len(set(each)) for each in values) == len(ranked)
    where = [
        place(axes, *each, as_numbers=not is_grid) for each in zip("xy", names, values, strict=True)
    ]
    how = {"marker": "s", "s": 1200} if is_grid else {"s": 60}
    colors = np.where(np.isfinite(means), means, np.nan)
    points = axes.scatter(*where, c=colors, edgecolors="black", plotnonfinite=True, **how)
    for x, y, mean in zip(*where, means, strict=True) if is_grid else ():
        axes.text(
            x,
            y,
            f"{mean:.3g}",
            ha="center",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.6, "lw": 0},
        )
    axes.margins(0.2 if is_grid else 0.05)
    axes.set_title(title, fontsize="medium")
    figure.colorbar(points, label="final return, interquartile mean")
    figure.savefig(file, format="png", dpi=150)
