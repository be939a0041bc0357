# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "orbax-checkpoint>=0.12.8",
#     "pyyaml>=6.0",
#     "scipy>=1.15",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# ///
"""Ape-X DQN: many explorers and one learner with prioritized replay, the whole training in one jit.

Horgan et al. 2018, "Distributed Prioritized Experience Replay" (arXiv 1803.00933), algorithms 1 and 2: each explorer
has an epsilon of its own, acts with parameters that are refreshed now and then, assembles transitions of several steps
and computes their first priorities; the learner samples by priority and writes new priorities back. Prioritized replay:
Schaul et al. 2016 (arXiv 1511.05952), the proportional variant, equation 1 and section 3.4. The learner: double
(arXiv 1509.06461, equation 4), dueling (arXiv 1511.06581, equation 9).

What the paper does with hundreds of processes is done with arrays: explorers and learner take turns, a fixed number of
gradient steps following each rollout. Beside the paper: Adam, a learning rate that is annealed, and an episode that
ends by its time limit is bootstrapped from its last observation; one that terminates is not.

The replay is a ring in `runner_state`, written in place. A transition takes 16 bytes and two observations: with the
defaults 48 bytes, 0.8 MB per agent and 0.2 GB for 256 seeds. 2**17 transitions of MinAtar's Breakout take 107 MB per
agent with `buffer_dtype` bool, four times that without.

    python apex_dqn.py --env-name CartPole-v1 --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import datetime
import difflib
import importlib.metadata
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import scipy.stats
import tyro
import yaml
from flax.core import FrozenDict
from matplotlib.figure import Figure
from tqdm import tqdm

# gymnax is imported where it is used: importing it starts JAX's backend, and `main` has to make each core a device
# before that.


# --- block config: the same in every script, copied by tools/sync_blocks.py ---
def register_config(cls):
    """Make a frozen dataclass a pytree: float fields are leaves, which may be traced; all others are static."""
    leaves = [field.name for field in dataclasses.fields(cls) if field.type is float]
    static = [field.name for field in dataclasses.fields(cls) if field.type is not float]
    return jax.tree_util.register_dataclass(cls, leaves, static)


def require(config, *names: str, low: float, high: float = 1e12) -> None:
    """Raise ValueError unless the fields are in [low, high]. Arrays and traced values are not looked at."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, (int, float)) and not low <= value <= high:  # NaN is not
            raise ValueError(f"{name} = {value}: must be between {low} and {high:g}")


def nearest(name, known) -> str:
    """'; did you mean ...?', or nothing where no known name is close."""
    lower = {str(other).lower(): other for other in known}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[found[0]]}?" if found else ""


def freeze_mapping(mapping) -> FrozenDict:
    """The same mapping, hashable as static fields must be: lists become tuples. Raises TypeError or ValueError."""

    def freeze(value):
        if isinstance(value, int) and abs(value) >= 2**31:
            raise ValueError(f"{value} has more than 32 bits")
        return tuple(map(freeze, value)) if isinstance(value, (list, tuple)) else value

    frozen = FrozenDict({name: freeze(value) for name, value in dict(mapping).items()})
    hash(frozen)
    return frozen
# --- end of block config ---


