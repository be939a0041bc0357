# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2,<0.11",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "pyyaml>=6.0",
#     "safetensors>=0.8",
#     "six>=1.17",
#     "tfp-nightly==0.26.0.dev20261027",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Proximal Policy Optimization (PPO) for discrete actions, the whole training in one jit.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347): the clipped
objective (equation 7) inside the actor-critic loss (equation 9). The advantages are generalized
advantage estimates (Schulman et al. 2016, arXiv 1506.02438, equation 16).

Differences from the paper: actor and critic are separate networks, the value loss is clipped,
advantages are normalized per minibatch, the learning rate is annealed, and the norm of the gradient
is clipped. Observations and rewards can be normalized by running statistics. An episode that its
time limit truncates is bootstrapped from the value of its last observation.

    python ppo.py --env-name CartPole-v1 --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import dataclasses
import importlib
import inspect
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

# Before JAX is imported: each core of this process is a device, and compiled programs are kept.
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(cores))
cache = os.path.expanduser(f"~/.cache/onejit/jax-{platform.node()}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
import yaml
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict
from gymnax.environments import spaces
from gymnax.wrappers import LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save
from tqdm import tqdm

# --- config: float fields may be traced, all others are static (shared) ---


def register_config(cls):
    """Make a frozen dataclass a pytree whose leaves are its float fields."""
    hints = get_type_hints(cls)
    floats = [name for name in hints if hints[name] is float]
    others = [name for name in hints if hints[name] is not float]
    return jax.tree_util.register_dataclass(cls, data_fields=floats, meta_fields=others)


# --- hyperparameters ---


@register_config
@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. The defaults are CleanRL's for classic control."""

    env_name: str = "CartPole-v1"  # gymnax environment; MODULE:NAME imports MODULE first
    # parameters of the environment: NAME VALUE ...
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    total_timesteps: int = 500_000  # environment steps per agent
    num_envs: int = 4  # environments per agent
    num_steps: int = 128  # steps per environment and update
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    clip_eps: float = 0.2  # clip range of the probability ratio
    vf_clip_eps: float = 0.2  # clip range of the change in the predicted value; inf for no clipping
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm; inf for no limit
    normalize_obs: bool = False  # normalize observations by their running mean and variance
    normalize_reward: bool = False  # divide rewards by the running std of the discounted return
    # observations are cast to this dtype and stored in it; empty keeps the environment's dtype
    buffer_dtype: Literal["", "bool", "int8", "bfloat16"] = ""
    # convolutions for images: flat has none, grid one, nature three
    torso: Literal["flat", "grid", "nature"] = "grid"
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "tanh"  # activation function

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))  # hashable

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.batch_size


# --- observations (shared) ---


def preprocess(obs, num_states: int):
    """What networks take: floats.

    Indices of a discrete space's states (`num_states` is above 0) become one-hot vectors. Bytes, of
    which images consist, are divided by 255.
    """
    if num_states:
        return jax.nn.one_hot(obs, num_states)
    if obs.dtype == jnp.uint8:
        return obs / 255.0
    return obs.astype(jnp.float32)


CONVOLUTIONS = {  # torso: (features, size, stride) of each convolution
    "flat": (),
    "grid": ((16, 3, 1),),  # Young & Tian 2019 (arXiv 1903.03176)
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
}
SMALLEST_IMAGE = {"flat": 1, "grid": 3, "nature": 36}


def convolutions(torso: str, obs_shape: tuple[int, ...]):
    """The convolutions for images [H, W, C]; none for other observations."""
    if len(obs_shape) != 3:
        if torso == "nature":
            raise ValueError(f"torso = nature: is for images, observations have shape {obs_shape}")
        return ()
    if min(obs_shape[:2]) < SMALLEST_IMAGE[torso]:
        raise ValueError(
            f"torso = {torso}: images {obs_shape} are too small; "
            "grid needs 3 x 3, nature 36 x 36, flat takes any"
        )
    return CONVOLUTIONS[torso]


