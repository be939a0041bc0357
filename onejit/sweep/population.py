"""Population-based training: `--pbt`, and `--replay` of a schedule that it has found.

Runs are agents. With `--pbt`, population p of size N has the runs p N to (p + 1) N - 1. A slice
holds whole populations, because agents of different slices cannot exchange.
"""

import dataclasses
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from flax.traverse_util import flatten_dict
from safetensors.numpy import save as as_safetensors

from onejit import (
    command_line,
    compilation,
    evaluation,
    hosts,
    local_modules,
    run_directory,
    slices,
    statistics,
)
from onejit.checkpoints import open_checkpoints
from onejit.devices import smallest_slice
from onejit.files import write
from onejit.memory import program_bytes
from onejit.progress import note_of_returns
from onejit.run_directory import steps_of, timesteps_until, write_record
from onejit.signals import Stopped
from onejit.sweep.exchange import (
    KEY,
    OF_REPLAY,
    Exchange,
    add_exchange,
    exchange_agents,
    first_population,
    follow_schedule,
)
from onejit.sweep.execution import count
from onejit.sweep.request import Request, begin_record, float_names, make_request, required
from onejit.sweep.slice_files import finished_slices, runs_of, slice_name
from onejit.sweep.values import read_distribution
from onejit.text import plural
from onejit.train import new_run_dir

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
    if "replay" in request.record:
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


def plan(request: Request) -> int:
    """Environment steps of all agents. Raises ValueError if the exchanges are not possible."""
    check_interval(request)
    check_replay_buffer(request)
    return run_directory.total_steps(request.config, number_of_runs(request))


def describe(request: Request) -> str:
    """The populations, or the replay, in one line."""
    options = request.options
    devices = plural(len(jax.devices()), "device")
    if "replay" in request.record:
        return f"replay of {request.record['replay']['of']}: {options.num_seeds} seeds on {devices}"
    populations = plural(options.num_seeds, "population")
    interval = required(options.exploit_interval)
    timesteps = interval * steps_of(request.config)
    number = request.config.num_updates // interval - 1
    return (
        f"{populations} of {options.samples} agents on {devices}; {plural(number, 'exchange')}, "
        f"one every {plural(interval, 'update')} ({timesteps:,} timesteps)"
    )


def read_replay(words: list[str], command: list[str]) -> Request:
    """The request of `--replay RUN_DIR`. Raises ValueError."""
    if not words or words[0].startswith("-"):
        raise ValueError("replay: needs RUN_DIR, a sweep with --pbt that has finished")
    sweep_dir = Path(words[0])
    given = command_line.parse(ReplayOptions, words[1:], prog="onejit sweep --replay")
    command_line.check_options(given)
    record = run_directory.read_record(sweep_dir)
    if "schedule" not in record:
        raise ValueError(f"replay: {sweep_dir} is no sweep with --pbt that has finished")
    script = run_directory.script_of(sweep_dir, record, given.force, given.trust)
    request = make_request(script, record["words"], description="")
    env_name = run_directory.env_name_of(request.config)
    local_modules.check_environment(sweep_dir, record, env_name, given.trust)
    seed = request.options.seed + 1 if given.seed is None else given.seed
    if seed == request.options.seed:
        raise ValueError(f"seed = {seed}: is the sweep's; a replay needs another one")
    replayed = {
        "num_seeds": given.num_seeds,
        "seed": seed,
        "checkpoint_interval": given.checkpoint_interval,
    }
    request.record["replay"] = {"of": str(sweep_dir), "schedule": record["schedule"]}
    request.record["replay_options"] = replayed  # for --resume
    options = dataclasses.replace(
        request.options, run_dir=given.run_dir, memory=given.memory, **replayed
    )
    run_dir = given.run_dir or new_run_dir(script, request.config, prefix="replay-")
    return begin_record(request._replace(options=options, run_dir=run_dir), command)


# --- programs ---


def compile_populations(request: Request, progress) -> compilation.Program:
    """The program of a slice. A resumed sweep keeps its size. Raises ValueError."""
    config = request.config
    names = float_names(request)
    sizes = request.record["slices"]
    exchange = exchange_of(request)
    total = number_of_runs(request)
    if "replay" in request.record:
        step = smallest_slice(total)
        schedule = request.record["replay"]["schedule"]
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
        seconds=request.record["seconds"],
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

    evaluate = jax.shard_map(
        greedy_returns,
        mesh=program.sharding.mesh,
        in_specs=program.sharding.spec,
        out_specs=program.sharding.spec,
        check_vma=False,
    )
    evaluate = jax.jit(evaluate, out_shardings=program.replicated)
    agents = program.abstract["runner_state"].agent
    evaluate = evaluate.lower(agents, program.abstract["population"]["key"]).compile()
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract)]
    held = sum(sizes) // program.num_devices
    needed = max(program.bytes, program_bytes(evaluate, held))
    return program._replace(evaluate=evaluate, bytes=needed)


