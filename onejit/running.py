"""Many runs of a script in slices that fit in memory, over the devices of one or of many processes.

A run is one agent: a random key and, in a sweep, its own values of some float fields. All runs of a slice train in one
program. The axis of runs is spread over all devices, with a `vmap` if a device has several runs. `onejit train` and
`onejit sweep` are built on this module.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from onejit import command_line, playing, runs
from onejit.command_line import Hosts

if "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get(
    "XLA_FLAGS", ""
):
    with contextlib.suppress(RuntimeError):  # JAX has started
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        jax.config.update("jax_num_cpu_devices", cores)  # one per core, as in scripts

if not jax.config.jax_compilation_cache_dir:  # as in scripts
    jax.config.update(
        "jax_compilation_cache_dir", os.path.expanduser(f"~/.cache/onejit/jax-{platform.node()}")
    )
    jax.config.update("jax_compilation_cache_max_size", 2**31)

GIB = 2**30
EPISODE = (
    "obs",
    "env_state",
    "first",
    "hidden",
    "noise",
    "discounted_return",
    "tail",
)  # restart with episodes
HEARTBEAT = 20  # seconds without a sign of life from a process until the others give up

# --- processes ---


def connect(hosts) -> None:
    """Join the other processes, if there are any. Raises ValueError."""
    given = {name: getattr(hosts, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [name for name, value in given.items() if value is None]
    if hosts.distributed and len(missing) < 3:
        raise ValueError(
            "distributed: finds coordinator, num_processes and process_id itself; give none of them"
        )
    if not hosts.distributed:
        if len(missing) == 3:
            return
        if missing:
            raise ValueError(
                f"{missing[0]}: is missing; coordinator, num_processes and process_id go together"
            )
        if not 0 <= hosts.process_id < hosts.num_processes:
            raise ValueError(
                f"process_id = {hosts.process_id}: must be from 0 to num_processes - 1"
            )
        host, colon, port = hosts.coordinator.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"coordinator = {hosts.coordinator}: must be HOST:PORT")
    try:
        jax.distributed.initialize(*given.values(), heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        name = "distributed" if hosts.distributed else f"coordinator = {hosts.coordinator}"
        raise ValueError(f"{name}: the processes cannot be joined ({error})") from error


def read_resumed(
    words: list[str], tool: str, key: str, options, until_the_end: contextlib.ExitStack
):
    """Lock and read the run of `--resume RUN_DIR`. Records of this tool have `key`. Raises ValueError."""
    if not words or words[0].startswith("-"):
        raise ValueError("resume: needs RUN_DIR, the run to continue")

    def command(given: options = options(), hosts: Hosts = Hosts()):  # noqa: B008
        return given

    given = command_line.parse(command, words[1:], config=(tyro.conf.OmitArgPrefixes,))
    record = runs.read_record(Path(words[0]))
    if key not in record:
        raise ValueError(
            f"resume: {words[0]} was not started by onejit {tool}, and has no checkpoints"
        )
    until_the_end.enter_context(holding(Path(words[0])))
    record = runs.read_record(
        Path(words[0])
    )  # again: another process may have just finished the run
    now = runs.versions()
    changed = [
        f"{name} {old} -> {now.get(name)}"
        for name, old in record["versions"].items()
        if now.get(name) != old
    ]
    if changed and is_first():
        print(
            f"resume: note: versions have changed since the run began: {', '.join(changed)}",
            file=sys.stderr,
        )
    return Path(words[0]), record, given


@contextlib.contextmanager
def holding(run_dir: Path):
    """Hold the lock of a run directory, in process 0. Raises ValueError."""
    held = []
    only_first(lambda: held.append(runs.lock(run_dir)))
    try:
        yield
    finally:
        for each in held:
            each.release()


def is_first() -> bool:
    return jax.process_index() == 0


def agree(value):
    """The value that process 0 has, on all processes. JSON must be able to hold it."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.frombuffer(text if is_first() else bytes(size), np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(buffer)))


def only_first(function, *args):
    """Call a function on process 0 alone. All processes get its result, or its ValueError or OSError."""
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


