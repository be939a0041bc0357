"""Comparisons of pytrees."""

import jax
import numpy as np


def arrays(tree) -> list[np.ndarray]:
    """The leaves as arrays, random keys as their data."""

    def array(leaf):
        is_array = isinstance(leaf, jax.Array)
        if is_array and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return [array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(tree, other):
    """Bit for bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(arrays(tree), arrays(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_close(out, other):
    """Metrics and agents of two trainings, up to what two compilations of a program may differ."""
    trees = [(tree["metrics"], tree["runner_state"].agent) for tree in (out, other)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    for a, b in zip(*map(arrays, trees), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