def patches(x, size: int, stride: int):
    """Squares of size x size, `stride` apart: [..., H, W, C] -> [..., H', W', size * size * C].

    A dense layer on patches is a convolution, 11 times as fast as `nn.Conv` on MinAtar on CPUs.
    `stride` must divide `size`.
    """
    height = x.shape[-3] // stride
    width = x.shape[-2] // stride
    x = x[..., : height * stride, : width * stride, :]
    x = x.reshape(*x.shape[:-3], height, stride, width, stride, x.shape[-1])
    x = x.swapaxes(-4, -3)
    blocks = x.reshape(*x.shape[:-5], height, width, stride * stride * x.shape[-1])

    n = size // stride  # n x n blocks are a square
    rows = height - n + 1
    columns = width - n + 1
    shifted = [blocks[..., i : i + rows, j : j + columns, :] for i in range(n) for j in range(n)]
    return jnp.concatenate(shifted, axis=-1)


# --- networks ---


def orthogonal(scale: float):
    """Orthogonal initialization (arXiv 1312.6120), by matrix products alone.

    flax's own decomposes matrices by QR, which can hang under `vmap` on CPUs.
    """

    def newton_schulz(_, x):  # brings singular values between 0 and 1 nearer to 1
        return 1.5 * x - 0.5 * jnp.linalg.multi_dot([x, x.T, x])  # in the cheaper order

    def init(key, shape, dtype=jnp.float32):
        x = jax.random.normal(key, shape, dtype)
        x = x / jnp.linalg.norm(x)  # no singular value is above 1
        return scale * jax.lax.fori_loop(0, 50, newton_schulz, x)

    return init


class Network(nn.Module):
    """Convolutions of images, hidden layers, a linear head: [..., *obs_shape] -> [..., outputs]."""

    obs_shape: tuple[int, ...]
    num_states: int  # size of a discrete observation space; 0 for arrays
    convolutions: tuple[tuple[int, int, int], ...]  # (features, size, stride)
    hidden_sizes: tuple[int, ...]
    activation: str
    outputs: int
    head_scale: float

    @nn.compact
    def __call__(self, obs):
        activation = getattr(nn, self.activation)
        x = preprocess(obs, self.num_states)
        for features, size, stride in self.convolutions:
            x = patches(x, size, stride)
            x = activation(nn.Dense(features, kernel_init=orthogonal(math.sqrt(2)))(x))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        return nn.Dense(self.outputs, kernel_init=orthogonal(self.head_scale))(x)


class Actor(Network):
    """The policy: [..., *obs_shape] -> distribution over actions [...]."""

    def __call__(self, obs):
        return distrax.Categorical(logits=super().__call__(obs))


class Critic(Network):
    """The value of a state: [..., *obs_shape] -> [...]."""

    def __call__(self, obs):
        return super().__call__(obs).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits.

    All [T, N]. `next_values` are the values of the observations after each step, before auto-reset.
    A truncated step is bootstrapped, a terminated step is not; both cut the trace.
    Returns advantages and value targets [T, N].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    done = terminated | truncated
    decays = jnp.where(done, 0.0, gamma * gae_lambda)

    def step(next_advantage, delta_and_decay):
        delta, decay = delta_and_decay
        advantage = delta + decay * next_advantage
        return advantage, advantage

    after_the_last = jnp.zeros_like(deltas[0])
    _, advantages = jax.lax.scan(step, after_the_last, (deltas, decays), reverse=True, unroll=16)
    return advantages, advantages + values


def policy_loss(log_prob, old_log_prob, advantage, clip_eps):
    """The clipped objective (arXiv 1707.06347, equation 7), negated. All [B].

    Advantages are normalized here, within the minibatch. Also returns metrics.
    """
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
    approx_kl = (ratio - 1.0 - log_ratio).mean()  # k3 of http://joschu.net/blog/kl-approx.html
    metrics = {
        "policy_loss": loss,
        "approx_kl": approx_kl,
        "clip_fraction": (jnp.abs(ratio - 1.0) > clip_eps).mean(),
    }
    return loss, metrics


