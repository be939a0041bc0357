"""The replays of the off-policy scripts: what is drawn from them, and that no update copies one."""

import functools
import importlib
import math
import re

import jax
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.tiers import slow

import apex_dqn

NUM_ROLLOUTS = 12_345  # of the replays that must not be copied


def counting_rollout(script, count, num_steps, num_envs):
    """Steps whose every entry tells which step it is, and of which environment.

    One in 10 ends an episode.
    """
    # [T, N]
    number = np.int32((count + np.arange(num_steps))[:, None] * 100 + np.arange(num_envs))
    obs = np.float32(np.stack([number, -number], axis=-1))
    return script.Transition(
        obs=obs,
        action=number,
        reward=np.float32(number * 2.0),
        next_obs=obs + np.float32(0.5),
        terminated=number // 100 % 10 == 3,
        **dict.fromkeys(script.Transition._fields[5:]),  # dqn.py's action masks
    )


@pytest.mark.parametrize("name", ["dqn", "sac", slow("td3")])
@pytest.mark.parametrize("num_envs, num_steps", [(3, 1), (3, 4), (1, 7), (2, 10)])
def test_replay_gives_all_that_it_holds_and_nothing_else(name, num_envs, num_steps):
    script = importlib.import_module(name)
    num_rollouts = 10 // num_steps
    add = jit_quickly(script.add_rollout)
    sample = jit_quickly(functools.partial(script.sample, batch_size=6000))
    for writes in {1, num_rollouts, num_rollouts + 1, 31}:
        replay = jax.tree.map(
            lambda leaf: np.full((num_rollouts, *leaf.shape), -999).astype(leaf.dtype),
            counting_rollout(script, 0, num_steps, num_envs),
        )
        for i in range(writes):
            rollout = counting_rollout(script, i * num_steps, num_steps, num_envs)
            replay = add(replay, rollout, np.int32(i))
        count = writes * num_steps
        batch = jax.device_get(sample(jax.random.key(writes), replay, np.int32(writes)))
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
    "name, seeds, num_envs, num_steps",
    [
        ("dqn", 2, 2, 2),
        slow("dqn", 1, 1, 1),
        slow("dqn", 1, 8, 1),
        ("sac", 2, 4, 1),
        slow("sac", 1, 1, 1),
        slow("td3", 2, 2, 2),
        slow("apex_dqn", 1, 6, 1),
        slow("apex_dqn", 2, 6, 1),
    ],
)
def test_replay_is_written_in_place(name, seeds, num_envs, num_steps):
    """The compiled loop copies no array of the replay's size, and the state holds no second one."""
    script = importlib.import_module(name)
    buffer_size = num_envs * num_steps * NUM_ROLLOUTS
    config = script.Config(
        num_envs=num_envs, num_steps=num_steps, buffer_size=buffer_size, learning_starts=16
    )
    init, update = script.make_learner(config)
    state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), seeds))
    large = [leaf.shape[:4] for leaf in jax.tree.leaves(state) if NUM_ROLLOUTS in leaf.shape]
    assert large == [(seeds, NUM_ROLLOUTS, num_steps, num_envs)] * len(
        jax.tree.leaves(state.replay)
    )
    loop = jax.jit(functools.partial(jax.lax.scan, jax.vmap(update), length=5), donate_argnums=0)
    program = loop.lower(state).compile().as_text()
    # also where XLA takes axes together
    sizes = rf"\[(?:[\d,]*,)?(?:{NUM_ROLLOUTS}|{NUM_ROLLOUTS * num_steps}|{buffer_size})[,\]]"
    assert re.search(sizes, program)
    assert not re.findall(rf"= \w*{sizes}\S* copy\(.*", program)
    if script is apex_dqn:  # the leaves of its tree
        leaves = -(-buffer_size // apex_dqn.FANOUT)
        assert not re.findall(rf"= \S*\[[\d,]*{leaves},\S* copy\(.*", program)
