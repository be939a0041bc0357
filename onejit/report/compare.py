"""Compare runs: statistics over seeds and environments with intervals, tables and a figure.

    onejit compare runs/ppo/cartpole runs/dqn/cartpole
    onejit compare a=runs/1 a=runs/2 b=runs/3 b=runs/4 --scale CartPole-v1 0 500 Catch-bsuite -1 1
    onejit compare runs/sweep-1 runs/sweep-2

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
arXiv 2108.13264. Runs are directories that a script or `onejit train` has written. Only their data
is read, and no script is executed. Runs with the same label are one method. The default label is
the name of the script, followed by the settings that differ between its runs in one environment.
The trials of a sweep are runs. One table can therefore show the sweeps of several machines, and
best.yaml has the settings of the best trial.

All intervals are 95 % intervals: Student's t for the mean where it stays inside of the range of
returns, and the stratified bootstrap (section 4.1 of the paper) for all other statistics. A seed
that diverged or has no return counts as the worst.
"""

import csv
import itertools
import json
import re
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
import yaml
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from onejit.base import statistics
from onejit.base.files import reading, write, write_picture
from onejit.base.labels import as_label
from onejit.base.text import align, as_csv, printable, resume_command
from onejit.run.agents import read_agents
from onejit.run.directory import load_results
from onejit.run.record import Record, is_extended, read_record, share_of_main, updates_to_count
from onejit.script.configs import OF_THE_TASK, task_of

WORDS = {"final": "training", "greedy": "evaluation"}  # of --returns
OF_A_RUN = ("script", "num_seeds", "seed")  # settings that are no fields of a config
NOT_IN_JSON = ("inf", "-inf", "nan")  # floats that a record holds as text


class Run(NamedTuple):
    """The content of a run directory."""

    path: str
    settings: dict  # the script's name and the hyperparameters
    label: str  # of the method; empty if none was given
    task: str  # the environment and its changed parameters
    # {(script, seed, number of the agent): return}, -inf if not finite
    returns: dict
    observed: tuple[float, float]  # the lowest and the highest return that was seen
    marks: dict  # {name: value} of what must also be equal in runs of one method
    is_trial: bool = False  # of a sweep


# --- runs ---


def read_returns(path: str, kind: str, record: Record):
    """The return of each agent, -inf if its parameters are not finite, and the metrics.

    A training that was stopped was meant to have the record's `total_updates`. Raises ValueError.
    """
    results = load_results(path)
    metrics = results.metrics
    total_updates = updates_to_count(record, metrics)
    agents, _ = read_agents(Path(path) / "agent.safetensors")
    if kind == "final":
        returns = results.training_return(total_updates)
        few = statistics.few_episodes(metrics, record.settings, total_updates)
        for line in statistics.warning_of_few(few):
            print(f"{path}: {line}")
        if record.kind == "script":
            print(f"{path}: trained by the script itself, so only episodes that ended count")
    elif results.evaluation is not None:
        returns = results.evaluation.mean(axis=1)
    else:
        raise ValueError(
            f"{path}: has no evaluation returns, which onejit train measures; use --returns final"
        )
    returns = np.where(statistics.diverged(agents, record.not_finite_at_start), -np.inf, returns)
    return returns, metrics


def split_label(argument: str) -> tuple[str, str]:
    """`(label, directory)` of `DIR` or `LABEL=DIR`, of which both may contain "="."""
    if Path(argument).exists() or "=" not in argument:
        return "", argument
    parts = argument.split("=")
    splits = [("=".join(parts[:i]), "=".join(parts[i:])) for i in range(1, len(parts))]
    for label, path in splits:
        if Path(path).exists():
            return label, path
    return splits[0]


