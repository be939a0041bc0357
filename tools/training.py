"""Many runs of a script in slices that fit in memory, over the devices of one or of many processes.

A run is one agent: a random key and, in a sweep, its own values of some float fields. All runs of a slice train in one
program, with the axis of runs spread over all devices, and under `vmap` if a device has several of them. `sweep.py` and
`train.py` are built on this.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import results
import tyro
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

if "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):  # JAX has started
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        jax.config.update("jax_num_cpu_devices", cores)  # one per core, for runs to spread over, as in scripts

if not jax.config.jax_compilation_cache_dir:  # as there
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(f"~/.cache/onejit/jax-{platform.node()}"))
    jax.config.update("jax_compilation_cache_max_size", 2**31)

GIB = 2**30
HEARTBEAT = 20  # seconds without a sign of life after which the other processes give up

# --- the command line ---


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The machine, or many: then the same command on each."""

    memory: float | None = None  # GiB to use of each device; 90 % of what is free where not given
    coordinator: str | None = None  # HOST:PORT where process 0 listens
    num_processes: int | None = None  # in all
    process_id: int | None = None  # of this process, from 0
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False  # find these three out from SLURM and the like


def split_words(words: list[str]) -> tuple[str, Hosts, list[str]]:
    """`(first word, the options of hosts, all words but the first)`: what is needed before a script is imported.

    Raises ValueError.
    """
    if not words or (words[0].startswith("-") and words[0] != "--resume"):
        raise ValueError("SCRIPT: must come first, a script's name or path; or --resume RUN_DIR")
    hosts, _ = results.parse(Hosts, words[1:], return_unknown_args=True, add_help=False)
    if hosts.memory is not None and not 0 < hosts.memory < math.inf:
        raise ValueError(f"memory = {hosts.memory}: must be a number of GiB above 0")
    return words[0], hosts, words[1:]


def parse_with(script, words: list[str], options, description: str):
    """`(config, options, hosts)` from the flags of a script, of the dataclass `options` and of `Hosts`.

    Raises ValueError.
    """

    def command(
        config: tyro.conf.FlagConversionOff[script.Config] = script.Config(),  # noqa: B008
        options: options = options(),  # noqa: B008
        hosts: Hosts = Hosts(),
    ):
        return config, options, hosts

    words = results.read_flags(script, words)
    parsed = results.parse(command, words, description=description, config=(tyro.conf.OmitArgPrefixes,))
    for name, value in vars(parsed[0]).items():
        if type(value) is int and abs(value) >= 2**31 and name != "total_timesteps":
            raise ValueError(f"{name} = {value}: must fit in 32 bits")
    for name, value in vars(parsed[1]).items():
        least = 1 if name == "num_seeds" else 0
        if isinstance(value, (int, float)) and not least <= value < 2**31:
            raise ValueError(f"{name} = {value}: must be at least {least} and fit in 32 bits")
    return parsed


def read_resumed(words: list[str], tool: str, key: str):
    """`(run_dir, record, script)` of `--resume RUN_DIR`; `key` is in the record of a run of this tool.

    Raises ValueError.
    """
    if not words or words[0].startswith("-"):
        raise ValueError("resume: needs RUN_DIR, the run to go on with")
    results.parse(Hosts, words[1:])  # there is no other flag
    record = results.read_record(Path(words[0]))
    if key not in record:
        raise ValueError(f"resume: {words[0]} was not begun by tools/{tool}, and has no checkpoints")
    script = results.script_of(record)
    if is_first() and results.file_hash(script.__file__) != record["sha256"]:
        print(f"resume: note: {script.__file__} has changed since the run began", file=sys.stderr)
    return Path(words[0]), record, script


