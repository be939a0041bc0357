"""DQN where its twin does not go: intervals of the target network, kinds of observations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.tiers import slow

import apex_dqn
import dqn


@functools.cache
def training(env_name, buffer_dtype):
    config = dqn.Config(
        env_name=env_name,
        num_envs=3,
        num_steps=5,
        total_timesteps=1000,
        learning_starts=100,
        buffer_size=1000,
        buffer_dtype=buffer_dtype,
        batch_size=8,
        gradient_steps=1,
        hidden_sizes=(8,),
    )
    return jit_quickly(dqn.make_train(config))(jax.random.key(0))


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
        state = init(jax.random.key(0))._replace(rollout_count=rollout_count)
        after, _ = update(state)
        differs = jax.tree.map(jnp.not_equal, state.target_params, after.target_params)
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(differs)]).any()

    return jit_quickly(jax.vmap(changes))


@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (7, 2), (64, 4)])
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


def test_warm_up_is_whole_updates():
    """Enough for `learning_starts` steps."""
    settings = dict(num_envs=4, num_steps=2, total_timesteps=1000)
    assert dqn.Config(learning_starts=0, **settings).warmup_timesteps == 0
    assert dqn.Config(learning_starts=30, **settings).warmup_timesteps == 32


@pytest.mark.parametrize(
    "name, stored", [("FrozenLake-misc", jnp.int32), slow("Breakout-MinAtar", bool)]
)
def test_how_observations_are_stored(name, stored):
    """A number as it is, and a grid with channels as bools, which are exact."""
    out = training(name, "bool" if stored is bool else "")
    obs = out["runner_state"].replay.obs
    assert np.isfinite(out["metrics"]["td_loss"]).all()
    assert obs.dtype == stored
    if stored is bool:
        usual = training(name, "")
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
