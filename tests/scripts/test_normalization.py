"""Everything is normalized by the running statistics of observations and rewards.

What updates them, and where training uses them, is compared with the twins
(tests/scripts/test_*_twin.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from flax.traverse_util import unflatten_dict
from support.compilation import jit_quickly
from support.networks import random_agent
from support.small import small_config
from support.tiers import slow

import dpo_continuous
import evolve_objective
import ppo
import ppo_continuous
import ppo_rnn
import reppo
import sac
import td3
from onejit.engine.evaluation import policy_of

NORMALIZING = (ppo, ppo_continuous, dpo_continuous, ppo_rnn, reppo, sac, td3, evolve_objective)
each_that_normalizes = pytest.mark.parametrize(
    "script", NORMALIZING, ids=lambda script: script.__name__
)


def make_config(script, **overrides):
    is_discrete = script in (ppo, ppo_rnn, evolve_objective)
    name = "ProbeDiscrete" if is_discrete else "ProbeContinuous"
    return small_config(script, env_name=name, **overrides)


@each_that_normalizes
def test_observations_are_clipped_and_finite(script):
    """Clipped on both sides, and finite where they have never changed."""

    @jit_quickly
    def normalize(mean, var, obs):
        return script.normalize(script.RunningMeanStd(mean, var, jnp.float32(10.0)), obs)

    obs = np.array([-100.0, -16.0, 5.0, 22.0, 100.0])
    expected = [-10.0, -9.5, 1.0, 9.5, 10.0]
    np.testing.assert_allclose(normalize(3.0, 4.0, obs), expected, rtol=1e-6)
    obs = np.array([-1.0, 0.0, 2e-4, 0.0, 1.0])
    np.testing.assert_allclose(normalize(0.0, 0.0, obs), [-10.0, 0.0, 2.0, 0.0, 10.0], rtol=1e-5)


@each_that_normalizes
def test_policies_normalize_what_they_see(script):
    """In other units, in which the statistics are, too, they act the same."""
    config = make_config(script, normalize_obs=True)
    agent = unflatten_dict(random_agent(script, config), sep=".")
    seen = agent["obs_statistics"]
    obs = 5.0 * np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32)
    start, act = policy_of(script, config)
    actions = jit_quickly(jax.vmap(lambda agent, obs: act(agent, start(), obs)[0], (None, 0)))
    expected = actions(agent, obs)
    in_other_units = {"mean": 3.0 * seen["mean"] + 5.0, "var": 9.0 * seen["var"]}
    other = agent | {"obs_statistics": seen | in_other_units}
    np.testing.assert_allclose(actions(other, 3.0 * obs + 5.0), expected, rtol=1e-3, atol=1e-4)
    assert not np.allclose(actions(agent, 3.0 * obs + 5.0), expected, atol=0.1)


@pytest.mark.parametrize(
    "script",
    [slow(ppo), ppo_continuous, reppo, slow(dpo_continuous), slow(ppo_rnn)],
    ids=lambda script: script.__name__,
)
def test_rewards_are_clipped(script):
    """Of rewards beyond ten standard deviations the size doesn't matter."""
    settings = {"v_min": -1e5, "v_max": 1e5} if script is reppo else {}  # not clipped by the bins
    init, update = map(
        jit_quickly, script.make_learner(make_config(script, normalize_reward=True, **settings))
    )
    state = init(jax.random.key(0))
    rng = np.random.default_rng(0)  # REPPO's first critic is 0 everywhere
    params = jax.tree.map(lambda leaf: leaf + 0.5 * rng.normal(size=leaf.shape), state.params)
    losses = []
    for var in (1e-6, 1e-6 / 49):
        small = script.RunningMeanStd(np.float32(0.0), np.float32(var), np.float32(1e12))
        _, metrics = update(state._replace(params=params, return_statistics=small))
        losses.append(metrics["critic_loss" if script is reppo else "value_loss"])
    assert losses[0] > 1.0
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)