def value_loss(value, old_value, target, clip_eps):
    """Half the larger squared error: of `value`, or of `value` clipped around `old_value`. [B]."""
    clipped_value = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    error = jnp.maximum(jnp.square(value - target), jnp.square(clipped_value - target))
    return 0.5 * error.mean()


def discounted_returns(rewards, dones, last_return, gamma):
    """Discounted sum of the rewards up to each step, R = gamma R + r, from 0 in each episode.

    rewards, dones: [T, N]. last_return: [N], R before the first step.
    Returns R [T, N] and the `last_return` for the steps that follow.
    """

    def step(last_return, reward_and_done):
        reward, done = reward_and_done
        discounted_return = gamma * last_return + reward
        return jnp.where(done, 0.0, discounted_return), discounted_return

    last_return, returns = jax.lax.scan(step, last_return, (rewards, dones))
    return returns, last_return


class RunningMeanStd(NamedTuple):
    """Running mean and variance of each entry of an array."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array


def init_mean_std(shape: tuple[int, ...]) -> RunningMeanStd:
    return RunningMeanStd(mean=jnp.zeros(shape), var=jnp.ones(shape), count=jnp.asarray(1e-4))


def update_mean_std(old: RunningMeanStd, batch: jax.Array) -> RunningMeanStd:
    """Add a batch [B, *shape], by the formula of Chan, Golub and LeVeque 1979 for two samples."""
    count = old.count + batch.shape[0]
    weight = batch.shape[0] / count
    delta = batch.mean(axis=0) - old.mean
    var = (1.0 - weight) * old.var + weight * batch.var(axis=0)
    var += weight * (1.0 - weight) * jnp.square(delta)
    return RunningMeanStd(mean=old.mean + weight * delta, var=var, count=count)


def normalize(statistics: RunningMeanStd, x: jax.Array) -> jax.Array:
    """Zero mean and unit variance, clipped to 10 standard deviations."""
    return jnp.clip((x - statistics.mean) / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)


def random_order(key, size: int):
    """The numbers below `size` in random order: `jax.random.permutation`, but faster.

    It sorts one array of `random_part * size + index`, where JAX sorts keys with values: PPO on
    Pendulum-v1 takes 0.7 of the time. Where random parts are equal, the smaller index comes first.
    The larger the array, the more of them are equal.
    """
    if size > 2**16:
        return jax.random.permutation(key, size)
    index = jnp.arange(size, dtype=jnp.uint32)
    random_part = jax.random.bits(key, (size,)) % jnp.uint32((2**32 - 1) // size)
    return (jnp.sort(random_part * size + index) % size).astype(jnp.int32)


# --- training ---


class Transition(NamedTuple):
    """One step in all environments, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: jax.Array  # as the policy saw it, normalized if `normalize_obs`
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # after the step, before auto-reset; normalized like `obs`
    info: dict  # statistics of episodes


