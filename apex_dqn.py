# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2,<0.11",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "pyyaml>=6.0",
#     "safetensors>=0.8",
#     "scipy>=1.15",
#     "six>=1.17",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Ape-X DQN: many actors and one learner with prioritized replay, the whole training in one jit.

Horgan et al. 2018, "Distributed Prioritized Experience Replay" (arXiv 1803.00933), algorithms 1 and 2: each actor has
an epsilon of its own, acts with parameters of some updates ago, and computes the first priorities of its n-step
transitions; the learner samples by priority and updates the priorities. Prioritized replay: Schaul et al. 2016 (arXiv
1511.05952), equation 1, section 3.4. Double: arXiv 1509.06461, equation 4. Dueling: arXiv 1511.06581, equation 9.
Differences from the paper: actors and learner take turns; Adam; time limits do not count as terminations.

    python apex_dqn.py --env-name CartPole-v1 --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault(  # one device per core of this process, for seeds to spread over
    "JAX_NUM_CPU_DEVICES",
    str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_MAX_SIZE",
    str(-1 if "JAX_COMPILATION_CACHE_DIR" in os.environ else 2**31),
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.expanduser(f"~/.cache/onejit/jax-{platform.node()}")
)

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import tyro
import yaml
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict
from gymnax.environments import spaces
from gymnax.wrappers import LogWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save_file
from tqdm import tqdm


# --- block config: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def register_config(cls):
    """A frozen dataclass as a pytree: float fields are leaves, which may be traced; all others are static."""
    leaves = [field.name for field in dataclasses.fields(cls) if field.type in (float, "float")]
    static = [field.name for field in dataclasses.fields(cls) if field.name not in leaves]
    return jax.tree_util.register_dataclass(cls, leaves, static)


# --- hyperparameters ---


