"""Try hyperparameters of a script, each with many seeds: grid, random search or Optuna, in one compiled program.

    onejit sweep ppo --lr 1e-4 3e-4 1e-3 --clip-eps 0.1 0.2 --num-seeds 16
    onejit sweep ppo --gamma one-minus-log-uniform 0.9 0.999 --samples 64 --num-seeds 16
    onejit sweep ppo --lr log-uniform 1e-5 1e-2 --ent-coef uniform 0 0.05 --optuna tpe --samples 64 --batch 8
    onejit sweep path/to/my_algorithm.py --num-envs 4 16 --num-seeds 8
    onejit sweep --resume RUN_DIR

A hyperparameter with several values is swept over, and several such hyperparameters make a grid. A single value holds
for all trials. `uniform LOW HIGH`, `log-uniform LOW HIGH` and `one-minus-log-uniform LOW HIGH` draw `--samples` values
of a float; each point of a grid gets the same draws. If a field holds several values, commas join the values of one
trial: `--hidden-sizes 64,64 256,256`. All float fields share one compilation. Each combination of the other fields is a
compile group of its own. With `--optuna`, each batch of trials is proposed from the returns of the batches before it.
`onejit sweep SCRIPT --help` lists all flags; docs/sweep.md describes the results.
"""

import contextlib
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
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import save as as_safetensors

from onejit import command_line, running, runs, statistics, train
from onejit.runs import steps_of
from onejit.sweep_pictures import draw_curves, draw_heat_map, draw_returns, show

TOOL = "onejit sweep"
DISTRIBUTIONS = ("uniform", "log-uniform", "one-minus-log-uniform")
SAMPLERS = {
    "tpe": ["optuna"],
    "random": ["optuna"],
    "cmaes": ["optuna", "cmaes"],
}  # the packages that they need
OF_RUNS = (
    "run.final_return",
    "run.first_not_finite",
    "run.diverged",
)  # arrays of a slice that are not metrics

