"""The memory of ppo_rnn.py against loops, and what it learns where memory is needed."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401, it registers environments
from support.compilation import jit_quickly
from support.tiers import slow

import ppo
import ppo_rnn
import pqn
import pqn_rnn
from onejit.engine.evaluation import policy_of


def make_config(**overrides):
    config = ppo_rnn.Config(
        env_name="ToyDiscrete",
        num_envs=4,
        num_steps=8,
        num_minibatches=2,
        update_epochs=2,
        total_timesteps=10**6,
        lr=1e-2,
        anneal_lr=False,
        normalize_obs=False,
        normalize_reward=False,
        cell_size=5,
        hidden_sizes=(6,),
    )
    return dataclasses.replace(config, **overrides)


def random_params(init, *args):
    """Numbers that are neither 0 nor orthogonal as they are at the start."""
    rng = np.random.default_rng(1)

    def draw(leaf):
        return rng.normal(scale=0.7, size=leaf.shape).astype(np.float32)

    return jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0), *args))


# --- what is taken from ppo.py, whose tests are of both ---


@pytest.mark.parametrize(
    "name",
    ["gae", "policy_loss", "value_loss", "update_mean_std", "normalize"],
)
def test_mathematics_is_that_of_ppo(name):
    assert inspect.getsource(getattr(ppo_rnn, name)) == inspect.getsource(getattr(ppo, name))


@pytest.mark.parametrize("name", ["orthogonal", "scan_over_time", "Gru"])
def test_memory_of_pqn_rnn_is_that_of_ppo_rnn(name):
    assert inspect.getsource(getattr(pqn_rnn, name)) == inspect.getsource(getattr(ppo_rnn, name))


@pytest.mark.parametrize("name", ["patches", "preprocess", "q_lambda_target", "epsilon_greedy"])
def test_mathematics_of_pqn_rnn_is_that_of_pqn(name):
    assert inspect.getsource(getattr(pqn_rnn, name)) == inspect.getsource(getattr(pqn, name))


# --- the memory ---


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_gru_against_a_loop():
    """With zeros for the memory before each observation that is a first one."""
    rng = np.random.default_rng(0)
    steps, envs, features, size = 9, 3, 4, 5
    x, hidden = rng.normal(size=(steps, envs, features)), rng.normal(size=(envs, size))
    first = rng.random((steps, envs)) < 0.3
    assert first[1:].any() and not first[0].all()
    gru = ppo_rnn.Gru(size)
    params = jax.device_get(jit_quickly(gru.init)(jax.random.key(0), hidden, x, first))
    for gate in ("reset", "update", "new"):
        kernel = params["params"][gate]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(size), atol=1e-4)
    params = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape), params)
    cell = params["params"]
    kernels = dict(
        zip(("reset", "update", "new"), np.split(cell["Dense_0"]["kernel"], 3, axis=1), strict=True)
    )
    biases = dict(zip(kernels, np.split(cell["Dense_0"]["bias"], 3), strict=True))

    def dense(name, v):
        return v @ kernels[name] + biases[name]

    expected, h = [], hidden
    for t in range(steps):
        h = np.where(first[t][:, None], 0.0, h)
        reset, update = (
            sigmoid(dense(gate, x[t]) + h @ cell[gate]) for gate in ("reset", "update")
        )
        candidate = np.tanh(dense("new", x[t]) + reset * (h @ cell["new"] + cell["bias"]))
        h = update * h + (1 - update) * candidate
        expected.append(h)
    np.testing.assert_allclose(
        jit_quickly(gru.apply)(params, hidden, x, first), expected, rtol=1e-4, atol=1e-5
    )


def random_cell(name, size=5):
    """A cell with a memory of `size` units, its parameters and a nonzero memory, for sequences of 3
    environments.
    """
    cell, hidden = getattr(ppo_rnn, name)(size), np.random.default_rng(0).normal(size=(3, size))
    params = random_params(cell.init, hidden, np.zeros((1, 3, 4)), np.zeros((1, 3), bool))
    return cell, params, hidden


@pytest.fixture
def parallel(monkeypatch, request):
    """On CPUs the memories of MinGru and Lru take one step after another; a GPU's way has to be
    asked for.
    """
    if request.param:
        monkeypatch.setattr(ppo_rnn, "stepwise_recurrence", ppo_rnn.parallel_recurrence)


@pytest.mark.parametrize("parallel", [False, True], indirect=True)
def test_mingru_against_a_loop(parallel):
    """With a reset before each of the steps, before none and before some, from a memory that is not
    zero.
    """
    (cell, params, start), rng = random_cell("MinGru"), np.random.default_rng(0)
    apply, x = jit_quickly(cell.apply), rng.normal(size=(9, 3, 4))
    layers = [params["params"][f"Dense_{i}"] for i in range(2)]
    for first in (*np.eye(9, dtype=bool), np.zeros(9, bool), rng.random((9, 3)) < 0.4):
        first = np.broadcast_to(first.reshape(9, -1), (9, 3))
        h, expected = np.split(start, [3], axis=1), []
        for t in range(9):
            h, below = [np.where(first[t][:, None], 0.0, each) for each in h], []
            for layer, size, memory in zip(layers, (3, 2), h, strict=True):
                gates = np.concatenate([x[t], *below], axis=1) @ layer["kernel"] + layer["bias"]
                update = sigmoid(gates[:, :size] - 1)
                below.append((1 - update) * memory + update * np.tanh(gates[:, size:]))
            h = below
            expected.append(np.concatenate(h, axis=1))
        np.testing.assert_allclose(apply(params, start, x, first), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True], indirect=True)
def test_lru_against_a_loop(parallel):
    """With resets as for minGRU. The loop has complex numbers of 128 bits."""
    (cell, params, start), rng = random_cell("Lru", size=8), np.random.default_rng(0)
    apply, x = jit_quickly(cell.apply), rng.normal(size=(9, 3, 4))
    params = jax.tree.map(np.float64, params)
    mix = params["params"]["Dense_0"]
    eigenvalues = []
    for i in range(2):
        layer = params["params"][f"LruLayer_{i}"]
        eigenvalues.append(np.exp(-np.exp(layer["log_rate"]) + 1j * np.exp(layer["log_phase"])))

    def one_step(i, h, x):
        dense = params["params"][f"LruLayer_{i}"]["Dense_0"]
        real, imag = np.split(x @ dense["kernel"] + dense["bias"], 2, axis=1)
        scale = np.sqrt(1 - np.abs(eigenvalues[i]) ** 2)
        return eigenvalues[i] * h + scale * (real + 1j * imag)

    for first in (*np.eye(9, dtype=bool), np.zeros(9, bool), rng.random((9, 3)) < 0.4):
        first = np.broadcast_to(first.reshape(9, -1), (9, 3))
        parts = np.split(start, 4, axis=1)
        h = [parts[0] + 1j * parts[1], parts[2] + 1j * parts[3]]
        expected = []
        for t in range(9):
            h = [np.where(first[t][:, None], 0.0, each) for each in h]
            h[0] = one_step(0, h[0], x[t])
            both = np.concatenate([x[t], h[0].real, h[0].imag], axis=1)
            h[1] = one_step(1, h[1], np.tanh(both @ mix["kernel"] + mix["bias"]))
            parts = [h[0].real, h[0].imag, h[1].real, h[1].imag]
            expected.append(np.concatenate(parts, axis=1))
        np.testing.assert_allclose(apply(params, start, x, first), expected, rtol=1e-4, atol=1e-5)


# --- what is seen ---


def play(config, actions):
    """Observations, rewards, ends and final observations under these actions: [len(actions) + 1,
    ...] and so on.
    """
    env, env_params = ppo_rnn.make_env(config)
    shape = env.observation_space(env_params).shape

    def step(state, inputs):
        key, action = inputs
        obs, state, reward, terminated, truncated, info = env.step(key, state, action, env_params)
        assert obs.shape == info["final_observation"].shape == shape
        return state, (obs, reward, terminated | truncated, info["final_observation"])

    @jit_quickly
    def run(actions):
        first, state = env.reset(jax.random.key(0), env_params)
        keys = jax.random.split(jax.random.key(1), len(actions))
        _, (seen, *rest) = jax.lax.scan(step, state, (keys, actions))
        return jnp.concatenate([first[None], seen]), *rest

    return jax.device_get(run(np.array(actions)))


def test_previous_action_and_reward():
    config = make_config(
        observe_previous=True, observe=(0,), env_params={"noise": 1.0, "max_steps_in_episode": 3}
    )
    actions = np.array([2, 0, 1, 2, 1])
    seen, rewards, dones, finals = play(config, actions)
    assert dones.tolist() == [False, False, True, False, False]
    one_hot = np.eye(3)[actions]
    np.testing.assert_allclose(
        finals, np.column_stack([[0.2, 0.4, 0.6, 0.2, 0.4], one_hot, rewards]), rtol=1e-6
    )
    time = np.array([0, 0.2, 0.4, 0, 0.2, 0.4])
    # zeros after the end of an episode
    previous = np.column_stack([one_hot, rewards]) * ~dones[:, None]
    np.testing.assert_allclose(
        seen, np.column_stack([time, np.vstack([np.zeros(4), previous])]), rtol=1e-6
    )


@pytest.mark.parametrize(
    "name, size, seen", [("CartPole-v1", 4, (2, 0)), slow("Catch-bsuite", 50, (49,))]
)
def test_entries_that_are_seen(name, size, seen):
    everything, *_ = play(make_config(env_name=name), [1, 0, 1])
    some, *_ = play(make_config(env_name=name, observe=seen), [1, 0, 1])
    assert everything.shape == (4, size)
    np.testing.assert_array_equal(some, everything[:, seen])


def test_numbers_of_states_are_one_hot():
    seen, *_ = play(make_config(env_name="FrozenLake-misc"), [1, 2])
    assert seen.shape[1] == 16 and (seen.sum(axis=1) == 1).all() and seen[0, 0] == 1


# --- training ---


@pytest.mark.parametrize("cell", ["gru", slow("mingru"), slow("none")])
def test_recall_needs_memory(cell):
    """What was seen in the first of four steps tells which action is rewarded in the last; `act`
    remembers.

    About one agent in fifteen has not found it out yet; without memory none can.
    """
    config = make_config(
        env_name="Recall",
        num_envs=8,
        num_steps=16,
        num_minibatches=4,
        update_epochs=4,
        total_timesteps=100 * 8 * 16,
        gamma=0.9,
        cell=cell,
        cell_size=16,
    )
    train = ppo_rnn.make_train(config)
    env, env_params = ppo_rnn.make_env(config)
    start, act = policy_of(ppo_rnn, config)

    def episodic_return(agent, key):
        def step(carry, key):
            obs, env_state, memory = carry
            action, memory = act(agent, memory, obs)
            obs, env_state, reward, terminated, _, _ = env.step(key, env_state, action, env_params)
            return (obs, env_state, memory), (reward, terminated)

        reset_key, step_key = jax.random.split(key)
        carry = (*env.reset(reset_key, env_params), start())
        _, (rewards, terminated) = jax.lax.scan(step, carry, jax.random.split(step_key, 4))
        return rewards.sum(), terminated

    @jit_quickly
    @jax.vmap
    def returns_of(key):
        agent = train(key)["runner_state"].agent
        keys = jax.random.split(jax.random.key(1), 64)
        return jax.vmap(episodic_return, (None, 0))(agent, keys)

    returns, terminated = jax.device_get(returns_of(jax.random.split(jax.random.key(0), 6)))
    assert (terminated == np.array([False, False, False, True])).all()
    means = returns.mean(axis=1)  # of each agent
    assert (means == 1.0).sum() >= 4 if cell != "none" else ((means > 0.2) & (means < 0.8)).all()