@register_config
@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. The defaults are tuned for a short run on two CPU cores."""

    env_name: str = (
        "CartPole-v1"  # gymnax environment with discrete actions; MODULE:NAME imports MODULE
    )
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # parameters of the environment: NAME VALUE ...
    total_timesteps: int = 500_000  # environment steps per agent, warm-up included
    num_envs: int = 128  # actors per agent, each with its own environment and epsilon
    num_steps: int = 1  # steps per actor and update
    gradient_steps: int = 4  # gradient steps per update, each on a new batch
    batch_size: int = 128  # transitions per gradient step
    buffer_size: int = (
        16_384  # capacity of the replay, rounded down to a multiple of num_envs * num_steps
    )
    buffer_dtype: Literal["", "float32", "bfloat16", "int32", "uint8", "bool"] = (
        ""  # dtype of stored observations
    )
    learning_starts: int = (
        10_000  # transitions before learning, rounded up to a multiple of num_envs * num_steps
    )
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    max_grad_norm: float = 40.0  # limit of the gradient's global norm; 0 for no limit
    gamma: float = 0.99  # discount factor
    n_step: int = 3  # number of rewards in a target; fewer at the end of an episode
    double: bool = True  # double Q-learning: the online network chooses the action, the target network evaluates it
    dueling: bool = (
        True  # dueling network: separate streams for the state's value and the actions' advantages
    )
    epsilon_base: float = 0.4  # epsilon of the first actor, which explores most
    epsilon_exponent: float = (
        7.0  # the last actor's epsilon is epsilon_base ** (1 + epsilon_exponent)
    )
    priority_exponent: float = 0.6  # exponent alpha of the priorities; 0 samples uniformly
    importance_exponent: float = (
        1.0  # exponent beta of the importance weights; 1 corrects for the priorities in full
    )
    actor_sync_interval: int = 16  # gradient steps between refreshes of the actors' parameters
    target_update_interval: int = 32  # gradient steps between updates of the target network
    tau: float = 1.0  # Polyak factor of the target network; 1 copies the online network
    loss: Literal["squared", "huber"] = "squared"  # loss function of the TD error
    torso: Literal["flat", "grid", "nature"] = (
        "grid"  # convolutions of images: none, one of 3 x 3, or Mnih et al. 2015
    )
    hidden_sizes: tuple[int, ...] = (128, 128)  # sizes of the dense hidden layers
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "relu"  # activation function of the hidden layers
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def warmup_timesteps(self) -> int:
        """Environment steps of `init`: a transition is complete when `n_step` - 1 more steps have followed."""
        rollout_size = self.num_envs * self.num_steps
        return math.ceil(self.learning_starts / rollout_size) * rollout_size + self.num_envs * (
            self.n_step - 1
        )

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.warmup_timesteps) // (self.num_envs * self.num_steps)


# --- block torso: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def convolutions(torso: str, obs_shape: tuple[int, ...]):
    """(features, size, stride) of each convolution of images [H, W, C]; none for other observations."""
    layers = {"flat": (), "grid": ((16, 3, 1),), "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1))}[
        torso
    ]
    if len(obs_shape) == 3 and min(obs_shape[:2]) < {"flat": 1, "grid": 3, "nature": 36}[torso]:
        raise ValueError(
            f"torso = {torso}: images {obs_shape} too small; grid needs 3 x 3, nature 36 x 36, flat any"
        )
    return layers if len(obs_shape) == 3 else ()


def patches(
    x, size, stride
):  # a dense layer on patches is a convolution, on CPUs faster than nn.Conv
    """Squares of size x size, `stride` (a divisor of size) apart: [..., H, W, C] -> [..., H', W', size * size * C]."""
    h, w, n = (
        x.shape[-3] // stride,
        x.shape[-2] // stride,
        size // stride,
    )  # blocks; n x n of them are a square
    x = x[..., : h * stride, : w * stride, :].reshape(
        *x.shape[:-3], h, stride, w, stride, x.shape[-1]
    )
    x = x.swapaxes(-4, -3).reshape(*x.shape[:-5], h, w, stride**2 * x.shape[-1])
    return jnp.concatenate(
        [x[..., i : h - n + 1 + i, j : w - n + 1 + j, :] for i in range(n) for j in range(n)], -1
    )


# --- networks ---


class QNetwork(nn.Module):
    """The value of each action. With `dueling`, the last hidden layer and the head exist twice, in two streams."""

    obs_shape: tuple[int, ...]
    num_states: (
        int  # of an environment whose observation is the number of its state; 0 of all others
    )
    buffer_dtype: str  # of stored observations
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]  # (features, size, stride)
    hidden_sizes: tuple[int, ...]
    activation: str
    dueling: bool

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., num_actions]
        activation = getattr(nn, self.activation)
        obs = (
            obs / 255.0
            if obs.dtype == jnp.uint8 and self.obs_shape and not self.buffer_dtype
            else obs
        )
        obs = obs.astype(self.buffer_dtype or obs.dtype)  # the same dtype in acting and learning
        x = (
            jax.nn.one_hot(obs, self.num_states, dtype=jnp.float32)
            if self.num_states
            else obs.astype(jnp.float32)
        )
        for features, size, stride in self.convolutions:
            x = activation(nn.Dense(features)(patches(x, size, stride)))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes[:-1]:
            x = activation(nn.Dense(size)(x))

        def stream(outputs):
            hidden = [
                activation(nn.Dense(size)(x)) for size in self.hidden_sizes[-1:]
            ]  # empty without hidden layers
            return nn.Dense(outputs)(hidden[0] if hidden else x)

        return (
            dueling_q(stream(1), stream(self.num_actions))
            if self.dueling
            else stream(self.num_actions)
        )


# --- mathematics: arrays in, arrays out ---


def dueling_q(value, advantage):
    """Q of the two streams (arXiv 1511.06581, equation 9). [..., 1], [..., num_actions] -> [..., num_actions]."""
    return value + advantage - advantage.mean(axis=-1, keepdims=True)


def greedy(values):
    """The action of the highest value. [..., num_actions] -> [...]."""
    return values.argmax(axis=-1).astype(jnp.int32)


def select(values, index):
    """Select an entry along the last axis. [..., n], [...] -> [...]."""
    return jnp.take_along_axis(values, index[..., None], axis=-1).squeeze(-1)


def double_q(target_q, online_q):
    """Q'(s, argmax_a Q(s, a)), arXiv 1509.06461, equation 4. Both [..., num_actions], returns [...]."""
    return select(target_q, greedy(online_q))


