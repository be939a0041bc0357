"""Programs that train a slice of runs, compiled for slices that fit in memory.

A run is one agent: a random key and, in a sweep, its own values of some float fields. All runs of a
slice train in one program. The axis of runs is spread over all devices, with a `vmap` if a device
has several runs.
"""

import dataclasses
import functools
import math
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from onejit import evaluation, local_modules
from onejit.devices import shardings, smallest_slice
from onejit.errors import about_the_config
from onejit.memory import GIB, free_memory, memory_of, program_bytes
from onejit.text import plural


class Program(NamedTuple):
    """The compiled functions that train a slice of `size` runs."""

    size: int
    num_updates: int
    num_devices: int
    bytes: int  # on each device
    # (floats, key_data) -> carry
    start: Any
    # (carry without its evaluation, floats, first, last) -> carry after updates [first, last)
    advance: Any
    # (agents, numbers [size] among all seeds) -> returns [size, eval_episodes]; or None
    evaluate: Any
    # (evaluation, agents, returns, index) -> evaluation; None without one during training
    remember: Any
    abstract: Any  # shapes, types and shardings of `carry`
    sharding: Any  # of arrays [size, ...]
    replicated: Any  # sharding of arrays that every device has
    # as `start`, with the shortest warm-up; compiled when it is called
    restart: Any = None
    # (carry, updates done) -> carry, after every `exchange_interval` updates; None without any
    exchange: Any = None
    exchange_interval: int = 0


# --- functions ---


@functools.lru_cache(maxsize=4)
def make_learner(script, config):
    """`(init, update)` of a script, made once: an environment may take seconds."""
    init, update = script.make_learner(config)
    return jax.jit(init), jax.jit(update)  # both are traced once


def training_functions(script, config, names):
    """`start` and `advance` as in a script's `main`.

    Each run may have its own values of the float fields `names`. The functions carry
    `{"runner_state": [size, ...], "metrics": {name: [size, num_updates]}}`.
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
        return {"runner_state": state, "metrics": metrics}

    def advance(carry, floats, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = update(floats, carry["runner_state"])
            metrics = {}
            for name, values in carry["metrics"].items():
                metrics[name] = values.at[i].set(jnp.asarray(new[name], values.dtype))
            return {"runner_state": state, "metrics": metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    return start, advance


def check_observations(script, config) -> None:
    """Raise ValueError if an environment of a user's module observes what it does not declare."""
    module = local_modules.module_of(getattr(config, "env_name", ""))
    if not module or local_modules.is_of_onejit(module):
        return
    env, env_params = script.make_env(config)
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    if not isinstance(obs, jax.ShapeDtypeStruct):  # as for the teams of mappo.py
        return
    space = env.observation_space(env_params)
    dtype = jnp.dtype(space.dtype)
    # scripts divide bytes by 255; other numbers become floats, and gymnax's own spaces mix them up
    is_other_kind = (dtype == jnp.uint8) != (obs.dtype == jnp.uint8)
    if tuple(space.shape) != obs.shape or is_other_kind:
        raise ValueError(
            f"env_name = {config.env_name}: its observations have shape {obs.shape} and dtype "
            f"{obs.dtype}, but its observation_space has {tuple(space.shape)} and {dtype}"
        )
    if not hasattr(env, "release"):  # of environments outside JAX, which have no wrapper inside
        check_final_observation(env, env_params, config.env_name)


def check_final_observation(env, env_params, name: str) -> None:
    """Warn if `final_observation` is not `obs` in a step that ends no episode.

    The scripts then take `obs`, but at a time limit they need a transformed `final_observation`.
    Raises ValueError if its shape or dtype is another.
    """
    while type(env).__name__ != "StandardStep":  # which hides what is inside
        if not hasattr(env, "_env"):
            return
        env = env._env
    env = env._env

    def step(key):
        action = env.action_space(env_params).sample(key)
        _, state = env.reset(key, env_params)
        obs, _, _, terminated, truncated, info = env.step(key, state, action, env_params)
        return obs, info["final_observation"], terminated | truncated

    key = jax.random.key(0)
    obs, final_obs, _ = jax.eval_shape(step, key)
    for x, final in zip(jax.tree.leaves(obs), jax.tree.leaves(final_obs), strict=True):
        if (x.shape, x.dtype) != (final.shape, final.dtype):
            raise ValueError(
                f"env_name = {name}: final_observation has shape {final.shape} and dtype "
                f"{final.dtype}, but obs {x.shape} and {x.dtype}; a wrapper must transform both"
            )

    @jax.jit
    def is_right(key):
        obs, final_obs, done = step(key)
        equal = jax.tree.map(jnp.array_equal, obs, final_obs)
        return done | jax.tree.reduce(jnp.logical_and, equal)

    if not jnp.all(is_right(key)):
        print(
            f"onejit: warning: env_name = {name}: final_observation is not obs in a step that ends "
            "no episode; a wrapper must transform both, or values at time limits are wrong",
            file=sys.stderr,
        )


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


def over_one(function):
    """`jax.vmap(function)` for an axis of length 1, which the function's loops do not carry.

    Faster than `vmap` on CPUs, as in a script's `main`. Arguments that are numbers have no axis.
    """

    def first(leaf):
        return leaf[0] if jnp.ndim(leaf) else leaf

    def call(*trees):
        results = function(*jax.tree.map(first, trees))
        return jax.tree.map(lambda leaf: leaf[None], results)

    return call