def read_trials(path: str, record: Record) -> list[Run]:
    """The trials of a sweep, without those that `--halving` has stopped. Raises ValueError."""
    if record.finished is None:
        raise ValueError(f"{path}: has not finished; {resume_command(path)} continues it")
    if not record.trials:
        raise ValueError(f"{path}: is a sweep of an older version; its results.csv has its trials")
    file = Path(path) / "results.csv"
    with reading(file), file.open() as lines:
        rows = list(csv.DictReader(lines))
    last_rung = max(int(row.get("trial_rung", 0)) for row in rows)
    script = record.settings["script"]
    seed = record.settings["seed"]
    returns = defaultdict(dict)
    for row in rows:
        if int(row.get("trial_rung", 0)) == last_rung:
            key = script, seed, int(row["seed"])
            returns[int(row["trial"])][key] = float(row["final_return"])

    curves = load_results(path).metrics["episodic_return"]  # [trials, seeds, updates]
    runs = []
    for trial, of_trial in returns.items():
        settings = record.settings | record.trials[trial]
        del settings["num_seeds"], settings["seed"]
        observed = statistics.observed_range(
            {"episodic_return": curves[trial]}, list(of_trial.values())
        )
        run = Run(
            path=path,
            settings=settings,
            label="",
            task=task_of(settings),
            returns=of_trial,
            observed=observed,
            marks={"the text of the script": record.sha256},
            is_trial=True,
        )
        runs.append(run)
    return runs


def read_run(argument: str, kind: str) -> Run:
    """The run of `DIR` or `LABEL=DIR`. Raises ValueError."""
    label, path = split_label(argument)
    record = read_record(path)
    if is_extended(path, record):
        raise ValueError(
            f"{path}: was extended to {record.settings['total_timesteps']} timesteps and has not "
            "reached them; its results are older. Finish it first"
        )
    returns, metrics = read_returns(path, kind, record)
    lost = np.flatnonzero(~np.isfinite(returns)).tolist()
    if lost:
        agents = f"agents {lost} of {len(returns)}"
        print(f"{path}: {agents} diverged or have no return; they count as the worst")

    settings = dict(record.settings)
    if record.kind == "script":
        share = share_of_main(path, settings)
        if share < 1.0:
            print(f"{path}: was stopped after {100 * share:.0f} % of its updates")
    task = task_of(settings)
    seed = settings.pop("seed")
    settings.pop("num_seeds")
    values = {}
    for agent, value in enumerate(returns):
        key = settings["script"], seed, agent
        values[key] = float(value) if np.isfinite(value) else -np.inf
    marks = {"the number of updates": metrics["episodes"].shape[1]}
    if record.sha256:  # a script's own `main` records none
        marks["the text of the script"] = record.sha256
    observed = statistics.observed_range(metrics, returns)
    return Run(path, settings, label, task, values, observed, marks)


def differing(runs) -> list[str]:
    """Names of the settings, including the script, in which runs of one environment differ."""
    values = defaultdict(set)
    names = [name for run in runs for name in run.settings if name not in OF_THE_TASK]
    for name in names:
        for run in runs:
            values[name].add(json.dumps(run.settings.get(name)))
    return [name for name, different in values.items() if len(different) > 1]


def label_runs(runs: list[Run]) -> list[Run]:
    """Give each run without a label the default one.

    It is the script and the settings in which runs of the script differ.
    """
    alike = defaultdict(list)
    for run in runs:
        if not run.label:
            alike[run.settings["script"], run.task].append(run)
    names = defaultdict(dict)  # a dictionary keeps the order of the fields
    for (script, _), group in alike.items():
        names[script] |= dict.fromkeys(differing(group))

    labeled = []
    for run in runs:
        if not run.label:
            script = run.settings["script"]
            fields = [f"{field}={run.settings.get(field)}" for field in names[script]]
            run = run._replace(label=" ".join([script, *fields]))
        labeled.append(run)
    return labeled


