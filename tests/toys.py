"""Environments of known value, registered with gymnax under the names of their classes."""

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class EnvState(environment.EnvState):
    action: jax.Array  # the last one, so that a played episode shows what the agent did


@struct.dataclass
class EnvParams(environment.EnvParams):
    max_steps_in_episode: int = 12
    noise: float = 0.0  # of the reward


class ToyContinuous(environment.Environment[EnvState, EnvParams]):
    """Terminates after 5 steps, each of reward 1. The clock is all there is to see."""

    @property
    def default_params(self):
        return EnvParams()

    def step_env(self, key, state, action, params):
        state = EnvState(time=state.time + 1, action=jnp.float32(action).reshape(()))
        reward = 1.0 + params.noise * jax.random.normal(key)
        return self.observe(key, state, action, params), state, reward, state.time >= 5, {}

    def reset_env(self, key, params):
        state = EnvState(time=jnp.int32(0), action=jnp.float32(0))
        return self.observe(key, state, None, params), state

    def observe(self, key, state, action, params):
        return jnp.array([state.time / 5, 1.0])

    def observation_space(self, params):
        return spaces.Box(0.0, 1.0, (2,))

    def action_space(self, params=None):
        return spaces.Box(-2.0, 2.0, (1,))


class ToyDiscrete(ToyContinuous):
    """The same with three actions."""

    @property
    def num_actions(self):
        return 3

    def action_space(self, params=None):
        return spaces.Discrete(3)


NAMES = [toy.__name__ for toy in (ToyContinuous, ToyDiscrete)]
for toy in (ToyContinuous, ToyDiscrete):
    gymnax.register(toy.__name__, toy)
