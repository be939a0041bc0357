"""Figures of a sweep. `ranked` holds the results of an environment's trials, best first."""

import math
from collections import Counter

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from onejit.base import statistics
from onejit.base.labels import as_label
from onejit.base.text import plural
from onejit.run.learning_curve import learning_curve
from onejit.sweep.swept import show_value, show_values


def interval_over_trials(returns: np.ndarray) -> list:
    """Interquartile mean of all returns [trials, seeds], and its interval.

    Seeds are drawn jointly.
    """

    def over_all(drawn):  # [seeds, ..., trials] -> [...]
        return statistics.interquartile_mean(*np.moveaxis(drawn, -1, 0))

    return statistics.bootstrap_interval(over_all, returns.T)


def without_infinite(numbers) -> np.ndarray:
    return np.where(np.isfinite(numbers), numbers, np.nan)


def draw_curves(ranked: list, title: str, file) -> None:
    """Return over steps of the best trials: interquartile mean over seeds and its 95 % interval.

    A curve begins where each finite seed has finished an episode.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for result in ranked:
        steps, returns = learning_curve(result.config, result.metrics, points=50)
        kept = np.isfinite(result.returns)
        returns[~kept] = -np.inf
        known = np.isfinite(returns[kept]).all(axis=0)
        interval = statistics.bootstrap_interval(statistics.interquartile_mean, returns[:, known])
        center, low, high = without_infinite(interval)
        (line,) = axes.plot(steps[known], center, label=as_label(show_values(result.values)))
        color = line.get_color()
        axes.fill_between(steps[known], low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(
        title=as_label(title),
        xlabel="environment steps per agent",
        ylabel="return of the episodes that ended",
    )
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def draw_rungs(ranked: list, title: str, file) -> None:
    """Return over steps of all trials, up to the rung where each of them stopped.

    A curve is the mean over the seeds that ended an episode. The winner is drawn thick.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["viridis_r"]
    most = max(result.rung for result in ranked)
    ends = {}  # {rung: steps at its end}
    counts = Counter(result.rung for result in ranked)
    for result in reversed(ranked):
        steps, returns = learning_curve(result.config, result.metrics, points=50)
        ends[result.rung] = steps[-1]
        is_best = result is ranked[0]
        axes.plot(
            steps,
            without_infinite(statistics.finite_mean(returns)),
            color=colors(result.rung / most),
            linewidth=3 if is_best else 1,
            marker="." if len(steps) == 1 else None,
            label=as_label(show_values(result.values)) if is_best else None,
        )
    trials = 0
    for rung, end in sorted(ends.items(), reverse=True):
        trials += counts[rung]
        axes.axvline(end, color="0.7", linestyle=":", zorder=0)
        at_the_top = axes.get_xaxis_transform()
        text = plural(trials, "trial")
        axes.text(end, 1.01, text, transform=at_the_top, ha="right", fontsize="small")
    axes.set_title(as_label(title), pad=20)
    axes.set(
        xscale="log",
        xlabel="environment steps per agent",
        ylabel="return of the episodes that ended",
    )
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def place(axes, which: str, name: str, values: list, as_numbers: bool = True) -> np.ndarray:
    """Set up the axis "x" or "y", and return the positions of values.

    They are numbers, or indices of other values, such as NaN.
    """
    axes.set(**{f"{which}label": name})
    are_numbers = all(type(value) in (int, float) and math.isfinite(value) for value in values)
    if are_numbers and as_numbers:
        is_wide = min(values) > 0 and max(values) / min(values) >= 10
        axes.set(**{f"{which}scale": "log" if is_wide else "linear"})
        spans_less_than_two_decades = is_wide and max(values) < 100 * min(values)
        if spans_less_than_two_decades:  # matplotlib labels minor ticks too, which overlap
            axis = getattr(axes, f"{which}axis")
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        return np.array(values)
    try:
        known = sorted(set(values))
    except TypeError:  # values of several kinds, such as numbers and words
        known = sorted(set(values), key=show_value)
    labels = [as_label(show_value(value)) for value in known]
    axes.set(**{f"{which}ticks": range(len(known)), f"{which}ticklabels": labels})
    return np.array([known.index(value) for value in values])