def gather(runs: list[Run]) -> dict[str, dict[str, dict]]:
    """`{method: {environment: {(script, seed, agent): return}}}`.

    All methods are in the same environments. Raises ValueError.
    """
    methods = defaultdict(dict)
    sources = defaultdict(list)
    for run in label_runs(runs):
        others = sources[run.label, run.task]
        others.append(run)
        first = others[0]
        fields = differing(others)
        for name, mark in run.marks.items():
            if any(other.marks.get(name, mark) != mark for other in others):
                fields.append(name)
        if fields:
            raise ValueError(
                f"{run.path} and {first.path} are both {run.label} on {run.task} but differ in "
                f"{', '.join(fields)}; give each a label, as in LABEL={run.path}"
            )
        returns = methods[run.label].setdefault(run.task, {})
        twice = returns.keys() & run.returns.keys()
        if twice and not run.is_trial:  # a point of a grid that two machines trained counts once
            _, seed, agent = min(twice)
            raise ValueError(
                f"{run.path}: agent {agent} of seed {seed} occurs twice, also in {first.path}"
            )
        returns |= {key: run.returns[key] for key in run.returns.keys() - twice}

    tasks = sorted({run.task for run in runs})
    for method, of_method in methods.items():
        missing = [task for task in tasks if task not in of_method]
        if missing:
            raise ValueError(
                f"{method} has no run on {', '.join(missing)}; "
                "all methods need the same environments"
            )
    return {method: {task: methods[method][task] for task in tasks} for method in methods}


def tasks_of(methods) -> list[str]:
    """The environments, which all methods share."""
    return list(next(iter(methods.values())))


def read_scales(tasks: list[str], scales) -> dict[str, tuple[float, float]]:
    """`{environment: (low, high)}` of `--scale`. Raises ValueError."""
    bounds = {}
    for name, low, high in scales:
        named = [task for task in tasks if name in (task, task.split()[0])]
        if not named:
            raise ValueError(f"scale: no run is on {name}, only on {', '.join(tasks)}")
        if not -np.inf < low < high < np.inf:
            raise ValueError(f"scale {name} {low:g} {high:g}: LOW must be less than HIGH")
        twice = bounds.keys() & named
        if twice:
            raise ValueError(f"scale: {min(twice)} is given twice")
        bounds |= dict.fromkeys(named, (low, high))
    return bounds


