"""SAC and TD3: mathematics and replay against NumPy, and what they learn of known values."""

import dataclasses
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
import toys  # registers the environments
from support.compilation import jit_quickly
from support.tiers import slow

import sac
import td3
from onejit.engine.evaluation import greedy_returns, make_recorder, policy_of
from onejit.run.directory import read_config

VALUE = toys.ValueContinuous.__name__
both = pytest.mark.parametrize("script", [sac, td3], ids=["sac", "td3"])
alike = pytest.mark.parametrize(
    "script", [sac, slow(td3)], ids=["sac", "td3"]
)  # where the code is the same in both

# --- mathematics of both ---


@both
def test_td_loss_by_hand(script):
    q, target = jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([1.0, 3.0])
    np.testing.assert_allclose(script.td_loss(q, target), (1 + 4) / 2 + (1 + 0) / 2, rtol=1e-6)


@both
def test_networks_of_critics_differ(script):
    init, _ = script.make_learner(script.Config())
    for leaf in jax.tree.leaves(jit_quickly(init)(jax.random.key(0)).params["critics"]):
        assert leaf.shape[0] == 2 and (
            np.any(leaf[0] != leaf[1]) or not np.any(leaf)
        )  # biases are 0


@alike
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95, 1.5])
def test_noise_has_unit_variance_and_the_correlation(script, correlation):
    white = jax.random.normal(jax.random.key(0), (400, 2000))

    def step(noise, white):
        noise = script.correlated(noise, white, correlation)
        return noise, noise

    _, noise = jax.lax.scan(step, white[0], white[1:])
    correlation = min(correlation, 1.0)  # a larger one, as a sweep may draw it, counts as 1
    np.testing.assert_allclose(noise[-1].std(), 1.0, atol=0.06)
    np.testing.assert_allclose((noise[:-1] * noise[1:]).mean(), correlation, atol=0.02)
    np.testing.assert_allclose((noise[:-3] * noise[3:]).mean(), correlation**3, atol=0.02)


@alike
def test_random_actions_are_uniform(script):
    noise = jnp.array([-math.inf, -1.0, 0.0, 1.0, math.inf])
    np.testing.assert_allclose(
        script.random_action(noise), [-1.0, -0.6826895, 0.0, 0.6826895, 1.0], rtol=1e-5
    )
    actions = script.random_action(jax.random.normal(jax.random.key(0), (100_000,)))
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
    policy = squashed(jnp.float32(mean), jnp.float32(log_std))
    action, log_prob = policy.sample_and_log_prob(seed=key)
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_prob, expected.sum(axis=-1), rtol=1e-3, atol=1e-3)


def test_log_probability_is_that_of_a_density():
    """It integrates to 1 over all actions, and samples are scored by it."""
    policy = squashed(jnp.array([0.3]), jnp.array([-0.5]))
    action = jnp.tanh(jnp.linspace(-6.0, 6.0, 20_001))
    density = jnp.exp(policy.log_prob(action[:, None]))
    np.testing.assert_allclose(jnp.trapezoid(density, action), 1.0, atol=1e-3)
    action, log_prob = policy.sample_and_log_prob(seed=jax.random.key(0), sample_shape=1000)
    np.testing.assert_allclose(policy.log_prob(action), log_prob, atol=1e-3)


