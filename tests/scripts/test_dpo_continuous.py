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


def test_a_scale_of_zero_takes_the_whole_gain():
    """The limit of the definition: no change of the policy is worth anything. 0 / 0 gave NaN."""
    log_ratio, advantage = jnp.array([0.0, 1.0, 0.0, -1.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
    drift = dpo.drift(log_ratio, advantage, 0.0, 0.0)
    np.testing.assert_allclose(drift, [0.0, np.e - 1, 0.0, 1.0], rtol=1e-6)
    slope = jax.grad(lambda x: dpo.drift(x, advantage, 0.0, 0.0).sum())(log_ratio)
    assert np.isfinite(slope).all()


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
