"""Train a script as its own command line does, and add checkpoints, resuming, evaluation, tracking and several hosts.

    onejit train ppo --config configs/ppo/cartpole.yaml --num-seeds 1024 --track tensorboard
    onejit train path/to/my_algorithm.py --num-seeds 64 --eval-interval 50 --memory 8
    onejit train --resume runs/ppo/my_run
    onejit train --resume runs/ppo/my_run --total-timesteps 2e6

All flags of the script work here, too; `onejit train ppo --help` lists them. The run directory also holds the script,
checkpoints and a record. `--resume` continues a run with its own settings. A larger `--total-timesteps` extends a run,
unless it has a schedule, such as an annealed rate. Seeds that do not fit in memory together run in slices. A resumed
run begins new episodes if its environments run outside JAX. Hosts that run the same command share the seeds.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import time
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save as as_safetensors

from onejit import command_line, running, runs, statistics

TRACKERS = {"tensorboard": ["tensorboardX"], "wandb": ["wandb"]}  # the packages that they need


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run."""

    num_seeds: int = 4  # number of agents, each with its own random key
    seed: int = 0  # seed of the key that the agents' keys are split from
    run_dir: Path | None = (
        None  # new directory for the results; runs/SCRIPT/ENVIRONMENT-TIME-PID by default
    )
    eval_episodes: int = (
        16  # greedy episodes per agent in an evaluation; all agents play the same; 0 for none
    )
    eval_interval: int = (
        0  # updates between evaluations during training; 0 evaluates after training only
    )
    checkpoint_interval: float = (
        60.0  # seconds between checkpoints; with 0 only the last one is written
    )
    track: Literal["tensorboard", "wandb"] | None = (
        None  # tracker for curves of the mean and of the worst seed
    )
    track_seeds: tyro.conf.FlagCreatePairsOff[bool] = False  # track a curve for each seed as well
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default


KEPT = (
    "eval_episodes",
    "eval_interval",
    "checkpoint_interval",
    "track",
    "track_seeds",
)  # recorded for --resume


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """Options that can be given with --resume RUN_DIR."""

    total_timesteps: float | None = (
        None  # more environment steps per agent than before, to extend the run
    )
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default
    force: tyro.conf.FlagCreatePairsOff[bool] = (
        False  # use the run's copy of the script although it was edited
    )


class Request(NamedTuple):
    """What the command line requests."""

    script: Any
    config: Any
    options: Options
    run_dir: Path
    record: dict  # run.json


def read_request(words: list[str], until_the_end: contextlib.ExitStack) -> Request | None:
    """Connect to other hosts, then import the script. None if the run has finished. Raises ValueError."""
    name, hosts, words = command_line.split_words(words)
    running.connect(hosts)
    if name == "--resume":
        return read_resumed(words, until_the_end)
    script = runs.load_script(name)
    config, options, _ = command_line.parse_with(script, words, Options, description=__doc__)
    if options.eval_interval and not options.eval_episodes:
        raise ValueError(f"eval_interval = {options.eval_interval}: needs eval_episodes above 0")
    command_line.check_packages(f"track = {options.track}", TRACKERS.get(options.track, ()))
    stamp = f"{config.env_name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(
        running.agree(str(options.run_dir or Path("runs", Path(script.__file__).stem, stamp)))
    )
    running.only_first(runs.check_new, run_dir)
    record = runs.make_record(script, config, options, ["train", name, *words])
    record["options"] = {name: getattr(options, name) for name in KEPT}
    return Request(script, config, options, run_dir, record)


def read_resumed(words: list[str], until_the_end: contextlib.ExitStack) -> Request | None:
    """The run of `--resume RUN_DIR`; None if it has finished. Raises ValueError."""
    run_dir, record, given = running.read_resumed(
        words, "train", "slice", ResumeOptions, until_the_end
    )
    script = runs.script_of(run_dir, record, given.force)
    config, settings = runs.read_config(script, run_dir / "config.yaml"), record["settings"]
    options = Options(
        settings["num_seeds"], settings["seed"], run_dir, memory=given.memory, **record["options"]
    )
    if given.total_timesteps is not None:
        config = extend(script, config, int(given.total_timesteps))
        record["settings"]["total_timesteps"] = config.total_timesteps
        record.pop("finished", None)
    record["steps_total"] = runs.total_steps(config, options.num_seeds)
    if "finished" in record:
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    return Request(script, config, options, run_dir, record)