def n_step_transitions(steps, gamma, n_step):
    """The n-step transitions that begin at each of the first T of T + n_step - 1 successive steps.

    `steps`: leaves [T + n_step - 1, N]. A transition ends after `n_step` steps or at the end of the episode, and the
    last steps of an episode therefore begin shorter transitions. Leaves of the result: [T, N]. "return" is the sum of
    the discounted rewards. "discount" is the weight of the value of "next_obs" in the target: gamma ** (number of
    steps), or 0 after a termination.
    """
    length, step = len(steps.reward) - n_step + 1, jnp.arange(n_step)
    window = jnp.arange(length)[:, None] + step  # [T, n_step]
    done = jnp.moveaxis((steps.terminated | steps.truncated)[window], 1, -1)  # [T, N, n_step]
    last = (
        done.at[..., -1].set(True).argmax(axis=-1)
    )  # [T, N], index of the last step, from 0 to n - 1
    rewards = jnp.where(
        step <= last[..., None], gamma**step * jnp.moveaxis(steps.reward[window], 1, -1), 0.0
    )
    reached = jnp.arange(length)[:, None] + last, jnp.arange(done.shape[1])
    return {
        "obs": steps.obs[:length],
        "action": steps.action[:length],
        "q": steps.q[:length],
        "return": rewards.sum(axis=-1),
        "discount": jnp.where(steps.terminated[reached], 0.0, gamma ** (last + 1)),
        "next_obs": steps.next_obs[reached],
    }


def td_loss(q, target, weight, kind):
    """Weighted mean of half the squared error, or of the Huber loss, which is linear beyond 1. All [B]."""
    return (weight * {"huber": optax.huber_loss, "squared": optax.l2_loss}[kind](q, target)).mean()


def exploration_ladder(num_envs, base, exponent):
    """Each actor's epsilon (arXiv 1803.00933, section 4.1): base ** (1 + exponent i / (N - 1)). [N]"""
    return base ** (1.0 + exponent * jnp.arange(num_envs) / max(1, num_envs - 1))


def update_towards(old_params, params, update_count, steps, interval, tau):
    """One Polyak update with factor `tau` for each multiple of `interval` that the last `steps` steps reached."""
    now = (
        update_count % interval * steps
    )  # modulo `interval` updates, because the number of steps may overflow
    times = now // interval - (now - steps) // interval
    return optax.incremental_update(
        params, old_params, jnp.asarray(1.0 - (1.0 - tau) ** times, jnp.float32)
    )


FANOUT = 8  # children per node of the sum tree


