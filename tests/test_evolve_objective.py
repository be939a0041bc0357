"""Drift networks against numbers worked by hand, the evolution strategy against NumPy, trainings against ppo.py's."""

import csv
import dataclasses
import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from conftest import ROOT, arrays, assert_close, flags, jit_quickly, slow, small_config
from test_dpo_continuous import BY_HAND

import evolve_objective as evolve
import ppo

CLIP = 0.2
NETWORK = {"hidden": jnp.arange(1.0, 9.0)[:, None] / 10, "output": jnp.array([2.0])}

# (ratio, advantage, sign of the output weight, drift) of NETWORK, with a pocket calculator. The inputs at a ratio of
# 1.5 are 0.405465, 0.164402, -0.5, 0.25 and the same times the advantage.
NETWORK_BY_HAND = [
    (1.5, 2.0, 1, 0.6 + 0.630157 - 0.0001),  # 0.6 from PPO's clip; the hidden unit is tanh(0.326174) = 0.315078
    (1.5, 2.0, -1, 0.0),  # 0.6 - 0.630157 is negative
    (1.5, -2.0, 1, 0.0),  # tanh(-0.279321) = -0.272276, and no clip
    (1.5, -2.0, -1, 0.544551 - 0.0001),
    (1.0, 3.0, 1, 0.0),
]


# --- mathematics ---


@pytest.mark.parametrize("ratio, advantage, sign, value", NETWORK_BY_HAND)
def test_network_by_hand(ratio, advantage, sign, value):
    weights = NETWORK | {"output": sign * NETWORK["output"]}
    drift = evolve.network_drift(weights, jnp.log(jnp.array([ratio])), jnp.array([advantage]), CLIP)
    np.testing.assert_allclose(drift, [value], atol=2e-5)


@pytest.mark.parametrize(
    "ratio, advantage, value", [(1.5, 2.0, 0.6), (1.1, 2.0, 0), (0.5, -2.0, 0.6), (0.5, 2.0, 0), (3.0, -1.0, 0)]
)
def test_ppo_drift_by_hand(ratio, advantage, value):
    np.testing.assert_allclose(evolve.ppo_drift(jnp.log(ratio), jnp.asarray(advantage), CLIP), value, atol=1e-6)


def test_dpo_drift_by_hand():
    ratio, advantage, value, _ = np.array(BY_HAND).T
    np.testing.assert_allclose(evolve.dpo_drift(jnp.log(ratio), jnp.asarray(advantage)), value, atol=2e-5)


def test_network_is_a_drift_whatever_its_weights():
    """Not negative; zero with zero gradient at a ratio of 1."""
    log_ratio, advantage = map(jnp.ravel, jnp.meshgrid(jnp.linspace(-2, 2, 41), jnp.linspace(-3, 3, 31)))
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed))
        weights = {"hidden": jax.random.normal(keys[0], (8, 16)), "output": jax.random.normal(keys[1], (16,))}
        drift, slope = jax.vjp(lambda x, w=weights: evolve.network_drift(w, x, advantage, CLIP), log_ratio)
        slope = slope(jnp.ones_like(drift))[0]
        at_one = np.abs(log_ratio) < 1e-6
        assert (drift >= 0).all() and (drift > 0.1).any() and np.isfinite(slope).all()
        assert at_one.sum() == 31 and (drift[at_one] == 0).all() and (slope[at_one] == 0).all()


def test_first_loss_and_gradient_are_those_of_ppo():
    rng = np.random.default_rng(0)
    old, advantage = jnp.asarray(rng.normal(size=(2, 256)), jnp.float32)
    new = old + jnp.asarray(rng.normal(size=256) * 0.4, jnp.float32)
    weights = evolve.init_weights(jax.random.key(0), 32)
    drift = partial(evolve.network_drift, weights, clip_eps=CLIP)
    ours = jax.value_and_grad(lambda x: evolve.policy_loss(x, old, advantage, drift))(new)
    theirs = jax.value_and_grad(lambda x: ppo.policy_loss(x, old, advantage, CLIP)[0])(new)
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-4)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-6)
    assert (np.asarray(theirs[1]) == 0).sum() > 20  # the clip has set in
    some = weights | {"output": weights["output"] + 0.1}
    other = evolve.policy_loss(new, old, advantage, partial(evolve.network_drift, some, clip_eps=CLIP))
    assert abs(other - theirs[0]) > 1e-3