class Batch(NamedTuple):
    """What the losses take: the steps of a rollout, [num_steps * num_envs, ...]."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    obs: jax.Array  # [num_envs, *obs_shape], not normalized
    env_state: Any  # [num_envs, ...]
    obs_statistics: RunningMeanStd
    return_statistics: RunningMeanStd
    discounted_return: jax.Array  # [num_envs], of the running episodes
    key: jax.Array

    episode_fields = ("obs", "env_state", "discounted_return")  # of running episodes, for `onejit`

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params, "obs_statistics": self.obs_statistics._asdict()}


def make_networks(config: Config, env, env_params):
    space = env.observation_space(env_params)
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    if num_states and config.normalize_obs:
        raise ValueError(
            f"normalize_obs = True: must be False, {config.env_name} observes state indices"
        )
    layers = {
        "obs_shape": space.shape,
        "num_states": num_states,
        "convolutions": convolutions(config.torso, space.shape),
        "hidden_sizes": config.hidden_sizes,
        "activation": config.activation,
    }
    num_actions = env.action_space(env_params).n
    actor = Actor(**layers, outputs=num_actions, head_scale=0.01)
    critic = Critic(**layers, outputs=1, head_scale=1.0)
    return actor, critic


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`.

    `metrics` are scalars; `episodes` and `episodic_return` must be among them.
    """
    for name in ("num_envs", "num_steps", "update_epochs", "num_minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {config.batch_size}"
        )
    minibatch_size, remainder = divmod(config.batch_size, config.num_minibatches)
    if remainder or minibatch_size < 2:
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide the {config.batch_size} "
            "steps of an update, into two or more each"
        )
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)

    def learning_rate(gradient_step_count):
        """Constant within an update, linear over the training."""
        update_count = gradient_step_count // (config.update_epochs * config.num_minibatches)
        return config.lr * jnp.maximum(0.0, 1.0 - update_count / config.num_updates)

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(learning_rate if config.anneal_lr else config.lr, eps=1e-5),
    )

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        env_keys = jax.random.split(env_key, config.num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(env_keys, env_params)
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            obs=obs,
            env_state=env_state,
            obs_statistics=init_mean_std(obs.shape[1:]),
            return_statistics=init_mean_std(()),
            discounted_return=jnp.zeros(config.num_envs),
            key=key,
        )

    def normalize_obs(obs_statistics, obs):
        return normalize(obs_statistics, obs) if config.normalize_obs else obs

    def collect(state, key):
        """Act for `num_steps` steps with the current policy."""

        def step(carry, key):
            raw_obs, env_state = carry
            action_key, env_key = jax.random.split(key)
            obs = normalize_obs(state.obs_statistics, raw_obs)
            policy = actor.apply(state.params["actor"], obs)
            action, log_prob = policy.sample_and_log_prob(seed=action_key)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            raw_next_obs = info.pop("final_observation")
            transition = Transition(
                obs=obs,
                action=action,
                log_prob=log_prob,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=normalize_obs(state.obs_statistics, raw_next_obs),
                info=info,
            )
            return (obs_after_reset, env_state), (transition, raw_obs)

        carry = (state.obs, state.env_state)
        keys = jax.random.split(key, config.num_steps)
        (obs, env_state), (rollout, raw_obs) = jax.lax.scan(step, carry, keys)
        state = state._replace(obs=obs, env_state=env_state)
        if config.normalize_obs:  # after the rollout: the first few steps hardly vary
            flat_obs = raw_obs.reshape(-1, *raw_obs.shape[2:])
            obs_statistics = update_mean_std(state.obs_statistics, flat_obs)
            state = state._replace(obs_statistics=obs_statistics)
        return state, rollout

    def normalize_reward(state, rollout):
        """Divide the rewards by the standard deviation of the discounted return."""
        returns, last_return = discounted_returns(
            rollout.reward,
            rollout.terminated | rollout.truncated,
            last_return=state.discounted_return,
            gamma=config.gamma,
        )
        statistics = update_mean_std(state.return_statistics, returns.reshape(-1))
        reward = jnp.clip(rollout.reward / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)
        state = state._replace(return_statistics=statistics, discounted_return=last_return)
        return state, rollout._replace(reward=reward)

    def make_batch(params, rollout):
        """Estimate advantages and value targets, and flatten the rollout."""
        value = critic.apply(params["critic"], rollout.obs)
        # Not value[1:]: where an episode ended, the next `obs` is the start of another one.
        next_value = critic.apply(params["critic"], rollout.next_obs)
        advantage, target = gae(
            rollout.reward,
            value,
            next_value,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        batch = Batch(
            obs=rollout.obs,
            action=rollout.action,
            log_prob=rollout.log_prob,
            value=value,
            advantage=advantage,
            target=target,
        )
        return jax.tree.map(lambda x: x.reshape(config.batch_size, *x.shape[2:]), batch)

    def loss_fn(params, batch):
        """The actor-critic loss (arXiv 1707.06347, equation 9, negated)."""
        policy = actor.apply(params["actor"], batch.obs)
        value = critic.apply(params["critic"], batch.obs)
        log_prob = policy.log_prob(batch.action)
        actor_loss, metrics = policy_loss(
            log_prob, batch.log_prob, batch.advantage, config.clip_eps
        )
        critic_loss = value_loss(value, batch.value, batch.target, config.vf_clip_eps)
        entropy = policy.entropy().mean()
        loss = actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        return loss, metrics | {"value_loss": critic_loss, "entropy": entropy}

    def gradient_step(carry, minibatch):
        params, opt_state = carry
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, minibatch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), metrics

    def learn(state, batch, key):
        """`update_epochs` passes over the batch in minibatches, each pass in a new order."""

        def epoch(carry, key):
            order = random_order(key, config.batch_size)
            order = order.reshape(config.num_minibatches, minibatch_size)
            minibatches = jax.tree.map(lambda x: x[order], batch)
            return jax.lax.scan(gradient_step, carry, minibatches)

        carry = (state.params, state.opt_state)
        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, carry, keys)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state, rollout = collect(state._replace(key=key), collect_key)
        if config.normalize_reward:
            state, rollout = normalize_reward(state, rollout)
        batch = make_batch(state.params, rollout)
        state, metrics = learn(state, batch, learn_key)
        metrics["value"] = batch.value.mean()
        unexplained = (batch.target - batch.value).var() / (batch.target.var() + 1e-8)
        metrics["explained_variance"] = 1.0 - unexplained
        return state, metrics | episode_metrics(rollout.info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates].

    For use from Python. `main` runs the same `init` and `update`, in chunks: change them instead.
    """
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


# --- acting ---


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, the greedy policy."""
    actor, _ = make_networks(config, *make_env(config))

    def start():
        return ()  # no memory

    def act(agent, memory, obs):
        if config.normalize_obs:
            obs = normalize(RunningMeanStd(**agent["obs_statistics"]), obs)
        return actor.apply(agent["params"]["actor"], obs).mode(), memory

    return start, act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Figures of this script alone, drawn at the end of `main`: none."""


# --- environments of gymnax (shared) ---


TRUTH_VALUES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_truth_values(params: dict, constructor, fields: dict) -> dict:
    """`params` with truth values for words such as `off`, which are strings on the command line.

    Text stays text where the default, of the constructor or of the `fields`, is text. Where the
    default is a truth value, everything else is refused.
    """
    defaults = {p.name: p.default for p in inspect.signature(constructor).parameters.values()}
    defaults = defaults | fields
    result = {}
    for key, value in params.items():
        default = defaults.get(key)
        if not isinstance(default, str):
            value = TRUTH_VALUES.get(str(value).lower(), value)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"env_params: {key} = {value}: must be true or false")
        if isinstance(default, str) and isinstance(value, bool):
            raise ValueError(f"env_params: {key} = {value}: must be text, in quotes in YAML")
        result[key] = value
    return result


def read_field(key: str, value, default):
    """`value` for a field of an environment's parameters, in the dtype of its `default`.

    Text such as 1e3, as YAML reads it, is a number. Nothing is rounded to a whole number.
    """
    if default is None or isinstance(default, bool | str | tuple):
        return value
    is_whole = jnp.issubdtype(jnp.result_type(default), jnp.integer)
    try:
        number = np.asarray(value, float)
        fits = number.shape == np.shape(default) and not isinstance(value, bool)
        if is_whole:
            fits &= bool(np.isfinite(number).all() and (number == np.round(number)).all())
    except ValueError:
        fits = False
    if not fits:
        expected = "a whole number" if is_whole else "a number"
        raise ValueError(f"env_params: {key} = {value}: must be {expected}")
    if key == "max_steps_in_episode" and number < 1:
        raise ValueError(f"env_params: {key} = {value}: must be at least 1")
    if isinstance(default, jax.Array):
        return jnp.asarray(number, default.dtype)
    return type(default)(number)


@jax.ensure_compile_time_eval()  # making some environments needs concrete numbers, also in a jit
def make_gymnax_env(env_name: str, params: dict):
    """`(env, env_params)` of gymnax. MODULE:NAME imports MODULE, which registers environments.

    `params` are fields of the environment's parameters, or arguments of its constructor.
    """
    module, _, name = env_name.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gymnax.registered_envs:
        raise ValueError(
            f"env_name = {name}: is not registered; MODULE:NAME imports a module first"
        )
    _, defaults = gymnax.make(name)
    params = read_truth_values(params, gymnax.registration._registry[name], vars(defaults))

    changes = {}
    arguments = {}
    for key, value in params.items():
        if hasattr(defaults, key):
            changes[key] = read_field(key, value, default=getattr(defaults, key))
        else:
            arguments[key] = value
    try:
        env, env_params = gymnax.make(name, **arguments)
    except TypeError as error:
        raise ValueError(f"env_params = {params}: {error}") from error
    env_params = env_params.replace(**changes)
    limit = env_params.max_steps_in_episode
    is_default = limit == type(env_params).max_steps_in_episode
    if limit == 1 and is_default and "max_steps_in_episode" not in changes:
        raise ValueError(
            f"env_name = {name}: episodes have one step, gymnax's default; return "
            "EnvParams(max_steps_in_episode=N) from default_params, or set it by env_params"
        )
    space = env.observation_space(env_params)
    if not isinstance(space, (spaces.Box, spaces.Discrete)):
        raise ValueError(
            f"env_name = {name}: observations must be one array, or state indices; "
            f"concatenate the parts of {type(space).__name__}"
        )
    return env, env_params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did."""
    ended = info["returned_episode"]  # [num_steps, num_envs]
    episodes = ended.sum()
    returns = jnp.where(ended, info["returned_episode_returns"], 0.0).sum()
    lengths = jnp.where(ended, info["returned_episode_lengths"], 0).sum()
    return {
        "episodic_return": returns / episodes,
        "episodic_length": lengths / episodes,
        "episodes": episodes,
    }


