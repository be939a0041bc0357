"""Compare runs: statistics over seeds and environments with intervals, one table and one figure.

    python tools/compare.py runs/ppo/cartpole runs/dqn/cartpole
    python tools/compare.py a=runs/1 a=runs/2 b=runs/3 b=runs/4 --scale CartPole-v1 0 500 --scale Catch-bsuite -1 1

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv 2108.13264.
Runs are run directories that scripts have filled. Runs of one label are one method; by default the label is the name of
the script and, where its runs differ in one environment, the settings in which they do.

Intervals are 95 % stratified bootstrap intervals by the percentile method (section 4.1 there): seeds are drawn again
within each environment, never across environments.
"""

import argparse
import csv
import datetime
import io
import itertools
import json
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
from common import nearest, read_record, run_tool, write
from matplotlib.figure import Figure

OF_THE_TASK = ("env_name", "env_params", "max_episode_steps")
OF_THE_SEEDS = ("seed", "num_seeds")


class Run(NamedTuple):
    """What one run directory holds."""

    path: str
    settings: dict
    label: str  # of the method; empty where none was given
    task: str  # the environment and what was changed of it
    returns: dict  # by (seed, number of the agent), only those that are finite


class Estimate(NamedTuple):
    """A statistic and its interval; the interval is NaN where a sample has one seed."""

    value: float
    low: float
    high: float


# Statistics: samples are arrays [..., seeds], one for each environment, which may have different numbers of seeds.


def interquartile_mean(*samples, axis=-1):
    """The mean of the middle half of all scores (arXiv 2108.13264, section 4.3)."""
    return scipy.stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)


def median(*samples, axis=-1):
    """The median over environments of the mean over seeds, as is usual; of one environment the median over seeds."""
    if len(samples) == 1:
        return np.median(samples[0], axis=axis)
    return np.median([sample.mean(axis=axis) for sample in samples], axis=0)


def optimality_gap(*samples, axis=-1):
    """By how much the mean misses 1, scores above 1 counted as 1 (arXiv 2108.13264, section 4.3)."""
    return 1.0 - np.minimum(np.concatenate(samples, axis=axis), 1.0).mean(axis=axis)


