"""Greedy episodes: whose luck is in an interval, and environments without a time limit."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment, spaces

from onejit.base import statistics
from onejit.engine import evaluation


@struct.dataclass
class State(environment.EnvState):
    luck: jax.Array


class Lottery(environment.Environment):
    """Each step pays what was drawn at the reset. An episode ends after `length` steps."""

    def __init__(self, length: int = 1):
        self.length = length

    def reset_env(self, key, params):
        state = State(time=jnp.int32(0), luck=jax.random.normal(key))
        return jnp.zeros(1), state

    def step_env(self, key, state, action, params):
        time = state.time + 1
        return jnp.zeros(1), state.replace(time=time), state.luck, time >= self.length, {}

    def action_space(self, params=None):
        return spaces.Discrete(2)


CONFIG = SimpleNamespace(env_name="Lottery")


def script_of(env, limit=100):
    """A script whose policy always takes the first action."""
    params = environment.EnvParams(max_steps_in_episode=limit)
    return SimpleNamespace(
        make_env=lambda config: (env, params),
        make_policy=lambda config: (tuple, lambda agent, memory, obs: (jnp.int32(0), memory)),
    )


def test_intervals_hold_the_luck_of_the_episodes():
    """Eight equal agents whose returns are luck alone. In shared episodes no interval has any."""
    options = SimpleNamespace(seed=0, eval_episodes=4)

    @jax.jit
    def returns_of(seed):
        play = evaluation.make_player(script_of(Lottery()), CONFIG)
        keys = [evaluation.evaluation_keys(seed, options.eval_episodes, i) for i in range(8)]
        return play(jnp.zeros(8), jnp.stack(keys))[0]

    held = 0
    for seed in range(200):
        _, low, high = statistics.student_interval(returns_of(seed).mean(axis=1))
        held += low <= 0 <= high
    assert 180 <= held < 200


def test_an_agent_keeps_its_episodes_in_every_slice():
    """They depend on its number in the run, not on the agents that are evaluated with it."""
    options = SimpleNamespace(seed=5, eval_episodes=3)
    evaluate = evaluation.make_evaluation(script_of(Lottery()), CONFIG, options)
    whole = evaluate(jnp.zeros(6), np.arange(6))
    assert len(np.unique(whole)) == 18
    np.testing.assert_array_equal(evaluate(jnp.zeros(2), np.array([4, 5])), whole[4:])


def test_no_two_episodes_have_a_key_in_common():
    """Nor with a training, or with what another episode splits from its own.

    The first agent has the episodes that it always had.
    """
    keys = jnp.stack([evaluation.evaluation_keys(3, 8, agent) for agent in range(8)])
    all_keys = [keys[..., None], jax.vmap(jax.vmap(jax.random.split))(keys)]
    all_keys = jnp.concatenate(all_keys, axis=-1).reshape(-1)
    of_trainings = jax.random.split(jax.random.key(3), 256)
    data = jax.random.key_data(jnp.concatenate([all_keys, of_trainings]))
    assert len(np.unique(data, axis=0)) == 8 * 8 * 3 + 256
    before = jax.random.split(jax.random.fold_in(jax.random.key(3), 2**31), 8)
    assert (keys[0] == before).all()


@pytest.mark.parametrize("limit", [2**31 - 1, float("inf")])
def test_an_environment_without_a_time_limit(limit):
    play = jax.jit(evaluation.make_player(script_of(Lottery(length=7), limit), CONFIG))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    returns, lengths = play(jnp.zeros(2), keys)
    assert returns.shape == (2, 3) and (lengths == 7).all()
    memory = play.lower(jnp.zeros(2), keys).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10_000


def test_an_episode_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr(evaluation, "LONGEST", 20)
    play = jax.jit(evaluation.make_player(script_of(Lottery(10**9), float("inf")), CONFIG))
    assert (play(jnp.zeros(1), jax.random.split(jax.random.key(0), (1, 2)))[1] == 20).all()


def test_a_diverged_agent_is_never_the_best():
    """Nor does its return count, which is of NaN values. A leaf may be infinite from the start."""
    agents = {"params": jnp.zeros(3), "allowed": jnp.full((3, 2), -jnp.inf)}
    first = evaluation.no_evaluations(agents, count=2)
    agents["params"] = jnp.array([1.0, jnp.nan, jnp.inf])
    returns = jnp.array([[5.0], [9.0], [9.0]])
    found = evaluation.remember_best(first, agents, returns, 1, left_out=("allowed",))
    assert found.best_agent["params"].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(found.returns[:, 1], [5, np.nan, np.nan])


def test_pictures_are_of_the_episode_that_was_played():
    script = script_of(Lottery(length=4))
    key = jax.random.key(1)
    (total,), (length,) = evaluation.make_player(script, CONFIG)(jnp.zeros(1), key[None, None])
    steps = evaluation.make_recorder(script, CONFIG, num_steps=6)(jnp.zeros(()), key)
    assert steps.valid.tolist() == [True] * 4 + [False] * 2 and length == 4
    np.testing.assert_allclose(steps.reward[:4].sum(), total[0], rtol=1e-6)
    assert (steps.env_state.luck[:4] == steps.reward[:4]).all()
