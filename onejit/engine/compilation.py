"""Programs that train a slice of runs, compiled for slices that fit in memory.

A run is one agent: a random key and, in a sweep, its own values of some float fields. All runs of a
slice train in one program. The axis of runs is spread over all devices, with a `vmap` if a device
has several runs.
"""

import dataclasses
import functools
import math
import time
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from onejit.base.text import plural
from onejit.engine import evaluation
from onejit.engine.axis import Axis
from onejit.engine.carry import Carry
from onejit.engine.devices import smallest_slice
from onejit.engine.memory import GIB, free_memory, memory_of, program_bytes
from onejit.script import local_modules
from onejit.script.contract import Script
from onejit.script.environment import check_observations
from onejit.script.errors import FieldError, about_the_config


class Program(NamedTuple):
    """The compiled functions that train a slice of runs."""

    axis: Axis
    num_updates: int
    bytes: int  # on each device
    held: int  # bytes of the carry on each device
    abstract: Carry  # shapes, types and shardings
    # (floats, key_data) -> carry
    start: Any
    # (carry without evaluations, floats, first, last) -> carry after updates [first, last)
    advance: Any
    # (agents, their numbers in the run) -> returns [size, episodes]; None without evaluation
    evaluate: Any = None
    # (evaluations, agents, returns, index) -> evaluations; None without any during training
    remember: Any = None

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def sharding(self):
        """Of arrays [size, ...]."""
        return self.axis.sharding


# --- functions ---


@functools.lru_cache(maxsize=4)
def make_learner(script: Script, config):
    """`(init, update)` of a script, made once: an environment may take seconds."""
    init, update = script.make_learner(config)
    return jax.jit(init), jax.jit(update)  # both are traced once


