"""Ape-X's mathematics, its sum tree, its replay, and what it learns where values are known."""

import dataclasses
import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # registers the environments
from support.compilation import jit_quickly
from support.tiers import slow

import apex_dqn
from onejit.engine.evaluation import policy_of

VALUE = toys.ValueDiscrete.__name__

# --- mathematics ---


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_transitions_against_a_loop(n_step):
    gamma, num_steps, num_envs, rng = 0.9, 12, 5, np.random.default_rng(n_step)
    length = num_steps + n_step - 1
    terminated, truncated = rng.random((2, length, num_envs)) < 0.2
    reward, q, obs, next_obs = rng.normal(size=(4, length, num_envs)).astype(np.float32)
    action = rng.integers(0, 4, (length, num_envs))
    given = dict(obs=obs, action=action, q_taken=q, reward=reward, next_obs=next_obs)
    steps = apex_dqn.Step(
        **jax.tree.map(jnp.asarray, given | dict(terminated=terminated, truncated=truncated))
    )
    made = apex_dqn.n_step_transitions(steps, n_step)
    n_step_return, discounts = apex_dqn.discounted(made, gamma)
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


@pytest.mark.parametrize("discount", [0.9, 0.0])
def test_target_by_hand(discount):
    """The online network chooses the action that the target network values: double Q-learning."""
    next_q, next_q_online = jnp.array([[5.0, 7.0, 1.0]]), jnp.array([[0.0, 1.0, 2.0]])
    target = apex_dqn.q_target(jnp.array([3.0]), jnp.array([discount]), next_q, next_q_online)
    np.testing.assert_allclose(target, 3.0 + discount * 1.0, rtol=1e-6)


def test_streams_are_combined_by_hand():
    advantage = jnp.array([[1.0, 2.0, 6.0], [-1.0, 0.0, 1.0]])
    q = apex_dqn.dueling_q(jnp.array([[10.0], [0.0]]), advantage)
    np.testing.assert_allclose(q, [[8.0, 9.0, 13.0], [-1.0, 0.0, 1.0]])


def replay_of(x):
    """Transitions of which each field is x."""
    return apex_dqn.Transition(*[x for _ in apex_dqn.Transition._fields])


