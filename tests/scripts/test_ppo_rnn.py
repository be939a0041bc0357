"""The memory of ppo_rnn.py against loops, and what it learns where memory is needed."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # noqa: F401, it registers environments
from support.compilation import jit_quickly
from support.tiers import slow

import ppo
import ppo_rnn
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


def make_network(config):
    """`(init, apply, step)`: the body, the actor and the critic as one network, over a sequence or
    over one step of it.

    They return the memory after each step, the policies and the values.
    """
    body, actor, critic = ppo_rnn.make_networks(config, *ppo_rnn.make_env(config))

    def init(key, hidden, obs, first):
        return {
            "body": jax.jit(body.init)(key, hidden, obs, first),
            "actor": jax.jit(actor.init)(key, hidden),
            "critic": jax.jit(critic.init)(key, hidden),
        }

    def apply(params, hidden, obs, first):
        hidden = body.apply(params["body"], hidden, obs, first)
        return hidden, actor.apply(params["actor"], hidden), critic.apply(params["critic"], hidden)

    def step(params, hidden, obs, first):
        hidden, policy, value = apply(params, hidden, obs[None], first[None])
        return hidden[0], policy[0], value[0]

    return jit_quickly(init), jit_quickly(apply), jit_quickly(step)


def larger(params):
    """Parameters of which the memory and the policy make more than those at the start."""
    return jax.tree.map(lambda leaf: 3.0 * leaf, params)


# --- what is taken from ppo.py, whose tests are of both ---


@pytest.mark.parametrize(
    "name",
    ["gae", "policy_loss", "value_loss", "update_mean_std", "normalize"],
)
def test_mathematics_is_that_of_ppo(name):
    assert inspect.getsource(getattr(ppo_rnn, name)) == inspect.getsource(getattr(ppo, name))


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
    params = jit_quickly(gru.init)(jax.random.key(0), hidden, x, first)
    for gate in ("reset", "update", "new"):
        kernel = params["params"][gate]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(size), atol=1e-4)
    params = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(size=leaf.shape)), params)
    cell = jax.tree.map(np.asarray, params["params"])
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


def test_gru_is_that_of_flax():
    gru, cell, size = ppo_rnn.Gru(5), nn.GRUCell(5), 5
    x, hidden = (
        jax.random.normal(jax.random.key(0), (1, 3, 4)),
        jax.random.normal(jax.random.key(1), (3, size)),
    )
    params = gru.init(jax.random.key(2), hidden, x, jnp.zeros((1, 3), bool))["params"]
    params["bias"] = jnp.arange(size, dtype=float)
    kernels, biases = (
        jnp.split(params["Dense_0"]["kernel"], 3, axis=1),
        jnp.split(params["Dense_0"]["bias"] + 1.0, 3),
    )
    params["Dense_0"]["bias"] = jnp.concatenate(biases)
    theirs = {}
    for i, (gate, name) in enumerate(zip("rzn", ("reset", "update", "new"), strict=True)):
        theirs |= {
            f"i{gate}": {"kernel": kernels[i], "bias": biases[i]},
            f"h{gate}": {"kernel": params[name]},
        }
    theirs["hn"]["bias"] = params["bias"]
    after = gru.apply({"params": params}, hidden, x, jnp.zeros((1, 3), bool))[0]
    np.testing.assert_allclose(
        after, cell.apply({"params": theirs}, hidden, x[0])[0], rtol=1e-4, atol=1e-6
    )


def random_cell(name):
    """A cell with a memory of 5 units, its parameters and a nonzero memory, for sequences of 3
    environments.
    """
    cell, keys = getattr(ppo_rnn, name)(5), jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (3, 5))
    params = jit_quickly(cell.init)(keys[1], hidden, jnp.zeros((1, 3, 4)), jnp.zeros((1, 3), bool))
    return (
        cell,
        jax.tree.map(lambda leaf: leaf + jax.random.normal(keys[2], leaf.shape), params),
        hidden,
    )


@pytest.fixture
def parallel(monkeypatch, request):
    """On CPUs the memory of a MinGru takes one step after another; a GPU's way has to be asked
    for.
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
    layers = [jax.tree.map(np.asarray, params["params"][f"Dense_{i}"]) for i in range(2)]
    for first in (*np.eye(9, dtype=bool), np.zeros(9, bool), rng.random((9, 3)) < 0.4):
        first = np.broadcast_to(first.reshape(9, -1), (9, 3))
        h, expected = np.split(np.asarray(start), [3], axis=1), []
        for t in range(9):
            h, below = [np.where(first[t][:, None], 0.0, each) for each in h], []
            for layer, size, memory in zip(layers, (3, 2), h, strict=True):
                gates = np.concatenate([x[t], *below], axis=1) @ layer["kernel"] + layer["bias"]
                update = sigmoid(gates[:, :size] - 1)
                below.append((1 - update) * memory + update * np.tanh(gates[:, size:]))
            h = below
            expected.append(np.concatenate(h, axis=1))
        np.testing.assert_allclose(apply(params, start, x, first), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["stepwise_recurrence", "parallel_recurrence"])