@contextlib.contextmanager
def errors_in_one_line(tool: str, code: int, *kinds, about: str = ""):
    """Print an exception of these kinds as one line, with what it is `about`, and exit with `code`."""
    try:
        yield
    except kinds as error:
        print(f"{tool}: error: {about}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(code)  # an ordinary exit would wait for processes that may be gone
        raise SystemExit(code) from None


@contextlib.contextmanager
def failures_in_one_line(tool: str):
    """One line and exit code 1, not a traceback, where memory runs out or another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError) as error:
        text = " ".join(str(error).split())[:300]
        if "RESOURCE_EXHAUSTED" not in text and jax.process_count() == 1:
            raise
        cause = "out of memory, try --memory" if "RESOURCE_EXHAUSTED" in text else "another process may be gone"
        print(f"{tool}: error: {cause}: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # an ordinary exit would wait for the other processes


# --- many processes ---


def connect(hosts) -> None:
    """Join the other processes, where there are any. Raises ValueError."""
    given = {name: getattr(hosts, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [name for name, value in given.items() if value is None]
    if hosts.distributed and len(missing) < 3:
        raise ValueError("distributed: finds out coordinator, num_processes and process_id itself; give none of them")
    if not hosts.distributed:
        if len(missing) == 3:
            return
        if missing:
            raise ValueError(f"{missing[0]}: is needed too, as coordinator, num_processes and process_id go together")
        if not 0 <= hosts.process_id < hosts.num_processes:
            raise ValueError(f"process_id = {hosts.process_id}: must be from 0 to num_processes - 1")
        host, colon, port = hosts.coordinator.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"coordinator = {hosts.coordinator}: must be HOST:PORT")
    try:
        jax.distributed.initialize(*given.values(), heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        name = "distributed" if hosts.distributed else f"coordinator = {hosts.coordinator}"
        raise ValueError(f"{name}: the processes cannot be joined ({error})") from error


def is_first() -> bool:
    return jax.process_index() == 0


def agree(value):
    """What process 0 has, on all of them: a value that JSON can hold."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.frombuffer(text if is_first() else bytes(size), np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(buffer)))


def only_first(function, *args):
    """Call it on process 0 alone, and give all what it returns, or raise the ValueError or OSError that it raised."""
    answer = {}
    if is_first():
        try:
            answer["value"] = function(*args)
        except (ValueError, OSError) as error:
            answer["error"] = [isinstance(error, OSError), str(error)]
    answer = agree(answer)
    if "error" in answer:
        raise (OSError if answer["error"][0] else ValueError)(answer["error"][1])
    return answer["value"]


# --- memory ---


def host_memory() -> int:
    """Bytes of memory that this process may still take."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # a container's limit, where there is one
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def free_memory(limit_gib: float | None) -> float:
    """Bytes that may be used on each device, the least of all processes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if limit_gib:
        free = limit_gib * GIB
    elif all("bytes_limit" in each for each in stats):
        free = 0.9 * min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    else:  # CPU devices share the host's memory
        free = 0.9 * host_memory() / jax.local_device_count()
    return GIB * float(np.min(multihost_utils.process_allgather(np.float32(free / GIB))))


def program_bytes(compiled, held: int = 0) -> int:
    """Bytes on each device while the program runs, as XLA has planned it, beside arguments `held` bytes of others."""
    stats = compiled.memory_analysis()
    arrays = max(held, stats.argument_size_in_bytes) + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arrays + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


# --- programs ---


class Program(NamedTuple):
    """What trains a slice of `size` runs."""

    size: int
    num_updates: int
    num_devices: int
    bytes: int  # on each device
    start: Any  # (floats, key_data) -> carry
    advance: Any  # (carry, floats, first, last) -> carry
    evaluate: Any  # agents -> returns [size, eval_episodes]; None where not asked for
    abstract: Any  # shapes, types and sharding of `carry`
    spread: Any  # sharding of arrays [size, ...]
    whole: Any  # sharding of arrays that every device has


def shardings(size: int):
    """`(devices, spread, whole)`: all devices, or in a single process as many as divide `size`. Raises ValueError."""
    devices = jax.devices()
    if jax.process_count() == 1:
        devices = devices[: max(n for n in range(1, len(devices) + 1) if size % n == 0)]
    elif size % len(devices):
        raise ValueError(f"{size} runs cannot be spread over the {len(devices)} devices of all processes")
    mesh = jax.sharding.Mesh(devices, ("run",))
    return devices, NamedSharding(mesh, PartitionSpec("run")), NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=4)
