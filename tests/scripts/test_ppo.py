"""PPO where its twin does not go: large batches, and environments made inside a jit."""

import dataclasses

import jax
import numpy as np
import pytest

import ppo
import pqn


@pytest.mark.parametrize("size", [1, 5, 512, 2**17])
def test_random_order(size):
    key = jax.random.key(0)
    order = pqn.random_order(key, np.int64(size))  # from a loop over NumPy numbers
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size <= 512:  # no random bits are equal
        np.testing.assert_array_equal(order, jax.random.bits(key, (size,)).argsort())


@pytest.mark.parametrize("name", ["FourRooms-misc", "MetaMaze-misc"])
def test_environments_are_made_inside_a_jit(name):
    """As a sweep does it, where floats of the config are traced. They look at numbers of their own
    when made.
    """
    config = ppo.Config(env_name=name, total_timesteps=512)
    shapes = jax.eval_shape(
        lambda lr: ppo.make_train(dataclasses.replace(config, lr=lr))(jax.random.key(0)), 1e-3
    )
    assert shapes["metrics"]["value_loss"].shape == (1,)
