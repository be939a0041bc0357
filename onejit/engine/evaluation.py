"""Greedy episodes of trained agents, and evaluations during training."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onejit.base import statistics
from onejit.engine.carry import Evaluations
from onejit.script.contract import Script
from onejit.script.environment import inner_state

SHORTENING = ("episodic_life", "reward_clip")  # EnvPool's options for training on Atari

LONGEST = 10**6  # steps of a greedy episode where the time limit is longer, or infinite


class Playing(NamedTuple):
    """A greedy episode that is being played."""

    obs: Any
    env_state: Any
    memory: Any  # of the policy
    key: jax.Array  # of all steps
    running: jax.Array  # False after its end
    total: jax.Array  # the return so far
    length: jax.Array


class Step(NamedTuple):
    """A step of an episode, as pictures show it."""

    env_state: Any  # before the step, without the states of wrappers
    reward: jax.Array
    valid: jax.Array  # False after the end of the episode
    # of board games alone: after the agent's move and after the opponent's reply
    positions: Any = None


def whole_games(config):
    """The config without EnvPool's options that shorten games, or clip rewards, for training."""
    is_of_envpool = config.env_name.startswith("onejit.envs.envpool:")
    if not is_of_envpool or not hasattr(config, "env_params"):
        return config
    params = {}
    for name, value in config.env_params.items():
        if name not in SHORTENING:
            params[name] = value
    return dataclasses.replace(config, env_params=params)