# --- what to run ---


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a sweep."""

    num_seeds: int = 4  # agents per trial; all trials use the same random keys
    samples: int | None = None  # number of draws of the fields with a distribution
    optuna: Literal["tpe", "cmaes", "random"] | None = (
        None  # sampler of Optuna that proposes the samples
    )
    batch: int = 8  # number of trials that Optuna proposes at a time, and that train together
    seed: int = 0  # seed of the key that the agents' keys are split from, and of the draws
    run_dir: Path | None = (
        None  # new directory for the results; runs/SCRIPT/sweep-ENVIRONMENT-TIME-PID by default
    )
    keep: int = 5  # number of best trials whose agents are saved
    track: Literal["tensorboard", "wandb"] | None = (
        None  # tracker for the final returns of each trial
    )
    checkpoint_interval: float = (
        60.0  # seconds between checkpoints of the current slice; 0 for none
    )
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """Options that can be given with --resume RUN_DIR."""

    memory: float | None = (
        None  # GiB of each device to use for programs that have not been compiled yet
    )
    force: tyro.conf.FlagCreatePairsOff[bool] = (
        False  # use the sweep's copy of the script although it was edited
    )


class Group(NamedTuple):
    """Trials that train in one program, because they differ only in float fields."""

    config: Any
    trials: list[int]


class Request(NamedTuple):
    """What the command line requests. Lists and dicts collect what the sweep has done so far."""

    script: Any
    config: Any  # the values of the fields that are not swept
    options: Options
    run_dir: Path
    swept: dict  # {field: its words on the command line}
    trials: list  # a {swept field: value} per trial; Optuna's are added when they are proposed
    record: dict  # run.json
    groups: list[Group]  # groups that have started
    returns: dict  # {trial: final return of each seed}, -inf if not finite, NaN if not known yet; on process 0


def split_flags(words: list[str]) -> dict[str, list[str]]:
    """`{flag: its words}`; the last flag of a name wins. Raises ValueError."""
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
    return [
        word for name, values in flags.items() for word in (f"--{name.replace('_', '-')}", *values)
    ]


def holds_several(script, name: str) -> bool:
    return isinstance(getattr(script.Config(), name), (tuple, Mapping))


def is_swept(script, name: str, words: list[str]) -> bool:
    if holds_several(script, name):  # several words are one value: --hidden-sizes 64 64
        return len(words) > 1 and any("," in word for word in words)
    return len(words) > 1 or words[:1] in ([each] for each in DISTRIBUTIONS)


def read_values(script, name: str, words: list[str]) -> list:
    """Read words of the command line as values of a field, as the script reads them. Raises ValueError."""
    values = []
    for word in words:
        flag = [f"--{name}", *(word.split(",") if holds_several(script, name) else [word])]
        values.append(
            getattr(command_line.parse_with(script, flag, Options, description="")[0], name)
        )
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: has the same value twice in {' '.join(words)}")
    return values


def read_distribution(script, name: str, words: list[str]) -> tuple[str, float, float]:
    """`(kind, low, high)`. Raises ValueError."""
    kind, *bounds = words
    if not isinstance(getattr(script.Config(), name), float):
        raise ValueError(
            f"{name}: is not a float field, and cannot be drawn; give a list of values"
        )
    if len(bounds) != 2:
        raise ValueError(f"{name}: {kind} takes LOW and HIGH")
    low, high = read_values(script, name, bounds)
    least, most = {"uniform": (-math.inf, math.inf), "log-uniform": (0, math.inf)}.get(
        kind, (-math.inf, 1)
    )
    if not least < low < high < most:
        raise ValueError(f"{name}: {kind} {low:g} {high:g} needs {least:g} < LOW < HIGH < {most:g}")
    return kind, low, high


def draw(script, name: str, words: list[str], samples: int, rng) -> np.ndarray:
    """`samples` values of a distribution. Raises ValueError."""
    (kind, low, high), unit = read_distribution(script, name, words), rng.random_sample(samples)
    if kind == "uniform":
        return low + (high - low) * unit
    if kind == "log-uniform":
        return low * (high / low) ** unit
    return 1.0 - (1.0 - high) * ((1.0 - low) / (1.0 - high)) ** unit


def check_options(script, swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if options do not fit together."""
    drawn = [name for name, words in swept.items() if words[0] in DISTRIBUTIONS]
    if not swept:
        raise ValueError("nothing to sweep over: give a field several values, as in --lr 1e-4 1e-3")
    for name in ("samples", "batch"):
        if getattr(options, name) == 0:
            raise ValueError(f"{name} = 0: must be at least 1")
    if bool(drawn or options.optuna) != (options.samples is not None):
        name = drawn[0] if drawn else "samples"
        raise ValueError(
            f"{name}: --samples goes with --optuna or a field with {', '.join(DISTRIBUTIONS)}"
        )
    command_line.check_packages(f"optuna = {options.optuna}", SAMPLERS.get(options.optuna, ()))
    command_line.check_packages(f"track = {options.track}", train.TRACKERS.get(options.track, ()))
    if options.optuna == "cmaes" and len(drawn) < 2:
        raise ValueError(
            "optuna = cmaes: needs at least two fields with a distribution; tpe needs one"
        )
    if options.batch != Options.batch and not options.optuna:
        raise ValueError(f"batch = {options.batch}: goes with --optuna")
    fixed = [name for name in swept if not isinstance(getattr(script.Config(), name), float)]
    if options.optuna and fixed:
        raise ValueError(
            f"{fixed[0]}: is not a float field; Optuna can only choose values of float fields"
        )


def make_trials(script, swept: dict[str, list[str]], samples: int | None, seed: int) -> list[dict]:
    """All combinations of the listed values, each with all drawn points. Raises ValueError."""
    rng = np.random.RandomState(
        seed
    )  # its stream never changes: a resumed sweep draws the same values
    listed = {name: words for name, words in swept.items() if words[0] not in DISTRIBUTIONS}
    drawn = {name: words for name, words in swept.items() if words[0] in DISTRIBUTIONS}
    columns = {name: draw(script, name, words, samples, rng) for name, words in drawn.items()}
    points = [
        {name: float(values[i]) for name, values in columns.items()} for i in range(samples or 1)
    ]
    grid = itertools.product(*(read_values(script, name, words) for name, words in listed.items()))
    trials = [dict(zip(listed, values, strict=True)) | point for values in grid for point in points]
    return [{name: trial[name] for name in swept} for trial in trials]


