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
import math
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from onejit.base import statistics
from onejit.base.packages import check_packages
from onejit.base.signals import Stopped, catching_signals, ending_at_once, stopping
from onejit.base.text import plural
from onejit.engine import compilation, hosts, loop
from onejit.engine.job import Job
from onejit.engine.progress import count_restored, progress_bar, warn_of_days
from onejit.report import tracking
from onejit.report.tracking import TRACKERS
from onejit.run.directory import new_run_dir, script_and_config, with_all_steps
from onejit.run.lock import holding
from onejit.run.record import Record, make_record, write_record
from onejit.run.resume import ResumeOptions, open_run, options_of
from onejit.run.write import begin_run, finish_run
from onejit.script import command_line
from onejit.script.configs import env_name_of
from onejit.script.contract import Script
from onejit.script.errors import errors_in_one_line, exit_as_diverged, failures_in_one_line
from onejit.script.load import load_script
from onejit.script.steps import steps_of, timesteps_until, total_steps
from onejit.train import find_nan
from onejit.train.options import Options

TOOL = "onejit train"


class Request(NamedTuple):
    """What the command line requests."""

    script: Script
    config: Any
    options: Any  # of `onejit train`, or of a sweep
    run_dir: Path
    record: Record  # run.json


def read_request(words: list[str]) -> Request:
    """Connect to other hosts, then import the script. Raises ValueError."""
    name, hosts_options, words = command_line.split_words(words)
    hosts.connect(hosts_options)
    script = load_script(name)
    config, options, _ = command_line.parse_with(
        script, words, Options, __doc__, prog="onejit train"
    )
    if options.eval_interval and not options.eval_episodes:
        raise ValueError(f"eval_interval = {options.eval_interval}: needs eval_episodes above 0")
    if options.eval_interval > config.num_updates:
        raise ValueError(
            f"eval_interval = {options.eval_interval}: must be at most the number of updates, "
            f"{config.num_updates}"
        )
    check_packages(f"track = {options.track}", TRACKERS.get(options.track, ()))
    if options.track_seeds and not options.track:
        raise ValueError("track_seeds: needs --track tensorboard, trackio or wandb")
    run_dir = Path(hosts.agree(str(options.run_dir or new_run_dir(script, config))))
    command = ["train", name, *words]
    record = make_record("train", script, config, options, command)
    return Request(script, config, options, run_dir, record)


def read_resumed(
    given: ResumeOptions, run_dir: Path, until_the_end: contextlib.ExitStack
) -> Request | None:
    """The run of `onejit resume RUN_DIR`; None if it has finished. Raises ValueError."""
    if given.memory is not None:
        raise ValueError("memory: a run keeps its slices; only a sweep takes another memory")
    record = open_run(run_dir, until_the_end)
    script, config = script_and_config(run_dir, record, accept_edited=given.force)
    options = options_of(Options, run_dir, record)
    config = with_all_steps(config, record)
    if given.total_timesteps is not None:
        steps = whole_number("total_timesteps", given.total_timesteps)
        config = extend(script, config, steps, is_finished=record.finished is not None)
        record.finished = None
    record.settings["total_timesteps"] = config.total_timesteps
    record.steps_total = total_steps(config, options.num_seeds)
    if record.finished is not None and (run_dir / "agent.safetensors").exists():
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    return Request(script, config, options, run_dir, record)


def whole_number(name: str, value: float) -> int:
    """Raises ValueError if `value` is not a whole number."""
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{name} = {value}: must be a whole number")
    return int(value)


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
    """The compiled program of an update, without references to lines of the script."""
    init, update = script.make_learner(config)
    lowered = jax.jit(update).lower(jax.eval_shape(init, jax.random.key(0)))
    text = lowered.compile().as_text() or ""
    first = re.search(r"(?m)^(%|ENTRY)", text)
    program = text[first.start() :] if first else text
    return re.sub(r", metadata=\{.*?\}", "", program)


# --- training ---