def policy_of(script: Script, config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)` of any script.

    The `make_policy` of a script without memory returns `act(agent, obs) -> action` alone.
    """
    policy = script.make_policy(config)
    if isinstance(policy, tuple):
        return policy

    def act(agent, memory, obs):
        return policy(agent, obs), memory

    return tuple, act


def make_episode(script: Script, config):
    """`begin(key)`, `step(agent, playing) -> (playing, Step)` and `end(playing) -> 0.0`.

    They play a greedy episode of one agent. The policy and the environment are the script's.
    """
    env, env_params = script.make_env(whole_games(config))
    start, act = policy_of(script, config)
    limit = int(min(env_params.max_steps_in_episode, LONGEST))

    def begin(key):
        reset_key, step_key = jax.random.split(key)
        obs, env_state = env.reset(reset_key, env_params)
        return Playing(
            obs=obs,
            env_state=env_state,
            memory=start(),
            key=step_key,
            running=jnp.asarray(True),
            total=jnp.zeros(()),
            length=jnp.int32(0),
        )

    def step(agent, playing):
        action, memory = act(agent, playing.memory, playing.obs)
        key = jax.random.fold_in(playing.key, playing.length)
        obs, env_state, reward, terminated, truncated, info = env.step(
            key, playing.env_state, action, env_params
        )
        shown = Step(
            env_state=inner_state(env, env_params, playing.env_state),
            reward=reward,
            valid=playing.running,
            positions=info.get("positions"),
        )
        length = playing.length + playing.running
        playing = Playing(
            obs=obs,
            env_state=env_state,
            memory=memory,
            key=playing.key,
            running=playing.running & ~(terminated | truncated) & (length < limit),
            total=playing.total + jnp.where(playing.running, reward, 0.0).astype(float),
            length=length,
        )
        return playing, shown

    def end(playing):
        if not hasattr(env, "release"):
            return 0.0
        # Close an environment outside JAX. The zero orders it after the steps.
        return env.release(inner_state(env, env_params, playing.env_state)).astype(float)

    return begin, step, end


def make_player(script: Script, config):
    """`play(agents, keys) -> (returns, lengths)`: greedy episodes of agents [n, ...].

    The keys, returns and lengths are [n, episodes]. All episodes are stepped together until the
    last one has ended.
    """
    begin, step, end = make_episode(script, config)
    begin_all = jax.vmap(jax.vmap(begin))
    step_all = jax.vmap(jax.vmap(step, (None, 0)))
    end_all = jax.vmap(jax.vmap(end))

    def is_any_running(playing):
        return playing.running.any()

    def play(agents, keys):
        def next_step(playing):
            playing, _ = step_all(agents, playing)
            return playing

        playing = jax.lax.while_loop(is_any_running, next_step, begin_all(keys))
        return playing.total + end_all(playing), playing.length

    return play


def make_recorder(script: Script, config, num_steps: int):
    """`record(agent, key) -> Step` [num_steps, ...]: a greedy episode of one agent for pictures."""
    begin, step, end = make_episode(script, config)

    def record(agent, key):
        def next_step(playing, _):
            return step(agent, playing)

        playing, steps = jax.lax.scan(next_step, begin(key), length=num_steps)
        return steps._replace(reward=steps.reward + end(playing))

    return record


def evaluation_keys(seed: int, episodes: int, agent):
    """The random keys [episodes] of an agent's greedy episodes. `agent` is its number in the run.

    Each agent plays episodes of its own: an interval over agents then includes their luck.
    """
    first = jax.random.fold_in(jax.random.key(seed), 2**31)  # no training uses it
    others = jax.random.fold_in(first, 2**31)  # no episode of the first agent uses it
    key = jnp.where(agent == 0, first, jax.random.fold_in(others, agent))
    return jax.random.split(key, episodes)


def make_evaluation(script: Script, config, options):
    """`evaluate(agents, numbers) -> returns`: [n, ...] and [n] to [n, eval_episodes].

    The numbers are those of the agents among all seeds of the run.
    """
    play = make_player(script, config)

    def evaluate(agents, numbers):
        def keys_of(agent):
            return evaluation_keys(options.seed, options.eval_episodes, agent)

        returns, _ = play(agents, jax.vmap(keys_of)(numbers))
        return returns

    return evaluate


def evaluate(
    script: Script, config, agents, agent: int | None = None, episodes: int = 16
) -> np.ndarray:
    """Returns [num_seeds, episodes] of greedy episodes of all agents, as `load_run` returns them.

    If `agent` is given, the returns [episodes] of this agent alone. All agents play the same
    episodes, which are the same in each call. No training evaluates agents in these episodes, so
    they are no luckier for the best agent than for others. Raises IndexError if there is no such
    agent.
    """
    chosen = slice(None) if agent is None else [agent]
    weights = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[chosen]), agents)
    num_agents = len(jax.tree.leaves(weights)[0])
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 2**31 + 1), episodes)
    play = jax.jit(make_player(script, config))
    returns, _ = play(weights, jnp.broadcast_to(keys, (num_agents, episodes)))
    return np.asarray(returns if agent is None else returns[0])


# --- evaluations during training ---


def no_evaluations(agents, count: int) -> Evaluations:
    """What is remembered of `count` evaluations before the first one."""
    size = len(jax.tree.leaves(agents)[0])
    return Evaluations(
        returns=jnp.full((size, count), jnp.nan),
        best_return=jnp.full((size,), -jnp.inf),
        best_agent=jax.tree.map(jnp.copy, agents),
    )


def remember_best(evaluations: Evaluations, agents, returns, index, left_out=()) -> Evaluations:
    """Add the evaluation number `index`.

    In it, `agents` [size, ...] reached `returns` [size, episodes]. An agent that has diverged has
    none, and is never the best: the greedy action of NaN values is always the first action.
    `left_out` are the names of leaves that were not finite from the start.
    """
    mean = jnp.where(statistics.diverged(agents, left_out), jnp.nan, returns.mean(axis=1))
    better = mean > evaluations.best_return

    def choose(new, old):
        return jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return Evaluations(
        returns=evaluations.returns.at[:, index].set(mean),
        best_return=choose(mean, evaluations.best_return),
        best_agent=jax.tree.map(choose, agents, evaluations.best_agent),
    )
