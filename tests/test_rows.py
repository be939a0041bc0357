"""What the scripts that learn from rollouts share: steps stored as rows, and the learning rate of each update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, jit_quickly, small_config

import ppo
import ppo_continuous
import ppo_rnn
import pqn


@pytest.mark.parametrize("num_seeds", [0, 3])
def test_rows_are_what_scan_gives(num_seeds):
    """Of all types, NaN and None among them, and large leaves as they are."""

    def step(carry, x):
        output = {
            "flag": carry % 2 == 0,
            "number": jnp.stack([carry + 2**24 - 5, -carry]),
            "half": x.astype(jnp.bfloat16)[:, None],
            "nothing": None,
            "nan": jnp.where(carry == 1, jnp.nan, x),
            "picture": jnp.broadcast_to(x[:, None, None], (4, 9, 9)) > 0,
            "vector": jnp.broadcast_to(carry + 2**25 + jnp.arange(100), (4, 100)),
        }
        return carry + 1, output

    xs = jax.random.normal(jax.random.key(0), (max(1, num_seeds), 5, 4))
    for scan in (jax.lax.scan, ppo.scan_in_rows):
        run = jit_quickly(jax.vmap(lambda xs, scan=scan: scan(step, jnp.int32(0), xs)))
        given = run(xs) if num_seeds else jit_quickly(lambda xs, scan=scan: scan(step, jnp.int32(0), xs))(xs[0])
        expected = given if scan is jax.lax.scan else expected  # noqa: F821
    assert_same(given, expected)


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