def read_request(words: list[str], until_the_end: contextlib.ExitStack) -> Request | None:
    """None if the sweep has finished. Raises ValueError."""
    command, (name, _, words) = ["sweep", *words], command_line.split_words(words)
    run_dir, record, memory = None, {}, None
    if name == "--resume":
        run_dir, record, given = running.read_resumed(
            words, "sweep", "words", ResumeOptions, until_the_end
        )
        if "finished" in record:
            shutil.rmtree(run_dir / "slices", ignore_errors=True)  # a kill may have left them
            print(f"{run_dir} has finished: there is nothing left to do")
            return None
        script, memory = runs.script_of(run_dir, record, given.force), given.memory
        words = record["words"]
    else:
        given = [word.split("=")[0] for word in words if word.startswith("--")]
        if twice := [flag for flag in given if given.count(flag) > 1]:
            raise ValueError(f"{twice[0]}: is given twice")
        script = runs.load_script(name)
        words = command_line.read_flags(script, words)
    flags = split_flags(words)
    fields = {field.name for field in dataclasses.fields(script.Config)}
    swept = {
        name: values
        for name, values in flags.items()
        if name in fields and is_swept(script, name, values)
    }
    base = join_flags({name: values for name, values in flags.items() if name not in swept})
    config, options, _ = command_line.parse_with(script, base, Options, description=__doc__)
    check_options(script, swept, options)
    options = dataclasses.replace(options, memory=memory or options.memory)
    trials = [] if options.optuna else make_trials(script, swept, options.samples, options.seed)
    if run_dir is None:
        stamp = f"sweep-{config.env_name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = Path(
            running.agree(str(options.run_dir or Path("runs", Path(script.__file__).stem, stamp)))
        )
        running.only_first(runs.check_new, run_dir)
        record = runs.make_record(script, config, options, command) | {
            "words": join_flags(flags),
            "slices": [],
        }
        record["num_trials"] = options.samples if options.optuna else len(trials)
    return Request(script, config, options, run_dir, swept, trials, record, [], {})


# --- groups of trials ---


def float_names(request: Request) -> list[str]:
    return [name for name in request.swept if isinstance(getattr(request.config, name), float)]


def make_groups(request: Request) -> list[Group]:
    """The groups of all trials of a grid."""
    groups, floats = {}, float_names(request)
    for index, trial in enumerate(request.trials):
        static = tuple((name, value) for name, value in trial.items() if name not in floats)
        groups.setdefault(static, []).append(index)
    return [
        Group(dataclasses.replace(request.config, **dict(static)), trials)
        for static, trials in groups.items()
    ]


def propose_groups(request: Request):
    """Groups of `batch` trials, which Optuna proposes from earlier returns. A resumed sweep repeats the proposals."""
    options, trials, known = (
        request.options,
        request.trials,
        request.record.setdefault("proposed", []),
    )
    study = make_study(request) if running.is_first() else None
    space = make_space(request) if running.is_first() else {}

    def ask(size):
        asked = [study.ask(space).params for _ in range(size)]
        turned = [
            name for name, words in request.swept.items() if words[0] == "one-minus-log-uniform"
        ]
        return [
            {name: 1.0 - each[name] if name in turned else each[name] for name in space}
            for each in asked
        ]

    while (first := len(trials)) < options.samples:
        trials.extend(running.only_first(ask, min(options.batch, options.samples - first)))
        if known[first : len(trials)] not in ([], trials[first:]):
            raise ValueError(
                "resume: Optuna proposes other trials than before; has its version changed?"
            )
        known[first : len(trials)] = trials[first:]
        yield Group(request.config, list(range(first, len(trials))))
        for index in range(first, len(trials)) if study else ():
            study.tell(
                index, float(statistics.interquartile_mean(request.returns[index]))
            )  # -inf ranks last


def make_study(request: Request):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options, samplers = request.options, optuna.samplers
    make = {
        "tpe": partial(
            samplers.TPESampler, constant_liar=True
        ),  # spreads out the trials of a batch
        "cmaes": partial(
            samplers.CmaEsSampler, popsize=max(4, options.batch), warn_independent_sampling=False
        ),
        "random": samplers.RandomSampler,
    }
    return optuna.create_study(
        direction="maximize", sampler=make[options.optuna](seed=options.seed)
    )