def extend(script, config, total_timesteps: int):
    """`config` with more steps. Raises ValueError if this would change the updates."""
    longer = dataclasses.replace(config, total_timesteps=total_timesteps)
    if longer.num_updates <= config.num_updates:
        raise ValueError(
            f"total_timesteps = {total_timesteps}: the run already has {config.total_timesteps}"
        )
    if describe_update(script, config) != describe_update(script, longer):
        raise ValueError(
            f"total_timesteps = {total_timesteps}: cannot be changed, because a schedule of the script depends on it, "
            "such as an annealed learning rate; start a new run"
        )
    return longer


def describe_update(script, config) -> str:
    """The compiled program of an update, without references to lines of the script."""
    init, update = script.make_learner(config)
    lowered = jax.jit(update).lower(jax.eval_shape(init, jax.random.key(0)))
    text = lowered.compile().as_text()
    return re.sub(r", metadata=\{.*?\}", "", text[re.search(r"(?m)^(%|ENTRY)", text).start() :])


# --- tracking ---


def open_tracker(request: Request, name: str, steps_done: int):
    """`(log, flush, close)` of a TensorBoard or W&B run for one slice; `log(step, {name: value})`. Raises OSError."""
    run_dir, record = request.run_dir, request.record
    if not request.options.track or not running.is_first():
        return lambda step, values: None, lambda: None, lambda: None
    if request.options.track == "tensorboard":
        from tensorboardX.event_file_writer import (
            EventsWriter,
        )  # `flush` of SummaryWriter leaves its queue
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        (run_dir / "tensorboard" / name).mkdir(parents=True, exist_ok=True)
        writer = EventsWriter(str(run_dir / "tensorboard" / name / "events"))
        # A resumed run writes the points after its checkpoint again; this makes TensorBoard drop the older ones.
        writer.write_event(
            Event(step=steps_done + 1, session_log=SessionLog(status=SessionLog.START))
        )

        def log(step, values):
            for tag, value in values.items():
                writer.write_event(
                    Event(wall_time=time.time(), step=step, summary=scalar(tag, value))
                )

        return log, writer.flush, writer.close
    import wandb

    place, settings = f"{run_dir.absolute()} {record['started']} {name}", record["settings"]
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", settings["script"]),
            name=" ".join(filter(None, [run_dir.name, name])),
            group=os.environ.get("WANDB_RUN_GROUP", settings["env_name"]),
            tags=[settings["script"], settings["env_name"]],
            id=hashlib.sha256(place.encode()).hexdigest()[:16],  # the same on resume
            resume="allow",
            dir=str(run_dir),
            config=settings,
        )
    except Exception as error:  # errors of the network, a missing login and others
        raise OSError(f"track = wandb: cannot be started ({error})") from error
    run.define_metric("*", step_metric="environment_steps")
    return (
        lambda step, values: run.log(values | {"environment_steps": step}),
        lambda: None,
        run.finish,
    )


def curves(script, metrics: dict, seeds: range, evaluation=None, each_seed: bool = False) -> dict:
    """The tracked values of a chunk of updates, without NaN.

    `metrics` {name: [seeds, updates]}, `evaluation` [seeds, episodes] or None. Returns are tracked as the mean over the
    seeds that ended an episode, its 95 % interval, and the worst seed; other metrics as means over seeds and updates.
    """
    returns = script.mean_return(metrics)
    values = returns_over_seeds("episodic_return", returns)
    if each_seed:
        values |= {
            f"episodic_return/seed_{seed:04d}": value
            for seed, value in zip(seeds, returns, strict=True)
        }
    if evaluation is not None:
        values |= returns_over_seeds("greedy_return", evaluation.mean(axis=1))
    for name, each in metrics.items():
        if name != "episodic_return" and not np.isnan(each).all():
            values[f"{name}/mean"] = np.nanmean(each)
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def returns_over_seeds(name: str, returns) -> dict:
    if not len(returns := returns[np.isfinite(returns)]):
        return {}
    mean, low, high = statistics.mean_interval(returns)
    return {
        f"{name}/mean": mean,
        f"{name}/low": low,
        f"{name}/high": high,
        f"{name}/worst_seed": returns.min(),
    }


