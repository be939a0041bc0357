"""CrossQ: batch renormalization against its formula, and saved agents.

All else is compared with its twin.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load, save
from support.compilation import jit_quickly
from support.networks import random_agent

import crossq
from onejit.engine.evaluation import policy_of

WARMUP = 2

# --- batch renormalization ---


def test_correction_by_hand():
    """r and d of arXiv 1702.03275, algorithm 1, with r in [1/3, 3] and d in [-5, 5]."""
    scale, shift = jit_quickly(crossq.renormalization)(
        mean=np.array([1.0, 0.0, 9.0, -9.0]),
        std=np.array([1.0, 8.0, 0.1, 1.0]),
        running_mean=np.array([0.0, 0.0, 0.0, 0.0]),
        running_std=np.array([2.0, 2.0, 1.0, 1.0]),
    )
    np.testing.assert_allclose(scale, [0.5, 3.0, 1 / 3, 1.0])
    np.testing.assert_allclose(shift, [0.5, 0.0, 5.0, -5.0])


def test_batch_renormalization_against_numpy():
    """Plain normalization in the first passes, then the correction; the running statistics."""
    layer = crossq.BatchRenorm(WARMUP)
    batches = np.random.default_rng(0).normal(2.0, 3.0, size=(5, 8, 2)).astype(np.float32)
    init = jit_quickly(partial(layer.init, training=True))
    stats = init(jax.random.key(0), batches[0])["batch_stats"]
    params = {"scale": np.array([1.5, 0.5]), "bias": np.array([0.1, -0.2])}
    apply = jit_quickly(partial(layer.apply, mutable=["batch_stats"]), static_argnums=2)
    mean, var = np.zeros(2), np.ones(2)
    for i, x in enumerate(batches):
        y, changed = apply({"params": params, "batch_stats": stats}, x, True)
        stats = changed["batch_stats"]
        std, running_std = np.sqrt(x.var(axis=0) + 1e-3), np.sqrt(var + 1e-3)
        r, d = 1.0, 0.0
        if i >= WARMUP:
            r = np.clip(std / running_std, 1 / 3, 3)
            d = np.clip((x.mean(axis=0) - mean) / running_std, -5, 5)
        expected = ((x - x.mean(axis=0)) / std * r + d) * params["scale"] + params["bias"]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        mean = 0.99 * mean + 0.01 * x.mean(axis=0)
        var = 0.99 * var + 0.01 * x.var(axis=0)
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(stats["var"], var, rtol=1e-5)
        assert int(stats["passes"]) == i + 1

    y, _ = apply({"params": params, "batch_stats": stats}, x, False)
    expected = (x - mean) / np.sqrt(var + 1e-3) * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


# --- passes of the critics ---


def small_config(**settings):
    config = crossq.Config(
        num_envs=2,
        gradient_steps=4,
        policy_delay=2,
        batch_size=8,
        hidden_sizes=(4,),
        critic_hidden_sizes=(5,),
        learning_starts=9,
        buffer_size=100,
    )
    return dataclasses.replace(config, **settings)


def test_saved_agent_played_in_numpy():
    """From the arrays of a file, with the running statistics."""
    config = small_config(hidden_sizes=(4, 6))
    flat = random_agent(crossq, config)
    arrays = load(save(flat))

    def renormalized(x, i):
        path = f"actor.Mlp_0.BatchRenorm_{i}"
        std = np.sqrt(arrays[f"batch_stats.{path}.var"] + 1e-3)
        x = (x - arrays[f"batch_stats.{path}.mean"]) / std
        return x * arrays[f"params.{path}.scale"] + arrays[f"params.{path}.bias"]

    def dense(x, i):
        path = f"params.actor.Mlp_0.Dense_{i}"
        return x @ arrays[f"{path}.kernel"] + arrays[f"{path}.bias"]

    obs = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    x = renormalized(obs, 0)
    for i in range(2):
        x = renormalized(np.maximum(dense(x, i), 0.0), i + 1)
    expected = np.tanh(dense(x, 2)[:, :1])
    start, act = policy_of(crossq, config)
    actual = jit_quickly(act)(unflatten_dict(flat, sep="."), start(), obs)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
