"""Drift networks against numbers worked by hand, the evolution strategy against NumPy, trainings
against ppo.py's.
"""

import dataclasses
import functools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
from flax.traverse_util import flatten_dict, unflatten_dict
from support.compilation import jit_quickly
from support.files import ROOT
from support.small import small_config
from support.tiers import slow
from support.trees import arrays
from test_dpo_continuous import BY_HAND

import evolve_objective as evolve
import ppo

sys.path.append(str(ROOT / "benchmarks"))
import drift_vs_ppo

CLIP = 0.2
NETWORK = {"hidden": np.arange(1.0, 9.0)[:, None] / 10, "output": np.array([2.0])}

# (ratio, advantage, sign of the output weight, drift) of NETWORK, with a pocket calculator. The
# inputs at a ratio of 1.5 are 0.405465, 0.164402, -0.5, 0.25 and the same times the advantage.
NETWORK_BY_HAND = [
    # 0.6 from PPO's clip; the hidden unit is tanh(0.326174) = 0.315078
    (1.5, 2.0, 1, 0.6 + 0.630157 - 0.0001),
    (1.5, 2.0, -1, 0.0),  # 0.6 - 0.630157 is negative
    (1.5, -2.0, 1, 0.0),  # tanh(-0.279321) = -0.272276, and no clip
    (1.5, -2.0, -1, 0.544551 - 0.0001),
    (1.0, 3.0, 1, 0.0),
]


# --- mathematics ---


def test_drifts_by_hand():
    """PPO's, too, and the one that is a formula."""
    ratio, advantage, sign, value = np.array(NETWORK_BY_HAND).T

    @jit_quickly
    @jax.vmap
    def network_drift(ratio, advantage, sign):
        weights = NETWORK | {"output": sign * NETWORK["output"]}
        return evolve.network_drift(weights, jnp.log(ratio)[None], advantage[None], CLIP)[0]

    np.testing.assert_allclose(network_drift(ratio, advantage, sign), value, atol=2e-5)
    ratio, advantage = np.array([1.5, 1.1, 0.5, 0.5, 3.0]), np.array([2.0, 2.0, -2.0, 2.0, -1.0])
    drift = jit_quickly(evolve.ppo_drift)(np.log(ratio), advantage, CLIP)
    np.testing.assert_allclose(drift, [0.6, 0, 0.6, 0, 0], atol=1e-6)
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
            lambda x: evolve.network_drift(weights, x, advantage, CLIP), jnp.float32(log_ratio)
        )
        return drift, slope(jnp.ones_like(drift))[0]

    rng = np.random.default_rng(0)
    for _ in range(3):
        weights = {"hidden": rng.normal(size=(8, 16)), "output": rng.normal(size=16)}
        drift, slope = map(np.asarray, drift_and_slope(weights))
        assert (drift >= 0).all() and (drift > 0.1).any() and np.isfinite(slope).all()
        assert (drift[at_one] == 0).all() and (slope[at_one] == 0).all()


def test_first_loss_and_gradient_are_those_of_ppo():
    rng = np.random.default_rng(0)
    old, advantage = rng.normal(size=(2, 256))
    new = old + rng.normal(size=256) * 0.4

    def evolved(new, old, advantage, output):
        """The loss with a network that has this output weight."""
        weights = evolve.init_weights(jax.random.key(0), 32)
        weights = weights | {"output": weights["output"] + output}
        drift = partial(evolve.network_drift, weights, clip_eps=CLIP)
        return evolve.policy_loss(new, old, advantage, drift)

    @jit_quickly
    def losses(*batch):
        """Losses and gradients of a new network and of PPO, and the loss of another network."""
        return (
            jax.value_and_grad(evolved)(*batch, 0.0),
            jax.value_and_grad(lambda *batch: ppo.policy_loss(*batch, CLIP)[0])(*batch),
            evolved(*batch, 0.1),
        )

    ours, theirs, other = jax.device_get(losses(new, old, advantage))
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-4)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-6)
    assert (theirs[1] == 0).sum() > 20  # the clip has set in
    assert abs(other - theirs[0]) > 1e-3


def test_best_agent_by_hand():
    returns = np.array([[1.0, 1.0], [9.0, np.nan], [2.0, 4.0], [3.0, 1.0]])
    agents = {"a": np.arange(8).reshape(4, 2), "b": np.arange(16.0).reshape(4, 2, 2)}
    found = jax.device_get(jit_quickly(evolve.best_agent)(returns, agents))
    assert found["a"] == 5 and (found["b"] == [10.0, 11.0]).all()


