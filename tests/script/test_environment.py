"""What the package knows of an environment and its wrappers."""

from typing import NamedTuple

import gymnax
import jax
from flax import struct
from gymnax.environments.classic_control.cartpole import EnvState
from gymnax.wrappers import LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper, StickyActionWrapper

from onejit.script.environment import inner_state


class Counted(NamedTuple):
    count: int
    inside: struct.dataclass


class Counts(GymnaxWrapper):
    def reset(self, key, params=None):
        obs, state = self._env.reset(key, params)
        return obs, Counted(count=0, inside=state)


def test_the_state_inside_of_wrappers_with_a_state_of_their_own():
    env, params = gymnax.make("CartPole-v1")
    for wrap in (lambda env: env, LogWrapper, lambda env: StickyActionWrapper(env, 0.2), Counts):
        env = wrap(env)
        _, state = env.reset(jax.random.key(0), params)
        assert type(inner_state(env, params, state)) is EnvState
