"""Environments of known value, registered with gymnax under the names of their classes."""

import dataclasses
from typing import NamedTuple

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


class Masked(NamedTuple):
    obs: jax.Array
    action_mask: jax.Array


class ToyMasked(ToyDiscrete):
    """The same with a mask of valid actions, which only some scripts take."""

    def observe(self, key, state, action, params):
        return Masked(super().observe(key, state, action, params), jnp.ones(3, bool))


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


NAMES = [toy.__name__ for toy in (ToyContinuous, ToyDiscrete)]
TEAMS = ["toys_team:PlainTeam"]
for toy in (ToyContinuous, ToyDiscrete, ToyMasked, BlowsUpContinuous):
    gymnax.register(toy.__name__, toy)


KINDS = ("ends", "cut", "best")  # of a probe's episodes
ENDS, CUT, BEST = range(3)  # their places


@struct.dataclass
class ProbeState(environment.EnvState):
    kind: jax.Array  # its place in KINDS
    sign: jax.Array


@struct.dataclass
class ProbeParams(environment.EnvParams):
    max_steps_in_episode: int = 1000


@dataclasses.dataclass(frozen=True)
class ProbeContinuous(environment.Environment):
    """Episodes of known value. At the start each draws a sign and its kind, one of `kinds`.

    - ends: pays the sign in each of three steps, then terminates; shows the step
    - cut: pays the sign in each step, for ever
    - best: terminates after one step, which pays by the action; the best one depends on the sign

    Observes the kind as one of three, the sign and the step. What has terminated looks like an
    episode that is cut: there, the value is far from 0.
    """

    kinds: str = "ends cut best"

    @property
    def default_params(self):
        return ProbeParams()

    def observe(self, key, state, action, params):
        step = jnp.where(state.kind == ENDS, state.time, 0)
        return jnp.array([*jax.nn.one_hot(state.kind, 3), state.sign, step])

    def reset_env(self, key, params):
        kind_key, sign_key = jax.random.split(key)
        places = jnp.array([KINDS.index(kind) for kind in self.kinds.split()])
        state = ProbeState(
            time=jnp.int32(0),
            kind=jax.random.choice(kind_key, places),
            sign=jax.random.rademacher(sign_key, (), float),
        )
        return self.observe(key, state, None, params), state

    def pay(self, action, sign):
        """0 for the best action: 4 or 0 between -3 and 5, which is 0.75 or -0.25 in [-1, 1]."""
        return -0.1 * jnp.square(action[0] - 2.0 - 2.0 * sign)

    def step_env(self, key, state, action, params):
        paid = self.pay(action, state.sign)
        reward = jnp.where(state.kind == BEST, paid, state.sign)
        time = state.time + 1
        terminated = time >= jnp.array([3, 1_000_000, 1])[state.kind]
        kind = jnp.where(terminated, CUT, state.kind)
        state = state.replace(time=time, kind=kind)
        return self.observe(key, state, action, params), state, reward, terminated, {}

    def observation_space(self, params):
        return spaces.Box(-1000.0, 1000.0, (5,))

    def action_space(self, params=None):
        return spaces.Box(-3.0, 5.0, (1,))


class ProbeDiscrete(ProbeContinuous):
    def pay(self, action, sign):
        """1 for the best action, 2 or 0."""
        return (action == 1 + sign) * 1.0

    @property
    def num_actions(self):
        return 3

    def action_space(self, params=None):
        return spaces.Discrete(3)


class Recall(ProbeDiscrete):
    """Four steps.

    The sign is seen in the first alone; in the last the action that it tells is rewarded by 1.
    """

    def observation_space(self, params):
        return spaces.Box(-1.0, 4.0, (2,))

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
        return ProbeParams()

    def picture(self, sign):
        upper = jnp.arange(self.shape[0]) < self.shape[0] // 2
        bright = jnp.where(upper == (sign > 0), 255 if self.dtype == jnp.uint8 else 1, 0).astype(
            self.dtype
        )
        return jnp.broadcast_to(bright[:, None, None], self.shape)

    def reset_env(self, key, params):
        sign = jax.random.rademacher(key, (), float)
        state = ProbeState(time=jnp.int32(0), kind=jnp.int32(0), sign=sign)
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


for toy in (ProbeContinuous, ProbeDiscrete, Recall, Brightness):
    gymnax.register(toy.__name__, toy)
brax_envs.register_environment("ValueBrax", ValueBrax)