# --- the evolution strategy ---

STRATEGY = evolve.Config(population_size=16, drift_size=2, es_lr=0.03, es_sigma=0.2)


@jit_quickly
def start_strategy(config):
    strategy = evolve.make_strategy(config)
    weights = evolve.init_weights(jax.random.key(0), config.drift_size)
    return strategy.init(jax.random.key(1), weights, strategy.default_params)


@jit_quickly
def ask(config, seed, state):
    strategy = evolve.make_strategy(config)
    return strategy.ask(jax.random.key(seed), state, strategy.default_params)


@jit_quickly
def tell(config, population, cost, state):
    strategy = evolve.make_strategy(config)
    key = jax.random.key(9)
    return strategy.tell(key, population, cost, state, strategy.default_params)[0]


def flatten(population):
    return np.concatenate(
        [np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(population)], axis=1
    )


def test_population_is_of_mirrored_pairs():
    state = start_strategy(STRATEGY)
    population, _ = ask(STRATEGY, 2, state)
    noise = (flatten(population) - np.asarray(state.mean)) / 0.2
    np.testing.assert_allclose(noise[:8], -noise[8:], atol=1e-5)
    assert 0.6 < noise[:8].std() < 1.4 and np.linalg.matrix_rank(noise) == 8


def test_steps_against_numpy_on_a_quadratic():
    """Ranks, the estimate of the gradient and Adam; the third network has not finished an
    episode.
    """
    state = start_strategy(STRATEGY)
    mean, size = np.asarray(state.mean, float), STRATEGY.population_size
    first, second = np.zeros_like(mean), np.zeros_like(mean)
    for t in range(1, 4):
        population, state = ask(STRATEGY, t, state)
        networks = flatten(population).astype(float)
        cost = np.square(networks - 1.0).sum(axis=1)
        cost[2] = np.nan
        order = sorted(range(size), key=lambda i: (np.isnan(cost[i]), cost[i]))
        gradient = np.zeros_like(mean)
        for rank, i in enumerate(order):
            gradient += (rank / (size - 1) - 0.5) * (networks[i] - mean) / (size * 0.2**2)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean = mean - 0.03 * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        state = tell(STRATEGY, population, cost, state)
        np.testing.assert_allclose(state.mean, mean, rtol=1e-3, atol=1e-4)


def test_networks_that_are_all_the_same_stay_numbers():
    """With `es_sigma` 0 the estimate of the gradient was 0 / 0."""
    config, state = dataclasses.replace(STRATEGY, es_sigma=0.0), start_strategy(STRATEGY)
    for t in range(3):
        population, state = ask(config, t, state)
        state = tell(config, population, np.arange(16.0), state)
        assert np.isfinite(flatten(population)).all()
        assert np.isfinite(np.asarray(state.mean)).all()


def test_strategy_finds_the_minimum_of_a_quadratic():
    config, state = dataclasses.replace(STRATEGY, es_lr=0.1), start_strategy(STRATEGY)
    costs = []
    for t in range(100):
        population, state = ask(config, t, state)
        cost = np.square(flatten(population) - 1.0).sum(axis=1)
        state = tell(config, population, cost, state)
        costs.append(cost.mean())
    assert costs[0] > 10 and costs[-1] < 2  # 18 weights, and 18 * 0.2**2 is what the noise costs


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


@pytest.fixture(scope="module")
def evaluated():
    return jit_quickly(evolve.make_evaluate(CONFIG))(networks(), KEYS, PLAY_KEYS)


def ppo_config():
    fields = {field.name for field in dataclasses.fields(ppo.Config)}
    settings = {name: value for name, value in vars(CONFIG).items() if name in fields}
    return ppo.Config(**settings | {"num_envs": CONFIG.inner_envs, "num_steps": CONFIG.inner_steps})


def assert_close(ours, theirs):
    for a, b in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_trainings_are_those_of_ppo():
    """The same agent from the same key, with all that its training carries, statistics of its
    episodes included.
    """
    theirs = jit_quickly(jax.vmap(ppo.make_train(ppo_config())))(KEYS)["runner_state"]
    train, _ = evolve.make_inner(CONFIG)
    ours = jit_quickly(
        jax.vmap(partial(train, partial(evolve.ppo_drift, clip_eps=CONFIG.clip_eps)))
    )(KEYS)
    assert ours._fields == theirs._fields
    assert_close(ours, theirs)


