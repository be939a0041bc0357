"""SAC and TD3 where the twins do not go: correlated noise, saturated actions, trainings."""

import functools
import math
import types
from pathlib import Path

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
from onejit.engine.evaluation import greedy_returns
from onejit.run.directory import read_config

both = pytest.mark.parametrize("script", [sac, td3], ids=["sac", "td3"])
alike = pytest.mark.parametrize(
    "script", [sac, slow(td3)], ids=["sac", "td3"]
)  # where the code is the same in both


@functools.cache
def noise_of(script):
    @jit_quickly
    def noise(correlation):
        white = jax.random.normal(jax.random.key(0), (400, 2000))

        def step(noise, white):
            noise = script.correlated(noise, white, correlation)
            return noise, noise

        return jax.lax.scan(step, white[0], white[1:])[1]

    return noise


@alike
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95, 1.5])
def test_noise_has_unit_variance_and_the_correlation(script, correlation):
    noise = np.asarray(noise_of(script)(correlation))
    correlation = min(correlation, 1.0)  # a larger one, as a sweep may draw it, counts as 1
    np.testing.assert_allclose(noise[-1].std(), 1.0, atol=0.06)
    np.testing.assert_allclose((noise[:-1] * noise[1:]).mean(), correlation, atol=0.02)
    np.testing.assert_allclose((noise[:-3] * noise[3:]).mean(), correlation**3, atol=0.02)


@alike
def test_random_actions_are_uniform(script):
    noise = np.array([-math.inf, -1.0, 0.0, 1.0, math.inf])
    random_action = jit_quickly(script.random_action)
    expected = [-1.0, -0.6826895, 0.0, 0.6826895, 1.0]
    np.testing.assert_allclose(random_action(noise), expected, rtol=1e-5)
    actions = random_action(np.random.default_rng(0).normal(size=100_000))
    np.testing.assert_allclose(np.histogram(actions, 10, (-1, 1))[0], 10_000, rtol=0.05)


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


@pytest.mark.slow
@both
def test_pendulum_is_learned_with_its_config(script):
    """Four seeds of configs/NAME/pendulum.yaml."""
    name = script.__name__
    path = Path(script.__file__).parent / "configs" / name / "pendulum.yaml"
    config = read_config(script, path)
    out = jax.jit(jax.vmap(script.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    options = types.SimpleNamespace(seed=0, eval_episodes=64, eval_interval=0)
    returns = greedy_returns(script, config, options)(out["runner_state"].agent, np.arange(4))
    assert returns.mean() > -180


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