def flatten(replay, size):
    """[num_rollouts, num_steps, num_envs, ...] -> NumPy's [size, ...]."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(size, *x.shape[3:]), replay)


def test_priorities_and_weights_by_hand():
    np.testing.assert_allclose(
        apex_dqn.priority_of(jnp.array([-4.0, 0.0, 9.0]), 0.5), [2.0, 1e-3, 3.0], rtol=1e-4
    )
    weights = apex_dqn.importance_weights(
        jnp.array([0.5, 0.125, 0.25]), 10, 0.5
    )  # sqrt of 1/5, 1/1.25, 1/2.5
    np.testing.assert_allclose(weights, np.sqrt([0.25, 1.0, 0.5]), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("exponent", [0.0, 2.0, 100.0])
def test_priorities_of_any_exponent_can_be_drawn_from(exponent, scale):
    """Priorities, their sum and the weights are finite, and priorities rise with the error."""
    size = 500
    priority = apex_dqn.priority_of(scale * jnp.linspace(0.1, 10.0, size), exponent)
    assert (priority > 0).all() and np.isfinite(priority).all() and (np.diff(priority) >= 0).all()
    tree = apex_dqn.set_priorities(apex_dqn.init_sum_tree(512), jnp.arange(size), priority)
    assert 0 < apex_dqn.total_priority(tree) < math.inf
    replay = replay_of(jnp.arange(512.0).reshape(64, 4, 2))
    for importance in (0.0, 1.0, 100.0):
        _, index, weight = apex_dqn.sample(jax.random.key(0), replay, tree, size, 100, importance)
        assert (index < size).all() and weight.max() == 1.0
        assert np.isfinite(weight).all() and (weight >= 0).all()


def test_epsilons_by_hand():
    epsilons = apex_dqn.actor_epsilons(8, 0.4, 7.0)
    np.testing.assert_allclose(epsilons, 0.4 ** np.arange(1, 9), rtol=1e-5)
    np.testing.assert_allclose(apex_dqn.actor_epsilons(1, 0.4, 7.0), [0.4], rtol=1e-6)
    np.testing.assert_array_equal(apex_dqn.actor_epsilons(3, -0.4, 7.0), [0.0] * 3)


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

    found = write_and_find(
        jnp.asarray(priority, jnp.float32), jnp.asarray([*mass, *beyond], jnp.float32)
    )
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
    tree = apex_dqn.init_sum_tree(512)
    priority = apex_dqn.priority_of(jnp.asarray(td_error), alpha)
    tree = apex_dqn.set_priorities(tree, jnp.arange(size), priority)
    replay = replay_of(jnp.arange(512.0).reshape(64, 4, 2))
    draw = lambda key: apex_dqn.sample(key, replay, tree, size, batch, 1.0)  # noqa: E731
    batches, index, weight = jax.jit(
        lambda: jax.lax.map(draw, jax.random.split(jax.random.key(0), draws))
    )()
    counts = np.bincount(np.asarray(index).reshape(-1), minlength=512)
    expected = np.abs(td_error) ** alpha / (np.abs(td_error) ** alpha).sum() * batch * draws
    assert not counts[size:].any()
    assert (
        (counts[:size] - expected) ** 2 / expected
    ).sum() < 400  # 99.99 % of chi-square with 299 degrees are below
    np.testing.assert_allclose(batches.obs, index)
    weight = np.asarray(weight)
    inverse = 1 / np.asarray(priority)[np.asarray(index)]
    np.testing.assert_allclose(weight, inverse / inverse.max(axis=1, keepdims=True), rtol=1e-4)


def test_replay_wraps_around():
    num_rollouts, num_steps, num_envs = 3, 2, 3
    replay = replay_of(jnp.zeros((num_rollouts, num_steps, num_envs)))
    for count in range(8):
        rows = (count * 6 + jnp.arange(6.0)).reshape(num_steps, num_envs)
        new = replay_of(rows)._replace(rewards=rows + 1)
        replay = apex_dqn.add_rollout(replay, new, jnp.int32(count))
    np.testing.assert_array_equal(replay.obs.reshape(-1), [*range(36, 48), *range(30, 36)])
    np.testing.assert_array_equal(replay.rewards, replay.obs + 1)


def test_priorities_are_of_the_transitions_that_they_stand_beside():
    """Also where the ring has wrapped around. Nothing is learned: the learning rate is 0."""
    config = apex_dqn.Config(
        num_envs=4, num_steps=3, n_step=2, learning_starts=40, gradient_steps=1, batch_size=1
    )
    config = dataclasses.replace(config, buffer_size=65, lr=0.0, hidden_sizes=(4,))
    init, update = apex_dqn.make_learner(config)
    state, update = jit_quickly(init)(jax.random.key(0)), jit_quickly(update)
    for _ in range(7):  # 4 rollouts of the warm-up and 7 for the ring's 5
        state, _ = update(state)
    network = apex_dqn.make_network(config, *apex_dqn.make_env(config))
    replay = flatten(state.replay, 60)
    q = np.asarray(network.apply(state.params, replay.obs))
    next_q = np.asarray(network.apply(state.params, replay.next_obs))
    n_step_return, discount = apex_dqn.discounted(replay, config.gamma)
    target = n_step_return + discount * next_q.max(axis=-1)
    td_error = target - q[np.arange(60), replay.action]
    priorities = sums(state.tree)[:60]
    expected = np.asarray(apex_dqn.priority_of(td_error, config.priority_exponent))
    np.testing.assert_allclose(priorities, expected, rtol=1e-3)
    np.testing.assert_allclose(apex_dqn.total_priority(state.tree), priorities.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_replay_is_written_in_place(seeds):
    """The compiled loop has no copy of an array of the replay's size."""
    config = apex_dqn.Config(num_envs=8, batch_size=8, buffer_size=8 * 12_345, learning_starts=100)
    init, update = apex_dqn.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    loop = jax.jit(partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
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


# --- environments of known value ---


def learn(num_updates=400, env_params=(), **overrides):
    """Train one agent: config, final state, metrics, and the function from observations to Q."""
    config = apex_dqn.Config(
        env_name=VALUE,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=2,
        gradient_steps=4,
        batch_size=64,
        buffer_size=2000,
        learning_starts=200,
        total_timesteps=200 + num_updates * 16,
        actor_sync_interval=64,
        target_update_interval=64,
        lr=1e-2,
        gamma=0.9,
        hidden_sizes=(16, 16),
    )
    config = dataclasses.replace(config, **overrides)
    out = jit_quickly(apex_dqn.make_train(config))(jax.random.key(0))
    network = apex_dqn.make_network(config, *apex_dqn.make_env(config))
    params = out["runner_state"].params
    return (
        config,
        out["runner_state"],
        out["metrics"],
        lambda *obs: network.apply(params, jnp.asarray(obs, float)),
    )


@pytest.mark.slow
def test_value_is_discounted():
    *_, q = learn(
        env_params={"length": 2, "reward": "last", "shows_time": True},
        tau=0.3,
        n_step=2,
    )
    expected = np.repeat([[0.9], [0.9], [1.0], [1.0]], 3, axis=1)
    np.testing.assert_allclose(q([1, 0], [-1, 0], [1, 1], [-1, 1]), expected, atol=0.05)


@pytest.mark.slow
def test_value_depends_on_the_action():
    config, state, _, q = learn(env_params={"length": 1, "reward": "action"})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[0.0, 0.0, 1.0]] * 2, atol=0.05)
    start, act = policy_of(apex_dqn, config)
    action, _ = act(state.agent, start(), jnp.array([1.0, 1.0]))
    assert action == 2


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_truncation_is_bootstrapped(n_step):
    """From the last observation, not from the next episode's first, whose sign may differ."""
    env_params = {"reward": "sign", "max_steps_in_episode": LIMIT}
    _, _, metrics, q = learn(env_params=env_params, num_updates=600, n_step=n_step)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[ENDLESS] * 3, [-ENDLESS] * 3], rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_termination_is_not_bootstrapped(n_step):
    *_, q = learn(env_params={"length": LIMIT, "shows_time": True}, num_updates=600, n_step=n_step)
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, 2)[:, None].repeat(3, axis=1), atol=0.3)


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
        env_name="ValueDiscrete", env_params={"length": 1}, num_envs=4, batch_size=8
    )
    config = dataclasses.replace(config, hidden_sizes=(4,), learning_starts=16, buffer_size=64)
    init, update = apex_dqn.make_learner(config)
    state = jit_quickly(init)(jax.random.key(0))
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.target_params)
    state, metrics = jit_quickly(update)(state._replace(target_params=broken))
    assert np.isfinite(metrics["td_loss"])