def make_space(request: Request) -> dict:
    """Optuna's distribution of each swept field. For one-minus-log-uniform it is the distribution of 1 - value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space = {}
    for name, words in request.swept.items():
        if words[0] in DISTRIBUTIONS:
            kind, low, high = read_distribution(request.script, name, words)
            low, high = (1.0 - high, 1.0 - low) if kind == "one-minus-log-uniform" else (low, high)
            space[name] = FloatDistribution(low, high, log=kind != "uniform")
        else:
            space[name] = CategoricalDistribution(read_values(request.script, name, words))
    return space


# --- running ---


def compile_group(request: Request, group: Group, number: int, progress) -> running.Program:
    """The program of the compile group `number`. A resumed group keeps its size of slices. Raises ValueError."""
    floats, sizes, total = (
        float_names(request),
        request.record["slices"],
        len(group.trials) * request.options.num_seeds,
    )
    compile_size = partial(running.compile_slice, request.script, group.config, floats)
    size = sizes[number] if number < len(sizes) else None
    how = total, size, request.options.memory, request.record["seconds"]
    program, slices = running.compile_slices(compile_size, *how)
    if size is None:
        sizes.append(program.size)
    running.only_first(runs.write_record, request.run_dir, request.record)
    if running.is_first():
        trial = request.trials[group.trials[0]]
        label = (
            show({name: value for name, value in trial.items() if name not in floats})
            or "float fields only"
        )
        what = f"{total} runs of {group.config.num_updates} updates"
        progress.write(f"group {number} ({label}): {what} in {slices}", file=sys.stdout)
    return program


def finished_slices(run_dir: Path, group: int) -> list[tuple[int, Path]]:
    """`(first run, file)` of each slice on disk."""
    files = sorted((run_dir / "slices").glob(f"{group}-*.npz"))
    return [(int(file.stem.split("-")[1]), file) for file in files]


def read_slice(file: Path, names=None) -> dict:
    """Arrays of a slice. Raises OSError."""
    try:
        with np.load(file) as stored:
            return {name: stored[name] for name in names or stored.files}
    except Exception as error:  # NumPy raises many kinds
        raise OSError(f"{file}: cannot be read; delete it, and --resume trains it again") from error


def run_groups(request: Request, groups: Iterable[Group], progress, caught) -> None:
    """Compile and train group by group. Raises ValueError, OSError, Stopped."""
    program, number, sizes = None, -1, request.record["slices"]
    for index, group in enumerate(groups):
        if not request.groups or request.groups[-1].config != group.config:
            program, number = None, number + 1  # free its memory before the next one compiles
        request.groups.append(group)
        total = len(group.trials) * request.options.num_seeds
        done = running.agree([first for first, _ in finished_slices(request.run_dir, index)])
        if program is None and (
            number == len(sizes) or set(range(0, total, sizes[number])) - set(done)
        ):
            program = compile_group(request, group, number, progress)
        for first in range(0, total, sizes[number]):
            last = min(first + sizes[number], total)
            name = f"{index}-{first:07d}-{last:07d}"
            if first not in done:
                if stop := running.latest(caught):
                    raise running.Stopped(stop)
                metrics, agent = train_slice(
                    request, group, program, first, last, name, progress, caught
                )
                running.only_first(
                    finish_slice, request, group, metrics, agent, first, name, progress
                )
                del metrics, agent
            else:
                count(
                    request, progress, runs.total_steps(group.config, last - first), restored=True
                )
                (found,) = read_slice(
                    request.run_dir / "slices" / f"{name}.npz", OF_RUNS[:1]
                ).values()
                note_returns(request, group, first, found)


def count(request: Request, progress, steps: int, restored: bool = False) -> None:
    request.record["steps_done"] += steps
    running.count_restored(progress, steps) if restored else progress.update(steps)


def train_slice(
    request: Request, group: Group, program, first: int, last: int, name: str, progress, caught
) -> tuple:
    """Train the runs [first, last) of a group. Returns metrics and agents, [last - first, ...], in NumPy."""
    script, options, steps = (
        request.script,
        request.options,
        (last - first) * steps_of(group.config),
    )
    run = np.minimum(
        np.arange(first, first + program.size), len(group.trials) * options.num_seeds - 1
    )  # fills up
    trials = [request.trials[trial] for trial in np.array(group.trials)[run // options.num_seeds]]
    floats = {name: [trial[name] for trial in trials] for name in float_names(request)}
    keys = running.seed_keys(options)[run % options.num_seeds]

    def watch(begun, ended, metrics, _):
        returns = script.mean_return(metrics)[: last - first]
        if not np.isnan(returns).all():
            progress.set_postfix_str(
                f"return {np.nanmin(returns):.4g} to {np.nanmax(returns):.4g}", refresh=False
            )
        count(request, progress, (ended - begun) * steps)

    with running.open_checkpoints(request.run_dir / "unfinished" / name, keep=1) as manager:
        begun = manager.latest_step() or 0
        if begun:
            count(request, progress, begun * steps, restored=True)
            if running.is_first():
                which = f"{begun} of {program.num_updates} updates of the next slice"
                progress.write(f"resume: {which} are done", file=sys.stdout)
        how = dict(interval=options.checkpoint_interval, caught=caught)
        how |= dict(
            begin=progress.unpause,
            before_save=partial(runs.write_record, request.run_dir, request.record),
        )
        carry = running.train_slice(
            program, floats, keys, manager, watch, seconds=request.record["seconds"], **how
        )
    found = carry["metrics"], carry["runner_state"].agent
    return jax.tree.map(lambda leaf: leaf[: last - first], running.fetch(found))


def finish_slice(
    request: Request, group: Group, metrics, agent, first: int, name: str, progress
) -> None:
    """Write a complete slice, delete its checkpoints, and report runs that are not finite. Raises OSError."""
    folder, seeds, final = (
        request.run_dir / "slices",
        request.options.num_seeds,
        statistics.final_return(metrics),
    )
    bad, lost = first_not_finite(metrics), statistics.diverged(agent)
    returns = np.where((bad < 0) & ~lost & np.isfinite(final), final, -np.inf)
    for trial in np.unique((first + np.flatnonzero((bad >= 0) | lost)) // seeds):
        index = group.trials[trial]
        progress.write(
            f"not finite: trial {index} ({show(request.trials[index])})", file=sys.stderr
        )
    for trial in note_returns(request, group, first, returns):
        track(request, trial)
    if request.options.keep:
        flat = {
            key: np.ascontiguousarray(leaf) for key, leaf in flatten_dict(agent, sep=".").items()
        }
        runs.write(folder / f"{name}.safetensors", lambda file: file.write(as_safetensors(flat)))
    of_runs = dict(zip(OF_RUNS, (returns, bad, lost), strict=True))
    runs.write(folder / f"{name}.npz", partial(np.savez, **metrics, **of_runs))
    shutil.rmtree(request.run_dir / "unfinished" / name)
    runs.write_record(request.run_dir, request.record)
    worse = {trial for trials in rank_trials(request).values() for trial in trials}.difference(
        best_trials(request)
    )
    for file in folder.glob("*.safetensors"):
        number, first, last = map(int, file.stem.split("-"))
        if number < len(request.groups) and worse.issuperset(
            request.groups[number].trials[first // seeds : -(-last // seeds)]
        ):
            file.unlink()  # none of these agents can be among the best anymore


def note_returns(request: Request, group: Group, first: int, returns) -> list[int]:
    """Note the final returns of the runs from `first` on. Returns the trials that have now ended."""
    ended, seeds = [], request.options.num_seeds
    for run, value in enumerate(returns, start=first):
        trial = group.trials[run // seeds]
        request.returns.setdefault(trial, np.full(seeds, np.nan))[run % seeds] = value
        ended += [trial] if (run + 1) % seeds == 0 else []
    return ended


def track(request: Request, trial: int) -> None:
    """Track a trial as a run of TensorBoard or W&B. Raises OSError."""
    config, swept = config_of(request, trial), request.trials[trial]
    record = request.record | {"settings": request.record["settings"] | runs.plain(config)}
    log, _, close = train.open_tracker(request._replace(record=record), f"trial-{trial}", 0)
    values = train.returns_over_seeds("final_return", request.returns[trial])
    values |= {
        f"hyperparameters/{name}": value
        for name, value in swept.items()
        if isinstance(value, (int, float))
    }
    steps = getattr(config, "warmup_timesteps", 0) + config.num_updates * steps_of(config)
    log(steps, {name: float(value) for name, value in values.items() if np.isfinite(value)})
    close()


def first_not_finite(metrics: dict) -> np.ndarray:
    """The first update with a loss that is not finite, or -1: [runs, updates] -> [runs]. Other metrics may be NaN."""
    bad = np.zeros(metrics["episodes"].shape, bool)
    for name, each in metrics.items():
        if name.endswith("loss"):
            bad |= ~np.isfinite(each)
    return np.where(bad.any(axis=-1), bad.argmax(axis=-1), -1)


def config_of(request: Request, trial: int):
    return dataclasses.replace(request.config, **request.trials[trial])


def rank_trials(request: Request) -> dict[str, list[int]]:
    """The finished trials of each environment, best first."""
    tasks = {}
    for trial, returns in sorted(request.returns.items()):
        if not np.isnan(returns).any():
            place = -statistics.interquartile_mean(returns), trial
            tasks.setdefault(runs.task_of(runs.plain(config_of(request, trial))), []).append(place)
    return {task: [trial for _, trial in sorted(places)] for task, places in tasks.items()}


def best_trials(request: Request) -> list[int]:
    """The trials of each environment whose agents are saved."""
    best = [
        trial
        for trials in rank_trials(request).values()
        for trial in trials[: request.options.keep]
    ]
    return [
        trial
        for trial in best
        if np.isfinite(statistics.interquartile_mean(request.returns[trial]))
    ]


def keep_agents(request: Request, metrics: list[dict]) -> None:
    """Write a directory for each of the best trials, like a run of `onejit train`. Raises OSError."""
    folder, seeds, record = request.run_dir / "agents", request.options.num_seeds, request.record
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    kept = ("command", "started", "device", "versions", "commit", "sha256", "folders")
    for trial in best_trials(request):
        number, group = next(
            (i, each) for i, each in enumerate(request.groups) if trial in each.trials
        )
        wanted, parts = group.trials.index(trial) * seeds, []
        for file in sorted((request.run_dir / "slices").glob(f"{number}-*.safetensors")):
            first, last = map(int, file.stem.split("-")[1:])
            rows = slice(max(wanted - first, 0), min(wanted + seeds, last) - first)
            if rows.start < rows.stop:
                with safe_open(file, framework="numpy") as stored:
                    parts.append({name: stored.get_slice(name)[rows] for name in stored.keys()})  # noqa: SIM118
        agent = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        config, path = (
            config_of(request, trial),
            str(request.run_dir / Path(request.script.__file__).name),
        )
        settings = {
            "settings": record["settings"] | runs.plain(config),
            "trial": trial,
            "path": path,
        }
        of_trial = {name: record[name] for name in kept} | settings
        runs.begin_run(folder / f"trial-{trial}", config, of_trial, request.script)
        with contextlib.redirect_stdout(io.StringIO()):
            alone = train.Request(
                request.script, config, request.options, folder / f"trial-{trial}", of_trial
            )
            train.finish(
                alone, {"metrics": metrics[trial], "agent": unflatten_dict(agent, sep=".")}, None
            )


# --- results ---


class Result(NamedTuple):
    """The result of a trial."""

    trial: int
    config: Any
    values: dict  # of the swept fields, without the environment's
    metrics: dict  # {name: [seeds, updates]}
    returns: np.ndarray  # final return of each seed, -inf if it is not finite: [seeds]
    not_finite: (
        np.ndarray
    )  # first update of each seed with a loss that is not finite, or -1: [seeds]
    diverged: np.ndarray  # whether the parameters are not finite: [seeds]
    mean: float  # interquartile mean
    low: float  # end of the 95 % interval of `mean`, NaN for one seed
    high: float  # the other end

    def of_finite(self) -> tuple[float, float]:
        """Mean and worst return of the finite seeds, or -inf."""
        finite = self.returns[np.isfinite(self.returns)]
        return (float(finite.mean()), float(finite.min())) if len(finite) else (-np.inf, -np.inf)


def collect(request: Request) -> list[dict]:
    """Metrics and OF_RUNS of each trial: {name: [seeds, ...]}. Raises OSError if a file cannot be read."""
    trials, seeds = [None] * len(request.trials), request.options.num_seeds
    for number, group in enumerate(request.groups):
        parts = [read_slice(file) for _, file in finished_slices(request.run_dir, number)]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for position, trial in enumerate(group.trials):
            rows = slice(position * seeds, (position + 1) * seeds)
            trials[trial] = {name: each[rows] for name, each in whole.items()}
    return trials


def summarize(request: Request, metrics: list[dict]) -> list[Result]:
    """Results in the order of trials. Pops OF_RUNS from `metrics`. Seeds are drawn jointly: all trials share keys."""
    of_runs = [[each.pop(name) for name in OF_RUNS] for each in metrics]
    intervals, found = statistics.interval(np.stack([each[0] for each in of_runs], axis=1)), []
    for i, (trial, *numbers) in enumerate(zip(request.trials, *intervals, strict=True)):
        values = {name: value for name, value in trial.items() if name not in runs.OF_THE_TASK}
        found.append(
            Result(i, config_of(request, i), values, metrics[i], *of_runs[i], *map(float, numbers))
        )
    return found


def make_table(ranked: list[Result]) -> list[str]:
    rows = [
        [
            "trial",
            *ranked[0].values,
            "interquartile mean",
            "95 % interval",
            "mean",
            "worst seed",
            "seeds",
        ]
    ]
    for each in ranked:
        finite, seeds = int(np.isfinite(each.returns).sum()), len(each.returns)
        count = str(seeds) if finite == seeds else f"{finite} of {seeds} finite"
        interval = "none" if np.isnan(each.low) else f"{each.low:.4g} to {each.high:.4g}"
        numbers = [f"{each.mean:.4g}", interval, *map(show, each.of_finite()), count]
        rows.append([str(each.trial), *map(show, each.values.values()), *numbers])
    return command_line.align(rows).split("\n")


def make_csv(request: Request, found: list[Result]) -> str:
    """A row per trial and seed, in the order of trials. A return that is not finite is written as -inf."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    of_seeds = ["seed", "final_return", "first_update_not_finite", "diverged"]
    rows.writerow(
        [
            "trial",
            *request.swept,
            *of_seeds,
            "trial_interquartile_mean",
            "trial_mean",
            "trial_worst",
        ]
    )
    for each in found:
        values = [
            value if isinstance(value, float) else show(value)
            for value in request.trials[each.trial].values()
        ]
        for seed, (final, bad, lost) in enumerate(
            zip(each.returns, each.not_finite, each.diverged, strict=True)
        ):
            numbers = [
                seed,
                final,
                "" if bad < 0 else bad,
                bool(lost),
                each.mean,
                *each.of_finite(),
            ]
            rows.writerow([each.trial, *values, *numbers])
    return text.getvalue()


