"""Drift networks against numbers worked by hand, the evolution strategy against NumPy, trainings
against ppo.py's.
"""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import toys  # noqa: F401  registers the environments
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
NETWORK = {"hidden": jnp.arange(1.0, 9.0)[:, None] / 10, "output": jnp.array([2.0])}

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


@pytest.mark.parametrize("ratio, advantage, sign, value", NETWORK_BY_HAND)
def test_network_by_hand(ratio, advantage, sign, value):
    weights = NETWORK | {"output": sign * NETWORK["output"]}
    drift = evolve.network_drift(weights, jnp.log(jnp.array([ratio])), jnp.array([advantage]), CLIP)
    np.testing.assert_allclose(drift, [value], atol=2e-5)


@pytest.mark.parametrize(
    "ratio, advantage, value",
    [(1.5, 2.0, 0.6), (1.1, 2.0, 0), (0.5, -2.0, 0.6), (0.5, 2.0, 0), (3.0, -1.0, 0)],
)
def test_ppo_drift_by_hand(ratio, advantage, value):
    np.testing.assert_allclose(
        evolve.ppo_drift(jnp.log(ratio), jnp.asarray(advantage), CLIP), value, atol=1e-6
    )


def test_dpo_drift_by_hand():
    ratio, advantage, value, _ = np.array(BY_HAND).T
    np.testing.assert_allclose(
        evolve.dpo_drift(jnp.log(ratio), jnp.asarray(advantage)), value, atol=2e-5
    )


def test_network_is_a_drift_whatever_its_weights():
    """Not negative; zero with zero gradient at a ratio of 1."""
    log_ratio, advantage = map(
        jnp.ravel, jnp.meshgrid(jnp.linspace(-2, 2, 41), jnp.linspace(-3, 3, 31))
    )
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed))
        weights = {
            "hidden": jax.random.normal(keys[0], (8, 16)),
            "output": jax.random.normal(keys[1], (16,)),
        }
        drift, slope = jax.vjp(
            lambda x, w=weights: evolve.network_drift(w, x, advantage, CLIP), log_ratio
        )
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
    other = evolve.policy_loss(
        new, old, advantage, partial(evolve.network_drift, some, clip_eps=CLIP)
    )
    assert abs(other - theirs[0]) > 1e-3


def test_best_agent_by_hand():
    returns = jnp.array([[1.0, 1.0], [9.0, jnp.nan], [2.0, 4.0], [3.0, 1.0]])
    agents = {"a": jnp.arange(8).reshape(4, 2), "b": jnp.arange(16.0).reshape(4, 2, 2)}
    found = evolve.best_agent(returns, agents)
    assert found["a"] == 5 and (found["b"] == jnp.array([10.0, 11.0])).all()


# --- the evolution strategy ---

STRATEGY = evolve.Config(population_size=6, drift_size=2, es_lr=0.03, es_sigma=0.2)


def start_strategy():
    strategy = evolve.make_strategy(STRATEGY)
    weights = evolve.init_weights(jax.random.key(0), STRATEGY.drift_size)
    return strategy, strategy.init(jax.random.key(1), weights, strategy.default_params)


def flatten(population):
    return np.concatenate(
        [np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(population)], axis=1
    )


def test_population_is_of_mirrored_pairs():
    strategy, state = start_strategy()
    population, _ = strategy.ask(jax.random.key(2), state, strategy.default_params)
    noise = (flatten(population) - np.asarray(state.mean)) / 0.2
    np.testing.assert_allclose(noise[:3], -noise[3:], atol=1e-5)
    assert 0.6 < noise[:3].std() < 1.4 and np.linalg.matrix_rank(noise) == 3


def test_steps_against_numpy_on_a_quadratic():
    """Ranks, the estimate of the gradient and Adam; the third network has not finished an
    episode.
    """
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
        state, _ = strategy.tell(
            jax.random.key(9), population, jnp.asarray(cost), state, strategy.default_params
        )
        np.testing.assert_allclose(state.mean, mean, rtol=1e-3, atol=1e-4)


def test_networks_that_are_all_the_same_stay_numbers():
    """With `es_sigma` 0 the estimate of the gradient was 0 / 0."""
    strategy = evolve.make_strategy(dataclasses.replace(STRATEGY, es_sigma=0.0))
    _, state = start_strategy()
    for t in range(3):
        population, state = strategy.ask(jax.random.key(t), state, strategy.default_params)
        cost = jnp.arange(6.0)
        state, _ = strategy.tell(
            jax.random.key(9), population, cost, state, strategy.default_params
        )
        assert np.isfinite(flatten(population)).all() and np.isfinite(state.mean).all()