@pytest.mark.slow
def test_evaluation_is_of_each_network_with_each_key(evaluated):
    """And the agents are those that reached the returns."""
    returns, lengths, _ = evaluated
    train, play = evolve.make_inner(CONFIG)

    @jit_quickly
    def alone(weights, key, play_key):
        state = train(partial(evolve.network_drift, weights, clip_eps=CONFIG.clip_eps), key)
        return *play(state, play_key), {
            "params": state.params,
            "obs_statistics": state.obs_statistics,
        }

    for i in range(4):
        weights = jax.tree.map(lambda leaf, i=i: leaf[i], networks())
        for j in range(2):
            ours = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], evaluated)
            assert_close(ours, alone(weights, KEYS[j], PLAY_KEYS[j]))
    assert returns.shape == lengths.shape == (4, 2) and np.ptp(returns.mean(axis=1)) > 0


@pytest.mark.parametrize("num_slices", [slow(2), slow(4)])
def test_slices_give_the_same(evaluated, num_slices):
    config = dataclasses.replace(CONFIG, num_slices=num_slices)
    assert_close(jit_quickly(evolve.make_evaluate(config))(networks(), KEYS, PLAY_KEYS), evaluated)


# --- fitness ---


@functools.cache
def player():
    """`play(logits, key)` of an agent that knows nothing but how likely each action is.

    And its environment.
    """
    config = dataclasses.replace(CONFIG, fitness_episodes=5, env_params={"max_steps_in_episode": 9})
    env, env_params = evolve.make_env(config)
    actor, _ = evolve.make_networks(config, env, env_params)
    shape = env.observation_space(env_params).shape

    def play(logits, key):
        params = actor.init(key, jnp.zeros(shape))
        params = flatten_dict(jax.tree.map(jnp.zeros_like, params))
        (last,) = [path for path in params if path[-1] == "bias" and params[path].shape == (2,)]
        params[last] = logits
        statistics = evolve.init_mean_std(shape)
        nothing = dict.fromkeys(evolve.AgentState._fields)
        used = {"params": {"actor": unflatten_dict(params)}, "obs_statistics": statistics}
        return evolve.make_inner(config)[1](evolve.AgentState(**nothing | used), key)

    return jit_quickly(play), env, env_params


def test_fitness_is_of_whole_episodes():
    """CartPole pushed one way only: each episode, played by itself in a loop, counts once, though
    some last longer.
    """
    play, env, env_params = player()
    returns, lengths = play(np.array([0.0, 1e3]), jax.random.key(7))
    reset_key, _ = jax.random.split(jax.random.key(7))
    expected, reset, step = [], jit_quickly(env.reset), jit_quickly(env.step)
    for key in jax.random.split(reset_key, 5):
        _, state = reset(key, env_params)
        steps, done = 0, False
        while not done:
            _, state, _, terminated, truncated, _ = step(key, state, 1, env_params)
            steps, done = steps + 1, bool(terminated) or bool(truncated)
        expected.append(steps)
    assert len(set(expected)) > 1  # they end at different times
    np.testing.assert_allclose([returns, lengths], [np.mean(expected)] * 2)


def test_fitness_ends_at_the_time_limit():
    play, _, _ = player()
    assert [float(value) for value in play(np.zeros(2), jax.random.key(0))] == [9.0, 9.0]


def test_generation_on_an_environment_of_known_value():
    """Each episode of the toy is worth 5, whoever plays it.

    The drift of the agent is the strategy's mean.
    """
    config = dataclasses.replace(
        CONFIG, env_name="ToyDiscrete", env_params={}, num_generations=1, fitness_episodes=3
    )
    out = jit_quickly(jax.vmap(evolve.make_train(config)))(KEYS)
    expected = {
        "episodic_return": 5,
        "episodic_length": 5,
        "episodes": 24,
        "fitness_best": 5,
        "fitness_spread": 0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(out["metrics"][name], np.full((2, 1), value), atol=1e-5)
    state = jax.device_get(out["runner_state"])
    drift = np.concatenate(
        [state.agent["drift"][name].reshape(2, -1) for name in ("hidden", "output")], axis=1
    )
    np.testing.assert_array_equal(drift, state.es_state.mean)


def test_networks_of_a_generation_play_the_same_episodes():
    """Networks that are the same reach the same: keys are shared.

    Two agents of a network play different episodes.
    """
    same = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), networks())
    evaluate = jit_quickly(evolve.make_evaluate(CONFIG))
    returns, lengths = jax.device_get(evaluate(same, KEYS, PLAY_KEYS)[:2])
    np.testing.assert_allclose(returns, np.broadcast_to(returns[:1], returns.shape), rtol=1e-5)
    assert lengths[0, 0] != lengths[0, 1]


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