def make_learner(script, config):  # once for slices of all sizes: to make an environment may take seconds
    return tuple(map(jax.jit, script.make_learner(config)))  # each is traced once


def training_functions(script, config, names, vmap):
    """`start` and `advance` as in `main`, but that each run may have its own value of the float fields `names`.

    They carry `{"runner_state": [size, ...], "metrics": {name: [size, num_updates]}}`.
    """
    same = None if names else make_learner(script, config)  # not in what JAX traces: it would keep its tracers

    def learner(floats):
        return same or script.make_learner(dataclasses.replace(config, **floats))

    def init(floats, key):
        return learner(floats)[0](key)

    def update(floats, state):
        return learner(floats)[1](state)

    def start(floats, key_data):
        state = vmap(init)(floats, jax.random.wrap_key_data(key_data))
        shapes = jax.eval_shape(vmap(update), floats, state)[1]
        metrics = {name: jnp.zeros((len(key_data), config.num_updates), each.dtype) for name, each in shapes.items()}
        return {"runner_state": state, "metrics": metrics}

    def advance(carry, floats, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = vmap(update)(floats, carry["runner_state"])
            metrics = {name: each.at[:, i].set(new[name]) for name, each in carry["metrics"].items()}
            return {"runner_state": state, "metrics": metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    return start, advance


def over_one(function):
    """`jax.vmap(function)` for arrays whose first axis has length 1."""
    return lambda *trees: jax.lax.map(lambda args: function(*args), trees)


def compile_slice(script, config, names, size: int, options=None) -> Program:
    """Compile the training of `size` runs, the fields `names` traced. With `options` the evaluation too.

    `options` have `seed` and `eval_episodes`. Raises ValueError where the config cannot train.
    """
    devices, spread, whole = shardings(size)
    key_words = jax.random.key_data(jax.random.key(0)).shape
    floats = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=spread) for name in names}
    key_data = jax.ShapeDtypeStruct((size, *key_words), jnp.uint32, sharding=spread)
    over_runs = partial(jax.shard_map, mesh=spread.mesh, out_specs=spread.spec, check_vma=False)  # nothing crosses
    with naming_the_field(script, config):
        vmap = jax.vmap if size > len(devices) else over_one  # on CPUs faster than vmap, as in `main`
        start, advance = training_functions(script, config, names, vmap)
        start = jax.jit(over_runs(start, in_specs=spread.spec), out_shardings=spread)
        advance = over_runs(advance, in_specs=(spread.spec, spread.spec, whole.spec, whole.spec))
        advance = jax.jit(advance, donate_argnums=0, out_shardings=spread)
        abstract = start.eval_shape(floats, key_data)
        start = start.lower(floats, key_data)
        advance = advance.lower(abstract, floats, 0, 1)
    start, advance, evaluate = start.compile(), advance.compile(), None
    held = start.memory_analysis().output_size_in_bytes  # of all that training carries, on each device
    needed = max(program_bytes(start), program_bytes(advance))
    if options is not None and options.eval_episodes:
        evaluate = over_runs(greedy_returns(script, config, options), in_specs=spread.spec)
        evaluate = jax.jit(evaluate, out_shardings=whole).lower(abstract["runner_state"].agent).compile()
        needed = max(needed, program_bytes(evaluate, held))
    if devices[0].platform == "cpu":  # where a checkpoint's copy lies in the same memory
        needed += held
    return Program(size, config.num_updates, len(devices), needed, start, advance, evaluate, abstract, spread, whole)