def test_final_return_by_hand():
    episodes = jnp.array([9, 9, 9, 9, 9, 9, 9, 1, 0, 3])  # the last quarter of 10 is 3
    returns = jnp.where(episodes > 0, jnp.array([5.0, 5, 5, 5, 5, 5, 5, 2, 0, 6]), jnp.nan)
    np.testing.assert_allclose(evolve.final_return({"episodes": episodes, "episodic_return": returns}), 20 / 4)
    none = {"episodes": jnp.array([9, 9, 9, 0]), "episodic_return": jnp.array([1.0, 1.0, 1.0, jnp.nan])}
    assert np.isnan(evolve.final_return(none))


def test_generation_metrics_by_hand():
    returns = jnp.array([[1.0, 3.0], [6.0, 8.0], [jnp.nan, 1.0]])  # of three networks with two agents each
    metrics = {
        "episodes": jnp.array([[9, 9, 9, 2], [9, 9, 9, 0], [9, 9, 9, 6]]),
        "episodic_return": jnp.array([[0, 0, 0, 4.0], [0, 0, 0, jnp.nan], [0, 0, 0, 8.0]]),
        "episodic_length": jnp.array([[0, 0, 0, 1.0], [0, 0, 0, jnp.nan], [0, 0, 0, 5.0]]),
    }
    found = evolve.generation_metrics(returns, metrics)
    expected = {"fitness_mean": 4.5, "fitness_best": 7.0, "fitness_spread": 2.5}
    expected |= {"episodes": 8, "episodic_return": 56 / 8, "episodic_length": 32 / 8}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)


def test_best_policy_by_hand():
    fitness = jnp.array([1.0, jnp.nan, 3.0, 2.0])
    returns = jnp.array([[1.0, 1.0], [9.0, jnp.nan], [2.0, 4.0], [3.0, 1.0]])
    policies = {"a": jnp.arange(8).reshape(4, 2), "b": jnp.arange(16.0).reshape(4, 2, 2)}
    found = evolve.best_policy(fitness, returns, policies)
    assert found["a"] == 5 and (found["b"] == jnp.array([10.0, 11.0])).all()


# --- the evolution strategy ---

STRATEGY = evolve.Config(population_size=6, drift_size=2, es_lr=0.03, es_sigma=0.2)


def start_strategy():
    strategy = evolve.make_strategy(STRATEGY)
    weights = evolve.init_weights(jax.random.key(0), STRATEGY.drift_size)
    return strategy, strategy.init(jax.random.key(1), weights, strategy.default_params)


def flatten(population):
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(population)], axis=1)


def test_population_is_of_mirrored_pairs():
    strategy, state = start_strategy()
    population, _ = strategy.ask(jax.random.key(2), state, strategy.default_params)
    noise = (flatten(population) - np.asarray(state.mean)) / 0.2
    np.testing.assert_allclose(noise[:3], -noise[3:], atol=1e-5)
    assert 0.6 < noise[:3].std() < 1.4 and np.linalg.matrix_rank(noise) == 3


def test_steps_against_numpy_on_a_quadratic():
    """Ranks, the estimate of the gradient and Adam; the third network has not finished an episode."""
    strategy, state = start_strategy()
    mean, size = np.asarray(state.mean, float), STRATEGY.population_size
    first, second = np.zeros_like(mean), np.zeros_like(mean)
    for t in range(1, 4):
        population, state = strategy.ask(jax.random.key(t), state, strategy.default_params)
        networks = flatten(population).astype(float)
        cost = np.square(networks - 1.0).sum(axis=1)
        cost[2] = np.nan
        order = sorted(range(size), key=lambda i: (np.isnan(cost[i]), cost[i]))
        gradient = np.zeros_like(mean)
        for rank, i in enumerate(order):
            gradient += (rank / (size - 1) - 0.5) * (networks[i] - mean) / (size * 0.2**2)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean = mean - 0.03 * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        state, _ = strategy.tell(jax.random.key(9), population, jnp.asarray(cost), state, strategy.default_params)
        np.testing.assert_allclose(state.mean, mean, rtol=1e-3, atol=1e-4)


