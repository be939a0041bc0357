"""Many runs of a script in slices that fit in memory, over the devices of one or of many processes.

A run is one agent: a random key and, in a sweep, its own values of some float fields. All runs of a slice train in one
program, under `vmap`, with the axis of runs spread over all devices. `sweep.py` and `train.py` are built on this.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

GIB = 2**30
HEARTBEAT = 20  # seconds without a sign of life after which the other processes give up

# --- the command line and the run directory ---


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message):
        raise ValueError(message)


def make_parser(description: str, usage: str) -> Parser:
    """The options of both tools."""
    parser = Parser(
        description=description, usage=usage, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=float, help="GiB to use of each device; by default 90 %% of what is free")
    group = parser.add_argument_group("many hosts, the same command on each")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--num-processes", type=int, help="in all")
    group.add_argument("--process-id", type=int, help="of this process, from 0")
    group.add_argument("--distributed", action="store_true", help="find these three out from SLURM and the like")
    return parser


def check_names(script, flags: dict) -> None:
    """Raise ValueError for a flag that neither the tool nor the script has."""
    known = {field.name for cls in (script.Config, script.Options) for field in dataclasses.fields(cls)}
    if unknown := [name for name in flags if name not in known]:
        raise ValueError(f"{unknown[0]}: is not a hyperparameter{script.nearest(unknown[0], known)}")


def split_arguments(parser: Parser, args: list[str]) -> tuple[str, argparse.Namespace, dict[str, list[str]]]:
    """`(script, options of the tool, other flags with their words)`. Raises ValueError."""
    if {"-h", "--help"} & set(args):
        parser.parse_args(["--help"])
    if not args or args[0].startswith("-"):
        raise ValueError("SCRIPT: must come first, a script's name or path")
    tool, rest = parser.parse_known_args(args[1:])
    flags, words = {}, None
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in flags:
                raise ValueError(f"{name}: is given twice")
            flags[name] = words = [value] if equals else []
        elif words is None:
            raise ValueError(f"{word}: is not a flag")
        else:
            words.append(word)
    if tool.memory is not None and not 0 < tool.memory < math.inf:
        raise ValueError(f"memory = {tool.memory}: must be a number of GiB above 0")
    return args[0], tool, flags


def join_flags(flags: dict[str, list[str]]) -> list[str]:
    """The command line again. A value may begin with a minus sign, which only `=` tells from a flag."""
    return [
        word
        for name, words in flags.items()
        for word in ([f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words])
    ]


def withdraw(run_dir: Path) -> None:
    """Leave no trace of a run that did not begin."""
    for name in ("run.json", "config.yaml"):
        (run_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds something else
        run_dir.rmdir()


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
        if "RESOURCE_EXHAUSTED" in text:
            print(f"{tool}: error: out of memory, try --memory: {text}", file=sys.stderr, flush=True)
        elif jax.process_count() > 1:
            print(f"{tool}: error: another process may be gone: {text}", file=sys.stderr, flush=True)
        else:
            raise
        os._exit(1)  # an ordinary exit would wait for the other processes


# --- many processes ---


def connect(tool: argparse.Namespace) -> None:
    """Join the other processes, where there are any. Raises ValueError."""
    given = {name: getattr(tool, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [name for name, value in given.items() if value is None]
    if tool.distributed and len(missing) < 3:
        raise ValueError(
            "distributed: finds out coordinator, num_processes and process_id by itself; give none of them"
        )
    if not tool.distributed and len(missing) == 3:
        return
    if not tool.distributed:
        if missing:
            raise ValueError(f"{missing[0]}: is needed too, as coordinator, num_processes and process_id go together")
        if not 0 <= tool.process_id < tool.num_processes:
            raise ValueError(f"process_id = {tool.process_id}: must be from 0 to num_processes - 1")
        host, colon, port = tool.coordinator.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"coordinator = {tool.coordinator}: must be HOST:PORT")
    try:
        jax.distributed.initialize(
            tool.coordinator, tool.num_processes, tool.process_id, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        name = "distributed" if tool.distributed else f"coordinator = {tool.coordinator}"
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
        is_os_error, message = answer["error"]
        raise (OSError if is_os_error else ValueError)(message)
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
    if limit_gib:
        free = limit_gib * GIB
    else:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if all("bytes_limit" in each for each in stats):
            free = 0.9 * min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
        else:  # CPU devices share the host's memory
            free = 0.9 * host_memory() / jax.local_device_count()
    return GIB * float(np.min(multihost_utils.process_allgather(np.float32(free / GIB))))


def program_bytes(compiled) -> int:
    """Bytes on each device while the program runs, as XLA has planned it."""
    stats = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return held + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


# --- programs ---


class Program(NamedTuple):
    """What trains a slice of `size` runs."""

    size: int
    num_updates: int
    num_devices: int
    bytes: int  # on each device
    start: Any  # (floats, key_data) -> carry
    advance: Any  # (carry, floats, first, last) -> carry
    evaluate: Any  # runner_state -> returns [size, eval_episodes]; None where not asked for
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
    mesh = jax.sharding.Mesh(np.asarray(devices), ("run",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("run",), ()))
    return devices, spread, whole


def training_functions(script, config, size: int):
    """`start` and `advance` as in `main`, but that each run may have its own value of float fields.

    They carry `{"runner_state": [size, ...], "metrics": {name: [size, num_updates]}}`.
    """

    def init(floats, key):
        return script.make_learner(dataclasses.replace(config, **floats))[0](key)

    def update(floats, state):
        return script.make_learner(dataclasses.replace(config, **floats))[1](state)

    def start(floats, key_data):
        state = jax.vmap(init)(floats, jax.random.wrap_key_data(key_data))
        shapes = jax.eval_shape(jax.vmap(update), floats, state)[1]
        metrics = {name: jnp.zeros((size, config.num_updates), each.dtype) for name, each in shapes.items()}
        return {"runner_state": state, "metrics": metrics}

    def advance(carry, floats, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = jax.vmap(update)(floats, carry["runner_state"])
            metrics = {name: each.at[:, i].set(new[name]) for name, each in carry["metrics"].items()}
            return {"runner_state": state, "metrics": metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    return start, advance


def compile_slice(script, config, names, size: int, options=None) -> Program:
    """Compile the training of `size` runs, the fields `names` traced. With `options` the evaluation too.

    Raises ValueError where the config cannot train.
    """
    devices, spread, whole = shardings(size)
    key_words = jax.random.key_data(jax.random.key(0)).shape
    floats = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=spread) for name in names}
    key_data = jax.ShapeDtypeStruct((size, *key_words), jnp.uint32, sharding=spread)
    start, advance = training_functions(script, config, size)
    start = jax.jit(start, out_shardings=spread)
    abstract = start.eval_shape(floats, key_data)
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # as it runs once
    start = start.lower(floats, key_data).compile(quickly if devices[0].platform == "cpu" else None)
    advance = jax.jit(advance, donate_argnums=0, out_shardings=spread).lower(abstract, floats, 0, 1).compile()
    programs, evaluate = [start, advance], None
    if options is not None and options.eval_episodes:
        evaluate = jax.jit(partial(script.evaluate, config, options), out_shardings=whole)
        evaluate = evaluate.lower(abstract["runner_state"]).compile()
        programs.append(evaluate)
    needed = max(map(program_bytes, programs))
    if devices[0].platform == "cpu":  # where a checkpoint's copy lies in the same memory
        needed += start.memory_analysis().output_size_in_bytes
    return Program(size, config.num_updates, len(devices), needed, start, advance, evaluate, abstract, spread, whole)


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
    return ocp.CheckpointManager(directory, options=options)


def save(manager, step: int, carry) -> None:
    """Write a checkpoint. Raises OSError where it cannot be written."""
    try:
        manager.save(step, args=ocp.args.StandardSave(carry))
    except Exception as error:  # Orbax raises many kinds
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process is gone
        text = " ".join(str(error).split())
        kind = next((word for word in ("No space left on device", "Read-only file system") if word in text), text[:300])
        raise OSError(f"the checkpoint of update {step} cannot be written: {kind}") from error


def restore(manager, step: int, abstract):
    """The `carry` of a checkpoint. Raises OSError where it cannot be read, or is not what the script carries."""
    try:
        return manager.restore(step, args=ocp.args.StandardRestore(abstract))
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
    checkpoint. Process 0 decides on both, since the clocks of processes differ.
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
        due = save_last if done == program.num_updates else now - saved_at >= interval
        chunk, due = agree([max(1, int(chunk * 2.0**longer)), due])
        if due:
            save(manager, done, carry)
            saved_at = time.perf_counter()
    return carry