# --- training ---


def prepare(request: Request, until_the_end: contextlib.ExitStack) -> running.Program:
    """Compile the program of a slice, print its memory, and begin and lock a new run. Raises ValueError."""
    script, config, options, record = (
        request.script,
        request.config,
        request.options,
        request.record,
    )
    compile_size = partial(running.compile_slice, script, config, [], options=options)
    size = record.get("slice")  # a resumed run keeps its slices, and therefore its numbers
    how = options.num_seeds, size, options.memory, record["seconds"]
    program, slices = running.compile_slices(compile_size, *how)
    if size:
        running.only_first(
            runs.write_config, request.run_dir / "config.yaml", config
        )  # it may have been extended
    else:
        record["slice"] = program.size
        running.only_first(runs.begin_run, request.run_dir, config, record, script)
        until_the_end.enter_context(running.holding(request.run_dir))
    if running.is_first():
        updates = f"{config.num_updates} updates of {runs.steps_of(config)} steps"
        print(f"{config.env_name}: {updates}; {options.num_seeds} seeds in {slices}")
    return program


def train(request: Request, program: running.Program) -> tuple[dict, Any]:
    """Train and evaluate all slices, and record the time.

    Returns a dict of NumPy arrays, on every process: `metrics` {name: [num_seeds, num_updates]}, `agent` with leaves
    [num_seeds, ...] and, if requested, `evaluation` [num_seeds, eval_episodes] and the evaluations `during` training.
    Also returns the runner state of all agents on their devices, or None unless one slice in one process holds them.
    """
    config, options, size, record = request.config, request.options, program.size, request.record
    keys, parts, seconds = running.seed_keys(options), [], record["seconds"]
    steps, warmup = runs.steps_of(config), getattr(config, "warmup_timesteps", 0)  # of one agent
    first_process = running.is_first()

    with (
        running.progress_bar(record["steps_total"], not first_process) as progress,
        running.catching_signals() as caught,
    ):
        for first in range(0, options.num_seeds, size):
            state = None  # free the memory of the previous slice
            seeds = range(first, min(first + size, options.num_seeds))
            run = np.minimum(
                np.arange(first, first + size), options.num_seeds - 1
            )  # the last seed fills up a slice
            name = "" if size >= options.num_seeds else f"{first:05d}-{seeds.stop:05d}"
            with running.open_checkpoints(
                request.run_dir / "checkpoints" / name, keep=2
            ) as manager:
                done = manager.latest_step() or 0
                if done and first_process:
                    which = f"seeds {first} to {seeds.stop - 1}"
                    progress.write(f"{which}: {done} of {config.num_updates} updates are done")
                running.count_restored(progress, done * len(seeds) * steps)
                log, flush, close = open_tracker(request, name, warmup + done * steps)

                def watch(first, last, metrics, returns, seeds=seeds, log=log):
                    metrics = {name: each[: len(seeds)] for name, each in metrics.items()}
                    returns = None if returns is None else returns[: len(seeds)]
                    values = curves(request.script, metrics, seeds, returns, options.track_seeds)
                    log(warmup + last * steps, values)
                    if (mean := values.get("episodic_return/mean")) is not None:
                        progress.set_postfix_str(f"return {mean:.4g}", refresh=False)
                    record["steps_done"] = (
                        seeds[0] * config.num_updates + last * len(seeds)
                    ) * steps
                    progress.update((last - first) * len(seeds) * steps)

                how = dict(
                    interval=options.checkpoint_interval,
                    eval_interval=options.eval_interval,
                    seconds=seconds,
                )
                how |= dict(
                    save_last=True, caught=caught, begin=progress.unpause, before_save=flush
                )
                how["after_save"] = partial(runs.write_record, request.run_dir, record)
                try:
                    carry = running.train_slice(program, {}, keys[run], manager, watch, **how)
                finally:
                    close()
            ended = time.perf_counter()
            part, state = {"metrics": running.fetch(carry["metrics"])}, carry["runner_state"]
            part["agent"] = running.fetch(state.agent)
            if program.evaluate is not None:
                part["evaluation"] = np.asarray(program.evaluate(state.agent))
            if "evaluation" in carry:
                part["during"] = running.fetch(carry["evaluation"])
            parts.append(jax.tree.map(itemgetter(slice(len(seeds))), part))
            seconds["evaluate"] += time.perf_counter() - ended
            del carry
    if first_process and seconds["train"]:
        record["steps_per_second"] = record["steps_done"] / seconds["train"]
        print(
            f"trained in {seconds['train']:.1f} s, {record['steps_per_second']:,.0f} steps/s over all seeds"
        )
    whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    if len(parts) > 1 or jax.process_count() > 1:
        return whole, None
    return whole, jax.tree.map(
        lambda leaf: leaf[: options.num_seeds], state
    ) if size > options.num_seeds else state


