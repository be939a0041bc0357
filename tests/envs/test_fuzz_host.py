"""Random spaces, dtypes, bounds and time limits of Gymnasium.

Either observations, actions, rewards and ends reach the network and the environment as a plain loop
computes them, or the environment is refused in one line that names the field. 120 examples in
`make test-all`, few in `make test`.
"""

import functools
import itertools
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz_gymnax import in_a_jit
from test_host import closed, seeds_of  # noqa: F401  a fixture

gymnasium = pytest.importorskip("gymnasium")

import toys_gymnasium as toys
from gymnasium import spaces

import ppo
import ppo_continuous
from onejit.envs import host

EXAMPLES = pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.slow)])
STEPS = 7
ROWS = 2
NUMBERS = itertools.count()

FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
WHOLE = st.sampled_from([np.int8, np.int32, np.int64, np.uint8])
SIZES = st.integers(1, 4)


@st.composite
def boxes(draw, dtypes, shapes):
    dtype = np.dtype(draw(dtypes))
    shape = tuple(draw(shapes))
    if dtype == np.uint8:
        return spaces.Box(0, draw(st.sampled_from([1, 255])), shape, dtype)
    if dtype.kind == "i":
        return spaces.Box(-3, 100, shape, dtype)
    low = draw(st.floats(-100, 100))
    width = draw(st.sampled_from([0.0, 1e-3, 0.7, 1 / 3, 100.0, np.inf]))
    with warnings.catch_warnings(action="ignore"):  # bounds are rounded to the dtype
        return spaces.Box(low, low + width, shape, dtype)


def leaves(shapes):
    return st.one_of(
        boxes(st.one_of(FLOATS, WHOLE), shapes),
        st.builds(spaces.Discrete, st.integers(1, 6), start=st.integers(-3, 3)),
        st.builds(spaces.MultiBinary, SIZES),
        st.lists(st.integers(1, 5), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    )


def dictionaries(inner):
    return st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict)


def with_text(space):
    if isinstance(space, spaces.Dict):
        space["mission"] = spaces.Text(5)
    return space


VECTORS = st.lists(SIZES, min_size=1, max_size=2)  # and matrices
IMAGES = st.sampled_from([(6, 6, 3), (5, 4, 2), (2, 6, 6), (1, 5, 5), (4, 4, 9)])
GOOD = leaves(st.one_of(VECTORS, IMAGES))
GOOD = st.one_of(GOOD, dictionaries(st.one_of(GOOD, dictionaries(GOOD))).map(with_text))
ANY_LEAF = st.one_of(
    leaves(st.one_of(st.lists(SIZES, max_size=4), IMAGES)),
    st.sampled_from(
        [
            spaces.Text(4),
            spaces.Sequence(spaces.Discrete(2)),
            spaces.Graph(spaces.Box(-1, 1, (2,)), None),
            spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
            spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
        ]
    ),
)
ANY = st.one_of(ANY_LEAF, dictionaries(ANY_LEAF))
DISCRETE = st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3))
CONTINUOUS = boxes(FLOATS, st.lists(SIZES, min_size=1, max_size=2))
LIMITS = st.one_of(st.none(), st.integers(1, 5))


# --- the plain loop ---


def arrays_of(space, obs) -> list:
    """The `(space, array)` of an observation, dictionaries taken apart."""
    if not isinstance(space, spaces.Dict):
        return [(space, np.asarray(obs))]
    parts = []
    for key in space.spaces:
        if not isinstance(space[key], spaces.Text):
            parts += arrays_of(space[key], obs[key])
    return parts


def numbers_of(space, array):
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and (space.high == 255).all():
        return np.float32(array) / np.float32(255)
    return np.float32(array - getattr(space, "start", 0))


def for_the_network(space, obs, one_hot):
    """What a network takes for an observation, as a vector."""
    parts = arrays_of(space, obs)
    if len(parts) > 1:
        return np.concatenate([numbers_of(*part).ravel() for part in parts])
    space, array = parts[0]
    if isinstance(space, spaces.Discrete) and one_hot:
        return np.eye(space.n, dtype=np.float32)[array - space.start]
    if array.ndim == 3 and array.shape[0] < array.shape[1] == array.shape[2]:
        array = array.transpose(1, 2, 0)
    return numbers_of(space, array).ravel()


