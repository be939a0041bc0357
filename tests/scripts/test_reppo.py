"""The mathematics of REPPO against NumPy and SciPy, and what it learns where the value is known."""

import math
from pathlib import Path

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import toys  # noqa: F401  registers the environments
from support.compilation import jit_quickly

import reppo
import sac
from onejit.base import statistics
from onejit.run.directory import read_config

# --- targets ---

soft_q_lambda_target = jit_quickly(reppo.soft_q_lambda_target)


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
    ends = terminated, truncated
    targets = soft_q_lambda_target(rewards, next_q, log_prob, *ends, ent_coef, gamma, q_lambda)
    np.testing.assert_allclose(targets, expected, rtol=1e-4, atol=1e-5)


def test_a_terminal_state_has_no_value_and_no_entropy():
    ones, yes, no = np.ones((3, 1)), np.ones((3, 1), bool), np.zeros((3, 1), bool)
    for truncated in (yes, no):  # a step that is both counts as terminated
        targets = soft_q_lambda_target(ones, 50 * ones, -70 * ones, yes, truncated, 0.5, 0.9, 0.8)
        np.testing.assert_array_equal(targets, ones)
    targets = soft_q_lambda_target(ones, 50 * ones, -70 * ones, no, yes, 0.5, 0.9, 0.8)
    np.testing.assert_allclose(targets, (1 + 0.9 * (50 + 0.5 * 70)) * ones, rtol=1e-6)


# --- HL-Gauss ---

hl_gauss = jit_quickly(reppo.hl_gauss, static_argnums=3)


@pytest.mark.parametrize(
    "v_min, v_max, num_bins", [(-10.0, 10.0, 51), (0.0, 150.0, 151), (-3.0, 1.0, 8)]
)
def test_hl_gauss_against_numerical_integration(v_min, v_max, num_bins):
    """The integral over each bin of a density cut off outside; 0.75 bins are its deviation."""
    width = (v_max - v_min) / (num_bins - 1)
    targets = np.array(
        [v_min - 5.0, v_min, 0.7 * v_min + 0.3 * v_max, v_max - 0.4 * width, v_max, v_max + 1e4]
    )
    found = np.asarray(hl_gauss(targets, v_min, v_max, num_bins))
    centers = np.linspace(v_min, v_max, num_bins)
    inner = np.linspace(-0.5, 0.5, 2001) * width
    for target, probabilities in zip(np.clip(targets, v_min, v_max), found, strict=True):
        density = scipy.stats.norm(target, 0.75 * width).pdf(centers[:, None] + inner)
        expected = scipy.integrate.trapezoid(density, inner, axis=1)
        np.testing.assert_allclose(probabilities, expected / expected.sum(), atol=2e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-5)


def test_mean_of_hl_gauss_is_the_target_inside_of_the_support():
    v_min, v_max, num_bins = -10.0, 10.0, 51
    # three bins from the edges, where the mean is drawn inwards
    targets = np.linspace(v_min + 1.2, v_max - 1.2, 333)
    probabilities = np.asarray(hl_gauss(targets, v_min, v_max, num_bins))
    mean = probabilities @ np.linspace(v_min, v_max, num_bins)
    np.testing.assert_allclose(mean, targets, atol=1e-3)


def test_hl_gauss_of_a_support_without_width_is_finite():
    assert np.isfinite(hl_gauss(np.array([-1.0, 2.0, 3.0]), 2.0, 2.0, 5)).all()


@pytest.mark.parametrize(
    "v_min, v_max, num_bins", [(-10.0, 10.0, 51), (-4.0, 10.0, 50), (-2.0, 200.0, 102)]
)
def test_critic_reads_the_mean_of_its_bins_and_begins_near_0(v_min, v_max, num_bins):
    critic = reppo.Critic((64, 64), "swish", num_bins, v_min, v_max)
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(2, 100, 3))
    params = jax.device_get(jit_quickly(critic.init)(jax.random.key(1), obs, action))
    apply = jit_quickly(critic.apply)
    logits, q = apply(params, obs, action)
    assert logits.shape == (100, num_bins) and q.shape == (100,)
    np.testing.assert_allclose(q, 0.0, atol=1e-3 * (v_max - v_min))
    program = str(jax.make_jaxpr(critic.apply)(params, obs, action))
    assert program.count("dot_general") == 3  # the layers: GPUs round products, so the mean is none
    other = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape), params)
    logits, q = jax.device_get(apply(other, obs, action))
    probabilities = scipy.special.softmax(logits, axis=-1)
    expected = probabilities @ np.linspace(v_min, v_max, num_bins)
    np.testing.assert_allclose(q, expected, rtol=1e-3, atol=1e-3)
    assert q.std() > 0


