"""The results of a sweep: table, CSV, pictures, metrics and the best agents."""

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from onejit.base import statistics
from onejit.base.files import delete_folder, reading, write, write_picture
from onejit.base.text import align, as_csv, file_names
from onejit.engine.loop import Trained
from onejit.run.record import Record, now, write_record
from onejit.run.write import finish_run, write_inputs
from onejit.script import local_modules
from onejit.script.configs import OF_THE_TASK, plain, write_config
from onejit.script.steps import steps_of
from onejit.sweep import pictures
from onejit.sweep.ranking import best_trials, rank_trials
from onejit.sweep.slices import (
    DIVERGED,
    FINAL_RETURN,
    FIRST_NOT_FINITE,
    delete_slices,
    finished_slices,
    read_agents_of_runs,
    read_slice,
)
from onejit.sweep.swept import show_value
from onejit.sweep.trials import Sweep

MOST_LINES = 22  # of a table that is printed
OF_TRIALS = ("warmup_timesteps", "steps_per_update")  # arrays [trials] in metrics.npz
# of a sweep's record, in the records of its trials
KEPT = (
    "command",
    "started",
    "device",
    "versions",
    "commit",
    "sha256",
    "modules",
    "not_finite_at_start",
)


class Result(NamedTuple):
    """The result of a trial."""

    trial: int
    config: Any
    values: dict  # of the swept fields, without the environment's
    metrics: dict  # {name: [seeds, updates]}
    returns: np.ndarray  # final return of each seed, -inf if it is not finite: [seeds]
    # first update of each seed with a loss that is not finite, or -1: [seeds]
    not_finite: np.ndarray
    diverged: np.ndarray  # whether the parameters are not finite: [seeds]
    interquartile_mean: float
    low: float  # end of its 95 % interval, NaN for one seed
    high: float  # the other end
    rung: int | None = None  # the last rung of `--halving` that it has trained, from 1

    def mean_of_finite(self) -> float:
        """Mean return of the finite seeds, or -inf."""
        return float(statistics.finite(self.returns).mean())

    def worst_of_finite(self) -> float:
        """Worst return of the finite seeds, or -inf."""
        return float(statistics.finite(self.returns).min())


def collect(sweep: Sweep) -> dict[int, dict]:
    """All arrays of each trial's slices, in the order of trials: `{trial: {name: [seeds, ...]}}`.

    Raises OSError if a file cannot be read.
    """
    seeds = sweep.search.options.num_seeds
    trials = {}
    for number, group in enumerate(sweep.trials.groups):
        parts = [read_slice(file) for file in finished_slices(sweep.run_dir, number)]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for position, trial in enumerate(group.trials):
            rows = slice(position * seeds, (position + 1) * seeds)
            trials[trial] = {name: values[rows] for name, values in whole.items()}
    return dict(sorted(trials.items()))


def make_results(sweep: Sweep, arrays: dict[int, dict]) -> list[Result]:
    """Results in the order of `arrays`, which `collect` describes.

    Seeds are drawn jointly for the intervals: all trials share keys.
    """
    groups = sweep.trials.groups
    last_group = sweep.trials.last_groups()
    returns = np.stack([of_trial[FINAL_RETURN] for of_trial in arrays.values()], axis=1)
    means, lows, highs = statistics.bootstrap_interval(statistics.interquartile_mean, returns)
    results = []
    for position, (trial, of_trial) in enumerate(arrays.items()):
        metrics = dict(of_trial)
        values = sweep.trials.values[trial]
        result = Result(
            trial=trial,
            config=sweep.search.config_of(sweep.trials.values[trial]),
            values={name: values[name] for name in values if name not in OF_THE_TASK},
            returns=metrics.pop(FINAL_RETURN),
            not_finite=metrics.pop(FIRST_NOT_FINITE),
            diverged=metrics.pop(DIVERGED),
            metrics=metrics,
            interquartile_mean=float(means[position]),
            low=float(lows[position]),
            high=float(highs[position]),
            rung=groups[last_group[trial]].rung + 1 if sweep.search.options.halving else None,
        )
        results.append(result)
    return results


# --- tables ---


