"""CrossQ: batch renormalization against its formula, running statistics, and known values.

What it shares with SAC, tests/scripts/test_sac_td3.py tests there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # registers the environments
from flax.traverse_util import flatten_dict
from safetensors.numpy import load, save
from support.compilation import jit_quickly

import crossq
from onejit.engine.evaluation import policy_of

VALUE = toys.ValueContinuous.__name__
WARMUP = 2

# --- batch renormalization ---


def test_correction_by_hand():
    """r and d of arXiv 1702.03275, algorithm 1, with r in [1/3, 3] and d in [-5, 5]."""
    scale, shift = crossq.renormalization(
        mean=jnp.array([1.0, 0.0, 9.0, -9.0]),
        std=jnp.array([1.0, 8.0, 0.1, 1.0]),
        running_mean=jnp.array([0.0, 0.0, 0.0, 0.0]),
        running_std=jnp.array([2.0, 2.0, 1.0, 1.0]),
    )
    np.testing.assert_allclose(scale, [0.5, 3.0, 1 / 3, 1.0])
    np.testing.assert_allclose(shift, [0.5, 0.0, 5.0, -5.0])


def test_batch_renormalization_against_numpy():
    """Plain normalization in the first passes, then the correction; the running statistics."""
    layer = crossq.BatchRenorm(WARMUP)
    batches = np.random.default_rng(0).normal(2.0, 3.0, size=(5, 8, 2)).astype(np.float32)
    variables = layer.init(jax.random.key(0), batches[0], training=True)
    stats = variables["batch_stats"]
    params = {"scale": jnp.array([1.5, 0.5]), "bias": jnp.array([0.1, -0.2])}
    mean, var = np.zeros(2), np.ones(2)
    for i, x in enumerate(batches):
        y, changed = layer.apply(
            {"params": params, "batch_stats": stats}, x, training=True, mutable=["batch_stats"]
        )
        stats = changed["batch_stats"]
        std, running_std = np.sqrt(x.var(axis=0) + 1e-3), np.sqrt(var + 1e-3)
        r, d = 1.0, 0.0
        if i >= WARMUP:
            r = np.clip(std / running_std, 1 / 3, 3)
            d = np.clip((x.mean(axis=0) - mean) / running_std, -5, 5)
        expected = ((x - x.mean(axis=0)) / std * r + d) * params["scale"] + params["bias"]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        mean = 0.99 * mean + 0.01 * x.mean(axis=0)
        var = 0.99 * var + 0.01 * x.var(axis=0)
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(stats["var"], var, rtol=1e-5)
        assert stats["passes"] == i + 1

    y = layer.apply({"params": params, "batch_stats": stats}, x, training=False)
    expected = (x - mean) / np.sqrt(var + 1e-3) * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_corrected_batch_is_normalized_by_the_running_statistics():
    """Where neither r nor d is cut off, training and evaluation give the same."""
    layer = crossq.BatchRenorm(0)
    x = jax.random.normal(jax.random.key(1), (64, 3))
    variables = layer.init(jax.random.key(0), x, training=True)
    in_training, _ = layer.apply(variables, x, training=True, mutable=["batch_stats"])
    in_evaluation = layer.apply(variables, x, training=False)
    np.testing.assert_allclose(in_training, in_evaluation, rtol=1e-4, atol=1e-5)


# --- passes of the critics ---


def small_config(**settings):
    config = crossq.Config(
        num_envs=2,
        gradient_steps=4,
        policy_delay=2,
        batch_size=8,
        hidden_sizes=(4,),
        critic_hidden_sizes=(5,),
        learning_starts=9,
        buffer_size=100,
    )
    return dataclasses.replace(config, **settings)


def test_joint_pass_equals_two_passes_with_frozen_statistics():
    """In training it does not: its statistics are those of both halves."""
    config = small_config()
    _, critic = crossq.make_networks(config, *crossq.make_env(config))
    obs = jax.random.normal(jax.random.key(0), (2, 8, 3)) * jnp.array([1.0, 4.0])[:, None, None]
    action = jax.random.normal(jax.random.key(1), (2, 8, 1))
    variables = critic.init(jax.random.key(2), obs[0], action[0], training=True)

    def values(obs, action, training):
        if not training:
            return critic.apply(variables, obs, action, training=False)
        return critic.apply(variables, obs, action, training=True, mutable=["batch_stats"])[0]

    for training in (False, True):
        joint = values(obs.reshape(16, 3), action.reshape(16, 1), training)
        apart = [values(o, a, training) for o, a in zip(obs, action, strict=True)]
        same = np.allclose(joint, np.concatenate(apart), rtol=1e-4, atol=1e-5)
        assert same == (not training)


def passes(batch_stats) -> set[int]:
    """How often the layers of a network were trained."""
    return {
        int(n)
        for path, leaf in flatten_dict(batch_stats).items()
        if path[-1] == "passes"
        for n in np.ravel(leaf)
    }


@pytest.mark.slow
def test_statistics_change_in_training_alone():
    """Not by acting, nor by the passes of the other network's loss."""
    config = small_config()
    init, update = crossq.make_learner(config)
    state = jit_quickly(init)(jax.random.key(0))
    assert passes(state.batch_stats) == {0}  # the warm-up and `init` itself
    update = jit_quickly(update)
    for i in (1, 2):
        state, _ = update(state)
        assert passes(state.batch_stats["critics"]) == {4 * i}
        assert passes(state.batch_stats["actor"]) == {2 * i}


