"""Try hyperparameters of a script, each with many seeds: grid and random search in one compiled program.

    python tools/sweep.py ppo --lr 1e-4 3e-4 1e-3 --clip-eps 0.1 0.2 --seeds 16
    python tools/sweep.py ppo --config configs/ppo/cartpole.yaml --gamma log-uniform 0.9 0.999 --samples 64 --seeds 16
    python tools/sweep.py path/to/my_algorithm.py --num-envs 4 16 --seeds 8

A hyperparameter with several values is swept over; one with a single value is set for all. Several fields make a grid.
`uniform LOW HIGH` and `log-uniform LOW HIGH` draw `--samples` values of a float; with a grid, the same ones at each of
its points. Sizes of layers are swept as `--hidden-sizes 64,64 256,256`. All float fields share one compilation; each
combination of the others is a compile group of its own. docs/sweep.md says what is written where.

The script's options --config, --seed, --run-dir, --resume and --checkpoint-interval mean what they mean there.
"""

import csv
import dataclasses
import io
import itertools
import json
import math
import shlex
import shutil
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import numpy as np
import scipy.stats
import slices
import yaml
from matplotlib.figure import Figure
from tqdm import tqdm

DISTRIBUTIONS = ("uniform", "log-uniform")
NO_LOSS = ("episodic_return", "episodic_length")  # NaN where no episode ended
RESAMPLES = 2000

# --- what to run ---


class Request(NamedTuple):
    """What the command line asks for."""

    script: Any
    config: Any  # of the fields that are not swept
    options: Any  # the script's
    tool: Any  # the tool's
    words: dict  # swept field: its words on the command line
    trials: list  # of {swept field: value}


def read_words(script, name: str, words: list[str]) -> list:
    """Words of the command line as values of a field, read as the script reads them. Raises ValueError."""
    values = []
    for word in words:
        flag = [f"--{name}", *word.split(",")] if "," in word and is_tuple(script, name) else [f"--{name}={word}"]
        values.append(getattr(script.parse(flag, script.Config)[0], name))
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: the same value twice in {' '.join(words)}")
    return values


def is_tuple(script, name: str) -> bool:
    return isinstance(getattr(script.Config(), name), tuple)


def is_swept(script, name: str, words: list[str]) -> bool:
    if is_tuple(script, name):  # several words are one value: --hidden-sizes 64 64
        return len(words) > 1 and any("," in word for word in words)
    return len(words) > 1 or words[:1] in ([each] for each in DISTRIBUTIONS)


def draw(script, name: str, words: list[str], samples: int, rng) -> np.ndarray:
    """Values from `uniform LOW HIGH` or `log-uniform LOW HIGH`: [samples]. Raises ValueError."""
    kind, bounds = words[0], words[1:]
    if not isinstance(getattr(script.Config(), name), float):
        raise ValueError(f"{name}: only float fields can be drawn; give a list of values")
    if len(bounds) != 2:
        raise ValueError(f"{name}: {kind} takes LOW and HIGH")
    low, high = read_words(script, name, bounds)
    if not low < high or not math.isfinite(high - low) or (kind == "log-uniform" and low <= 0):
        raise ValueError(f"{name}: {kind} {low:g} {high:g} needs {'0 < ' * (kind != 'uniform')}LOW < HIGH")
    unit = rng.random_sample(samples)
    return low + (high - low) * unit if kind == "uniform" else low * (high / low) ** unit


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
    grid = itertools.product(*(read_words(script, name, words) for name, words in listed.items()))
    trials = [dict(zip(listed, values, strict=True)) | point for values in grid for point in points]
    return [{name: trial[name] for name in swept} for trial in trials]


