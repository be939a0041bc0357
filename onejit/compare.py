"""Compare runs: statistics over seeds and environments with intervals, tables and a figure.

    onejit compare runs/ppo/cartpole runs/dqn/cartpole
    onejit compare a=runs/1 a=runs/2 b=runs/3 b=runs/4 --scale CartPole-v1 0 500 Catch-bsuite -1 1

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv 2108.13264.
Runs are directories that a script or `onejit train` has written. Only their data is read, and no script is executed.
Runs with the same label are one method. The default label is the name of the script, followed by the settings that
differ between its runs in one environment.

All intervals are 95 % intervals: Student's t for the mean, and the stratified bootstrap (section 4.1 of the paper) for
all other statistics. A seed that diverged or has no return counts as the worst.
"""

import csv
import io
import itertools
import json
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure

from onejit import command_line, statistics
from onejit.runs import OF_THE_TASK, load_metrics, read_agents, read_record, task_of, write


class Run(NamedTuple):
    """The content of a run directory."""

    path: str
    settings: dict  # the script's name and the hyperparameters
    label: str  # of the method; empty if none was given
    task: str  # the environment and its changed parameters
    returns: dict  # {(seed, number of the agent): return}, -inf if not finite


# --- runs ---


def read_run(argument: str, kind: str) -> Run:
    """The run of `DIR` or `LABEL=DIR`. Raises ValueError."""
    label, _, path = ("", "", argument) if Path(argument).exists() else argument.rpartition("=")
    record = read_record(path)
    if "words" in record:
        raise ValueError(
            f"{path}: is a sweep, whose trials are compared in its results.csv; give runs"
        )
    settings, metrics = record["settings"], load_metrics(path)
    agent, _ = read_agents(Path(path) / "agent.safetensors")
    if kind == "greedy" and "evaluation" not in metrics:
        raise ValueError(
            f"{path}: has no greedy returns, which onejit train measures; use --returns final"
        )
    returns = (
        metrics["evaluation"].mean(axis=1) if kind == "greedy" else statistics.final_return(metrics)
    )
    returns = np.where(statistics.diverged(agent), -np.inf, returns)
    seed = settings["seed"]
    settings = {
        name: value for name, value in settings.items() if name not in ("num_seeds", "seed")
    }
    if lost := np.flatnonzero(~np.isfinite(returns)).tolist():
        print(
            f"{path}: agents {lost} of {len(returns)} diverged or have no return; they count as the worst"
        )
    values = {
        (seed, i): float(value) if np.isfinite(value) else -np.inf
        for i, value in enumerate(returns)
    }
    return Run(path, settings, label, task_of(settings), values)


