"""Try hyperparameters of a script, each with many seeds: grid and random search in one compiled program.

    python tools/sweep.py ppo --lr 1e-4 3e-4 1e-3 --clip-eps 0.1 0.2 --num-seeds 16
    python tools/sweep.py ppo --gamma one-minus-log-uniform 0.9 0.999 --samples 64 --num-seeds 16
    python tools/sweep.py path/to/my_algorithm.py --num-envs 4 16 --num-seeds 8
    python tools/sweep.py --resume RUN_DIR

A hyperparameter with several values is swept over; one with a single value is set for all. Several fields make a grid.
`uniform LOW HIGH`, `log-uniform LOW HIGH` and `one-minus-log-uniform LOW HIGH` draw `--samples` values of a float; with
a grid, the same ones at each of its points. Of a field that holds several values, commas join those of one trial:
`--hidden-sizes 64,64 256,256`. All float fields share one compilation; each combination of the others is a compile
group of its own. `sweep.py SCRIPT --help` lists all flags; docs/sweep.md says what is written where.
"""

import csv
import dataclasses
import io
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import results
import training
import yaml
from compare import OF_THE_TASK, align, task_of
from matplotlib.figure import Figure
from tqdm import tqdm

DISTRIBUTIONS = ("uniform", "log-uniform", "one-minus-log-uniform")

