"""Rainbow's distributions and noise against NumPy, and each of its six parts switched off alone."""

import dataclasses
import inspect
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import toys
from support.compilation import jit_quickly
from support.probe import learn

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


def project_slowly(values, probability, support):
    """Algorithm 1 of arXiv 1707.06887, one value at a time."""
    width = support[1] - support[0]
    found = np.zeros((len(values), len(support)))
    for row in range(len(values)):
        for value, mass in zip(values[row], probability[row], strict=True):
            place = (np.clip(value, support[0], support[-1]) - support[0]) / width
            low = int(np.floor(place + 1e-9))
            share = max(place - low, 0.0)
            found[row, low] += mass * (1 - share)
            found[row, min(low + 1, len(support) - 1)] += mass * share
    return found


@pytest.mark.parametrize("atoms", [2, 7, 51])
def test_projection_against_a_loop(atoms):
    rng = np.random.default_rng(atoms)
    support = np.linspace(-3.0, 5.0, atoms)
    values = rng.normal(1.0, 4.0, (40, atoms))
    values[0], values[1], values[2] = support, -100.0, 100.0  # on the atoms, below all, above all
    probability = rng.dirichlet(np.ones(atoms), 40)
    found = np.asarray(project(values, probability, support))
    np.testing.assert_allclose(found, project_slowly(values, probability, support), atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=-1), 1.0, rtol=1e-5)
    mean = (probability * np.clip(values, -3.0, 5.0)).sum(axis=-1)
    np.testing.assert_allclose((found * support).sum(axis=-1), mean, atol=1e-4)


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


def test_losses_and_errors():
    outputs, target = np.array([[0.0], [1.0]]), np.array([[-3.0], [1.5]])
    loss, error = loss_and_error(outputs, target, "none")
    np.testing.assert_allclose(loss, [4.5, 0.125])
    np.testing.assert_allclose(error, [3.0, 0.5])
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(6, 4)), rng.dirichlet(np.ones(4), 6)
    target[0] = [0.0, 1.0, 0.0, 0.0]
    loss, error = loss_and_error(logits, target, "categorical")
    expected = scipy.special.rel_entr(target, scipy.special.softmax(logits, axis=-1)).sum(axis=-1)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(loss, error)


@pytest.mark.parametrize("distribution", ["none", "categorical", "quantile"])
def test_bellman_targets(distribution):
    """Mean of the target is R + discount times the mean of what follows, and R alone after a
    termination.
    """
    rng, support = np.random.default_rng(0), np.linspace(-20.0, 20.0, 9)
    outputs = rng.normal(0, 2, (5, 1 if distribution == "none" else 9))
    returns, discount = rng.normal(0, 2, 5), np.array([0.9, 0.5, 0.0, 0.7, 0.0])

    @jit_quickly
    def target_and_mean(returns, discount, outputs, support):
        unknown = outputs.at[2].set(jnp.nan)
        target = rainbow.bellman_target(returns, discount, unknown, support, distribution)
        return target, rainbow.action_values(outputs[:, None], support, distribution)[:, 0]

    target, mean = map(np.asarray, target_and_mean(returns, discount, outputs, support))
    found = (
        (target * support).sum(axis=-1) if distribution == "categorical" else target.mean(axis=-1)
    )
    np.testing.assert_allclose(found, returns + discount * mean, atol=1e-4)
    if distribution == "quantile":
        np.testing.assert_allclose(target[0], returns[0] + 0.9 * outputs[0], rtol=1e-5)


def test_dueling_of_distributions():
    """Each atom on its own, before the softmax."""
    rng = np.random.default_rng(0)
    value, advantage = rng.normal(size=(3, 1, 5)), rng.normal(size=(3, 4, 5))
    found = jit_quickly(rainbow.dueling_q)(value, advantage)
    expected = jit_quickly(jax.vmap(apex_dqn.dueling_q, -1, -1))(value, advantage)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- noise ---