def init_sum_tree(size: int) -> tuple:
    """A sum tree of `size` priorities, all 0. Levels [rows, FANOUT], from the items to the root."""
    levels = []
    while not levels or size > 1:
        size = -(-size // FANOUT)
        levels.append(jnp.zeros((size, FANOUT)))
    return tuple(levels)


def set_priorities(tree: tuple, index, priority) -> tuple:
    """Set the priorities of items, [B] each. Sums are computed anew, because corrections would add up errors."""
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
        last = (
            FANOUT - 1 - (children > 0)[..., ::-1].argmax(axis=-1)
        )  # in case rounding leaves no child beyond
        child = jnp.where(beyond.any(axis=-1), beyond.argmax(axis=-1), last)
        priority = select(children, child)
        mass = jnp.maximum(0.0, mass - (select(upto, child) - priority))
        node = node * FANOUT + child
    return node, priority


def priority_of(td_error, exponent):
    """p ** alpha with p = |delta| + 1e-6 (arXiv 1511.05952, section 3.3), clipped to e^-30 and e^30 for the sums."""
    return jnp.exp(jnp.clip(exponent * jnp.log(jnp.abs(td_error) + 1e-6), -30.0, 30.0))


def importance_weights(probability, size, exponent):
    """(N P(i)) ** -beta over its maximum in the batch (arXiv 1511.05952, section 3.4). [B] -> [B]."""
    log_weight = -exponent * jnp.log(size * probability)
    return jnp.exp(log_weight - log_weight.max())


class Step(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array
    action: jax.Array
    q: jax.Array  # the actor's own estimate of the action's value
    reward: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset
    terminated: jax.Array
    truncated: jax.Array


def add_to_replay(replay: dict, transitions: dict, count) -> dict:
    """Overwrite the oldest transitions, [num_steps, num_envs], in the ring. `count` rollouts were written before."""
    return {
        name: ring.at[count % len(ring)].set(transitions[name].astype(ring.dtype))
        for name, ring in replay.items()
    }


def sample_replay(key, replay: dict, tree: tuple, size, batch_size, importance_exponent):
    """Draw a transition from each of `batch_size` equal ranges of priority (arXiv 1511.05952, appendix B.2.1)."""
    total = total_priority(tree)
    mass = (jnp.arange(batch_size) + jax.random.uniform(key, (batch_size,))) / batch_size * total
    index, priority = sample_sum_tree(tree, mass)
    weight = importance_weights(priority / total, size, importance_exponent)
    batch = jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[3:])[index], replay)
    return batch | {"index": index, "weight": weight}


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    target_params: dict
    actor_params: dict  # the actors' copy of the parameters
    opt_state: Any
    replay: dict  # results of `n_step_transitions`, [num_rollouts, num_steps, num_envs, ...]
    tree: tuple  # sum tree of the transitions' priorities ** alpha
    tail: Any  # a Step [n_step - 1, num_envs]: the last steps, which begin no transition yet; () if n_step is 1
    replay_count: jax.Array  # rollouts written to the replay so far
    update_count: jax.Array  # updates so far
    obs: jax.Array  # [num_envs, *obs_shape]
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params}