def test_recurrence_against_a_loop(name):
    """`decay` is zero at a reset, also in the first step of one column."""
    rng = np.random.default_rng(0)
    decay, new, h = rng.random((300, 2)), rng.normal(size=(300, 2)), rng.normal(size=2)
    decay[rng.random((300, 2)) < 0.05], decay[0] = 0.0, [0.0, 0.9]
    found, expected = jit_quickly(getattr(ppo_rnn, name))(decay, new, h), []
    for t in range(300):
        h = decay[t] * h + new[t]
        expected.append(h)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, parallel", [("Gru", False), ("MinGru", False), ("MinGru", True)], indirect=["parallel"]
)
def test_gradients_do_not_cross_a_reset(name, parallel):
    """The memory at step 6 depends on the steps since its episode began, at step 4 or before the
    sequence.
    """
    cell, params, start = random_cell(name)
    x = jax.random.normal(jax.random.key(1), (9, 3, 4))
    first = jnp.zeros((9, 3), bool).at[4, 0].set(True)
    memory = lambda start, x: cell.apply(params, start, x, first)[6].sum()  # noqa: E731
    to_start, to_x = jit_quickly(jax.grad(memory, (0, 1)))(start, x)
    assert (np.asarray(to_start != 0).any(axis=1) == [False, True, True]).all()
    steps = np.arange(9)
    expected = [(begin <= steps) & (steps <= 6) for begin in (4, 0, 0)]
    np.testing.assert_array_equal((to_x != 0).any(axis=2).T, expected)


@pytest.mark.parametrize("cell", ["gru", "mingru", "none"])
def test_a_sequence_is_its_steps_one_after_the_other(cell):
    config = make_config(cell=cell)
    (init, whole, step), rng = make_network(config), np.random.default_rng(0)
    obs, first = (
        jnp.asarray(rng.normal(size=(7, 4, 2)), jnp.float32),
        jnp.asarray(rng.random((7, 4)) < 0.3),
    )
    start = hidden = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    params = larger(init(jax.random.key(0), hidden, obs, first))
    hiddens, policy, values = whole(params, start, obs, first)
    for t in range(7):
        hidden, step_policy, value = step(params, hidden, obs[t], first[t])
        np.testing.assert_allclose(hidden, hiddens[t], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(value, values[t], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(step_policy.logits, policy.logits[t], rtol=1e-4, atol=1e-6)
    _, _, same = whole(params, start, obs, jnp.zeros_like(first))
    _, _, other = whole(params, start.at[0].add(1.0), obs, jnp.zeros_like(first))
    assert (np.asarray(other != same).all(axis=0) == [cell != "none", False, False, False]).all()


# --- what is seen ---


def play(config, actions):
    """Observations, rewards, ends and final observations under these actions: [len(actions) + 1,
    ...] and so on.
    """
    env, env_params = ppo_rnn.make_env(config)
    obs, state = env.reset(jax.random.key(0), env_params)
    seen, rewards, dones, finals = [obs], [], [], []
    for i, action in enumerate(actions):
        obs, state, reward, terminated, truncated, info = env.step(
            jax.random.key(i), state, action, env_params
        )
        assert (
            obs.shape == info["final_observation"].shape == env.observation_space(env_params).shape
        )
        seen.append(obs)
        rewards.append(reward)
        dones.append(terminated | truncated)
        finals.append(info["final_observation"])
    return tuple(map(np.asarray, (seen, rewards, dones, finals)))


def test_previous_action_and_reward():
    config = make_config(
        observe_previous=True, observe=(0,), env_params={"noise": 1.0, "max_steps_in_episode": 3}
    )
    actions = jnp.asarray([2, 0, 1, 2, 1])
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
    everything, *_ = play(make_config(env_name=name), jnp.asarray([1, 0, 1]))
    some, *_ = play(make_config(env_name=name, observe=seen), jnp.asarray([1, 0, 1]))
    assert everything.shape == (4, size)
    np.testing.assert_array_equal(some, everything[:, seen])


def test_numbers_of_states_are_one_hot():
    seen, *_ = play(make_config(env_name="FrozenLake-misc"), jnp.asarray([1, 2]))
    assert seen.shape[1] == 16 and (seen.sum(axis=1) == 1).all() and seen[0, 0] == 1


# --- what is learned ---


def learn(num_updates, keys=None, **overrides):
    """Train an agent, or one for each of `keys`: the config, final state and metrics."""
    config = make_config(
        num_envs=8, num_steps=16, num_minibatches=4, update_epochs=4, gamma=0.9, **overrides
    )
    config = dataclasses.replace(config, cell_size=16, total_timesteps=num_updates * 8 * 16)
    train = ppo_rnn.make_train(config)
    out = (
        jit_quickly(train)(jax.random.key(0))
        if keys is None
        else jit_quickly(jax.vmap(train))(keys)
    )
    return config, out["runner_state"], out["metrics"]


@pytest.mark.parametrize("cell", ["gru", slow("mingru"), slow("none")])
def test_recall_needs_memory(cell):
    """What was seen in the first of four steps tells which action is rewarded in the last; `act`
    remembers.

    About one agent in fifteen has not found it out yet; without memory none can.
    """
    config, state, _ = learn(
        100, jax.random.split(jax.random.key(0), 6), env_name="Recall", cell=cell
    )
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

    play = jit_quickly(jax.vmap(jax.vmap(episodic_return, (None, 0)), (0, None)))
    returns, terminated = play(state.agent, jax.random.split(jax.random.key(1), 64))
    assert (terminated == np.array([False, False, False, True])).all()
    means = np.asarray(returns.mean(axis=1))  # of each agent
    assert (means == 1.0).sum() >= 4 if cell != "none" else ((means > 0.2) & (means < 0.8)).all()


@pytest.mark.slow
def test_truncation_is_bootstrapped():
    *_, metrics = learn(300, env_name="ValueContinuous", env_params={"max_steps_in_episode": 5})
    np.testing.assert_allclose(metrics["value"][-20:].mean(), 10.0, rtol=0.05)
