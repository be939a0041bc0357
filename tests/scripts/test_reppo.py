"""REPPO's networks and its distribution of values against SciPy; all else has its twin."""

import jax
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from gymnax.environments import spaces
from support.compilation import jit_quickly

import reppo

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


def test_hl_gauss_of_a_support_without_width_is_finite():
    assert np.isfinite(hl_gauss(np.array([-1.0, 2.0, 3.0]), 2.0, 2.0, 5)).all()


@pytest.mark.parametrize("v_min, v_max, num_bins", [(-10.0, 10.0, 51), (-2.0, 200.0, 102)])
def test_critic_reads_the_mean_of_its_bins_and_begins_near_0(v_min, v_max, num_bins):
    space = spaces.Box(-np.inf, np.inf, (3,))
    critic = reppo.Critic(space, (64, 64), "swish", num_bins, v_min, v_max)
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