def finish(request: Request, trained: dict, runner_state) -> None:
    """Write the files of the script's `main`, each completely or not at all, and the record. Raises OSError."""
    run_dir, record, folder = request.run_dir, request.record, request.run_dir / "results.partial"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    folder.mkdir()
    try:
        request.script.save_results(
            request.config, request.options.seed, trained["agent"], trained["metrics"], folder
        )
        shutil.copymode(
            folder / "metrics.npz", folder / "agent.safetensors"
        )  # only its owner could read it
        if "during" in trained:
            save_evaluations(request, trained["during"], folder)
    except SafetensorError as error:
        raise OSError(f"agent.safetensors: cannot be written ({error})") from error
    returns = {"final return": statistics.final_return(trained["metrics"])}
    if "evaluation" in trained:
        np.save(folder / "evaluation.npy", trained["evaluation"])
        returns["greedy return"] = trained["evaluation"].mean(axis=1)
    if runner_state is not None:
        request.script.report(request.config, runner_state, folder)
    for path in folder.iterdir():
        if (run_dir / path.name).is_dir():
            shutil.rmtree(run_dir / path.name)
        path.replace(run_dir / path.name)
    folder.rmdir()
    lost = statistics.diverged(trained["agent"])
    for name, values in returns.items():
        record |= statistics.summarize(name, values, lost)
    record["finished"] = runs.now()
    runs.write_record(run_dir, record)
    print(f"results in {run_dir}")


def save_evaluations(request: Request, during: dict, folder: Path) -> None:
    """`evaluations.npz` with `timesteps` [n] and `returns` [num_seeds, n], and each seed's best agent."""
    config, interval = request.config, request.options.eval_interval
    updates = interval * (1 + np.arange(during["returns"].shape[1]))
    timesteps = getattr(config, "warmup_timesteps", 0) + updates * runs.steps_of(config)
    np.savez_compressed(folder / "evaluations.npz", timesteps=timesteps, returns=during["returns"])
    best = {
        name: np.asarray(leaf)
        for name, leaf in flatten_dict(during["best"]["agent"], sep=".").items()
    }
    metadata = {"script": Path(request.script.__file__).stem, "seed": str(request.options.seed)}
    (folder / "best_agent.safetensors").write_bytes(as_safetensors(best, metadata))


def main(words) -> Path:
    """Train as the command line says. Returns the run directory."""
    words = [str(each) for each in words]
    tool, failures = "onejit train", partial(command_line.failures_in_one_line, "onejit train")
    stop = partial(command_line.errors_in_one_line, tool)
    with stop(), failures(), contextlib.ExitStack() as until_the_end:
        if (request := read_request(words, until_the_end)) is None:
            return Path(words[1])
        run_dir = request.run_dir
        program = prepare(request, until_the_end)
        until_the_end = until_the_end.pop_all()
    with until_the_end, stop(1, (OSError,), about=f"run_dir = {run_dir}: "), failures():
        with running.stopping(tool, f"onejit train --resume {run_dir} continues"):
            trained, runner_state = train(request, program)
        running.only_first(finish, request, trained, runner_state)
    return run_dir
