"""The results of a sweep: table, CSV, pictures, metrics and the best agents."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from onejit.base import statistics
from onejit.base.files import delete_folder, write, write_picture
from onejit.base.text import align, as_csv, file_names
from onejit.engine.checkpoints import joined
from onejit.engine.loop import Trained
from onejit.run.record import Record, now, write_record
from onejit.run.write import finish_run, write_inputs
from onejit.script import local_modules
from onejit.script.configs import OF_THE_TASK, plain, write_config
from onejit.script.steps import steps_of, timesteps_until
from onejit.sweep import pictures
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
from onejit.sweep.trials import Sweep, rank_trials

MOST_LINES = 22  # of a table that is printed
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
    seeds = sweep.options.num_seeds
    trials = {}
    for number, group in enumerate(sweep.trials.groups):
        parts = [read_slice(file) for file in finished_slices(sweep.run_dir, number)]
        whole = joined(parts)
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
            rung=groups[last_group[trial]].rung + 1 if sweep.options.halving else None,
        )
        results.append(result)
    return results


# --- tables ---


def make_table(ranked: list[Result]) -> list[str]:
    titles = ["interquartile mean", "95 % interval", "mean", "worst agent", "seeds"]
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


def make_csv(sweep: Sweep, results: list[Result], ranked: dict[str, list[Result]]) -> str:
    """A row per trial and seed, in the order of trials.

    A return that is not finite is written as -inf.
    """
    of_seed = ["seed", "final_return", "first_update_not_finite", "diverged"]
    of_trial = ["trial_interquartile_mean", "trial_mean", "trial_worst"]
    rank = {}
    for of_task in ranked.values():
        rank |= {result.trial: place for place, result in enumerate(of_task, start=1)}
    if sweep.options.halving:
        of_trial += ["trial_rung", "trial_updates", "trial_rank"]
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


def keep_agents(sweep: Sweep, result: Result) -> None:
    """Write the agents of a trial like a run of `onejit train`. Raises OSError."""
    trial = result.trial
    script = sweep.search.script
    seeds = sweep.options.num_seeds
    number = sweep.trials.last_groups()[trial]
    first = sweep.trials.groups[number].trials.index(trial) * seeds
    agents = read_agents_of_runs(sweep.run_dir, number, range(first, first + seeds))

    kept = {name: getattr(sweep.record, name) for name in KEPT}
    record = Record(
        kind="trial",
        settings=sweep.record.settings | plain(result.config),
        path=str(sweep.run_dir / Path(script.__file__).name),
        trial=trial,
        **kept,
    )
    if result.rung is not None:
        record.rung = result.rung
        record.num_updates = result.metrics["episodes"].shape[1]
        record.total_updates = result.config.num_updates

    run_dir = sweep.run_dir / "agents" / f"trial-{trial}"
    modules = local_modules.read_copies(sweep.run_dir, sweep.record)
    write_inputs(run_dir, result.config, script, modules)
    write_record(run_dir, record)
    trained = Trained(result.metrics, unflatten_dict(agents, sep="."), result.returns)
    finish_run(run_dir, record, script, result.config, trained)


def write_tables(
    sweep: Sweep, results: list[Result], ranked: dict[str, list[Result]]
) -> list[list[str]]:
    """Write results.csv, and table.txt and best.yaml of each environment. Returns the tables.

    Raises OSError.
    """
    run_dir = sweep.run_dir
    suffixes = suffixes_of(ranked)
    tables = []
    for task, of_task in ranked.items():
        table = make_table(of_task)
        if len(ranked) > 1:
            table = [f"{task}:", *table, ""]
        tables.append(table)
        if math.isfinite(of_task[0].interquartile_mean):
            write_config(run_dir / f"best{suffixes[task]}.yaml", of_task[0].config)
    lines = [line for table in tables for line in table]
    write(run_dir / "table.txt", "\n".join(lines) + "\n")
    write(run_dir / "results.csv", make_csv(sweep, results, ranked))
    return tables


def suffixes_of(ranked: dict[str, list[Result]]) -> dict[str, str]:
    """What the names of an environment's files end with, if there are several environments."""
    if len(ranked) == 1:
        return dict.fromkeys(ranked, "")
    return {task: f"-{name}" for task, name in file_names(ranked).items()}


def write_metrics(file: Path, results: list[Result]) -> None:
    """Raises OSError."""
    metrics = stack_metrics([result.metrics for result in results])
    configs = [result.config for result in results]
    metrics["warmup_timesteps"] = [timesteps_until(config, 0) for config in configs]
    metrics["steps_per_update"] = [steps_of(config) for config in configs]
    write(file, partial(np.savez_compressed, **metrics))


def write_pictures(sweep: Sweep, ranked: list[Result], task: str, suffix: str) -> None:
    """Pictures of the trials of an environment, best first.

    A picture that cannot be drawn is one warning. Raises OSError if one cannot be written.
    """
    script_name = Path(sweep.search.script.__file__).stem
    title = f"{script_name} on {task}, {sweep.options.num_seeds} seeds each"
    drawn = {"learning_curves": partial(pictures.draw_curves, ranked[:5])}
    if sweep.options.halving:
        drawn["halving"] = partial(pictures.draw_rungs, ranked)
    if len(ranked) > 1:
        drawn["final_return"] = partial(pictures.draw_returns, ranked)
    if len(ranked[0].values) == 2 and not sweep.options.halving:
        drawn["heat_map"] = partial(pictures.draw_heat_map, ranked)
    for name, draw in drawn.items():
        write_picture(sweep.run_dir / f"{name}{suffix}.png", partial(draw, title))


def show_tables(tables: list[list[str]], results: list[Result], run_dir: Path) -> None:
    for table in tables:
        print("\n".join(table[:MOST_LINES]))
        if len(table) > MOST_LINES:
            print(f"... {len(table) - MOST_LINES} more in {run_dir / 'table.txt'}")
    few = []
    for result in results:
        config = result.config
        few.append(statistics.few_episodes(result.metrics, config, config.num_updates))
    for line in statistics.warning_of_few(np.concatenate(few), "runs"):
        print(line)
    print(f"results in {run_dir}")


def write_results(sweep: Sweep) -> bool:
    """Write and show all results, pictures last, and delete the files of single slices.

    Returns whether a seed of any trial is left that has not diverged. Raises OSError.
    """
    run_dir = sweep.run_dir
    record = sweep.record
    results = make_results(sweep, collect(sweep))
    of_trial = {result.trial: result for result in results}
    ranked = {}  # {environment: its results, best first}
    for task, trials in rank_trials(sweep.search, sweep.trials).items():
        ranked[task] = [of_trial[trial] for trial in trials]

    tables = write_tables(sweep, results, ranked)
    delete_folder(run_dir / "agents")  # of an earlier attempt
    for of_task in ranked.values():
        for result in of_task[: sweep.options.keep]:
            if math.isfinite(result.interquartile_mean):
                keep_agents(sweep, result)
    write_metrics(run_dir / "metrics.npz", results)
    suffixes = suffixes_of(ranked)
    for task, of_task in ranked.items():
        write_pictures(sweep, of_task, task, suffixes[task])

    record.trials = [plain(trial) for trial in sweep.trials.values]
    record.steps_total = record.steps_done
    record.finished = now()
    write_record(run_dir, record)
    delete_slices(run_dir)
    show_tables(tables, results, run_dir)
    return not all(result.diverged.all() for result in results)