def test_hidden_layers_are_normalized():
    """A scale of the inputs makes no difference where no bias has been learned."""
    net = reppo.Mlp((16, 16), 4, "swish")
    x = np.random.default_rng(0).normal(1.0, size=(10, 5))
    params = jit_quickly(net.init)(jax.random.key(1), x)
    apply = jit_quickly(net.apply)
    np.testing.assert_allclose(apply(params, 100 * x), apply(params, x), rtol=1e-3, atol=1e-5)
    assert sum("RMSNorm" in name for name in params["params"]) == 2


# --- the policy and its constraints ---


def gaussian(mean, std):
    return distrax.MultivariateNormalDiag(jnp.array(mean), jnp.array(std))


def test_divergence_against_samples_of_squashed_actions():
    """tanh leaves the divergence as it is: before it, it is the mean of log-ratios after it."""

    @jit_quickly
    def sample():
        old = gaussian([0.3, -0.8], [0.6, 1.1])
        new = gaussian([0.1, -0.5], [0.8, 1.2])
        squashed = reppo.squash(old)
        sampled = squashed.sample_and_log_prob(seed=jax.random.key(0), sample_shape=(200_000,))
        kls = [old.kl_divergence(new), new.kl_divergence(old), old.kl_divergence(old)]
        return sampled, reppo.squash(new).log_prob(sampled[0]), kls

    (action, log_prob), new_log_prob, (kl, other_way, to_itself) = jax.device_get(sample())
    log_ratio = log_prob - new_log_prob
    log_ratio = log_ratio[np.abs(action).max(axis=-1) < 0.9999]  # elsewhere tanh has no inverse
    np.testing.assert_allclose(kl, log_ratio.mean(), rtol=0.02)
    assert kl != other_way
    assert to_itself == 0


def test_squashed_gaussian_is_that_of_sac():
    @jit_quickly
    def samples():
        mean, log_std = jax.random.normal(jax.random.key(0), (2, 50, 4))
        policy = gaussian(3 * mean, jnp.exp(log_std))
        key = jax.random.key(1)
        return [script.squash(policy).sample_and_log_prob(seed=key) for script in (reppo, sac)]

    for a, b in zip(*samples(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_state_is_gated_by_its_own_divergence():
    """Within the bound alpha log pi - Q, and no divergence; outside of it beta KL, and no value."""
    q = np.array([1.0, 2.0, 4.0])
    log_prob = np.array([0.5, -1.0, 3.0])
    kl = np.array([0.01, 0.3, 0.05])
    loss_and_gradients = jit_quickly(jax.value_and_grad(reppo.policy_loss, (0, 1, 2)))
    loss, (of_q, of_log_prob, of_kl) = loss_and_gradients(q, log_prob, kl, 0.2, 0.7, 0.1)
    np.testing.assert_allclose(loss, ((0.1 - 1.0) + 0.7 * 0.3 + (0.6 - 4.0)) / 3, rtol=1e-6)
    np.testing.assert_allclose(of_q, np.array([-1.0, 0.0, -1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(of_log_prob, np.array([0.2, 0.0, 0.2]) / 3, rtol=1e-6)
    np.testing.assert_allclose(of_kl, np.array([0.0, 0.7, 0.0]) / 3, rtol=1e-6)


def test_loss_of_a_coefficient_by_hand():
    """d/dlog alpha is alpha (H - target), d/dlog beta is beta (bound - KL)."""
    loss_and_gradients = jit_quickly(jax.value_and_grad(reppo.coef_loss, (0, 1)))
    loss, (gradient, of_slack) = loss_and_gradients(np.log(0.2), 1.5)
    np.testing.assert_allclose([loss, gradient], 0.2 * 1.5, rtol=1e-5)  # it falls
    assert of_slack == 0.0  # the policy is not moved
    _, (gradient, _) = loss_and_gradients(np.log(0.2), -1.0)
    np.testing.assert_allclose(gradient, -0.2, rtol=1e-5)


# --- one update ---


def tiny(**overrides):
    settings = dict(
        env_name="ProbeContinuous",
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
    env_params = {"kinds": "best"}  # all targets are between -5 and 0
    for v_min, share in ((0.5, 1.0), (-10.0, 0.0)):
        _, state, update = tiny(env_params=env_params, v_min=v_min, normalize_reward=False)
        assert jit_quickly(update)(state)[1]["outside_support"] == share


# --- training ---


@pytest.mark.slow
def test_pendulum_is_learned_with_its_config():
    """Four seeds of configs/reppo/pendulum.yaml."""
    path = Path(reppo.__file__).parent / "configs" / "reppo" / "pendulum.yaml"
    config = read_config(reppo, path)
    out = jax.jit(jax.vmap(reppo.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    assert statistics.final_return(jax.device_get(out["metrics"])).mean() > -200