def without_warm_up(script, config):
    """The config with the shortest warm-up that its script takes."""
    if not hasattr(config, "learning_starts"):
        return config
    shorter = dataclasses.replace(config, learning_starts=0)
    try:
        script.make_learner(shorter)
    except ValueError:
        return config
    return shorter


def start_with_evaluation(start, make_evaluation, floats, key_data):
    """The carry of `start`, with the memory of evaluations added."""
    carry = start(floats, key_data)
    carry["evaluation"] = make_evaluation(carry["runner_state"].agent)
    return carry


# --- compilation ---


def compile_slice(script, config, names, size: int, options=None) -> Program:
    """Compile the training of `size` runs, with the fields `names` traced.

    `options` adds the evaluation. They have `seed`, `eval_episodes` and `eval_interval`. Raises
    ValueError if the config cannot train.
    """
    devices, sharding, replicated = shardings(size)
    key_words = jax.random.key_data(jax.random.key(0)).shape
    of_each_run = partial(jax.ShapeDtypeStruct, sharding=sharding)
    floats = {name: of_each_run((size,), jnp.float32) for name in names}
    key_data = of_each_run((size, *key_words), jnp.uint32)
    # runs are independent of each other
    over_devices = partial(
        jax.shard_map, mesh=sharding.mesh, out_specs=sharding.spec, check_vma=False
    )

    with about_the_config(script, config):
        # before the compilation, during which a user may edit a file
        local_modules.read_sources(script, [getattr(config, "env_name", "")])
        check_observations(script, config)
        start_run, advance_run = training_functions(script, config, names)
        if size > len(devices):
            start_runs = jax.vmap(start_run)
            advance_runs = jax.vmap(advance_run, (0, 0, None, None))
        else:
            start_runs = over_one(start_run)
            advance_runs = over_one(advance_run)
        start_all = over_devices(start_runs, in_specs=sharding.spec)
        in_specs = (sharding.spec, sharding.spec, replicated.spec, replicated.spec)
        advance_all = over_devices(advance_runs, in_specs=in_specs)
        jit_start = jax.jit(start_all, out_shardings=sharding)
        jit_advance = jax.jit(advance_all, donate_argnums=0, out_shardings=sharding)
        abstract = jit_start.eval_shape(floats, key_data)

        def restart(floats, key_data):
            restart_run, _ = training_functions(script, without_warm_up(script, config), names)
            restart_runs = jax.vmap(restart_run) if size > len(devices) else over_one(restart_run)
            restart_all = over_devices(restart_runs, in_specs=sharding.spec)
            return jax.jit(restart_all, out_shardings=sharding)(floats, key_data)

        lowered_start = jit_start.lower(floats, key_data)
        lowered_advance = jit_advance.lower(abstract, floats, 0, 1)
    check_agent(abstract["runner_state"].agent)
    start = lowered_start.compile()
    advance = lowered_advance.compile()
    held = memory_of(start).output_size_in_bytes  # bytes of the carry on each device
    needed = max(program_bytes(start), program_bytes(advance))

    evaluate = None
    remember = None
    if options is not None and options.eval_episodes:
        agents = abstract["runner_state"].agent
        evaluate_runs = evaluation.greedy_returns(script, config, options)
        evaluate_all = over_devices(evaluate_runs, in_specs=sharding.spec)
        evaluate = jax.jit(evaluate_all, out_shardings=replicated)
        evaluate = evaluate.lower(agents, of_each_run((size,), jnp.int32)).compile()
        needed = max(needed, program_bytes(evaluate, held))
        if options.eval_interval:
            remember = jax.jit(evaluation.remember_best, donate_argnums=0, out_shardings=sharding)
            count = config.num_updates // options.eval_interval
            no_evaluation = partial(evaluation.no_evaluation, count=count)
            make_evaluation = jax.jit(no_evaluation, out_shardings=sharding)
            start = partial(start_with_evaluation, start, make_evaluation)
            abstract["evaluation"] = make_evaluation.eval_shape(agents)
    if devices[0].platform == "cpu":  # a checkpoint's copy is in the same memory
        needed += held
    return Program(
        size=size,
        num_updates=config.num_updates,
        num_devices=len(devices),
        bytes=needed,
        start=start,
        advance=advance,
        evaluate=evaluate,
        remember=remember,
        abstract=abstract,
        sharding=sharding,
        replicated=replicated,
        restart=restart,
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
        even = math.ceil(total / number_of_slices(total, fitting) / step) * step
        size = max(step, min(size - step, even))


def compile_slices(
    compile_size,
    total: int,
    size: int | None,
    memory_gib: float | None,
    seconds: dict,
    step: int | None = None,
):
    """`(program, description)` for `total` runs in slices of `size`.

    By default they are the largest slices that fit in memory, multiples of `step`, which by default
    keeps all devices busy. Adds the time to `seconds` {"compile"}. Raises ValueError.
    """
    begun = time.perf_counter()
    memory = free_memory(memory_gib)
    if size:
        program = compile_size(size)
    else:
        program = largest_slice(compile_size, total, step or smallest_slice(total), memory)
    took = time.perf_counter() - begun
    seconds["compile"] += took
    slices = plural(number_of_slices(total, program.size), "slice")
    if program.size < total:
        slices = f"{slices} of at most {program.size}"
    needed = f"{program.bytes / GIB:.3g} GiB of {memory / GIB:.3g} free on each"
    if program.bytes > memory:
        needed += " (MORE THAN IS FREE)"
    devices = plural(program.num_devices, "device")
    description = f"{slices} on {devices}, {needed}; compiled in {took:.1f} s"
    return program, description
