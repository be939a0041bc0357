"""What scripts share in their loops: unrolled on GPUs, and the learning rate of each update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import jit_quickly, small_config

import ppo
import ppo_continuous
import ppo_rnn
import pqn


@pytest.mark.parametrize("length", [1, 8, 21])  # less than what is unrolled, as much, and no multiple of it
def test_unrolled_scan_is_what_scan_gives(length):
    """Under `vmap` and with its gradient; as CPUs run it, and as the loop that GPUs run computes on a CPU."""

    def step(carry, x):
        carry = jnp.tanh(carry * weights + x)
        return carry, {"carry": carry, "nothing": None, "flag": x > 0}

    def final(scan, carry, xs):
        carry, outputs = scan(step, carry, xs)
        return carry.sum() + outputs["carry"].sum(), outputs

    def of_gpus(step, carry, xs):
        return ppo.unrolled_scan(step, carry, xs)

    weights, carry = jnp.asarray([0.5, -1.5]), jnp.zeros((3, 2))
    xs = jax.random.normal(jax.random.key(0), (3, length, 2))
    found = []
    for scan in (jax.lax.scan, ppo.unrolled_scan, of_gpus):
        if scan is of_gpus:  # the branch of all platforms but CPUs
            patch = pytest.MonkeyPatch()
            patch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
        run = jax.vmap(jax.value_and_grad(functools.partial(final, scan), argnums=1, has_aux=True))
        found.append(jit_quickly(lambda carry, xs, run=run: run(carry, xs))(carry, xs))
    patch.undo()
    for other in found[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), other, found[0])


@pytest.mark.parametrize(("platform", "steps"), [("cpu", 1), ("cuda", 8)])
def test_only_gpus_unroll(platform, steps):
    """The program as it is given to XLA, in which a step is a function."""

    def run(x):
        return ppo.unrolled_scan(lambda carry, x: (carry @ carry + x, None), jnp.eye(3), x, unroll=8)[0]

    lowered = jax.jit(run).trace(jnp.zeros((24, 3, 3))).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("call @closed_call(") == steps


@pytest.mark.parametrize("anneal", [True, False])
@pytest.mark.parametrize("script", [ppo, ppo_continuous, ppo_rnn, pqn], ids=lambda script: script.__name__)
def test_learning_rate_of_each_update(script, anneal, monkeypatch):
    """With steps of size 1 in place of Adam's, an update moves each parameter down by its gradient steps' rates."""
    ones = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (jax.tree.map(jnp.ones_like, updates), state)
    )
    monkeypatch.setattr(script.optax, "scale_by_adam", lambda **_: ones)
    monkeypatch.setattr(script.optax, "scale_by_radam", lambda **_: ones)
    config = dataclasses.replace(small_config(script, num_updates=3), lr=1e-3, anneal_lr=anneal)
    init, update = script.make_learner(config)
    state, advance = jit_quickly(init)(jax.random.key(0)), jit_quickly(update)
    for i in range(3):
        after, _ = advance(state)
        rate = 1e-3 * (1 - i / 3 if anneal else 1) * config.update_epochs * config.num_minibatches
        for old, new in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
            np.testing.assert_allclose(old - new, rate, rtol=1e-2, atol=1e-6)
        state = after
