"""The mathematics of SAC and TD3 and their replay against NumPy, and what they learn where the value is known."""

import dataclasses
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
import scipy.stats
import toys  # registers the environments
from conftest import jit_quickly, slow

import sac
import td3

VALUE = toys.ValueContinuous.__name__
both = pytest.mark.parametrize("script", [sac, td3], ids=["sac", "td3"])
alike = pytest.mark.parametrize("script", [sac, slow(td3)], ids=["sac", "td3"])  # where the code is the same in both

# --- mathematics of both ---


@both
def test_td_loss_by_hand(script):
    q, target = jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([1.0, 3.0])
    np.testing.assert_allclose(script.td_loss(q, target), (1 + 4) / 2 + (1 + 0) / 2, rtol=1e-6)


@both
def test_networks_of_critics_differ(script):
    init, _ = script.make_learner(script.Config())
    for leaf in jax.tree.leaves(jit_quickly(init)(jax.random.key(0)).params["critics"]):
        assert leaf.shape[0] == 2 and (np.any(leaf[0] != leaf[1]) or not np.any(leaf))  # biases are 0


@alike
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_noise_has_unit_variance_and_the_correlation(script, correlation):
    white = jax.random.normal(jax.random.key(0), (400, 2000))

    def step(noise, white):
        noise = script.correlated(noise, white, correlation)
        return noise, noise

    _, noise = jax.lax.scan(step, white[0], white[1:])
    np.testing.assert_allclose(noise[-1].std(), 1.0, atol=0.06)
    np.testing.assert_allclose((noise[:-1] * noise[1:]).mean(), correlation, atol=0.02)
    np.testing.assert_allclose((noise[:-3] * noise[3:]).mean(), correlation**3, atol=0.02)


@alike
def test_random_actions_are_uniform(script):
    noise = jnp.array([-math.inf, -1.0, 0.0, 1.0, math.inf])
    np.testing.assert_allclose(script.random_action(noise), [-1.0, -0.6826895, 0.0, 0.6826895, 1.0], rtol=1e-5)
    actions = script.random_action(jax.random.normal(jax.random.key(0), (100_000,)))
    np.testing.assert_allclose(np.histogram(actions, 10, (-1, 1))[0], 10_000, rtol=0.05)


@alike
@pytest.mark.parametrize("leading", [(), (7,), (5, 3)])
def test_product_has_the_gradients_of_a_product(script, leading):
    shapes = (*leading, 4), (4, 6), (6,)
    x, kernel, weight = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def gradients(multiply):
        value = jax.value_and_grad(lambda x, kernel: (jnp.sin(multiply(x, kernel)) * weight).sum(), (0, 1))
        return jax.jit(jax.vmap(value, (None, 0)))(x, jnp.stack([kernel, 2 * kernel]))

    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, gradients(script.product), gradients(jnp.matmul))


# --- mathematics of SAC ---


def test_log_probability_against_numpy():
    rng = np.random.default_rng(0)
    mean, log_std, noise = rng.normal(size=(3, 50, 4))
    log_std = log_std - 1
    u = mean + np.exp(log_std) * noise
    expected = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(u) ** 2)
    action, log_prob = sac.squashed_gaussian(*map(jnp.float32, (mean, log_std, noise)))
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_prob, expected.sum(axis=-1), rtol=1e-3, atol=1e-3)


def test_log_probability_is_that_of_distrax_and_a_density():
    mean, log_std = jnp.array([0.3]), jnp.array([-0.5])
    u = jnp.linspace(-8.0, 8.0, 20_001)[:, None]
    action, log_prob = sac.squashed_gaussian(mean, log_std, (u - mean) / jnp.exp(log_std))
    np.testing.assert_allclose(jnp.trapezoid(jnp.exp(log_prob), action[:, 0]), 1.0, atol=1e-3)
    policy = distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))
    policy = distrax.Transformed(policy, distrax.Block(distrax.Tanh(), 1))
    inner = np.abs(u[:, 0]) < 3
    np.testing.assert_allclose(log_prob[inner], policy.log_prob(action)[inner], atol=1e-2)