@register_config
@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. The defaults are tuned for a short run on two CPU cores."""

    env_name: str = "CartPole-v1"  # an environment of gymnax with discrete actions
    env_params: Mapping = FrozenDict()  # its parameters or constructor arguments, such as {memory_length: 20}
    max_episode_steps: int = 0  # time limit; 0 keeps the environment's own
    total_timesteps: int = 500_000  # environment steps per agent, with learning_starts
    num_envs: int = 128  # explorers per agent, each with an environment and an epsilon of its own
    num_steps: int = 1  # steps per explorer and update
    gradient_steps: int = 4  # learner updates that follow
    batch_size: int = 128  # transitions that a learner update learns from
    buffer_size: int = 16_384  # transitions that the replay holds, rounded down to a multiple of num_envs
    buffer_dtype: str = ""  # of observations in the replay; by default the environment's own; bool suits MinAtar
    learning_starts: int = 10_000  # steps before the first learner update, rounded up to a multiple of num_envs
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    max_grad_norm: float = 40.0  # limit of the gradient's global norm
    gamma: float = 0.99  # discount
    n_step: int = 3  # rewards in a target, fewer where the episode ends
    double: bool = True  # the online network chooses the action whose value the target network gives
    dueling: bool = True  # separate streams for the state's value and the actions' advantages
    epsilon_base: float = 0.4  # epsilon of the first of the explorers, the most curious one
    epsilon_exponent: float = 7.0  # the last one's is epsilon_base ** (1 + epsilon_exponent)
    priority_exponent: float = 0.6  # alpha: 0 samples uniformly
    importance_exponent: float = 1.0  # beta: 1 makes up for the priorities in full
    actor_sync_interval: int = 16  # learner updates between refreshes of the explorers' parameters
    target_update_interval: int = 32  # learner updates between updates of the target network
    tau: float = 1.0  # share of the way that it then goes to the online network; 1 copies
    loss: str = "squared"  # squared or huber
    conv_features: int = 16  # of the 3 x 3 convolution that grids [H, W, C] go through first; 0 flattens them
    hidden_sizes: tuple[int, ...] = (128, 128)  # of the dense layers
    activation: str = "relu"  # tanh, relu, elu, gelu or swish

    def __post_init__(self):
        object.__setattr__(self, "env_params", freeze_mapping(self.env_params))

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.learning_starts) // (self.num_envs * self.num_steps)

    @property
    def warmup_steps(self) -> int:
        """Steps per environment with random actions."""
        return -(-self.learning_starts // self.num_envs)


def check(config: Config) -> None:
    """Raise ValueError, naming the field, for a config that cannot train."""
    sizes = ("num_envs", "num_steps", "gradient_steps", "batch_size", "buffer_size", "n_step", "target_update_interval")
    require(config, "total_timesteps", "actor_sync_interval", *sizes, low=1)
    require(config, "gamma", "tau", "epsilon_base", "importance_exponent", low=0, high=1)
    require(config, "max_episode_steps", "learning_starts", "conv_features", "lr", "max_grad_norm", low=0)
    require(config, "epsilon_exponent", "priority_exponent", low=0, high=100)
    batch = config.num_envs * config.num_steps
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: learning_starts = {config.learning_starts} is taken off, "
            f"and one update takes num_envs * num_steps = {batch}"
        )
    if config.warmup_steps < config.n_step:
        raise ValueError(
            f"learning_starts = {config.learning_starts}: must be at least n_step * num_envs = "
            f"{config.n_step * config.num_envs}, for the first transitions to be whole"
        )
    rows = max(config.num_steps, config.warmup_steps)
    if config.buffer_size < rows * config.num_envs:
        raise ValueError(
            f"buffer_size = {config.buffer_size}: must be at least {rows * config.num_envs}, num_envs times the larger "
            "of num_steps and the steps of the warm-up"
        )
    for name, known in {
        "loss": ("huber", "squared"),
        "activation": ("tanh", "relu", "elu", "gelu", "swish"),
        "buffer_dtype": ("", "float32", "bfloat16", "int32", "uint8", "bool"),
    }.items():
        if getattr(config, name) not in known:
            raise ValueError(f"{name} = {getattr(config, name)}: must be one of {', '.join(filter(None, known))}")
    if not config.hidden_sizes or min(config.hidden_sizes) < 1:
        raise ValueError(f"hidden_sizes = {config.hidden_sizes}: must be positive sizes, such as (64, 64)")


# --- block environment: the same in every script, copied by tools/sync_blocks.py ---
def cannot_be_made(config, error) -> ValueError:
    """What to raise, in one line, where making the environment or its first step raised `error`."""
    name, reason = config.env_name, f"{type(error).__name__}: {error}".splitlines()[0]
    return ValueError(f"env_name = {name}, env_params = {dict(config.env_params)}: cannot be made ({reason})")


def make_gymnax_env(config):
    """`(env, env_params)` of a name that gymnax knows, `config.env_params` applied. Raises ValueError."""
    import gymnax

    name, overrides = config.env_name, dict(config.env_params)
    if name not in gymnax.registered_envs:
        raise ValueError(f"env_name = {name}: gymnax does not know it{nearest(name, gymnax.registered_envs)}")
    try:
        defaults = vars(gymnax.make(name)[1])
        env, params = gymnax.make(name, **{k: v for k, v in overrides.items() if k not in defaults})
        changes = {k: v for k, v in overrides.items() if k in defaults}
        for key, value in changes.items():
            if isinstance(defaults[key], (bool, int, float)) and not isinstance(value, (type(defaults[key]), int)):
                raise ValueError(f"{key} = {value!r} is not of type {type(defaults[key]).__name__}")
        params = params.replace(**changes)
        params = params.replace(max_steps_in_episode=config.max_episode_steps or params.max_steps_in_episode)
        if params.max_steps_in_episode < 1:
            raise ValueError("max_steps_in_episode must be at least 1")

        def first_step(key):
            return env.step(key, env.reset(key, params)[1], env.action_space(params).sample(key), params)

        jax.eval_shape(first_step, jax.random.key(0))
    except Exception as error:  # of any kind, where an environment looks at its arguments
        raise cannot_be_made(config, error) from error
    return env, params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did. `info` of `num_steps` steps."""
    ended = info["returned_episode"]
    if "partial_episode" in info:  # one that was not seen from its beginning
        ended = ended & ~info["partial_episode"]
    episodes = ended.sum()
    return {
        "episodic_return": jnp.where(ended, info["returned_episode_returns"], 0.0).sum() / episodes,  # 0 / 0 is NaN
        "episodic_length": jnp.where(ended, info["returned_episode_lengths"], 0).sum() / episodes,
        "episodes": episodes,
    }
# --- end of block environment ---


def make_env(config: Config):
    """`(env, env_params)`: gymnax's interface, statistics of episodes in `info`."""
    from gymnax.environments import spaces
    from gymnax.wrappers import LogWrapper

    env, env_params = make_gymnax_env(config)
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError(f"env_name = {config.env_name}: must have discrete actions, as CartPole-v1 has")
    return LogWrapper(env), env_params


def patches(x):
    """The 3 x 3 neighbourhood of each inner cell: [..., H, W, C] -> [..., H - 2, W - 2, 9 C]."""
    height, width = x.shape[-3] - 2, x.shape[-2] - 2
    return jnp.concatenate([x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)], axis=-1)