def probability_of_improvement(*samples, axis=-1):
    """P(X > Y), equal scores counted half, averaged over environments (arXiv 2108.13264, section 4.3).

    The first half of `samples` is X in each environment, the second half is Y. The Mann-Whitney U of an environment is
    the number of pairs that X wins; ranks give it without looking at each pair.
    """
    won = []
    for x, y in zip(samples[: len(samples) // 2], samples[len(samples) // 2 :], strict=True):
        x, y = np.moveaxis(x, axis, -1), np.moveaxis(y, axis, -1)
        n, m = x.shape[-1], y.shape[-1]
        ranks = scipy.stats.rankdata(np.concatenate([x, y], axis=-1), axis=-1)[..., :n]
        won.append((ranks.sum(axis=-1) - n * (n + 1) / 2) / (n * m))
    return np.mean(won, axis=0)


def estimate(statistic, samples, resamples: int = 2000) -> Estimate:
    """A statistic of `samples` [seeds] and its stratified bootstrap interval; each sample is a stratum."""
    value = float(statistic(*samples, axis=-1))
    if min(map(len, samples)) < 2:
        return Estimate(value, np.nan, np.nan)
    found = scipy.stats.bootstrap(
        samples, statistic, n_resamples=resamples, batch=100, vectorized=True, method="percentile", rng=0
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


# Runs


def final_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended in the last tenth of the updates, NaN where none did: [seeds]."""
    first = metrics["episodes"].shape[1] * 9 // 10
    episodes, returns = metrics["episodes"][:, first:], metrics["episodic_return"][:, first:]
    with np.errstate(invalid="ignore"):
        return np.where(episodes > 0, episodes * returns, 0.0).sum(axis=1) / episodes.sum(axis=1)


def read_run(argument: str, kind: str) -> Run:
    """The run of `DIR` or `LABEL=DIR`. Raises ValueError."""
    label, _, path = ("", "", argument) if Path(argument).exists() else argument.rpartition("=")
    settings = read_record(Path(path))["settings"]
    file = Path(path) / "metrics.npz"
    try:
        with np.load(file) as stored:
            metrics = dict(stored)
        if kind == "greedy" and "evaluation" not in metrics:
            raise ValueError(f"{file}: has no evaluation, the run had --eval-episodes 0; take --returns final")
        returns = metrics["evaluation"].mean(axis=1) if kind == "greedy" else final_return(metrics)
    except FileNotFoundError:
        raise ValueError(f"{file}: is not there, so that the run has not ended; --resume goes on with it") from None
    except (OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: cannot be read ({type(error).__name__}: {error})") from error
    changed = {name: settings[name] for name in OF_THE_TASK[1:] if settings.get(name)}
    task = " ".join([settings["env_name"], *(f"{name}={json.dumps(value)}" for name, value in changed.items())])
    if lost := np.flatnonzero(~np.isfinite(returns)).tolist():
        print(f"{path}: left out, for they have no finite return: agents {lost} of {len(returns)}")
    kept = {(settings.get("seed"), i): float(value) for i, value in enumerate(returns) if np.isfinite(value)}
    if not kept:
        raise ValueError(f"{path}: no agent has a finite {kind} return")
    return Run(path, settings, label, task, kept)


def differing(runs) -> list[str]:
    """Names of the settings that runs of one script and environment do not agree on."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in OF_THE_TASK + OF_THE_SEEDS)
    return [name for name in names if len({json.dumps(run.settings.get(name)) for run in runs}) > 1]


def label_runs(runs: list[Run]) -> list[Run]:
    """The same runs, those without a label named after their script and what sets them apart."""
    alike = defaultdict(list)
    for run in runs:
        if not run.label:
            alike[run.settings["script"], run.task].append(run)
    names = defaultdict(dict)  # a dictionary keeps the order of the fields
    for (script, _), group in alike.items():
        names[script] |= dict.fromkeys(differing(group))

    def name(run):
        script = run.settings["script"]
        return " ".join([script, *(f"{field}={run.settings.get(field)}" for field in names[script])])

    return [run if run.label else run._replace(label=name(run)) for run in runs]


def gather(runs: list[Run]) -> dict[str, dict[str, dict]]:
    """`{method: {environment: {(seed, agent): return}}}`, each method in the same environments. Raises ValueError."""
    methods, sources = defaultdict(dict), defaultdict(list)
    for run in label_runs(runs):
        returns, others = methods[run.label].setdefault(run.task, {}), sources[run.label, run.task]
        others.append(run)
        if fields := differing(others):
            raise ValueError(
                f"{run.path} and {others[0].path} are both {run.label} on {run.task} but differ in "
                f"{', '.join(fields)}; give each a label, as in LABEL={run.path}"
            )
        if twice := returns.keys() & run.returns.keys():
            seed, agent = min(twice)
            raise ValueError(f"{run.path}: agent {agent} of seed {seed} is there twice, in {others[0].path} too")
        returns |= run.returns
    tasks = sorted({run.task for run in runs})
    for method, found in methods.items():
        if missing := [task for task in tasks if task not in found]:
            raise ValueError(f"{method} has no run on {', '.join(missing)}, but others have: all need the same ones")
    return {method: {task: methods[method][task] for task in tasks} for method in methods}


def rescale(methods, scales) -> tuple[dict, bool]:
    """Returns as scores, `(return - low) / (high - low)`, and whether they are. Raises ValueError."""
    tasks = next(iter(methods.values()))
    bounds = {}
    for name, *limits in scales:
        if not (named := [task for task in tasks if name in (task, task.split()[0])]):
            raise ValueError(f"scale: no run is on {name}{nearest(name, tasks)}")
        try:
            low, high = map(float, limits)
        except ValueError:
            raise ValueError(f"scale {name} {' '.join(limits)}: two numbers are needed, LOW HIGH") from None
        if not -np.inf < low < high < np.inf:
            raise ValueError(f"scale {name} {low:g} {high:g}: LOW must be less than HIGH")
        bounds |= dict.fromkeys(named, (low, high))
    if missing := [task for task in tasks if task not in bounds]:
        if len(tasks) == 1:
            return methods, False
        raise ValueError(f"scale: returns of several environments are not alike; give --scale {missing[0]} LOW HIGH")

    def score(task, value):
        low, high = bounds[task]
        return (value - low) / (high - low)

    scores = {
        method: {task: {key: score(task, value) for key, value in found[task].items()} for task in tasks}
        for method, found in methods.items()
    }
    return scores, True


# Results


def aggregate(methods, scaled: bool) -> list[dict]:
    """A row for each method and statistic, the method of the highest interquartile mean first."""
    statistics = {"interquartile mean": interquartile_mean, "median": median}
    if scaled:
        statistics["optimality gap"] = optimality_gap
    rows = []
    for method, tasks in methods.items():
        samples = [np.array(list(found.values())) for found in tasks.values()]
        seeds = "/".join(map(str, dict.fromkeys(map(len, samples))))
        for name, statistic in statistics.items():
            rows.append({"statistic": name, "method": method, "versus": "", "seeds": seeds})
            rows[-1] |= estimate(statistic, samples)._asdict()
    best = {row["method"]: -row["value"] for row in rows if row["statistic"] == "interquartile mean"}
    return sorted(rows, key=lambda row: best[row["method"]])


def compare_pairs(methods, order) -> list[dict]:
    """A row for each pair of methods and statistic. Paired are agents of one seed and number in both methods."""
    rows = []
    for x, y in itertools.combinations(order, 2):
        both = list(zip(methods[x].values(), methods[y].values(), strict=True))
        samples = [np.array(list(found[i].values())) for i in (0, 1) for found in both]
        rows.append({"statistic": "probability of improvement", "method": x, "versus": y})
        rows[-1] |= {"seeds": "/".join(dict.fromkeys(f"{len(a)}+{len(b)}" for a, b in both))}
        rows[-1] |= estimate(probability_of_improvement, samples)._asdict()
        if all(a.keys() & b.keys() for a, b in both):
            gains = [np.array([a[key] - b[key] for key in a if key in b]) for a, b in both]
            rows.append({"statistic": "paired difference", "method": x, "versus": y})
            rows[-1] |= {"seeds": "/".join(dict.fromkeys(str(len(each)) for each in gains))}
            rows[-1] |= estimate(interquartile_mean, gains)._asdict()
    return rows


def show(row: dict) -> str:
    if np.isnan(row["low"]):
        return f"{row['value']:.4g}, one seed: no interval"
    return f"{row['value']:.4g} ({row['low']:.4g} to {row['high']:.4g})"


def table(rows: list[dict]) -> str:
    """Statistics as columns, a line for each method or pair."""
    lines = defaultdict(dict)
    for row in rows:
        name = row["method"] + (f" > {row['versus']}" if row["versus"] else "")
        cells = lines[name]
        cells["pairs" if row["statistic"] == "paired difference" else "seeds"] = row["seeds"]
        cells[row["statistic"]] = show(row)
    columns = list(dict.fromkeys(column for cells in lines.values() for column in cells))
    grid = [["", *columns], *([name, *(cells.get(column, "-") for column in columns)] for name, cells in lines.items())]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in grid)


def draw_panel(axes, rows: list[dict], unit: str) -> None:
    """One statistic: a bar over the interval, a line at the value; methods or pairs from top to bottom."""
    name = rows[0]["statistic"]
    for height, row in enumerate(rows):
        color = "0.5" if row["versus"] else f"C{height % 10}"
        if not np.isnan(row["low"]):
            axes.barh(height, row["high"] - row["low"], 0.6, row["low"], color=color, alpha=0.5)
        axes.vlines(row["value"], height - 0.3, height + 0.3, color="black", linewidth=2)
    labels = [row["method"] + (f"\nagainst {row['versus']}" if row["versus"] else "") for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.use_sticky_edges = False  # a bar must not end at the frame
    axes.margins(x=0.08)
    axes.set_ylim(max(len(rows), 2) - 0.4, -0.6)
    if rows[0]["versus"]:  # where neither is better
        axes.axvline(0.5 if name == "probability of improvement" else 0.0, color="0.4", linestyle=":")
    axes.set(title=name, xlabel="probability" if name == "probability of improvement" else unit)
    axes.grid(axis="x", alpha=0.3)


def draw(rows: list[dict], title: str, unit: str, file) -> None:
    """A panel for each statistic, those of methods above those of pairs."""
    panels = defaultdict(list)
    for row in rows:
        panels[row["statistic"]].append(row)
    columns = sum(not shown[0]["versus"] for shown in panels.values())
    lines = [list(panels.values())[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [1.2 + 0.45 * max(map(len, line)) for line in lines]
    figure = Figure(figsize=(4.5 * columns, 0.4 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, shown in zip(grid.flat, panels.values(), strict=False):
        draw_panel(axes, shown, unit)
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=150)


def as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["environment", "statistic", "method", "versus", "seeds", *Estimate._fields])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def parse(args):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", metavar="[LABEL=]DIR", help="run directories; those of one label are one method")
    add("--returns", choices=["final", "greedy"], default="final", help="of the end of training, or of the evaluation")
    scale_help = "returns that count as 0 and 1; several environments need it, and the optimality gap does"
    add("--scale", nargs=3, action="append", default=[], metavar=("ENV", "LOW", "HIGH"), help=scale_help)
    add("--out", metavar="DIR", help="where compare.csv and compare.png go; runs/compare-TIME where not given")
    return parser.parse_args(args)


def main(args=None) -> Path:
    """Compare, print the tables, write `compare.csv` and `compare.png`. Returns their directory. Raises ValueError."""
    options = parse(args)
    returns = gather([read_run(argument, options.returns) for argument in options.runs])
    scores, scaled = rescale(returns, options.scale)
    tasks = list(next(iter(scores.values())))
    rows = aggregate(scores, scaled)
    rows += compare_pairs(scores, dict.fromkeys(row["method"] for row in rows))
    title, unit = f"{options.returns} return on {', '.join(tasks)}", "score" if scaled else "return"
    print(f"{title}{', as a score between LOW and HIGH' if scaled else ''}; 95 % stratified bootstrap intervals\n")
    print(table([row for row in rows if not row["versus"]]))
    if pairs := [row for row in rows if row["versus"]]:
        print(f"\n{table(pairs)}")
    stored = [{"environment": ", ".join(tasks)} | row for row in rows]
    for task in tasks if len(tasks) > 1 else []:
        alone = aggregate({method: {task: found[task]} for method, found in returns.items()}, scaled=False)
        print(f"\n{options.returns} return on {task}\n{table(alone)}")
        stored += [{"environment": task} | row for row in alone]
    out = Path(options.out or f"runs/compare-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
    write(out / "compare.csv", as_csv(stored))
    write(out / "compare.png", partial(draw, rows, title, unit))
    print(f"\nresults in {out}")
    return out


if __name__ == "__main__":
    run_tool(main)