@pytest.mark.parametrize("mean", [-1000.0, -30.0, 30.0, 1000.0])
def test_log_probability_of_saturated_actions(mean):
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| where u is large, and its gradient is -2 sign(u)."""
    key = jax.random.key(0)
    noise = jax.random.normal(key, (1,))[0]

    def log_prob(mean):
        return squashed(mean[None], jnp.zeros(1)).sample_and_log_prob(seed=key)[1]

    value, gradient = jax.value_and_grad(log_prob)(jnp.float32(mean))
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
    target = sac.q_target(
        jnp.asarray(reward),
        jnp.asarray(terminated),
        next_q=jnp.asarray(next_q),
        next_log_prob=jnp.asarray(log_prob),
        ent_coef=ent_coef,
        gamma=gamma,
    )
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_policy_and_entropy_coefficient_by_hand():
    q, log_prob = jnp.array([[1.0, 5.0], [2.0, 4.0]]), jnp.array([0.5, -1.5])
    np.testing.assert_allclose(
        sac.policy_loss(q, log_prob, 0.2), ((0.1 - 1.0) + (-0.3 - 4.0)) / 2, rtol=1e-6
    )
    loss, gradient = jax.value_and_grad(sac.ent_coef_loss)(jnp.log(0.2), -log_prob.mean(), -1.0)
    np.testing.assert_allclose(loss, -0.2 * (-0.5 - 1.0), rtol=1e-6)
    assert gradient > 0  # the entropy, 0.5, is above its target: the coefficient falls
    assert jax.grad(sac.ent_coef_loss)(jnp.log(0.2), -log_prob.mean(), 1.0) < 0


# --- mathematics of TD3 ---


def test_smoothed_actions_by_hand():
    action, noise = jnp.array([0.0, 0.9, -0.9, 0.5]), jnp.array([0.7, 0.7, -0.2, -0.1])
    np.testing.assert_allclose(
        td3.smoothed_action(action, noise, 0.5), [0.5, 1.0, -1.0, 0.4], rtol=1e-6
    )
    np.testing.assert_allclose(
        td3.smoothed_action(action, -noise, 0.5), [-0.5, 0.4, -0.7, 0.6], rtol=1e-6
    )


def test_target_of_td3_against_a_loop():
    rng, gamma = np.random.default_rng(0), 0.9
    reward, next_q, terminated = rng.normal(size=40), rng.normal(size=(2, 40)), rng.random(40) < 0.3
    expected = [
        r + gamma * (0.0 if t else min(q))
        for r, t, q in zip(reward, terminated, next_q.T, strict=True)
    ]
    target = td3.q_target(jnp.asarray(reward), jnp.asarray(terminated), jnp.asarray(next_q), gamma)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def small_td3(**settings):
    config = td3.Config(
        num_envs=2, batch_size=8, hidden_sizes=(4,), learning_starts=9, buffer_size=100
    )
    return dataclasses.replace(config, **settings)


# --- the replay ---


def counting_rollout(script, count, num_steps, num_envs):
    """Steps whose every entry tells its time and its environment. One in 10 terminates."""
    number = (
        jnp.asarray((count + np.arange(num_steps))[:, None] * 100 + np.arange(num_envs)) * 1.0
    )  # [T, N]
    obs = jnp.stack([number, -number], axis=-1)
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
    sample, add = jax.jit(script.sample, static_argnums=3), jax.jit(script.add_rollout)
    for writes in {1, num_rollouts, num_rollouts + 1, 31}:
        rollout = counting_rollout(script, 0, num_steps, num_envs)
        replay = jax.tree.map(
            lambda leaf: jnp.full((num_rollouts, *leaf.shape), -999, leaf.dtype), rollout
        )
        for i in range(writes):
            replay = add(
                replay, counting_rollout(script, i * num_steps, num_steps, num_envs), jnp.int32(i)
            )
        count = writes * num_steps
        steps = sample(jax.random.key(writes), replay, jnp.int32(writes), 6000)
        number = np.asarray(steps.obs[..., 0])
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


# --- environments of known value ---

PLAIN = {"ent_coef": 0.0, "learn_ent_coef": False}  # SAC's values without entropy


@functools.cache
def train(script):
    """One program for all configs that differ in floats alone."""
    return jit_quickly(lambda config, key: script.make_train(config)(key))


def learn(script, num_updates=300, env_params=(), **overrides):
    """Train one agent: config, final state, metrics, and the critics of the policy's actions."""
    config = script.Config(
        env_name=VALUE,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=2,
        gradient_steps=4,
        batch_size=64,
        buffer_size=2000,
        learning_starts=200,
        total_timesteps=200 + num_updates * 16,
        tau=0.1,
        policy_lr=3e-3,
        q_lr=3e-3,
        gamma=0.9,
        hidden_sizes=(16, 16),
    )
    config = dataclasses.replace(config, **(PLAIN if script is sac else {}) | overrides)
    out = train(script)(config, jax.random.key(0))
    actor, critic = script.make_networks(config, *script.make_env(config))
    params = out["runner_state"].params

    def q(*obs):
        obs = jnp.asarray(obs, float)
        action = actor.apply(params["actor"], obs)
        action = jnp.tanh(action.mode()) if script is sac else action
        return jax.vmap(critic.apply, (0, None, None))(params["critics"], obs, action)

    return config, out["runner_state"], out["metrics"], q


@pytest.mark.slow  # as does the one of a truncated episode
@both
def test_value_depends_on_the_observation(script):
    *_, metrics, q = learn(script, env_params={"length": 1, "reward": "sign"})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[1.0, -1.0]] * 2, atol=0.05)
    np.testing.assert_allclose(metrics["q_value"][-1], 0.0, atol=0.3)


@functools.cache
def learn_the_discount(script):
    env_params = {"length": 2, "reward": "last", "shows_time": True}
    return learn(script, env_params=env_params, reward_scale=2.0)


@pytest.mark.slow
@both
def test_value_is_discounted_and_rewards_are_scaled(script):
    *_, q = learn_the_discount(script)
    np.testing.assert_allclose(
        q([1, 0], [-1, 0], [1, 1], [-1, 1]), [[1.8, 1.8, 2.0, 2.0]] * 2, atol=0.1
    )