def for_the_environment(space, action):
    if isinstance(space, spaces.Discrete):
        return action + space.start
    low = space.low.astype(float)
    action = low + (np.clip(action.astype(float), -1, 1) + 1) / 2 * (space.high.astype(float) - low)
    return np.clip(action.astype(space.dtype), space.low, space.high)


def in_a_loop(name, seed, limit, actions, one_hot):
    """`(obs, next_obs, reward, terminated, truncated)` of each step, and the environment."""
    limit = {} if limit is None else {"max_episode_steps": limit}
    env = gymnasium.make(name, **limit)
    space = env.observation_space
    obs, _ = env.reset(seed=seed)
    steps = []
    for action in actions:
        action = for_the_environment(env.action_space, action)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        inputs = [for_the_network(space, x, one_hot) for x in (obs, next_obs)]
        steps.append((*inputs, reward, terminated, truncated))
        obs = next_obs
        if terminated or truncated:
            obs, _ = env.reset()
    return [np.stack(column) for column in zip(*steps, strict=True)], env.unwrapped


def check(space, action_space, length, registered_limit, limit, seed) -> bool:
    """Compare the two; False if the environment is refused."""
    name = f"Fuzz{next(NUMBERS)}-v0"
    make = functools.partial(toys.Toy, space, action_space, length)
    gymnasium.register(name, entry_point=make, max_episode_steps=registered_limit)
    from onejit.envs.gymnasium import register_ids

    register_ids(name)
    toys.Toy.made.clear()
    script = ppo_continuous if isinstance(action_space, spaces.Box) else ppo
    params = {} if limit is None else {"max_steps_in_episode": limit}
    config = script.Config(env_name=name, env_params=params)
    random = np.random.default_rng(seed)
    if script is ppo:
        actions = random.integers(0, getattr(action_space, "n", 2), (STEPS, ROWS))
    else:
        shape = (STEPS, ROWS, int(np.prod(action_space.shape)))
        actions = random.uniform(-1.3, 1.3, shape).astype(np.float32)
    with warnings.catch_warnings(action="ignore"):  # Gymnasium finds some of the spaces odd
        try:
            keys = jax.random.split(jax.random.key(seed), ROWS)
            step_keys = jax.numpy.broadcast_to(keys, (STEPS, ROWS))
            found = in_a_jit(script, config, keys, step_keys, actions)
        except ValueError as error:
            assert str(error).startswith(("env_name", "env_params")), error
            assert "\n" not in str(error)
            return False
        seeds = seeds_of(keys)
        rows = toys.Toy.made[-ROWS:]
        for row in range(ROWS):
            action_shape = () if script is ppo else action_space.shape
            own_actions = actions[:, row].reshape(STEPS, *action_shape)
            expected, env = in_a_loop(name, seeds[row], limit, own_actions, script is ppo)
            for mine, theirs in zip(found, expected, strict=True):  # XLA multiplies by 1 / 255
                np.testing.assert_allclose(np.asarray(mine)[:, row], theirs, rtol=1e-6)
            taken = np.array(rows[row].actions)
            assert taken.dtype == np.array(env.actions).dtype
            np.testing.assert_allclose(taken, np.array(env.actions), rtol=2e-3, atol=1e-4)
    host.close_all()
    return True


@EXAMPLES
def test_what_has_to_be_taken(examples):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(GOOD, st.one_of(DISCRETE, CONTINUOUS), st.integers(1, 5), LIMITS, LIMITS)
    def run(space, action_space, length, registered_limit, limit):
        taken = check(space, action_space, length, registered_limit, limit, seed=length)
        is_bounded = isinstance(action_space, spaces.Discrete) or action_space.is_bounded()
        parts = [part for part, _ in arrays_of(space, space.sample())]
        is_state = len(parts) == 1 and isinstance(parts[0], spaces.Discrete)
        if is_state and isinstance(action_space, spaces.Box):  # is for discrete actions alone
            assert not taken
        else:
            assert taken == is_bounded

    run()


@EXAMPLES
def test_what_may_be_refused(examples):
    kinds = [
        spaces.MultiBinary(2),
        spaces.MultiDiscrete([2, 3]),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Box(0, 3, (2,), np.int64),
        spaces.Box(-1, 1, ()),
    ]

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(ANY, st.one_of(DISCRETE, CONTINUOUS, st.sampled_from(kinds)), st.integers(1, 5))
    def run(space, action_space, length):
        check(space, action_space, length, registered_limit=None, limit=None, seed=length)

    run()