def test_saved_agent_played_in_numpy():
    """From the arrays of a file, with the running statistics."""
    config = small_config(hidden_sizes=(4, 6))
    init, update = crossq.make_learner(config)
    state, _ = jit_quickly(update)(jit_quickly(init)(jax.random.key(0)))
    flat = {name: np.asarray(leaf) for name, leaf in flatten_dict(state.agent, sep=".").items()}
    arrays = load(save(flat))

    def renormalized(x, i):
        path = f"actor.Mlp_0.BatchRenorm_{i}"
        std = np.sqrt(arrays[f"batch_stats.{path}.var"] + 1e-3)
        x = (x - arrays[f"batch_stats.{path}.mean"]) / std
        return x * arrays[f"params.{path}.scale"] + arrays[f"params.{path}.bias"]

    def dense(x, i):
        path = f"params.actor.Mlp_0.Dense_{i}"
        return x @ arrays[f"{path}.kernel"] + arrays[f"{path}.bias"]

    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    x = renormalized(obs, 0)
    for i in range(2):
        x = renormalized(np.maximum(dense(x, i), 0.0), i + 1)
    expected = np.tanh(dense(x, 2)[:, :1])
    start, act = policy_of(crossq, config)
    actual = act(state.agent, start(), jnp.asarray(obs))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


# --- environments of known value ---

GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode
train = jit_quickly(lambda config, key: crossq.make_train(config)(key))


def learn(num_updates=400, env_params=(), **overrides):
    """Train one agent: its final state, its metrics, and the critics of the policy's actions."""
    config = crossq.Config(
        env_name=VALUE,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=2,
        gradient_steps=4,
        policy_delay=2,
        batch_size=64,
        buffer_size=2000,
        learning_starts=200,
        total_timesteps=200 + num_updates * 16,
        policy_lr=3e-3,
        q_lr=3e-3,
        gamma=GAMMA,
        ent_coef=0.0,
        learn_ent_coef=False,
        hidden_sizes=(16, 16),
        critic_hidden_sizes=(16, 16),
    )
    config = dataclasses.replace(config, **overrides)
    out = train(config, jax.random.key(0))
    state = out["runner_state"]
    actor, critic = crossq.make_networks(config, *crossq.make_env(config))

    def variables(name):
        return {"params": state.params[name], "batch_stats": state.batch_stats[name]}

    def q(*obs):
        obs = jnp.asarray(obs, float)
        action = jnp.tanh(actor.apply(variables("actor"), obs, training=False).mode())
        apply = jax.vmap(lambda critics: critic.apply(critics, obs, action, training=False))
        return apply(variables("critics"))

    return state, out["metrics"], q


@pytest.mark.slow  # SAC's is fast
def test_truncation_is_bootstrapped():
    """From the last observation, not the first one of the next episode, whose sign may differ."""
    env_params = {"reward": "sign", "max_steps_in_episode": LIMIT}
    state, metrics, q = learn(env_params=env_params)
    np.testing.assert_allclose(q([1, 1], [-1, 1]), [[ENDLESS, -ENDLESS]] * 2, rtol=0.1)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()
    assert not state.replay.terminated.any()


@pytest.mark.slow  # SAC's is fast
def test_termination_is_not_bootstrapped():
    *_, q = learn(env_params={"length": LIMIT, "shows_time": True})
    learned = q(*[[sign, time] for sign in (1, -1) for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, (2, 2)), atol=0.3)


@pytest.mark.slow  # SAC's is fast
def test_best_action_between_bounds_that_are_not_one():
    """The best action is 4 between -3 and 5, which is 0.75 between -1 and 1."""
    settings = {"ent_coef": 0.1, "learn_ent_coef": True, "target_entropy": -2.0}
    env_params = {"length": 1, "reward": "action"}
    state, *_ = learn(env_params=env_params, reward_scale=0.1, **settings)
    start, act = policy_of(crossq, crossq.Config(env_name=VALUE, hidden_sizes=(16, 16)))
    np.testing.assert_allclose(act(state.agent, start(), jnp.ones((1, 2)))[0], 0.75, atol=0.08)
