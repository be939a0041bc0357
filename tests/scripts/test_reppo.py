"""The mathematics of REPPO against NumPy and SciPy, and what it learns where the value is known."""

import dataclasses
import functools
import math
from pathlib import Path

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import toys  # registers the environments
from support.compilation import jit_quickly

import reppo
import sac
from onejit.base import statistics
from onejit.engine.evaluation import policy_of
from onejit.run.directory import read_config

VALUE = toys.ValueContinuous.__name__

# --- targets ---


def ends_at_every_step(steps=6):
    """`terminated, truncated` [T, N]: an environment for each step and kind of end, and others."""
    rng = np.random.default_rng(0)
    terminated, truncated = rng.random((2, steps, 3 * steps + 9)) < 0.3
    terminated[:, : 3 * steps + 1] = truncated[:, : 3 * steps + 1] = False
    for t in range(steps):
        terminated[t, 3 * t] = truncated[t, 3 * t + 1] = terminated[t, 3 * t + 2] = truncated[
            t, 3 * t + 2
        ] = True
    return terminated, truncated


def test_targets_against_their_definition():
    """The sum over later steps k of the trace, times the reward and what is bootstrapped at k."""
    terminated, truncated = ends_at_every_step()
    rewards, next_q, log_prob = np.random.default_rng(1).normal(size=(3, *terminated.shape))
    ent_coef, gamma, q_lambda = 0.3, 0.9, 0.8
    expected = np.zeros_like(rewards)
    for t, n in np.ndindex(rewards.shape):
        trace = 1.0
        for k in range(t, len(rewards)):
            follows = gamma * (not terminated[k, n])
            decay = 0.0 if truncated[k, n] or k == len(rewards) - 1 else q_lambda
            soft = (1.0 - decay) * next_q[k, n] - ent_coef * log_prob[k, n]
            expected[t, n] += trace * (rewards[k, n] + follows * soft)
            trace *= follows * decay
    inputs = map(jnp.float32, (rewards, next_q, log_prob))
    targets = reppo.soft_q_lambda_target(*inputs, terminated, truncated, ent_coef, gamma, q_lambda)
    np.testing.assert_allclose(targets, expected, rtol=1e-4, atol=1e-5)


def test_a_terminal_state_has_no_value_and_no_entropy():
    ones, yes, no = jnp.ones((3, 1)), np.ones((3, 1), bool), np.zeros((3, 1), bool)
    for truncated in (yes, no):  # a step that is both counts as terminated
        targets = reppo.soft_q_lambda_target(
            ones, 50 * ones, -70 * ones, yes, truncated, 0.5, 0.9, 0.8
        )
        np.testing.assert_array_equal(targets, ones)
    targets = reppo.soft_q_lambda_target(ones, 50 * ones, -70 * ones, no, yes, 0.5, 0.9, 0.8)
    np.testing.assert_allclose(targets, (1 + 0.9 * (50 + 0.5 * 70)) * ones, rtol=1e-6)


# --- HL-Gauss ---


@pytest.mark.parametrize(
    "v_min, v_max, num_bins", [(-10.0, 10.0, 51), (0.0, 150.0, 151), (-3.0, 1.0, 8)]
)
def test_hl_gauss_against_numerical_integration(v_min, v_max, num_bins):
    """The integral over each bin of a density cut off outside; 0.75 bins are its deviation."""
    width = (v_max - v_min) / (num_bins - 1)
    targets = np.array(
        [v_min - 5.0, v_min, 0.7 * v_min + 0.3 * v_max, v_max - 0.4 * width, v_max, v_max + 1e4]
    )
    found = np.asarray(reppo.hl_gauss(jnp.float32(targets), v_min, v_max, num_bins))
    centers = np.linspace(v_min, v_max, num_bins)
    inner = np.linspace(-0.5, 0.5, 2001) * width
    for target, probabilities in zip(np.clip(targets, v_min, v_max), found, strict=True):
        density = scipy.stats.norm(target, 0.75 * width).pdf(centers[:, None] + inner)
        expected = scipy.integrate.trapezoid(density, inner, axis=1)
        np.testing.assert_allclose(probabilities, expected / expected.sum(), atol=2e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-5)


def test_mean_of_hl_gauss_is_the_target_inside_of_the_support():
    v_min, v_max, num_bins = -10.0, 10.0, 51
    targets = jnp.linspace(
        v_min + 1.2, v_max - 1.2, 333
    )  # three bins from the edges, where the mean is drawn inwards
    probabilities = jit_quickly(reppo.hl_gauss, static_argnums=3)(targets, v_min, v_max, num_bins)
    np.testing.assert_allclose(
        probabilities @ jnp.linspace(v_min, v_max, num_bins), targets, atol=1e-3
    )


def test_hl_gauss_of_a_support_without_width_is_finite():
    assert np.isfinite(reppo.hl_gauss(jnp.array([-1.0, 2.0, 3.0]), 2.0, 2.0, 5)).all()


