"""Greedy episodes of trained agents, and evaluations during training."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SHORTENING = ("episodic_life", "reward_clip")  # EnvPool's options for training on Atari


class Episode(NamedTuple):
    """One greedy episode, up to the time limit: [limit, ...]."""

    env_state: Any  # before each step, without the statistics of LogWrapper
    reward: jax.Array
    valid: jax.Array  # whether the step belongs to the episode: False after its end
    # of board games alone: after the agent's move and after the opponent's reply
    positions: Any = None


def whole_games(config):
    """The config without EnvPool's options that shorten games, or clip rewards, for training."""
    is_of_envpool = getattr(config, "env_name", "").startswith("onejit.envs.envpool:")
    if not is_of_envpool or not hasattr(config, "env_params"):
        return config
    params = {}
    for name, value in config.env_params.items():
        if name not in SHORTENING:
            params[name] = value
    return dataclasses.replace(config, env_params=params)


def without_statistics(env_state):
    """The state of the environment inside LogWrapper."""
    return getattr(env_state, "env_state", env_state)


def unwrap(env):
    """The environment inside all wrappers."""
    while hasattr(env, "_env"):
        env = env._env
    return env


def policy_of(script, config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)` of any script.

    The `make_policy` of a script without memory returns `act(agent, obs) -> action` alone.
    """
    policy = script.make_policy(config)
    if isinstance(policy, tuple):
        return policy

    def act(agent, memory, obs):
        return policy(agent, obs), memory

    return tuple, act


def make_player(script, config):
    """`play(agent, key) -> Episode`: one greedy episode of one agent.

    The policy and the environment are the script's.
    """
    env, env_params = script.make_env(whole_games(config))
    start, act = policy_of(script, config)

    def play(agent, key):
        def step(carry, key):
            obs, env_state, memory, valid = carry
            action, memory = act(agent, memory, obs)
            obs, next_state, reward, terminated, truncated, info = env.step(
                key, env_state, action, env_params
            )
            episode = Episode(
                env_state=without_statistics(env_state),
                reward=reward,
                valid=valid,
                positions=info.get("positions"),
            )
            valid = valid & ~(terminated | truncated)
            return (obs, next_state, memory, valid), episode

        reset_key, step_key = jax.random.split(key)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, int(env_params.max_steps_in_episode))
        carry = (obs, env_state, start(), jnp.asarray(True))
        carry, episode = jax.lax.scan(step, carry, keys)
        if not hasattr(env, "release"):
            return episode
        # Close an environment outside JAX. `release` returns 0, which orders it after the steps.
        env_state = carry[1]
        zero = env.release(without_statistics(env_state))
        return episode._replace(reward=episode.reward + zero)

    return play


def evaluation_keys(seed: int, episodes: int):
    """The random keys of greedy episodes. All agents play the same episodes."""
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), 2**31), episodes)


def return_of(episode: Episode):
    return jnp.where(episode.valid, episode.reward, 0.0).sum()


def greedy_returns(script, config, options):
    """`evaluate(agents) -> returns`: [num_seeds, ...] to [num_seeds, eval_episodes]."""
    play = make_player(script, config)

    def episodic_return(agent, key):
        return return_of(play(agent, key))

    of_one_agent = jax.vmap(episodic_return, (None, 0))
    of_all_agents = jax.vmap(of_one_agent, (0, None))

    def evaluate(agents):
        return of_all_agents(agents, evaluation_keys(options.seed, options.eval_episodes))

    return evaluate


def new_returns(script, config, agents, agent: int, episodes: int) -> np.ndarray:
    """Returns [episodes] of one of `agents` [num_seeds, ...] in greedy episodes of their own.

    No training evaluates agents in these episodes, so they are no luckier for the best agent than
    for others. They are the same in each call.
    """
    play = make_player(script, config)
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[agent]), agents)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 2**31 + 1), episodes)
    play_all = jax.jit(jax.vmap(lambda key: return_of(play(weights, key))))
    return np.asarray(play_all(keys))


# --- evaluations during training ---


def no_evaluation(agents, count: int) -> dict:
    """What is remembered of `count` evaluations before the first one.

    `returns` [size, count] are means over the episodes, and `best` is the best agent of each seed.
    """
    size = len(jax.tree.leaves(agents)[0])
    best = {
        "return": jnp.full((size,), -jnp.inf),
        "agent": jax.tree.map(jnp.copy, agents),
    }
    return {"returns": jnp.full((size, count), jnp.nan), "best": best}


def remember_best(evaluation: dict, agents, returns, index) -> dict:
    """Add the evaluation number `index`.

    In it, `agents` [size, ...] reached `returns` [size, episodes].
    """
    mean = returns.mean(axis=1)
    better = mean > evaluation["best"]["return"]

    def choose(new, old):
        return jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    best = jax.tree.map(choose, {"return": mean, "agent": agents}, evaluation["best"])
    return {"returns": evaluation["returns"].at[:, index].set(mean), "best": best}
