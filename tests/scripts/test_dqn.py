"""DQN's mathematics and its replay against NumPy, and what it learns on environments of known
value.
"""

import dataclasses
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
import dqn
from onejit.engine.evaluation import policy_of

VALUE = toys.ValueDiscrete.__name__

# --- mathematics ---


@pytest.mark.parametrize("double", [False, True])
def test_targets_against_a_loop(double):
    gamma = 0.9
    rng = np.random.default_rng(0)
    reward = rng.normal(size=60)
    terminated = rng.random(60) < 0.2
    q, target_q = rng.normal(size=(2, 60, 4))  # of the observations after the steps
    expected = reward.copy()
    for i in range(60):
        choice = np.argmax((q if double else target_q)[i])
        if not terminated[i]:
            expected[i] += gamma * target_q[i, choice]
    target = dqn.q_target(
        jnp.asarray(reward),
        terminated,
        next_q=jnp.asarray(target_q),
        next_q_online=jnp.asarray(q if double else target_q),
        gamma=gamma,
    )
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_epsilon_by_hand():
    epsilon = dqn.linear_epsilon(jnp.array([0, 50, 100, 900]), 100.0, 0.9, 0.1)
    np.testing.assert_allclose(epsilon, [0.9, 0.5, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(
        dqn.linear_epsilon(jnp.array([1, 50]), 0.0, 0.9, 0.1), [0.1, 0.1], rtol=1e-5
    )


@pytest.mark.parametrize("num_envs, num_steps", [(3, 5), slow(16, 1)])
def test_epsilon_falls_in_the_updates(num_envs, num_steps):
    config = dqn.Config(
        num_envs=num_envs, num_steps=num_steps, total_timesteps=1000, learning_starts=100
    )
    config = dataclasses.replace(
        config, exploration_fraction=0.5, epsilon_start=0.9, epsilon_finish=0.1
    )
    config = dataclasses.replace(
        config, batch_size=1, gradient_steps=1, hidden_sizes=(1,), buffer_size=1000
    )
    epsilon = jit_quickly(dqn.make_train(config))(jax.random.key(0))["metrics"]["epsilon"]
    assert config.warmup_timesteps == math.ceil(100 / (num_envs * num_steps)) * num_envs * num_steps
    assert config.num_updates == (1000 - config.warmup_timesteps) // (num_envs * num_steps)
    share = np.arange(config.num_updates) / config.num_updates
    np.testing.assert_allclose(epsilon, 0.9 - 0.8 * np.minimum(1.0, share / 0.5), rtol=1e-5)


def target_updates(num_envs, num_steps, rollout_counts):
    """Whether the update after each of these numbers of rollouts changes the target network."""
    config = dqn.Config(
        num_envs=num_envs,
        num_steps=num_steps,
        batch_size=4,
        hidden_sizes=(),
        buffer_size=num_envs * num_steps,
        learning_starts=0,
        target_update_interval=30,
    )
    init, update = dqn.make_learner(config)

    def changes(state, count):
        after, _ = update(state._replace(rollout_count=count))
        differs = jax.tree.map(jnp.not_equal, state.target_params, after.target_params)
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(differs)]).any()

    state = jit_quickly(init)(jax.random.key(0))
    return jit_quickly(jax.vmap(changes, (None, 0)))(state, rollout_counts + 1)  # one of warm-up


@pytest.mark.parametrize("num_envs, num_steps", [slow(1, 1), (3, 1), (7, 2), slow(10, 1), (64, 4)])
def test_target_network_counts_environment_steps(num_envs, num_steps):
    """It is due where an update passed a multiple of 30 steps, and in each update of more steps."""
    rollout_size = num_envs * num_steps
    updated = target_updates(num_envs, num_steps, jnp.arange(60))
    for i in range(60):
        steps = range(i * rollout_size + 1, (i + 1) * rollout_size + 1)
        assert updated[i] == any(step % 30 == 0 for step in steps)