@pytest.mark.slow
@alike
def test_best_action_between_bounds_that_are_not_one(script):
    """The best action is 4 between -3 and 5; the replay has it in [-1, 1], as 0.75."""
    entropy = (
        {"ent_coef": 0.1, "learn_ent_coef": True, "target_entropy": -2.0} if script is sac else {}
    )
    settings = (
        dict(reward_scale=0.1, activation="swish", num_updates=500) | entropy
    )  # as all of 32 seeds learned it
    config, state, _, q = learn(script, env_params={"length": 1, "reward": "action"}, **settings)
    episode = jax.jit(make_recorder(script, config, 2))(state.agent, jax.random.key(1))
    assert -0.1 < episode.reward[0] <= 0.0 and episode.valid.tolist() == [True, False]
    start, act = policy_of(script, config)
    np.testing.assert_allclose(act(state.agent, start(), jnp.ones(2))[0], 0.75, atol=0.08)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), 0.0, atol=0.2)
    steps = jax.tree.map(lambda leaf: leaf[:50], state.replay)  # all of which were written
    assert np.abs(steps.action).max() <= 1.0
    np.testing.assert_allclose(
        steps.reward, -np.square(1.0 + 4.0 * steps.action[..., 0] - 4.0), atol=1e-4
    )


@pytest.mark.slow  # the twin covers it
def test_entropy_is_worth_its_coefficient():
    """Nothing depends on the action: the policy becomes nearly uniform, of entropy log 2."""
    settings = dict(ent_coef=0.5, learn_ent_coef=False, num_updates=500)
    *_, metrics, q = learn(sac, env_params={"length": 2, "shows_time": True}, **settings)
    np.testing.assert_allclose(metrics["entropy"][-20:].mean(), math.log(2), atol=0.1)
    first = 1.0 + 0.9 * (
        1.0 + 0.5 * math.log(2)
    )  # the entropy of the first action is the policy's, not the critics'
    np.testing.assert_allclose(
        q([1, 0], [-1, 0], [1, 1], [-1, 1]), [[first, first, 1.0, 1.0]] * 2, atol=0.1
    )
    np.testing.assert_allclose(metrics["ent_coef"], 0.5, rtol=1e-5)


@pytest.mark.slow
def test_entropy_coefficient_reaches_the_target_entropy():
    settings = dict(
        ent_coef=1.0,
        learn_ent_coef=True,
        target_entropy=-0.5,
        num_updates=600,
        policy_lr=1e-2,
        q_lr=1e-2,
    )
    *_, metrics, _ = learn(sac, env_params={"length": 1, "reward": "action"}, **settings)
    np.testing.assert_allclose(metrics["entropy"][-100:].mean(), -0.5, atol=0.15)
    assert metrics["ent_coef"][-1] != 1.0


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@alike
def test_truncation_is_bootstrapped(script):
    """From the last observation, not the first one of the next episode, whose sign may differ."""
    env_params = {"reward": "sign", "max_steps_in_episode": LIMIT}
    _, state, metrics, q = learn(script, env_params=env_params, num_updates=500)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[ENDLESS, -ENDLESS]] * 2, rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()
    assert not state.replay.terminated.any()


@alike
def test_termination_is_not_bootstrapped(script):
    *_, q = learn(script, env_params={"length": LIMIT, "shows_time": True}, num_updates=500)
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, (2, 2)), atol=0.3)


@alike
@pytest.mark.parametrize("terminates", [False, True])
def test_both_ends_of_an_episode_in_brax(script, terminates):
    """In the replay, through brax's adapter. Observes a number of the episode, and its step.

    Five steps are the limit in one case, the length in the other.
    """
    env_params = {"length" if terminates else "max_steps_in_episode": LIMIT}
    config = script.Config(env_name="ValueBrax", learning_starts=400, env_params=env_params)
    state = jit_quickly(script.make_learner(config)[0])(jax.random.key(0))
    steps = jax.tree.map(lambda leaf: leaf[:100], state.replay)
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
    settings = dict(ent_coef=ent_coef, learn_ent_coef=True, target_entropy=0.9, num_updates=20)
    *_, metrics, _ = learn(sac, env_params={"length": 1, "reward": "action"}, **settings)
    assert all(
        np.isfinite(metrics[name]).all()
        for name in ("td_loss", "q_value", "policy_loss", "entropy", "ent_coef")
    )
    assert (
        0 < metrics["ent_coef"][0] < 2e-4 and metrics["ent_coef"][-1] > 1.1 * metrics["ent_coef"][0]
    )


@pytest.mark.slow  # the twin covers it
def test_an_entropy_coefficient_of_0_that_is_not_learned():
    config, _, metrics, _ = learn_the_discount(sac)
    assert (config.ent_coef, config.learn_ent_coef) == (0.0, False)
    assert (metrics["ent_coef"] == 0).all()


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