@pytest.mark.parametrize("mean", [-1000.0, -30.0, 30.0, 1000.0])
def test_log_probability_of_saturated_actions(mean):
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| where u is large; the gradient of its negative is 2 towards 0."""

    def log_prob(mean):
        return sac.squashed_gaussian(mean[None], jnp.zeros(1), jnp.zeros(1))[1]

    value, gradient = jax.value_and_grad(log_prob)(jnp.float32(mean))
    np.testing.assert_allclose(value, -0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * abs(mean), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * np.sign(mean), rtol=1e-5)


def test_soft_target_against_a_loop():
    rng, gamma, ent_coef = np.random.default_rng(0), 0.9, 0.3
    (reward, log_prob), next_q, terminated = rng.normal(size=(2, 40)), rng.normal(size=(2, 40)), rng.random(40) < 0.3
    expected = reward.copy()
    for b in range(40):
        if not terminated[b]:
            expected[b] += gamma * (min(next_q[0, b], next_q[1, b]) - ent_coef * log_prob[b])
    target = sac.soft_target(*map(jnp.asarray, (reward, terminated, next_q, log_prob)), ent_coef, gamma)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_policy_and_entropy_coefficient_by_hand():
    q, log_prob = jnp.array([[1.0, 5.0], [2.0, 4.0]]), jnp.array([0.5, -1.5])
    np.testing.assert_allclose(sac.policy_loss(q, log_prob, 0.2), ((0.1 - 1.0) + (-0.3 - 4.0)) / 2, rtol=1e-6)
    loss, gradient = jax.value_and_grad(sac.ent_coef_loss)(jnp.log(0.2), log_prob, -1.0)
    np.testing.assert_allclose(loss, -0.2 * (-0.5 - 1.0), rtol=1e-6)
    assert gradient > 0  # the entropy, 0.5, is above its target: the coefficient falls
    assert jax.grad(sac.ent_coef_loss)(jnp.log(0.2), log_prob, 1.0) < 0


def test_a_gradient_step_of_sac_by_hand():
    """One update from the replay's only step, each gradient from NumPy's finite differences where it is of one number.

    The critics' target, the sign of the policy's step and that of the entropy coefficient are seen in what Adam does:
    its first step has the size of the learning rate, against the gradient.
    """
    config = sac.Config(env_name=VALUE, env_params={"length": 1, "reward": "action"}, hidden_sizes=(4,), lr=1e-3)
    config = dataclasses.replace(config, num_envs=1, gradient_steps=1, batch_size=1, learning_starts=0, tau=0.25)
    init, update = sac.make_learner(config)
    before = jit_quickly(init)(jax.random.key(0))
    after, metrics = jit_quickly(update)(before)
    step = sac.unpack(after.replay[0, 0], 2)
    _, critic = sac.make_networks(config, *sac.make_env(config))
    q = jax.vmap(critic.apply, (0, None, None))(before.params["critics"], step.obs, step.action)
    assert step.terminated
    np.testing.assert_allclose(metrics["td_loss"], np.square(q - step.reward).sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["q_value"], q.mean(), rtol=1e-4)
    bias = [state.params["critics"]["params"]["Mlp_0"]["Dense_1"]["bias"][:, 0] for state in (before, after)]
    np.testing.assert_allclose(bias[1] - bias[0], 1e-3 * np.sign(step.reward - q), rtol=1e-3)
    np.testing.assert_allclose(metrics["ent_coef"], 1.0)
    np.testing.assert_allclose(
        after.params["log_ent_coef"], 1e-3 * np.sign(config.target_entropy - metrics["entropy"]), rtol=1e-3
    )
    for target, old, new in zip(
        *map(jax.tree.leaves, (after.target_critics, before.params["critics"], after.params["critics"])), strict=True
    ):
        np.testing.assert_allclose(target, 0.75 * old + 0.25 * new, rtol=1e-5, atol=1e-7)


# --- mathematics of TD3 ---


def test_actions_with_noise_by_hand():
    action, noise = jnp.array([0.0, 0.9, -0.9, 0.5]), jnp.array([0.7, 0.7, -0.2, -0.1])
    np.testing.assert_allclose(td3.noisy_action(action, noise), [0.7, 1.0, -1.0, 0.4], rtol=1e-6)
    np.testing.assert_allclose(td3.smoothed_action(action, noise, 0.5), [0.5, 1.0, -1.0, 0.4], rtol=1e-6)
    np.testing.assert_allclose(td3.smoothed_action(action, -noise, 0.5), [-0.5, 0.4, -0.7, 0.6], rtol=1e-6)


def test_clipped_double_target_against_a_loop():
    rng, gamma = np.random.default_rng(0), 0.9
    reward, next_q, terminated = rng.normal(size=40), rng.normal(size=(2, 40)), rng.random(40) < 0.3
    expected = [r + gamma * (0.0 if t else min(q)) for r, t, q in zip(reward, terminated, next_q.T, strict=True)]
    target = td3.clipped_double_target(jnp.asarray(reward), jnp.asarray(terminated), jnp.asarray(next_q), gamma)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_policy_of_td3_follows_the_first_critic():
    """The second one is not a number while the policy takes a step, and its loss is the same."""
    np.testing.assert_allclose(td3.policy_loss(jnp.array([1.0, 4.0])), -2.5)
    config = small_td3(gradient_steps=1, policy_delay=1, lr=0.0)
    init, update = td3.make_learner(config)
    state = jit_quickly(init)(jax.random.key(0))
    _, metrics = jit_quickly(update)(state)
    params = state.params | {"critics": jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), state.params["critics"])}
    _, broken = jit_quickly(update)(state._replace(params=params))
    assert np.isnan(broken["td_loss"]) and broken["policy_loss"] == metrics["policy_loss"]


def small_td3(**settings):
    config = td3.Config(num_envs=2, batch_size=8, hidden_sizes=(4,), learning_starts=9, buffer_size=100)
    return dataclasses.replace(config, **settings)


@pytest.mark.parametrize("num_steps, gradient_steps, policy_delay", [
    slow(1, 1, 1), (1, 1, 2), slow(3, 1, 3), slow(1, 2, 2), (1, 3, 2), (2, 4, 2), slow(1, 4, 6), slow(1, 6, 4),
    slow(1, 2, 5),
])  # fmt: skip
def test_policy_is_delayed(num_steps, gradient_steps, policy_delay):
    """Adam counts its steps. The target networks move with the policy, and only then."""
    config = small_td3(num_steps=num_steps, gradient_steps=gradient_steps, policy_delay=policy_delay)
    init, update = td3.make_learner(config)
    state, update = jit_quickly(init)(jax.random.key(0)), jit_quickly(update)
    for i in range(1, 11):
        before, (state, _) = state, update(state)
        steps = {name: int(opt_state[0].count) for name, opt_state in state.opt_state.items()}
        assert steps == {"critics": i * gradient_steps, "actor": i * gradient_steps // policy_delay}
        moved = steps["actor"] - int(before.opt_state["actor"][0].count)
        for old, new in zip(*map(jax.tree.leaves, (before.target_params, state.target_params)), strict=True):
            assert (old != new).any() == (moved > 0)
        if moved == 1 and i * gradient_steps % policy_delay == 0:  # after the last step of this update
            for old, new, online in zip(
                *map(jax.tree.leaves, (before.target_params, state.target_params, state.params)), strict=True
            ):
                np.testing.assert_allclose(new, old + config.tau * (online - old), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("gradient_steps, policy_delay", [(4, 2), slow(6, 3), slow(2, 2), slow(4, 6)])
def test_steps_in_groups_as_one_by_one(monkeypatch, gradient_steps, policy_delay):
    config = small_td3(gradient_steps=gradient_steps, policy_delay=policy_delay, total_timesteps=25)
    in_groups = jit_quickly(td3.make_train(config))(jax.random.key(0))
    monkeypatch.setattr(td3, "math", types.SimpleNamespace(**vars(math) | {"gcd": lambda *_: 1}))
    one_by_one = jit_quickly(td3.make_train(config))(jax.random.key(0))
    for a, b in zip(*(jax.tree.leaves(out["runner_state"].params) for out in (in_groups, one_by_one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- the replay ---


@alike
def test_normal_numbers_from_bits(script):
    """Of the normal distribution, independent, and finite whatever the words."""
    words = np.random.default_rng(0).integers(2**32, size=(2, 100_000), dtype=np.uint32)
    given = np.asarray(script.normal_from_bits(jnp.asarray(words)))
    assert all(scipy.stats.kstest(numbers, "norm").pvalue > 0.01 for numbers in (*given, given.sum(axis=0) / 2**0.5))
    assert abs(np.corrcoef(np.abs(given))[0, 1]) < 0.01 and abs(np.corrcoef(given)[0, 1]) < 0.01
    ends = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    given = np.asarray(script.normal_from_bits(jnp.asarray(np.stack(np.meshgrid(ends, ends)))))
    assert np.isfinite(given).all() and 5.7 < np.abs(given).max() < 5.8


def counting_rollout(script, count, num_steps, num_envs):
    """Steps whose every entry tells which step it is, and of which environment. One in 10 terminates."""
    number = jnp.asarray((count + np.arange(num_steps))[:, None] * 100 + np.arange(num_envs)) * 1.0  # [T, N]
    obs = jnp.stack([number, -number], axis=-1)
    return script.Transition(obs, obs + 0.25, number * 2.0, obs + 0.5, number // 100 % 10 == 3)


@alike
def test_a_step_is_packed_without_loss(script):
    step = counting_rollout(script, 0, 5, 3)
    rows = script.pack(step)
    assert rows.shape == (5, 3, 2 * 2 + 2 + 2)
    for a, b in zip(script.unpack(rows, 2), step, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@alike
@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (3, 4), (1, 7), (2, 10)])
def test_replay_gives_all_that_it_holds_and_nothing_else(script, num_envs, num_steps):
    num_slots = 10  # a multiple of num_steps and not
    sample, add = jax.jit(script.sample_replay), jax.jit(script.add_to_replay)
    for writes in {1, 10 // num_steps, 10 // num_steps + 1, 31}:
        replay = jnp.full((num_slots, num_envs, 8), jnp.nan)
        for i in range(writes):
            rollout = counting_rollout(script, i * num_steps, num_steps, num_envs)
            replay = add(replay, rollout, jnp.int32(i * num_steps))
        count = writes * num_steps
        bits = jax.random.bits(jax.random.key(writes), (2, 3000))
        steps = script.unpack(np.asarray(sample(bits, replay, jnp.int32(count))), 2)
        number = np.asarray(steps.obs[..., 0])
        valid = {step * 100 + env for step in range(max(0, count - num_slots), count) for env in range(num_envs)}
        found, times = np.unique(number, return_counts=True)
        assert set(found.astype(int).tolist()) == valid
        assert np.abs(times - 6000 / len(valid)).max() < 5 * math.sqrt(6000 / len(valid))  # uniform
        np.testing.assert_array_equal(steps.reward, number * 2.0)
        np.testing.assert_array_equal(steps.next_obs, steps.obs + 0.5)
        np.testing.assert_array_equal(steps.terminated, number // 100 % 10 == 3)


@alike
@pytest.mark.parametrize("seeds, num_envs, num_steps", [slow(1, 1, 1), (2, 4, 1), slow(2, 2, 2)])
def test_replay_is_written_in_place(script, seeds, num_envs, num_steps):
    """The compiled loop has no copy of an array of the replay's size, and the state holds no second one."""
    config = script.Config(num_envs=num_envs, num_steps=num_steps, buffer_size=num_envs * 12_345, learning_starts=16)
    init, update = script.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    assert [leaf.shape for leaf in jax.tree.leaves(state) if 12_345 in leaf.shape] == [(seeds, 12_345, num_envs, 9)]
    loop = jax.jit(partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
    program = loop.lower(state).compile().as_text()
    assert re.search(r"\[[\d,]*12345,", program)
    assert not re.findall(r"= \S*\[[\d,]*12345,\S* copy\(.*", program)


@alike
@pytest.mark.parametrize("correlation", [slow(0.0), 0.9])
def test_replay_after_the_warm_up(script, correlation):
    """Uniform actions, then those of the policy, each with what it led to and not with the next episode's start."""
    config = script.Config(num_envs=4, num_steps=3, buffer_size=3001, learning_starts=2001, max_episode_steps=50)
    config = dataclasses.replace(config, noise_correlation=correlation, hidden_sizes=(4,), batch_size=4)
    init, update = script.make_learner(config)
    state = jax.jit(init)(jax.random.key(0))
    assert state.timesteps == 2004 and state.replay.shape == (750, 4, 9)  # both rounded to multiples of num_envs
    steps = script.unpack(state.replay, 3)
    action = np.asarray(steps.action[:501, :, 0])
    assert (state.replay[501:] == 0).all()
    np.testing.assert_allclose(np.histogram(action, 4, (-1, 1))[0], 501, rtol=0.15 if correlation == 0 else 0.5)
    followed = np.corrcoef(action[:-1].ravel(), action[1:].ravel())[0, 1]
    np.testing.assert_allclose(followed, correlation, atol=0.1)
    update = jax.jit(update)
    for _ in range(85):  # 756 slots of 750
        state, _ = update(state)
    steps = script.unpack(np.roll(state.replay, -6, axis=0), 3)
    follows = np.isclose(steps.next_obs[:-1], steps.obs[1:], atol=1e-6).all(axis=-1)
    assert not steps.terminated.any()
    np.testing.assert_array_equal(~follows, np.broadcast_to(((np.arange(749) + 7) % 50 == 0)[:, None], (749, 4)))


@alike
def test_statistics_of_observations(script):
    """Of each observation that was acted on, once."""
    config = script.Config(num_envs=4, num_steps=3, learning_starts=100, buffer_size=1000, normalize_obs=True)
    config = dataclasses.replace(config, total_timesteps=100 + 20 * 12, hidden_sizes=(4,), batch_size=4)
    state = jit_quickly(script.make_train(config))(jax.random.key(0))["runner_state"]
    obs = np.asarray(script.unpack(state.replay[:85], 3).obs).reshape(-1, 3)
    assert state.timesteps == 340
    np.testing.assert_allclose(state.obs_statistics.count, 340, rtol=1e-5)
    np.testing.assert_allclose(state.obs_statistics.mean, obs.mean(axis=0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.obs_statistics.var, obs.var(axis=0), rtol=1e-3)


# --- environments of known value ---

PLAIN = {"ent_coef": 0.0, "learn_ent_coef": False}  # SAC's values without entropy


def learn(script, num_updates=300, env_params=(), **overrides):
    """Train one agent: config, final state and metrics, and the critics of observations and the policy's actions."""
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
        lr=3e-3,
        gamma=0.9,
        hidden_sizes=(16, 16),
    )
    config = dataclasses.replace(config, **(PLAIN if script is sac else {}) | overrides)
    out = jit_quickly(script.make_train(config))(jax.random.key(0))
    actor, critic = script.make_networks(config, *script.make_env(config))
    params = out["runner_state"].params

    def q(*obs):
        obs = jnp.asarray(obs, float)
        action = actor.apply(params["actor"], obs)
        action = jnp.tanh(action[0]) if script is sac else action
        return jax.vmap(critic.apply, (0, None, None))(params["critics"], obs, action)

    return config, out["runner_state"], out["metrics"], q


@pytest.mark.slow  # as does the one of a truncated episode
@both
def test_value_depends_on_the_observation(script):
    *_, metrics, q = learn(script, env_params={"length": 1, "reward": "sign"})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[1.0, -1.0]] * 2, atol=0.05)
    np.testing.assert_allclose(metrics["q_value"][-1], 0.0, atol=0.3)