def observed_ranges(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """`{environment: (lowest, highest)}` of the returns that were seen in any run."""
    ranges = {}
    for run in runs:
        low, high = run.observed
        lowest, highest = ranges.get(run.task, run.observed)
        ranges[run.task] = (min(low, lowest), max(high, highest))
    return ranges


def rescale(methods, ranges, scales) -> tuple[dict, dict, bool]:
    """Scores `(return - low) / (high - low)`, the ranges of returns as scores, and True.

    For one environment without a scale, returns, their range and False. Raises ValueError.
    """
    tasks = tasks_of(methods)
    bounds = read_scales(tasks, scales)
    missing = [task for task in tasks if task not in bounds]
    if missing:
        if len(tasks) == 1:
            return methods, ranges, False
        raise ValueError(
            f"scale: environments have different returns; give --scale {missing[0]} LOW HIGH"
        )
    scores = {}
    for method, of_method in methods.items():
        scores[method] = {}
        for task, returns in of_method.items():
            low, high = bounds[task]
            scaled = {key: (value - low) / (high - low) for key, value in returns.items()}
            scores[method][task] = scaled
    ranges_of_scores = {}
    for task, (low, high) in bounds.items():
        ranges_of_scores[task] = tuple((end - low) / (high - low) for end in ranges[task])
    return scores, ranges_of_scores, True


# --- results ---


def mean_of_finite(*samples, ranges=((-np.inf, np.inf),)) -> tuple[list, str]:
    """The mean over environments with its interval, and its kind.

    `ranges` are the lowest and the highest return of each environment.
    """
    lowest, highest = np.mean(ranges, axis=0)
    finite = [statistics.finite(sample) for sample in samples]
    return statistics.mean_interval(*finite, lowest=lowest, highest=highest)


def worst_agent(*samples) -> tuple[list, str]:
    return [min(np.min(sample) for sample in samples), np.nan, np.nan], ""


def by_bootstrap(statistic, *samples) -> tuple[list, str]:
    return statistics.bootstrap_interval(statistic, *samples), "bootstrap"


def as_numbers(interval: list, kind: str) -> dict:
    value, low, high = map(float, interval)
    return {"value": value, "low": low, "high": high, "interval": kind}


def show(row: dict) -> str:
    """A mean says if its interval is not Student's."""
    kind = row["interval"] if row["statistic"] == "mean" else "student"
    return statistics.show(row["value"], row["low"], row["high"], kind)


def values_of(tasks: dict) -> list[np.ndarray]:
    """The returns of a method in each environment."""
    return [np.array(list(returns.values())) for returns in tasks.values()]


def count_seeds(samples) -> str:
    """`10`, or `9 of 10 finite`; several counts where environments differ."""
    return "/".join(dict.fromkeys(map(statistics.count_finite, samples)))


def aggregate(methods, ranges, scaled: bool) -> list[dict]:
    """A row for each method and statistic, the method with the highest interquartile mean first."""
    columns = {
        "mean": partial(mean_of_finite, ranges=[ranges[task] for task in tasks_of(methods)]),
        "worst agent": worst_agent,
        "interquartile mean": partial(by_bootstrap, statistics.middle_mean),
        "median": partial(by_bootstrap, statistics.median),
    }
    if scaled:
        columns["optimality gap"] = partial(by_bootstrap, statistics.optimality_gap)
    rows = []
    for method, tasks in methods.items():
        samples = values_of(tasks)
        for name, statistic in columns.items():
            row = {
                "statistic": name,
                "method": method,
                "versus": "",
                "seeds": count_seeds(samples),
            }
            rows.append(row | as_numbers(*statistic(*samples)))
    values = {(row["method"], row["statistic"]): row["value"] for row in rows}

    def rank(row):  # many interquartile means may be equal, such as 500 on CartPole-v1
        return values[row["method"], "interquartile mean"], values[row["method"], "mean"]

    return sorted(rows, key=rank, reverse=True)


def compare_pairs(methods, order) -> list[dict]:
    """A row for each pair of methods: how probable it is that the first one is better."""
    rows = []
    for x, y in itertools.combinations(order, 2):
        of_x = values_of(methods[x])
        of_y = values_of(methods[y])
        sizes = [f"{len(a)}+{len(b)}" for a, b in zip(of_x, of_y, strict=True)]
        row = {
            "statistic": "probability of improvement",
            "method": x,
            "versus": y,
            "seeds": "/".join(dict.fromkeys(sizes)),
        }
        won = by_bootstrap(statistics.probability_of_improvement, *of_x, *of_y)
        rows.append(row | as_numbers(*won))
    return rows


def table(rows: list[dict]) -> str:
    """Statistics as columns, a line for each method or pair."""
    lines = defaultdict(dict)
    for row in rows:
        name = f"{row['method']} > {row['versus']}" if row["versus"] else row["method"]
        cells = lines[name]
        cells["seeds"] = row["seeds"]
        cells[row["statistic"]] = show(row)
    columns = list(dict.fromkeys(column for cells in lines.values() for column in cells))
    text = [["", *columns]]
    for name, cells in lines.items():
        text.append([name, *[cells.get(column, "-") for column in columns]])
    return align(text)


def draw_panel(axes, name: str, rows: list[dict], unit: str) -> None:
    """One statistic: a bar over the interval, a line at the value, the name above them.

    Methods or pairs stand from top to bottom.
    """
    for place, row in enumerate(rows):
        color = "0.5" if row["versus"] else f"C{place % 10}"
        if np.isfinite([row["low"], row["high"]]).all():
            axes.barh(place, row["high"] - row["low"], 0.4, row["low"], color=color, alpha=0.5)
        if np.isfinite(row["value"]):
            axes.vlines(row["value"], place - 0.2, place + 0.2, color="black", linewidth=2)
        text = f"{row['method']} > {row['versus']}" if row["versus"] else row["method"]
        text = as_label(text)
        if len(text) > 42:  # wider than the panel
            text = text.replace(" > ", "\n> ")
        where = {"transform": axes.get_yaxis_transform(), "verticalalignment": "bottom"}
        white = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
        axes.text(0.0, place - 0.26, text, fontsize=9, bbox=white, **where)
    axes.set_yticks([])
    axes.use_sticky_edges = False  # leave a margin between bars and the frame
    axes.margins(x=0.08)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    is_probability = name == "probability of improvement"
    if is_probability:
        axes.axvline(0.5, color="0.4", linestyle=":")  # neither is better here
        axes.set_xlim(-0.04, 1.04)
    axes.set_title(name, fontsize=11)
    axes.set_xlabel("probability" if is_probability else unit)


def draw(rows: list[dict], title: str, unit: str, file) -> None:
    """Panels for the interquartile mean and, with several methods, for each pair of them."""
    panels = defaultdict(list)
    for row in rows:
        if row["statistic"] in ("interquartile mean", "probability of improvement"):
            panels[row["statistic"]].append(row)
    most = max(2, *map(len, panels.values()))
    layout = ConstrainedLayoutEngine(w_pad=0.12)
    figure = Figure(figsize=(7, 1.2 + 0.55 * most), layout=layout)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, of_panel) in zip(grid, panels.items(), strict=True):
        draw_panel(axes, name, of_panel, unit)
        axes.set_ylim(most - 0.6, -0.75)
    figure.suptitle(as_label(title))
    figure.savefig(file, format="png", dpi=150)


