"""The continuous environments: brax behind gymnax's interface, bounds of actions."""

import dataclasses
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from gymnax.environments import environment, spaces
from gymnax.wrappers.purerl import LogEnvState
from support.compilation import jit_quickly

import ppo_continuous as ppo

LIMIT = 5


@pytest.mark.parametrize("shape", [(64, 64), (11, 64), (64, 3), (3, 1), (1, 1)])
def test_orthogonal_initialization(shape):
    """Orthogonal, and of no preferred direction: the mean over many is 0, no entry larger than
    another on average.
    """
    keys = jax.random.split(jax.random.key(0), 2000 if max(shape) < 64 else 200)
    ours = (
        np.asarray(
            jit_quickly(jax.vmap(lambda key: ppo.orthogonal(1.5)(key, shape)))(keys), np.float64
        )
        / 1.5
    )
    tall = ours if shape[0] >= shape[1] else ours.swapaxes(1, 2)
    gram = tall.swapaxes(1, 2) @ tall
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(min(shape)), gram.shape), atol=1e-5)
    assert np.abs(ours.mean(axis=0)).max() < 5 / np.sqrt(len(keys) * max(shape))
    np.testing.assert_allclose(
        np.square(ours).mean(axis=0), 1 / max(shape), rtol=0.6 if max(shape) > 3 else 0.1
    )


@pytest.mark.parametrize("shape", [(8268, 64), (64, 8268)])
def test_orthogonal_initialization_takes_little_memory(shape):
    """By the smaller Gram matrix: that of 8268 x 8268 entries alone would be 273 MB."""
    compiled = (
        jit_quickly(lambda key: ppo.orthogonal(1.0)(key, shape)).lower(jax.random.key(0)).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 20e6


def brax_env(num_envs=6, **settings):
    env, env_params = ppo.make_env(ppo.Config(env_name="ValueBrax", **settings))
    reset = jit_quickly(jax.vmap(env.reset, (0, None)))
    obs, env_state = reset(jax.random.split(jax.random.key(0), num_envs), env_params)
    return env, env_params, obs, env_state


def steps_of(env, env_params, env_state, number, num_envs=6):
    """What `number` steps give, one after the other."""
    step = jit_quickly(jax.vmap(env.step, (0, 0, 0, None)))
    for i in range(number):
        keys = jax.random.split(jax.random.key(i), num_envs)
        obs, env_state, reward, terminated, truncated, info = step(
            keys, env_state, jnp.zeros((num_envs, 1)), env_params
        )
        yield obs, reward, terminated, truncated, info


def test_brax_reports_truncation_and_the_last_observation():
    env, env_params, before, env_state = brax_env(env_params={"max_steps_in_episode": LIMIT})
    starts = set()
    for i, (obs, _, terminated, truncated, info) in enumerate(
        steps_of(env, env_params, env_state, 20)
    ):
        assert not terminated.any()
        assert (truncated == ((i + 1) % LIMIT == 0)).all()
        # the last observation is of the same episode as the one before it
        np.testing.assert_array_equal(info["final_observation"][:, 0], before[:, 0])
        np.testing.assert_array_equal(info["final_observation"][:, 1], before[:, 1] + 1)
        assert (obs[truncated, 1] == 0).all()
        starts |= set(np.asarray(obs[truncated, 0]).tolist())
        before = obs
    pool = np.asarray(env.start_states.obs[:, 0])
    assert starts <= set(pool.tolist()) and len(starts) > 10, (
        "a reset draws from the pool, each time anew"
    )


def test_brax_termination_is_not_truncation():
    env, env_params, _, env_state = brax_env(env_params={"length": 3})
    for i, (_, _, terminated, truncated, _) in enumerate(steps_of(env, env_params, env_state, 6)):
        assert (terminated == ((i + 1) % 3 == 0)).all() and not truncated.any()


def test_brax_step_that_is_not_finite_terminates():
    """With a reward of 0 and a finite observation, so that neither statistics nor networks are
    spoilt.
    """
    env, env_params, _, env_state = brax_env(env_params={"nan_after": 3})
    for i, (obs, reward, terminated, _, info) in enumerate(steps_of(env, env_params, env_state, 8)):
        ended = (i + 1) % 3 == 0
        assert (terminated == ended).all() and (reward == (0.0 if ended else 1.0)).all()
        assert np.isfinite(obs).all() and np.isfinite(info["final_observation"]).all()


def test_start_states_are_made_once_and_only_for_a_reset():
    env, env_params = ppo.make_env(ppo.Config(env_name="ValueBrax"))
    assert "start_states" not in vars(env._env._env._env)
    jax.eval_shape(env.action_space(env_params).sample, jax.random.key(0))
    assert "start_states" not in vars(env._env._env._env)
    env.reset(jax.random.key(0), env_params)
    made = env.start_states
    env.reset(jax.random.key(1), env_params)
    assert env.start_states is made and made.obs.shape == (1024, 2)


def test_initial_standard_deviation_of_the_actions():
    config = ppo.Config(
        env_name="ToyContinuous", num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=64
    )

    def start(log_std_init):
        state = ppo.make_learner(dataclasses.replace(config, log_std_init=log_std_init))[0](
            jax.random.key(0)
        )
        networks = ppo.make_networks(config, *ppo.make_env(config))
        return networks[0].apply(state.params["actor"], state.obs).stddev()

    deviation = jit_quickly(jax.vmap(start))(jnp.array([0.0, -0.5, -2.0]))
    np.testing.assert_allclose(
        deviation, np.exp([[[0.0]], [[-0.5]], [[-2.0]]]) * np.ones_like(deviation), rtol=1e-6
    )


@pytest.mark.parametrize("low, high", [(-0.1, 0.1), (-2.0, 2.0), (-3.0, 5.0)])
def test_actions_are_rescaled_to_the_bounds(low, high):
    class Echo:
        def action_space(self, params):
            return spaces.Box(low, high, (3,))

        def step(self, key, state, action, params):
            return action, state, 1.0, False, False, {}

    env = ppo.RescaleAction(Echo())
    out, *_ = env.step(None, None, jnp.array([-1.0, 0.0, 1.0]), None)
    np.testing.assert_allclose(out, [low, (low + high) / 2, high], rtol=1e-5, atol=1e-6)
    out, *_ = env.step(None, None, jnp.array([-9.0, 0.5, 9.0]), None)
    np.testing.assert_allclose(out, [low, low + 0.75 * (high - low), high], rtol=1e-5)


class OwnClock(NamedTuple):
    time: jax.Array


@pytest.mark.parametrize("name", ["ppo_continuous", "dpo_continuous", "reppo"])
def test_staggered_resets_set_the_clock_within_the_state_of_any_wrapper(name):
    """The pair is a wrapper's state. A state that is not gymnax's has a clock of its own."""

    def logged(env_state):
        zeros = jnp.zeros(4, jnp.int32)
        return LogEnvState(env_state, zeros, zeros, zeros, zeros, zeros)

    stagger = importlib.import_module(name).stagger
    state = stagger(logged((environment.EnvState(time=jnp.zeros(4, jnp.int32)), jnp.ones(4))), 8)
    np.testing.assert_array_equal(state.env_state[0].time, [0, 2, 4, 6])
    np.testing.assert_array_equal(state.episode_lengths, [0, -8, -8, -8])
    with pytest.raises(ValueError, match="staggered_resets = True: must be False"):
        stagger(logged(OwnClock(time=jnp.zeros(4, jnp.int32))), 8)
