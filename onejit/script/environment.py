"""Checks of a script's environment: the values of `env_params`, and what it observes."""

import dataclasses
import inspect
import sys

import jax
import jax.numpy as jnp

from onejit.base.text import nearest
from onejit.script import local_modules
from onejit.script.contract import Script


def expected_kind(value, default) -> str | None:
    """What a value must be, in words, or None if it may stand in place of `default`."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else "text, in quotes in YAML"
    if not isinstance(default, int | float | jax.Array):
        return None
    is_whole = jnp.issubdtype(jnp.result_type(default), jnp.integer)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not (is_whole and not float(value).is_integer()):
        return None
    return "a whole number" if is_whole else "a number"


def check_env_params(script: Script, config) -> None:
    """Raise ValueError if `env_params` has an unknown name, or a value unlike the default."""
    if not getattr(config, "env_params", None):
        return
    env, env_params = script.make_env(dataclasses.replace(config, env_params={}))
    defaults = {}
    takes_others = False
    parts = [unwrap(env)]
    if hasattr(parts[0], "env"):  # an adapter, with the environment that it adapts
        parts.insert(0, parts[0].env)
    for part in parts:
        constructor = inspect.signature(type(part)).parameters.values()
        defaults |= {argument.name: argument.default for argument in constructor}
        takes_others |= any(argument.kind is argument.VAR_KEYWORD for argument in constructor)
    defaults |= vars(env_params)
    for key, value in config.env_params.items():
        if key not in defaults and not takes_others:
            similar = nearest(key, defaults)
            raise ValueError(f"env_params: {key}: is no parameter of {config.env_name}{similar}")
        expected = expected_kind(value, defaults.get(key))
        if expected is not None:
            raise ValueError(f"env_params: {key} = {value}: must be {expected}")


def check_observations(script: Script, config) -> None:
    """Raise ValueError if an environment of a user's module observes what it does not declare.

    Warns of a `final_observation` or `terminated` that would make values wrong.
    """
    module = local_modules.module_of(config.env_name)
    if not module or module.startswith("onejit.envs."):
        return
    env, env_params = script.make_env(config)
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    if hasattr(obs, "action_mask"):
        first, _ = env.reset(jax.random.key(0), env_params)
        if not jnp.any(first.action_mask):
            raise ValueError(f"env_name = {config.env_name}: its action_mask forbids every action")
        obs = obs.obs
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
        check_state_numbers(env, env_params, config.env_name)
        check_final_observation(env, env_params, config.env_name)
        check_time_limit(env, env_params, config.env_name)


def check_state_numbers(env, env_params, name: str) -> None:
    """Raise ValueError if an observation, the number of a state, is not below its number.

    Looks at some first and second observations.
    """
    space = env.observation_space(env_params)
    if not hasattr(space, "n"):
        return

    @jax.jit
    @jax.vmap
    def observe(key):
        first, state = env.reset(key, env_params)
        action = env.action_space(env_params).sample(key)
        second, *_ = env.step(key, state, action, env_params)
        return first, second

    observed = jnp.stack(observe(jax.random.split(jax.random.key(0), 64)))
    if observed.min() < 0 or observed.max() >= space.n:
        raise ValueError(
            f"env_name = {name}: observes states {observed.min()} to {observed.max()}, but its "
            f"observation_space Discrete({space.n}) has 0 to {space.n - 1}"
        )


def check_time_limit(env, env_params, name: str) -> None:
    """Warn if `terminated` seems to include the time limit, as `done` of gymnax 0.0 does."""
    inner = unwrap(env)
    limit = getattr(env_params, "max_steps_in_episode", 0)
    _, state = inner.reset(jax.random.key(0), env_params)
    if not 2 <= limit < 2**31 or not hasattr(state, "time") or not hasattr(state, "replace"):
        return

    def terminates(time):
        timed = state.replace(time=jnp.asarray(time, jnp.result_type(state.time)))
        action = inner.action_space(env_params).sample(jax.random.key(1))
        return inner.step(jax.random.key(2), timed, action, env_params)[3]

    if jnp.all(terminates(limit - 1)) and not jnp.any(terminates(limit - 2)):
        print(
            f"onejit: warning: env_name = {name}: `terminated` is true at the time limit, "
            f"max_steps_in_episode = {limit}; leave the limit out of it, which gymnax adds, or "
            "values are too low. It may stay if the task itself ends there",
            file=sys.stderr,
        )


def check_final_observation(env, env_params, name: str) -> None:
    """Warn if `final_observation` is not `obs` in a step that ends no episode.

    The wrapper `LogEpisodes` of a script takes `obs` there. Inside of it, `final_observation` is
    wrong at time limits alone; outside, in each step. Raises ValueError if its shape or dtype is
    another.
    """
    inside = env
    # in copies of older scripts it is StandardStep
    while type(inside).__name__ not in ("LogEpisodes", "StandardStep"):
        if not hasattr(inside, "_env"):
            return
        inside = inside._env
    check_transforms(inside._env, env_params, name)
    check_transforms(env, env_params, name)


def check_transforms(env, env_params, name: str) -> None:
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


def inner_state(env, env_params, state):
    """The state of the environment inside all wrappers, some of which have a state of their own."""
    _, expected = jax.eval_shape(unwrap(env).reset, jax.random.key(0), env_params)
    structure = jax.tree.structure(expected)

    def is_inner(part):
        return jax.tree.structure(part) == structure

    return next(filter(is_inner, jax.tree.leaves(state, is_leaf=is_inner)))


def unwrap(env):
    """The environment inside all wrappers."""
    while hasattr(env, "_env"):
        env = env._env
    return env