@contextlib.contextmanager
def naming_the_field(script, config):
    """Where no program can be made for a config, raise a ValueError that names the field to blame.

    It is the one with whose default a program can be made. Where the default config fails as well the mistake is in
    the script, and its own exception is raised.
    """

    def works(config) -> bool:
        with contextlib.suppress(Exception):
            init, update = script.make_learner(config)
            jax.eval_shape(lambda key: update(init(key)), jax.random.key(0))
            return True
        return False

    try:
        yield
    except Exception as error:  # of the script, of an environment, of JAX for sizes that cannot be
        default, values = script.Config(), results.plain(config)
        if isinstance(error, ValueError) and str(error).startswith(tuple(values)):
            raise
        changed = [name for name in values if getattr(config, name) != getattr(default, name)]
        alone = [name for name in changed if works(dataclasses.replace(config, **{name: getattr(default, name)}))]
        if not alone and not works(default):
            raise
        named = ", ".join(f"{name} = {values[name]}" for name in alone[:1] or changed)
        raise ValueError(f"{named}: {error} ({type(error).__name__})") from error


def largest_slice(compile_size, total: int, step: int, memory: float) -> Program:
    """The program of the largest slices of `total` runs that fit in `memory` bytes, all of about the same size.

    `compile_size(size)` compiles a slice; sizes are multiples of `step`. Memory grows by the same amount with each
    run: the first guess is in proportion, each further one lies on the line through the last two. Raises ValueError.
    """
    size, tried = -(-total // step) * step, []
    while True:
        program = compile_size(size)
        if program.bytes <= memory:
            return program
        if size == step:
            least, free = program.bytes / GIB, memory / GIB
            raise ValueError(f"memory: {step} run(s) at once need {least:.3g} GiB on a device, {free:.3g} are free")
        tried.append((size, program.bytes))
        (size_a, bytes_a), (size_b, bytes_b) = tried[-2:] if len(tried) > 1 else [(0, 0), tried[0]]
        each = max(1.0, (bytes_a - bytes_b) / (size_a - size_b))
        fitting = max(step, min(size - step, int(size_b - (bytes_b - memory) / each)))
        slices = -(-total // fitting)
        size = max(step, min(size - step, -(-total // slices // step) * step))


# --- training ---


def seed_keys(options) -> np.ndarray:
    """The agents' random keys as `main` makes them, as their data: [num_seeds, words]."""
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(options.seed), options.num_seeds)))


def put(array: np.ndarray, sharding):
    """An array that every process has, spread over the devices of all."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def fetch(program: Program, tree) -> dict:
    """Arrays that are spread over all processes, as NumPy's, one after the other to save memory."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda leaf: np.asarray(jax.jit(lambda x: x, out_shardings=program.whole)(leaf)), tree)


def open_checkpoints(directory: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(Path(directory).absolute(), options=options)


def without_empty(tree):
    """None for arrays of no entries, as physics may have: Orbax writes none."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def save(manager, step: int, carry) -> None:
    """Write a checkpoint. Raises OSError where it cannot be written."""
    try:
        manager.save(step, args=ocp.args.StandardSave(without_empty(carry)))
    except Exception as error:  # Orbax raises many kinds
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process is gone
        text = " ".join(str(error).split())
        known = ("No space left on device", "Read-only file system", "File too large")
        kind = next((words for words in known if words in text), text[:300])
        raise OSError(f"the checkpoint of update {step} cannot be written: {kind}") from error


def restore(manager, step: int, abstract):
    """The `carry` of a checkpoint. Raises OSError where it cannot be read, or is not what the script carries."""
    try:
        carry = manager.restore(step, args=ocp.args.StandardRestore(without_empty(abstract)))
        return jax.tree.map(lambda leaf, read: read if leaf.size else jnp.zeros_like(leaf), abstract, carry)
    except Exception as error:  # Orbax raises many kinds
        name = f"{Path(manager.directory).name}/{step}"
        problem = "cannot be read, or is another version's; delete it to go on without it"
        raise OSError(f"resume: the checkpoint {name} {problem}") from error


def make_reader(program: Program):
    """`read(metrics, first, last) -> {name: [size, last - first]}` in NumPy, on all processes."""

    @partial(jax.jit, static_argnums=2, out_shardings=program.whole)
    def window(metrics, first, width):
        return {name: jax.lax.dynamic_slice_in_dim(each, first, width, axis=1) for name, each in metrics.items()}

    def read(metrics, first, last):
        width = min(program.num_updates, 1 << (last - first - 1).bit_length())  # few widths, few compilations
        first_read = min(first, program.num_updates - width)
        part = window(metrics, first_read, width)
        return {name: np.asarray(each)[:, first - first_read : last - first_read] for name, each in part.items()}

    return read


def train_slice(program: Program, floats, key_data, manager, interval: float, watch, save_last: bool):
    """Train a slice from its last checkpoint, or from the start, to the end. Returns its `carry`.

    `floats` {name: [size]} and `key_data` [size, words] are NumPy's. Between chunks of about a second, `watch(first,
    last, metrics)` gets the metrics of updates [first, last), on process 0 only; every `interval` seconds there is a
    checkpoint, with 0 none but the last. Process 0 decides on both, since the clocks of processes differ.
    """
    floats = {name: put(np.asarray(values, np.float32), program.spread) for name, values in floats.items()}
    done = agree(manager.latest_step() or 0)  # a shared disk may show files later to some
    carry = restore(manager, done, program.abstract) if done else program.start(floats, put(key_data, program.spread))
    read, chunk, saved_at = make_reader(program), 1, time.perf_counter()
    while done < program.num_updates:
        begun, last = time.perf_counter(), min(done + chunk, program.num_updates)
        carry = jax.block_until_ready(program.advance(carry, floats, done, last))
        metrics = read(carry["metrics"], done, last)
        if is_first():
            watch(done, last, metrics)
        done, now = last, time.perf_counter()
        longer = round(math.log2(min(8.0, 1.0 / (now - begun))))  # powers of two: see `make_reader`
        due = save_last if done == program.num_updates else 0 < interval <= now - saved_at
        chunk, due = agree([max(1, int(chunk * 2.0**longer)), due])
        if due:
            save(manager, done, carry)
            saved_at = time.perf_counter()
    return carry


# --- playing ---


class Episode(NamedTuple):
    """One greedy episode, up to the time limit: [limit, ...]."""

    env_state: Any  # before each step, without the statistics of LogWrapper
    reward: jax.Array
    valid: jax.Array  # whether the step is of the episode: False after its end


def make_player(script, config):
    """`play(agent, key) -> Episode`: one greedy episode of one agent, through the script's policy and environment."""
    env, env_params = script.make_env(config)
    start, act = script.make_policy(config)

    def play(agent, key):
        def step(carry, key):
            obs, env_state, memory, valid = carry
            action, memory = act(agent, memory, obs)
            obs, next_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
            carry = obs, next_state, memory, valid & ~(terminated | truncated)
            return carry, Episode(getattr(env_state, "env_state", env_state), reward, valid)

        reset_key, step_key = jax.random.split(key)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, int(env_params.max_steps_in_episode))
        return jax.lax.scan(step, (obs, env_state, start(), jnp.asarray(True)), keys)[1]

    return play


def evaluation_keys(seed: int, episodes: int):
    """The same episodes for all agents."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), 2**31), episodes)


def greedy_returns(script, config, options):
    """`evaluate(agents) -> returns` [num_seeds, eval_episodes], of agents [num_seeds, ...]."""
    play = make_player(script, config)

    def episodic_return(agent, key):
        episode = play(agent, key)
        return jnp.where(episode.valid, episode.reward, 0.0).sum()

    def evaluate(agents):
        keys = evaluation_keys(options.seed, options.eval_episodes)
        return jax.vmap(jax.vmap(episodic_return, (None, 0)), (0, None))(agents, keys)

    return evaluate
