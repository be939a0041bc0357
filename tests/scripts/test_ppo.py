"""The mathematics of the PPO scripts against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo as ppo_discrete
import ppo_continuous
import pqn


@pytest.mark.parametrize("script", [ppo_discrete, pqn], ids=lambda script: script.__name__)
@pytest.mark.parametrize("size", [1, 5, 512, 2**17])
def test_random_order(script, size):
    key = jax.random.key(0)
    order = script.random_order(key, size)
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size <= 512:  # no random bits are equal
        np.testing.assert_array_equal(order, jax.random.bits(key, (size,)).argsort())


@pytest.fixture(params=[ppo_discrete, ppo_continuous], ids=lambda script: script.__name__)
def ppo(request):
    return request.param


# --- mathematics ---


def random_rollout(steps=13, num_envs=6):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, steps, num_envs))
    terminated, truncated = rng.random((2, steps, num_envs)) < 0.2
    assert (terminated & truncated).any() and (~terminated & truncated).any()
    return rewards, values, next_values, terminated, truncated


def test_gae_against_its_definition(ppo):
    gamma, gae_lambda = 0.9, 0.8
    rewards, values, next_values, terminated, truncated = random_rollout()
    expected = np.zeros_like(rewards)
    for t, n in np.ndindex(rewards.shape):
        for k in range(t, len(rewards)):
            delta = (
                rewards[k, n] + gamma * next_values[k, n] * (not terminated[k, n]) - values[k, n]
            )
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if terminated[k, n] or truncated[k, n]:
                break
    advantages, targets = ppo.gae(
        rewards, values, next_values, terminated, truncated, gamma, gae_lambda
    )
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets, expected + values, rtol=1e-4, atol=1e-5)


def test_statistics_of_batches_are_those_of_all_samples(ppo):
    rng = np.random.default_rng(0)
    batches = [
        rng.normal(loc=50 * i, scale=1 + i, size=(size, 3))
        for i, size in enumerate((7, 1, 300, 12))
    ]
    statistics = ppo.init_mean_std((3,))
    for batch in batches:
        statistics = ppo.update_mean_std(statistics, jnp.asarray(batch))
    samples = np.concatenate(batches)
    np.testing.assert_allclose(statistics.mean, samples.mean(0), rtol=1e-3)
    np.testing.assert_allclose(statistics.var, samples.var(0), rtol=1e-3)
    normalized = np.clip((samples - samples.mean(0)) / samples.std(0), -10, 10)
    np.testing.assert_allclose(
        ppo.normalize(statistics, jnp.asarray(samples)), normalized, rtol=1e-2, atol=1e-2
    )


def test_policy_loss_by_hand(ppo):
    log_prob = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantage = jnp.array([3.0, 1.0, 1.0, 3.0])  # normalized: 1, -1, -1, 1
    loss, metrics = ppo.policy_loss(log_prob, jnp.zeros(4), advantage, 0.2)
    np.testing.assert_allclose(loss, -np.mean([1.2, -0.8, -1.5, 0.5]), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["approx_kl"], np.mean([0.5, -0.5]) - np.log([1.5, 0.5]).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(metrics["clip_fraction"], 1.0)


def test_value_loss_by_hand(ppo):
    value, old_value, target = jnp.array([1.0, 1.0]), jnp.array([0.0, 0.9]), jnp.array([2.0, 2.0])
    np.testing.assert_allclose(ppo.value_loss(value, old_value, target, jnp.inf), 0.5, rtol=1e-6)
    np.testing.assert_allclose(
        ppo.value_loss(value, old_value, target, 0.2), 0.5 * (1.8**2 + 1.0) / 2, rtol=1e-6
    )


# --- the rollout and its statistics ---


@pytest.mark.parametrize("name", ["CartPole-v1", "FourRooms-misc", "MetaMaze-misc"])
def test_environments_are_made_inside_a_jit(name):
    """As a sweep does it, where floats of the config are traced: two of them look at numbers of
    their own when made.
    """
    config = ppo_discrete.Config(env_name=name, total_timesteps=512)
    shapes = jax.eval_shape(
        lambda lr: ppo_discrete.make_train(dataclasses.replace(config, lr=lr))(jax.random.key(0)),
        1e-3,
    )
    assert shapes["metrics"]["value_loss"].shape == (1,)