def make_network(config: Config, env, env_params):
    space, num_actions = env.observation_space(env_params), env.action_space(env_params).n
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    if config.buffer_dtype and space.dtype == jnp.uint8:
        raise ValueError(
            f"buffer_dtype = {config.buffer_dtype}: must be empty, uint8 observations are stored as such"
        )
    layers = convolutions(config.torso, space.shape), config.hidden_sizes, config.activation
    return QNetwork(
        space.shape, num_states, config.buffer_dtype, num_actions, *layers, config.dueling
    )


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    rollout_size, gradient_steps = config.num_envs * config.num_steps, config.gradient_steps
    sizes = config.num_envs, config.num_steps, gradient_steps, config.batch_size, config.n_step
    if (
        min(
            *sizes,
            config.actor_sync_interval,
            config.target_update_interval,
            config.learning_starts + 1,
        )
        < 1
    ):
        names = "num_envs, num_steps, gradient_steps, batch_size, n_step, actor_sync_interval, target_update_interval"
        raise ValueError(f"{names}: must all be at least 1, learning_starts at least 0")
    least = config.warmup_timesteps + rollout_size
    if config.total_timesteps < least:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: the warm-up and one update take {least}"
        )
    num_rollouts, warmup_rollouts = (
        config.buffer_size // rollout_size,
        math.ceil(config.learning_starts / rollout_size),
    )
    if num_rollouts < 1:
        raise ValueError(f"buffer_size = {config.buffer_size}: one update writes {rollout_size}")
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    network = make_network(config, env, env_params)
    clip = optax.clip_by_global_norm(
        jnp.where(config.max_grad_norm > 0, config.max_grad_norm, jnp.inf)
    )
    optimizer = optax.chain(clip, optax.scale_by_adam())

    def init(rng):
        """Initialize the networks, and fill the replay with the actors' first transitions."""
        params_key, env_key, tail_key, warmup_key, key = jax.random.split(rng, 5)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        params, shape = (
            network.init(params_key, obs),
            (num_rollouts, config.num_steps, config.num_envs),
        )
        replay = {name: jnp.zeros(shape) for name in ("return", "discount")} | {
            "action": jnp.zeros(shape, jnp.int32)
        }
        stored = jnp.zeros((*shape, *obs.shape[1:]), config.buffer_dtype or obs.dtype)
        state = RunnerState(
            params=params,
            target_params=params,
            actor_params=params,
            opt_state=optimizer.init(params),
            replay=replay | {"obs": stored, "next_obs": stored},
            tree=init_sum_tree(math.prod(shape)),
            tail=(),
            replay_count=jnp.zeros((), jnp.int32),
            update_count=jnp.zeros((), jnp.int32),
            obs=obs,
            env_state=env_state,
            key=key,
        )
        if config.n_step > 1:
            state, tail, _ = collect(state, tail_key, config.n_step - 1)
            state = state._replace(tail=tail)
        keys = jax.random.split(warmup_key, warmup_rollouts)
        return jax.lax.scan(lambda state, key: (explore(state, key)[0], None), state, keys)[0]

    def collect(state, key, num_steps):
        """Each actor acts epsilon-greedily for `num_steps` steps, with its own epsilon."""

        def step(carry, inputs):
            obs, env_state = carry
            explore, random_action, env_keys = inputs
            q = network.apply(state.actor_params, obs)
            action = jnp.where(explore, random_action, greedy(q))
            after, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            made = Step(
                obs=obs,
                action=action,
                q=select(q, action),
                reward=reward,
                next_obs=info.pop("final_observation"),
                terminated=terminated,
                truncated=truncated,
            )
            return (after, env_state), (made, info)

        explore_key, action_key, env_key = jax.random.split(
            key, 3
        )  # all at once: much faster than in each step
        shape = num_steps, config.num_envs
        ladder = exploration_ladder(config.num_envs, config.epsilon_base, config.epsilon_exponent)
        random_action = jax.random.randint(action_key, shape, 0, network.num_actions)
        inputs = (
            jax.random.uniform(explore_key, shape) < ladder,
            random_action,
            jax.random.split(env_key, shape),
        )
        (obs, env_state), (rollout, info) = jax.lax.scan(step, (state.obs, state.env_state), inputs)
        return state._replace(obs=obs, env_state=env_state), rollout, info

    def explore(state, key):
        """Act. Store the transitions that are now complete, with the actors' own priorities; keep the other steps."""
        state, rollout, info = collect(state, key, config.num_steps)
        steps = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), *([state.tail] if state.tail else []), rollout
        )
        transitions = n_step_transitions(steps, config.gamma, config.n_step)
        next_value = network.apply(state.actor_params, transitions["next_obs"]).max(axis=-1)
        next_value = jnp.where(
            transitions["discount"] > 0.0, next_value, 0.0
        )  # 0 after a termination
        td_error = transitions["return"] + transitions["discount"] * next_value - transitions["q"]
        priority = priority_of(td_error, config.priority_exponent).reshape(-1)
        index = state.replay_count % num_rollouts * rollout_size + jnp.arange(rollout_size)
        state = state._replace(
            replay=add_to_replay(state.replay, transitions, state.replay_count),
            tree=set_priorities(state.tree, index, priority),
            tail=jax.tree.map(lambda leaf: leaf[config.num_steps :], steps) if state.tail else (),
            replay_count=state.replay_count + 1,
        )
        return state, info

    def loss(params, batch, target):
        q = select(network.apply(params, batch["obs"]), batch["action"])
        return td_loss(q, target, batch["weight"], config.loss), q

    def learn(state, key):
        """Take gradient steps on batches drawn by priority; each step updates the priorities of its batch."""
        size = jnp.minimum(state.replay_count, num_rollouts) * rollout_size
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, key):
            params, opt_state, tree = carry
            batch = sample_replay(
                key, state.replay, tree, size, config.batch_size, config.importance_exponent
            )
            target_q = network.apply(state.target_params, batch["next_obs"])
            next_value = double_q(
                target_q, network.apply(params, batch["next_obs"]) if config.double else target_q
            )
            target = batch["return"] + jnp.where(
                batch["discount"] > 0.0, batch["discount"] * next_value, 0.0
            )
            (error, q), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, target)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            tree = set_priorities(
                tree, batch["index"], priority_of(target - q, config.priority_exponent)
            )
            params = jax.tree.map(lambda param, update: param - lr * update, params, updates)
            return (params, opt_state, tree), {"td_loss": error, "q_value": q.mean()}

        keys = jax.random.split(key, gradient_steps)
        carry = state.params, state.opt_state, state.tree
        (params, opt_state, tree), metrics = jax.lax.scan(gradient_step, carry, keys)
        state = state._replace(
            params=params, opt_state=opt_state, tree=tree, update_count=state.update_count + 1
        )
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, explore_key, learn_key = jax.random.split(state.key, 3)
        state, info = explore(state._replace(key=key), explore_key)
        state, metrics = learn(state, learn_key)
        actor, target, params, count = (
            state.actor_params,
            state.target_params,
            state.params,
            state.update_count,
        )
        actor = update_towards(
            actor, params, count, gradient_steps, config.actor_sync_interval, 1.0
        )
        target = update_towards(
            target, params, count, gradient_steps, config.target_update_interval, config.tau
        )
        return state._replace(actor_params=actor, target_params=target), metrics | episode_metrics(
            info
        )

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole training; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), None, config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, greedy; here there is no memory."""
    network = make_network(config, *make_env(config))

    def act(agent, memory, obs):
        return greedy(network.apply(agent["params"], obs)), memory

    return (lambda: ()), act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw the script's own figures at the end of `main`: none here. `runner_state` is [num_seeds, ...]."""