@both
def test_value_is_discounted_and_rewards_are_scaled(script):
    env_params = {"length": 2, "reward": "last", "shows_time": True}
    *_, q = learn(script, env_params=env_params, reward_scale=2.0)
    np.testing.assert_allclose(q([1, 0], [-1, 0], [1, 1], [-1, 1]), [[1.8, 1.8, 2.0, 2.0]] * 2, atol=0.1)


@both
def test_best_action_between_bounds_that_are_not_one(script):
    """The best action is 4, where the bounds are -3 and 5; the replay has it in [-1, 1], as 0.75."""
    entropy = {"ent_coef": 0.1, "learn_ent_coef": True, "target_entropy": -2.0} if script is sac else {}
    config, state, _, q = learn(script, env_params={"length": 1, "reward": "action"}, reward_scale=0.1, **entropy)
    episode = jax.jit(script.make_rollout(config))(state, jax.random.key(1))
    assert -0.1 < episode.reward[0] <= 0.0 and episode.valid.sum() == 1
    np.testing.assert_allclose(q([1, 1], [-1, 1]), 0.0, atol=0.2)
    steps = script.unpack(state.replay, 2)
    assert np.abs(steps.action).max() <= 1.0
    np.testing.assert_allclose(steps.reward, -np.square(1.0 + 4.0 * steps.action[..., 0] - 4.0), atol=1e-4)