def training_functions(script: Script, config, names):
    """`start` and `advance` as in a script's `main`.

    Each run may have its own values of the float fields `names`.
    """
    # made outside of what JAX traces, where it would keep tracers
    shared = None if names else make_learner(script, config)

    def learner(floats):
        if shared is not None:
            return shared
        return script.make_learner(dataclasses.replace(config, **floats))

    def update(floats, state):
        _, update = learner(floats)
        return update(state)

    def start(floats, key_data):
        init, _ = learner(floats)
        state = init(jax.random.wrap_key_data(key_data))
        _, shapes = jax.eval_shape(update, floats, state)
        metrics = {}
        for name, shape in shapes.items():
            is_short = jnp.issubdtype(shape.dtype, jnp.floating) and shape.dtype.itemsize < 4
            dtype = jnp.float32 if is_short else shape.dtype  # NumPy's files know no bfloat16
            metrics[name] = jnp.zeros(config.num_updates, dtype)
        return Carry(state, metrics)

    def advance(carry, floats, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = update(floats, carry.runner_state)
            metrics = {}
            for name, values in carry.metrics.items():
                metrics[name] = values.at[i].set(jnp.asarray(new[name], values.dtype))
            return Carry(state, metrics)

        return jax.lax.fori_loop(first, last, body, carry)

    return start, advance


def check_arrays(part, name: str = "runner_state") -> None:
    """Raise ValueError if a part of a runner state is a function.

    In a sweep it may hold traced floats, as the optimizer in flax's TrainState, and outlive them.
    """
    if callable(part):
        raise FieldError(f"{name}: is a function; a runner state has arrays only, or cannot sweep")
    if dataclasses.is_dataclass(part):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    elif hasattr(part, "_asdict"):
        part = part._asdict()
    elif isinstance(part, (list, tuple)):
        part = dict(enumerate(part))
    if isinstance(part, (dict, FrozenDict)):
        for key, value in part.items():
            if key != "env_state":  # of the environment, which no float of the config reaches
                check_arrays(value, f"{name}.{key}")


def check_agent(agent, name: str = "runner_state.agent") -> None:
    """Raise ValueError unless an agent can be written to a file and read again.

    Its arrays get dotted names, so it consists of dicts whose names have no dot.
    """
    if isinstance(agent, jax.ShapeDtypeStruct):
        return
    if not isinstance(agent, (dict, FrozenDict)):
        kind = type(agent).__name__
        raise ValueError(f"{name}: must be a dict of arrays or of dicts, and is a {kind}")
    for key, value in agent.items():
        if not isinstance(key, str) or "." in key:
            raise ValueError(f"{name}: has the name {key!r}; a name must be a word without a dot")
        check_agent(value, f"{name}[{key!r}]")


def check_metrics(metrics) -> None:
    """Raise ValueError unless an update returns what results are made of."""
    for name in ("episodes", "episodic_return"):
        if name not in metrics:
            raise ValueError(f"update: its metrics lack {name}, which `episode_metrics` returns")


# --- compilation ---


def compile_slice(script: Script, config, names, size: int, options=None) -> Program:
    """Compile the training of `size` runs, with the fields `names` traced.

    `options` adds the evaluation. They have `seed`, `eval_episodes` and `eval_interval`. Raises
    ValueError if the config cannot train.
    """
    program = compile_training(script, config, names, Axis.of(size))
    if options is None or not options.eval_episodes:
        return program
    program = with_evaluation(program, evaluation.make_evaluation(script, config, options))
    if options.eval_interval:
        program = with_best_agents(program, config.num_updates // options.eval_interval)
    return program


def compile_training(script: Script, config, names, axis: Axis) -> Program:
    """The program without any evaluation. Raises ValueError if the config cannot train."""
    floats = axis.floats(names)
    key_data = axis.key_data()

    with about_the_config(script, config):
        # before the compilation, during which a user may edit a file
        local_modules.read_sources(script, [config.env_name])
        check_observations(script, config)
        start_run, advance_run = training_functions(script, config, names)
        start_runs = axis.over_runs(start_run, arguments=2)
        advance_runs = axis.over_runs(advance_run, arguments=4, shared=2)
        jit_start = jax.jit(axis.over_devices(start_runs, arguments=2), out_shardings=axis.sharding)
        jit_advance = jax.jit(
            axis.over_devices(advance_runs, arguments=4, shared=2),
            donate_argnums=0,
            out_shardings=axis.sharding,
        )
        abstract = jit_start.eval_shape(floats, key_data)
        if names:
            check_arrays(abstract.runner_state)
        lowered_start = jit_start.lower(floats, key_data)
        lowered_advance = jit_advance.lower(abstract, floats, 0, 1)
    check_agent(abstract.runner_state.agent)
    check_metrics(abstract.metrics)
    start = lowered_start.compile()
    advance = lowered_advance.compile()
    held = memory_of(start).output_size_in_bytes
    program = Program(
        axis=axis,
        num_updates=config.num_updates,
        bytes=0,
        held=held,
        abstract=abstract,
        start=start,
        advance=advance,
    )
    return with_bytes(program, max(program_bytes(start), program_bytes(advance)))


def with_bytes(program: Program, needed: int) -> Program:
    """The program that needs so many bytes in one of its parts, too."""
    if jax.devices()[0].platform == "cpu":  # a checkpoint's copy is in the same memory
        needed += program.held
    return program._replace(bytes=max(program.bytes, needed))


def with_evaluation(program: Program, evaluate_runs) -> Program:
    """The program with `evaluate`, which is `evaluate_runs` of a device for all devices."""
    axis = program.axis
    evaluate = jax.jit(axis.over_devices(evaluate_runs, arguments=2), out_shardings=axis.replicated)
    agents = program.abstract.runner_state.agent
    evaluate = evaluate.lower(agents, axis.shape(dtype=jnp.int32)).compile()
    program = with_bytes(program, program_bytes(evaluate, program.held))
    return program._replace(evaluate=evaluate)


def with_best_agents(program: Program, count: int) -> Program:
    """The program that remembers `count` evaluations during training, and the best agents."""
    sharding = program.sharding
    make = jax.jit(partial(evaluation.no_evaluations, count=count), out_shardings=sharding)

    def start(floats, key_data):
        carry = program.start(floats, key_data)
        return carry._replace(evaluations=make(carry.runner_state.agent))

    evaluations = make.eval_shape(program.abstract.runner_state.agent)
    return program._replace(
        start=start,
        remember=jax.jit(
            evaluation.remember_best,
            static_argnums=4,
            donate_argnums=0,
            out_shardings=sharding,
        ),
        abstract=program.abstract._replace(evaluations=evaluations),
    )


def number_of_slices(total: int, size: int) -> int:
    return math.ceil(total / size)


def largest_slice(compile_size, total: int, step: int, memory: float) -> Program:
    """The program of the largest slices of `total` runs that fit in `memory` bytes.

    Slices have about the same size, a multiple of `step`. `compile_size(size)` compiles a slice.
    Memory grows linearly with the number of runs: the first guess is in proportion, further guesses
    lie on the line through the last two. Raises ValueError.
    """
    size = number_of_slices(total, step) * step
    smaller = (0, 0)  # size and bytes of the guess before
    while True:
        program = compile_size(size)
        if program.bytes <= memory:
            return program
        if size == step:
            runs = "1 run needs" if step == 1 else f"{step} runs at once need"
            needed = f"{runs} {program.bytes / GIB:.3g} GiB on a device"
            free = f"{memory / GIB:.3g} GiB are free"
            raise ValueError(
                f"memory: {needed}, {free}; smaller sizes, such as num_envs, need less"
            )
        other_size, other_bytes = smaller
        smaller = (size, program.bytes)
        bytes_of_a_run = max(1.0, (other_bytes - program.bytes) / (other_size - size))
        fitting = int(size - (program.bytes - memory) / bytes_of_a_run)
        fitting = max(step, min(size - step, fitting))
        size = math.ceil(total / number_of_slices(total, fitting) / step) * step  # even slices


def compile_slices(
    compile_size,
    total: int,
    size: int | None,
    memory_gib: float | None,
    seconds: defaultdict[str, float],
):
    """`(program, description)` for `total` runs in slices of `size`.

    By default they are the largest slices that fit in memory and keep all devices busy. Adds the
    time to `seconds`. Raises ValueError.
    """
    begun = time.perf_counter()
    memory = free_memory(memory_gib)
    if size:
        program = compile_size(size)
    else:
        program = largest_slice(compile_size, total, smallest_slice(total), memory)
    took = time.perf_counter() - begun
    seconds["compile"] += took
    slices = plural(number_of_slices(total, program.size), "slice")
    if program.size < total:
        slices = f"{slices} of at most {program.size}"
    needed = f"{program.bytes / GIB:.3g} GiB of {memory / GIB:.3g} free on each"
    if program.bytes > memory:
        needed += " (MORE THAN IS FREE)"
    devices = plural(program.axis.num_devices, "device")
    description = f"{slices} on {devices}, {needed}; compiled in {took:.1f} s"
    return program, description
