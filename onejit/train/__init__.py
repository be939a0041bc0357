"""Train a script, and add checkpoints, resuming, evaluation, tracking and several hosts.

The run is the same as by the script's own command line.

    onejit train ppo --config configs/ppo/cartpole.yaml --num-seeds 1024 --track tensorboard
    onejit train path/to/my_algorithm.py --num-seeds 64 --eval-interval 50 --memory 8

All flags of the script work here, too; `onejit train ppo --help` lists them. The run directory also
holds the script, checkpoints and a record, and `onejit resume` continues the run. Seeds that do not
fit in memory together run in slices. Hosts that run the same command share the seeds.
"""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from onejit.base import statistics
from onejit.base.packages import check_packages
from onejit.base.signals import stopping
from onejit.base.text import plural, resume_command
from onejit.engine import compilation, hosts, loop
from onejit.run import tracking
from onejit.run.command import run
from onejit.run.directory import (
    checkpoints_of,
    new_run_dir,
    script_and_config,
    with_all_steps,
)
from onejit.run.lock import holding
from onejit.run.record import Record, make_record, write_record
from onejit.run.resume import ResumeOptions, open_run, options_of
from onejit.run.tracking import TRACKERS
from onejit.run.write import begin_run, finish_run
from onejit.script import command_line
from onejit.script.contract import Script
from onejit.script.errors import errors_in_one_line
from onejit.script.load import load_script
from onejit.script.steps import steps_of, timesteps_until, total_steps
from onejit.train import find_nan
from onejit.train.options import Options

TOOL = "onejit train"


class Training(NamedTuple):
    """What is trained, how, and where it is written."""

    script: Script
    config: Any
    options: Options
    run_dir: Path
    record: Record  # run.json


def read_training(words: list[str]) -> Training:
    """Connect to other hosts, then import the script. Raises ValueError."""
    name, flags = command_line.take_script(words)
    hosts.connect(command_line.read_hosts(flags))
    script = load_script(name)
    config, options, _ = command_line.parse_with(script, flags, Options, __doc__, prog=TOOL)
    if options.eval_interval and not options.eval_episodes:
        raise ValueError(f"eval_interval = {options.eval_interval}: needs eval_episodes above 0")
    if options.eval_interval > config.num_updates >= 1:  # without an update, the script says why
        raise ValueError(
            f"eval_interval = {options.eval_interval}: must be at most the number of updates, "
            f"{config.num_updates}"
        )
    check_packages(f"track = {options.track}", TRACKERS.get(options.track, ()))
    if options.track_seeds and not options.track:
        raise ValueError("track_seeds: needs --track tensorboard, trackio or wandb")
    run_dir = Path(hosts.agree(str(options.run_dir or new_run_dir(script, config))))
    record = make_record("train", script, config, options, ["train", *words])
    return Training(script, config, options, run_dir, record)


def read_resumed(
    given: ResumeOptions, run_dir: Path, until_the_end: contextlib.ExitStack
) -> Training | None:
    """The run of `onejit resume RUN_DIR`; None if it has finished. Raises ValueError."""
    if given.memory is not None:
        raise ValueError("memory: a run keeps its slices; only a sweep takes another memory")
    record = open_run(run_dir, until_the_end)
    script, config = script_and_config(run_dir, record, accept_edited=given.force)
    options = options_of(Options, run_dir, record)
    config = with_all_steps(config, record)
    if given.total_timesteps is not None:
        is_finished = record.finished is not None
        if is_finished and not any((run_dir / "checkpoints").rglob("*.npz")):
            raise ValueError(
                f"total_timesteps = {given.total_timesteps}: the checkpoints of {run_dir} are "
                "gone, and without them it cannot be extended"
            )
        config = extend(script, config, given.total_timesteps, is_finished)
        record.finished = None
    record.settings["total_timesteps"] = config.total_timesteps
    record.steps_total = total_steps(config, options.num_seeds)
    if record.finished is not None and (run_dir / "agent.safetensors").exists():
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    return Training(script, config, options, run_dir, record)


def extend(script: Script, config, total_timesteps: int, is_finished: bool):
    """`config` with more steps. Raises ValueError if this would change the updates.

    The config may already have them, if an extension of the run was killed.
    """
    longer = dataclasses.replace(config, total_timesteps=total_timesteps)
    command_line.check_config(longer)
    if longer == config and not is_finished:
        return config
    if longer.num_updates <= config.num_updates:
        raise ValueError(
            f"total_timesteps = {total_timesteps}: the run already has {config.total_timesteps}"
        )
    if describe_update(script, config) != describe_update(script, longer):
        advice = " with --anneal-lr False" if getattr(config, "anneal_lr", False) else ""
        raise ValueError(
            f"total_timesteps = {total_timesteps}: cannot be changed, because a schedule of the "
            f"script depends on it, such as an annealed learning rate; start a new run{advice}"
        )
    return longer


def describe_update(script: Script, config) -> str:
    """The program of an update, without references to lines of the script."""
    init, update = script.make_learner(config)
    return jax.jit(update).lower(jax.eval_shape(init, jax.random.key(0))).as_text()


# --- training ---


