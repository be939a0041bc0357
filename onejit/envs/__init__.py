"""Environments of other libraries, behind gymnax's interface.

`--env-name onejit.envs.MODULE:NAME` imports a module of these, which registers that library's environments with gymnax
under the library's own names. docs/environments.md says what each returns.
"""

import contextlib
import functools
import math
from typing import Any

import gymnax
import jax
from flax import struct
from gymnax.environments import environment


@struct.dataclass
class State(environment.EnvState):
    """gymnax's `time`, which the time limit goes by, and the state that the library itself steps."""

    inner: Any


@contextlib.contextmanager
def needs(package: str):
    """Around the import of a library: says what to install where there is none."""
    try:
        yield
    except ImportError as error:
        message = f"{package} cannot be imported ({error}): pip install -r requirements-environments.txt"
        raise ImportError(message) from error


def register(names, make) -> None:
    """`make(name, **arguments)` is called when gymnax makes the environment, and once for the same arguments.

    A name that is registered already, such as gymnax's own CartPole-v1, then means the new environment.
    """
    for name in names:
        if name in gymnax.registered_envs:
            gymnax.registered_envs.remove(name)
            del gymnax.registration._registry[name]
        gymnax.register(name, functools.cache(functools.partial(make, name)))


def start_from(reset, start_states: int):
    """`reset` where `start_states` is 0, otherwise a function that looks up one of so many results of it.

    gymnax resets in each step and mostly throws the result away: where a reset costs much, to look one up does not.
    """
    if not start_states:
        return reset

    @functools.cache
    def make():  # numbers, also where this runs inside a jit
        with jax.ensure_compile_time_eval():
            batch = math.gcd(start_states, 32)  # more at once take longer on a CPU: they do not fit in its cache
            keys = jax.random.split(jax.random.key(0), start_states).reshape(-1, batch)
            states = jax.jit(lambda keys: jax.lax.map(jax.vmap(reset), keys))(keys)
            return jax.tree.map(lambda leaf: leaf.reshape(start_states, *leaf.shape[2:]), states)

    def look_up(key):
        index = jax.random.randint(key, (), 0, start_states)
        return jax.tree.map(lambda leaf: leaf[index], make())

    return look_up