class QNetwork(nn.Module):
    """The value of each action. The last hidden layer belongs to the streams, of which `dueling` has two."""

    obs_shape: tuple[int, ...]
    num_states: int  # of an environment whose observation is the number of its state; 0 of all others
    num_actions: int
    conv_features: int
    hidden_sizes: tuple[int, ...]
    activation: str
    dueling: bool

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., num_actions]
        activation = getattr(nn, self.activation)
        x = jax.nn.one_hot(obs, self.num_states) if self.num_states else obs.astype(jnp.float32)
        if len(self.obs_shape) == 3 and self.conv_features:
            # A 3 x 3 convolution as a matrix product: nn.Conv is very slow where vmap gives each seed its own filters.
            x = activation(nn.Dense(self.conv_features)(patches(x)))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes[:-1]:
            x = activation(nn.Dense(size)(x))

        def stream(outputs):
            return nn.Dense(outputs)(activation(nn.Dense(self.hidden_sizes[-1])(x)))

        return combine(stream(1), stream(self.num_actions)) if self.dueling else stream(self.num_actions)


def combine(value, advantage):
    """Q of the two streams (arXiv 1511.06581, equation 9). [..., 1], [..., num_actions] -> [..., num_actions]."""
    return value + advantage - advantage.mean(axis=-1, keepdims=True)


def at(values, index):
    """The entry of the last axis. [..., n], [...] -> [...]."""
    chosen = jnp.arange(values.shape[-1]) == index[..., None]  # much faster than a gather where n is small
    return jnp.where(chosen, values, 0).sum(axis=-1)


def double_q(target_q, online_q):
    """Q'(s, argmax_a Q(s, a)), arXiv 1509.06461, equation 4. Both [..., num_actions], returns [...]."""
    return at(target_q, online_q.argmax(axis=-1))


def last_step(done):
    """Which of n successive steps is the last of its episode, the n-th where none is. [..., n] -> [...]."""
    return done.at[..., -1].set(True).argmax(axis=-1)


def n_step_target(rewards, last, terminated, next_value, gamma):
    """Rewards up to step `last`, then the value of what it led to unless it terminated. [..., n], the others [...].

    y = sum_{k <= last} gamma^k r_k + gamma^(last + 1) (1 - terminated) next_value
    """
    step = jnp.arange(rewards.shape[-1])
    returns = jnp.where(step <= last[..., None], gamma**step * rewards, 0.0).sum(axis=-1)
    return returns + gamma ** (last + 1) * jnp.where(terminated, 0.0, next_value)


def n_step_transitions(steps, gamma, n_step):
    """The transitions of `n_step` steps that begin with each of the first T of T + n_step - 1 successive steps.

    `steps`: leaves [T + n_step - 1, N]. Each transition ends at the first end of an episode or after `n_step` steps, so
    that the last steps of an episode begin shorter ones. Leaves of the result: [T, N]. "return" is the sum of the
    discounted rewards, "discount" what the value of "next_obs" counts in the target: gamma ** (number of steps), or 0
    after a termination.
    """
    length = steps.reward.shape[0] - n_step + 1
    window = jnp.arange(length)[:, None] + jnp.arange(n_step)  # [T, n]
    rewards, terminated, truncated = (
        jnp.moveaxis(leaf[window], 1, -1) for leaf in (steps.reward, steps.terminated, steps.truncated)
    )  # [T, N, n]
    last = last_step(terminated | truncated)  # [T, N]
    where_last = jnp.arange(length)[:, None] + last, jnp.arange(rewards.shape[1])
    return {
        "obs": steps.obs[:length],
        "action": steps.action[:length],
        "q": steps.q[:length],
        "return": n_step_target(rewards, last, True, 0.0, gamma),
        "discount": gamma ** (last + 1) * ~steps.terminated[where_last],
        "next_obs": steps.next_obs[where_last],
    }


def td_loss(q, target, weight, kind):
    """Mean over the batch, weighted. With the Huber loss an error counts linearly beyond 1. All [B]."""
    return (weight * {"huber": optax.huber_loss, "squared": optax.squared_error}[kind](q, target)).mean()


def exploration_ladder(num_envs, base, exponent):
    """Each explorer's epsilon (arXiv 1803.00933, section 4.1): base ** (1 + exponent i / (N - 1)). [N]"""
    return base ** (1.0 + exponent * jnp.arange(num_envs) / max(1, num_envs - 1))


def update_towards(old_params, params, before, now, interval, tau):
    """Go `tau` of the way to `params` for each multiple of `interval` in (before, now] learner updates."""
    times = now // interval - before // interval
    return optax.incremental_update(params, old_params, 1.0 - (1.0 - tau) ** times)


FANOUT = 8  # children per node of the sum tree