def differing(runs) -> list[str]:
    """Names of the settings, including the script, in which runs of one environment differ."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in OF_THE_TASK)
    return [name for name in names if len({json.dumps(run.settings.get(name)) for run in runs}) > 1]


def label_runs(runs: list[Run]) -> list[Run]:
    """Give each run without a label the default one: the script and the settings in which its runs differ."""
    alike = defaultdict(list)
    for run in runs:
        if not run.label:
            alike[run.settings["script"], run.task].append(run)
    names = defaultdict(dict)  # a dictionary keeps the order of the fields
    for (script, _), group in alike.items():
        names[script] |= dict.fromkeys(differing(group))

    def name(run):
        script = run.settings["script"]
        return " ".join(
            [script, *(f"{field}={run.settings.get(field)}" for field in names[script])]
        )

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
            raise ValueError(
                f"{run.path}: agent {agent} of seed {seed} occurs twice, also in {others[0].path}"
            )
        returns |= run.returns
    tasks = sorted({run.task for run in runs})
    for method, found in methods.items():
        if missing := [task for task in tasks if task not in found]:
            raise ValueError(
                f"{method} has no run on {', '.join(missing)}; all methods need the same environments"
            )
    return {method: {task: methods[method][task] for task in tasks} for method in methods}


def rescale(methods, scales) -> tuple[dict, bool]:
    """Scores `(return - low) / (high - low)`, and True. For one environment without a scale, returns and False."""
    tasks, bounds = list(next(iter(methods.values()))), {}
    for name, low, high in scales:
        if not (named := [task for task in tasks if name in (task, task.split()[0])]):
            raise ValueError(f"scale: no run is on {name}, only on {', '.join(tasks)}")
        if not -np.inf < low < high < np.inf:
            raise ValueError(f"scale {name} {low:g} {high:g}: LOW must be less than HIGH")
        bounds |= dict.fromkeys(named, (low, high))
    if missing := [task for task in tasks if task not in bounds]:
        if len(tasks) == 1:
            return methods, False
        raise ValueError(
            f"scale: environments have different returns; give --scale {missing[0]} LOW HIGH"
        )

    scores = {method: {} for method in methods}
    for method, task in itertools.product(methods, tasks):
        low, high = bounds[task]
        scores[method][task] = {
            key: (value - low) / (high - low) for key, value in methods[method][task].items()
        }
    return scores, True


# --- results ---


def aggregate(methods, scaled: bool) -> list[dict]:
    """A row for each method and statistic, the method with the highest interquartile mean first."""
    columns = {
        "mean": statistics.estimate_mean,
        "worst seed": lambda samples: {
            "value": float(min(map(np.min, samples))),
            "low": np.nan,
            "high": np.nan,
        },
        "interquartile mean": partial(statistics.estimate, statistics.pooled_interquartile_mean),
        "median": partial(statistics.estimate, statistics.median),
    }
    if scaled:
        columns["optimality gap"] = partial(statistics.estimate, statistics.optimality_gap)
    rows = []
    for method, tasks in methods.items():
        samples = [np.array(list(found.values())) for found in tasks.values()]
        counts = dict.fromkeys((int(np.isfinite(each).sum()), len(each)) for each in samples)
        seeds = "/".join(
            str(n) if finite == n else f"{finite} of {n} finite" for finite, n in counts
        )
        for name, statistic in columns.items():
            rows.append(
                {"statistic": name, "method": method, "versus": "", "seeds": seeds}
                | statistic(samples)
            )
    best = {
        row["method"]: -row["value"] for row in rows if row["statistic"] == "interquartile mean"
    }
    return sorted(rows, key=lambda row: best[row["method"]])


def compare_pairs(methods, order) -> list[dict]:
    """A row for each pair of methods and statistic. Agents with the same seed and number form pairs."""
    rows = []
    for x, y in itertools.combinations(order, 2):
        both = list(zip(methods[x].values(), methods[y].values(), strict=True))
        samples = [np.array(list(found[i].values())) for i in (0, 1) for found in both]
        rows.append({"statistic": "probability of improvement", "method": x, "versus": y})
        rows[-1] |= {"seeds": "/".join(dict.fromkeys(f"{len(a)}+{len(b)}" for a, b in both))}
        rows[-1] |= statistics.estimate(statistics.probability_of_improvement, samples)
        if all(a.keys() & b.keys() for a, b in both):
            gains = [
                np.array([statistics.difference(a[key], b[key]) for key in a if key in b])
                for a, b in both
            ]
            rows.append({"statistic": "paired difference", "method": x, "versus": y})
            rows[-1] |= {"seeds": "/".join(dict.fromkeys(str(len(each)) for each in gains))}
            rows[-1] |= statistics.estimate(statistics.pooled_interquartile_mean, gains)
    return rows


def table(rows: list[dict]) -> str:
    """Statistics as columns, a line for each method or pair."""
    lines = defaultdict(dict)
    for row in rows:
        cells = lines[row["method"] + (f" > {row['versus']}" if row["versus"] else "")]
        cells["pairs" if row["statistic"] == "paired difference" else "seeds"] = row["seeds"]
        cells[row["statistic"]] = statistics.show(row["value"], row["low"], row["high"])
    columns = list(dict.fromkeys(column for cells in lines.values() for column in cells))
    rows = [
        [name, *(cells.get(column, "-") for column in columns)] for name, cells in lines.items()
    ]
    return command_line.align([["", *columns], *rows])


def draw_panel(axes, name: str, rows: list[dict], unit: str) -> None:
    """One statistic: a bar over the interval, a line at the value; methods or pairs from top to bottom."""
    for height, row in enumerate(rows):
        color = "0.5" if row["versus"] else f"C{height % 10}"
        if np.isfinite([row["low"], row["high"]]).all():
            axes.barh(height, row["high"] - row["low"], 0.6, row["low"], color=color, alpha=0.5)
        if np.isfinite(row["value"]):
            axes.vlines(row["value"], height - 0.3, height + 0.3, color="black", linewidth=2)
    labels = [
        row["method"] + (f"\nagainst {row['versus']}" if row["versus"] else "") for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.use_sticky_edges = False  # leave a margin between bars and the frame
    axes.margins(x=0.08)
    axes.set_ylim(max(len(rows), 2) - 0.4, -0.6)
    if rows[0]["versus"]:  # neither is better here
        axes.axvline(
            0.5 if name == "probability of improvement" else 0.0, color="0.4", linestyle=":"
        )
    axes.set(title=name, xlabel="probability" if name == "probability of improvement" else unit)
    axes.grid(axis="x", alpha=0.3)


def draw(rows: list[dict], title: str, unit: str, file) -> None:
    """A panel for each statistic."""
    panels = defaultdict(list)
    for row in rows:
        panels[row["statistic"]].append(row)
    heights = [1.2 + 0.45 * len(shown) for shown in panels.values()]
    figure = Figure(figsize=(7, 0.4 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (name, shown) in zip(grid[:, 0], panels.items(), strict=True):
        draw_panel(axes, name, shown, unit)
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=150)


def as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def main(
    runs: tyro.conf.Positional[tuple[str, ...]],
    returns: Literal["final", "greedy"] = "final",
    scale: tuple[tuple[str, float, float], ...] = (),
    out: Path | None = None,
) -> Path:
    """Compare, print the tables, write `compare.csv` and `compare.png`. Returns their directory. Raises ValueError.

    Args:
        runs: run directories as DIR or LABEL=DIR; runs with the same label are one method
        returns: returns to compare: final for the end of training, greedy for the evaluation
        scale: ENV LOW HIGH, the returns with scores 0 and 1; needed for several environments
        out: folder for compare.csv and compare.png; runs/compare-TIME by default
    """
    if not runs:
        raise ValueError("runs: give at least one DIR or LABEL=DIR")
    found = gather([read_run(argument, returns) for argument in runs])
    scores, scaled = rescale(found, scale)
    tasks = list(next(iter(scores.values())))
    rows = aggregate(scores, scaled)
    rows += compare_pairs(scores, dict.fromkeys(row["method"] for row in rows))
    title, unit = f"{returns} return on {', '.join(tasks)}", "score" if scaled else "return"
    print(
        f"{title}{', as a score between LOW and HIGH' if scaled else ''}; 95 % intervals in brackets\n"
    )
    print(table([row for row in rows if not row["versus"]]))
    if pairs := [row for row in rows if row["versus"]]:
        print(f"\n{table(pairs)}")
    stored = [{"environment": ", ".join(tasks)} | row for row in rows]
    for task in tasks if len(tasks) > 1 else []:
        alone = aggregate(
            {method: {task: each[task]} for method, each in found.items()}, scaled=False
        )
        print(f"\n{returns} return on {task}\n{table(alone)}")
        stored += [{"environment": task} | row for row in alone]
    out = out or Path(
        "runs", f"compare-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    )
    write(out / "compare.csv", as_csv(stored))
    shown = [row for row in rows if row["statistic"] != "worst seed"]  # it has no interval
    write(out / "compare.png", partial(draw, shown, title, unit))
    print(f"\nresults in {out}")
    return out
