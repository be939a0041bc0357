"""Population-based training: `--pbt`, and `--replay` of a schedule that it has found.

Runs are agents. With `--pbt`, population p of size N has the runs p N to (p + 1) N - 1. A slice
holds whole populations, because agents of different slices cannot exchange.
"""

import dataclasses
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from flax.traverse_util import flatten_dict

from onejit.base.files import write
from onejit.base.signals import Stopped
from onejit.base.text import plural
from onejit.engine import compilation, evaluation, hosts, loop
from onejit.engine.devices import smallest_slice
from onejit.run.agents import as_bytes
from onejit.run.record import read_record, write_record
from onejit.script import command_line
from onejit.script.steps import steps_of, timesteps_until, total_steps
from onejit.sweep import jobs
from onejit.sweep.exchange import (
    KEY,
    OF_REPLAY,
    Exchange,
    add_exchange,
    exchange_agents,
    first_population,
    follow_schedule,
)
from onejit.sweep.options import required
from onejit.sweep.request import Request, float_names, new_request, request_of
from onejit.sweep.slice_files import finished_slices, runs_of, slice_name
from onejit.sweep.strategy import Strategy
from onejit.sweep.values import read_distribution

EPISODES = 16  # greedy episodes of each agent at the end
EVALUATION_KEY = KEY + 1  # what an agent's key of these episodes is folded from
EVALUATION = "run.evaluation"  # array [runs, EPISODES] in the file of a slice
OF_POPULATION = "population."  # prefix of other arrays that are not metrics


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Options that can be given with --replay RUN_DIR."""

    num_seeds: int = 16  # number of agents
    # seed of the key that the agents' keys are split from; the sweep's seed + 1 by default
    seed: int | None = None
    # new directory for the results; runs/SCRIPT/replay-ENVIRONMENT-TIME-NUMBER by default
    run_dir: Path | None = None
    # seconds between checkpoints of the current slice; 0 for none
    checkpoint_interval: float = 60.0
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default
    # use the sweep's copies of the script and of your modules although they were edited
    force: tyro.conf.FlagCreatePairsOff[bool] = False
    # execute code outside of the run directory that the sweep names
    trust: tyro.conf.FlagCreatePairsOff[bool] = False


# --- what to train ---


def exchange_of(request: Request) -> Exchange:
    options = request.options
    interval = required(options.exploit_interval)
    distributions = {}
    for name, words in request.swept.items():
        distributions[name] = read_distribution(request.script, name, words)
    return Exchange(
        size=required(options.samples),
        interval=interval,
        num_stretches=request.config.num_updates // interval,
        distributions=distributions,
        keeps_replay=options.keep_replay,
    )


def number_of_runs(request: Request) -> int:
    """Agents of all populations, or of a replay."""
    if request.record.is_replay:
        return request.options.num_seeds
    return request.options.num_seeds * required(request.options.samples)


def check_interval(request: Request) -> None:
    """Raise ValueError unless exchanges come at equal distances."""
    config = request.config
    interval = required(request.options.exploit_interval)
    most = config.num_updates
    if not 1 <= interval < most:
        raise ValueError(
            f"exploit_interval = {interval}: must be at least 1 and below the {most} updates"
        )
    if most % interval:
        shorter = timesteps_until(config, most - most % interval)
        raise ValueError(
            f"exploit_interval = {interval}: must divide the {most} updates; "
            f"--total-timesteps {shorter} has {most - most % interval}"
        )


def check_replay_buffer(request: Request) -> None:
    """Raise ValueError if `--keep-replay` has nothing to keep."""
    if not request.options.keep_replay:
        return
    init, _ = request.script.make_learner(request.config)
    state = jax.eval_shape(init, jax.random.key(0))
    if not hasattr(state, OF_REPLAY[0]):
        name = Path(request.script.__file__).name
        raise ValueError(f"keep_replay: {name} has no replay; it goes with dqn, sac and others")


class Population(Strategy):
    """Populations, or a replay: what is exchanged is decided in the compiled program."""

    def plan(self):
        check_interval(self.request)
        check_replay_buffer(self.request)
        return total_steps(self.request.config, number_of_runs(self.request))

    def describe(self, devices):
        options = self.request.options
        record = self.request.record
        if record.is_replay:
            seeds = f"{options.num_seeds} seeds on {devices}"
            return [f"replay of {record.replay['of']}: {seeds}"]
        interval = required(options.exploit_interval)
        populations = plural(options.num_seeds, "population")
        timesteps = interval * steps_of(self.request.config)
        number = self.request.config.num_updates // interval - 1
        return [
            f"{populations} of {options.samples} agents on {devices}; "
            f"{plural(number, 'exchange')}, one every {plural(interval, 'update')} "
            f"({timesteps:,} timesteps)"
        ]


def read_replay(words: list[str], command: list[str]) -> Request:
    """The request of `--replay RUN_DIR`. Raises ValueError."""
    if not words or words[0].startswith("-"):
        raise ValueError("replay: needs RUN_DIR, a sweep with --pbt that has finished")
    sweep_dir = Path(words[0])
    given = command_line.parse(ReplayOptions, words[1:], prog="onejit sweep --replay")
    command_line.check_options(given)
    record = read_record(sweep_dir)
    if not record.schedule:
        raise ValueError(f"replay: {sweep_dir} is no sweep with --pbt that has finished")
    request = request_of(sweep_dir, record, given)
    seed = request.options.seed + 1 if given.seed is None else given.seed
    if seed == request.options.seed:
        raise ValueError(f"seed = {seed}: is the sweep's; a replay needs another one")
    options = dataclasses.replace(
        request.options,
        num_seeds=given.num_seeds,
        seed=seed,
        run_dir=given.run_dir,
        checkpoint_interval=given.checkpoint_interval,
        memory=given.memory,
    )
    replay = {"of": str(sweep_dir), "schedule": record.schedule}
    return new_request(request.script, request.config, options, request.swept, command, replay)


# --- programs ---


def compile_populations(request: Request, progress) -> compilation.Program:
    """The program of a slice. A resumed sweep keeps its size. Raises ValueError."""
    config = request.config
    names = float_names(request)
    sizes = request.record.slices
    exchange = exchange_of(request)
    total = number_of_runs(request)
    if request.record.is_replay:
        step = smallest_slice(total)
        schedule = request.record.replay["schedule"]
        first = remember
        change = partial(follow_schedule, schedule, exchange.interval)
    else:
        step = exchange.size
        first = partial(first_population, exchange)
        change = partial(exchange_agents, exchange)

    def compile_size(size):
        program = compilation.compile_slice(request.script, config, names, size)
        program = add_exchange(program, names, exchange.interval, first, change)
        return add_evaluation(request, program)

    program, description = compilation.compile_slices(
        compile_size,
        total=total,
        step=step,
        size=sizes[0] if sizes else None,
        memory_gib=request.options.memory,
        clock=request.record.seconds,
    )
    if not sizes:
        sizes.append(program.size)
    hosts.only_first(write_record, request.run_dir, request.record)
    if hosts.is_first():
        runs = f"{plural(total, 'agent')}, {config.num_updates} updates"
        progress.write(f"{runs}, in {description}", file=sys.stdout)
    return program


def remember(floats, key_data):
    """What the carry of a replay remembers."""
    return {"floats": floats, "key": key_data}


def add_evaluation(request: Request, program: compilation.Program) -> compilation.Program:
    """The program with `evaluate(agents, key_data) -> returns` [size, EPISODES].

    The episodes are greedy. Each agent plays episodes of its own, by which nothing was chosen.
    """
    play = evaluation.make_player(request.script, request.config)

    def keys_of(key_data):
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), EVALUATION_KEY)
        return jax.random.split(key, EPISODES)

    def greedy_returns(agents, key_data):
        returns, _ = play(agents, jax.vmap(keys_of)(key_data))
        return returns

    keys = program.abstract["population"]["key"]
    return compilation.with_evaluation(program, greedy_returns, keys)


# --- training ---


def first_floats(request: Request, runs: np.ndarray) -> dict:
    """The floats of each run at the start: {field: [runs]}."""
    floats = {}
    for name in float_names(request):
        if request.record.is_replay:
            first_value = request.record.replay["schedule"][name][0]
            floats[name] = np.full(len(runs), first_value)
        else:
            floats[name] = np.array([request.trials[run][name] for run in runs])
    return floats


def runs_of_slice(request: Request, first: int, number: int) -> np.ndarray:
    """The runs of a slice. The last population, or the last seed, fills up the slice."""
    runs = np.arange(first, first + number)
    total = number_of_runs(request)
    if request.record.is_replay:
        return np.minimum(runs, total - 1)
    size = required(request.options.samples)
    return np.where(runs < total, runs, total - size + runs % size)


def train(request: Request, _, progress, caught) -> None:
    """Train all slices. Raises ValueError, OSError, Stopped."""
    total = number_of_runs(request)
    sizes = request.record.slices
    done = hosts.only_first(first_runs_done, request.run_dir)
    program = None
    if not sizes or set(range(0, total, sizes[0])) - set(done):
        program = compile_populations(request, progress)
    for first in range(0, total, sizes[0]):
        last = min(first + sizes[0], total)
        if first in done:
            steps = total_steps(request.config, last - first)
            jobs.count(request, progress, steps, restored=True)
            continue
        stop = hosts.latest(caught)
        if stop:
            raise Stopped(stop)
        loop.run(program, agents_of_slice(request, program, first, last, progress, caught))


def first_runs_done(run_dir: Path) -> list[int]:
    """The first run of each slice that an earlier session has trained."""
    return [runs_of(file)[0] for file in finished_slices(run_dir, 0)]


@dataclasses.dataclass(kw_only=True)
class Agents(jobs.Slice):
    """Whole populations, or seeds of a replay."""

    exchange_interval: int

    def notes(self, last_update):
        notes = [plural(self.last - self.first, "agent")]
        number = self.config.num_updates // self.exchange_interval - 1
        exchanges = min(last_update // self.exchange_interval, number)
        if not self.request.record.is_replay:
            notes.append(f"exchange {exchanges} of {number}")
        return notes

    def evaluate(self, program, carry):
        return program.evaluate(carry["runner_state"].agent, carry["population"]["key"])

    def finish(self, program, carry):
        """Evaluate the agents, and write the files of the slice."""
        with self.clock.measuring("evaluate"):
            returns = np.asarray(self.evaluate(program, carry))
        agents = carry["runner_state"].agent
        arrays = hosts.fetch((carry["metrics"], carry["population"], agents))
        number = self.last - self.first
        metrics, population, agent = jax.tree.map(lambda leaf: leaf[:number], arrays)
        hosts.only_first(
            finish_slice,
            self.request,
            self.folder.name,
            metrics,
            population,
            agent,
            returns[:number],
        )


def agents_of_slice(request: Request, program, first: int, last: int, progress, caught) -> Agents:
    """The job of the runs [first, last)."""
    runs = runs_of_slice(request, first, program.size)
    options_of_all_runs = dataclasses.replace(request.options, num_seeds=number_of_runs(request))
    return Agents(
        folder=request.run_dir / "unfinished" / slice_name(0, first, last),
        key_data=loop.seed_keys(options_of_all_runs)[runs],
        floats=first_floats(request, runs),
        checkpoint_interval=request.options.checkpoint_interval,
        caught=caught,
        clock=request.record.seconds,
        request=request,
        config=request.config,
        first=first,
        last=last,
        progress=progress,
        exchange_interval=program.exchange_interval,
    )


def finish_slice(request: Request, name: str, metrics, population, agent, returns) -> None:
    """Write the files of a slice and delete its checkpoints. Raises OSError."""
    folder = request.run_dir / "slices"
    arrays = dict(metrics)
    arrays[EVALUATION] = returns
    for key, leaf in flatten_dict(population, sep=".").items():
        arrays[OF_POPULATION + key] = leaf
    write(folder / f"{name}.safetensors", as_bytes(agent))
    write(folder / f"{name}.npz", partial(np.savez, **arrays))
    shutil.rmtree(request.run_dir / "unfinished" / name, ignore_errors=True)
    write_record(request.run_dir, request.record)
