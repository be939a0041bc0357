"""Everything is normalized by the running statistics of observations and rewards.

What updates them is compared with the twins (tests/scripts/test_*_twin.py).

An environment is compared with a copy that shows other units: each observation times 3 plus 5, each
reward times 7. Where statistics begin in those units too, training must be the same. A place that
sees raw numbers would show.
"""

import dataclasses
import functools

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.compilation import jit_quickly
from support.tiers import slow
from support.trees import arrays

import dpo_continuous
import evolve_objective
import ppo
import ppo_continuous
import ppo_rnn
import reppo
import sac
import td3
from onejit.engine.evaluation import policy_of

SCALE, OFFSET, REWARD = 3.0, 5.0, 7.0


def awake(state):
    """The same state with other networks: the first ones hardly tell observations apart."""
    rng = np.random.default_rng(0)

    def change(path, leaf):
        name = jax.tree_util.keystr(path)
        if "offset" in name:
            return np.zeros_like(leaf)
        noise = 0.5 * rng.normal(size=leaf.shape) if "kernel" in name else 0.0
        return np.asarray(leaf) + np.float32(noise)

    return state._replace(params=jax.tree_util.tree_map_with_path(change, state.params))


def other_units(environment):
    """The same environment; observations times 3 plus 5, rewards times 7."""

    class OtherUnits(environment):
        def observe(self, key, state, action, params):
            return SCALE * super().observe(key, state, action, params) + OFFSET

        def step_env(self, key, state, action, params):
            obs, state, reward, terminated, info = super().step_env(key, state, action, params)
            return obs, state, REWARD * reward, terminated, info

    return OtherUnits


for toy in (toys.ProbeContinuous, toys.ProbeDiscrete):
    gymnax.register(f"{toy.__name__}OtherUnits", other_units(toy))

# slow: much like another
SCRIPTS = [
    slow(ppo),
    ppo_continuous,
    slow(dpo_continuous),
    slow(ppo_rnn),
    slow(reppo),
    sac,
    slow(td3),
]
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


@functools.cache
def learner(script, units="", **settings):
    """A config, its `init` and `update`.

    Episodes of 2 steps end by the time limit; the sign and the step are seen.
    """
    name = "ProbeDiscrete" if script in (ppo, ppo_rnn) else "ProbeContinuous"
    params = {"kinds": "ends", "max_steps_in_episode": 2}
    config = script.Config(
        env_name=name + units, env_params=params, num_envs=4, num_steps=4, normalize_obs=True
    )
    small = {
        "hidden_sizes": (8,),
        "total_timesteps": 10_000,
        "cell_size": 8,
        "num_minibatches": 2,
        "update_epochs": 2,
    }
    small |= {
        "learning_starts": 32,
        "buffer_size": 512,
        "batch_size": 16,
        "gradient_steps": 2,
        "normalize_reward": True,
    }
    fields = {field.name for field in dataclasses.fields(config)}
    small = {field: value for field, value in small.items() if field in fields}
    config = dataclasses.replace(config, **small | settings)
    return config, *map(jit_quickly, script.make_learner(config))


def begin(script, init, in_other_units=False):
    """A state whose statistics are those of ten observations and rewards seen before."""
    mean = np.array([0.7, 0.1, 0.2, 0.2, 0.6], np.float32)
    var = np.array([0.2, 0.1, 0.2, 0.9, 1.5], np.float32)
    scale, offset, reward = (SCALE, OFFSET, REWARD) if in_other_units else (1.0, 0.0, 1.0)
    state = init(jax.random.key(0))
    seen = script.RunningMeanStd(scale * mean + offset, scale**2 * var, np.float32(10.0))
    state = state._replace(obs_statistics=seen)
    state = awake(state) if script is reppo else state  # its first critic is 0 everywhere
    if "return_statistics" not in state._fields:
        return state
    returns = script.RunningMeanStd(*np.float32([reward * 0.3, reward**2 * 4.0, 10.0]))
    return state._replace(return_statistics=returns)


@pytest.mark.slow
@each_script
def test_training_is_the_same_in_other_units(script):
    """Where it acts, learns and bootstraps from the last observation of an episode, which is seen
    at no other time.
    """
    config, init, update = learner(script)
    # which do not normalize rewards
    more = {"reward_scale": 1.0 / REWARD} if script in (sac, td3) else {}
    other_config, other_init, other_update = learner(script, "OtherUnits", **more)
    state, other = begin(script, init), begin(script, other_init, True)
    for _ in range(3):
        state, metrics = update(state)
        other, other_metrics = other_update(other)
    for name in set(metrics) - {"episodic_return"}:
        np.testing.assert_allclose(
            other_metrics[name], metrics[name], rtol=5e-3, atol=1e-4, err_msg=name
        )
    for a, b in zip(arrays(state.params), arrays(other.params), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(
        other.obs_statistics.mean, SCALE * state.obs_statistics.mean + OFFSET, rtol=1e-4
    )
    np.testing.assert_allclose(
        other.obs_statistics.var, SCALE**2 * state.obs_statistics.var, rtol=1e-4
    )
    obs = jnp.array([1.0, 0.0, 0.0, 1.0, 2.0])
    action, _ = jax.jit(policy_of(script, config)[1])(state.agent, memory(script, config), obs)
    again, _ = jax.jit(policy_of(script, other_config)[1])(
        other.agent, memory(script, config), SCALE * obs + OFFSET
    )
    np.testing.assert_allclose(again, action, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "script",
    [slow(ppo), ppo_continuous, reppo, slow(dpo_continuous), slow(ppo_rnn)],
    ids=lambda script: script.__name__,
)
def test_rewards_are_clipped(script):
    """Of rewards beyond ten standard deviations the size doesn't matter."""
    settings = {"v_min": -1e5, "v_max": 1e5} if script is reppo else {}  # not clipped by the bins
    _, init, update = learner(script, **settings)
    state = begin(script, init)
    losses = []
    for var in (1e-6, 1e-6 / REWARD**2):
        small = script.RunningMeanStd(np.float32(0.0), np.float32(var), np.float32(1e12))
        _, metrics = update(state._replace(return_statistics=small))
        losses.append(metrics["critic_loss" if script is reppo else "value_loss"])
    assert losses[0] > 1.0
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)


def memory(script, config):
    start, _ = policy_of(script, config)
    return start()


NORMALIZING = (ppo, ppo_continuous, dpo_continuous, ppo_rnn, reppo, sac, td3, evolve_objective)
each_that_normalizes = pytest.mark.parametrize(
    "script", NORMALIZING, ids=lambda script: script.__name__
)


@functools.cache
def normalizing(script):
    """`script.normalize`, by a mean and a variance of observations."""

    @jit_quickly
    def normalize(mean, var, obs):
        return script.normalize(script.RunningMeanStd(mean, var, jnp.float32(10.0)), obs)

    return normalize


@each_that_normalizes
def test_observations_are_clipped_on_both_sides(script):
    obs = np.array([-100.0, -16.0, 5.0, 22.0, 100.0])
    normalized = normalizing(script)(3.0, 4.0, obs)
    np.testing.assert_allclose(normalized, [-10.0, -9.5, 1.0, 9.5, 10.0], rtol=1e-6)


@each_that_normalizes
def test_observations_that_never_change_are_finite(script):
    obs = np.array([-1.0, 0.0, 2e-4, 0.0, 1.0])
    normalized = normalizing(script)(0.0, 0.0, obs)
    np.testing.assert_allclose(normalized, [-10.0, 0.0, 2.0, 0.0, 10.0], rtol=1e-5)