# --- block environment: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
@jax.ensure_compile_time_eval()  # making some environments needs concrete numbers, also inside a jit
def make_gymnax_env(name: str, params: dict):
    """`(env, env_params)` of gymnax. MODULE:NAME imports a module first, which registers its environments."""
    module, _, name = name.rpartition(":")
    importlib.import_module(module or "gymnax")
    if name not in gymnax.registered_envs:
        raise ValueError(
            f"env_name = {name}: is not known; MODULE:NAME imports a module that registers it with gymnax"
        )
    fields = vars(gymnax.make(name)[1])
    try:
        changes = {key: type(fields[key])(value) for key, value in params.items() if key in fields}
        env, env_params = gymnax.make(
            name, **{key: value for key, value in params.items() if key not in fields}
        )
    except (
        TypeError,
        ValueError,
    ) as error:  # a value of the wrong type, or a name that the constructor does not know
        raise ValueError(f"env_params = {params}: {error}") from error
    return env, env_params.replace(**changes)


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did. `info`: [num_steps, num_envs]."""
    ended, episodes = info["returned_episode"], info["returned_episode"].sum()
    return {
        "episodic_return": jnp.where(ended, info["returned_episode_returns"], 0.0).sum() / episodes,
        "episodic_length": jnp.where(ended, info["returned_episode_lengths"], 0).sum() / episodes,
        "episodes": episodes,
    }


# --- block discrete: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def make_env(config):
    """`(env, env_params)`: gymnax's interface, statistics of episodes in `info`."""
    env, env_params = make_gymnax_env(config.env_name, dict(config.env_params))
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError(
            f"env_name = {config.env_name}: must have discrete actions, as CartPole-v1 has"
        )
    return LogWrapper(env), env_params


# --- block main: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def mean_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended, NaN where none did. {name: [num_seeds, updates]} -> [num_seeds]."""
    episodes = metrics["episodes"]
    with np.errstate(invalid="ignore"):
        return np.where(episodes > 0, episodes * metrics["episodic_return"], 0.0).sum(
            axis=1
        ) / episodes.sum(axis=1)


@np.errstate(invalid="ignore")
def mean_and_margin(values):
    """The mean over the first axis, and half the width of its 95 % interval by Student's t, NaN for a single value."""
    degrees = len(values) - 1
    return values.mean(axis=0), scipy.special.stdtrit(degrees, 0.975) * values.std(
        axis=0
    ) / np.sqrt(degrees)


