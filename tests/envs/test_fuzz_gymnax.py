"""Random spaces, dtypes, bounds and time limits of gymnax.

Either observations, actions, rewards and ends reach the network and the environment as a plain loop
computes them, and a training can be traced, or the environment is refused in one line that names
the field. 80 examples in `make test-all`, 4 in `make test`.
"""

import itertools
import re

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment, spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.networks import actor_input

import ppo
import ppo_continuous

EXAMPLES = pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.slow)])
STEPS = 7
ROWS = 2
NUMBERS = itertools.count()
SETTINGS = {"deadline": None, "database": None, "derandomize": True}


@struct.dataclass
class State(environment.EnvState):
    start: jax.Array  # differs between episodes
    total: jax.Array  # of all actions


@struct.dataclass
class Params(environment.EnvParams):
    bonus: float = 0.25


class Toy(environment.Environment):
    """Terminates after `length` steps. Observations and rewards tell everything that happened."""

    def __init__(self, obs_space, own_action_space, length, limit):
        self.obs_space = obs_space
        self.own_action_space = own_action_space
        self.length = length
        self.limit = limit

    @property
    def default_params(self):
        return Params() if self.limit is None else Params(max_steps_in_episode=self.limit)

    def reset_env(self, key, params):
        start = jax.random.randint(key, (), 0, 90)
        state = State(time=jnp.int32(0), start=start, total=jnp.float32(0.0))
        return self.observe(key, state, None, params), state

    def step_env(self, key, state, action, params):
        action = jnp.asarray(action, jnp.float32).ravel()
        weighted = (action * jnp.arange(1, action.size + 1)).sum()
        state = state.replace(time=state.time + 1, total=state.total + weighted)
        reward = weighted + params.bonus + 0.5 * jax.random.uniform(key)
        terminated = state.time >= self.length
        return self.observe(key, state, action, params), state, reward, terminated, {}

    def observe(self, key, state, action, params):
        number = state.start + 3 * state.time
        if isinstance(self.obs_space, spaces.Discrete):
            return (number % self.obs_space.n).astype(jnp.int32)
        if not isinstance(self.obs_space, spaces.Box):
            return {"a": number.astype(jnp.float32)}
        places = jnp.arange(np.prod(self.obs_space.shape, dtype=int)).reshape(self.obs_space.shape)
        numbers = number + places
        if self.obs_space.dtype == jnp.bool_:
            return numbers % 2 == 0
        if jnp.issubdtype(self.obs_space.dtype, jnp.floating):
            numbers = numbers / 7.0 + jnp.clip(state.total, -50.0, 50.0)
        return (numbers % 120).astype(self.obs_space.dtype)

    def observation_space(self, params):
        return self.obs_space

    def action_space(self, params=None):
        return self.own_action_space


SIZES = st.integers(1, 4)
SHAPES = st.one_of(
    st.lists(SIZES, min_size=1, max_size=2), st.sampled_from([(4, 5, 3), (3, 3, 1), (2, 6, 2)])
)
DTYPES = st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint8])
OBSERVATIONS = st.one_of(
    st.builds(lambda shape, dtype: spaces.Box(-120, 255, tuple(shape), dtype), SHAPES, DTYPES),
    st.builds(spaces.Discrete, st.integers(1, 6)),
)
OTHER_OBSERVATIONS = st.one_of(
    st.builds(lambda dtype: spaces.Box(0, 1, (), dtype), DTYPES),
    st.just(spaces.Box(0, 1, (2, 2, 2, 2), jnp.float32)),
    st.just(spaces.Box(0, 1, (3,), jnp.bool_)),
    st.just(spaces.Dict({"a": spaces.Box(0, 1, (), jnp.float32)})),
    st.just(spaces.Tuple([spaces.Discrete(2)])),
)
DISCRETE = st.builds(spaces.Discrete, st.integers(1, 5))


@st.composite
def boxes(draw, shapes, widths):
    shape = tuple(draw(shapes))
    low = draw(st.floats(-100, 100, width=32))
    width = draw(st.sampled_from(widths))
    per_entry = draw(st.booleans())
    low = jnp.full(shape, low) if per_entry else low
    return spaces.Box(low, low + width, shape, jnp.float32)


CONTINUOUS = boxes(st.lists(SIZES, min_size=1, max_size=2), [1e-3, 0.7, 1 / 3, 100.0])
OTHER_ACTIONS = st.one_of(
    boxes(st.lists(SIZES, max_size=2), [0.0, 1.0, 1e38, np.inf]),
    st.just(spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])),
    st.just(spaces.Dict({"a": spaces.Discrete(2)})),
)
LIMITS = st.one_of(st.none(), st.integers(1, 5))


# --- the plain loop ---


def for_the_network(space, obs):
    if isinstance(space, spaces.Discrete):
        return np.eye(space.n, dtype=np.float32)[int(obs)]
    obs = np.asarray(obs)
    if obs.dtype == np.uint8:
        return (obs.astype(np.float32) / np.float32(255)).ravel()
    return obs.astype(np.float32).ravel()