def prepare(training: Training, until_the_end: contextlib.ExitStack) -> compilation.Program:
    """Lock a new run, compile the program of a slice, begin the run and print its memory.

    Raises ValueError.
    """
    script = training.script
    config = training.config
    options = training.options
    record = training.record
    hosts.only_first(tracking.check_login, options.track)
    size = record.slice  # a resumed run keeps its slices, and therefore its numbers
    if not size:
        until_the_end.enter_context(holding(training.run_dir, is_new=True))
    program, description = compilation.compile_slices(
        partial(compilation.compile_slice, script, config, [], options=options),
        total=options.num_seeds,
        size=size,
        memory_gib=options.memory,
        seconds=record.seconds,
    )
    if size:
        hosts.only_first(write_record, training.run_dir, record)
    else:
        record.slice = program.size
        env_names = [config.env_name]
        hosts.only_first(begin_run, training.run_dir, config, record, script, env_names)
    if hosts.is_first():
        updates = f"{config.num_updates} updates of {steps_of(config)} steps"
        print(f"{config.env_name}: {updates}; {plural(options.num_seeds, 'seed')} in {description}")
    return program


class Curves:
    """The curves of a training in its tracker, one run for each slice."""

    def __init__(self, training: Training):
        self.training = training
        self.runs = range(0)  # of the slice that the tracker is for
        self.tracker = tracking.NoTracker()

    def close(self) -> None:
        self.tracker.close()

    def watch(self, piece: loop.Slice, first: int, last: int, metrics: dict, returns) -> str:
        """Track the updates [first, last). Returns a note for the progress bar."""
        options = self.training.options
        if self.runs != piece.runs:
            self.tracker.close()
            self.runs = piece.runs
            self.tracker = tracking.open_tracker(
                options.track,
                self.training.run_dir,
                self.training.record,
                piece.folder.relative_to(self.training.run_dir / "checkpoints").name,
                timesteps_until(piece.config, first),
            )
        number = len(piece.runs)
        metrics = {name: values[:number] for name, values in metrics.items()}
        if returns is not None:
            returns = np.asarray(returns)[:number]
        values = tracking.curves(metrics, piece.runs, returns, options.track_seeds)
        self.tracker.log(timesteps_until(piece.config, last), values)
        mean = values.get("episodic_return/mean")
        return "" if mean is None else f"return {mean:.4g}"


def slice_of_seeds(training: Training, program, first: int) -> loop.Slice:
    """The slice from the seed `first` on."""
    options = training.options
    seeds, numbers = loop.runs_of_slice(first, program.size, options.num_seeds)
    return loop.Slice(
        config=training.config,
        runs=seeds,
        numbers=numbers,
        key_data=loop.seed_keys(options)[numbers],
        folder=checkpoints_of(training.run_dir, seeds, options.num_seeds),
        last_update=training.config.num_updates,
        save_last=True,
    )


def train(training: Training, program: compilation.Program, progress, caught):
    """Train and evaluate all slices, and record the time.

    Returns what they made, on every process, and the runner state of all agents on their devices,
    or None unless one slice in one process holds them.
    """
    options = training.options
    record = training.record
    record.steps_done = 0  # those of checkpoints are counted again
    curves = Curves(training)
    go_on = f"{resume_command(training.run_dir)} continues"
    parts = []
    with contextlib.closing(curves):
        session = loop.Session(
            record=record,
            write_record=partial(write_record, training.run_dir, record),
            progress=progress,
            caught=caught,
            watch=curves.watch,
            checkpoint_interval=options.checkpoint_interval,
            eval_interval=options.eval_interval,
            if_stopped=f"{TOOL}: stopped in the evaluation; {go_on}",
        )
        for first in range(0, options.num_seeds, program.size):
            runner_state = None  # free the memory of the previous slice
            piece = slice_of_seeds(training, program, first)
            part, runner_state = loop.run(program, piece, session)
            parts.append(part)
    whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    if len(parts) > 1 or jax.process_count() > 1:
        return whole, None
    if program.size > options.num_seeds:
        runner_state = jax.tree.map(lambda leaf: leaf[: options.num_seeds], runner_state)
    return whole, runner_state


# --- results ---


def finish(training: Training, made: tuple[loop.Trained, Any]) -> bool:
    """Write the results and the record, and print them, in process 0.

    Returns whether a seed is left that has not diverged. Raises OSError.
    """
    return hosts.only_first(write_results, training, *made)


def write_results(training: Training, trained: loop.Trained, runner_state) -> bool:
    script, config, _, run_dir, record = training
    seconds = record.seconds["train"]
    if seconds:
        record.steps_per_second = record.steps_done / seconds
        speed = f"{record.steps_per_second:,.0f} steps/s over all seeds"
        print(f"trained in {seconds:.1f} s, {speed}")
    lines = finish_run(run_dir, record, script, config, trained, runner_state)
    print("\n".join([*lines, f"results in {run_dir}"]))
    return not statistics.diverged(trained.agent, record.not_finite_at_start).all()


def look_for_nan(training: Training, made: tuple[loop.Trained, Any]) -> None:
    """The search of `--find-nan`, if a value is not finite."""
    script, config, options, run_dir, record = training
    trained, _ = made
    is_broken = statistics.diverged(trained.agent, record.not_finite_at_start).any()
    is_broken |= bool(statistics.broken_metrics(trained.metrics))
    if options.find_nan and is_broken:
        with stopping(TOOL, f"results are in {run_dir}"), errors_in_one_line(TOOL):
            find_nan.search(script, config, options, run_dir, record.slice)


# --- main ---


def main(words) -> Path | None:
    """Train as the command line says. Returns the run directory."""
    words = [str(word) for word in words]
    return run(TOOL, lambda _: read_training(words), prepare, train, finish, look_for_nan)


def resume(run_dir: Path, given: ResumeOptions) -> Path:
    """Continue a run; the command line gave only the options in `given`. Returns `run_dir`."""
    read = partial(read_resumed, given, run_dir)
    run("onejit resume", read, prepare, train, finish, look_for_nan)
    return run_dir