def init_sum_tree(size: int) -> tuple:
    """A tree for the priorities of `size` items, all 0. Levels [rows, FANOUT], the items first, the root last."""
    levels = []
    while not levels or size > 1:
        size = -(-size // FANOUT)
        levels.append(jnp.zeros((size, FANOUT)))
    return tuple(levels)


def set_priorities(tree: tuple, index, priority) -> tuple:
    """Set the priorities of items, [B] each. Sums are taken anew, not corrected, so that errors do not add up."""
    levels = []
    for level in tree:
        row, column = index // FANOUT, index % FANOUT
        levels.append(level.at[row, column].set(priority))
        index, priority = row, levels[-1][row].sum(axis=-1)
    return tuple(levels)


def total_priority(tree: tuple):
    return tree[-1].sum()


def sample_sum_tree(tree: tuple, mass):
    """The item in which each point of [0, total_priority) falls, and its priority. [B] -> [B], [B]."""
    node = jnp.zeros(mass.shape, jnp.int32)
    for level in reversed(tree):
        children = level[node]  # [B, FANOUT]
        upto = jnp.cumsum(children, axis=-1)
        beyond = (upto > mass[..., None]) & (children > 0)
        last = FANOUT - 1 - (children > 0)[..., ::-1].argmax(axis=-1)  # where rounding left nothing beyond
        child = jnp.where(beyond.any(axis=-1), beyond.argmax(axis=-1), last)
        priority = at(children, child)
        mass = jnp.maximum(0.0, mass - (at(upto, child) - priority))
        node = node * FANOUT + child
    return node, priority


def priority_of(td_error, exponent):
    """p ** alpha with p = |delta| + 1e-6 (arXiv 1511.05952, section 3.3)."""
    return (jnp.abs(td_error) + 1e-6) ** exponent


def importance_weights(probability, size, exponent):
    """(N P(i)) ** -beta over its maximum in the batch (arXiv 1511.05952, section 3.4). [B] -> [B]."""
    weight = (size * probability) ** -exponent
    return weight / weight.max()


class Step(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array
    action: jax.Array
    q: jax.Array  # the explorer's own estimate of the action's value
    reward: jax.Array
    next_obs: jax.Array  # what the step led to, before any reset
    terminated: jax.Array
    truncated: jax.Array


class Replay(NamedTuple):
    """A ring of transitions. Its leading axis is [capacity]."""

    obs: jax.Array
    next_obs: jax.Array
    rest: jax.Array  # [..., 3]: action, return, discount; one array is faster to read and write than three
    tree: tuple  # of priorities ** alpha


def add_to_replay(replay: Replay, transitions: dict, priority, count) -> Replay:
    """Write transitions [T, N] over the oldest ones. `count` were written before."""
    rest = jnp.stack([transitions[name].astype(jnp.float32) for name in ("action", "return", "discount")], axis=-1)
    rows = Replay(transitions["obs"], transitions["next_obs"], rest, None)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
    index = (count + jnp.arange(priority.size)) % replay.rest.shape[0]
    rings = jax.tree.map(
        lambda ring, new: ring.at[index].set(new.astype(ring.dtype)), replay._replace(tree=None), rows
    )
    return rings._replace(tree=set_priorities(replay.tree, index, priority.reshape(-1)))


def sample_replay(key, replay: Replay, tree, count, batch_size, importance_exponent):
    """A batch drawn by priority, one from each of `batch_size` equal ranges (arXiv 1511.05952, appendix B.2.1)."""
    total = total_priority(tree)
    mass = (jnp.arange(batch_size) + jax.random.uniform(key, (batch_size,))) / batch_size * total
    index, priority = sample_sum_tree(tree, mass)
    action, returns, discount = jnp.moveaxis(replay.rest[index], -1, 0)
    size = jnp.minimum(count, replay.rest.shape[0])
    return {
        "index": index,
        "weight": importance_weights(priority / total, size, importance_exponent),
        "obs": replay.obs[index],
        "action": action.astype(jnp.int32),
        "return": returns,
        "discount": discount,
        "next_obs": replay.next_obs[index],
    }


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    target_params: dict
    actor_params: dict  # what the explorers act with
    opt_state: Any
    replay: Replay
    tail: Any  # a Step [n_step - 1, num_envs]: the last steps, which no transition has begun with yet; () for one step
    num_transitions: jax.Array  # written so far
    learner_steps: jax.Array  # gradient steps so far
    obs: jax.Array  # [num_envs, *obs_shape]
    env_state: Any  # [num_envs, ...]
    key: jax.Array


def make_network(config: Config, env, env_params):
    from gymnax.environments import spaces

    space, num_actions = env.observation_space(env_params), env.action_space(env_params).n
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    sizes = config.conv_features, config.hidden_sizes
    return QNetwork(space.shape, num_states, num_actions, *sizes, config.activation, config.dueling)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    check(config)
    env, env_params = make_env(config)
    network = make_network(config, env, env_params)
    num_actions = env.action_space(env_params).n

    def learning_rate(count):  # constant within an update
        return config.lr * (1.0 - (count // config.gradient_steps) / config.num_updates)

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.chain(clip, optax.adam(learning_rate if config.anneal_lr else config.lr))

    def init(rng):
        """Initial networks, and the replay with the explorers' first steps."""
        params_key, env_key, warmup_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, config.num_envs), env_params)
        params, zero = network.init(params_key, obs), jnp.zeros((), jnp.int32)
        capacity = config.buffer_size // config.num_envs * config.num_envs
        stored = jnp.zeros((capacity, *obs.shape[1:]), config.buffer_dtype or obs.dtype)
        replay = Replay(stored, stored, jnp.zeros((capacity, 3)), init_sum_tree(capacity))
        networks = params, params, params, optimizer.init(params)
        state = RunnerState(*networks, replay, None, zero, zero, obs, env_state, key)
        state, rollout, _ = collect(state, warmup_key, config.warmup_steps)
        return store(state, rollout)

    def collect(state, key, num_steps):
        """Each explorer acts for `num_steps` steps, at random with its epsilon, else greedily."""

        def step(carry, inputs):
            obs, env_state = carry
            explore, random_action, env_keys = inputs
            q = network.apply(state.actor_params, obs)
            action = jnp.where(explore, random_action, q.argmax(axis=-1))
            next_obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
                env_keys, env_state, action, env_params
            )
            made = Step(obs, action, at(q, action), reward, info["final_observation"], terminated, truncated)
            return (next_obs, env_state), (made, info)

        action_key, env_key = jax.random.split(key)  # all random numbers at once: much faster than in each step
        uniform = jax.random.uniform(action_key, (2, num_steps, config.num_envs))
        explore = uniform[0] < exploration_ladder(config.num_envs, config.epsilon_base, config.epsilon_exponent)
        random_action = (num_actions * uniform[1]).astype(jnp.int32)
        env_keys = jax.random.split(env_key, (num_steps, config.num_envs))
        (obs, env_state), (rollout, info) = jax.lax.scan(
            step, (state.obs, state.env_state), (explore, random_action, env_keys)
        )
        return state._replace(obs=obs, env_state=env_state), rollout, info

    def store(state, steps):
        """Write the transitions that are whole by now, with the explorers' own priorities; keep the rest for later."""
        transitions = n_step_transitions(steps, config.gamma, config.n_step)
        next_value = network.apply(state.actor_params, transitions["next_obs"]).max(axis=-1)
        td_error = transitions["return"] + transitions["discount"] * next_value - transitions["q"]
        priority = priority_of(td_error, config.priority_exponent)  # [T, N]
        replay = add_to_replay(state.replay, transitions, priority, state.num_transitions)
        tail = jax.tree.map(lambda leaf: leaf[priority.shape[0] :], steps) if config.n_step > 1 else ()
        return state._replace(replay=replay, tail=tail, num_transitions=state.num_transitions + priority.size)

    def loss(params, batch, target):
        q = at(network.apply(params, batch["obs"]), batch["action"])
        weighted = td_loss(q, target, batch["weight"], config.loss)
        return weighted, ({"td_loss": weighted, "q_value": q.mean()}, target - q)

    def learn(state, key):
        """Gradient steps on batches drawn by priority, each of which writes new priorities back."""

        def gradient_step(carry, key):
            params, opt_state, tree = carry
            count, exponent = state.num_transitions, config.importance_exponent
            batch = sample_replay(key, state.replay, tree, count, config.batch_size, exponent)
            target_q = network.apply(state.target_params, batch["next_obs"])
            next_q = network.apply(params, batch["next_obs"]) if config.double else target_q
            target = batch["return"] + batch["discount"] * double_q(target_q, next_q)
            grads, (metrics, td_error) = jax.grad(loss, has_aux=True)(params, batch, target)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            tree = set_priorities(tree, batch["index"], priority_of(td_error, config.priority_exponent))
            return (optax.apply_updates(params, updates), opt_state, tree), metrics

        carry = state.params, state.opt_state, state.replay.tree
        keys = jax.random.split(key, config.gradient_steps)
        (params, opt_state, tree), metrics = jax.lax.scan(gradient_step, carry, keys)
        state = state._replace(params=params, opt_state=opt_state, replay=state.replay._replace(tree=tree))
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state, rollout, info = collect(state._replace(key=key), collect_key, config.num_steps)
        waiting = [state.tail] if config.n_step > 1 else []
        state = store(state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *waiting, rollout))
        state, metrics = learn(state, learn_key)
        before, now = state.learner_steps, state.learner_steps + config.gradient_steps
        state = state._replace(
            learner_steps=now,
            actor_params=update_towards(state.actor_params, state.params, before, now, config.actor_sync_interval, 1.0),
            target_params=update_towards(
                state.target_params, state.params, before, now, config.target_update_interval, config.tau
            ),
        )
        return state, metrics | episode_metrics(info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole training; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), None, config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