def test_strategy_finds_the_minimum_of_a_quadratic():
    strategy = evolve.make_strategy(dataclasses.replace(STRATEGY, population_size=16, es_lr=0.1))
    _, state = start_strategy()

    def step(state, key):
        population, state = strategy.ask(key, state, strategy.default_params)
        cost = jax.vmap(lambda weights: sum(jnp.square(x - 1.0).sum() for x in jax.tree.leaves(weights)))(population)
        state, _ = strategy.tell(key, population, cost, state, strategy.default_params)
        return state, cost.mean()

    _, cost = jit_quickly(partial(jax.lax.scan, step))(state, jax.random.split(jax.random.key(0), 100))
    assert cost[0] > 10 and cost[-1] < 2  # 18 weights, and 18 * 0.2**2 is what the noise costs


# --- trainings ---

CONFIG = dataclasses.replace(small_config(evolve), env_name="CartPole-v1", inner_seeds=2, hidden_sizes=(4,))
KEYS = jax.random.split(jax.random.key(3), 2)


def networks():
    keys = jax.random.split(jax.random.key(4), CONFIG.population_size)
    weights = jax.vmap(partial(evolve.init_weights, size=4))(keys)
    return weights | {"output": jax.random.normal(jax.random.key(5), weights["output"].shape)}


@pytest.fixture(scope="module")
def evaluated():
    return jit_quickly(evolve.make_evaluate(CONFIG))(networks(), KEYS)


def ppo_config():
    fields = {field.name for field in dataclasses.fields(ppo.Config)}
    settings = {name: value for name, value in vars(CONFIG).items() if name in fields}
    return ppo.Config(**settings, num_envs=CONFIG.inner_envs, num_steps=CONFIG.inner_steps)


def test_trainings_are_those_of_ppo():
    """The same agent from the same key."""
    theirs = jit_quickly(jax.vmap(ppo.make_train(ppo_config())))(KEYS)
    train = evolve.make_inner(CONFIG)
    drift = partial(evolve.ppo_drift, clip_eps=CONFIG.clip_eps)
    policy, metrics = jit_quickly(jax.vmap(partial(train, drift)))(KEYS)
    shared = {name: theirs["metrics"][name] for name in metrics}
    assert_close(
        {"metrics": metrics, "runner_state": policy}, {"metrics": shared, "runner_state": theirs["runner_state"]}
    )


