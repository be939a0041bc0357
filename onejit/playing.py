"""Greedy episodes of trained agents."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Episode(NamedTuple):
    """One greedy episode, up to the time limit: [limit, ...]."""

    env_state: Any  # before each step, without the statistics of LogWrapper
    reward: jax.Array
    valid: jax.Array  # whether the step belongs to the episode: False after its end
    positions: Any = (
        None  # of board games alone: after the agent's move and after the opponent's reply
    )


def whole_games(config):
    """The config without EnvPool's options that shorten games of Atari or clip their rewards during training."""
    own = {
        k: v
        for k, v in getattr(config, "env_params", {}).items()
        if k not in ("episodic_life", "reward_clip")
    }
    return dataclasses.replace(config, env_params=own) if hasattr(config, "env_params") else config


def make_player(script, config):
    """`play(agent, key) -> Episode`: one greedy episode of one agent with the script's policy and environment."""
    env, env_params = script.make_env(whole_games(config))
    start, act = script.make_policy(config)
    release = getattr(
        env, "release", lambda env_state: 0
    )  # of an environment that runs outside JAX: returns 0, too

    def play(agent, key):
        def step(carry, key):
            obs, env_state, memory, valid = carry
            action, memory = act(agent, memory, obs)
            obs, next_state, reward, terminated, truncated, info = env.step(
                key, env_state, action, env_params
            )
            carry = obs, next_state, memory, valid & ~(terminated | truncated)
            return carry, Episode(
                getattr(env_state, "env_state", env_state), reward, valid, info.get("positions")
            )

        reset_key, step_key = jax.random.split(key)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, int(env_params.max_steps_in_episode))
        (_, env_state, *_), episode = jax.lax.scan(
            step, (obs, env_state, start(), jnp.asarray(True)), keys
        )
        return episode._replace(
            reward=episode.reward + release(getattr(env_state, "env_state", env_state))
        )

    return play


def evaluation_keys(seed: int, episodes: int):  # all agents play the same episodes
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), 2**31), episodes)


def greedy_returns(script, config, options):
    """`evaluate(agents) -> returns`: agents [num_seeds, ...], returns [num_seeds, eval_episodes]."""
    play = make_player(script, config)

    def episodic_return(agent, key):
        episode = play(agent, key)
        return jnp.where(episode.valid, episode.reward, 0.0).sum()

    over_all = jax.vmap(jax.vmap(episodic_return, (None, 0)), (0, None))
    return lambda agents: over_all(agents, evaluation_keys(options.seed, options.eval_episodes))
