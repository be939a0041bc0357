"""Bytes in scripts: images are divided by 255, other bytes are numbers."""

import importlib
import types

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from gymnax.environments import spaces
from support.small import field_names, small_config

from onejit.engine.evaluation import policy_of


class Brightness(toys.ProbeContinuous):
    """A picture of one brightness, which is the best action. Episodes take 3 steps."""

    def __init__(self, dtype: str = "uint8", rank: int = 3):
        super().__init__(kinds="ends")
        object.__setattr__(self, "dtype", jnp.dtype(dtype))
        object.__setattr__(self, "shape", (3, 3, 1)[:rank])

    def observe(self, key, state, action, params):
        brightness = jnp.round(127.5 + 127.5 * jnp.sin(state.sign * (1.0 + state.time)))
        obs = jnp.broadcast_to(brightness, self.shape)
        return obs.astype(jnp.uint8) if self.dtype == jnp.uint8 else obs / 255.0

    def step_env(self, key, state, action, params):
        brightness = self.observe(key, state, None, params).ravel()[0]
        brightness = brightness / 255.0 if self.dtype == jnp.uint8 else brightness
        _, next_state, _, terminated, info = super().step_env(key, state, action, params)
        reward = -jnp.square(action[0] - brightness)
        return self.observe(key, next_state, None, params), next_state, reward, terminated, info

    def observation_space(self, params):
        return spaces.Box(0, 255 if self.dtype == jnp.uint8 else 1, self.shape, self.dtype)


@pytest.fixture(autouse=True)
def registered():
    if "BrightnessContinuous" not in gymnax.registered_envs:
        gymnax.register("BrightnessContinuous", Brightness)


def make_config(script, dtype, rank):
    more = {"normalize_obs": False} if "normalize_obs" in field_names(script) else {}
    params = {"dtype": dtype, "rank": rank}
    return small_config(
        script, num_updates=2, env_name="BrightnessContinuous", env_params=params, **more
    )


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["ppo_continuous", "dpo_continuous", "reppo", "sac", "td3"])
def test_bytes_are_acted_on_as_floats(name, rank):
    script = importlib.import_module(name)
    random = np.random.default_rng(0)
    obs = random.integers(0, 256, (3, 3, 1)[:rank], np.uint8)
    actions = []
    for dtype, x in (("uint8", obs), ("float32", np.float32(obs / 255)), ("float32", obs * 1.0)):
        config = make_config(script, dtype, rank)
        init, _ = script.make_learner(config)
        shapes = jax.eval_shape(init, jax.random.key(0)).agent
        random = np.random.default_rng(1)
        agent = jax.tree.map(lambda leaf: random.normal(0, 0.3, leaf.shape), shapes)  # noqa: B023
        start, act = policy_of(script, config)
        actions.append(act(agent, start(), jnp.asarray(x.ravel()))[0])
    np.testing.assert_allclose(actions[0], actions[1], rtol=1e-4, atol=1e-5)
    assert np.abs(actions[0] - actions[2]).max() > 1e-3


CONTINUOUS = ["ppo_continuous", "dpo_continuous", "reppo", "sac", "td3", "crossq", "flashsac"]
DISCRETE = ["ppo", "ppo_rnn", "evolve_objective", "dqn", "pqn", "pqn_rnn", "apex_dqn", "rainbow"]


@pytest.mark.parametrize("name", [*CONTINUOUS, *DISCRETE])
def test_bytes_are_brightness_if_their_space_goes_up_to_255(name):
    """Others are numbers: a one-hot vector of bytes is cast."""
    preprocess = importlib.import_module(name).preprocess
    obs = np.array([0, 1, 1], np.uint8)
    for high, expected in ((255, obs / 255), (np.full(3, 255), obs / 255), (1, obs), (254, obs)):
        space = spaces.Box(0, high, (3,), jnp.uint8)
        np.testing.assert_allclose(preprocess(jnp.asarray(obs), space), expected, rtol=1e-6)
    space = types.SimpleNamespace(high=255)
    np.testing.assert_array_equal(preprocess(jnp.float32([255.0]), space), [255.0])