def noisy_network(**overrides):
    """A network, the shapes of its parameters, and observations."""
    config = dataclasses.replace(rainbow.Config(hidden_sizes=(6, 5)), **overrides)
    network = rainbow.make_network(config, *rainbow.make_env(config))
    obs = np.random.default_rng(1).normal(size=(3, 4))
    return network, jax.eval_shape(network.init, jax.random.key(0), obs), obs


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


def test_noise_is_of_the_papers_distribution():
    """f(x) = sign(x) sqrt|x|: mean 0, E f^2 = E|x| = sqrt(2 / pi), and all entries independent."""
    layer = rainbow.NoisyDense(3, 0.5)
    params = jax.eval_shape(layer.init, jax.random.key(1), np.zeros((1, 2)))  # shapes alone
    draw = jax.vmap(lambda key: jnp.concatenate(factors_of(layer, params, 2, key)))
    factors = jit_quickly(lambda key: draw(jax.random.split(key, 4000)))(jax.random.key(2))
    factors = np.asarray(factors)
    np.testing.assert_allclose(factors.mean(axis=0), 0.0, atol=0.07)
    np.testing.assert_allclose((factors**2).mean(axis=0), np.sqrt(2 / np.pi), atol=0.07)
    correlation = np.corrcoef(factors.T) - np.eye(5)
    assert np.abs(correlation).max() < 0.09


def test_layers_share_no_noise():
    """The biases' noise of the five layers, one layer switched on at a time."""
    network, params, obs = noisy_network(activation="tanh")
    layers = params["params"]
    assert set(layers) == {f"NoisyDense_{i}" for i in range(5)}
    seen = {}

    def record(next_call, args, kwargs, context):
        if isinstance(context.module, rainbow.NoisyDense) and context.method_name == "__call__":
            y = next_call(*args, **kwargs)
            seen[context.module.name] = y[0, 0] - context.module.get_variable("params", "bias")[0]
            return y
        return next_call(*args, **kwargs)

    def noise(key):
        with nn.intercept_methods(record):
            zeros = jax.tree.map(jnp.zeros_like, layers)
            for name in zeros:
                zeros[name]["bias_std"] = jnp.ones_like(zeros[name]["bias_std"])
            noise = rainbow.draw_noise(key, params, 1)
            sample = jax.tree.map(lambda x: x[0], noise)
            network.apply({"params": zeros, "noise": sample}, obs)
        return jnp.stack([seen[name] for name in sorted(seen)])

    draw = jit_quickly(lambda key: jax.vmap(noise)(jax.random.split(key, 2000)))
    samples = np.asarray(draw(jax.random.key(3)))
    assert samples.shape == (2000, 5)
    assert np.abs(np.corrcoef(samples.T) - np.eye(5)).max() < 0.1


def test_no_noise_without_noisy_layers():
    _, params, _ = noisy_network(noisy=False)
    assert jax.eval_shape(lambda key: rainbow.draw_noise(key, params, 1), jax.random.key(2)) == {}


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


@pytest.mark.slow
def test_value_depends_on_the_action_with_noise_alone():
    """No epsilon: the noise explores. The greedy policy then knows the best action."""
    settings = {"noisy": True, "epsilon_start": 0.0, "epsilon_finish": 0.0}
    learned = learn("rainbow", 400, kinds="best", v_min=-1.0, v_max=2.0, **settings)
    values = learned.values([[0, 0, 1, 1, 0], [0, 0, 1, -1, 0]])
    np.testing.assert_allclose(values[[0, 1], [2, 0]], 1.0, atol=0.1)
    assert (learned.first_rewards(toys.BEST) == 1.0).all()


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


@pytest.mark.parametrize(
    "v_min, v_max, least, most", [(-60, -30, 0.99, 1.01), (30, 60, 0.99, 1.01), (-40, 40, 0.0, 0.1)]
)
def test_support_edge_tells_of_a_support_that_misses_the_returns(v_min, v_max, least, most):
    plain = {"n_step": 1, "dueling": False, "double": False}  # a smaller program
    learned = learn("rainbow", 60, "cut", v_min=float(v_min), v_max=float(v_max), **plain)
    assert least <= np.asarray(learned.metrics["support_edge"])[-1] <= most


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
