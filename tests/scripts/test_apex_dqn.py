"""Ape-X where its twin does not go: large priorities, large sum trees, targets that are NaN."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly

import apex_dqn

# --- mathematics ---


def test_target_by_hand():
    """Double Q-learning. Nothing is bootstrapped after a termination, not even 0 times NaN."""
    next_q = np.array([[5.0, 7.0, 1.0], [np.nan] * 3])
    next_q_online = np.array([[0.0, 1.0, 2.0]] * 2)
    discount = np.array([0.9, 0.0])
    target = jit_quickly(apex_dqn.q_target)(np.full(2, 3.0), discount, next_q, next_q_online)
    np.testing.assert_allclose(target, [3.0 + 0.9 * 1.0, 3.0], rtol=1e-6)


def test_streams_are_combined_by_hand():
    advantage = np.array([[1.0, 2.0, 6.0], [-1.0, 0.0, 1.0]])
    q = jit_quickly(apex_dqn.dueling_q)(np.array([[10.0], [0.0]]), advantage)
    np.testing.assert_allclose(q, [[8.0, 9.0, 13.0], [-1.0, 0.0, 1.0]])


def replay_of(x):
    """Transitions of which each field is x."""
    return apex_dqn.Transition(*[x for _ in apex_dqn.Transition._fields])


@jit_quickly
def write(td_error, exponent):
    """Priorities of errors, and a tree of them."""
    priority, index = apex_dqn.priority_of(td_error, exponent), jnp.arange(len(td_error))
    return priority, apex_dqn.set_priorities(apex_dqn.init_sum_tree(512), index, priority)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("exponent", [0.0, 2.0, 100.0])
def test_priorities_of_any_exponent_can_be_drawn_from(exponent, scale):
    """Priorities, their sum and the weights are finite, and priorities rise with the error."""
    priority, tree = jax.device_get(write(scale * np.linspace(0.1, 10.0, 500), exponent))
    assert (priority > 0).all() and np.isfinite(priority).all() and (np.diff(priority) >= 0).all()
    assert 0 < apex_dqn.total_priority(tree) < math.inf
    replay, tree = replay_of(jnp.zeros((64, 4, 2))), jax.tree.map(jnp.asarray, tree)
    for importance in (0.0, 1.0, 100.0):  # not compiled, which would round the highest weight
        drawn = apex_dqn.sample(jax.random.key(0), replay, tree, 500, 100, importance)
        _, index, weight = jax.device_get(drawn)
        assert (index < 500).all() and weight.max() == 1.0
        assert np.isfinite(weight).all() and (weight >= 0).all()


def test_epsilons_by_hand():
    epsilons = jit_quickly(apex_dqn.actor_epsilons, static_argnums=0)
    np.testing.assert_allclose(epsilons(8, 0.4, 7.0), 0.4 ** np.arange(1, 9), rtol=1e-5)
    np.testing.assert_allclose(epsilons(1, 0.4, 7.0), [0.4], rtol=1e-6)
    np.testing.assert_array_equal(epsilons(8, -0.4, 7.0), [0.0] * 8)


# --- the sum tree ---


def sums(tree):
    """Each node's children have to add up to what its parent says of it."""
    for level, above in itertools.pairwise(tree):
        total, above = np.asarray(level, float).sum(axis=-1), np.asarray(above).reshape(-1)
        # float32's rounding in one sum of 8
        np.testing.assert_allclose(above[: len(level)], total, rtol=3e-6)
        assert not above[len(level) :].any()
    return np.asarray(tree[0]).reshape(-1)


@pytest.mark.parametrize("size", [1, 8, 9, 65, 40_000])
def test_tree_finds_what_cumulative_sums_find(size):
    rng = np.random.default_rng(size)
    priority = rng.integers(0, 5, size) * 1.0  # whole numbers: sums are exact; some are 0
    priority[rng.integers(size)] = 3.0
    total = priority.sum()
    mass = np.append(np.unique(rng.integers(0, int(total), 200)), [0.0, total - 0.5])
    beyond = [total, 1.01 * total]

    @jit_quickly
    def write_and_find(priority, mass):
        tree = apex_dqn.set_priorities(apex_dqn.init_sum_tree(size), jnp.arange(size), priority)
        return tree, apex_dqn.total_priority(tree), apex_dqn.sample_sum_tree(tree, mass)

    found = write_and_find(priority, np.array([*mass, *beyond]))
    tree, in_all, (item, found) = jax.device_get(found)
    np.testing.assert_array_equal(sums(tree)[:size], priority)
    assert in_all == total
    np.testing.assert_array_equal(
        item[:-2], np.searchsorted(np.cumsum(priority), mass, side="right")
    )
    np.testing.assert_array_equal(found[:-2], priority[item[:-2]])
    assert (item[-2:] < size).all() and (found[-2:] > 0).all()  # rounding never finds an empty slot