def test_entropy_is_worth_its_coefficient():
    """Nothing depends on the action: the policy becomes nearly uniform, of entropy log 2."""
    settings = dict(ent_coef=0.5, learn_ent_coef=False, num_updates=500)
    *_, metrics, q = learn(sac, env_params={"length": 2, "shows_time": True}, **settings)
    np.testing.assert_allclose(metrics["entropy"][-20:].mean(), math.log(2), atol=0.1)
    first = 1.0 + 0.9 * (1.0 + 0.5 * math.log(2))  # the entropy of the first action is the policy's, not the critics'
    np.testing.assert_allclose(q([1, 0], [-1, 0], [1, 1], [-1, 1]), [[first, first, 1.0, 1.0]] * 2, atol=0.1)
    np.testing.assert_allclose(metrics["ent_coef"], 0.5, rtol=1e-5)


@pytest.mark.slow
def test_entropy_coefficient_reaches_the_target_entropy():
    settings = dict(ent_coef=1.0, learn_ent_coef=True, target_entropy=-0.5, num_updates=600, lr=1e-2)
    *_, metrics, _ = learn(sac, env_params={"length": 1, "reward": "action"}, **settings)
    np.testing.assert_allclose(metrics["entropy"][-100:].mean(), -0.5, atol=0.15)
    assert metrics["ent_coef"][-1] != 1.0


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@both
def test_truncation_is_bootstrapped(script):
    """From the last observation, not from the first one of the next episode, whose sign may be the other."""
    settings = dict(max_episode_steps=LIMIT, num_updates=500)
    _, state, metrics, q = learn(script, env_params={"reward": "sign"}, **settings)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[ENDLESS, -ENDLESS]] * 2, rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()
    assert not script.unpack(state.replay, 2).terminated.any()


@both
def test_termination_is_not_bootstrapped(script):
    *_, q = learn(script, env_params={"length": LIMIT, "shows_time": True}, num_updates=500)
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, (2, 2)), atol=0.3)


@both
@pytest.mark.parametrize("terminates", [False, True])
def test_both_ends_of_an_episode_in_brax(script, terminates):
    """In the replay, through brax's adapter. Observes a number drawn at the start of the episode, and its step.

    Five steps are the limit in one case, the length in the other.
    """
    settings = {"env_params": {"length": LIMIT}} if terminates else {"max_episode_steps": LIMIT}
    config = script.Config(env_name="ValueBrax", learning_starts=400, **settings)
    state = jit_quickly(script.make_learner(config)[0])(jax.random.key(0))
    steps = script.unpack(state.replay[:100], 2)
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
    config, _ = script.parse(["--config", str(path)], script.Config)
    out = jax.jit(jax.vmap(script.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    options = types.SimpleNamespace(seed=0, eval_episodes=64)
    assert script.evaluate(config, options, out["runner_state"]).mean() > -180