@pytest.mark.parametrize(
    "v_min, v_max, num_bins", [(-10.0, 10.0, 51), (-4.0, 10.0, 50), (-2.0, 200.0, 102)]
)
def test_critic_reads_the_mean_of_its_bins_and_begins_near_0(v_min, v_max, num_bins):
    critic = reppo.Critic((64, 64), "swish", num_bins, v_min, v_max)
    obs, action = jax.random.normal(jax.random.key(0), (2, 100, 3))
    params = jax.jit(critic.init)(jax.random.key(1), obs, action)
    logits, q = critic.apply(params, obs, action)
    assert logits.shape == (100, num_bins) and q.shape == (100,)
    np.testing.assert_allclose(q, 0.0, atol=1e-3 * (v_max - v_min))
    program = str(jax.make_jaxpr(critic.apply)(params, obs, action))
    assert program.count("dot_general") == 3  # the layers: GPUs round products, so the mean is none
    other = jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(2), leaf.shape), params
    )
    logits, q = critic.apply(other, obs, action)
    np.testing.assert_allclose(
        q, jax.nn.softmax(logits) @ np.linspace(v_min, v_max, num_bins), rtol=1e-3, atol=1e-3
    )
    assert q.std() > 0


def test_hidden_layers_are_normalized():
    """A scale of the inputs makes no difference where no bias has been learned."""
    net = reppo.Mlp((16, 16), 4, "swish")
    x = jax.random.normal(jax.random.key(0), (10, 5)) + 1.0
    params = jax.jit(net.init)(jax.random.key(1), x)
    np.testing.assert_allclose(
        net.apply(params, 100 * x), net.apply(params, x), rtol=1e-3, atol=1e-5
    )
    assert sum("RMSNorm" in name for name in params["params"]) == 2


# --- the policy and its constraints ---


def gaussian(mean, std):
    return distrax.MultivariateNormalDiag(jnp.array(mean), jnp.array(std))


def test_divergence_against_samples_of_squashed_actions():
    """tanh leaves the divergence as it is: before it, it is the mean of log-ratios after it."""
    old = gaussian([0.3, -0.8], [0.6, 1.1])
    new = gaussian([0.1, -0.5], [0.8, 1.2])
    shape = (200_000,)
    key = jax.random.key(0)
    action, log_prob = reppo.squash(old).sample_and_log_prob(seed=key, sample_shape=shape)
    log_ratio = log_prob - reppo.squash(new).log_prob(action)
    log_ratio = log_ratio[jnp.abs(action).max(axis=-1) < 0.9999]  # elsewhere tanh has no inverse
    kl = old.kl_divergence(new)
    np.testing.assert_allclose(kl, log_ratio.mean(), rtol=0.02)
    assert kl != new.kl_divergence(old)
    assert old.kl_divergence(old) == 0


