"""What the adapters of environments have in common."""

import contextlib
import functools
import importlib
import math
from typing import Any, NamedTuple

import gymnax
import jax
from flax import struct
from gymnax.environments import environment


@struct.dataclass
class State(environment.EnvState):
    """The state of the library's environment, and gymnax's `time` for the time limit."""

    inner: Any


class MaskedObservation(NamedTuple):
    """What ppo.py and dqn.py observe if actions can be invalid."""

    obs: jax.Array
    action_mask: jax.Array  # [num_actions], true for valid actions


@contextlib.contextmanager
def needs(*packages: str):
    """A context for the import of the first of these packages, each as NAME==VERSION.

    If it is missing, the error says what to install.
    """
    try:
        yield
    except ImportError as error:
        name = packages[0].partition("==")[0]
        advice = f"pip install {' '.join(packages)}"
        raise ImportError(f"{name} cannot be imported ({error}): {advice}") from error


def register(names, make, module: str = "") -> None:
    """Register environments. gymnax calls `make(name, **arguments)`, once for equal arguments.

    With `module` they are registered as MODULE:NAME, so that NAME alone, such as CartPole-v1, does
    not depend on what was imported. A name that is already registered then means the new one.
    """
    for name in names:
        registered = f"{module}:{name}" if module else name
        if registered in gymnax.registered_envs:
            gymnax.registered_envs.remove(registered)
            del gymnax.registration._registry[registered]
        gymnax.register(registered, functools.cache(functools.partial(make, name)))


def with_short_names(make_env):
    """`make_env` of a script of onejit 0.4 or before, which looks up NAME of MODULE:NAME."""

    @functools.wraps(make_env)
    def make(config):
        module, _, name = config.env_name.rpartition(":")
        if module:
            importlib.import_module(module)
        registry = gymnax.registration._registry
        if config.env_name not in registry:
            return make_env(config)
        before = {name: registry[name]} if name in registry else {}
        registry[name] = registry[config.env_name]
        try:
            return make_env(config)
        finally:
            del registry[name]
            registry.update(before)

    return make


def start_from(reset, start_states: int):
    """A function that looks up one of `start_states` results of `reset`, or `reset` itself for 0.

    gymnax resets in each step, and mostly discards the result. If a reset is expensive, looking one
    up is much cheaper.
    """
    if not start_states:
        return reset

    @functools.cache
    def make():  # concrete numbers, also inside a jit
        with jax.ensure_compile_time_eval():
            batch = math.gcd(start_states, 32)  # larger batches do not fit in a CPU's cache
            keys = jax.random.split(jax.random.key(0), start_states).reshape(-1, batch)
            states = jax.jit(lambda keys: jax.lax.map(jax.vmap(reset), keys))(keys)
            return jax.tree.map(lambda leaf: leaf.reshape(start_states, *leaf.shape[2:]), states)

    def look_up(key):
        index = jax.random.randint(key, (), 0, start_states)
        return jax.tree.map(lambda leaf: leaf[index], make())

    return look_up
