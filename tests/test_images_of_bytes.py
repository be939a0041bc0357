"""Images of bytes in the scripts for continuous actions: trained as the same images of floats."""

import importlib

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from gymnax.environments import spaces
from support.small import small_config
from support.tiers import slow


class Brightness(toys.ValueContinuous):
    """A picture of one brightness, which is the best action. Episodes take 3 steps."""

    def __init__(self, dtype: str = "uint8", rank: int = 3):
        super().__init__(length=3)
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


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        slow("sac", 3),
        slow("sac", 2),
        slow("td3", 3),
        slow("reppo", 3),
        slow("ppo_continuous", 3),
        ("ppo_continuous", 2),
        slow("dpo_continuous", 3),
    ],
)
def test_bytes_train_as_floats_do(name, rank):
    script = importlib.import_module(name)
    agents = []
    for dtype in ("uint8", "float32"):
        config = small_config(
            script,
            num_updates=2,
            env_name="BrightnessContinuous",
            env_params={"dtype": dtype, "rank": rank},
        )
        agents.append(jax.jit(script.make_train(config))(jax.random.key(0))["runner_state"].agent)
    of_bytes, of_floats = (jax.tree_util.tree_leaves_with_path(agent) for agent in agents)
    for (path, mine), (_, theirs) in zip(of_bytes, of_floats, strict=True):
        if "obs_statistics" not in jax.tree_util.keystr(path):  # of the bytes themselves
            np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-3, err_msg=str(path))