def draw_returns_of_field(axes, ranked: list, name: str, is_only_field: bool) -> None:
    """Final return against a field: a point per trial, and the mean if trials share values."""
    means = np.array([result.interquartile_mean for result in ranked])
    returns = np.stack([result.returns for result in ranked])
    finite = np.isfinite(means)
    rungs = sorted({result.rung for result in ranked})  # [None] without `--halving`
    where = place(axes, "x", name, [result.values[name] for result in ranked])
    style = {"alpha": 0.5, "markersize": 4}
    for rung in rungs:
        shown = finite & np.array([result.rung == rung for result in ranked])
        label = "trial" if rung is None else f"trial of rung {rung}"
        axes.plot(where[shown], means[shown], "o", label=label, **style)
    lost = where[~finite]
    if len(lost):
        at_the_bottom = axes.get_xaxis_transform()
        axes.plot(lost, 0.0 * lost, "rx", transform=at_the_bottom, label="not finite")
    points = np.unique(where)
    are_comparable = len(rungs) == 1
    if are_comparable and (len(points) < len(where) or is_only_field):
        numbers = np.array([interval_over_trials(returns[where == point]) for point in points])
        center, low, high = without_infinite(numbers).T
        margins = (center - low, high - center)
        label = "interquartile mean, 95 % interval"
        axes.errorbar(points, center, margins, color="black", capsize=3, label=label)


def draw_returns(ranked: list, title: str, file) -> None:
    """Final return against each swept field."""
    names = list(ranked[0].values)
    figure = Figure(figsize=(max(5, 4 * len(names)), 4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        draw_returns_of_field(axes, ranked, name, is_only_field=len(names) == 1)
    panels[0].set_ylabel("training return")
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle(as_label(title))
    figure.savefig(file, format="png", dpi=150)


def draw_cells(axes, x: np.ndarray, y: np.ndarray, means: np.ndarray):
    """A cell of a grid for each trial, with its number. Cells that are not finite are grey."""
    grid = np.full((y.max() + 1, x.max() + 1), np.nan)
    grid[y, x] = without_infinite(means)
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.85")
    cells = axes.pcolormesh(np.ma.masked_invalid(grid), cmap=colors, edgecolors="white")
    axes.set_xticks(axes.get_xticks() + 0.5, axes.get_xticklabels())
    axes.set_yticks(axes.get_yticks() + 0.5, axes.get_yticklabels())
    for i, mean in enumerate(means):
        is_dark = np.isfinite(mean) and cells.norm(mean) < 0.6
        text = f"{mean:.3g}" if np.isfinite(mean) else "not finite"
        color = "white" if is_dark else "black"
        axes.text(x[i] + 0.5, y[i] + 0.5, text, ha="center", va="center", color=color)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return cells


def draw_heat_map(ranked: list, title: str, file) -> None:
    """Final return over two fields: a cell per trial of a grid, or a point per trial."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    means = np.array([result.interquartile_mean for result in ranked])
    x_name, y_name = ranked[0].values
    x_values = [result.values[x_name] for result in ranked]
    y_values = [result.values[y_name] for result in ranked]
    is_grid = len(set(x_values)) * len(set(y_values)) == len(ranked)
    x = place(axes, "x", x_name, x_values, as_numbers=not is_grid)
    y = place(axes, "y", y_name, y_values, as_numbers=not is_grid)
    if is_grid:
        drawn = draw_cells(axes, x, y, means)
    else:
        colors = without_infinite(means)
        drawn = axes.scatter(x, y, c=colors, edgecolors="black", plotnonfinite=True, s=60)
        axes.margins(0.05)
    axes.set_title(as_label(title), fontsize="medium")
    figure.colorbar(drawn, label="training return, interquartile mean")
    figure.savefig(file, format="png", dpi=150)
