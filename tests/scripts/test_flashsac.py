"""FlashSAC: its batch normalization, the scale of rewards, saved agents and a training.

All else is compared with its twin.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load, save
from support.compilation import jit_quickly
from support.networks import random_agent

import flashsac
from onejit.engine.evaluation import policy_of


def small_config(**settings):
    config = flashsac.Config(
        env_name="ProbeContinuous",
        env_params={"kinds": "cut"},
        hidden_size=4,
        critic_hidden_size=5,
        num_atoms=7,
    )
    return dataclasses.replace(config, **settings)


def test_norms_are_fixed_of_dense_layers_alone():
    with pytest.raises(ValueError, match="fix_norms: Conv_0"):
        flashsac.fix_norms({"Conv_0": {"kernel": jnp.ones((3, 3, 2, 4))}})


# --- statistics of batch normalization ---


def test_running_statistics_against_numpy():
    """Of data far from 0, where E[x^2] - E[x]^2 would have no correct digit."""

    network = flashsac.ResNet(hidden_size=2, num_blocks=0, outputs=1)
    batches = np.random.default_rng(0).normal(1e3, 1.0, size=(5, 64, 2)).astype(np.float32)

    def apply(variables, x, training):
        _, changed = network.apply(
            variables,
            x,
            training=training,
            mutable=["batch_stats", "intermediates"],
            capture_intermediates=lambda module, _: module.name == "BatchNorm_0",
        )
        (normalized,) = changed["intermediates"]["BatchNorm_0"]["__call__"]
        return normalized, changed["batch_stats"]

    @jit_quickly
    def passes(batches):
        variables = network.init(jax.random.key(0), batches[0], training=True)
        outputs = []
        for x in batches:
            y, stats = apply(variables, x, training=True)
            variables = variables | {"batch_stats": stats}
            outputs.append(y)
        evaluated, _ = apply(variables, batches[-1], training=False)
        return outputs, evaluated, variables["batch_stats"]["BatchNorm_0"]

    outputs, evaluated, stats = passes(batches)
    mean, var = np.zeros(2), np.ones(2)
    for x, y in zip(batches, outputs, strict=True):
        expected = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)
        np.testing.assert_allclose(y, expected, atol=1e-3)
        mean = 0.99 * mean + 0.01 * x.mean(axis=0)
        var = 0.99 * var + 0.01 * x.var(axis=0)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-4)
    np.testing.assert_allclose(evaluated, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4)


# --- scale of rewards ---


def test_divisor_of_rewards():
    """The standard deviation of discounted returns, or what brings the largest to the limit."""

    @jit_quickly
    def divisor(var, largest):
        statistics = flashsac.RunningMeanStd(jnp.float32(7.0), var, jnp.float32(10.0))
        return flashsac.reward_divisor(statistics, largest, 5.0)

    np.testing.assert_allclose(divisor(4.0, 3.0), 2.0, rtol=1e-5)
    np.testing.assert_allclose(divisor(4.0, 50.0), 10.0, rtol=1e-5)
    assert divisor(0.0, 0.0) > 0


def test_target_entropy_of_no_deviation_is_finite():
    assert np.isfinite(jit_quickly(flashsac.gaussian_entropy)(0.0))


# --- policies ---


def test_saved_agent_played_in_numpy():
    """From the arrays of a file: tanh of the mean, by the running statistics."""
    config = small_config(num_blocks=2)
    flat = random_agent(flashsac, config)
    arrays = load(save(flat))

    def norm(x, path):
        path = f"actor.ResNet_0.{path}"
        std = np.sqrt(arrays[f"batch_stats.{path}.var"] + 1e-5)
        x = (x - arrays[f"batch_stats.{path}.mean"]) / std
        return x * arrays[f"params.{path}.scale"] + arrays[f"params.{path}.bias"]

    def kernel(path):
        return arrays[f"params.actor.ResNet_0.{path}.kernel"]

    obs = np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32)
    x = norm(obs, "BatchNorm_0") @ kernel("Dense_0")
    for block in ("Block_0", "Block_1"):
        y = np.maximum(norm(x @ kernel(f"{block}.Dense_0"), f"{block}.BatchNorm_0"), 0.0)
        x = x + np.maximum(norm(y @ kernel(f"{block}.Dense_1"), f"{block}.BatchNorm_1"), 0.0)
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6)
    x = x * arrays["params.actor.ResNet_0.RMSNorm_0.scale"]
    outputs = x @ kernel("Dense_1") + arrays["params.actor.ResNet_0.Dense_1.bias"]
    start, act = policy_of(flashsac, config)
    actual = jit_quickly(act)(unflatten_dict(flat, sep="."), start(), obs)[0]
    np.testing.assert_allclose(actual, np.tanh(outputs[:, :1]), rtol=1e-4, atol=1e-5)
