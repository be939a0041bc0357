"""PQN's mathematics against NumPy."""

import functools

import jax
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.tiers import slow

import pqn

# --- mathematics ---

q_lambda_target = jit_quickly(pqn.q_lambda_target)


def mixture_of_n_step_returns(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """The lambda-return as it is defined: a weighted sum of n-step returns, the last of which gets
    what is left.
    """
    num_steps, num_envs = rewards.shape
    targets = np.zeros_like(rewards)
    for env in range(num_envs):
        for start in range(num_steps):
            rewards_so_far, weight_left = 0.0, 1.0
            for n, t in enumerate(range(start, num_steps)):
                rewards_so_far += gamma**n * rewards[t, env]
                bootstrap = 0.0 if terminated[t, env] else gamma ** (n + 1) * next_values[t, env]
                is_last = terminated[t, env] or truncated[t, env] or t == num_steps - 1
                weight = weight_left if is_last else weight_left * (1 - q_lambda)
                targets[start, env] += weight * (rewards_so_far + bootstrap)
                weight_left -= weight
                if is_last:
                    break
    return targets


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_targets_against_their_definition(q_lambda):
    rng = np.random.default_rng(0)
    rewards, next_values = rng.normal(size=(2, 23, 7))
    terminated, truncated = rng.random((2, 23, 7)) < 0.15
    assert (
        (terminated & truncated).any()
        and (terminated & ~truncated).any()
        and (truncated & ~terminated).any()
    )
    args = rewards, next_values, terminated, truncated, 0.9, q_lambda
    targets = q_lambda_target(*args)
    np.testing.assert_allclose(targets, mixture_of_n_step_returns(*args), rtol=1e-4, atol=1e-5)


def test_targets_by_hand():
    """Three steps, gamma 1/2, lambda 1/2; the second is truncated, then terminated."""
    rewards, next_values = np.array([[1.0], [2.0], [4.0]]), np.array([[8.0], [16.0], [32.0]])
    ends, never = np.array([[False], [True], [False]]), np.zeros((3, 1), bool)
    # The last: 4 + 16. The second: 2 + 8 where it is truncated, 2 where it terminated. The first: 1
    # + (that + 8) / 4.
    truncated = q_lambda_target(rewards, next_values, never, ends, 0.5, 0.5)
    np.testing.assert_allclose(np.asarray(truncated)[:, 0], [1 + (10 + 8) / 4, 10, 20])
    for also in (never, ends):
        terminated = q_lambda_target(rewards, next_values, ends, also, 0.5, 0.5)
        np.testing.assert_allclose(np.asarray(terminated)[:, 0], [1 + (2 + 8) / 4, 2, 20])


@functools.cache
def training(env_name):
    config = pqn.Config(
        env_name=env_name,
        total_timesteps=10 * 64,
        num_envs=4,
        num_steps=16,
        num_minibatches=2,
        epsilon_start=0.9,
        epsilon_finish=0.1,
        exploration_fraction=0.4,
        hidden_sizes=(8,),
    )
    return jit_quickly(pqn.make_train(config))(jax.random.key(0))["metrics"]


def test_epsilon_falls_in_the_first_updates():
    epsilon = training("FrozenLake-misc")["epsilon"]
    np.testing.assert_allclose(epsilon, [0.9, 0.7, 0.5, 0.3, *[0.1] * 6], rtol=1e-5)


@pytest.mark.parametrize("layer_norm", [True, slow(False)])
@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar"])
def test_network_against_numpy(name, layer_norm):
    config = pqn.Config(env_name=name, layer_norm=layer_norm, hidden_sizes=(7, 6))
    network = pqn.make_network(config, *pqn.make_env(config))
    rng = np.random.default_rng(0)
    x = rng.random((5, *network.obs_space.shape))
    params = jax.device_get(jit_quickly(network.init)(jax.random.key(0), x))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), params)
    dense = [
        params["params"][f"Dense_{i}"]
        for i in range(len([k for k in params["params"] if "Dense" in k]))
    ]
    q = jit_quickly(network.apply)(params, x)
    if x.ndim == 4:
        x = np.stack(
            [[x[:, i : i + 3, j : j + 3].reshape(5, -1) for j in range(8)] for i in range(8)]
        )
        x = x.transpose(2, 0, 1, 3)  # [5, 8, 8, 9 C]
    for i, layer in enumerate(dense[:-1]):
        x = x @ layer["kernel"] + layer["bias"]
        if layer_norm:
            norm = params["params"][f"LayerNorm_{i}"]
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * norm["scale"] + norm["bias"]
        x = np.maximum(x, 0.0)
        x = x.reshape(5, -1) if x.ndim == 4 else x
    np.testing.assert_allclose(q, x @ dense[-1]["kernel"] + dense[-1]["bias"], rtol=1e-3, atol=1e-4)


# --- training ---


@pytest.mark.parametrize("name", ["FrozenLake-misc", "Catch-bsuite", "Breakout-MinAtar"])
def test_observations_of_all_kinds(name):
    """A number, a matrix, a grid with channels."""
    assert np.isfinite(training(name)["td_loss"]).all()
