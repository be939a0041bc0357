"""The replays of the off-policy scripts: no update copies one."""

import functools
import importlib
import re

import jax
import pytest
from support.tiers import slow

import apex_dqn

NUM_ROLLOUTS = 12_345  # of the replays that must not be copied


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