def test_target_network_beyond_two_to_the_31_steps():
    """Where the count of steps overflows one interval differs in length, and none is longer."""
    counts = jnp.arange(2**31 // 7 - 300, 2**31 // 7 + 300)
    steps_between = 7 * np.diff(np.flatnonzero(target_updates(7, 1, counts)))
    assert steps_between.max() <= 35  # 30, rounded up to whole updates
    assert (steps_between < 28).sum() <= 1


@pytest.mark.parametrize("tau", [slow(1.0), 0.3])
def test_polyak_factor(tau):
    """Every update is due: the target network moves by `tau` to the parameters learned in it."""
    config = dqn.Config(
        batch_size=4,
        hidden_sizes=(4,),
        buffer_size=100,
        learning_starts=25,
        total_timesteps=100,
        target_update_interval=1,
        tau=tau,
    )
    init, update = dqn.make_learner(config)
    before = jit_quickly(init)(jax.random.key(0))
    after, _ = jit_quickly(update)(before)
    expected = jax.tree.map(
        lambda old, new: old + tau * (new - old), before.target_params, after.params
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
        after.target_params,
        expected,
    )


# --- the replay ---


def counting_rollout(count, num_steps, num_envs):
    """Steps whose every entry tells which step it is, and of which environment.

    One in 10 ends an episode.
    """
    # [T, N]
    number = jnp.asarray((count + np.arange(num_steps))[:, None] * 100 + np.arange(num_envs))
    obs = jnp.stack([number, -number], axis=-1) * 1.0
    return dqn.Transition(
        obs=obs,
        action=number,
        reward=number * 2.0,
        next_obs=obs + 0.5,
        terminated=number // 100 % 10 == 3,
    )


def filled_replay(num_rollouts, num_envs, num_steps, writes):
    rollout = counting_rollout(0, num_steps, num_envs)
    replay = jax.tree.map(
        lambda leaf: jnp.full((num_rollouts, *leaf.shape), -999, leaf.dtype), rollout
    )
    add = jax.jit(dqn.add_rollout)
    for i in range(writes):
        replay = add(replay, counting_rollout(i * num_steps, num_steps, num_envs), jnp.int32(i))
    return replay


@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (3, 4), (1, 7), (2, 10)])
def test_replay_gives_all_that_it_holds_and_nothing_else(num_envs, num_steps):
    num_rollouts = 10 // num_steps
    sample = jax.jit(jax.vmap(partial(dqn.sample, batch_size=6000), (0, None, 0)))
    for writes in {1, num_rollouts, num_rollouts + 1, 31}:
        replay = filled_replay(num_rollouts, num_envs, num_steps, writes)
        count = writes * num_steps
        keys = jax.random.split(jax.random.key(writes), 2)
        batches = sample(keys, replay, jnp.full(2, writes))
        batch = jax.tree.map(lambda leaf: np.asarray(leaf[1]), batches)
        number = batch.action
        starts = range(max(0, count - num_rollouts * num_steps), count)
        valid = {step * 100 + env for step in starts for env in range(num_envs)}
        drawn, times = np.unique(number, return_counts=True)
        assert set(drawn.tolist()) == valid
        assert np.abs(times - 6000 / len(valid)).max() < 5 * math.sqrt(6000 / len(valid))  # uniform
        obs = np.stack([number, -number], axis=-1)
        np.testing.assert_array_equal(batch.obs, obs)
        np.testing.assert_array_equal(batch.next_obs, obs + 0.5)
        np.testing.assert_array_equal(batch.reward, number * 2.0)
        np.testing.assert_array_equal(batch.terminated, number // 100 % 10 == 3)


@pytest.mark.parametrize(
    "seeds, num_envs, num_steps", [slow(1, 1, 1), slow(1, 8, 1), slow(2, 1, 1), (2, 2, 2)]
)
def test_replay_is_written_in_place(seeds, num_envs, num_steps):
    """The compiled loop has no copy of an array of the replay's size."""
    buffer_size = num_envs * num_steps * 12_345
    config = dqn.Config(
        num_envs=num_envs, num_steps=num_steps, buffer_size=buffer_size, learning_starts=16
    )
    init, update = dqn.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    loop = jax.jit(partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
    program = loop.lower(state).compile().as_text()
    # also where XLA takes axes together
    sizes = rf"\[(?:[\d,]*,)?(?:{12_345}|{12_345 * num_steps}|{buffer_size})[,\]]"
    assert re.search(sizes, program)
    assert not re.findall(rf"= \w*{sizes}\S* copy\(.*", program)


def test_warm_up_is_whole_updates():
    """At least one, and enough for `learning_starts` steps."""
    settings = dict(num_envs=4, num_steps=2, total_timesteps=1000)
    assert dqn.Config(learning_starts=0, **settings).warmup_timesteps == 8
    assert dqn.Config(learning_starts=30, **settings).warmup_timesteps == 32


# --- environments of known value ---


def learn(num_updates=250, env_params=(), **overrides):
    """Train one agent: its final state and metrics, and a function from observations to the values
    of actions.
    """
    config = dqn.Config(
        env_name=VALUE,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=2,
        gradient_steps=4,
        batch_size=64,
        buffer_size=2000,
        learning_starts=200,
        total_timesteps=200 + num_updates * 16,
        target_update_interval=64,
        lr=1e-2,
        gamma=0.9,
        epsilon_finish=0.5,
        hidden_sizes=(16, 16),
    )
    config = dataclasses.replace(config, **overrides)
    out = jit_quickly(dqn.make_train(config))(jax.random.key(0))
    network = dqn.make_network(config, *dqn.make_env(config))
    return (
        config,
        out["runner_state"],
        out["metrics"],
        lambda *obs: network.apply(out["runner_state"].params, jnp.asarray(obs, float)),
    )


@pytest.mark.slow
def test_value_of_a_constant_reward():
    *_, metrics, q = learn(env_params={"length": 1})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), 1.0, atol=0.05)
    np.testing.assert_allclose(metrics["q_value"][-1], 1.0, atol=0.05)


