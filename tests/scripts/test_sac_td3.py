"""SAC and TD3: mathematics and replay against NumPy, and what they learn of known values."""

import functools
import math
import re
import types
from functools import partial
from pathlib import Path

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from support.compilation import jit_quickly
from support.probe import FINITE, LIMIT, learn
from support.tiers import slow
from support.trees import arrays

import sac
import td3
from onejit.engine.evaluation import greedy_returns
from onejit.run.directory import read_config

both = pytest.mark.parametrize("script", [sac, td3], ids=["sac", "td3"])
alike = pytest.mark.parametrize(
    "script", [sac, slow(td3)], ids=["sac", "td3"]
)  # where the code is the same in both

# --- mathematics of both ---


@both
def test_td_loss_by_hand(script):
    q, target = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([1.0, 3.0])
    loss = jit_quickly(script.td_loss)(q, target)
    np.testing.assert_allclose(loss, (1 + 4) / 2 + (1 + 0) / 2, rtol=1e-6)


@both
def test_networks_of_critics_differ(script):
    init, _ = script.make_learner(script.Config())
    critics = jit_quickly(lambda key: init(key).params["critics"])(jax.random.key(0))
    for leaf in arrays(critics):
        assert leaf.shape[0] == 2 and (
            np.any(leaf[0] != leaf[1]) or not np.any(leaf)
        )  # biases are 0


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


# --- mathematics of SAC ---


def squashed(mean, log_std):
    return sac.squash(distrax.MultivariateNormalDiag(mean, jnp.exp(log_std)))


def test_log_probability_against_numpy():
    mean, log_std = np.random.default_rng(0).normal(size=(2, 50, 4))
    log_std = log_std - 1
    key = jax.random.key(0)
    noise = np.asarray(jax.random.normal(key, (50, 4)), np.float64)
    u = mean + np.exp(log_std) * noise
    expected = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(u) ** 2)

    def sample(mean, log_std):
        return squashed(mean, log_std).sample_and_log_prob(seed=key)

    action, log_prob = jit_quickly(sample)(mean, log_std)
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_prob, expected.sum(axis=-1), rtol=1e-3, atol=1e-3)


def test_log_probability_is_that_of_a_density():
    """It integrates to 1 over all actions, and samples are scored by it."""

    @jit_quickly
    def integral_and_scores():
        policy = squashed(jnp.array([0.3]), jnp.array([-0.5]))
        action = jnp.tanh(jnp.linspace(-6.0, 6.0, 20_001))
        density = jnp.exp(policy.log_prob(action[:, None]))
        sample, log_prob = policy.sample_and_log_prob(seed=jax.random.key(0), sample_shape=1000)
        return jnp.trapezoid(density, action), policy.log_prob(sample), log_prob

    integral, score, log_prob = integral_and_scores()
    np.testing.assert_allclose(integral, 1.0, atol=1e-3)
    np.testing.assert_allclose(score, log_prob, atol=1e-3)


