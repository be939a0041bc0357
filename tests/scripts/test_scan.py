"""The loop over time of a memory, unrolled on GPUs."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.small import field_names, small_config

import ppo_rnn


# less than what is unrolled, as much, and no multiple of it
@pytest.mark.parametrize("length", [1, 8, 21])
def test_scan_over_time_is_what_scan_gives(length, monkeypatch):
    """Under `vmap` and with gradients, also by what the step closes over.

    Both as CPUs and as GPUs run it.
    """

    def final(weights, xs, scan):
        def step(carry, x):
            carry = jnp.tanh(carry * weights + x)
            return carry, {"carry": carry, "nothing": None, "flag": x > 0}

        carry, outputs = scan(step, jnp.zeros(2), xs)
        return carry.sum() + outputs["carry"].sum(), outputs

    def run(scan):
        gradient = jax.value_and_grad(
            functools.partial(final, scan=scan), argnums=(0, 1), has_aux=True
        )
        return jit_quickly(jax.vmap(gradient, (None, 0)))(jnp.asarray([0.5, -1.5]), xs)

    xs = jax.random.normal(jax.random.key(0), (3, length, 2))
    expected, as_cpus = run(jax.lax.scan), run(ppo_rnn.scan_over_time)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    for found in (as_cpus, run(ppo_rnn.scan_over_time)):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
        )


@pytest.mark.parametrize(("platform", "steps"), [("cpu", 1), ("cuda", 8)])
def test_only_gpus_unroll(platform, steps):
    """The program that XLA is given, in which a step is a function (from jax 0.11 on, inlined)."""

    def run(x):
        return ppo_rnn.scan_over_time(lambda carry, x: (carry @ carry + x, None), jnp.eye(3), x)[0]

    lowered = jax.jit(run).trace(jnp.zeros((24, 3, 3))).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert max(map(text.count, ("call @closed_call(", "dot_general"))) == steps


@pytest.mark.parametrize("name", ["ppo_rnn", "pqn_rnn", "mappo"])
def test_only_the_memory_is_unrolled(name, monkeypatch):
    script = importlib.import_module(name)
    unrolled = []

    def scan_over_time(step, memory, inputs):
        unrolled.append(step.__qualname__)
        return jax.lax.scan(step, memory, inputs)

    monkeypatch.setattr(script, "scan_over_time", scan_over_time)
    cell = {"cell": "gru"} if "cell" in field_names(script) else {}
    init, update = script.make_learner(small_config(script, **cell))
    jax.eval_shape(lambda key: update(init(key)), jax.random.key(0))
    assert set(unrolled) == {"Gru.__call__.<locals>.step"}