def cgroup_memory(root=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")) -> float:
    """Bytes that the control groups of this process still allow, or infinity. The kernel's cache of files is free."""
    free, lines = math.inf, own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            top, prefix, names = (
                root / "memory",
                "total_",
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            )
        elif not controllers:
            top, prefix, names = root, "", ("memory.max", "memory.current")
        else:
            continue
        folder = top / path.strip("/")
        for each in [folder, *folder.parents][: len(Path(path).parts)]:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limit, used = (int((each / name).read_text()) for name in names)
                stat = dict(
                    line.split() for line in (each / "memory.stat").read_text().splitlines()
                )
                cached = sum(
                    int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
                )
                free = min(free, limit - used + cached)
    return free


def host_memory() -> float:
    """Bytes of memory that this process can still allocate."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(free, cgroup_memory())


def free_memory(limit_gib: float | None) -> float:
    """Bytes that may be used on each device, the minimum over all processes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if limit_gib:
        free = limit_gib * GIB
    elif all("bytes_limit" in each for each in stats):
        free = 0.9 * min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    else:  # CPU devices share the host's memory
        free = 0.9 * host_memory() / jax.local_device_count()
    return GIB * float(np.min(multihost_utils.process_allgather(np.float32(free / GIB))))


def program_bytes(compiled, held: int = 0) -> int:
    """Bytes on each device while the program runs, as XLA has planned it; `held` is the least size of its arguments."""
    stats = compiled.memory_analysis()
    arrays = (
        max(held, stats.argument_size_in_bytes)
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    return arrays + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


# --- programs ---


class Program(NamedTuple):
    """The compiled functions that train a slice of `size` runs."""

    size: int
    num_updates: int
    num_devices: int
    bytes: int  # on each device
    start: Any  # (floats, key_data) -> carry
    advance: Any  # (carry without its evaluation, floats, first, last) -> carry after updates [first, last)
    evaluate: Any  # agents -> returns [size, eval_episodes]; None without an evaluation
    remember: (
        Any  # (evaluation, agents, returns, index) -> evaluation; None without one during training
    )
    abstract: Any  # shapes, types and shardings of `carry`
    spread: Any  # sharding of arrays [size, ...]
    whole: Any  # sharding of arrays that every device has


def padding(runs: int) -> int:
    """The smallest size of a slice of `runs` runs that keeps all devices busy. Larger slices are multiples of it."""
    return jax.device_count() if jax.process_count() > 1 else min(runs, jax.device_count())


def shardings(size: int):
    """`(devices, spread, whole)`. A single process uses as many devices as divide `size`. Raises ValueError."""
    devices = jax.devices()
    if jax.process_count() == 1:
        devices = devices[: max(n for n in range(1, len(devices) + 1) if size % n == 0)]
    elif size % len(devices):
        raise ValueError(
            f"{size} runs cannot be spread over the {len(devices)} devices of all processes"
        )
    mesh = jax.sharding.Mesh(devices, ("run",))
    return devices, NamedSharding(mesh, PartitionSpec("run")), NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=4)
def make_learner(
    script, config
):  # once for slices of all sizes: making an environment may take seconds
    return tuple(map(jax.jit, script.make_learner(config)))  # each is traced once


def training_functions(script, config, names):
    """`start` and `advance` as in `main`, but each run may have its own values of the float fields `names`.

    They carry `{"runner_state": [size, ...], "metrics": {name: [size, num_updates]}}`.
    """
    same = (
        None if names else make_learner(script, config)
    )  # outside of what JAX traces, where it would keep tracers

    def learner(floats):
        return same or script.make_learner(dataclasses.replace(config, **floats))

    def update(floats, state):
        return learner(floats)[1](state)

    def start(floats, key_data):
        state = learner(floats)[0](jax.random.wrap_key_data(key_data))
        shapes = jax.eval_shape(update, floats, state)[1]
        metrics = {name: jnp.zeros(config.num_updates, each.dtype) for name, each in shapes.items()}
        return {"runner_state": state, "metrics": metrics}

    def advance(carry, floats, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = update(floats, carry["runner_state"])
            metrics = {name: each.at[i].set(new[name]) for name, each in carry["metrics"].items()}
            return {"runner_state": state, "metrics": metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    return start, advance


def over_one(function, _=0):
    """`jax.vmap(function)` for an axis of length 1, which the function's loops do not carry; numbers have none."""
    first = partial(jax.tree.map, lambda x: x[0] if jnp.ndim(x) else x)
    return lambda *trees: jax.tree.map(lambda x: x[None], function(*first(trees)))


def compile_slice(script, config, names, size: int, options=None) -> Program:
    """Compile the training of `size` runs, with the fields `names` traced. `options` adds the evaluation.

    `options` have `seed`, `eval_episodes` and `eval_interval`. Raises ValueError if the config cannot train.
    """
    devices, spread, whole = shardings(size)
    key_words = jax.random.key_data(jax.random.key(0)).shape
    floats = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=spread) for name in names}
    key_data = jax.ShapeDtypeStruct((size, *key_words), jnp.uint32, sharding=spread)
    over_runs = partial(
        jax.shard_map, mesh=spread.mesh, out_specs=spread.spec, check_vma=False
    )  # runs are independent
    with naming_the_field(script, config):
        vmap = (
            jax.vmap if size > len(devices) else over_one
        )  # faster than vmap on CPUs, as in `main`
        start, advance = training_functions(script, config, names)
        start = jax.jit(over_runs(vmap(start), in_specs=spread.spec), out_shardings=spread)
        advance = over_runs(
            vmap(advance, (0, 0, None, None)),
            in_specs=(spread.spec, spread.spec, whole.spec, whole.spec),
        )
        advance = jax.jit(advance, donate_argnums=0, out_shardings=spread)
        abstract = start.eval_shape(floats, key_data)
        start = start.lower(floats, key_data)
        advance = advance.lower(abstract, floats, 0, 1)
    start, advance, evaluate, remember = start.compile(), advance.compile(), None, None
    held = start.memory_analysis().output_size_in_bytes  # bytes of the carry on each device
    needed = max(program_bytes(start), program_bytes(advance))
    if options is not None and options.eval_episodes:
        agents = abstract["runner_state"].agent
        evaluate = over_runs(playing.greedy_returns(script, config, options), in_specs=spread.spec)
        evaluate = jax.jit(evaluate, out_shardings=whole).lower(agents).compile()
        if options.eval_interval:
            remember = jax.jit(remember_best, donate_argnums=0, out_shardings=spread)
            count = config.num_updates // options.eval_interval
            make = jax.jit(partial(no_evaluation, count=count), out_shardings=spread)
            start = partial(start_with_evaluation, start, make)
            abstract |= {"evaluation": make.eval_shape(agents)}
        needed = max(needed, program_bytes(evaluate, held))
    if devices[0].platform == "cpu":  # a checkpoint's copy is in the same memory
        needed += held
    functions = start, advance, evaluate, remember
    return Program(
        size, config.num_updates, len(devices), needed, *functions, abstract, spread, whole
    )


def start_with_evaluation(start, make, floats, key_data):
    """The carry of `start`, with the result of `make(agents)` added."""
    carry = start(floats, key_data)
    return carry | {"evaluation": make(carry["runner_state"].agent)}


def no_evaluation(agents, count: int) -> dict:
    """The memory of `count` evaluations before the first: mean returns [size, count], and each seed's best agent."""
    size = len(jax.tree.leaves(agents)[0])
    never = jnp.full((size,), -jnp.inf)
    best = {"return": never, "agent": jax.tree.map(jnp.copy, agents)}
    return {"returns": jnp.full((size, count), jnp.nan), "best": best}


def remember_best(evaluation: dict, agents, returns, index) -> dict:
    """Add the evaluation number `index`, in which `agents` [size, ...] reached `returns` [size, episodes]."""
    mean = returns.mean(axis=1)
    better = mean > evaluation["best"]["return"]

    def choose(new, old):
        return jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    best = jax.tree.map(choose, {"return": mean, "agent": agents}, evaluation["best"])
    return {"returns": evaluation["returns"].at[:, index].set(mean), "best": best}


@contextlib.contextmanager
def naming_the_field(script, config):
    """If no program can be made for a config, raise a ValueError that names the field to blame.

    A program can be made if this field has its default. If the default config fails as well, the mistake is in the
    script, and the script's own exception is raised.
    """

    def works(config) -> bool:
        with contextlib.suppress(Exception):
            init, update = script.make_learner(config)
            jax.eval_shape(lambda key: update(init(key)), jax.random.key(0))
            return True
        return False

    try:
        yield
    except (
        Exception
    ) as error:  # many kinds: of the script, of an environment, of JAX for impossible sizes
        import brax.envs
        import gymnax

        default, values = script.Config(), runs.plain(config)
        if isinstance(error, ValueError) and str(error).startswith(tuple(values)):
            near = command_line.nearest(
                config.env_name, [*gymnax.registered_envs, *brax.envs._envs]
            )
            if near and str(error).startswith("env_name = "):
                raise ValueError(f"{error}{near}") from error
            raise
        changed = [name for name in values if getattr(config, name) != getattr(default, name)]
        alone = [
            name
            for name in changed
            if works(dataclasses.replace(config, **{name: getattr(default, name)}))
        ]
        if not alone and not works(default):
            raise
        named = ", ".join(f"{name} = {values[name]}" for name in alone[:1] or changed)
        raise ValueError(f"{named}: {error} ({type(error).__name__})") from error


def largest_slice(compile_size, total: int, step: int, memory: float) -> Program:
    """The program of the largest slices of `total` runs that fit in `memory` bytes. Raises ValueError.

    Slices have about the same size, a multiple of `step`. `compile_size(size)` compiles a slice. Memory grows linearly
    with the number of runs: the first guess is in proportion, further guesses lie on the line through the last two.
    """
    size, tried = -(-total // step) * step, []
    while True:
        program = compile_size(size)
        if program.bytes <= memory:
            return program
        if size == step:
            least, free = program.bytes / GIB, memory / GIB
            raise ValueError(
                f"memory: {step} run(s) at once need {least:.3g} GiB on a device, {free:.3g} GiB are free"
            )
        tried.append((size, program.bytes))
        (size_a, bytes_a), (size_b, bytes_b) = tried[-2:] if len(tried) > 1 else [(0, 0), tried[0]]
        each = max(1.0, (bytes_a - bytes_b) / (size_a - size_b))
        fitting = max(step, min(size - step, int(size_b - (bytes_b - memory) / each)))
        slices = -(-total // fitting)
        size = max(step, min(size - step, -(-total // slices // step) * step))


def compile_slices(
    compile_size, total: int, size: int | None, memory_gib: float | None, seconds: dict
):
    """`(program, description)` for `total` runs in slices of `size`, by default the largest ones that fit in memory.

    Adds the time to `seconds` {"compile"}. Raises ValueError.
    """
    begun, memory = time.perf_counter(), free_memory(memory_gib)
    program = (
        compile_size(size) if size else largest_slice(compile_size, total, padding(total), memory)
    )
    took = time.perf_counter() - begun
    seconds["compile"] += took
    short = " (MORE THAN IS FREE)" if program.bytes > memory else ""
    return program, (
        f"{-(-total // program.size)} slice(s) of {program.size} on {program.num_devices} device(s), "
        f"{program.bytes / GIB:.3g} GiB of {memory / GIB:.3g} free on each{short}; compiled in {took:.1f} s"
    )


# --- training ---


def seed_keys(options) -> np.ndarray:
    """The data of the agents' random keys, the same keys as in `main`: [num_seeds, words]."""
    return np.asarray(
        jax.random.key_data(jax.random.split(jax.random.key(options.seed), options.num_seeds))
    )


def fetch(tree) -> dict:
    """Gather arrays from all processes into NumPy arrays."""
    return multihost_utils.process_allgather(tree, tiled=True)


def open_checkpoints(directory: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(Path(directory).absolute(), options=options, item_handlers=handler)


def without_empty(tree):
    """Replace empty arrays, which physics engines may have, by None: Orbax does not write them."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def save(manager, step: int, carry) -> None:
    """Write a checkpoint. Raises OSError."""
    try:
        manager.save(step, args=ocp.args.StandardSave(without_empty(carry)))
    except Exception as error:  # Orbax raises many kinds
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process is gone
        text = " ".join(str(error).split())
        known = ("No space left on device", "Read-only file system", "File too large")
        kind = next((words for words in known if words in text), text[:300])
        raise OSError(f"the checkpoint of update {step} cannot be written: {kind}") from error


def restore(manager, step: int, program: Program):
    """Read the `carry` of a checkpoint, and lengthen it for the updates of `program`. Raises OSError."""
    try:
        abstract, stored = dict(program.abstract), manager.item_metadata(step).tree
        abstract["metrics"] = of_stored_length(abstract["metrics"], stored["metrics"])
        if "evaluation" in abstract:
            returns = of_stored_length(
                abstract["evaluation"]["returns"], stored["evaluation"]["returns"]
            )
            abstract["evaluation"] = abstract["evaluation"] | {"returns": returns}
        carry = manager.restore(step, args=ocp.args.StandardRestore(without_empty(abstract)))
        carry = jax.tree.map(
            lambda leaf, read: read if leaf.size else jnp.zeros_like(leaf), abstract, carry
        )
        return jax.tree.map(lengthen, carry, program.abstract)
    except Exception as error:  # Orbax raises many kinds
        name, cause = f"{Path(manager.directory).name}/{step}", " ".join(str(error).split())[:300]
        raise OSError(f"resume: the checkpoint {name} cannot be restored: {cause}") from error


def of_stored_length(abstract, stored):
    """Shapes [size, updates] with the number of updates that a checkpoint holds."""
    return jax.tree.map(
        lambda leaf, found: leaf.update(shape=(leaf.shape[0], found.shape[1])), abstract, stored
    )


def holds(tree, kind: type) -> bool:
    """Whether a part of a tree is of this class."""
    return any(
        isinstance(each, kind)
        for each in jax.tree.leaves(tree, is_leaf=lambda each: isinstance(each, kind))
    )


def with_new_episodes(program: Program, runner_state, floats, key_data, done: int):
    """A restored runner state whose environments start new episodes, because no checkpoint holds their state."""
    if is_first():
        text = "checkpoints do not contain the state of environments outside of JAX; new episodes begin"
        print(f"resume: note: {text}", file=sys.stderr)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, done))(
        jax.random.wrap_key_data(jnp.asarray(key_data))
    )
    new = program.start(
        floats, jax.device_put(np.asarray(jax.random.key_data(keys)), program.spread)
    )["runner_state"]
    return runner_state._replace(
        **{name: getattr(new, name) for name in EPISODE if hasattr(new, name)}
    )


def lengthen(array, like):
    """Add columns of NaN or 0 to `array`, up to the shape of `like`."""
    if array.shape == like.shape:
        return array
    fill = jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else 0
    pad = partial(
        jnp.pad, pad_width=((0, 0), (0, like.shape[1] - array.shape[1])), constant_values=fill
    )
    return jax.jit(pad, out_shardings=like.sharding)(array)


def make_reader(program: Program):
    """`read(metrics, first, last) -> {name: [size, last - first]}`, NumPy arrays on all processes."""

    @partial(jax.jit, static_argnums=2, out_shardings=program.whole)
    def window(metrics, first, width):
        return {
            name: jax.lax.dynamic_slice_in_dim(each, first, width, axis=1)
            for name, each in metrics.items()
        }

    def read(metrics, first, last):
        width = min(
            program.num_updates, 1 << (last - first - 1).bit_length()
        )  # few widths, few compilations
        first_read = min(first, program.num_updates - width)
        part = window(metrics, first_read, width)
        return {
            name: np.asarray(each)[:, first - first_read : last - first_read]
            for name, each in part.items()
        }

    return read


class Lines:
    """Progress as lines of a log file, every 30 seconds and at the end, with the methods of tqdm that are used here."""

    def __init__(self, total: int, every: float = 30.0):
        self.total, self.every, self.note = total, every, ""
        self.n = self.initial = self.last_print_n = 0
        self.begun = self.updated = self.written = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.n:
            self.show()

    def unpause(self):
        """Leave the time since the last update out of the speed."""
        now = time.monotonic()
        self.begun, self.updated = self.begun + now - self.updated, now

    def set_postfix_str(self, note: str, refresh=False):
        self.note = note

    def update(self, steps: int):
        self.n, self.updated = self.n + steps, time.monotonic()
        if self.updated - self.written >= self.every:
            self.show()

    def show(self):
        self.written = time.monotonic()
        speed = (self.n - self.initial) / max(self.updated - self.begun, 1e-9)
        self.write(
            f"{self.n / self.total:.1%} of {self.total:,} steps, {speed:,.0f} steps/s {self.note}".rstrip()
        )

    @staticmethod
    def write(text: str, file=None):
        print(text, file=file or sys.stderr, flush=True)


def progress_bar(total: int, disable: bool):
    """A progress bar on a terminal, otherwise lines."""
    if disable or sys.stderr.isatty():
        return tqdm(total=total, unit="step", unit_scale=True, disable=disable)
    return Lines(total)


def count_restored(progress, steps: int) -> None:
    """Add steps of an earlier session to a progress bar or to Lines. The printed speed leaves them out."""
    if is_first():  # elsewhere the bar is disabled, and has none of these
        for name in ("n", "initial", "last_print_n"):
            setattr(progress, name, getattr(progress, name) + steps)


class Stopped(Exception):
    """A signal ended training; a checkpoint holds all updates so far."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextlib.contextmanager
def stopping(tool: str, go_on: str):
    """If a signal ends training, print one line that ends with `go_on`, and exit with the signal's code."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        code = getattr(error, "exit_code", 130)
        text = f"{error if isinstance(error, Stopped) else 'stopped at once'}; {go_on}"
        print(f"{tool}: {text}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(code)  # a normal exit would wait for processes that may be gone
        raise SystemExit(code) from None


@contextlib.contextmanager
def catching_signals():
    """Yield a list that receives the first SIGINT or SIGTERM, which ends training. A second one acts as usual."""
    caught, before = [], {}

    def note(number, frame):
        caught.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    with contextlib.suppress(ValueError):  # signals are only handled in the main thread
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def latest(values: list) -> int:
    """The first of `values` on any process, or 0."""
    return int(np.max(multihost_utils.process_allgather(np.int32(values[0] if values else 0))))


def train_slice(program: Program, floats, key_data, manager, watch, *, interval=60.0, save_last=False, eval_interval=0,
                begin=lambda: None, before_save=lambda: None, after_save=lambda: None,
                caught=(), seconds=None):  # fmt: skip
    """Train a slice from its last checkpoint, or from the start, to the end. Returns its `carry`.

    `floats` {name: [size]} and `key_data` [size, words] are NumPy arrays. `begin()` is called before the first update.
    After each chunk of about a second, process 0 calls `watch(first, last, metrics, returns)` with the metrics of
    updates [first, last), and with the returns [size, episodes] of an evaluation after them, or None. It writes a
    checkpoint every `interval` seconds unless `interval` is 0, and one at the end if `save_last` is set. Process 0
    decides when, because clocks differ. A signal in `caught` ends training with a checkpoint and raises `Stopped`.
    The times are added to `seconds` {"train", "evaluate"}.
    """
    seconds = {"train": 0.0, "evaluate": 0.0} if seconds is None else seconds
    floats = {
        name: jax.device_put(np.asarray(values, np.float32), program.spread)
        for name, values in floats.items()
    }
    from onejit.envs import (
        host,
    )  # not at the top: it imports gymnax, which starts JAX before `connect`

    host.close_all()  # left by an earlier slice
    done = agree(manager.latest_step() or 0)  # a shared disk may show files later to some processes
    carry = (
        restore(manager, done, program)
        if done
        else program.start(floats, jax.device_put(key_data, program.spread))
    )
    if done and holds(program.abstract["runner_state"], host.HostState):
        carry["runner_state"] = with_new_episodes(
            program, carry["runner_state"], floats, key_data, done
        )
    read, chunk, saved_at = make_reader(program), 1, time.perf_counter()
    begin()
    while done < program.num_updates:
        begun, last, returns = time.perf_counter(), min(done + chunk, program.num_updates), None
        if eval_interval:
            last = min(last, (done // eval_interval + 1) * eval_interval)
        trained = {name: carry[name] for name in ("runner_state", "metrics")}
        carry |= jax.block_until_ready(program.advance(trained, floats, done, last))
        metrics = read(carry["metrics"], done, last)
        ended = time.perf_counter()
        if eval_interval and last % eval_interval == 0:
            agents = carry["runner_state"].agent
            returns = program.evaluate(agents)
            carry["evaluation"] = program.remember(
                carry["evaluation"], agents, returns, last // eval_interval - 1
            )
            returns = np.asarray(returns)
        seconds["train"] += ended - begun
        seconds["evaluate"] += time.perf_counter() - ended
        if is_first():
            watch(done, last, metrics, returns)
        done, now, stop = last, time.perf_counter(), latest(caught)
        longer = round(
            math.log2(min(8.0, 1.0 / (ended - begun)))
        )  # powers of two: see `make_reader`
        due = (
            save_last if done == program.num_updates else 0 < interval <= now - saved_at or stop > 0
        )
        chunk, due = agree([max(1, int(chunk * 2.0**longer)), due])
        if due:
            if is_first():
                before_save()
            save(manager, done, carry)
            if is_first():
                after_save()
            saved_at = time.perf_counter()
        if stop and done < program.num_updates:
            raise Stopped(stop)
    return carry