def save_results(config, seed, agent, metrics, run_dir: Path) -> None:
    """Write metrics [num_seeds, updates], the agents, and a picture: a line per seed, the mean with its interval."""
    script, steps = Path(__file__).stem, config.num_envs * config.num_steps
    settings = {
        key: dict(value) if isinstance(value, Mapping) else value
        for key, value in vars(config).items()
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    np.savez_compressed(run_dir / "metrics.npz", **metrics)
    agent = {name: np.asarray(leaf) for name, leaf in flatten_dict(agent, sep=".").items()}
    save_file(agent, run_dir / "agent.safetensors", {"script": script, "seed": str(seed)})
    pieces = np.array_split(
        np.arange(metrics["episodes"].shape[1]), min(100, metrics["episodes"].shape[1])
    )
    curve = np.stack(
        [mean_return({name: each[:, piece] for name, each in metrics.items()}) for piece in pieces]
    )
    timesteps = [
        getattr(config, "warmup_timesteps", 0) + (piece[-1] + 1) * steps for piece in pieces
    ]
    mean, margin = mean_and_margin(curve.T)
    axes = Figure(layout="constrained").subplots()
    axes.plot(timesteps, curve, color="tab:blue", linewidth=0.5, alpha=0.5)
    axes.plot(timesteps, mean, color="tab:blue")
    axes.fill_between(timesteps, mean - margin, mean + margin, color="tab:blue", alpha=0.25)
    axes.set(
        title=f"{script} on {config.env_name}", xlabel="environment steps", ylabel="episodic return"
    )
    axes.figure.savefig(run_dir / "learning_curve.png", dpi=150)


def main(
    config: tyro.conf.OmitArgPrefixes[tyro.conf.FlagConversionOff[Config]],
    num_seeds: int = 4,
    seed: int = 0,
    run_dir: Path | None = None,
) -> Path:
    """Train agents; write their hyperparameters, metrics, learning curve and networks.

    Args:
        config: hyperparameters. --config FILE.yaml reads them from a file, such as one of configs/; flags override it.
        num_seeds: number of agents to train at once, on the largest number of devices that divides it
        seed: seed of the random key that the agents' keys are split from
        run_dir: new directory for the results; by default a directory in runs/SCRIPT that names environment and time
    """
    name, env_name = Path(__file__).stem, config.env_name.rpartition(":")[2]
    run_dir = run_dir or Path(
        "runs", name, f"{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    try:
        if num_seeds < 1:
            raise ValueError(f"num_seeds = {num_seeds}: must be at least 1")
        keys = jax.random.split(jax.random.key(seed), num_seeds)
        init, update = map(jax.jit, make_learner(config))  # each is traced once
        run_dir.mkdir(parents=True)  # fails if it exists: no run is overwritten
    except (ValueError, TypeError, OverflowError, OSError, ImportError) as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        advice = (
            "; no run is overwritten, choose another --run-dir"
            if isinstance(error, FileExistsError)
            else ""
        )
        fail(
            f"{error}{advice} ({type(error).__name__}, {Path(place.filename).name} line {place.lineno})"
        )
    updates, steps = config.num_updates, config.num_envs * config.num_steps
    num_devices = max(n for n in range(1, jax.device_count() + 1) if num_seeds % n == 0)
    devices = f"{num_devices} of {jax.device_count()} devices"
    print(
        f"{name} on {env_name}: {num_seeds} seeds on {devices}, {updates} updates of {steps} steps"
    )
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))
    over_seeds = functools.partial(
        jax.shard_map, mesh=mesh, out_specs=PartitionSpec("seed"), check_vma=False
    )

    def start(key):
        state = init(key)
        return state, {
            name: jnp.zeros(updates, x.dtype)
            for name, x in jax.eval_shape(update, state)[1].items()
        }

    def advance(carry, first, last):  # one program for chunks of any length
        def body(i, carry):
            state, metrics = update(carry[0])
            return state, {name: carry[1][name].at[i].set(metrics[name]) for name in metrics}

        return jax.lax.fori_loop(first, last, body, carry)

    def alone(
        f, _=0
    ):  # one seed per device: `vmap` is slower, and with a seed axis each update would copy the replay
        return lambda tree, *args: jax.tree.map(
            lambda x: x[None], f(jax.tree.map(lambda x: x[0], tree), *args)
        )

    vmap = jax.vmap if num_seeds > num_devices else alone
    carry = jax.jit(over_seeds(vmap(start), in_specs=PartitionSpec("seed")))(keys)
    advance = over_seeds(
        vmap(advance, (0, None, None)), in_specs=(PartitionSpec("seed"), None, None)
    )
    advance = (
        jax.jit(advance, donate_argnums=0).lower(carry, 0, 1).compile()
    )  # before the progress bar's clock starts
    done, chunk = 0, 1
    bar = tqdm(total=updates * steps * num_seeds, unit="step", unit_scale=True, desc=name)
    with bar, contextlib.suppress(KeyboardInterrupt):  # after Ctrl-C the results so far are written
        while done < updates:
            begun, last = time.perf_counter(), min(done + chunk, updates)
            carry = advance(carry, done, last)
            returns = mean_return(
                {key: np.asarray(each)[:, done:last] for key, each in carry[1].items()}
            )
            if np.isfinite(returns).any():
                bar.set_postfix(
                    episodic_return=f"{returns[np.isfinite(returns)].mean():.4g}", refresh=False
                )
            bar.update((last - done) * steps * num_seeds)
            done, chunk = (
                last,
                max(1, round(chunk * min(10.0, 1.0 / (time.perf_counter() - begun)))),
            )  # about a second
    if not done:
        raise SystemExit("stopped before the first update was done: there are no results")
    metrics = {key: np.asarray(each)[:, :done] for key, each in carry[1].items()}
    save_results(config, seed, carry[0].agent, metrics, run_dir)
    report(config, carry[0], run_dir)
    final = mean_return({key: each[:, done * 9 // 10 :] for key, each in metrics.items()})
    finite = [
        np.isfinite(leaf).reshape(num_seeds, -1).all(axis=1)
        for leaf in jax.tree.leaves(carry[0].agent)
    ]
    diverged, ended = ~np.all(finite, axis=0), np.isfinite(final)
    if len(good := final[ended & ~diverged]):
        mean, margin = mean_and_margin(good)
        interval = (
            f" (95 % interval {mean - margin:.4g} to {mean + margin:.4g})" if len(good) > 1 else ""
        )
        print(
            f"final return {mean:.4g}{interval}, worst agent {good.min():.4g}, {len(good)} of {num_seeds} seeds"
        )
    if len(good) < num_seeds:
        print(
            f"{diverged.sum()} seeds diverged, {(~ended & ~diverged).sum()} ended no episode late in training"
        )
    print(f"results in {run_dir}")
    return run_dir


def read_flags(words) -> list[str]:
    """The command line after the flags of --config FILE, which it overrides; 5e5 becomes a whole number."""
    words = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    if "--config" in words:
        place = words.index("--config")
        given = yaml.safe_load(Path(words[place + 1]).read_text()).items()
        values = {
            name: [*value.items()] if isinstance(value, dict) else value for name, value in given
        }
        flags = [
            word
            for name, value in values.items()
            for word in (f"--{name}", *map(str, np.ravel(value)))
        ]
        words = flags + words[:place] + words[place + 2 :]
    whole = {field.name for field in dataclasses.fields(Config) if field.type is int}
    for i, flag in enumerate(words[:-1]):
        if flag.strip("-").replace("-", "_") in whole:
            with contextlib.suppress(ValueError):
                words[i + 1] = f"{float(words[i + 1]):.16g}"
    return words


def fail(error):
    sys.exit(print(f"{Path(__file__).name}: error: {error}", file=sys.stderr) or 2)


if __name__ == "__main__":
    try:
        flags = read_flags(sys.argv[1:])
    except (OSError, ValueError, LookupError, AttributeError, yaml.YAMLError) as error:
        fail(f"--config FILE: {error}")
    tyro.cli(main, args=flags, description=__doc__)