@pytest.mark.slow
def test_evaluation_is_of_each_network_with_each_key(evaluated):
    """And the policy is the best one's."""
    returns, _, policy = evaluated
    train = evolve.make_inner(CONFIG)

    @jit_quickly
    def alone(weights, key):
        kept, metrics = train(partial(evolve.network_drift, weights, clip_eps=CONFIG.clip_eps), key)
        return evolve.final_return(metrics), kept

    found = [[alone(jax.tree.map(lambda leaf, i=i: leaf[i], networks()), key) for key in KEYS] for i in range(4)]
    expected = np.array([[value for value, _ in row] for row in found])
    np.testing.assert_allclose(returns, expected, rtol=1e-4)
    assert np.ptp(expected.mean(axis=1)) > 0
    best = expected.mean(axis=1).argmax()
    kept = found[best][expected[best].argmax()][1]
    for ours, theirs in zip(arrays(policy), arrays(kept), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("num_slices", [slow(2), slow(4)])
def test_slices_give_the_same(evaluated, num_slices):
    config = dataclasses.replace(CONFIG, num_slices=num_slices)
    returns, metrics, policy = jit_quickly(evolve.make_evaluate(config))(networks(), KEYS)
    np.testing.assert_allclose(returns, evaluated[0], rtol=1e-4)
    for ours, theirs in zip(arrays(policy), arrays(evaluated[2]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    ours, theirs = (evolve.generation_metrics(*pair) for pair in ((returns, metrics), evaluated[:2]))
    assert {k: float(v) for k, v in ours.items()} == pytest.approx({k: float(v) for k, v in theirs.items()}, rel=1e-4)


# --- the result ---


@pytest.mark.slow
def test_report_on_an_environment_of_known_value(tmp_path, capsys):
    """Each episode of the toy is worth 5, whoever plays it; fitness, the pictures and the comparison say so."""
    config = dataclasses.replace(CONFIG, env_name="ToyDiscrete", max_episode_steps=0, num_generations=1)
    out = jit_quickly(jax.vmap(evolve.make_train(config)))(KEYS)
    metrics = {name: np.asarray(value) for name, value in out["metrics"].items()}
    for name, value in (("fitness_mean", 5), ("fitness_best", 5), ("fitness_spread", 0), ("episodic_return", 5)):
        np.testing.assert_allclose(metrics[name], np.full((2, 1), value), atol=1e-5)
    np.savez(tmp_path / "metrics.npz", **metrics)
    config = dataclasses.replace(config, test_seeds=2)
    evolve.report(config, out["runner_state"], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.npz", "drift.npz", "drift.png", "fitness.png", "comparison.csv",
    }  # fmt: skip
    saved = np.load(tmp_path / "drift.npz", allow_pickle=False)
    flat = np.concatenate([saved[name].reshape(2, -1) for name in ("hidden", "output")], axis=1)
    np.testing.assert_array_equal(flat, out["runner_state"].es_state.mean)
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    labels = ["PPO", "DPO", "evolved 0", "evolved 1"]
    assert [row["objective"] for row in rows] == [label for label in labels for _ in range(2)]
    np.testing.assert_allclose([float(row["return"]) for row in rows], 5.0)
    said = capsys.readouterr().out
    assert said.count("ToyDiscrete") == 4 and said.count("5 (5 to 5)") == 4 and said.count("0 (0 to 0)") == 3


@pytest.mark.slow
def test_comparison_is_paired():
    """PPO's column is what ppo.py reaches from the same keys; a network without output is PPO but for 1e-4."""
    config = dataclasses.replace(CONFIG, test_seeds=3, test_envs=" Catch-bsuite,CartPole-v1, ", lr=1e-3)
    weights = jax.vmap(partial(evolve.init_weights, size=4))(KEYS[:1])
    assert [each.env_name for each in evolve.test_configs(config)] == ["CartPole-v1", "Catch-bsuite"]
    assert [each.max_episode_steps for each in evolve.test_configs(config)] == [13, 0]
    found = evolve.compare_objectives(dataclasses.replace(config, test_envs=""), weights)["CartPole-v1"]
    assert list(found) == ["PPO", "DPO", "evolved 0"]
    keys = jax.random.split(jax.random.key(2**31), 3)
    theirs = jit_quickly(jax.vmap(ppo.make_train(dataclasses.replace(ppo_config(), lr=1e-3))))(keys)["metrics"]
    np.testing.assert_allclose(found["PPO"], jax.vmap(evolve.final_return)(theirs), rtol=1e-4)
    assert np.ptp(found["PPO"]) > 0


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"population_size": 5}, "population_size = 5: must be even"),
        ({"num_slices": 3}, "num_slices = 3: must divide population_size = 4"),
        ({"num_devices": 3}, "num_devices = 3: must divide the 4 networks"),
        ({"num_devices": 2, "num_slices": 4}, "num_devices = 2: must divide the 1 networks"),
        ({"population_size": 2**16, "num_devices": 2**16}, "num_devices = 65536: .* as many"),
        ({"test_envs": "Catch-bsuite,Nowhere"}, "test_envs = Catch-bsuite,Nowhere: env_name = Nowhere"),
        ({"test_envs": "Pendulum-v1"}, "test_envs = Pendulum-v1: .*discrete"),
        ({"test_timesteps": 31}, "test_timesteps = 31"),
        ({"es_sigma": 0.0}, "es_sigma = 0.0"),
    ],
)
def test_configs_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        evolve.make_learner(dataclasses.replace(CONFIG, **settings))


FOUR_DEVICES = """
import sys
import evolve_objective as script
script.main(sys.argv[1:])
_, advance, abstract, _ = script.compile_training(*script.parse(sys.argv[1:], script.Config))
open("program.txt", "w").write(advance.lower(abstract, 0, 1).compile().as_text())
"""


@pytest.mark.slow
def test_one_population_spread_over_devices(tmp_path):
    xla_flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    env = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags, PYTHONPATH=str(ROOT))
    args = [*flags(dataclasses.replace(CONFIG, num_devices=4)), "--num-seeds=1", f"--run-dir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", FOUR_DEVICES, *args]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 seeds on 4 device" in done.stdout, done.stderr
    metrics = dict(np.load(tmp_path / "run" / "metrics.npz"))
    metrics.pop("evaluation")
    out = jit_quickly(jax.vmap(evolve.make_train(CONFIG)))(jax.random.split(jax.random.key(0), 1))
    assert_close(out | {"metrics": metrics}, out)
    program = (tmp_path / "program.txt").read_text()
    assert "num_partitions=4" in program
    trainings = re.findall(r"\[(\d),2,4,4\]", program)  # observations of networks, keys and environments
    assert "1" in trainings and "4" not in trainings