def prepare(request: Request, until_the_end: contextlib.ExitStack) -> compilation.Program:
    """Lock a new run, compile the program of a slice, begin the run and print its memory.

    Raises ValueError.
    """
    script = request.script
    config = request.config
    options = request.options
    record = request.record
    hosts.only_first(tracking.check_login, options.track)
    size = record.slice  # a resumed run keeps its slices, and therefore its numbers
    if not size:
        until_the_end.enter_context(holding(request.run_dir, is_new=True))
    program, description = compilation.compile_slices(
        partial(compilation.compile_slice, script, config, [], options=options),
        total=options.num_seeds,
        size=size,
        memory_gib=options.memory,
        clock=record.seconds,
    )
    if size:
        hosts.only_first(write_record, request.run_dir, record)
    else:
        record.slice = program.size
        env_names = [env_name_of(config)]
        hosts.only_first(begin_run, request.run_dir, config, record, script, env_names)
    if hosts.is_first():
        updates = f"{config.num_updates} updates of {steps_of(config)} steps"
        print(f"{config.env_name}: {updates}; {plural(options.num_seeds, 'seed')} in {description}")
    return program


@dataclasses.dataclass(kw_only=True)
class Seeds(Job):
    """Seeds of a run that train in one program."""

    request: Request
    name: str  # of the slice; empty if it has all seeds
    seeds: range
    numbers: Any  # of the agents among all seeds, on their devices: [size]
    progress: Any
    tracker: Any = None

    @property
    def config(self):
        return self.request.config

    @property
    def steps(self) -> int:
        """Environment steps of all seeds in an update."""
        return len(self.seeds) * steps_of(self.config)

    def open(self, done):
        if done and hosts.is_first():
            which = f"seeds {self.seeds.start} to {self.seeds.stop - 1}"
            self.progress.write(f"{which}: {done} of {self.config.num_updates} updates are done")
        count_restored(self.progress, done * self.steps)
        self.tracker = tracking.open_tracker(
            self.request.options.track,
            self.request.run_dir,
            self.request.record,
            self.name,
            timesteps_until(self.config, done),
        )

    def on_begin(self):
        self.progress.unpause()

    def on_chunk(self, first, last, metrics, returns):
        number = len(self.seeds)
        metrics = {name: values[:number] for name, values in metrics.items()}
        if returns is not None:
            returns = returns[:number]
        values = tracking.curves(metrics, self.seeds, returns, self.request.options.track_seeds)
        self.tracker.log(timesteps_until(self.config, last), values)
        if "episodic_return/mean" in values:
            note = f"return {values['episodic_return/mean']:.4g}"
            self.progress.set_postfix_str(note, refresh=False)
        updates_done = self.seeds.start * self.config.num_updates + last * number
        self.request.record.steps_done = updates_done * steps_of(self.config)
        self.progress.update((last - first) * self.steps)
        warn_of_days(self.progress)

    def evaluate(self, program, carry):
        return program.evaluate(carry["runner_state"].agent, self.numbers)

    def before_save(self):
        self.tracker.flush()

    def after_save(self):
        write_record(self.request.run_dir, self.request.record)

    def close(self):
        self.tracker.close()

    def finish(self, program, carry):
        """A dict of NumPy arrays [seeds, ...] on every process, see `train`, and the runner state.

        The agents are evaluated.
        """
        runner_state = carry["runner_state"]
        with self.clock.measuring("evaluate"):
            part: dict[str, Any] = {
                "metrics": hosts.fetch(carry["metrics"]),
                "agent": hosts.fetch(runner_state.agent),
                "running": hosts.fetch(jax.jit(loop.running_episodes)(runner_state)),
            }
            if program.evaluate is not None:
                # the last checkpoint is written, and an evaluation may take long
                go_on = f"onejit resume {self.request.run_dir} continues"
                number = hosts.latest(self.caught)
                if number:
                    raise Stopped(number)
                with ending_at_once(f"{TOOL}: stopped in the evaluation; {go_on}"):
                    part["evaluation"] = np.asarray(self.evaluate(program, carry))
            if "evaluation" in carry:
                part["during"] = hosts.fetch(carry["evaluation"])
        return jax.tree.map(lambda leaf: leaf[: len(self.seeds)], part), runner_state


def seeds_from(request: Request, program, first: int, progress, caught) -> Seeds:
    """The slice from the seed `first` on."""
    options = request.options
    seeds = range(first, min(first + program.size, options.num_seeds))
    # the last seed fills up a slice
    numbers = np.minimum(np.arange(first, first + program.size), options.num_seeds - 1)
    name = "" if program.size >= options.num_seeds else f"{first:05d}-{seeds.stop:05d}"
    return Seeds(
        folder=request.run_dir / "checkpoints" / name,
        key_data=loop.seed_keys(options)[numbers],
        checkpoint_interval=options.checkpoint_interval,
        save_last=True,
        eval_interval=options.eval_interval,
        caught=caught,
        not_finite=request.record.not_finite_at_start,
        clock=request.record.seconds,
        request=request,
        name=name,
        seeds=seeds,
        numbers=jax.device_put(numbers.astype(np.int32), program.sharding),
        progress=progress,
    )


