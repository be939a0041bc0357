"""Ape-X's mathematics, its sum tree, its replay, and what it learns where values are known."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from support.compilation import jit_quickly
from support.tiers import slow

import apex_dqn

# --- mathematics ---


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_transitions_against_a_loop(n_step):
    gamma, num_steps, num_envs, rng = 0.9, 12, 5, np.random.default_rng(n_step)
    length = num_steps + n_step - 1
    terminated, truncated = rng.random((2, length, num_envs)) < 0.2
    reward, q, obs, next_obs = rng.normal(size=(4, length, num_envs)).astype(np.float32)
    action = rng.integers(0, 4, (length, num_envs))
    given = dict(obs=obs, action=action, q_taken=q, reward=reward, next_obs=next_obs)
    steps = apex_dqn.Step(**given, terminated=terminated, truncated=truncated)

    @jit_quickly
    def transitions(steps):
        made = apex_dqn.n_step_transitions(steps, n_step)
        return made, *apex_dqn.discounted(made, gamma)

    made, n_step_return, discounts = jax.device_get(transitions(steps))
    for t in range(num_steps):
        for env in range(num_envs):
            total, discount = 0.0, 1.0
            for k in range(n_step):
                total, discount = total + discount * reward[t + k, env], discount * gamma
                if terminated[t + k, env] or truncated[t + k, env]:
                    break
            if terminated[t + k, env]:
                discount = 0.0
            np.testing.assert_allclose(n_step_return[t, env], total, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(discounts[t, env], discount, rtol=1e-5)
            assert made.next_obs[t, env] == next_obs[t + k, env]
            assert made.obs[t, env] == obs[t, env]
            assert made.action[t, env] == action[t, env]


def test_target_by_hand():
    """The online network chooses the action that the target network values: double Q-learning."""
    next_q, next_q_online = np.array([[5.0, 7.0, 1.0]] * 2), np.array([[0.0, 1.0, 2.0]] * 2)
    discount = np.array([0.9, 0.0])
    target = jit_quickly(apex_dqn.q_target)(np.full(2, 3.0), discount, next_q, next_q_online)
    np.testing.assert_allclose(target, 3.0 + discount * 1.0, rtol=1e-6)


def test_streams_are_combined_by_hand():
    advantage = np.array([[1.0, 2.0, 6.0], [-1.0, 0.0, 1.0]])
    q = jit_quickly(apex_dqn.dueling_q)(np.array([[10.0], [0.0]]), advantage)
    np.testing.assert_allclose(q, [[8.0, 9.0, 13.0], [-1.0, 0.0, 1.0]])


def replay_of(x):
    """Transitions of which each field is x."""
    return apex_dqn.Transition(*[x for _ in apex_dqn.Transition._fields])


def test_priorities_and_weights_by_hand():
    priorities = jit_quickly(apex_dqn.priority_of)(np.array([-4.0, 0.0, 9.0]), 0.5)
    np.testing.assert_allclose(priorities, [2.0, 1e-3, 3.0], rtol=1e-4)
    # sqrt of 1/5, 1/1.25, 1/2.5
    weights = jit_quickly(apex_dqn.importance_weights)(np.array([0.5, 0.125, 0.25]), 10, 0.5)
    np.testing.assert_allclose(weights, np.sqrt([0.25, 1.0, 0.5]), rtol=1e-5)


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
        np.testing.assert_allclose(
            above[: len(level)], total, rtol=3e-6
        )  # float32's rounding in one sum of 8
        assert not above[len(level) :].any()
    return np.asarray(tree[0]).reshape(-1)


@pytest.mark.parametrize("size", [1, 5, 8, 9, 64, 65, 4096, 40_000])
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


@pytest.mark.slow
def test_tree_is_exact_after_a_million_writes():
    size, batch, rounds = 5000, 500, 2000

    def write(tree, key):
        index_key, priority_key = jax.random.split(key)
        index = jax.random.permutation(index_key, size)[:batch]
        return apex_dqn.set_priorities(
            tree, index, jnp.exp(10 * jax.random.normal(priority_key, (batch,)))
        ), None

    keys = jax.random.split(jax.random.key(0), rounds)
    tree, _ = jax.jit(lambda: jax.lax.scan(write, apex_dqn.init_sum_tree(size), keys))()
    leaves = sums(tree)
    assert np.isfinite(leaves).all() and (leaves[:size] > 0).all() and not leaves[size:].any()
    np.testing.assert_allclose(apex_dqn.total_priority(tree), leaves.astype(float).sum(), rtol=1e-5)


def test_sampling_follows_the_priorities():
    """Chi-square of 4e5 draws from 300 items, and the weights that make up for it."""
    size, batch, draws, alpha = 300, 100, 4000, 0.6
    td_error = np.random.default_rng(0).normal(size=size).astype(np.float32)
    priority, tree = write(td_error, alpha)
    replay = replay_of(jnp.arange(512.0).reshape(64, 4, 2))
    draw = lambda key: apex_dqn.sample(key, replay, tree, size, batch, 1.0)  # noqa: E731
    drawn = jit_quickly(lambda key: jax.lax.map(draw, jax.random.split(key, draws)))
    batches, index, weight = jax.device_get(drawn(jax.random.key(0)))
    counts = np.bincount(index.reshape(-1), minlength=512)
    expected = np.abs(td_error) ** alpha / (np.abs(td_error) ** alpha).sum() * batch * draws
    assert not counts[size:].any()
    assert (
        (counts[:size] - expected) ** 2 / expected
    ).sum() < 400  # 99.99 % of chi-square with 299 degrees are below
    np.testing.assert_allclose(batches.obs, index)
    inverse = 1 / np.asarray(priority)[index]
    np.testing.assert_allclose(weight, inverse / inverse.max(axis=1, keepdims=True), rtol=1e-4)


def test_replay_wraps_around():
    num_rollouts, num_steps, num_envs = 3, 2, 3
    replay = replay_of(np.zeros((num_rollouts, num_steps, num_envs), np.float32))
    add = jit_quickly(apex_dqn.add_rollout)
    for count in range(8):
        rows = (count * 6 + np.arange(6.0)).reshape(num_steps, num_envs)
        new = replay_of(rows)._replace(rewards=rows + 1)
        replay = jax.device_get(add(replay, new, count))
    np.testing.assert_array_equal(replay.obs.reshape(-1), [*range(36, 48), *range(30, 36)])
    np.testing.assert_array_equal(replay.rewards, replay.obs + 1)


def test_priorities_are_of_the_transitions_that_they_stand_beside():
    """Also where the ring has wrapped around. Nothing is learned: the learning rate is 0."""
    config = apex_dqn.Config(
        num_envs=4, num_steps=3, n_step=2, learning_starts=40, gradient_steps=1, batch_size=1
    )
    config = dataclasses.replace(config, buffer_size=65, lr=0.0, hidden_sizes=(4,))
    init, update = apex_dqn.make_learner(config)
    network = apex_dqn.make_network(config, *apex_dqn.make_env(config))

    @jit_quickly
    def run():
        """Train for 7 updates. The warm-up has filled 4 of the replay's 5 rollouts."""
        state, _ = jax.lax.scan(update, init(jax.random.key(0)), length=7)
        replay = jax.tree.map(lambda x: x.reshape(60, *x.shape[3:]), state.replay)
        n_step_return, discount = apex_dqn.discounted(replay, config.gamma)
        q, next_q = (network.apply(state.params, obs) for obs in (replay.obs, replay.next_obs))
        target = n_step_return + discount * next_q.max(axis=-1)
        td_error = target - q[jnp.arange(60), replay.action]
        expected = apex_dqn.priority_of(td_error, config.priority_exponent)
        return expected, state.tree, apex_dqn.total_priority(state.tree)

    expected, tree, total = jax.device_get(run())
    priorities = sums(tree)[:60]
    np.testing.assert_allclose(priorities, expected, rtol=1e-3)
    np.testing.assert_allclose(total, priorities.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_replay_is_written_in_place(seeds):
    """The compiled loop has no copy of an array of the replay's size."""
    config = apex_dqn.Config(num_envs=8, batch_size=8, buffer_size=8 * 12_345, learning_starts=100)
    init, update = apex_dqn.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    loop = jax.jit(functools.partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
    program = loop.lower(state).compile().as_text()
    size = 8 * 12_345
    sizes = rf"\[(?:[\d,]*,)?(?:12345|{size})[,\]]"  # also where XLA takes axes together
    assert re.search(sizes, program)
    assert not re.findall(rf"= \w*{sizes}\S* copy\(.*", program)
    assert not re.findall(
        rf"= \S*\[[\d,]*{-(-size // apex_dqn.FANOUT)},\S* copy\(.*", program
    )  # the tree's leaves


@pytest.mark.parametrize("n_step", [1, 3])
def test_nothing_carried_is_empty(n_step):
    """Orbax does not save arrays of size 0."""
    init, update = apex_dqn.make_learner(apex_dqn.Config(n_step=n_step))
    begun = jax.eval_shape(init, jax.random.key(0))
    assert all(leaf.size for leaf in jax.tree.leaves(begun))
    assert jax.tree.structure(jax.eval_shape(update, begun)[0]) == jax.tree.structure(begun)


# --- training ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FrozenLake-misc", slow("Catch-bsuite"), "Breakout-MinAtar"])
def test_observations_of_all_kinds(name):
    """A number, a matrix, a grid with channels."""
    config = apex_dqn.Config(
        env_name=name, num_envs=8, total_timesteps=300, learning_starts=200, hidden_sizes=(8,)
    )
    config = dataclasses.replace(
        config, buffer_size=300, buffer_dtype="bool" if "MinAtar" in name else ""
    )
    out = jit_quickly(apex_dqn.make_train(config))(jax.random.key(0))
    assert np.isfinite(out["metrics"]["td_loss"]).all()


@pytest.mark.slow
def test_training_without_hidden_layers_and_with_the_largest_exponent():
    config = apex_dqn.Config(
        hidden_sizes=(), priority_exponent=100.0, num_envs=8, learning_starts=100, batch_size=16
    )
    config = dataclasses.replace(config, buffer_size=400, total_timesteps=500)
    out = jit_quickly(apex_dqn.make_train(config))(jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out["runner_state"].params))


@pytest.mark.slow
def test_nothing_is_bootstrapped_after_a_termination():
    """Not even 0 times NaN: every step ends an episode, and the target network is broken."""
    config = apex_dqn.Config(
        env_name="ProbeDiscrete", env_params={"kinds": "best"}, num_envs=4, batch_size=8
    )
    config = dataclasses.replace(config, hidden_sizes=(4,), learning_starts=16, buffer_size=64)
    init, update = apex_dqn.make_learner(config)
    state = jit_quickly(init)(jax.random.key(0))
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.target_params)
    state, metrics = jit_quickly(update)(state._replace(target_params=broken))
    assert np.isfinite(metrics["td_loss"])