# --- environments with discrete actions (shared) ---


class CastObservation(GymnaxWrapper):
    """Observations of another dtype, which are then acted on and stored in it."""

    def __init__(self, env, dtype: str):
        super().__init__(env)
        self.dtype = dtype

    def reset(self, key, params):
        obs, state = self._env.reset(key, params)
        return obs.astype(self.dtype), state

    def step(self, key, state, action, params):
        obs, state, reward, terminated, truncated, info = self._env.step(key, state, action, params)
        info["final_observation"] = info["final_observation"].astype(self.dtype)
        return obs.astype(self.dtype), state, reward, terminated, truncated, info


def make_env(config):
    """`(env, env_params)`: gymnax's interface, statistics of episodes in `info`."""
    env, env_params = make_gymnax_env(config.env_name, dict(config.env_params))
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError(
            f"env_name = {config.env_name}: must have discrete actions, as CartPole-v1 has"
        )
    if config.buffer_dtype:
        if not jnp.issubdtype(env.observation_space(env_params).dtype, jnp.floating):
            raise ValueError(
                f"buffer_dtype = {config.buffer_dtype}: is for observations that are floats"
            )
        env = CastObservation(env, config.buffer_dtype)
    return LogWrapper(env), env_params


# --- main (shared) ---


def mean_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended, NaN where none did. [seeds, updates] -> [seeds]."""
    episodes = metrics["episodes"]
    total = np.where(episodes > 0, episodes * metrics["episodic_return"], 0.0).sum(axis=1)
    count = episodes.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def spread_over_devices(function, num_seeds: int):
    """`function(tree, *args)` for all seeds: `tree` has leaves [seeds, ...], `args` are shared.

    The memory of `tree` is donated: do not use it afterwards.
    """
    num_devices = max(n for n in range(1, jax.device_count() + 1) if num_seeds % n == 0)
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))

    def for_one_seed(tree, *args):  # `vmap` over one seed would copy a replay in each update
        result = function(jax.tree.map(lambda x: x[0], tree), *args)
        return jax.tree.map(lambda x: x[None], result)

    def for_each_seed(tree, *args):
        return jax.vmap(lambda one: function(one, *args))(tree)

    def for_all_seeds(tree, *args):
        on_each_device = for_one_seed if num_seeds == num_devices else for_each_seed
        return jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(PartitionSpec("seed"), *[PartitionSpec()] * len(args)),
            out_specs=PartitionSpec("seed"),
            check_vma=False,
        )(tree, *args)

    return jax.jit(for_all_seeds, donate_argnums=0)


def catch_signals() -> list:
    """A list that Ctrl-C and SIGTERM are added to; a second signal ends the program at once."""
    signals = []

    def catch(number, frame):
        signals.append(number)
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)
    return signals


def train_seeds(config: Config, num_seeds: int, seed: int):
    """Train all seeds at once, with a progress bar. After Ctrl-C it returns what there is.

    Returns the runner state, with leaves [seeds, ...], and the metrics {name: [seeds, updates]}.
    """
    init, update = make_learner(config)
    update = jax.jit(update)  # traced once

    def start(key):
        state = init(key)
        _, shapes = jax.eval_shape(update, state)
        metrics = jax.tree.map(lambda x: jnp.zeros(config.num_updates, x.dtype), shapes)
        return state, metrics

    def advance(carry, first, last):
        """Do the updates from `first` to `last`. All chunks share this one program."""

        def body(i, carry):
            state, metrics = carry
            state, new = update(state)
            return state, jax.tree.map(lambda row, x: row.at[i].set(x), metrics, new)

        return jax.lax.fori_loop(first, last, body, carry)

    keys = jax.random.split(jax.random.key(seed), num_seeds)
    carry = spread_over_devices(start, num_seeds)(keys)
    advance_all = spread_over_devices(advance, num_seeds).lower(carry, 0, 1).compile()

    steps_per_update = config.num_envs * config.num_steps * num_seeds
    total = config.num_updates * steps_per_update
    progress = tqdm(total=total, unit="step", unit_scale=True, disable=None)
    signals = catch_signals()
    updates_done = 0
    chunk = 1
    with progress:
        # At least one chunk, also after an early Ctrl-C: there must be metrics to save.
        while updates_done == 0 or (updates_done < config.num_updates and not signals):
            started = time.perf_counter()
            last = min(updates_done + chunk, config.num_updates)
            carry = advance_all(carry, updates_done, last)
            new = {name: np.asarray(x)[:, updates_done:last] for name, x in carry[1].items()}
            if new["episodes"].any():
                progress.set_postfix(episodic_return=f"{np.nanmean(mean_return(new)):.4g}")
            progress.update((last - updates_done) * steps_per_update)
            # Chunks double until one takes half a second: Ctrl-C and the bar then react soon.
            if time.perf_counter() - started < 0.5:
                chunk = 2 * chunk
            updates_done = last
    state, metrics = carry
    return state, {name: np.asarray(x)[:, :updates_done] for name, x in metrics.items()}


def save_results(config: Config, seed: int, agent, metrics, run_dir: Path) -> None:
    """Write the config, the metrics, the agents and a picture with a line for each seed."""
    settings = dict(vars(config))
    if "env_params" in settings:
        settings["env_params"] = dict(config.env_params)  # not the FrozenDict
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    about = {"run": yaml.safe_dump({"script": Path(__file__).stem, "seed": seed})}
    tensors = save(flatten_dict(agent, sep="."), metadata=about)
    try:
        np.savez_compressed(run_dir / "metrics.npz", **metrics)
    finally:  # the agents are saved even if the disk has no room for the metrics
        (run_dir / "agent.safetensors").write_bytes(tensors)

    num_updates = metrics["episodes"].shape[1]
    chunks = np.array_split(np.arange(num_updates), min(100, num_updates))
    curve = [mean_return({name: x[:, chunk] for name, x in metrics.items()}) for chunk in chunks]
    steps = np.array([chunk[-1] + 1 for chunk in chunks]) * config.num_envs * config.num_steps
    axes = Figure(layout="constrained").subplots()
    axes.plot(getattr(config, "warmup_timesteps", 0) + steps, curve, linewidth=0.7)
    axes.set(title=config.env_name, xlabel="environment steps", ylabel="episodic return")
    axes.figure.savefig(run_dir / "learning_curve.png", dpi=150)


def print_final_return(agent, metrics) -> None:
    """Mean and worst return over the last tenth of training, of the seeds that are finite."""
    num_updates = metrics["episodes"].shape[1]
    final = mean_return({name: x[:, num_updates * 9 // 10 :] for name, x in metrics.items()})
    finite = np.isfinite(final)
    for x in jax.tree.leaves(agent):
        finite &= np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if finite.any():
        print(f"final return: mean {final[finite].mean():.4g}, worst {final[finite].min():.4g}")
    if not finite.all():
        print(f"{(~finite).sum()} of {len(final)} seeds diverged, or ended no episode at the end")


def main(
    config: Config = Config(), num_seeds: int = 4, seed: int = 0, run_dir: Path | None = None
) -> None:
    """Train agents; write config, metrics, learning curve and networks into a new directory.

    Args:
        config: hyperparameters. `--config FILE.yaml`, before all flags, reads them from a file
        num_seeds: agents to train, all at once, on the largest number of devices that divides it
        seed: seed of all random numbers
        run_dir: a new directory for the results; by default runs/SCRIPT/ENVIRONMENT-TIME-PROCESS
    """
    if num_seeds < 1:
        raise ValueError(f"num_seeds = {num_seeds}: must be at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed}: must be from 0 to 2^32 - 1, others repeat these")
    if run_dir is None:
        env_name = config.env_name.rpartition(":")[2]
        name = f"{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = Path("runs", Path(__file__).stem, name)
    run_dir.mkdir(parents=True, exist_ok=True)
    if any(run_dir.iterdir()):
        raise ValueError(f"run_dir = {run_dir}: is not empty, and no run is overwritten")
    state, metrics = train_seeds(config, num_seeds, seed)
    save_results(config, seed, state.agent, metrics, run_dir)
    report(config, state, run_dir)
    print_final_return(state.agent, metrics)
    print(f"results in {run_dir}")


def as_words(value) -> list[str]:
    """A value of a YAML file as words of the command line."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, (list, tuple)):
        return [str(value)]
    return [word for part in value for word in as_words(part)]


def read_flags(words: list[str]) -> list[str]:
    """The command line. `--config FILE.yaml` may come first; the flags after it override it."""
    if words[:1] == ["--config"]:
        flags = []
        for name, value in yaml.safe_load(Path(words[1]).read_text()).items():
            flags += [f"--{name}", *as_words(value)]
        words = flags + words[2:]

    def whole_number(word):
        """5e5 may stand for a whole number."""
        flag, equals, value = word.rpartition("=")
        if re.fullmatch(r"\d+(\.\d+)?e\d+", value):
            value = f"{float(value):.16g}"
        return flag + equals + value

    return [whole_number(word) for word in words]


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # MODULE:NAME may be a file here, or next to this script
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    tyro.cli(main, args=read_flags(sys.argv[1:]), config=markers, description=__doc__)