def test_strategy_finds_the_minimum_of_a_quadratic():
    strategy = evolve.make_strategy(dataclasses.replace(STRATEGY, population_size=16, es_lr=0.1))
    _, state = start_strategy()

    def step(state, key):
        population, state = strategy.ask(key, state, strategy.default_params)
        cost = jax.vmap(
            lambda weights: sum(jnp.square(x - 1.0).sum() for x in jax.tree.leaves(weights))
        )(population)
        state, _ = strategy.tell(key, population, cost, state, strategy.default_params)
        return state, cost.mean()

    _, cost = jit_quickly(partial(jax.lax.scan, step))(
        state, jax.random.split(jax.random.key(0), 100)
    )
    assert cost[0] > 10 and cost[-1] < 2  # 18 weights, and 18 * 0.2**2 is what the noise costs


# --- trainings ---

CONFIG = dataclasses.replace(
    small_config(evolve), env_name="CartPole-v1", inner_seeds=2, hidden_sizes=(4,)
)
KEYS, PLAY_KEYS = jax.random.split(jax.random.key(3), (2, 2))


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


def player(logits, **settings):
    """`play` of an agent that knows nothing but how likely each action is."""
    config = dataclasses.replace(CONFIG, **settings)
    env, env_params = evolve.make_env(config)
    actor, _ = evolve.make_networks(config, env, env_params)
    obs, _ = env.reset(jax.random.key(0), env_params)
    params = jax.tree.map(jnp.zeros_like, actor.init(jax.random.key(0), obs))
    (last,) = [
        name for name in params["params"] if params["params"][name]["bias"].shape == (len(logits),)
    ]
    params["params"][last]["bias"] = jnp.asarray(logits)
    statistics = evolve.init_mean_std(obs.shape)
    nothing = dict.fromkeys(evolve.AgentState._fields)
    used = {"params": {"actor": params}, "obs_statistics": statistics}
    state = evolve.AgentState(**nothing | used)
    return jit_quickly(partial(evolve.make_inner(config)[1], state)), env, env_params


def test_fitness_is_of_whole_episodes():
    """CartPole pushed one way only: each episode, played by itself in a loop, counts once, though
    some last longer.
    """
    play, env, env_params = player(
        [0.0, 1e3], fitness_episodes=3, env_params={"max_steps_in_episode": 9}
    )
    returns, lengths = play(jax.random.key(7))
    reset_key, _ = jax.random.split(jax.random.key(7))
    expected, reset, step = [], jit_quickly(env.reset), jit_quickly(env.step)
    for key in jax.random.split(reset_key, 3):
        _, state = reset(key, env_params)
        steps, done = 0, False
        while not done:
            _, state, _, terminated, truncated, _ = step(key, state, 1, env_params)
            steps, done = steps + 1, bool(terminated | truncated)
        expected.append(steps)
    assert len(set(expected)) > 1  # they end at different times
    np.testing.assert_allclose([returns, lengths], [np.mean(expected)] * 2)


def test_fitness_ends_at_the_time_limit():
    play, _, _ = player([0.0, 0.0], fitness_episodes=5, env_params={"max_steps_in_episode": 4})
    assert [float(value) for value in play(jax.random.key(0))] == [4.0, 4.0]


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
    state = out["runner_state"]
    drift = np.concatenate(
        [state.agent["drift"][name].reshape(2, -1) for name in ("hidden", "output")], axis=1
    )
    np.testing.assert_array_equal(drift, state.es_state.mean)


def test_networks_of_a_generation_play_the_same_episodes():
    """Networks that are the same reach the same: keys are shared.

    Two agents of a network play different episodes.
    """
    same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), networks())
    returns, lengths, _ = jit_quickly(evolve.make_evaluate(CONFIG))(same, KEYS, PLAY_KEYS)
    np.testing.assert_allclose(returns, np.broadcast_to(returns[:1], returns.shape), rtol=1e-5)
    assert lengths[0, 0] != lengths[0, 1]


# --- the result ---


def test_report(tmp_path):
    config = dataclasses.replace(CONFIG, num_generations=1)
    state = jax.eval_shape(jax.vmap(evolve.make_learner(config)[0]), KEYS)
    state = state._replace(drift=jax.tree.map(lambda leaf: leaf[:2], networks()))
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
