"""Drifts by hand, the evolution strategy against NumPy, what is shown, and the benchmark."""

import dataclasses
import functools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.files import ROOT
from support.small import small_config
from test_dpo_continuous import BY_HAND

import evolve_objective as evolve
import ppo

sys.path.append(str(ROOT / "benchmarks"))
import drift_vs_ppo

# --- mathematics ---


def test_dpo_drift_by_hand():
    ratio, advantage, value, _ = np.array(BY_HAND).T
    drift = jit_quickly(evolve.dpo_drift)(np.log(ratio), advantage)
    np.testing.assert_allclose(drift, value, atol=2e-5)


def test_network_is_a_drift_whatever_its_weights():
    """Not negative; zero with zero gradient at a ratio of 1."""
    grid = np.meshgrid(np.linspace(-2, 2, 41), np.linspace(-3, 3, 31))
    log_ratio, advantage = map(np.ravel, grid)
    at_one = np.abs(log_ratio) < 1e-6
    assert at_one.sum() == 31

    @jit_quickly
    def drift_and_slope(weights):
        drift, slope = jax.vjp(
            lambda x: evolve.network_drift(weights, x, advantage, 0.2), jnp.float32(log_ratio)
        )
        return drift, slope(jnp.ones_like(drift))[0]

    rng = np.random.default_rng(0)
    for _ in range(3):
        weights = {"hidden": rng.normal(size=(8, 16)), "output": rng.normal(size=16)}
        drift, slope = map(np.asarray, drift_and_slope(weights))
        assert (drift >= 0).all() and (drift > 0.1).any() and np.isfinite(slope).all()
        assert (drift[at_one] == 0).all() and (slope[at_one] == 0).all()


def test_best_agent_by_hand():
    returns = np.array([[1.0, 1.0], [9.0, np.nan], [2.0, 4.0], [3.0, 1.0]])
    agents = {"a": np.arange(8).reshape(4, 2), "b": np.arange(16.0).reshape(4, 2, 2)}
    found = jax.device_get(jit_quickly(evolve.best_agent)(returns, agents))
    assert found["a"] == 5 and (found["b"] == [10.0, 11.0]).all()


# --- the evolution strategy ---


def test_networks_that_are_all_the_same_stay_numbers():
    """With `es_sigma` 0 the estimate of the gradient was 0 / 0."""
    config = evolve.Config(population_size=16, drift_size=2, es_lr=0.03, es_sigma=0.0)

    @jit_quickly
    def mean_after_a_generation(key):
        strategy = evolve.make_strategy(config)
        params = strategy.default_params
        state = strategy.init(key, evolve.init_weights(key, config.drift_size), params)
        population, state = strategy.ask(key, state, params)
        state, _ = strategy.tell(key, population, jnp.arange(16.0), state, params)
        return state.mean

    assert np.isfinite(mean_after_a_generation(jax.random.key(0))).all()


# --- trainings ---

CONFIG = dataclasses.replace(
    small_config(evolve), env_name="CartPole-v1", inner_seeds=2, hidden_sizes=(4,)
)
KEYS, PLAY_KEYS = jax.random.split(jax.random.key(3), (2, 2))


@functools.cache
@jit_quickly
def networks():
    keys = jax.random.split(jax.random.key(4), CONFIG.population_size)
    weights = jax.vmap(partial(evolve.init_weights, size=4))(keys)
    return weights | {"output": jax.random.normal(jax.random.key(5), weights["output"].shape)}


def ppo_config():
    fields = {field.name for field in dataclasses.fields(ppo.Config)}
    settings = {name: value for name, value in vars(CONFIG).items() if name in fields}
    return ppo.Config(**settings | {"num_envs": CONFIG.inner_envs, "num_steps": CONFIG.inner_steps})


# --- the result ---


def test_report(tmp_path):
    config = dataclasses.replace(CONFIG, num_generations=1)
    state = jax.eval_shape(jax.vmap(evolve.make_learner(config)[0]), KEYS)
    state = state._replace(drift=jax.tree.map(lambda leaf: np.asarray(leaf)[:2], networks()))
    evolve.report(config, state, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"drift.png"}
    picture = matplotlib.image.imread(tmp_path / "drift.png")[..., :3]
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.1


@pytest.mark.slow
def test_comparison_is_paired(capsys):
    """PPO's row is what ppo.py's agents reach from the same keys.

    A network without output is PPO but for 1e-4.
    """
    config = dataclasses.replace(CONFIG, lr=1e-3)
    weights = jax.vmap(partial(evolve.init_weights, size=4))(KEYS[:1])
    found = drift_vs_ppo.measure(config, weights, 3)
    assert list(found) == ["PPO", "DPO", "evolved 0"]
    train_keys, play_keys = jax.random.split(jax.random.key(2**31), (2, 3))
    theirs = jit_quickly(jax.vmap(ppo.make_train(dataclasses.replace(ppo_config(), lr=1e-3))))(
        train_keys
    )
    _, play = evolve.make_inner(config)
    state = evolve.AgentState(**theirs["runner_state"]._asdict())
    np.testing.assert_allclose(found["PPO"], jax.vmap(play)(state, play_keys)[0], rtol=1e-4)
    assert np.ptp(found["PPO"]) > 0 and found["DPO"].shape == (3,)
    drift_vs_ppo.show({"CartPole-v1": found})
    said = capsys.readouterr().out
    assert said.count("| CartPole-v1 |") == 3 and "evolved 0" in said


@pytest.mark.slow
def test_a_network_whose_agents_diverge_ranks_last():
    """argmax over logits that are no numbers is action 0, whose return is finite: the parameters
    tell.
    """
    broken = jit_quickly(
        evolve.make_evaluate(dataclasses.replace(CONFIG, lr=1e38, anneal_lr=False))
    )
    returns, _, _ = broken(networks(), KEYS, PLAY_KEYS)
    assert np.isnan(returns).all()
    mixed = jnp.array([[jnp.nan, 9.0], [2.0, 1.0], [1.0, 1.0]])
    assert evolve.best_agent(mixed, {"agent": jnp.arange(6).reshape(3, 2)})["agent"] == 2