# --- what to run ---


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a sweep."""

    num_seeds: int = 4  # agents of each trial, with the same random keys in all
    samples: int | None = None  # draws of the fields with a distribution
    seed: int = 0  # of the key that the agents' keys are split from, and of the draws
    run_dir: Path | None = None  # a new directory; runs/SCRIPT/sweep-ENVIRONMENT-TIME where not given
    checkpoint_interval: float = 60.0  # seconds between checkpoints of the slice that trains; 0 for none


class Request(NamedTuple):
    """What the command line asks for."""

    script: Any
    config: Any  # of the fields that are not swept
    options: Options
    hosts: training.Hosts
    run_dir: Path | None  # of the sweep that goes on, else None
    swept: dict  # field: its words on the command line
    trials: list  # of {swept field: value}
    words: list  # of the command line, with what --config held
    record: dict  # run.json of the sweep that goes on, else empty


def split_flags(words: list[str]) -> dict[str, list[str]]:
    """Each flag with its words; the last of a name wins. Raises ValueError."""
    flags, values = {}, None
    for word in words:
        if word.startswith("--"):
            values = flags[word[2:].replace("-", "_")] = []
        elif values is None:
            raise ValueError(f"{word}: is not a flag")
        else:
            values.append(word)
    return flags


def join_flags(flags: dict[str, list[str]]) -> list[str]:
    return [word for name, values in flags.items() for word in (f"--{name.replace('_', '-')}", *values)]


def holds_several(script, name: str) -> bool:
    return isinstance(getattr(script.Config(), name), (tuple, Mapping))


def is_swept(script, name: str, words: list[str]) -> bool:
    if holds_several(script, name):  # several words are one value: --hidden-sizes 64 64
        return len(words) > 1 and any("," in word for word in words)
    return len(words) > 1 or words[:1] in ([each] for each in DISTRIBUTIONS)


def read_values(script, name: str, words: list[str]) -> list:
    """Words of the command line as values of a field, read as the script reads them. Raises ValueError."""
    values = []
    for word in words:
        flag = [f"--{name}", *(word.split(",") if holds_several(script, name) else [word])]
        values.append(getattr(training.parse_with(script, flag, Options, description="")[0], name))
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: the same value twice in {' '.join(words)}")
    return values


def draw(script, name: str, words: list[str], samples: int, rng) -> np.ndarray:
    """`samples` values of a distribution. Raises ValueError."""
    kind, *bounds = words
    if not isinstance(getattr(script.Config(), name), float):
        raise ValueError(f"{name}: only float fields can be drawn; give a list of values")
    if len(bounds) != 2:
        raise ValueError(f"{name}: {kind} takes LOW and HIGH")
    low, high = read_values(script, name, bounds)
    least, most = {"uniform": (-math.inf, math.inf), "log-uniform": (0, math.inf)}.get(kind, (-math.inf, 1))
    if not least < low < high < most:
        raise ValueError(f"{name}: {kind} {low:g} {high:g} needs {least:g} < LOW < HIGH < {most:g}")
    unit = rng.random_sample(samples)
    if kind == "uniform":
        return low + (high - low) * unit
    if kind == "log-uniform":
        return low * (high / low) ** unit
    return 1.0 - (1.0 - high) * ((1.0 - low) / (1.0 - high)) ** unit


def make_trials(script, swept: dict[str, list[str]], samples: int | None, seed: int) -> list[dict]:
    """All combinations of the listed values, and with each of them the drawn ones. Raises ValueError."""
    rng = np.random.RandomState(seed)  # whose stream never changes: a resumed sweep draws the same
    listed = {name: words for name, words in swept.items() if words[0] not in DISTRIBUTIONS}
    drawn = {name: words for name, words in swept.items() if words[0] in DISTRIBUTIONS}
    if samples is not None and samples < 1:
        raise ValueError(f"samples = {samples}: must be at least 1")
    if bool(drawn) != (samples is not None):
        name = next(iter(drawn), "samples")
        raise ValueError(f"{name}: a field with {' or '.join(DISTRIBUTIONS)} and --samples go together")
    columns = {name: draw(script, name, words, samples, rng) for name, words in drawn.items()}
    points = [{name: float(values[i]) for name, values in columns.items()} for i in range(samples or 1)]
    grid = itertools.product(*(read_values(script, name, words) for name, words in listed.items()))
    trials = [dict(zip(listed, values, strict=True)) | point for values in grid for point in points]
    return [{name: trial[name] for name in swept} for trial in trials]


def read_request(words: list[str]) -> Request:
    """Joins the other processes before the script is imported, which starts JAX. Raises ValueError."""
    name, hosts, words = training.split_words(words)
    training.connect(hosts)
    run_dir, record = None, {}
    if name == "--resume":
        run_dir, record, script = training.read_resumed(words, "sweep.py", "words")
        words = record["words"]
    else:
        given = [word.split("=")[0] for word in words if word.startswith("--")]
        if twice := [flag for flag in given if given.count(flag) > 1]:
            raise ValueError(f"{twice[0]}: is given twice")
        script = results.load_script(name)
        words = results.read_flags(script, words)
    flags = split_flags(words)
    fields = {field.name for field in dataclasses.fields(script.Config)}
    swept = {name: values for name, values in flags.items() if name in fields and is_swept(script, name, values)}
    base = join_flags({name: values for name, values in flags.items() if name not in swept})
    config, options, _ = training.parse_with(script, base, Options, description=__doc__)
    if not swept:
        raise ValueError("nothing to sweep over: give a field several values, as in --lr 1e-4 1e-3")
    trials = make_trials(script, swept, options.samples, options.seed)
    return Request(script, config, options, hosts, run_dir, swept, trials, join_flags(flags), record)


# --- compile groups ---


class Group(NamedTuple):
    """Trials that differ in float fields alone: one compilation."""

    config: Any
    trials: list[int]
    floats: dict  # swept float field: [trials of this group]


def make_groups(request: Request) -> list[Group]:
    names = [name for name in request.swept if isinstance(getattr(request.config, name), float)]
    groups = {}
    for index, trial in enumerate(request.trials):
        static = tuple((name, value) for name, value in trial.items() if name not in names)
        groups.setdefault(static, []).append(index)
    floats = {name: np.array([trial[name] for trial in request.trials], np.float32) for name in names}
    return [
        Group(
            dataclasses.replace(request.config, **dict(static)), trials, {name: floats[name][trials] for name in names}
        )
        for static, trials in groups.items()
    ]


def steps_of(config) -> int:
    """Of one agent in one update."""
    return config.num_envs * config.num_steps


def show(value) -> str:
    """A value as in a table, or the values of a trial by their fields."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {show(each)}" for name, each in value.items())
    if isinstance(value, (tuple, Mapping)):  # as on the command line
        return ",".join(map(str, np.ravel([*value.items()] if isinstance(value, Mapping) else value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compile_groups(request: Request, groups: list[Group]) -> list[training.Program]:
    """A program for each group, and print what they need. A sweep that goes on keeps its slices. Raises ValueError."""
    for group in groups:
        with training.naming_the_field(request.script, group.config):  # before anything is compiled
            request.script.make_learner(group.config)
    memory, programs = training.free_memory(request.hosts.memory), []
    seeds, step = request.options.num_seeds, len(jax.devices())
    say = print if training.is_first() else (lambda *_: None)
    say(f"{len(request.trials)} trials x {seeds} seeds in {len(groups)} compile group(s), {step} device(s)")
    sizes = request.record.get("slices", [0] * len(groups))
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True), start=1):
        begun, runs = time.perf_counter(), len(group.trials) * seeds
        compile_size = partial(training.compile_slice, request.script, group.config, list(group.floats))
        program = compile_size(size) if size else training.largest_slice(compile_size, runs, step, memory)
        trial = request.trials[group.trials[0]]
        label = show({name: value for name, value in trial.items() if name not in group.floats}) or "floats alone"
        short = " (MORE THAN IS FREE)" if program.bytes > memory else ""
        say(
            f"group {number} ({label}): {runs} runs of {group.config.num_updates} updates, {-(-runs // program.size)} "
            f"slice(s) of {program.size} with {program.bytes / training.GIB:.3g} GiB on a device{short}; "
            f"compiled in {time.perf_counter() - begun:.1f} s"
        )
        programs.append(program)
    return programs


# --- running ---


def finished_slices(run_dir: Path, group: int) -> list[tuple[int, Path]]:
    """`(first run, file)` of each slice on disk."""
    files = sorted((run_dir / "slices").glob(f"{group}-*.npz"))
    return [(int(file.stem.split("-")[1]), file) for file in files]


def run_group(request: Request, group: Group, program: training.Program, number: int, run_dir: Path, progress) -> None:
    """Train the slices of a group that are not on disk yet, and write each when it is finished."""
    script, options, runs = request.script, request.options, len(group.trials) * request.options.num_seeds
    keys, steps = training.seed_keys(options), steps_of(group.config)

    def watch(first, last, metrics):
        returns = script.mean_return(metrics)[:real]
        if not np.isnan(returns).all():
            progress.set_postfix_str(f"return {np.nanmin(returns):.4g} to {np.nanmax(returns):.4g}", refresh=False)
        progress.update((last - first) * real * steps)

    done = training.agree([first for first, _ in finished_slices(run_dir, number)])
    for first in range(0, runs, program.size):
        last = min(first + program.size, runs)
        real = last - first  # the others, which fill up the last slice, repeat its last run
        if first in done:
            progress.update(real * program.num_updates * steps)
            continue
        run = np.minimum(np.arange(first, first + program.size), runs - 1)
        floats = {name: values[run // options.num_seeds] for name, values in group.floats.items()}
        name = f"{number}-{first:07d}-{last:07d}"
        with training.open_checkpoints(run_dir / "unfinished" / name, keep=1) as manager:
            begun = manager.latest_step() or 0
            if begun and training.is_first():
                tqdm.write(f"resume: {begun} of {program.num_updates} updates of the next slice are done")
            progress.update(begun * real * steps)
            key_data = keys[run % options.num_seeds]
            carry = training.train_slice(program, floats, key_data, manager, options.checkpoint_interval, watch, False)
        metrics = {name: each[:real] for name, each in training.fetch(program, carry["metrics"]).items()}
        del carry
        training.only_first(finish_slice, request, group, metrics, first, run_dir, name)


def finish_slice(request: Request, group: Group, metrics: dict, first: int, run_dir: Path, name: str) -> None:
    """Write the metrics of a slice, throw its checkpoints away, and tell of runs that are not finite."""
    results.write(run_dir / "slices" / f"{name}.npz", partial(np.savez, **metrics))
    shutil.rmtree(run_dir / "unfinished" / name)
    bad, seeds = first_not_finite(metrics), request.options.num_seeds
    for trial in np.unique((first + np.flatnonzero(bad >= 0)) // seeds):
        index = group.trials[trial]
        tqdm.write(f"not finite: trial {index} ({show(request.trials[index])})", file=sys.stderr)


def run_groups(request: Request, groups: list[Group], programs: list[training.Program], run_dir: Path) -> None:
    steps = sum(len(each.trials) * each.config.num_updates * steps_of(each.config) for each in groups)
    steps, silent = steps * request.options.num_seeds, not training.is_first()
    with tqdm(total=steps, unit="step", unit_scale=True, disable=silent) as progress:
        for number, (group, program) in enumerate(zip(groups, programs, strict=True)):
            run_group(request, group, program, number, run_dir, progress)
    shutil.rmtree(run_dir / "unfinished", ignore_errors=True)


def first_not_finite(metrics: dict) -> np.ndarray:
    """The first update whose losses are not all finite, -1 where there is none: [..., updates] -> [...]."""
    no_loss = "episodic_return", "episodic_length"  # NaN where no episode ended
    losses = [each for name, each in metrics.items() if name not in no_loss]
    bad = np.any([~np.isfinite(each) for each in losses], axis=0)
    return np.where(bad.any(axis=-1), bad.argmax(axis=-1), -1)


def collect(request: Request, groups: list[Group], run_dir: Path) -> list[dict]:
    """The metrics of each trial: {name: [seeds, updates]}. Raises OSError where a file cannot be read."""
    trials, seeds = [None] * len(request.trials), request.options.num_seeds
    for number, group in enumerate(groups):
        parts = []
        for _, file in finished_slices(run_dir, number):
            try:
                parts.append(dict(np.load(file)))
            except Exception as error:  # NumPy raises many kinds
                raise OSError(f"{file}: cannot be read; delete it, and --resume trains it again") from error
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for position, trial in enumerate(group.trials):
            rows = slice(position * seeds, (position + 1) * seeds)
            trials[trial] = {name: each[rows] for name, each in whole.items()}
    return trials


# --- results ---


class Result(NamedTuple):
    """What a trial reached."""

    trial: int
    config: Any
    values: dict  # of the swept fields, but those of the environment
    metrics: dict  # {name: [seeds, updates]}
    returns: np.ndarray  # final return of each seed, -inf where it is not finite: [seeds]
    not_finite: np.ndarray  # first such update of each seed, or -1: [seeds]
    mean: float  # interquartile
    low: float  # of its 95 % interval, NaN for one seed
    high: float


def summarize(request: Request, metrics: list[dict]) -> list[Result]:
    """In the order of the trials. Seeds are drawn jointly for all trials, as trials share the seeds' keys."""
    bad = np.stack([first_not_finite(each) for each in metrics])
    final = np.stack([results.final_return(each) for each in metrics])
    returns = np.where((bad < 0) & np.isfinite(final), final, -np.inf)  # [trials, seeds]
    found = []
    for i, (trial, *numbers) in enumerate(zip(request.trials, *results.interval(returns.T), strict=True)):
        values = {name: value for name, value in trial.items() if name not in OF_THE_TASK}
        config = dataclasses.replace(request.config, **trial)
        found.append(Result(i, config, values, metrics[i], returns[i], bad[i], *map(float, numbers)))
    return found


def interval_over_trials(returns: np.ndarray) -> list:
    """Interquartile mean of all returns [trials, seeds], and its interval; seeds are drawn jointly here too."""

    def over_all(drawn):  # [seeds, ..., trials] -> [...]
        return results.interquartile_mean(np.concatenate(np.moveaxis(drawn, -1, 0)))

    return results.interval(returns.T, over_all)


def make_table(ranked: list[Result]) -> list[str]:
    rows = [["trial", *ranked[0].values, "return", "95 % interval", "seeds"]]
    for each in ranked:
        finite, seeds = int(np.isfinite(each.returns).sum()), len(each.returns)
        count = str(seeds) if finite == seeds else f"{finite} of {seeds} finite"
        interval = "none" if np.isnan(each.low) else f"{each.low:.4g} to {each.high:.4g}"
        numbers = [f"{each.mean:.4g}", interval, count]
        rows.append([str(each.trial), *map(show, each.values.values()), *numbers])
    return align(rows).split("\n")


def make_csv(request: Request, found: list[Result]) -> str:
    """A row per trial and seed, in the order of the trials. A return that is not finite is -inf."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", *request.swept, "seed", "final_return", "first_update_not_finite"])
    for each in found:
        values = [value if isinstance(value, float) else show(value) for value in request.trials[each.trial].values()]
        for seed, (final, bad) in enumerate(zip(each.returns, each.not_finite, strict=True)):
            rows.writerow([each.trial, *values, seed, final, "" if bad < 0 else bad])
    return text.getvalue()


def stack_metrics(metrics: list[dict]) -> dict:
    """{name: [trials, seeds, updates]}; where a trial has fewer updates, or lacks a metric, NaN, or 0 for counts."""
    updates = max(each["episodes"].shape[1] for each in metrics)

    def padded(each, name, like):
        values = each.get(name, np.zeros((len(each["episodes"]), 0), like.dtype))
        missing = 0 if like.dtype.kind in "iu" else np.nan
        return np.pad(values, ((0, 0), (0, updates - values.shape[1])), constant_values=missing)

    known = {name: each[name] for each in metrics for name in each}
    return {name: np.stack([padded(each, name, like) for each in metrics]) for name, like in known.items()}


def write_results(request: Request, groups: list[Group], run_dir: Path) -> None:
    """The trials of an environment make a table, which ranks them, and pictures."""
    metrics = collect(request, groups, run_dir)
    found, tasks = summarize(request, metrics), {}
    for each in found:
        tasks.setdefault(task_of(each.config), []).append(each)
    steps = {"warmup_timesteps": [getattr(each.config, "warmup_timesteps", 0) for each in found]}
    steps["steps_per_update"] = [steps_of(each.config) for each in found]
    results.write(run_dir / "metrics.npz", partial(np.savez_compressed, **stack_metrics(metrics), **steps))
    results.write(run_dir / "results.csv", make_csv(request, found))
    tables = []
    for task, trials in tasks.items():
        ranked = sorted(trials, key=lambda each: -each.mean)
        suffix = f"-{re.sub(r'[^-.=0-9A-Za-z]+', '_', task)}" if len(tasks) > 1 else ""
        tables.append([f"{task}:", *make_table(ranked), ""] if len(tasks) > 1 else make_table(ranked))
        if math.isfinite(ranked[0].mean):
            best = results.plain(ranked[0].config)
            results.write(run_dir / f"best{suffix}.yaml", yaml.safe_dump(best, sort_keys=False))
        title = f"{Path(request.script.__file__).stem} on {task}, {request.options.num_seeds} seeds each"
        pictures = {"learning_curves": partial(draw_curves, request.script, ranked[:5])}
        if len(ranked) > 1:
            pictures["final_return"] = partial(draw_returns, ranked)
        if len(ranked[0].values) == 2:
            pictures["heat_map"] = partial(draw_heat_map, ranked)
        for name, draw_it in pictures.items():
            results.write(run_dir / f"{name}{suffix}.png", partial(draw_it, title))
    results.write(run_dir / "table.txt", "\n".join(line for table in tables for line in table) + "\n")
    for table in tables:
        print("\n".join(table[:22]))
        if len(table) > 22:
            print(f"... {len(table) - 22} more in {run_dir / 'table.txt'}")
    print(f"results in {run_dir}")


# --- plots ---


def draw_curves(script, ranked: list[Result], title: str, file) -> None:
    """Return over steps of the best trials: interquartile mean over seeds and its 95 % interval."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for each in ranked:
        updates = each.metrics["episodes"].shape[1]
        edges, kept = np.unique(np.linspace(0, updates, 51).astype(int)), np.isfinite(each.returns)
        parts = [{name: values[:, a:b] for name, values in each.metrics.items()} for a, b in itertools.pairwise(edges)]
        curves = np.stack([script.mean_return(part) for part in parts], axis=1)
        curves[~kept] = -np.inf
        whole = np.isfinite(curves[kept]).all(axis=0)  # where each of them has finished an episode
        numbers = np.array(results.interval(curves[:, whole]))
        center, low, high = np.where(np.isfinite(numbers), numbers, np.nan)
        steps = getattr(each.config, "warmup_timesteps", 0) + edges[1:][whole] * steps_of(each.config)
        (line,) = axes.plot(steps, center, label=show(each.values))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel="environment steps per agent", ylabel="return of the episodes that ended")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def place(axes, which: str, name: str, values: list, as_numbers: bool = True) -> np.ndarray:
    """Where values stand on the axis "x" or "y", which is set: numbers as they are, other values one by one."""
    how, numbers = {"label": name}, all(type(value) in (int, float) for value in values)
    if numbers and as_numbers:
        how["scale"] = "log" if min(values) > 0 and max(values) / min(values) >= 10 else "linear"
    else:
        known = sorted(set(values), key=None if numbers else show)
        how |= {"ticks": range(len(known)), "ticklabels": map(show, known)}
        values = [known.index(value) for value in values]
    axes.set(**{which + key: value for key, value in how.items()})
    return np.array(values)


def draw_returns(ranked: list[Result], title: str, file) -> None:
    """Final return against each swept field: a point per trial, and the mean per value where trials share values."""
    names, means = list(ranked[0].values), np.array([each.mean for each in ranked])
    returns, shown = np.stack([each.returns for each in ranked]), np.isfinite(means)
    figure = Figure(figsize=(max(5, 4 * len(names)), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        where = place(axes, "x", name, [each.values[name] for each in ranked])
        axes.plot(where[shown], means[shown], "o", color="tab:blue", alpha=0.5, markersize=4, label="trial")
        if len(lost := where[~shown]):
            axes.plot(lost, 0.0 * lost, "rx", transform=axes.get_xaxis_transform(), label="not finite")
        points = np.unique(where)
        if len(points) < len(where) or len(names) == 1:
            numbers = np.array([interval_over_trials(returns[where == point]) for point in points])
            center, low, high = np.where(np.isfinite(numbers), numbers, np.nan).T
            label = "interquartile mean, 95 % interval"
            axes.errorbar(points, center, (center - low, high - center), color="black", capsize=3, label=label)
    figure.axes[0].set_ylabel("final return")
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=150)


def draw_heat_map(ranked: list[Result], title: str, file) -> None:
    """Final return over two fields, a coloured point per trial: where they form a grid, with its number."""
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes, means, names = figure.subplots(), np.array([each.mean for each in ranked]), list(ranked[0].values)
    values = [[each.values[name] for each in ranked] for name in names]
    is_grid = math.prod(len(set(each)) for each in values) == len(ranked)
    where = [place(axes, *each, as_numbers=not is_grid) for each in zip("xy", names, values, strict=True)]
    how = {"marker": "s", "s": 1200} if is_grid else {"s": 60}
    colors = np.where(np.isfinite(means), means, np.nan)
    points = axes.scatter(*where, c=colors, edgecolors="black", plotnonfinite=True, **how)
    for x, y, mean in zip(*where, means, strict=True) if is_grid else ():
        axes.text(x, y, f"{mean:.3g}", ha="center", va="center", bbox={"facecolor": "white", "alpha": 0.6, "lw": 0})
    axes.margins(0.2 if is_grid else 0.05)
    axes.set_title(title, fontsize="medium")
    figure.colorbar(points, label="final return, interquartile mean")
    figure.savefig(file, format="png", dpi=150)


# --- main ---


def prepare(request: Request, command: list[str]) -> tuple[Path, list[Group], list[training.Program]]:
    """Compile, say what is needed, then make the directory. Raises ValueError."""
    script, options, run_dir = request.script, request.options, request.run_dir
    if run_dir is None:
        name = f"sweep-{request.config.env_name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = Path(training.agree(str(options.run_dir or Path("runs", Path(script.__file__).stem, name))))
        training.only_first(results.check_new, run_dir)
    groups = make_groups(request)
    programs = compile_groups(request, groups)
    if not request.record:  # with the sizes of slices: a resumed sweep keeps them, and so its numbers
        record = results.make_record(script, request.config, options, command)
        record |= {"words": request.words, "slices": [program.size for program in programs]}
        training.only_first(results.begin_run, run_dir, request.config, record)
    return run_dir, groups, programs


def main(args=None) -> Path:
    """The command line. Returns the run directory."""
    words = sys.argv[1:] if args is None else [str(each) for each in args]
    if words[:1] in (["-h"], ["--help"]):
        raise SystemExit(print(__doc__))
    with training.errors_in_one_line("sweep.py", 2, ValueError, OSError), training.failures_in_one_line("sweep.py"):
        request = read_request(words)
        run_dir, groups, programs = prepare(request, ["tools/sweep.py", *words])
    about = f"run_dir = {run_dir}: "
    with training.errors_in_one_line("sweep.py", 1, OSError, about=about), training.failures_in_one_line("sweep.py"):
        run_groups(request, groups, programs, run_dir)
        training.only_first(write_results, request, groups, run_dir)
    return run_dir


if __name__ == "__main__":
    main()