@pytest.mark.slow  # as does the one of a truncated episode
def test_value_depends_on_the_observation():
    *_, q = learn(env_params={"length": 1, "reward": "sign"})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[1.0] * 3, [-1.0] * 3], atol=0.05)


@pytest.mark.parametrize(
    "settings",
    [slow({"double": False}), slow({"tau": 0.3})],
    ids=str,
)
def test_value_is_discounted(settings):
    *_, q = learn(env_params={"length": 2, "reward": "last", "shows_time": True}, **settings)
    expected = np.repeat([[0.9], [0.9], [1.0], [1.0]], 3, axis=1)
    np.testing.assert_allclose(q([1, 0], [-1, 0], [1, 1], [-1, 1]), expected, atol=0.05)


@pytest.mark.slow  # the twin covers it
def test_value_depends_on_the_action():
    config, state, _, q = learn(env_params={"length": 1, "reward": "action"})
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[0.0, 0.0, 1.0]] * 2, atol=0.05)
    start, act = policy_of(dqn, config)
    action, _ = act(state.agent, start(), jnp.array([1.0, 1.0]))
    assert action == 2


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


def test_truncation_is_bootstrapped():
    """From the last observation, not from the first one of the next episode, whose sign may be the
    other.
    """
    env_params = {"reward": "sign", "max_steps_in_episode": LIMIT}
    _, _, metrics, q = learn(env_params=env_params, num_updates=500)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[ENDLESS] * 3, [-ENDLESS] * 3], rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()


def test_termination_is_not_bootstrapped():
    *_, q = learn(env_params={"length": LIMIT, "shows_time": True}, num_updates=500)
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, 2)[:, None].repeat(3, axis=1), atol=0.3)


@pytest.mark.parametrize(
    "name, stored",
    [
        ("FrozenLake-misc", jnp.int32),
        slow("Catch-bsuite", jnp.float32),
        slow("Breakout-MinAtar", bool),
    ],
)
def test_observations_of_all_kinds(name, stored):
    """A number, a matrix, a grid with channels, of which bools are exact."""
    config = dqn.Config(
        env_name=name, total_timesteps=300, learning_starts=200, buffer_size=300, hidden_sizes=(8,)
    )
    config = dataclasses.replace(config, buffer_dtype="bool" if stored is bool else "")
    out = jit_quickly(dqn.make_train(config))(jax.random.key(0))
    assert np.isfinite(out["metrics"]["td_loss"]).all()
    assert out["runner_state"].replay.obs.dtype == stored
    if stored is bool:
        usual = jit_quickly(dqn.make_train(dataclasses.replace(config, buffer_dtype="")))(
            jax.random.key(0)
        )
        np.testing.assert_array_equal(
            out["runner_state"].replay.obs, usual["runner_state"].replay.obs
        )


@pytest.mark.parametrize("script", [dqn, apex_dqn])
def test_network_without_hidden_layers(script):
    """Values are linear in the observation."""
    config = script.Config(hidden_sizes=())
    network = script.make_network(config, *script.make_env(config))
    obs = jax.random.normal(jax.random.key(0), (3, 4))
    params = network.init(jax.random.key(1), obs)
    a, b, zero = (network.apply(params, x) for x in (obs, 2 * obs, 0 * obs))
    assert a.shape == (3, 2) and {
        leaf.shape[0] for leaf in jax.tree.leaves(params) if leaf.ndim == 2
    } == {4}
    np.testing.assert_allclose(b - zero, 2 * (a - zero), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_without_hidden_layers():
    config = dqn.Config(hidden_sizes=(), total_timesteps=300, learning_starts=200, buffer_size=300)
    out = jit_quickly(dqn.make_train(config))(jax.random.key(0))
    assert np.isfinite(out["metrics"]["td_loss"]).all()