def make_table(ranked: list[Result]) -> list[str]:
    titles = ["interquartile mean", "95 % interval", "mean", "worst seed", "seeds"]
    has_rungs = ranked[0].rung is not None
    if has_rungs:
        titles.append("rung")
    rows = [["trial", *ranked[0].values, *titles]]
    for result in ranked:
        interval = "none"
        if not np.isnan(result.low):
            interval = f"{result.low:.4g} to {result.high:.4g}"
        row = [
            str(result.trial),
            *[show_value(value) for value in result.values.values()],
            f"{result.interquartile_mean:.4g}",
            interval,
            show_value(result.mean_of_finite()),
            show_value(result.worst_of_finite()),
            statistics.count_finite(result.returns),
        ]
        if has_rungs:
            row.append(str(result.rung))
        rows.append(row)
    return align(rows).split("\n")


def make_csv(sweep: Sweep, results: list[Result]) -> str:
    """A row per trial and seed, in the order of trials.

    A return that is not finite is written as -inf.
    """
    of_seed = ["seed", "final_return", "first_update_not_finite", "diverged"]
    of_trial = ["trial_interquartile_mean", "trial_mean", "trial_worst"]
    rank = {}
    if sweep.search.options.halving:
        of_trial += ["trial_rung", "trial_updates", "trial_rank"]
        for trials in rank_trials(sweep.search, sweep.trials).values():
            rank |= {trial: place for place, trial in enumerate(trials, start=1)}
    rows = [["trial", *sweep.search.swept, *of_seed, *of_trial]]
    for result in results:
        values = []
        for value in sweep.trials.values[result.trial].values():
            values.append(value if isinstance(value, float) else show_value(value))
        for seed, final_return in enumerate(result.returns):
            not_finite = result.not_finite[seed]
            row = [
                result.trial,
                *values,
                seed,
                final_return,
                "" if not_finite < 0 else not_finite,
                bool(result.diverged[seed]),
                result.interquartile_mean,
                result.mean_of_finite(),
                result.worst_of_finite(),
            ]
            if result.rung is not None:
                num_updates = result.metrics["episodes"].shape[1]
                row += [result.rung, num_updates, rank[result.trial]]
            rows.append(row)
    return as_csv(rows)


def read_csv(path: Path) -> dict[int, list[dict]]:
    """The rows of each trial in results.csv, in the order of the file. Raises ValueError."""
    trials = {}
    with reading(path), path.open() as file:
        for row in csv.DictReader(file):
            trials.setdefault(int(row["trial"]), []).append(row)
    return trials


# --- files ---


def stack_metrics(metrics: list[dict]) -> dict:
    """{name: [trials, seeds, updates]}.

    Missing updates and missing metrics of a trial are NaN, or 0 for counts.
    """
    num_updates = max(of_trial["episodes"].shape[1] for of_trial in metrics)
    examples = {}
    for of_trial in metrics:
        examples |= of_trial

    def padded(of_trial, name):
        dtype = examples[name].dtype
        missing = 0 if dtype.kind in "iu" else np.nan
        values = of_trial.get(name)
        if values is None:
            values = np.zeros((len(of_trial["episodes"]), 0), dtype)
        width = num_updates - values.shape[1]
        return np.pad(values, ((0, 0), (0, width)), constant_values=missing)

    stacked = {}
    for name in examples:
        stacked[name] = np.stack([padded(of_trial, name) for of_trial in metrics])
    return stacked


def keep_agents(sweep: Sweep, results: dict[int, Result]) -> None:
    """Write a directory for each of the best trials, like a run of `onejit train`.

    Raises OSError.
    """
    delete_folder(sweep.run_dir / "agents")  # of an earlier attempt
    for trial in best_trials(sweep.search, sweep.trials):
        keep_agents_of(sweep, results[trial])


def keep_agents_of(sweep: Sweep, result: Result) -> None:
    trial = result.trial
    seeds = sweep.search.options.num_seeds
    number = sweep.trials.last_groups()[trial]
    first = sweep.trials.groups[number].trials.index(trial) * seeds
    agents = read_agents_of_runs(sweep.run_dir, number, range(first, first + seeds))

    about = {"trial": trial}
    if result.rung is not None:
        about["rung"] = result.rung
        about["num_updates"] = result.metrics["episodes"].shape[1]
        about["total_updates"] = result.config.num_updates
    trained = Trained(
        metrics=result.metrics,
        agent=unflatten_dict(agents, sep="."),
        final_return=result.returns,
    )
    write_run(sweep, f"trial-{trial}", result.config, about, trained)