def train(request: Request, program: compilation.Program) -> tuple[dict, Any]:
    """Train and evaluate all slices, and record the time.

    Returns a dict of NumPy arrays, on every process: `metrics` {name: [num_seeds, num_updates]},
    `agent` with leaves [num_seeds, ...] and, if requested, `evaluation` [num_seeds, eval_episodes]
    and the evaluations `during` training. Also returns the runner state of all agents on their
    devices, or None unless one slice in one process holds them.
    """
    num_seeds = request.options.num_seeds
    record = request.record
    bar = progress_bar(record.steps_total, disable=not hosts.is_first())
    parts = []
    go_on = f"{TOOL}: stopped at once; onejit resume {request.run_dir} continues"
    with bar as progress, catching_signals(go_on) as caught:
        for first in range(0, num_seeds, program.size):
            runner_state = None  # free the memory of the previous slice
            job = seeds_from(request, program, first, progress, caught)
            part, runner_state = loop.run(program, job)
            parts.append(part)
    seconds = record.seconds.train
    if hosts.is_first() and seconds:
        record.steps_per_second = record.steps_done / seconds
        speed = f"{record.steps_per_second:,.0f} steps/s over all seeds"
        print(f"trained in {seconds:.1f} s, {speed}")
    whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    if len(parts) > 1 or jax.process_count() > 1:
        return whole, None
    if program.size > num_seeds:
        runner_state = jax.tree.map(lambda leaf: leaf[:num_seeds], runner_state)
    return whole, runner_state


# --- results ---


def finish(request: Request, trained: dict, runner_state) -> bool:
    """Write the results and the record, and print them.

    Returns whether a seed is left that has not diverged. Raises OSError.
    """
    metrics = trained["metrics"]
    num_updates = request.config.num_updates
    trained["final_return"] = statistics.final_return(metrics, num_updates, trained["running"])
    lines = finish_run(
        request.run_dir,
        request.record,
        script=request.script,
        config=request.config,
        seed=request.options.seed,
        eval_interval=request.options.eval_interval,
        trained=trained,
        runner_state=runner_state,
    )
    print("\n".join([*lines, f"results in {request.run_dir}"]))
    return not statistics.diverged(trained["agent"], request.record.not_finite_at_start).all()


# --- main ---


def main(words) -> Path:
    """Train as the command line says. Returns the run directory."""
    words = [str(word) for word in words]
    return run(TOOL, lambda until_the_end: read_request(words))


def resume(run_dir: Path, given: ResumeOptions) -> Path:
    """Continue a run of which the command line says no more than `given`. Returns `run_dir`."""
    run("onejit resume", partial(read_resumed, given, run_dir))
    return run_dir


def run(tool: str, read) -> Path | None:
    """Train what `read(until_the_end)` returns. Returns the run directory, None if it is complete.

    `read` may lock the run until the end, which `until_the_end` is.
    """
    with (
        stopping(tool, "nothing was started"),
        errors_in_one_line(tool),
        failures_in_one_line(tool),
        contextlib.ExitStack() as until_the_end,
    ):
        request = read(until_the_end)
        if request is None:
            return None
        run_dir = request.run_dir
        program = prepare(request, until_the_end)
        # keeps the lock of the run beyond this block, until the results are written
        until_the_end = until_the_end.pop_all()
    with (
        until_the_end,
        errors_in_one_line(tool, 1, (OSError,), about=f"run_dir = {run_dir}: "),
        failures_in_one_line(tool),
    ):
        with stopping(tool, f"onejit resume {run_dir} continues"):
            trained, runner_state = train(request, program)
        is_any_left = hosts.only_first(finish, request, trained, runner_state)
        is_broken = statistics.diverged(trained["agent"], request.record.not_finite_at_start).any()
        is_broken |= bool(statistics.broken_metrics(trained["metrics"]))
        if request.options.find_nan and is_broken:
            size = request.record.slice
            with stopping(tool, f"results are in {run_dir}"), errors_in_one_line(tool):
                find_nan.search(request.script, request.config, request.options, run_dir, size)
    if not is_any_left:
        exit_as_diverged(tool, run_dir)
    return run_dir