def for_the_environment(space, action):
    if isinstance(space, spaces.Discrete):
        return action
    low = np.broadcast_to(np.asarray(space.low, np.float64), space.shape)
    high = np.broadcast_to(np.asarray(space.high, np.float64), space.shape)
    action = np.clip(action.astype(np.float64), -1.0, 1.0).reshape(space.shape)
    return np.clip(low + (action + 1.0) / 2.0 * (high - low), low, high)


def in_a_loop(env, limit, key, step_keys, actions):
    """`(obs, next_obs, reward, terminated, truncated)` of each step [STEPS, ...]."""
    params = env.default_params.replace(max_steps_in_episode=limit)
    obs, state = env.reset_env(key, params)
    steps = []
    time = 0
    for step_key, action in zip(step_keys, actions, strict=True):
        own_key, reset_key = jax.random.split(step_key)
        action = for_the_environment(env.own_action_space, action)
        next_obs, state, reward, terminated, _ = env.step_env(own_key, state, action, params)
        time += 1
        truncated = time >= limit
        inputs = [for_the_network(env.obs_space, x) for x in (obs, next_obs)]
        steps.append((*inputs, float(reward), bool(terminated), truncated))
        obs = next_obs
        if terminated or truncated:
            obs, state = env.reset_env(reset_key, params)
            time = 0
    return [np.stack(column) for column in zip(*steps, strict=True)]


def in_a_jit(script, config, keys, step_keys, actions):
    """The same by a script's environment and network input, for all rows [STEPS, ROWS, ...]."""
    env, params = script.make_env(config)
    preprocess = actor_input(script, config)

    def step(carry, inputs):
        obs, state = carry
        step_keys, action = inputs
        next_obs, state, reward, terminated, truncated, info = jax.vmap(
            env.step, in_axes=(0, 0, 0, None)
        )(step_keys, state, action, params)
        final = preprocess(info["final_observation"])
        return (next_obs, state), (preprocess(obs), final, reward, terminated, truncated)

    def run(keys, step_keys, actions):
        carry = jax.vmap(env.reset, in_axes=(0, None))(keys, params)
        return jax.lax.scan(step, carry, (step_keys, actions))[1]

    return jax.jit(run)(keys, step_keys, actions)


def check(obs_space, action_space, length, own_limit, limit) -> bool:
    """Compare the two; False if the environment is refused."""
    name = f"Fuzz{next(NUMBERS)}"
    env = Toy(obs_space, action_space, length, own_limit)
    gymnax.register(name, lambda: env)
    is_discrete = not isinstance(action_space, spaces.Box)
    script = ppo if is_discrete else ppo_continuous
    params = {} if limit is None else {"max_steps_in_episode": limit}
    config = script.Config(env_name=name, env_params=params)
    random = np.random.default_rng(length)
    if is_discrete:
        actions = random.integers(0, getattr(action_space, "n", 2), (STEPS, ROWS))
    else:
        shape = (STEPS, ROWS, int(np.prod(action_space.shape)))
        actions = random.uniform(-1.3, 1.3, shape).astype(np.float32)
    keys = jax.random.split(jax.random.key(length), ROWS)
    step_keys = jax.random.split(jax.random.key(length + 1), (STEPS, ROWS))
    try:
        found = in_a_jit(script, config, keys, step_keys, actions)
        init, update = script.make_learner(config)
        jax.eval_shape(update, jax.eval_shape(init, jax.random.key(0)))
    except ValueError as error:
        assert re.match(r"(env_name|env_params|normalize_obs|convolutions)\b", str(error)), error
        assert "\n" not in str(error)
        return False
    for row in range(ROWS):
        expected = in_a_loop(env, limit or own_limit, keys[row], step_keys[:, row], actions[:, row])
        *numbers, terminated, truncated = [np.asarray(x)[:, row] for x in found]
        for mine, theirs in zip(numbers, expected[:3], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=2e-2)
        np.testing.assert_array_equal(terminated, expected[3])
        np.testing.assert_array_equal(truncated, expected[4])
    return True


@EXAMPLES
def test_what_has_to_be_taken(examples):
    @settings(max_examples=examples, phases=[Phase.generate], **SETTINGS)
    @given(OBSERVATIONS, st.one_of(DISCRETE, CONTINUOUS), st.integers(1, 5), LIMITS, LIMITS)
    def run(obs_space, action_space, length, own_limit, limit):
        is_number = isinstance(obs_space, spaces.Discrete)
        taken = check(obs_space, action_space, length, own_limit, limit)
        without_limit = limit is None and own_limit in (None, 1)
        continuous_numbers = is_number and isinstance(action_space, spaces.Box)
        is_image = isinstance(action_space, spaces.Discrete) and len(obs_space.shape) == 3
        too_small = is_image and min(obs_space.shape[:2]) < 3  # for a convolution
        assert taken != (without_limit or continuous_numbers or too_small)

    run()


@EXAMPLES
def test_what_may_be_refused(examples):
    observations = st.one_of(OBSERVATIONS, OTHER_OBSERVATIONS)
    actions = st.one_of(DISCRETE, CONTINUOUS, OTHER_ACTIONS)

    @settings(max_examples=examples, phases=[Phase.generate], **SETTINGS)
    @given(observations, actions, st.integers(1, 5))
    def run(obs_space, action_space, length):
        check(obs_space, action_space, length, own_limit=5, limit=None)

    run()