def write_run(sweep: Sweep, name: str, config, about: dict, trained: Trained) -> Record:
    """Write agents as a run of `onejit train` to `agents/NAME`. Returns its record.

    `about` is added to the record. Raises OSError.
    """
    kept = {name: getattr(sweep.record, name) for name in KEPT}
    record = Record(
        kind="trial",
        settings=sweep.record.settings | plain(config),
        path=str(sweep.run_dir / Path(sweep.search.script.__file__).name),
        **kept,
        **about,
    )

    run_dir = sweep.run_dir / "agents" / name
    modules = local_modules.read_copies(sweep.run_dir, record)
    write_inputs(run_dir, config, sweep.search.script, modules)
    write_record(run_dir, record)
    finish_run(
        run_dir,
        record,
        script=sweep.search.script,
        config=config,
        seed=sweep.search.options.seed,
        trained=trained,
    )
    return record


def write_pictures(sweep: Sweep, ranked: list[Result], task: str, suffix: str) -> None:
    """Pictures of the trials of an environment, best first.

    A picture that cannot be drawn is one warning. Raises OSError if one cannot be written.
    """
    script_name = Path(sweep.search.script.__file__).stem
    title = f"{script_name} on {task}, {sweep.search.options.num_seeds} seeds each"
    drawn = {"learning_curves": partial(pictures.draw_curves, ranked[:5])}
    if sweep.search.options.halving:
        drawn["halving"] = partial(pictures.draw_rungs, ranked)
    if len(ranked) > 1:
        drawn["final_return"] = partial(pictures.draw_returns, ranked)
    if len(ranked[0].values) == 2 and not sweep.search.options.halving:
        drawn["heat_map"] = partial(pictures.draw_heat_map, ranked)
    for name, draw in drawn.items():
        write_picture(sweep.run_dir / f"{name}{suffix}.png", partial(draw, title))


def write_files(sweep: Sweep, arrays: dict[int, dict], keep) -> list[list[str]]:
    """Write a ranking of the trials for each environment, all other results, then the pictures.

    `collect` describes `arrays`. `keep(sweep, {trial: result})` writes the agents of the best
    trials. Returns the tables. Raises OSError.
    """
    run_dir = sweep.run_dir
    results = make_results(sweep, arrays)
    of_trial = {result.trial: result for result in results}
    write(run_dir / "results.csv", make_csv(sweep, results))

    ranks = rank_trials(sweep.search, sweep.trials)
    names = file_names(ranks)
    tables = []
    pictured = {}  # {suffix of the files: (environment, its results)}
    for task, trials in ranks.items():
        ranked = [of_trial[trial] for trial in trials]
        table = make_table(ranked)
        suffix = ""
        if len(ranks) > 1:
            table = [f"{task}:", *table, ""]
            suffix = f"-{names[task]}"
        tables.append(table)
        pictured[suffix] = (task, ranked)
        if math.isfinite(ranked[0].interquartile_mean):
            write_config(run_dir / f"best{suffix}.yaml", ranked[0].config)
    few = []
    for result in results:
        config = result.config
        few.append(statistics.few_episodes(result.metrics, config, config.num_updates))
    lines = [line for table in tables for line in table]
    write(run_dir / "table.txt", "\n".join(lines) + "\n")
    tables += [[line] for line in statistics.warning_of_few(np.concatenate(few), "runs")]

    keep(sweep, of_trial)
    metrics = stack_metrics([result.metrics for result in results])
    configs = [result.config for result in results]
    metrics["warmup_timesteps"] = [getattr(config, "warmup_timesteps", 0) for config in configs]
    metrics["steps_per_update"] = [steps_of(config) for config in configs]
    write(run_dir / "metrics.npz", partial(np.savez_compressed, **metrics))
    for suffix, (task, ranked) in pictured.items():
        write_pictures(sweep, ranked, task, suffix)

    record = sweep.record
    record.trials = [plain(trial) for trial in sweep.trials.values]
    record.steps_total = record.steps_done
    record.finished = now()
    write_record(run_dir, record)
    return tables


def show_tables(tables: list[list[str]], run_dir: Path) -> None:
    for table in tables:
        print("\n".join(table[:MOST_LINES]))
        if len(table) > MOST_LINES:
            print(f"... {len(table) - MOST_LINES} more in {run_dir / 'table.txt'}")
    print(f"results in {run_dir}")


def write_results(sweep: Sweep) -> bool:
    """Write and show all results, and delete the files of single slices.

    Returns whether a seed of any trial is left that has not diverged. Raises OSError.
    """
    arrays = collect(sweep)
    tables = write_files(sweep, arrays, keep_agents)
    delete_slices(sweep.run_dir)
    show_tables(tables, sweep.run_dir)
    return not all(of_trial[DIVERGED].all() for of_trial in arrays.values())
