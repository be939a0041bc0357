"""The drift of DPO against numbers worked by hand.

The rest of the script is PPO's, whose tests do for both.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly

import dpo_continuous as dpo
import ppo_continuous as ppo

# (ratio, advantage, drift, derivative of the drift by the ratio), alpha = 2, beta = 0.6, with a
# pocket calculator. A >= 0, u = (r - 1) A: u - 2 tanh(u / 2) and A tanh(u / 2)^2, 0 where u <= 0. A
# < 0, u = A log r: u - 0.6 tanh(u / 0.6) and A / r tanh(u / 0.6)^2, 0 where u <= 0.
BY_HAND = [
    (1.0, 1.5, 0.0, 0.0),
    (1.0, -1.5, 0.0, 0.0),
    (1.5, 0.0, 0.0, 0.0),
    (1.2, 1.0, 0.000664, 0.009934),  # tanh(0.1) = 0.099668
    (3.0, 1.0, 0.476812, 0.580026),  # u = 2, tanh(1) = 0.761594
    (2.0, 4.0, 2.071945, 3.717406),  # u = 4, tanh(2) = 0.964028
    (0.5, 1.0, 0.0, 0.0),  # a loss, not a gain
    (0.5, -1.0, 0.201457, -1.343108),  # u = 0.693147, u / 0.6 = 1.155245, tanh = 0.819484
    (0.25, -2.0, 2.172706, -7.996900),  # u = 2.772589, u / 0.6 = 4.620981, tanh = 0.999806
    (0.9, -0.5, 0.000135, -0.004267),  # u = 0.052680, u / 0.6 = 0.087801, tanh = 0.087576
    (2.0, -1.0, 0.0, 0.0),
]


@jit_quickly
@jax.value_and_grad
def drift_and_slope(ratio, advantage):
    return dpo.drift(jnp.log(ratio), advantage, 2.0, 0.6)


@pytest.mark.parametrize("ratio, advantage, value, derivative", BY_HAND)
def test_drift_by_hand(ratio, advantage, value, derivative):
    drift, slope = drift_and_slope(ratio, advantage)
    np.testing.assert_allclose(drift, value, atol=2e-5)
    np.testing.assert_allclose(slope, derivative, rtol=1e-3, atol=2e-5)


def test_alpha_is_of_positive_advantages_and_beta_of_negative_ones():
    ratio, advantage = jnp.array([3.0, 0.25]), jnp.array([1.0, -1.0])
    usual = dpo.drift(jnp.log(ratio), advantage, 2.0, 0.6)
    other_alpha, other_beta = (
        dpo.drift(jnp.log(ratio), advantage, *pair) for pair in ((1.0, 0.6), (2.0, 0.3))
    )
    assert ((other_alpha == usual) == jnp.array([False, True])).all()
    assert ((other_beta == usual) == jnp.array([True, False])).all()
    np.testing.assert_allclose(other_alpha[0], 2 - np.tanh(2), rtol=1e-5)


def test_drift_is_one_of_mirror_learning():
    """Not negative; zero with zero gradient at a ratio of 1, for every advantage."""
    log_ratio, advantage = np.meshgrid(np.linspace(-3, 3, 61), np.linspace(-3, 3, 31))
    drift = dpo.drift(jnp.asarray(log_ratio), jnp.asarray(advantage), 2.0, 0.6)
    assert (drift >= 0).all() and (drift > 0.1).any()
    assert (drift[:, 30] == 0).all()
    slope = jax.vmap(jax.grad(lambda x, a: dpo.drift(x, a, 2.0, 0.6)), (None, 0))(
        0.0, jnp.linspace(-3, 3, 31)
    )
    assert (slope == 0).all()


def test_a_scale_of_zero_takes_the_whole_gain():
    """The limit of the definition: no change of the policy is worth anything. 0 / 0 gave NaN."""
    log_ratio, advantage = jnp.array([0.0, 1.0, 0.0, -1.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
    drift = dpo.drift(log_ratio, advantage, 0.0, 0.0)
    np.testing.assert_allclose(drift, [0.0, np.e - 1, 0.0, 1.0], rtol=1e-6)
    slope = jax.grad(lambda x: dpo.drift(x, advantage, 0.0, 0.0).sum())(log_ratio)
    assert np.isfinite(slope).all()


def test_policy_loss_by_hand():
    log_prob = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantage = jnp.array([3.0, 1.0, 1.0, 3.0])  # normalized: 1, -1, -1, 1
    loss, metrics = dpo.policy_loss(log_prob, jnp.zeros(4), advantage, 2.0, 0.6)
    drift = [0.5 - 2 * 0.244919, 0.693147 - 0.6 * 0.819484, 0.0, 0.0]  # tanh(0.25) = 0.244919
    np.testing.assert_allclose(
        loss, -np.mean([1.5 - drift[0], -0.5 - drift[1], -1.5, 0.5]), rtol=1e-4
    )
    np.testing.assert_allclose(metrics["drift"], np.mean(drift), rtol=1e-4)
    np.testing.assert_allclose(
        metrics["approx_kl"], np.mean([0.5, -0.5]) - np.log([1.5, 0.5]).mean(), rtol=1e-5
    )


def test_first_gradient_is_that_of_ppo():
    """At a ratio of 1 neither penalty has set in."""
    rng = np.random.default_rng(0)
    log_prob, advantage = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)
    gradients = [
        jax.grad(
            lambda x, args=args, script=script: script.policy_loss(x, log_prob, advantage, *args)[0]
        )(log_prob)
        for script, args in ((ppo, (0.2,)), (dpo, (2.0, 0.6)))
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-7)
    assert np.abs(gradients[0]).max() > 1e-3


def definitions(body) -> dict:
    """Functions and classes by name, as their syntax tree."""
    return {
        node.name: ast.dump(ast.parse(ast.unparse(node))) for node in body if hasattr(node, "name")
    }


def test_difference_from_ppo_is_the_algorithm():
    trees = [ast.parse(Path(script.__file__).read_text()) for script in (ppo, dpo)]
    theirs, ours = (definitions(tree.body) for tree in trees)
    assert ours.keys() - theirs.keys() == {"drift"} and not theirs.keys() - ours.keys()
    differ = {name for name in theirs if theirs[name] != ours[name]}
    assert differ == {"Config", "policy_loss", "make_learner"}
    learners = [
        next(node for node in tree.body if getattr(node, "name", "") == "make_learner")
        for tree in trees
    ]
    theirs, ours = (definitions(learner.body) for learner in learners)
    assert [name for name in theirs if theirs[name] != ours.get(name)] == [
        "loss_fn"
    ] and theirs.keys() == ours.keys()