class Episode(NamedTuple):
    """One episode: [time limit, ...]."""

    env_state: Any  # before the step
    reward: jax.Array
    valid: jax.Array  # false after the episode's end


def make_rollout(config: Config):
    """`rollout(runner_state, rng) -> Episode`: one greedy episode of a trained agent."""
    env, env_params = make_env(config)
    network = make_network(config, env, env_params)

    def rollout(runner_state, rng):
        def step(carry, key):
            obs, env_state, valid = carry
            action = network.apply(runner_state.params, obs).argmax(axis=-1)
            next_obs, next_env_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
            episode = Episode(env_state.env_state, reward, valid)
            return (next_obs, next_env_state, valid & ~(terminated | truncated)), episode

        reset_key, step_key = jax.random.split(rng)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, int(env_params.max_steps_in_episode))
        _, episode = jax.lax.scan(step, (obs, env_state, jnp.asarray(True)), keys)
        return episode

    return rollout


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Pictures of this script's own, drawn at the end of `main`: none here. `runner_state` is [num_seeds, ...]."""


# --- block arguments: the same in every script, copied by tools/sync_blocks.py ---
@dataclasses.dataclass(frozen=True)
class Options:
    """One run of the script."""

    config: str = ""  # YAML file of hyperparameters; flags override it
    num_seeds: int = 4  # agents trained at once, each with its own random key
    seed: int = 0  # of the key that the agents' keys are split from
    run_dir: str = ""  # where results go; runs/SCRIPT/ENVIRONMENT-TIME where not given
    resume: bool = False  # go on with the run in run_dir from its last checkpoint
    checkpoint_interval: float = 60.0  # seconds between checkpoints; 0 saves whenever progress is shown
    eval_episodes: int = 16  # greedy episodes per agent after training, the same ones for all agents; 0 for none


class YamlLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number too."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str, config_class) -> list[str]:
    """A YAML file of hyperparameters as command-line flags. Raises ValueError."""
    try:
        values = yaml.load(Path(path).read_bytes(), YamlLoader)
        json.dumps(values, default=str)  # a value may hold itself
    except Exception as error:  # PyYAML raises many kinds
        raise ValueError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be a mapping of hyperparameters to values")
    kinds = {field.name: field.type for field in dataclasses.fields(config_class)}
    flags = []
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"{path}: {name} is not a hyperparameter{nearest(name, kinds)}")
        if kinds[name] == tuple[int, ...] and isinstance(value, list) and str not in map(type, value):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags.append(f"--{name}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return flags


def parse_number_or_mapping(kind, text):
    """What tyro does not: 5e5 as an int, and a mapping in one argument. Raises ValueError."""
    with contextlib.suppress(Exception):  # PyYAML raises many kinds
        if kind is Mapping:
            return freeze_mapping(yaml.load(text, YamlLoader))
        if (value := float(text)).is_integer():
            return int(value)
    wanted = "a whole number" if kind is int else "a mapping such as {backend: spring}, of numbers below 2^31"
    raise ValueError(f"{text} is not {wanted}")


def parse(args, config_class):
    """`(config, options)` from flags, defaults taken from the YAML file that --config names. Raises ValueError."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(info):
        if info.type in (int, Mapping):
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="INT" if info.type is int else "{NAME: VALUE}",
                instance_from_str=lambda texts: parse_number_or_mapping(info.type, texts[0]),
                is_instance=lambda value: isinstance(value, info.type),
                str_from_instance=lambda value: [json.dumps(value, default=dict)],
            )

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        run: tyro.conf.OmitArgPrefixes[Options]
        hyperparameters: tyro.conf.OmitArgPrefixes[tyro.conf.FlagConversionOff[config_class]]

    def read(flags, default, source=""):
        with contextlib.redirect_stderr(io.StringIO()) as messages:
            try:
                return tyro.cli(Arguments, args=flags, default=default, registry=registry, description=__doc__)
            except SystemExit as stop:
                if not stop.code:  # --help
                    raise
                text = re.sub(r"\+?-{4,}\+?|[\s|\u2500-\u257f]+", " ", messages.getvalue())  # tyro draws boxes
                raise ValueError(source + re.split("Argument helptext|For full helptext", text)[0]) from None

    args, default = sys.argv[1:] if args is None else list(args), Arguments(Options(), config_class())
    arguments = read(args, default)
    if file := arguments.run.config:
        arguments = read(args, read(read_yaml(file, config_class), default, f"{file}: "))
    sizes = [f.name for f in dataclasses.fields(config_class) if f.type is int and f.name != "total_timesteps"]
    require(arguments.hyperparameters, *sizes, low=0, high=2**31 - 1)  # JAX takes them as 32 bits
    require(arguments.run, "num_seeds", low=1, high=2**31 - 1)
    require(arguments.run, "seed", low=0, high=2**32 - 1)
    require(arguments.run, "checkpoint_interval", "eval_episodes", low=0, high=2**31 - 1)
    return arguments.hyperparameters, arguments.run
# --- end of block arguments ---


# --- block results: the same in every script, copied by tools/sync_blocks.py ---
def write(path: Path, content) -> None:
    """Write a file whole or not at all; `content` is a string, or a function that writes to a binary file."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        content(file) if callable(content) else file.write(content.encode())
    temporary.replace(path)


def open_run_dir(config, options, args) -> tuple[Path, dict]:
    """The run directory, made or, to resume, seen to hold the same run; and what its run.json records."""
    script, now = Path(__file__).absolute(), datetime.datetime.now()
    run_dir = Path(options.run_dir or f"runs/{script.stem}/{config.env_name}-{now:%Y%m%d-%H%M%S-%f}").absolute()
    hyperparameters = json.loads(json.dumps(vars(config), default=dict))
    settings = {"script": script.stem, "num_seeds": options.num_seeds, "seed": options.seed, **hyperparameters}
    held = [name for name in ("run.json", "config.yaml", "checkpoints") if (run_dir / name).exists()]
    if options.resume and not options.run_dir:
        raise ValueError("resume: needs --run-dir, the run to go on with")
    if held and not options.resume:
        raise ValueError(f"run_dir = {run_dir}: holds {held[0]} already; --resume goes on with a run")
    git = ["git", "-C", script.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # not by a tag
    packages = {"jax", "jaxlib", "flax", "optax", "distrax", "gymnax", "brax", "numpy"}
    versions = {each.name: each.version for each in importlib.metadata.distributions() if each.name in packages}
    record = {
        "settings": settings,
        "command": shlex.join([script.name, *map(str, sys.argv[1:] if args is None else args)]),
        "started": f"{now:%Y-%m-%d %H:%M:%S}",
        "device": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "versions": {"python": sys.version.split()[0], **dict(sorted(versions.items()))},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
    }
    if held:
        try:
            record = json.loads((run_dir / "run.json").read_text())
            old = dict(record["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"run_dir = {run_dir}: its run.json is missing or damaged") from error
        both = {name: (old.get(name, "missing"), settings.get(name, "missing")) for name in settings | old}
        if changes := [f"{name} was {was} and is {new}" for name, (was, new) in both.items() if was != new]:
            raise ValueError(f"resume: {run_dir} holds a run with other settings: {', '.join(changes)}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write(run_dir / "run.json", json.dumps(record, indent=2))
        write(run_dir / "config.yaml", yaml.safe_dump(hyperparameters, sort_keys=False))
    except OSError as error:
        raise ValueError(f"run_dir = {run_dir}: cannot be written ({error.strerror})") from error
    return run_dir, record


def mean_return(metrics, first: int, last: int) -> np.ndarray:
    """Mean return of the episodes that ended in updates [first, last), NaN where none did: [seeds]."""
    episodes, returns = (np.asarray(metrics[name])[:, first:last] for name in ("episodes", "episodic_return"))
    with np.errstate(invalid="ignore"):
        return np.where(episodes > 0, episodes * returns, 0.0).sum(axis=1) / episodes.sum(axis=1)


def interval(values) -> list:
    """Interquartile mean over seeds and its 95 % bootstrap interval: [seeds, ...] -> mean, low, high, each [...]."""
    middle = partial(scipy.stats.trim_mean, proportiontocut=0.25)
    if len(values) == 1:
        return [values[0]] * 3
    resampled = scipy.stats.bootstrap((values,), middle, n_resamples=2000, batch=100, method="percentile", rng=0)
    return [middle(values), *resampled.confidence_interval]


def draw_learning_curve(metrics, config, file) -> None:
    """Returns over steps as a PNG: a line per seed, over all the interquartile mean and its interval. For `write`."""
    edges = np.unique(np.linspace(0, config.num_updates, 101).astype(int))
    curves = np.stack([mean_return(metrics, *pair) for pair in itertools.pairwise(edges)], axis=1)  # [seeds, points]
    steps, whole = edges[1:] * config.num_envs * config.num_steps, np.isfinite(curves).all(axis=0)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, curves.T, color="tab:blue", linewidth=0.5, alpha=0.5)
    if whole.any():  # where every seed has finished an episode
        center, low, high = interval(curves[:, whole])
        axes.plot(steps[whole], center, color="tab:blue", linewidth=2, label="interquartile mean over seeds")
        axes.fill_between(steps[whole], low, high, color="tab:blue", alpha=0.25, label="95 % bootstrap interval")
        axes.legend(frameon=False)
    axes.set(title=f"{Path(__file__).stem} on {config.env_name}, {len(curves)} seeds")
    axes.set(xlabel="environment steps per agent", ylabel="return of the episodes that ended")
    figure.savefig(file, format="png", dpi=150)


def evaluate(config, options, runner_state):
    """Returns of greedy episodes, [num_seeds, eval_episodes]; episode i has the same key for every agent."""
    rollout = make_rollout(config)

    def episodic_return(state, key):
        episode = rollout(state, key)
        return jnp.where(episode.valid, episode.reward, 0.0).sum()

    keys = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), 2**31), options.eval_episodes)
    return jax.jit(jax.vmap(jax.vmap(episodic_return, (None, 0)), (0, None)))(runner_state, keys)


def write_results(config, metrics, run_dir: Path) -> dict:
    """Write metrics and learning curve. Returns and prints the final and the greedy return over seeds.

    `metrics` {name: [num_seeds, num_updates]}, and `evaluation` [num_seeds, eval_episodes] where there was one.
    """
    write(run_dir / "metrics.npz", partial(np.savez_compressed, **metrics))
    write(run_dir / "learning_curve.png", partial(draw_learning_curve, metrics, config))
    returns = {"final return": mean_return(metrics, config.num_updates * 9 // 10, config.num_updates)}
    if "evaluation" in metrics:
        returns["greedy return"] = metrics["evaluation"].mean(axis=1)
    results = {}
    for name, values in returns.items():
        if len(finite := values[np.isfinite(values)]):
            mean, low, high = map(float, interval(finite))
            results[name] = {"interquartile_mean": mean, "low": low, "high": high, "seeds": len(finite)}
            print(f"{name}: {mean:.4g}, 95 % interval {low:.4g} to {high:.4g}, {len(finite)} seeds")
        if lost := len(values) - len(finite):
            print(f"{name}: {lost} of {len(values)} seeds left out, no episode ended or the return is not finite")
    return results
# --- end of block results ---


# --- block main: the same in every script, copied by tools/sync_blocks.py ---
def use_all_cores() -> None:
    """Make each CPU core a device of JAX, for seeds to be spread over, unless the user chose or JAX has started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jax.config.jax_num_cpu_devices < 0 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", cores)


def compile_training(config, options):
    """`(start, advance, abstract, num_devices)`: programs that begin training and go on with it, and what they carry.

    They carry `{"runner_state": [num_seeds, ...], "metrics": {name: [num_seeds, num_updates]}}`, the seeds spread over
    as many local devices as divide them. No agent needs another, so that nothing crosses devices.
    """
    init, update = make_learner(config)
    devices = jax.local_devices()
    num_devices, spec = max(n for n in range(1, len(devices) + 1) if options.num_seeds % n == 0), ("seed",)
    if getattr(config, "num_devices", 1) > 1:  # each agent spreads its own work
        num_devices, spec = config.num_devices, ()
    mesh = jax.sharding.Mesh(np.asarray(devices[:num_devices]), ("seed",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def start(keys):
        state = jax.vmap(init)(keys)
        shapes = jax.eval_shape(jax.vmap(update), state)[1]
        metrics = {k: jnp.zeros((options.num_seeds, config.num_updates), v.dtype) for k, v in shapes.items()}
        return {"runner_state": state, "metrics": metrics}

    def advance(carry, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, new = jax.vmap(update)(carry["runner_state"])
            metrics = {k: v.at[:, i].set(new[k]) for k, v in carry["metrics"].items()}
            return {"runner_state": state, "metrics": metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    keys = jax.device_put(jax.random.split(jax.random.key(options.seed), options.num_seeds), sharding)
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # as it runs once
    start = jax.jit(start, out_shardings=sharding, compiler_options=quickly if devices[0].platform == "cpu" else None)
    advance = jax.jit(advance, donate_argnums=0, out_shardings=sharding)
    return partial(start, keys), advance, start.eval_shape(keys), num_devices


def restore(manager, step: int, abstract) -> dict:
    """The `carry` of a checkpoint. Raises ValueError where it cannot be read, or is not what this script carries."""
    try:
        return manager.restore(step, args=ocp.args.StandardRestore(abstract))
    except Exception as error:  # Orbax raises many kinds
        checkpoint = f"{manager.directory}/{step}"
        raise ValueError(f"resume: the checkpoint {checkpoint} cannot be read, or is another version's") from error


def train_in_chunks(config, options, advance, carry, done: int, manager) -> dict:
    """Train from update `done` to the last, with progress and checkpoints. Returns the final `carry`."""
    steps = options.num_seeds * config.num_envs * config.num_steps  # of all agents in one update
    chunk, saved_at = 1, time.perf_counter()
    with tqdm(total=config.num_updates * steps, initial=done * steps, unit="step", unit_scale=True) as progress:
        while done < config.num_updates:
            begun, last = time.perf_counter(), min(done + chunk, config.num_updates)
            carry = jax.block_until_ready(advance(carry, done, last))
            returns = mean_return(carry["metrics"], done, last)
            if len(returns := returns[np.isfinite(returns)]):
                margin = f" +- {1.96 * scipy.stats.sem(returns):.2g}" if len(returns) > 1 else ""
                progress.set_postfix_str(f"return {returns.mean():.4g}{margin}", refresh=False)
            progress.update((last - done) * steps)
            done, now = last, time.perf_counter()
            chunk = max(1, round(chunk * min(10.0, 1.0 / (now - begun))))  # about a second
            if done == config.num_updates or now - saved_at >= options.checkpoint_interval:
                manager.save(done, args=ocp.args.StandardSave(carry))
                saved_at = time.perf_counter()
    return carry


def main(args=None) -> Path:
    """The command line: trains, shows progress, saves checkpoints and results. Returns the run directory."""
    use_all_cores()
    keep = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True)
    try:
        begun, (config, options) = time.perf_counter(), parse(args, Config)
        start, advance, abstract, num_devices = compile_training(config, options)  # ValueError where it cannot train
        run_dir, record = open_run_dir(config, options, args)
        manager = ocp.CheckpointManager(run_dir / "checkpoints", options=keep)
        done = manager.latest_step() or 0
        if options.resume and not done:
            print(f"resume: no checkpoint in {run_dir} yet, starting anew")
        carry = restore(manager, done, abstract) if done else start()
    except (ValueError, OSError) as error:
        print(f"{Path(__file__).name}: error: {' '.join(str(error).split())}", file=sys.stderr)  # names may hold breaks
        raise SystemExit(2) from None
    if done < config.num_updates:
        advance = advance.lower(abstract, 0, 1).compile()
    compiled, steps_per_update = time.perf_counter(), config.num_envs * config.num_steps
    print(
        f"{config.env_name}: {options.num_seeds} seeds on {num_devices} device(s), {config.num_updates} updates of "
        f"{steps_per_update} steps, {done} of them done; compiled in {compiled - begun:.1f} s"
    )
    carry = train_in_chunks(config, options, advance, carry, done, manager)
    trained = time.perf_counter()
    if done < config.num_updates:  # of this process, which may have resumed the run
        speed = options.num_seeds * steps_per_update * (config.num_updates - done) / (trained - compiled)
        seconds = {"compile": compiled - begun, "train": trained - compiled}
        record |= {"seconds": seconds, "steps_per_second": speed, "first_update": done}
        print(f"trained in {trained - compiled:.1f} s, {speed:,.0f} steps/s over all seeds")
    metrics = jax.tree.map(np.asarray, carry["metrics"])
    if options.eval_episodes:
        metrics["evaluation"] = np.asarray(evaluate(config, options, carry["runner_state"]))
    record.pop("greedy return", None)  # of an end before this one
    record |= write_results(config, metrics, run_dir)
    report(config, carry["runner_state"], run_dir)
    record.setdefault("seconds", {})["evaluate"] = time.perf_counter() - trained
    write(run_dir / "run.json", json.dumps(record, indent=2))
    print(f"results in {run_dir}")
    return run_dir
# --- end of block main ---


if __name__ == "__main__":
    main()