def read_request(args: list[str]) -> Request:
    """Raises ValueError."""
    parser = slices.make_parser(__doc__, "sweep.py SCRIPT --FIELD VALUE VALUE ... [options]")
    parser.add_argument("--samples", type=int, help="draws of the fields with uniform or log-uniform")
    parser.add_argument(
        "--seeds", type=int, help="agents of each trial, with the same random keys in all; 4 by default"
    )
    name, tool, flags = slices.split_arguments(parser, args)
    script = common.load_script(name)
    script.use_all_cores()  # before anything starts JAX
    fields = {field.name for field in dataclasses.fields(script.Config)}
    slices.check_names(script, flags)
    swept = {name: words for name, words in flags.items() if name in fields and is_swept(script, name, words)}
    if "eval_episodes" in flags:
        raise ValueError("eval_episodes: a sweep compares final returns; train with the best values to see greedy ones")
    if tool.seeds is not None:
        flags["num_seeds"] = [str(tool.seeds)]
    base = slices.join_flags({name: words for name, words in flags.items() if name not in swept})
    config, options = script.parse(base, script.Config)
    if not swept:
        raise ValueError("nothing to sweep over: give a field several values, as in --lr 1e-4 1e-3")
    trials = make_trials(script, swept, tool.samples, options.seed)
    for trial in trials:
        script.check(dataclasses.replace(config, **trial))
    return Request(script, config, options, tool, swept, trials)


# --- compile groups ---


class Group(NamedTuple):
    """Trials that differ in float fields alone: one compilation."""

    config: Any
    label: str  # "num_envs = 4", empty where only floats are swept
    trials: list[int]
    floats: dict  # swept float field: [trials of this group]


def make_groups(request: Request) -> list[Group]:
    names = [name for name in request.words if isinstance(getattr(request.config, name), float)]
    groups = {}
    for index, trial in enumerate(request.trials):
        static = tuple((name, value) for name, value in trial.items() if name not in names)
        groups.setdefault(static, []).append(index)
    return [
        Group(
            dataclasses.replace(request.config, **dict(static)),
            ", ".join(f"{name} = {show(value)}" for name, value in static),
            indices,
            {name: np.array([request.trials[i][name] for i in indices], np.float32) for name in names},
        )
        for static, indices in groups.items()
    ]


