"""SAC and TD3 where the twins do not go: correlated noise, saturated actions."""

import math

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.probe import learn
from support.tiers import slow

import sac
import td3

# where the code is the same in both
alike = pytest.mark.parametrize("script", [sac, slow(td3)], ids=["sac", "td3"])


@alike
def test_a_correlation_above_1_counts_as_1(script):
    """A sweep may draw it."""
    assert script.correlated(2.0, 5.0, 1.5) == 2.0


def test_log_probability_of_saturated_actions():
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| where u is large, and its gradient is -2 sign(u)."""
    key = jax.random.key(0)
    mean = np.array([-1000.0, -30.0, 30.0, 1000.0])
    noise = np.asarray(jax.random.normal(key, (1,)))

    def log_prob(mean):
        policy = sac.squash(distrax.MultivariateNormalDiag(mean[None], jnp.ones(1)))
        return policy.sample_and_log_prob(seed=key)[1]

    value, gradient = jit_quickly(jax.vmap(jax.value_and_grad(log_prob)))(mean)
    log_gaussian = -0.5 * noise**2 - 0.5 * math.log(2 * math.pi)
    expected = log_gaussian - 2 * math.log(2) + 2 * abs(mean + noise)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * np.sign(mean), rtol=1e-5)


@pytest.mark.parametrize("ent_coef", [0.0, slow(1e-30)])
def test_entropy_coefficient_is_learned_from_0_too(ent_coef):
    """It is positive and it grows, as the entropy is below its target."""
    settings = dict(ent_coef=ent_coef, learn_ent_coef=True, target_entropy=0.9)
    metrics = learn("sac", 20, kinds="best", **settings).metrics
    assert all(
        np.isfinite(metrics[name]).all()
        for name in ("td_loss", "q_value", "policy_loss", "entropy", "ent_coef")
    )
    first, last = metrics["ent_coef"][0], metrics["ent_coef"][-1]
    assert 0 < first < 2e-4 and last > 1.1 * first


@alike
@pytest.mark.parametrize("learning_starts, warmup_timesteps", [(0, 0), (1, 6), (6, 6), (7, 12)])
def test_steps_of_the_warm_up(script, learning_starts, warmup_timesteps):
    config = script.Config(
        learning_starts=learning_starts, num_envs=2, num_steps=3, total_timesteps=27
    )
    assert config.warmup_timesteps == warmup_timesteps
    assert config.num_updates == (27 - warmup_timesteps) // 6
