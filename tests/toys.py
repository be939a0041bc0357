"""Environments of known value, registered with gymnax under the names of their classes."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
from brax import envs as brax_envs
from brax.envs.base import Env, State
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


class BlowsUpContinuous(ToyContinuous):
    """Takes the root of -1 in the third step of a few episodes, for a reward or an observation."""

    def __init__(self, what: str = "reward", probability: float = 0.1):
        self.what = what
        self.probability = probability

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        is_bad = (state.time == 3) & jax.random.bernoulli(key, self.probability)
        distance = jnp.where(is_bad, -1.0, 1.0)
        if self.what == "reward":
            reward = reward * jnp.sqrt(distance)
        else:
            obs = obs * jnp.sqrt(distance)
        return obs, state, reward, terminated, info


class BlowsUpDiscrete(BlowsUpContinuous, ToyDiscrete):
    pass


NAMES = [toy.__name__ for toy in (ToyContinuous, ToyDiscrete)]
TEAMS = ["toys_team:PlainTeam"]
for toy in (ToyContinuous, ToyDiscrete, BlowsUpContinuous, BlowsUpDiscrete):
    gymnax.register(toy.__name__, toy)


@struct.dataclass
class ValueState(environment.EnvState):
    sign: jax.Array


@struct.dataclass
class ValueParams(environment.EnvParams):
    max_steps_in_episode: int = 1000


@dataclasses.dataclass(frozen=True)
class ValueContinuous(environment.Environment):
    """Its arguments tell what an episode is.

    Observes a sign drawn at the start, and 1 or the step.
    """

    length: int = 1_000_000  # steps until it terminates
    # "one"; "sign", what is observed; "last", 1 in the last step; "action", highest at 4 or at 2
    reward: str = "one"
    shows_time: bool = False

    @property
    def default_params(self):
        return ValueParams()

    def observe(self, key, state, action, params):
        return jnp.stack([state.sign, state.time * 1.0 if self.shows_time else jnp.ones(())])

    def reset_env(self, key, params):
        state = ValueState(time=jnp.zeros((), int), sign=jax.random.rademacher(key, (), float))
        return self.observe(key, state, None, params), state

    def reward_of(self, action):
        return -jnp.square(action[0] - 4.0)

    def step_env(self, key, state, action, params):
        terminated = state.time + 1 >= self.length
        reward = {"one": jnp.ones(()), "sign": state.sign, "last": terminated * 1.0}
        reward = self.reward_of(action) if self.reward == "action" else reward[self.reward]
        state = state.replace(time=state.time + 1)
        return self.observe(key, state, action, params), state, reward, terminated, {}

    def observation_space(self, params):
        return spaces.Box(-1000.0, 1000.0, (2,))

    def action_space(self, params=None):
        return spaces.Box(-3.0, 5.0, (1,))


class ValueDiscrete(ValueContinuous):
    def reward_of(self, action):
        return (action == 2) * 1.0

    @property
    def num_actions(self):
        return 3

    def action_space(self, params=None):
        return spaces.Discrete(3)


class Recall(ValueDiscrete):
    """Four steps.

    The sign is seen in the first alone; in the last the action that it tells is rewarded by 1.
    """

    def observe(self, key, state, action, params):
        return jnp.stack([jnp.where(state.time == 0, state.sign, 0.0), state.time * 1.0])

    def step_env(self, key, state, action, params):
        terminated = state.time + 1 >= 4
        reward = (terminated & (action == (state.sign > 0))) * 1.0
        state = state.replace(time=state.time + 1)
        return self.observe(key, state, action, params), state, reward, terminated, {}


class ValueBrax(Env):
    """A reward of 1 in each step; done after `length` steps.

    Observes a number drawn at the start, and the step.

    The observation and the reward of the step `nan_after` are not finite, as where physics blew up.
    """

    def __init__(self, length=1_000_000, nan_after=1_000_000, backend=""):
        self.length, self.nan_after = length, nan_after

    def reset(self, rng):
        obs = jnp.stack([jax.random.uniform(rng), jnp.zeros(())])
        return State(None, obs, jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        obs = state.obs.at[1].add(1.0)
        blown_up = jnp.where(obs[1] >= self.nan_after, jnp.nan, 0.0)
        return state.replace(
            obs=obs + blown_up, reward=1.0 + blown_up, done=(obs[1] >= self.length) * 1.0
        )

    observation_size, action_size, backend = 2, 1, "toy"


class Brightness(environment.Environment):
    """Episodes of one step.

    Half of a picture is bright: the upper one asks for action 1, the lower one for action 0.

    With `dtype` float32 pictures are in [0, 1].
    """

    def __init__(self, size: int = 84, channels: int = 1, dtype: str = "uint8"):
        self.shape, self.dtype = (size, size, channels), jnp.dtype(dtype)

    @property
    def default_params(self):
        return ValueParams()

    def picture(self, sign):
        upper = jnp.arange(self.shape[0]) < self.shape[0] // 2
        bright = jnp.where(upper == (sign > 0), 255 if self.dtype == jnp.uint8 else 1, 0).astype(
            self.dtype
        )
        return jnp.broadcast_to(bright[:, None, None], self.shape)

    def reset_env(self, key, params):
        state = ValueState(time=jnp.zeros((), int), sign=jax.random.rademacher(key, (), float))
        return self.picture(state.sign), state

    def step_env(self, key, state, action, params):
        reward = (action == (state.sign > 0)) * 1.0
        return (
            self.picture(state.sign),
            state.replace(time=state.time + 1),
            reward,
            jnp.ones((), bool),
            {},
        )

    def observation_space(self, params):
        return spaces.Box(0, 255 if self.dtype == jnp.uint8 else 1, self.shape, self.dtype)

    @property
    def num_actions(self):
        return 2

    def action_space(self, params=None):
        return spaces.Discrete(2)


for toy in (ValueContinuous, ValueDiscrete, Recall, Brightness):
    gymnax.register(toy.__name__, toy)
brax_envs.register_environment("ValueBrax", ValueBrax)