# --- training ---


def first_floats(request: Request, runs: np.ndarray) -> dict:
    """The floats of each run at the start: {field: [runs]}."""
    floats = {}
    for name in float_names(request):
        if "replay" in request.record:
            first_value = request.record["replay"]["schedule"][name][0]
            floats[name] = np.full(len(runs), first_value)
        else:
            floats[name] = np.array([request.trials[run][name] for run in runs])
    return floats


def runs_of_slice(request: Request, first: int, number: int) -> np.ndarray:
    """The runs of a slice. The last population, or the last seed, fills up the slice."""
    runs = np.arange(first, first + number)
    total = number_of_runs(request)
    if "replay" in request.record:
        return np.minimum(runs, total - 1)
    size = required(request.options.samples)
    return np.where(runs < total, runs, total - size + runs % size)


def train(request: Request, progress, caught) -> None:
    """Train all slices. Raises ValueError, OSError, Stopped."""
    total = number_of_runs(request)
    sizes = request.record["slices"]
    done = hosts.only_first(first_runs_done, request.run_dir)
    program = None
    if not sizes or set(range(0, total, sizes[0])) - set(done):
        program = compile_populations(request, progress)
    for first in range(0, total, sizes[0]):
        last = min(first + sizes[0], total)
        if first in done:
            steps = run_directory.total_steps(request.config, last - first)
            count(request, progress, steps, restored=True)
            continue
        stop = hosts.latest(caught)
        if stop:
            raise Stopped(stop)
        train_slice(request, program, first, last, progress, caught)


def first_runs_done(run_dir: Path) -> list[int]:
    """The first run of each slice that an earlier session has trained."""
    return [runs_of(file)[0] for file in finished_slices(run_dir, 0)]


def train_slice(request: Request, program, first: int, last: int, progress, caught) -> None:
    """Train and evaluate the runs [first, last), and write their files."""
    config = request.config
    options = request.options
    runs = runs_of_slice(request, first, program.size)
    options_of_all_runs = dataclasses.replace(options, num_seeds=number_of_runs(request))
    keys = slices.seed_keys(options_of_all_runs)[runs]
    steps = (last - first) * steps_of(config)  # of an update
    number_of_exchanges = config.num_updates // program.exchange_interval - 1
    name = slice_name(0, first, last)

    def watch(first_update, last_update, metrics, _):
        returns = statistics.mean_return(metrics)[: last - first]
        notes = [plural(last - first, "agent")]
        exchanges = min(last_update // program.exchange_interval, number_of_exchanges)
        if "replay" not in request.record:
            notes.append(f"exchange {exchanges} of {number_of_exchanges}")
        notes.append(note_of_returns(progress, returns))
        progress.set_postfix_str(", ".join(filter(None, notes)), refresh=False)
        count(request, progress, (last_update - first_update) * steps)

    with open_checkpoints(request.run_dir / "unfinished" / name, keep=2) as manager:
        done = manager.latest_step() or 0
        if done:
            count(request, progress, done * steps, restored=True)
            if hosts.is_first():
                updates = f"{done} of {config.num_updates} updates of the next slice"
                progress.write(f"resume: {updates} are done", file=sys.stdout)
        carry = slices.train_slice(
            program,
            first_floats(request, runs),
            keys,
            manager,
            watch,
            interval=options.checkpoint_interval,
            begin=progress.unpause,
            before_save=partial(write_record, request.run_dir, request.record),
            caught=caught,
            seconds=request.record["seconds"],
        )
    begun = time.perf_counter()
    agents = carry["runner_state"].agent
    returns = np.asarray(program.evaluate(agents, carry["population"]["key"]))
    request.record["seconds"]["evaluate"] += time.perf_counter() - begun
    arrays = hosts.fetch((carry["metrics"], carry["population"], agents))
    metrics, population, agent = jax.tree.map(lambda leaf: leaf[: last - first], arrays)
    hosts.only_first(
        finish_slice, request, name, metrics, population, agent, returns[: last - first]
    )


def finish_slice(request: Request, name: str, metrics, population, agent, returns) -> None:
    """Write the files of a slice and delete its checkpoints. Raises OSError."""
    folder = request.run_dir / "slices"
    arrays = dict(metrics)
    arrays[EVALUATION] = returns
    for key, leaf in flatten_dict(population, sep=".").items():
        arrays[OF_POPULATION + key] = leaf
    flat = {}
    for key, leaf in flatten_dict(agent, sep=".").items():
        flat[key] = np.ascontiguousarray(leaf)
    write(folder / f"{name}.safetensors", lambda file: file.write(as_safetensors(flat)))
    write(folder / f"{name}.npz", partial(np.savez, **arrays))
    shutil.rmtree(request.run_dir / "unfinished" / name)
    write_record(request.run_dir, request.record)