def show(value) -> str:
    """A value in a table: short, as on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(dict(value) if hasattr(value, "items") else value)


def compile_groups(request: Request, groups: list[Group], sizes: list[int] | None) -> list[slices.Program]:
    """A program for each group, and print what they need. `sizes` are those that a resumed sweep began with."""
    memory, programs = slices.free_memory(request.tool.memory), []
    seeds, step = request.options.num_seeds, len(jax.devices())
    say = print if slices.is_first() else (lambda *_: None)
    say(f"{Path(request.script.__file__).stem}: {len(request.trials)} trials x {seeds} seeds in {len(groups)} compile "
        f"group(s), {step} device(s) with {memory / slices.GIB:.3g} GiB free on each")  # fmt: skip
    for number, group in enumerate(groups):
        begun, runs = time.perf_counter(), len(group.trials) * seeds
        compile_size = partial(slices.compile_slice, request.script, group.config, list(group.floats))
        program = compile_size(sizes[number]) if sizes else slices.largest_slice(compile_size, runs, step, memory)
        parts, label = -(-runs // program.size), f" ({group.label})" if group.label else ""
        short = " (MORE THAN IS FREE)" if program.bytes > memory else ""
        say(f"group {number + 1}{label}: {runs} runs of {group.config.num_updates} updates, {parts} slice(s) of "
            f"{program.size} with {program.bytes / slices.GIB:.3g} GiB on a device{short}; "
            f"compiled in {time.perf_counter() - begun:.1f} s")  # fmt: skip
        programs.append(program)
    return programs


# --- the directory ---


def open_sweep(request: Request, args: list[str]) -> tuple[str, dict]:
    """The run directory, made or seen to hold the same sweep, and its record. Raises ValueError."""
    script, options = request.script, request.options
    if not options.run_dir and not options.resume:
        name = f"sweep-{request.config.env_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        options = dataclasses.replace(options, run_dir=f"runs/{Path(script.__file__).stem}/{name}")
    asked = dict(request.words) | ({"samples": request.tool.samples} if request.tool.samples else {})
    settings = types.SimpleNamespace(**vars(request.config), sweep=asked)  # so that another sweep is refused
    run_dir, record = script.open_run_dir(settings, options, args)
    if "slices" not in record:
        record["command"] = shlex.join(["python", "tools/sweep.py", *args])
    base = {name: value for name, value in record["settings"].items() if name in vars(request.config)}
    script.write(run_dir / "config.yaml", yaml.safe_dump(base, sort_keys=False))  # the script can read it
    return str(run_dir), record


def finished_slices(run_dir: Path, group: int) -> list[tuple[int, int, Path]]:
    """`(first run, last run, file)` of each slice on disk."""
    files = sorted((run_dir / "slices").glob(f"{group}-*.npz"))
    return [(*map(int, file.stem.split("-")[1:]), file) for file in files]


# --- running ---


def run_group(request: Request, group: Group, program: slices.Program, number: int, run_dir: Path, progress) -> None:
    """Train the slices of a group that are not on disk yet, and write each when it is finished."""
    script, options, runs = request.script, request.options, len(group.trials) * request.options.num_seeds
    keys = slices.seed_keys(options)
    steps = group.config.num_envs * group.config.num_steps  # of one agent in one update

    def watch(first, last, metrics):
        returns = script.mean_return(metrics, 0, last - first)[:real]
        if not np.isnan(returns).all():
            progress.set_postfix_str(f"return {np.nanmin(returns):.4g} to {np.nanmax(returns):.4g}", refresh=False)
        progress.update((last - first) * real * steps)

    done = slices.agree([first for first, _, _ in finished_slices(run_dir, number)])
    for first in range(0, runs, program.size):
        last = min(first + program.size, runs)
        real = last - first  # the others, which fill up the last slice, repeat its last run
        if first in done:
            progress.update(real * program.num_updates * steps)
            continue
        run = np.minimum(np.arange(first, first + program.size), runs - 1)
        floats = {name: values[run // options.num_seeds] for name, values in group.floats.items()}
        name = f"{number}-{first:07d}-{last:07d}"
        with slices.open_checkpoints(run_dir / "unfinished" / name, keep=1) as manager:
            begun = manager.latest_step() or 0
            if begun and slices.is_first():
                tqdm.write(f"resume: {begun} of {program.num_updates} updates of the next slice are done")
            progress.update(begun * real * steps)
            key_data = keys[run % options.num_seeds]
            carry = slices.train_slice(program, floats, key_data, manager, options.checkpoint_interval, watch, False)
        metrics = {name: each[:real] for name, each in slices.fetch(program, carry["metrics"]).items()}
        del carry
        slices.only_first(finish_slice, request, group, metrics, first, run_dir, name)


def finish_slice(request: Request, group: Group, metrics: dict, first: int, run_dir: Path, name: str) -> None:
    """Write the metrics of a slice, throw its checkpoints away, and tell of runs that are not finite."""
    (run_dir / "slices").mkdir(exist_ok=True)
    request.script.write(run_dir / "slices" / f"{name}.npz", partial(np.savez, **metrics))
    shutil.rmtree(run_dir / "unfinished" / name)
    bad, seeds = first_not_finite(metrics), request.options.num_seeds
    for trial in np.unique((first + np.flatnonzero(bad >= 0)) // seeds):
        values = ", ".join(f"{name} = {show(value)}" for name, value in request.trials[group.trials[trial]].items())
        tqdm.write(f"not finite: trial {group.trials[trial]} ({values})", file=sys.stderr)


def first_not_finite(metrics: dict) -> np.ndarray:
    """The first update whose losses are not all finite, -1 where there is none: [..., updates] -> [...]."""
    losses = [each for name, each in metrics.items() if name not in NO_LOSS]
    bad = np.any([~np.isfinite(each) for each in losses], axis=0)
    return np.where(bad.any(axis=-1), bad.argmax(axis=-1), -1)


def collect(request: Request, groups: list[Group], run_dir: Path) -> list[dict]:
    """The metrics of each trial: {name: [seeds, updates]}. Raises OSError where a file cannot be read."""
    trials, seeds = [None] * len(request.trials), request.options.num_seeds
    for number, group in enumerate(groups):
        parts = []
        for _, _, file in finished_slices(run_dir, number):
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
    values: dict
    returns: np.ndarray  # final return of each seed, NaN where it has none: [seeds]
    not_finite: np.ndarray  # first such update of each seed, or -1: [seeds]
    mean: float  # interquartile, over seeds that have a final return
    low: float  # of its 95 % interval
    high: float

    @property
    def valid(self) -> np.ndarray:
        return self.returns[~np.isnan(self.returns)]


def stratified_interval(strata: list[np.ndarray]) -> tuple[float, float, float]:
    """Interquartile mean of all values, and its 95 % interval from a bootstrap that resamples within each stratum.

    Strata are trials, values those of their seeds (Agarwal et al. 2021, arXiv 2108.13264, section 4.1). NaN without
    any value.
    """
    strata, rng = [values for values in strata if len(values)], np.random.default_rng(0)
    if not strata:
        return math.nan, math.nan, math.nan
    means = []
    for _ in range(RESAMPLES // 100):
        drawn = [values[rng.integers(len(values), size=(100, len(values)))] for values in strata]
        means.append(scipy.stats.trim_mean(np.concatenate(drawn, axis=1), 0.25, axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(scipy.stats.trim_mean(np.concatenate(strata), 0.25)), float(low), float(high)


def summarize(request: Request, groups: list[Group], metrics: list[dict]) -> list[Result]:
    """Best first; trials with a run that is not finite last, for a mean over what is left would flatter them."""
    results = []
    for group in groups:
        updates = group.config.num_updates
        for trial in group.trials:
            bad = first_not_finite(metrics[trial])
            final = request.script.mean_return(metrics[trial], updates * 9 // 10, updates)
            returns = np.where((bad < 0) & np.isfinite(final), final, np.nan)
            numbers = stratified_interval([returns[~np.isnan(returns)]])
            results.append(Result(trial, request.trials[trial], returns, bad, *numbers))
    return sorted(results, key=lambda each: ((each.not_finite >= 0).any(), math.isnan(each.mean), -each.mean))


def make_table(results: list[Result]) -> list[str]:
    names = list(results[0].values)
    rows = [["trial", *names, "return", "95 % interval", "seeds", "not finite"]]
    for each in results:
        bad = int((each.not_finite >= 0).sum())
        numbers = [f"{each.mean:.4g}", f"{each.low:.4g} to {each.high:.4g}"] if len(each.valid) else ["", ""]
        values = [show(each.values[name]) for name in names]
        rows.append([str(each.trial), *values, *numbers, str(len(each.valid)), str(bad or "")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def make_csv(results: list[Result]) -> str:
    """A row per trial and seed, in the order of the trials. Empty where there is no number."""
    text, names = io.StringIO(), list(results[0].values)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", *names, "seed", "final_return", "first_update_not_finite"])
    for each in sorted(results, key=lambda each: each.trial):
        values = [repr(value) if isinstance(value, float) else show(value) for value in each.values.values()]
        for seed, (final, bad) in enumerate(zip(each.returns, each.not_finite, strict=True)):
            rows.writerow([each.trial, *values, seed, "" if np.isnan(final) else final, "" if bad < 0 else bad])
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
    metrics, write = collect(request, groups, run_dir), request.script.write
    results = summarize(request, groups, metrics)
    steps = np.zeros(len(metrics), int)  # of one agent in one update, for each trial
    for group in groups:
        steps[group.trials] = group.config.num_envs * group.config.num_steps
    arrays = stack_metrics(metrics) | {"steps_per_update": steps}
    write(run_dir / "metrics.npz", partial(np.savez_compressed, **arrays))
    write(run_dir / "results.csv", make_csv(results))
    table = make_table(results)
    write(run_dir / "table.txt", "\n".join(table) + "\n")
    if not math.isnan(results[0].mean):
        best = dataclasses.replace(request.config, **request.trials[results[0].trial])
        plain = {name: dict(value) if hasattr(value, "items") else value for name, value in vars(best).items()}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        write(run_dir / "best.yaml", yaml.safe_dump(plain, sort_keys=False))
        write(run_dir / "learning_curves.png", partial(draw_curves, request, results[:5], metrics, steps))
        write(run_dir / "final_return.png", partial(draw_returns, results))
        if len(request.words) == 2:
            write(run_dir / "heat_map.png", partial(draw_heat_map, results))
    print("\n".join(table[:21]))
    if len(table) > 21:
        print(f"... {len(table) - 21} more in {run_dir / 'table.txt'}")
    print(f"results in {run_dir}")


# --- plots ---


def draw_curves(request: Request, results: list[Result], metrics: list[dict], steps_per_update, file) -> None:
    """Return over steps of the best trials: interquartile mean over seeds and its 95 % interval."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for each in results:
        updates = metrics[each.trial]["episodes"].shape[1]
        edges = np.unique(np.linspace(0, updates, 51).astype(int))
        pairs = itertools.pairwise(edges)
        curves = np.stack([request.script.mean_return(metrics[each.trial], *pair) for pair in pairs], axis=1)
        whole = np.isfinite(curves).all(axis=0)  # where every seed has finished an episode
        if not whole.any():
            continue
        center, low, high = request.script.interval(curves[:, whole])
        steps = edges[1:][whole] * steps_per_update[each.trial]
        label = ", ".join(f"{name} = {show(value)}" for name, value in each.values.items())
        (line,) = axes.plot(steps, center, label=label)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    seeds = len(results[0].returns)
    where = "" if "env_name" in request.words else f" on {request.config.env_name}"
    title = f"{Path(request.script.__file__).stem}{where}, best of the trials, {seeds} seeds each"
    axes.set(title=title, xlabel="environment steps per agent", ylabel="return of the episodes that ended")
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def places(values: list) -> tuple[list[float], dict]:
    """Where values stand on an axis, and how the axis is set: numbers as they are, other values one by one."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        wide = min(values) > 0 and max(values) / min(values) >= 10
        return list(values), {"scale": "log" if wide else "linear"}
    known = sorted({show(value) for value in values})
    ticks = {"ticks": range(len(known)), "ticklabels": known}
    return [known.index(show(value)) for value in values], ticks


def set_axis(axes, which: str, name: str, how: dict) -> None:
    axes.set(**{f"{which}{key}": value for key, value in how.items()} | {f"{which}label": name})


def draw_returns(results: list[Result], file) -> None:
    """Final return against each swept field: a point per trial, and the mean per value where trials share values."""
    names, results = list(results[0].values), [each for each in results if len(each.valid)]
    figure = Figure(figsize=(max(5, 4 * len(names)), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        where, how = places([each.values[name] for each in results])
        axes.plot(where, [each.mean for each in results], "o", color="tab:blue", alpha=0.5, markersize=4, label="trial")
        points = sorted(set(where))
        if len(points) < len(where) or len(names) == 1:
            strata = [[each.valid for at, each in zip(where, results, strict=True) if at == point] for point in points]
            center, low, high = np.transpose([stratified_interval(each) for each in strata])
            label = "interquartile mean, 95 % interval"
            axes.errorbar(points, center, (center - low, high - center), color="black", capsize=3, label=label)
        set_axis(axes, "x", name, how)
    figure.axes[0].set_ylabel("final return")
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=150)


def draw_heat_map(results: list[Result], file) -> None:
    """Final return over two fields: cells where they form a grid, coloured points where they were drawn."""
    (first, second), means = list(results[0].values), [each.mean for each in results]
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    columns, rows = ([each.values[name] for each in results] for name in (first, second))
    if len(set(columns)) * len(set(rows)) == len(results):
        ordered = [sorted(set(values), key=lambda value: value if isinstance(value, (int, float)) else str(value))
                   for values in (columns, rows)]  # fmt: skip
        grid = np.full((len(ordered[1]), len(ordered[0])), np.nan)
        for column, row, mean in zip(columns, rows, means, strict=True):
            grid[ordered[1].index(row), ordered[0].index(column)] = mean
        image = axes.imshow(grid, origin="lower", aspect="auto")
        for (row, column), mean in np.ndenumerate(grid):
            text = "none" if np.isnan(mean) else f"{mean:.3g}"
            axes.text(column, row, text, ha="center", va="center", bbox={"facecolor": "white", "alpha": 0.6, "lw": 0})
        for which, name, values in zip("xy", (first, second), ordered, strict=True):
            set_axis(axes, which, name, {"ticks": range(len(values)), "ticklabels": list(map(show, values))})
    else:
        for which, name, values in zip("xy", (first, second), (columns, rows), strict=True):
            set_axis(axes, which, name, places(values)[1])
        image = axes.scatter(places(columns)[0], places(rows)[0], c=means, s=60, edgecolors="black", linewidths=0.5)
    figure.colorbar(image, label="final return, interquartile mean")
    figure.savefig(file, format="png", dpi=150)


# --- main ---


def prepare(request: Request, groups: list[Group], args: list[str]) -> tuple[Path, list[slices.Program]]:
    """Open the directory, compile, and say what is needed. Raises ValueError."""
    for group in groups:
        request.script.make_learner(group.config)  # a wrong value is found before a directory is made
    run_dir, record = slices.only_first(open_sweep, request, args)
    run_dir = Path(run_dir)
    try:
        programs = compile_groups(request, groups, record.get("slices"))
    except ValueError:
        if "slices" not in record:
            slices.only_first(slices.withdraw, run_dir)
        raise
    if "slices" not in record:  # a resumed sweep keeps the slices that it began with, and so its numbers
        record["slices"] = [program.size for program in programs]
        slices.only_first(request.script.write, run_dir / "run.json", json.dumps(record, indent=2))
    return run_dir, programs


def run_groups(request: Request, groups: list[Group], programs: list[slices.Program], run_dir: Path) -> None:
    seeds, show_progress = request.options.num_seeds, slices.is_first()
    steps = [len(each.trials) * seeds * each.config.num_updates * each.config.num_envs * each.config.num_steps
             for each in groups]  # fmt: skip
    if request.options.resume and show_progress:
        count = sum(len(finished_slices(run_dir, number)) for number in range(len(groups)))
        print(f"resume: {count} slice(s) are done{'' if count else ', starting anew'}")
    with tqdm(total=sum(steps), unit="step", unit_scale=True, disable=not show_progress) as progress:
        for number, (group, program) in enumerate(zip(groups, programs, strict=True)):
            run_group(request, group, program, number, run_dir, progress)
    shutil.rmtree(run_dir / "unfinished", ignore_errors=True)


def main(args=None) -> Path:
    """The command line. Returns the run directory."""
    args = sys.argv[1:] if args is None else [str(each) for each in args]
    with slices.errors_in_one_line("sweep.py", 2, ValueError, OSError), slices.failures_in_one_line("sweep.py"):
        request = read_request(args)
        slices.connect(request.tool)
        groups = make_groups(request)
        run_dir, programs = prepare(request, groups, args)
    about = f"run_dir = {run_dir}: "
    with slices.errors_in_one_line("sweep.py", 1, OSError, about=about), slices.failures_in_one_line("sweep.py"):
        run_groups(request, groups, programs, run_dir)
        slices.only_first(write_results, request, groups, run_dir)
    return run_dir


if __name__ == "__main__":
    main()