def test_squashed_gaussian_is_that_of_sac():
    mean, log_std = jax.random.normal(jax.random.key(0), (2, 50, 4))
    policy = gaussian(3 * mean, jnp.exp(log_std))
    key = jax.random.key(1)
    of_reppo = reppo.squash(policy).sample_and_log_prob(seed=key)
    of_sac = sac.squash(policy).sample_and_log_prob(seed=key)
    for a, b in zip(of_reppo, of_sac, strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_state_is_gated_by_its_own_divergence():
    """Within the bound alpha log pi - Q, and no divergence; outside of it beta KL, and no value."""
    q, log_prob, kl = (
        jnp.array([1.0, 2.0, 4.0]),
        jnp.array([0.5, -1.0, 3.0]),
        jnp.array([0.01, 0.3, 0.05]),
    )
    arguments = 0.2, 0.7, 0.1
    np.testing.assert_allclose(
        reppo.policy_loss(q, log_prob, kl, *arguments),
        ((0.1 - 1.0) + 0.7 * 0.3 + (0.6 - 4.0)) / 3,
        rtol=1e-6,
    )
    of_q, of_log_prob, of_kl = jax.grad(reppo.policy_loss, (0, 1, 2))(q, log_prob, kl, *arguments)
    np.testing.assert_allclose(of_q, np.array([-1.0, 0.0, -1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(of_log_prob, np.array([0.2, 0.0, 0.2]) / 3, rtol=1e-6)
    np.testing.assert_allclose(of_kl, np.array([0.0, 0.7, 0.0]) / 3, rtol=1e-6)


def test_loss_of_a_coefficient_by_hand():
    """d/dlog alpha is alpha (H - target), d/dlog beta is beta (bound - KL)."""
    log_coef = jnp.log(0.2)
    loss, gradient = jax.value_and_grad(reppo.coef_loss)(log_coef, 1.5)
    np.testing.assert_allclose([loss, gradient], 0.2 * 1.5, rtol=1e-5)  # it falls
    np.testing.assert_allclose(jax.grad(reppo.coef_loss)(log_coef, -1.0), -0.2, rtol=1e-5)
    assert jax.grad(reppo.coef_loss, 1)(log_coef, 1.5) == 0.0  # the policy is not moved


# --- one update ---


def tiny(**overrides):
    settings = dict(
        env_name=VALUE,
        num_envs=4,
        num_steps=8,
        num_minibatches=2,
        update_epochs=2,
        hidden_sizes=(8,),
    )
    config = reppo.Config(**settings | {"total_timesteps": 4 * 8 * 50} | overrides)
    init, update = reppo.make_learner(config)
    return config, jit_quickly(init)(jax.random.key(0)), update


@pytest.mark.slow
def test_coefficients_move_towards_their_constraints():
    """Adam's steps have the size of the learning rate: 4 in an update, against the gradient."""

    def moved(state, after):
        names = ("log_ent_coef", "log_kl_coef")
        return [after.params["policy"][x] - state.params["policy"][x] for x in names]

    for target, direction in (
        (-5.0, -1),
        (5.0, 1),
    ):  # the entropy, which begins near 0.6, is above or below
        _, state, update = tiny(
            target_entropy=target, lr=1e-4, kl_bound=1.0, max_grad_norm=math.inf
        )
        after, metrics = jit_quickly(update)(state)
        np.testing.assert_allclose(moved(state, after), [direction * 4e-4, -4e-4], rtol=0.02)
        assert 0.3 < metrics["entropy"] < 0.7 and metrics["outside_kl_bound"] == 0
    _, state, update = tiny(
        kl_bound=-1.0, lr=1e-4, max_grad_norm=math.inf
    )  # every state is outside
    after, metrics = jit_quickly(update)(state)
    np.testing.assert_allclose(moved(state, after)[1], 4e-4, rtol=0.02)
    assert metrics["outside_kl_bound"] == 1


def test_share_of_targets_outside_of_the_support():
    env_params = {"length": 1}  # all targets are 1
    for v_max, share in ((0.5, 1.0), (2.0, 0.0)):
        _, state, update = tiny(env_params=env_params, v_max=v_max, normalize_reward=False)
        assert jit_quickly(update)(state)[1]["outside_support"] == share


# --- environments of known value ---


@functools.cache
def train():
    """One program for all configs that differ in floats alone."""
    return jit_quickly(lambda config, key: reppo.make_train(config)(key))


def learn(num_updates=150, env_params=(), **overrides):
    """Train without entropy: config, final state, metrics, and Q of greedy actions."""
    config = reppo.Config(
        env_name=VALUE,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=16,
        num_minibatches=4,
        update_epochs=4,
        total_timesteps=num_updates * 8 * 16,
        lr=3e-3,
        gamma=0.9,
        ent_coef=0.0,
        target_entropy=-100.0,
        v_min=-12.0,
        v_max=12.0,
        hidden_sizes=(16, 16),
        normalize_reward=False,
        normalize_obs=False,
    )
    config = dataclasses.replace(config, **overrides)
    out = train()(config, jax.random.key(0))
    state = out["runner_state"]
    actor, critic = reppo.make_networks(config, *reppo.make_env(config))

    def q(*obs):
        obs = jnp.asarray(obs, float)
        obs = reppo.normalize(state.obs_statistics, obs) if config.normalize_obs else obs
        action = jnp.tanh(actor.apply(state.params["policy"]["actor"], obs).mode())
        return critic.apply(state.params["critic"], obs, action)[1]

    return config, state, out["metrics"], q


@pytest.mark.slow
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_value_is_discounted(normalize_obs):
    env_params = {"length": 2, "reward": "last", "shows_time": True}
    *_, q = learn(env_params=env_params, normalize_obs=normalize_obs)
    np.testing.assert_allclose(q([1, 0], [-1, 0], [1, 1], [-1, 1]), [0.9, 0.9, 1.0, 1.0], atol=0.1)


@pytest.mark.slow
def test_action_is_learned():
    """4 is the best between -3 and 5: 0.75 of an action in [-1, 1]."""
    env_params = {"length": 1, "reward": "action"}
    config, state, metrics, _ = learn(
        300, env_params, normalize_reward=True, target_entropy=-2.0, ent_coef=0.01
    )
    start, act = policy_of(reppo, config)
    action, _ = jax.jit(act)(state.agent, start(), jnp.ones(2))
    np.testing.assert_allclose(action, 0.75, atol=0.08)
    np.testing.assert_allclose(
        metrics["entropy"][-100:].mean(), -2.0, atol=0.3
    )  # what its coefficient is learned for


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@pytest.mark.slow
def test_truncation_is_bootstrapped_from_the_last_observation():
    """Not from the first one of the next episode, whose sign and return may be the other."""
    *_, metrics, q = learn(300, {"reward": "sign", "max_steps_in_episode": LIMIT})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [ENDLESS, -ENDLESS], rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()


@pytest.mark.slow
def test_termination_is_not_bootstrapped():
    *_, q = learn(300, {"length": LIMIT, "shows_time": True})
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, 2), atol=0.3)


@pytest.mark.slow
def test_pendulum_is_learned_with_its_config():
    """Four seeds of configs/reppo/pendulum.yaml."""
    path = Path(reppo.__file__).parent / "configs" / "reppo" / "pendulum.yaml"
    config = read_config(reppo, path)
    out = jax.jit(jax.vmap(reppo.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    assert statistics.final_return(jax.device_get(out["metrics"])).mean() > -200