def as_latex(rows: list[dict]) -> str:
    """A table: a line for each environment, a column for each method, means with their intervals.

    A mean is bold if its interval lies above the intervals of all other methods.
    """
    of_task = defaultdict(dict)
    for row in rows:
        if row["statistic"] == "mean":
            of_task[row["environment"]][row["method"]] = row
    methods = list(next(iter(of_task.values())))
    lines = [["environment", *map(escape_latex, methods)]]
    for task, means in of_task.items():
        cells = [escape_latex(task)]
        for method in methods:
            row = means[method]
            others = [means[other]["high"] for other in methods if other != method]
            cell = show(row)
            is_best = bool(others) and all(row["low"] > high for high in others)
            cells.append(f"\\textbf{{{cell}}}" if is_best else cell)
        lines.append(cells)
    head, *body = [" & ".join(cells) + r" \\" for cells in lines]
    columns = "l" + "r" * len(methods)
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", head, r"\hline"]
    return "\n".join([*begin, *body, r"\hline", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def with_environment(rows: list[dict], name: str) -> list[dict]:
    return [{"environment": name} | row for row in rows]


def compare_runs(runs, returns: str = "final", scale=()) -> list[dict]:
    """Statistics over the seeds of several runs with their 95 % intervals, as rows.

    A row has the keys "environment", "statistic", "method", "versus", "seeds", "value", "low",
    "high" and "interval", the kind of the interval: student, bootstrap, or cut (Student's, cut at
    the returns that were seen). "versus" is the other method of a pair, or empty. Rows over all
    environments come first, and rows of each environment follow if there are several. Prints a note
    on a run that was stopped, and on agents that diverged. Executes no script. Raises ValueError.

    Args:
        runs: run directories as DIR or LABEL=DIR; runs with the same label are one method
        returns: returns to compare: "final" for the end of training, "greedy" for the evaluation
        scale: (ENV, LOW, HIGH), the returns with scores 0 and 1; needed for several environments
    """
    return compare_found(read_runs(runs, returns), scale)


def compare_found(runs: list[Run], scale) -> list[dict]:
    """The rows of `compare_runs`. Trials of sweeps form no pairs. Raises ValueError."""
    methods = gather(runs)
    ranges = observed_ranges(runs)
    scores, ranges_of_scores, scaled = rescale(methods, ranges, scale)
    rows = aggregate(scores, ranges_of_scores, scaled)
    if not any(run.is_trial for run in runs):
        rows += compare_pairs(scores, order=dict.fromkeys(row["method"] for row in rows))
    tasks = tasks_of(scores)
    rows = with_environment(rows, ", ".join(tasks))
    if len(tasks) > 1:
        for task in tasks:
            of_task = {method: {task: methods[method][task]} for method in methods}
            rows += with_environment(aggregate(of_task, ranges, scaled=False), task)
    return rows


def read_runs(arguments, kind: str) -> list[Run]:
    """All runs, and the trials of all sweeps. Raises ValueError."""
    if not arguments:
        raise ValueError("runs: give at least one DIR or LABEL=DIR")
    runs = []
    for argument in map(str, arguments):
        label, path = split_label(argument)
        record = read_record(path)
        if record.kind != "sweep":
            runs.append(read_run(argument, kind))
        elif label or kind != "final":
            raise ValueError(f"{path}: is a sweep, whose trials have no label and no greedy return")
        else:
            runs += read_trials(path, record)
    return runs


def best_settings(runs: list[Run], method: str) -> dict:
    """The fields of the script's config of a method."""
    (settings, *_) = [run.settings for run in label_runs(runs) if run.label == method]
    values = {name: value for name, value in settings.items() if name not in OF_A_RUN}
    return {name: float(value) if value in NOT_IN_JSON else value for name, value in values.items()}


def new_folder() -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"compare-{stamp}-{time.time_ns() % 10**6:06d}")


def main(
    runs: tyro.conf.Positional[tuple[str, ...]],
    returns: Literal["final", "greedy"] = "final",
    scale: tuple[tuple[str, float, float], ...] = (),
    out: Path | None = None,
    latex: bool = False,
) -> Path:
    """Compare, print the tables, write `compare.csv` and `compare.png`.

    Of trials of sweeps also write `best.yaml`. Returns the directory. Raises ValueError.

    Args:
        runs: run directories as DIR or LABEL=DIR; runs with the same label are one method
        returns: returns to compare: final for the end of training, greedy for the evaluation
        scale: ENV LOW HIGH, the returns with scores 0 and 1; needed for several environments
        out: folder for compare.csv and compare.png; runs/compare-TIME-RANDOM by default
        latex: also write compare.tex, a table of the mean returns in each environment
    """
    found = read_runs(runs, returns)
    rows = compare_found(found, scale)
    by_environment = defaultdict(list)
    for row in rows:
        by_environment[row["environment"]].append(row)
    (all_tasks, joint), *others = by_environment.items()
    pairs = [row for row in joint if row["versus"]]

    kind = WORDS[returns]
    title = f"{kind} return on {all_tasks}"
    scores_text = ", as a score between LOW and HIGH" if scale else ""
    print(f"{printable(title)}{scores_text}; 95 % intervals in brackets\n")
    print(table([row for row in joint if not row["versus"]]))
    if pairs:
        print(f"\n{table(pairs)}")
    for task, of_task in others:
        print(f"\n{kind} return on {printable(task)}\n{table(of_task)}")

    out = out or new_folder()
    write(out / "compare.csv", as_csv([list(rows[0]), *[row.values() for row in rows]]))
    if latex:
        of_one_task = [row for _, of_task in others for row in of_task] or joint
        write(out / "compare.tex", as_latex(of_one_task))
    if all(run.is_trial for run in found):
        best = best_settings(found, rows[0]["method"])
        write(out / "best.yaml", yaml.safe_dump(best, sort_keys=False))
    unit = "score" if scale else "return"
    write_picture(out / "compare.png", partial(draw, joint, title, unit))
    print(f"\nresults in {out}")
    return out