def stack_metrics(metrics: list[dict]) -> dict:
    """{name: [trials, seeds, updates]}. Missing updates and missing metrics of a trial are NaN, or 0 for counts."""
    updates = max(each["episodes"].shape[1] for each in metrics)

    def padded(each, name, like):
        values = each.get(name, np.zeros((len(each["episodes"]), 0), like.dtype))
        missing = 0 if like.dtype.kind in "iu" else np.nan
        return np.pad(values, ((0, 0), (0, updates - values.shape[1])), constant_values=missing)

    known = {name: each[name] for each in metrics for name in each}
    return {
        name: np.stack([padded(each, name, like) for each in metrics])
        for name, like in known.items()
    }


def write_results(request: Request) -> None:
    """Write a ranking of the trials and pictures for each environment, and all other results. Raises OSError."""
    run_dir, metrics = request.run_dir, collect(request)
    found, ranks = summarize(request, metrics), rank_trials(request)
    steps = {"warmup_timesteps": [getattr(each.config, "warmup_timesteps", 0) for each in found]}
    steps["steps_per_update"] = [steps_of(each.config) for each in found]
    runs.write(run_dir / "results.csv", make_csv(request, found))
    tables = []
    for task, trials in ranks.items():
        ranked = [found[trial] for trial in trials]
        suffix = f"-{re.sub(r'[^-.=0-9A-Za-z]+', '_', task)}" if len(ranks) > 1 else ""
        tables.append(
            [f"{task}:", *make_table(ranked), ""] if len(ranks) > 1 else make_table(ranked)
        )
        if math.isfinite(ranked[0].mean):
            runs.write_config(run_dir / f"best{suffix}.yaml", ranked[0].config)
        title = f"{Path(request.script.__file__).stem} on {task}, {request.options.num_seeds} seeds each"
        pictures = {"learning_curves": partial(draw_curves, request.script, ranked[:5])}
        if len(ranked) > 1:
            pictures["final_return"] = partial(draw_returns, ranked)
        if len(ranked[0].values) == 2:
            pictures["heat_map"] = partial(draw_heat_map, ranked)
        for name, draw_it in pictures.items():
            runs.write(run_dir / f"{name}{suffix}.png", partial(draw_it, title))
    runs.write(run_dir / "table.txt", "\n".join(line for table in tables for line in table) + "\n")
    keep_agents(request, metrics)
    runs.write(
        run_dir / "metrics.npz", partial(np.savez_compressed, **stack_metrics(metrics), **steps)
    )
    request.record["finished"] = runs.now()
    runs.write_record(request.run_dir, request.record)
    for name in ("slices", "unfinished"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for table in tables:
        print("\n".join(table[:22]))
        if len(table) > 22:
            print(f"... {len(table) - 22} more in {run_dir / 'table.txt'}")
    print(f"results in {run_dir}")


# --- main ---


def begin(request: Request, is_new: bool, until_the_end: contextlib.ExitStack) -> Iterable[Group]:
    """The groups to train. Checks the configs, makes the directory and locks it. Raises ValueError."""
    options, num_trials = request.options, request.record["num_trials"]
    groups = make_groups(request) or [Group(request.config, range(num_trials))]
    for group in groups:
        with running.naming_the_field(request.script, group.config):  # before anything is compiled
            request.script.make_learner(group.config)
    steps = (runs.total_steps(each.config, len(each.trials) * options.num_seeds) for each in groups)
    request.record.update(steps_done=0, steps_total=sum(steps))  # slices on disk are counted again
    if is_new:
        running.only_first(
            runs.begin_run, request.run_dir, request.config, request.record, request.script
        )
        until_the_end.enter_context(running.holding(request.run_dir))
    if running.is_first():
        how = f", {options.batch} at a time by Optuna" if options.optuna else ""
        many = f"{num_trials} trials x {options.num_seeds} seeds in {len(groups)} compile group(s)"
        print(f"{many}, {len(jax.devices())} device(s){how}")
    return propose_groups(request) if options.optuna else groups


def main(words) -> Path:
    """Sweep as the command line says. Returns the run directory."""
    words = [str(each) for each in words]
    stop, failures = (
        partial(command_line.errors_in_one_line, TOOL),
        partial(command_line.failures_in_one_line, TOOL),
    )
    is_new = words[:1] != ["--resume"]
    with (
        running.stopping(TOOL, "nothing was started"),
        stop(),
        failures(),
        contextlib.ExitStack() as until_the_end,
    ):
        running.connect(
            command_line.split_words(words)[1]
        )  # before importing a script, which starts JAX
        if (request := read_request(words, until_the_end)) is None:
            return Path(words[1])
        run_dir = request.run_dir
        groups = begin(request, is_new, until_the_end)
        until_the_end = until_the_end.pop_all()
    with until_the_end, stop(1, (OSError,), about=f"run_dir = {run_dir}: "), failures():
        go_on = running.stopping(TOOL, f"{TOOL} --resume {run_dir} continues")
        bar = running.progress_bar(request.record["steps_total"], not running.is_first())
        with go_on, running.catching_signals() as caught:
            with stop(kinds=(ValueError,)), bar:
                try:
                    run_groups(request, groups, bar, caught)
                except ValueError:
                    if is_new and not request.record["slices"]:
                        running.only_first(shutil.rmtree, run_dir)  # it is empty
                    raise
            running.only_first(write_results, request)
    return run_dir
