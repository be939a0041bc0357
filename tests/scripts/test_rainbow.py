"""Rainbow's distributions and noise against NumPy, and each of its six parts switched off alone."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly

import apex_dqn
import rainbow
from onejit.engine.evaluation import policy_of

SHARED = """patches select epsilon_greedy n_step_transitions discounted init_sum_tree set_priorities
    total_priority sample_sum_tree importance_weights add_rollout sample"""


@pytest.mark.parametrize("name", SHARED.split())
def test_replay_and_tree_are_those_of_apex(name):
    """tests/scripts/test_apex_dqn.py tests them."""
    assert inspect.getsource(getattr(rainbow, name)) == inspect.getsource(getattr(apex_dqn, name))


# --- distributions ---

project = jit_quickly(rainbow.project)
loss_and_error = jit_quickly(rainbow.loss_and_error, static_argnums=2)


@pytest.mark.parametrize(
    "v_min, v_max", [(1.0, 1.0), (1e3, 1e3 + 1.0), (1e4, 1e4 + 1.0), (5.0, -5.0)]
)
def test_projection_keeps_the_mass_on_any_support(v_min, v_max):
    support = np.linspace(v_min, v_max, 51, dtype=np.float32)
    values = np.tile(support + np.float32(0.01), (40, 1))
    found = np.asarray(project(values, np.full((40, 51), 1 / 51), support))
    np.testing.assert_allclose(found.sum(axis=-1), 1.0, rtol=1e-5)


def test_quantile_huber_loss_against_a_loop():
    rng = np.random.default_rng(0)
    quantiles, target = rng.normal(0, 2, (2, 9, 5))
    expected = np.zeros(9)
    for row, i, j in itertools.product(range(9), range(5), range(5)):
        error = target[row, j] - quantiles[row, i]
        huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
        expected[row] += abs((i + 0.5) / 5 - (error < 0)) * huber / 5
    loss, error = loss_and_error(quantiles, target, "quantile")
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_array_equal(loss, error)


@pytest.mark.parametrize("distribution", ["none", "categorical", "quantile"])
def test_nothing_is_bootstrapped_after_a_termination(distribution):
    """Not even 0 times NaN: the mean of the target is the reward."""
    support = np.linspace(-20.0, 20.0, 9)
    unknown = np.full((1, 1 if distribution == "none" else 9), np.nan)
    target = jit_quickly(rainbow.bellman_target, static_argnums=4)
    target = np.asarray(target(np.array([1.5]), np.zeros(1), unknown, support, distribution))
    mean = (target * support).sum() if distribution == "categorical" else target.mean()
    np.testing.assert_allclose(mean, 1.5, rtol=1e-5)


def test_dueling_of_distributions():
    """Each atom on its own, before the softmax."""
    rng = np.random.default_rng(0)
    value, advantage = rng.normal(size=(3, 1, 5)), rng.normal(size=(3, 4, 5))
    found = jit_quickly(rainbow.dueling_q)(value, advantage)
    expected = jit_quickly(jax.vmap(apex_dqn.dueling_q, -1, -1))(value, advantage)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- noise ---


def noise_of(key, params):
    """The noise of a network that is one layer."""
    noise = rainbow.draw_noise(key, {"params": {"layer": params["params"]}}, 1)
    return jax.tree.map(lambda x: x[0], noise["layer"])


def factors_of(layer, params, inputs, key):
    """f(p) [inputs] and f(q) [outputs] of a noisy layer, read off its outputs.

    With means of 0 and deviations of 1 the bias is f(q), and the input e_i adds f(p_i) f(q).
    """
    ones = {name: jnp.full_like(x, 1.0 * ("std" in name)) for name, x in params["params"].items()}
    x = jnp.concatenate([jnp.zeros((1, inputs)), jnp.eye(inputs)])
    outputs = layer.apply({"params": ones, "noise": noise_of(key, params)}, x)
    q = outputs[0]
    best = jnp.abs(q).argmax()  # division by a small number would be inexact
    return (outputs[1:, best] - q[best]) / q[best], q


def test_noisy_layer_by_hand():
    """y = x (mu + sigma * f(p) f(q)^T) + mu_b + sigma_b f(q), arXiv 1706.10295, section 3."""
    layer, x = rainbow.NoisyDense(3, 0.5), np.random.default_rng(0).normal(size=(7, 2))

    @jit_quickly
    def compute(x):
        params, key = layer.init(jax.random.key(1), x), jax.random.key(2)
        noisy = layer.apply(params | {"noise": noise_of(key, params)}, x)
        return params["params"], noisy, layer.apply(params, x), factors_of(layer, params, 2, key)

    leaves, noisy, silent, (p, q) = jax.device_get(compute(x))
    kernel = leaves["kernel"] + leaves["kernel_std"] * np.outer(p, q)
    np.testing.assert_allclose(
        noisy, x @ kernel + leaves["bias"] + leaves["bias_std"] * q, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(silent, x @ leaves["kernel"] + leaves["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leaves["kernel_std"], 0.5 / np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(leaves["bias_std"], 0.5 / np.sqrt(2), rtol=1e-6)
    kernel = leaves["kernel"]
    assert np.abs(kernel).max() <= 2**-0.5 and kernel.min() < 0 < kernel.max()


def test_policy_is_silent_and_greedy():
    config = rainbow.Config(hidden_sizes=(6, 5))
    network = rainbow.make_network(config, *rainbow.make_env(config))
    start, act = policy_of(rainbow, config)

    @jit_quickly
    def actions_and_probabilities(obs):
        params = network.init(jax.random.key(0), obs)
        actions = jax.vmap(lambda obs: act({"params": params}, start(), obs)[0])(obs)
        return actions, jax.nn.softmax(network.apply(params, obs))

    obs = 10 * np.random.default_rng(3).normal(size=(200, 4))
    actions, probabilities = map(np.asarray, actions_and_probabilities(obs))
    values = (probabilities * np.linspace(0.0, 100.0, 51)).sum(axis=-1)
    assert (actions == values.argmax(axis=-1)).all() and set(actions) == {0, 1}


# --- training ---


OFF = {
    "double": False,
    "dueling": False,
    "n_step": 1,
    "priority_exponent": 0.0,
    "noisy": False,
    "distribution": "none",
}


@pytest.mark.parametrize("part", OFF)
def test_each_part_can_be_switched_off_alone(part):
    init, update = rainbow.make_learner(rainbow.Config(**{part: OFF[part]}))
    jax.eval_shape(update, jax.eval_shape(init, jax.random.key(0)))


@pytest.mark.parametrize("script", [apex_dqn, rainbow])
def test_the_replay_does_not_depend_on_gamma(script):
    """An agent of a population that gets another gamma uses it for all that it has stored."""

    @jit_quickly
    def replay(gamma):
        config = script.Config(
            num_envs=4, learning_starts=64, buffer_size=64, gamma=gamma, hidden_sizes=(6,)
        )
        return script.make_learner(config)[0](jax.random.key(0)).replay

    jax.tree.map(np.testing.assert_array_equal, replay(0.9), replay(0.5))
