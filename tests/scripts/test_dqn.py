"""DQN's mathematics and its replay against NumPy."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.tiers import slow
from support.trees import arrays

import apex_dqn
import dqn

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
    target = jit_quickly(dqn.q_target)(
        reward,
        terminated,
        next_q=target_q,
        next_q_online=q if double else target_q,
        gamma=gamma,
    )
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


def test_epsilon_by_hand():
    epsilon = jit_quickly(dqn.linear_epsilon)
    step = np.array([0, 50, 100, 900])
    np.testing.assert_allclose(epsilon(step, 100.0, 0.9, 0.1), [0.9, 0.5, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(epsilon(step + 1, 0.0, 0.9, 0.1), 0.1, rtol=1e-5)


@functools.cache
def training(env_name, num_envs, num_steps, buffer_dtype):
    """The config, and what `train` returns."""
    config = dqn.Config(
        env_name=env_name,
        num_envs=num_envs,
        num_steps=num_steps,
        total_timesteps=1000,
        learning_starts=100,
        buffer_size=1000,
        buffer_dtype=buffer_dtype,
        batch_size=8,
        gradient_steps=1,
        exploration_fraction=0.5,
        epsilon_start=0.9,
        epsilon_finish=0.1,
        hidden_sizes=(8,),
    )
    return config, jit_quickly(dqn.make_train(config))(jax.random.key(0))


@pytest.mark.parametrize("num_envs, num_steps", [(3, 5), slow(16, 1)])
def test_epsilon_falls_in_the_updates(num_envs, num_steps):
    config, out = training("FrozenLake-misc", num_envs, num_steps, "")
    epsilon = out["metrics"]["epsilon"]
    assert config.warmup_timesteps == math.ceil(100 / (num_envs * num_steps)) * num_envs * num_steps
    assert config.num_updates == (1000 - config.warmup_timesteps) // (num_envs * num_steps)
    share = np.arange(config.num_updates) / config.num_updates
    np.testing.assert_allclose(epsilon, 0.9 - 0.8 * np.minimum(1.0, share / 0.5), rtol=1e-5)


@functools.cache
def target_updates(num_envs, num_steps):
    """Whether an update changes the target network, after each of 600 numbers of rollouts."""
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

    def changes(rollout_count):
        state = init(jax.random.key(0))._replace(rollout_count=rollout_count + 1)  # of the warm-up
        after, _ = update(state)
        differs = jax.tree.map(jnp.not_equal, state.target_params, after.target_params)
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(differs)]).any()

    return jit_quickly(jax.vmap(changes))


@pytest.mark.parametrize("num_envs, num_steps", [slow(1, 1), (3, 1), (7, 2), slow(10, 1), (64, 4)])
def test_target_network_counts_environment_steps(num_envs, num_steps):
    """It is due where an update passed a multiple of 30 steps, and in each update of more steps."""
    rollout_size = num_envs * num_steps
    updated = np.asarray(target_updates(num_envs, num_steps)(np.arange(600)))
    for i in range(600):
        steps = range(i * rollout_size + 1, (i + 1) * rollout_size + 1)
        assert updated[i] == any(step % 30 == 0 for step in steps)


def test_target_network_beyond_two_to_the_31_steps():
    """Where the count of steps overflows one interval differs in length, and none is longer."""
    counts = 2**31 // 14 + np.arange(-300, 300)
    steps_between = 14 * np.diff(np.flatnonzero(target_updates(7, 2)(counts)))
    assert steps_between.max() <= 42  # 30, rounded up to whole updates
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
    trees = (before.target_params, after.params, after.target_params)
    for old, new, target in zip(*map(arrays, trees), strict=True):
        np.testing.assert_allclose(target, old + tau * (new - old), rtol=1e-5, atol=1e-7)


# --- the replay ---


def counting_rollout(count, num_steps, num_envs):
    """Steps whose every entry tells which step it is, and of which environment.

    One in 10 ends an episode.
    """
    # [T, N]
    number = np.int32((count + np.arange(num_steps))[:, None] * 100 + np.arange(num_envs))
    obs = np.float32(np.stack([number, -number], axis=-1))
    return dqn.Transition(
        obs=obs,
        action=number,
        reward=np.float32(number * 2.0),
        next_obs=obs + np.float32(0.5),
        terminated=number // 100 % 10 == 3,
    )


def filled_replay(num_rollouts, num_envs, num_steps, writes):
    rollout = counting_rollout(0, num_steps, num_envs)
    replay = jax.tree.map(
        lambda leaf: np.full((num_rollouts, *leaf.shape), -999).astype(leaf.dtype), rollout
    )
    add = jit_quickly(dqn.add_rollout)
    for i in range(writes):
        replay = add(replay, counting_rollout(i * num_steps, num_steps, num_envs), np.int32(i))
    return replay


@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (3, 4), (1, 7), (2, 10)])
def test_replay_gives_all_that_it_holds_and_nothing_else(num_envs, num_steps):
    num_rollouts = 10 // num_steps
    sample = jit_quickly(jax.vmap(functools.partial(dqn.sample, batch_size=6000), (0, None, 0)))
    for writes in {1, num_rollouts, num_rollouts + 1, 31}:
        replay = filled_replay(num_rollouts, num_envs, num_steps, writes)
        count = writes * num_steps
        keys = jax.random.split(jax.random.key(writes), 2)
        batches = sample(keys, replay, np.full(2, writes))
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
    loop = jax.jit(functools.partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
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


# --- training ---


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
    _, out = training(name, 3, 5, "bool" if stored is bool else "")
    obs = out["runner_state"].replay.obs
    assert np.isfinite(out["metrics"]["td_loss"]).all()
    assert obs.dtype == stored
    if stored is bool:
        _, usual = training(name, 3, 5, "")
        np.testing.assert_array_equal(obs, usual["runner_state"].replay.obs)


@pytest.mark.parametrize("script", [dqn, apex_dqn])
def test_network_without_hidden_layers(script):
    """Values are linear in the observation."""
    config = script.Config(hidden_sizes=())
    network = script.make_network(config, *script.make_env(config))
    obs = np.random.default_rng(0).normal(size=(3, 4))
    params = jit_quickly(network.init)(jax.random.key(1), obs)
    apply = jit_quickly(network.apply)
    a, b, zero = (np.asarray(apply(params, x)) for x in (obs, 2 * obs, 0 * obs))
    assert a.shape == (3, 2) and {
        leaf.shape[0] for leaf in jax.tree.leaves(params) if leaf.ndim == 2
    } == {4}
    np.testing.assert_allclose(b - zero, 2 * (a - zero), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_without_hidden_layers():
    config = dqn.Config(hidden_sizes=(), total_timesteps=300, learning_starts=200, buffer_size=300)
    out = jit_quickly(dqn.make_train(config))(jax.random.key(0))
    assert np.isfinite(out["metrics"]["td_loss"]).all()
