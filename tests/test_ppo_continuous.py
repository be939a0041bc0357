"""The continuous environments: brax behind gymnax's interface, bounds of actions; and one run with a config."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from gymnax.environments import spaces

import ppo_continuous as ppo

LIMIT = 5


@pytest.mark.slow
def test_pendulum_is_learned_with_its_config():
    """Four seeds of configs/ppo_continuous/pendulum.yaml; 32 reached -161."""
    path = Path(ppo.__file__).parent / "configs" / "ppo_continuous" / "pendulum.yaml"
    config, _ = ppo.parse(["--config", str(path)], ppo.Config)
    out = jax.jit(jax.vmap(ppo.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    metrics = jax.device_get(out["metrics"])
    assert ppo.mean_return(metrics, config.num_updates * 9 // 10, config.num_updates).mean() > -200


@pytest.mark.parametrize("shape", [(64, 64), (11, 64), (64, 3), (3, 1), (1, 1)])
def test_orthogonal_initialization_is_jax_s(shape):
    keys = jax.random.split(jax.random.key(0), 5)
    ours = jax.vmap(lambda key: ppo.orthogonal(1.5)(key, shape))(keys)
    for key, matrix in zip(keys, np.asarray(ours, np.float64) / 1.5, strict=True):
        np.testing.assert_allclose(matrix, jax.nn.initializers.orthogonal()(key, shape), atol=1e-5)
        tall = matrix if shape[0] >= shape[1] else matrix.T
        np.testing.assert_allclose(tall.T @ tall, np.eye(min(shape)), atol=2e-6)


def brax_envs_and_params(num_envs=6, **settings):
    config = ppo.Config(env_name="ValueBrax", **settings)
    env, env_params = ppo.make_env(config)
    _, env_state, env_params = ppo.reset_envs(jax.random.key(0), env, env_params, num_envs)
    return env, env_params, env_state


@pytest.mark.parametrize("wrong", [{"reset_noise_scale": "a"}, {"healthy_z_range": 3}, {"wings": 2}], ids=str)
def test_brax_arguments_that_cannot_be(wrong):
    """One is looked at by `reset`, one by `step`, one by the constructor."""
    with pytest.raises(ValueError, match=r"env_name = hopper, env_params = .* cannot be made"):
        ppo.make_env(ppo.Config(env_name="hopper", env_params=wrong))


def test_brax_reports_truncation_and_the_last_observation():
    env, env_params, env_state = brax_envs_and_params(max_episode_steps=LIMIT)
    clocks = np.asarray(env_state.env_state.time)
    assert len(set(clocks.tolist())) > 1, "clocks are staggered"
    starts, obs = set(), None
    for _ in range(20):
        keys = jax.random.split(jax.random.key(int(clocks.sum())), 6)
        clocks = clocks + 1
        before = obs
        obs, env_state, _, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, jnp.zeros((6, 1)), env_params
        )
        assert not terminated.any()
        np.testing.assert_array_equal(truncated, clocks % LIMIT == 0)
        if before is not None:  # the last observation is of the same episode as the one before it
            np.testing.assert_array_equal(info["final_observation"][:, 0], before[:, 0])
            np.testing.assert_array_equal(info["final_observation"][:, 1], before[:, 1] + 1)
        assert (obs[truncated, 1] == 0).all()
        starts |= set(np.asarray(obs[truncated, 0]).tolist())
    pool = np.asarray(env_params.start_states.obs[:, 0])
    assert starts <= set(pool.tolist()) and len(starts) > 10, "a reset draws from the pool, each time anew"


def test_brax_termination_is_not_truncation():
    env, env_params, env_state = brax_envs_and_params(env_params={"length": 3})
    for step in range(1, 7):
        keys = jax.random.split(jax.random.key(step), 6)
        _, env_state, _, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, jnp.zeros((6, 1)), env_params
        )
        np.testing.assert_array_equal(terminated, step % 3 == 0)
        assert not truncated.any()


def test_pools_differ_between_agents():
    config = ppo.Config(env_name="ValueBrax", num_envs=2)
    init, _ = ppo.make_learner(config)
    state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), 2))
    pools = np.asarray(state.env_params.start_states.obs[..., 0])
    assert pools.shape == (2, 256) and not np.isin(pools[0], pools[1]).any()


@pytest.mark.parametrize("low, high", [(-0.1, 0.1), (-2.0, 2.0), (-3.0, 5.0)])
def test_actions_are_rescaled_to_the_bounds(low, high):
    class Echo:
        def step(self, key, state, action, params):
            return action

    env = ppo.RescaleAction(Echo(), spaces.Box(low, high, (3,)))
    out = env.step(None, None, jnp.array([-1.0, 0.0, 1.0]), None)
    np.testing.assert_allclose(out, [low, (low + high) / 2, high], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        env.step(None, None, jnp.array([-9.0, 0.5, 9.0]), None), [low, low + 0.75 * (high - low), high], rtol=1e-5
    )