def test_log_probability_of_saturated_actions():
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| where u is large, and its gradient is -2 sign(u)."""
    key = jax.random.key(0)
    mean = np.array([-1000.0, -30.0, 30.0, 1000.0])
    noise = np.asarray(jax.random.normal(key, (1,)))

    def log_prob(mean):
        return squashed(mean[None], jnp.zeros(1)).sample_and_log_prob(seed=key)[1]

    value, gradient = jit_quickly(jax.vmap(jax.value_and_grad(log_prob)))(mean)
    log_gaussian = -0.5 * noise**2 - 0.5 * math.log(2 * math.pi)
    expected = log_gaussian - 2 * math.log(2) + 2 * abs(mean + noise)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * np.sign(mean), rtol=1e-5)


def test_target_of_sac_against_a_loop():
    rng, gamma, ent_coef = np.random.default_rng(0), 0.9, 0.3
    (reward, log_prob), next_q, terminated = (
        rng.normal(size=(2, 40)),
        rng.normal(size=(2, 40)),
        rng.random(40) < 0.3,
    )
    expected = reward.copy()
    for b in range(40):
        if not terminated[b]:
            expected[b] += gamma * (min(next_q[0, b], next_q[1, b]) - ent_coef * log_prob[b])
    target = jit_quickly(sac.q_target)(
        reward,
        terminated,
        next_q=next_q,
        next_log_prob=log_prob,
        ent_coef=ent_coef,
        gamma=gamma,
    )
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_policy_and_entropy_coefficient_by_hand():
    q, log_prob = np.array([[1.0, 5.0], [2.0, 4.0]]), np.array([0.5, -1.5])
    loss = jit_quickly(sac.policy_loss)(q, log_prob, 0.2)
    np.testing.assert_allclose(loss, ((0.1 - 1.0) + (-0.3 - 4.0)) / 2, rtol=1e-6)
    loss_and_gradient = jit_quickly(jax.value_and_grad(sac.ent_coef_loss))
    loss, gradient = loss_and_gradient(np.log(0.2), -log_prob.mean(), -1.0)
    np.testing.assert_allclose(loss, -0.2 * (-0.5 - 1.0), rtol=1e-6)
    assert gradient > 0  # the entropy, 0.5, is above its target: the coefficient falls
    assert loss_and_gradient(np.log(0.2), -log_prob.mean(), 1.0)[1] < 0


# --- mathematics of TD3 ---


def test_smoothed_actions_by_hand():
    action, noise = np.array([0.0, 0.9, -0.9, 0.5]), np.array([0.7, 0.7, -0.2, -0.1])
    smoothed = jit_quickly(td3.smoothed_action)
    np.testing.assert_allclose(smoothed(action, noise, 0.5), [0.5, 1.0, -1.0, 0.4], rtol=1e-6)
    np.testing.assert_allclose(smoothed(action, -noise, 0.5), [-0.5, 0.4, -0.7, 0.6], rtol=1e-6)


def test_target_of_td3_against_a_loop():
    rng, gamma = np.random.default_rng(0), 0.9
    reward, next_q, terminated = rng.normal(size=40), rng.normal(size=(2, 40)), rng.random(40) < 0.3
    expected = [
        r + gamma * (0.0 if t else min(q))
        for r, t, q in zip(reward, terminated, next_q.T, strict=True)
    ]
    target = jit_quickly(td3.q_target)(reward, terminated, next_q, gamma)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


# --- the replay ---


def counting_rollout(script, count, num_steps, num_envs):
    """Steps whose every entry tells its time and its environment. One in 10 terminates."""
    number = (count + np.arange(num_steps))[:, None] * 100.0 + np.arange(num_envs)  # [T, N]
    number = number.astype(np.float32)
    obs = np.stack([number, -number], axis=-1)
    return script.Transition(
        obs=obs,
        action=obs + 0.25,
        reward=number * 2.0,
        next_obs=obs + 0.5,
        terminated=number // 100 % 10 == 3,
    )


@alike
@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (3, 4), (1, 7), (2, 10)])
def test_replay_gives_all_that_it_holds_and_nothing_else(script, num_envs, num_steps):
    num_rollouts = 10 // num_steps
    sample, add = jit_quickly(script.sample, static_argnums=3), jit_quickly(script.add_rollout)
    for writes in {1, num_rollouts, num_rollouts + 1, 31}:
        rollout = counting_rollout(script, 0, num_steps, num_envs)
        replay = jax.tree.map(
            lambda leaf: np.full((num_rollouts, *leaf.shape), -999).astype(leaf.dtype), rollout
        )
        for i in range(writes):
            replay = add(
                replay, counting_rollout(script, i * num_steps, num_steps, num_envs), np.int32(i)
            )
        count = writes * num_steps
        steps = jax.device_get(sample(jax.random.key(writes), replay, np.int32(writes), 6000))
        number = steps.obs[..., 0]
        starts = range(max(0, count - num_rollouts * num_steps), count)
        valid = {step * 100 + env for step in starts for env in range(num_envs)}
        found, times = np.unique(number, return_counts=True)
        assert number.shape == (6000,) and set(found.astype(int).tolist()) == valid
        assert np.abs(times - 6000 / len(valid)).max() < 5 * math.sqrt(6000 / len(valid))  # uniform
        np.testing.assert_array_equal(steps.action, steps.obs + 0.25)
        np.testing.assert_array_equal(steps.reward, number * 2.0)
        np.testing.assert_array_equal(steps.next_obs, steps.obs + 0.5)
        np.testing.assert_array_equal(steps.terminated, number // 100 % 10 == 3)


@alike
@pytest.mark.parametrize("seeds, num_envs, num_steps", [slow(1, 1, 1), (2, 4, 1), slow(2, 2, 2)])
def test_replay_is_written_in_place(script, seeds, num_envs, num_steps):
    """The compiled loop copies no array of the replay's size, and the state holds no second one."""
    buffer_size = num_envs * num_steps * 12_345
    config = script.Config(
        num_envs=num_envs, num_steps=num_steps, buffer_size=buffer_size, learning_starts=16
    )
    init, update = script.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    large = [leaf.shape for leaf in jax.tree.leaves(state) if 12_345 in leaf.shape]
    leading = seeds, 12_345, num_steps, num_envs
    assert large == [(*leading, 3), (*leading, 1), leading, (*leading, 3), leading]
    loop = jax.jit(partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
    program = loop.lower(state).compile().as_text()
    # also where XLA takes axes together
    sizes = rf"\[(?:[\d,]*,)?(?:{12_345}|{12_345 * num_steps}|{buffer_size})[,\]]"
    assert re.search(sizes, program)
    assert not re.findall(rf"= \w*{sizes}\S* copy\(.*", program)


# --- training ---


@pytest.mark.slow  # the twin covers it
def test_entropy_is_worth_its_coefficient():
    """Nothing depends on the action: the policy becomes nearly uniform, of entropy log 2."""
    learned = learn("sac", 500, kinds="ends", ent_coef=0.5, reward_scale=1.0)
    metrics = learned.metrics
    np.testing.assert_allclose(metrics["entropy"][-20:].mean(), math.log(2), atol=0.1)
    # of later actions: the entropy of the first one is the policy's, not the critics'
    bonus = 0.5 * math.log(2) * np.array([0.9 + 0.9**2, 0.9, 0.0])
    for sign in (1.0, -1.0):
        values = learned.values([[1, 0, 0, sign, step] for step in range(3)])
        np.testing.assert_allclose(values.mean(axis=1), sign * FINITE + bonus, atol=0.1)
    np.testing.assert_allclose(metrics["ent_coef"], 0.5, rtol=1e-5)


@pytest.mark.slow
def test_entropy_coefficient_reaches_the_target_entropy():
    settings = dict(
        ent_coef=1.0,
        learn_ent_coef=True,
        target_entropy=-0.5,
        policy_lr=1e-2,
        q_lr=1e-2,
    )
    metrics = learn("sac", 600, kinds="best", **settings).metrics
    np.testing.assert_allclose(metrics["entropy"][-100:].mean(), -0.5, atol=0.15)
    assert metrics["ent_coef"][-1] != 1.0


@alike
@pytest.mark.parametrize("terminates", [False, True])
def test_both_ends_of_an_episode_in_brax(script, terminates):
    """In the replay, through brax's adapter. Observes a number of the episode, and its step.

    Five steps are the limit in one case, the length in the other.
    """
    env_params = {"length" if terminates else "max_steps_in_episode": LIMIT}
    config = script.Config(env_name="ValueBrax", learning_starts=400, env_params=env_params)
    init, _ = script.make_learner(config)
    replay = jit_quickly(lambda key: init(key).replay)(jax.random.key(0))
    steps = jax.tree.map(lambda leaf: np.asarray(leaf)[:100], replay)
    np.testing.assert_array_equal(steps.next_obs[..., 0], steps.obs[..., 0])
    np.testing.assert_array_equal(steps.next_obs[..., 1], steps.obs[..., 1] + 1)
    np.testing.assert_array_equal(steps.terminated, (steps.next_obs[..., 1] == LIMIT) & terminates)
    assert (steps.next_obs[..., 1] == LIMIT).sum() > 70


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


# --- what else may be set ---


@pytest.mark.parametrize("ent_coef", [0.0, slow(1e-30)])
def test_entropy_coefficient_is_learned_from_0_too(ent_coef):
    """It is positive and it grows, as the entropy is below its target."""
    settings = dict(ent_coef=ent_coef, learn_ent_coef=True, target_entropy=0.9)
    metrics = learn("sac", 20, kinds="best", **settings).metrics
    assert all(
        np.isfinite(metrics[name]).all()
        for name in ("td_loss", "q_value", "policy_loss", "entropy", "ent_coef")
    )
    assert (
        0 < metrics["ent_coef"][0] < 2e-4 and metrics["ent_coef"][-1] > 1.1 * metrics["ent_coef"][0]
    )


@alike
@pytest.mark.parametrize("learning_starts, warmup_timesteps", [(0, 0), (1, 6), (6, 6), (7, 12)])
def test_steps_of_the_warm_up(script, learning_starts, warmup_timesteps):
    config = script.Config(
        learning_starts=learning_starts, num_envs=2, num_steps=3, total_timesteps=27
    )
    assert (
        config.warmup_timesteps == warmup_timesteps
        and config.num_updates == (27 - warmup_timesteps) // 6
    )
