# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9",
#     "tfp-nightly==0.26.0.dev20261027",  # for distrax, which does not ask for it
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "optax>=0.2.8", "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
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

import contextlib
import dataclasses
import importlib
import io
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
if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"  # not the one of a notebook that starts this script

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
import yaml
from flax.core import FrozenDict
from gymnax.environments import environment, spaces
from gymnax.wrappers import LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save
from tqdm import tqdm

# --- config as a pytree (shared) ---


def register_config(cls):
    """Make a frozen dataclass a pytree whose leaves are its float fields; all others are static."""
    hints = get_type_hints(cls)
    floats = [name for name in hints if hints[name] is float]
    others = [name for name in hints if hints[name] is not float]
    return jax.tree_util.register_dataclass(cls, data_fields=floats, meta_fields=others)


# --- hyperparameters ---


@register_config
@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. The defaults are CleanRL's for classic control.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "CartPole-v1"  # gymnax environment; MODULE:NAME imports MODULE first
    # parameters of the environment: NAME VALUE ...
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    total_timesteps: int = 500_000  # environment steps per agent
    num_envs: int = 4  # environments per agent
    num_steps: int = 128  # steps per environment and update
    update_epochs: int = 4  # passes over the num_envs * num_steps steps of an update
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
    # dtype of stored observations; bool and int8 are for whole numbers, empty is the environment's
    buffer_dtype: Literal["", "bool", "int8", "bfloat16"] = ""
    # convolutions of images: features, size and stride of each; stride must divide size
    convolutions: tuple[tuple[int, int, int], ...] = ((16, 3, 1),)
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "tanh"  # activation function

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))  # hashable

    @property
    def rollout_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.rollout_size


# --- networks ---


def patches(x, size: int, stride: int):
    """Squares of size x size, `stride` apart: [..., H, W, C] -> [..., H', W', size * size * C].

    A dense layer on patches is a convolution, 11 times as fast as `nn.Conv` on MinAtar on CPUs.
    """
    if size % stride or min(x.shape[-3:-1]) < size:
        raise ValueError(f"convolutions: {size} x {size}, stride {stride}, on {x.shape[-3:-1]}")
    height = x.shape[-3] // stride
    width = x.shape[-2] // stride
    # Blocks of stride x stride; what is left at the edges is cut off.
    x = x[..., : height * stride, : width * stride, :]
    x = x.reshape(*x.shape[:-3], height, stride, width, stride, x.shape[-1])
    x = x.swapaxes(-4, -3)
    blocks = x.reshape(*x.shape[:-5], height, width, stride * stride * x.shape[-1])

    n = size // stride  # a square of size x size is n x n neighbouring blocks
    rows = height - n + 1
    columns = width - n + 1
    shifted = [blocks[..., i : i + rows, j : j + columns, :] for i in range(n) for j in range(n)]
    return jnp.concatenate(shifted, axis=-1)


def orthogonal(scale: float):
    """Orthogonal initialization by matrix products: flax's QR can hang under `vmap` on CPUs."""

    def newton_schulz(_, x):  # singular values between 0 and 1 go to 1: an orthogonal matrix
        # multi_dot: x @ x.T @ x would make a matrix of [inputs, inputs]
        return 1.5 * x - 0.5 * jnp.linalg.multi_dot([x, x.T, x])

    def init(key, shape, dtype=jnp.float32):
        x = jax.random.normal(key, shape, dtype)
        x = x / jnp.linalg.norm(x)  # no singular value is above 1
        # A small one grows by half in each step: 50 steps are enough for those above 1e-7.
        return scale * jax.lax.fori_loop(0, 50, newton_schulz, x)

    return init


def preprocess(obs, space):
    """What networks take: floats. Bytes up to 255 are brightnesses, and are divided by 255."""
    is_brightness = obs.dtype == jnp.uint8 and np.asarray(space.high).max() == 255
    return obs.astype(jnp.float32) / (255.0 if is_brightness else 1.0)


def hidden_layers(obs, space, convolutions, hidden_sizes, activation: str):
    """Convolutions of images, then hidden layers: [..., *obs_shape] -> [..., features].

    The module that calls it holds the parameters.
    """
    activation = getattr(nn, activation)
    batch_shape = obs.shape[: obs.ndim - len(space.shape)]
    if isinstance(space, spaces.Discrete):
        x = jax.nn.one_hot(obs, space.n)
    else:
        x = preprocess(obs, space)
    if len(space.shape) == 3:
        for features, size, stride in convolutions:
            x = patches(x, size, stride)
            x = activation(nn.Dense(features, kernel_init=orthogonal(math.sqrt(2)))(x))
    x = x.reshape(*batch_shape, -1)
    for size in hidden_sizes:
        x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
    return x


class Actor(nn.Module):
    """The policy: [..., *obs_shape] -> distribution over actions [...]."""

    obs_space: Any
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs, action_mask=None):
        x = hidden_layers(
            obs, self.obs_space, self.convolutions, self.hidden_sizes, self.activation
        )
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        if action_mask is not None:  # invalid actions get a probability of 0
            if action_mask.dtype != bool or action_mask.shape != logits.shape:
                raise ValueError(
                    f"action_mask: has dtype {action_mask.dtype} and shape {action_mask.shape}, "
                    f"but must be bool {logits.shape}, true for valid actions; convert numbers by "
                    "mask > 0"
                )
            logits = jnp.where(action_mask, logits, jnp.finfo(logits.dtype).min)
        return distrax.Categorical(logits=logits)


class Critic(nn.Module):
    """The value of a state: [..., *obs_shape] -> [...]."""

    obs_space: Any
    convolutions: tuple[tuple[int, int, int], ...]
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs):
        x = hidden_layers(
            obs, self.obs_space, self.convolutions, self.hidden_sizes, self.activation
        )
        return nn.Dense(1, kernel_init=orthogonal(1.0))(x).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits.

    All [T, N]. `next_values` are the values of the observations after each step, before auto-reset.
    A truncated step is bootstrapped, a terminated step is not; both cut the trace.
    Returns advantages and value targets [T, N].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decays = jnp.where(terminated | truncated, 0.0, gamma * gae_lambda)

    def step(next_advantage, delta_and_decay):
        delta, decay = delta_and_decay
        advantage = delta + decay * next_advantage
        return advantage, advantage

    after_the_last = jnp.zeros_like(deltas[0])
    # `unroll` is for speed: 8 seeds of ppo.py train 1.1 times as fast
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
    metrics = {
        "policy_loss": loss,
        "approx_kl": (ratio - 1.0 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "clip_fraction": (jnp.abs(ratio - 1.0) > clip_eps).mean(),
    }
    return loss, metrics


def value_loss(value, old_value, target, clip_eps):
    """Half the mean of the larger squared error: of `value`, or of it clipped near `old_value`."""
    clipped_value = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    error = jnp.maximum(jnp.square(value - target), jnp.square(clipped_value - target))
    return 0.5 * error.mean()


class RunningMeanStd(NamedTuple):
    """Running mean and variance of each entry of an array."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array  # at first nearly 0, so that the first batch replaces mean and var


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


# --- training ---


class Transition(NamedTuple):
    """One step in all environments, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: jax.Array  # as the networks see it, normalized if `normalize_obs`
    action_mask: Any  # [num_envs, num_actions], true for valid actions, or None
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # after the step, before auto-reset; normalized like `obs`
    raw_obs: jax.Array  # as the environment gave it
    discounted_return: jax.Array  # of the episode so far
    info: dict  # statistics of episodes


class Batch(NamedTuple):
    """A rollout with its steps in one axis, [num_steps * num_envs, ...]; or a minibatch."""

    steps: Transition
    value: jax.Array  # of `obs`, before this update
    advantage: jax.Array
    target: jax.Array  # of the value


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    obs: Any  # [num_envs, *obs_shape], not normalized; with the action mask, if there is one
    env_state: Any  # [num_envs, ...]
    obs_statistics: RunningMeanStd
    return_statistics: RunningMeanStd
    discounted_return: jax.Array  # [num_envs], of the running episodes: R = gamma R + r
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params, "obs_statistics": self.obs_statistics._asdict()}


def split_mask(obs):
    """`(obs, action_mask)` of an environment's observation. Without a mask it is None."""
    if hasattr(obs, "shape"):
        return obs, None
    if not hasattr(obs, "action_mask"):
        raise ValueError(f"obs: {type(obs).__name__} is no array, and has no `obs` and action_mask")
    return obs.obs, obs.action_mask


def make_networks(config: Config, env, env_params):
    with jax.ensure_compile_time_eval():  # its bounds stay concrete numbers, also inside a jit
        space = env.observation_space(env_params)
    is_float = jnp.issubdtype(space.dtype, jnp.floating)
    if config.buffer_dtype and (config.normalize_obs or not is_float):
        raise ValueError(
            f"buffer_dtype = {config.buffer_dtype}: is for floats that are not normalized"
        )
    if config.normalize_obs and isinstance(space, spaces.Discrete):
        raise ValueError(
            f"normalize_obs = True: must be False, {config.env_name} observes state indices"
        )
    num_actions = env.action_space(env_params).n
    layers = (config.convolutions, config.hidden_sizes, config.activation)
    actor = Actor(space, num_actions, *layers)
    critic = Critic(space, *layers)
    return actor, critic


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update adds {config.rollout_size}"
        )
    for name in ("update_epochs", "num_minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    minibatch_size, remainder = divmod(config.rollout_size, config.num_minibatches)
    if remainder or minibatch_size < 2:  # one advantage, normalized, is 0
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide the {config.rollout_size} "
            "steps of an update, into two or more each"
        )
    env, env_params = make_env(config)
    reset_env = jax.vmap(env.reset, in_axes=(0, None))
    step_env = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // (config.update_epochs * config.num_minibatches))

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(learning_rate if config.anneal_lr else config.lr, eps=1e-5),  # OpenAI's eps
    )

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        env_obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        obs, _ = split_mask(env_obs)
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            obs=env_obs,
            env_state=env_state,
            obs_statistics=init_mean_std(obs.shape[1:]),
            return_statistics=init_mean_std(()),
            discounted_return=jnp.zeros(config.num_envs),
            key=key,
        )

    def collect(state, key):
        """Act for `num_steps` steps with the current policy."""

        def as_seen(obs):
            obs = normalize(state.obs_statistics, obs) if config.normalize_obs else obs
            return obs.astype(config.buffer_dtype or obs.dtype)

        def step(carry, key):
            env_obs, env_state, discounted_return = carry
            action_key, env_key = jax.random.split(key)
            raw_obs, action_mask = split_mask(env_obs)
            obs = as_seen(raw_obs)
            policy = actor.apply(state.params["actor"], obs, action_mask)
            action, log_prob = policy.sample_and_log_prob(seed=action_key)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            discounted_return = config.gamma * discounted_return + reward
            raw_next_obs, _ = split_mask(info.pop("final_observation"))  # before auto-reset
            transition = Transition(
                obs=obs,
                action_mask=action_mask,
                action=action,
                log_prob=log_prob,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=as_seen(raw_next_obs),
                raw_obs=raw_obs,
                discounted_return=discounted_return,
                info=info,
            )
            discounted_return = jnp.where(terminated | truncated, 0.0, discounted_return)
            return (obs_after_reset, env_state, discounted_return), transition

        carry = (state.obs, state.env_state, state.discounted_return)
        keys = jax.random.split(key, config.num_steps)
        (obs, env_state, discounted_return), rollout = jax.lax.scan(step, carry, keys)
        state = state._replace(obs=obs, env_state=env_state, discounted_return=discounted_return)
        return state, rollout

    def update_statistics(state, rollout):
        """Once per rollout, not per step: the variance of the first few steps is too small."""
        if config.normalize_obs:
            raw_obs = rollout.raw_obs.reshape(config.rollout_size, *rollout.raw_obs.shape[2:])
            obs_statistics = update_mean_std(state.obs_statistics, raw_obs)
            state = state._replace(obs_statistics=obs_statistics)
        if config.normalize_reward:
            returns = rollout.discounted_return.reshape(config.rollout_size)
            return_statistics = update_mean_std(state.return_statistics, returns)
            state = state._replace(return_statistics=return_statistics)
        return state

    def make_batch(state, rollout):
        """Values, advantages and value targets of the rollout."""
        reward = rollout.reward
        if config.normalize_reward:  # divide by the standard deviation of the discounted return
            reward = reward / jnp.sqrt(state.return_statistics.var + 1e-8)
            reward = jnp.clip(reward, -10.0, 10.0)
        value = critic.apply(state.params["critic"], rollout.obs)  # of all steps at once
        # Not value[1:]: where an episode ended, the next `obs` is the start of another one.
        next_value = critic.apply(state.params["critic"], rollout.next_obs)
        advantage, target = gae(
            reward,
            value,
            next_value,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        batch = Batch(steps=rollout, value=value, advantage=advantage, target=target)
        return jax.tree.map(lambda x: x.reshape(config.rollout_size, *x.shape[2:]), batch)

    def loss_fn(params, minibatch):
        """The actor-critic loss (arXiv 1707.06347, equation 9, negated)."""
        steps = minibatch.steps
        policy = actor.apply(params["actor"], steps.obs, steps.action_mask)
        value = critic.apply(params["critic"], steps.obs)
        log_prob = policy.log_prob(steps.action)
        actor_loss, metrics = policy_loss(
            log_prob, steps.log_prob, minibatch.advantage, clip_eps=config.clip_eps
        )
        critic_loss = value_loss(value, minibatch.value, minibatch.target, config.vf_clip_eps)
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
            # a random order; `jax.random.permutation` takes longer
            order = jax.random.bits(key, (config.rollout_size,)).argsort()
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
        state = update_statistics(state, rollout)
        batch = make_batch(state, rollout)
        state, metrics = learn(state, batch, learn_key)
        error = batch.target - batch.value
        metrics["value"] = batch.value.mean()
        metrics["explained_variance"] = 1.0 - error.var() / (batch.target.var() + 1e-8)
        return state, metrics | episode_metrics(rollout.info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`act(agent, obs) -> action`, the greedy policy."""
    actor, _ = make_networks(config, *make_env(config))

    def act(agent, obs):
        obs, action_mask = split_mask(obs)
        if config.normalize_obs:
            obs = normalize(RunningMeanStd(**agent["obs_statistics"]), obs)
        obs = obs.astype(config.buffer_dtype or obs.dtype)  # as the rollout holds them
        return actor.apply(agent["params"]["actor"], obs, action_mask).mode()

    return act


# --- environments of gymnax (shared) ---


class StandardStep(GymnaxWrapper):
    """Casts rewards and ends, which environments may return in any dtype, and of shape [1]."""

    def step(self, key, state, action, params):
        obs, state, reward, terminated, truncated, info = self._env.step(key, state, action, params)
        reward = jnp.asarray(reward, jnp.float32).reshape(())
        terminated = jnp.asarray(terminated, bool).reshape(())
        truncated = jnp.asarray(truncated, bool).reshape(())
        return obs, state, reward, terminated, truncated, info


class LogEpisodes(LogWrapper):
    """Statistics of episodes in `info`.

    gymnax puts the observation before auto-reset into `final_observation` in each step. Between
    ends it is replaced by `obs`, so that a wrapper inside may transform `obs` alone. At an end it
    stays as the wrapper left it.
    """

    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, truncated, info = super().step(key, state, action, params)
        done = terminated | truncated
        info["final_observation"] = jax.tree.map(
            lambda final, new: jax.lax.select(done, final, new), info["final_observation"], obs
        )
        return obs, state, reward, terminated, truncated, info


@jax.ensure_compile_time_eval()  # making some environments needs concrete numbers, also in a jit
def make_gymnax_env(name: str, params: Mapping, make=gymnax.make):
    """`(env, env_params)` of gymnax. MODULE:NAME imports MODULE, which registers environments.

    `params` are fields of the environment's parameters, or arguments of its constructor.
    """
    module, _, short_name = name.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gymnax.registered_envs:
        name = short_name  # modules may register MODULE:NAME, or NAME alone
    env, env_params = make(name)
    is_of_gymnax = type(env).__module__.startswith("gymnax.") and env.name == name
    if is_of_gymnax and module.partition(".")[0] not in ("", "gymnax"):
        raise ValueError(f"env_name = {module}:{name}: {module} has none, only gymnax has {name}")
    fields = {}
    arguments = {}
    for key, value in params.items():
        if isinstance(value, str) and value.lower() in ("true", "false", "on", "off", "yes", "no"):
            raise ValueError(f"env_params: {key} = {value}: write True or False")
        if not hasattr(env_params, key):
            arguments[key] = value
        elif isinstance(getattr(env_params, key), float):
            fields[key] = float(value)  # `--env-params NAME 1` is a whole number
        else:
            fields[key] = value
    if arguments:
        env, env_params = make(name, **arguments)
    env_params = env_params.replace(**fields)

    limit = env_params.max_steps_in_episode
    # A class that sets no limit inherits gymnax's own Field object, whose default is 1.
    (inherited,) = dataclasses.fields(environment.EnvParams)
    is_inherited = inherited in dataclasses.fields(env_params) and inherited.name not in fields
    if limit < 1 or (limit == 1 and is_inherited):
        raise ValueError(
            f"env_params: max_steps_in_episode = {limit}: must be at least 1; set it here, or in "
            "the default_params of the environment"
        )
    return StandardStep(env), env_params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did."""
    ended = info["returned_episode"]  # [num_steps, num_envs]
    return {
        "episodic_return": info["returned_episode_returns"].mean(where=ended),
        "episodic_length": info["returned_episode_lengths"].mean(where=ended),
        "episodes": ended.sum(),
    }


# --- environments with discrete actions (shared) ---


def make_env(config):
    """`(env, env_params)`: gymnax's interface, statistics of episodes in `info`."""
    env, env_params = make_gymnax_env(config.env_name, config.env_params)
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError(f"env_name = {config.env_name}: must have discrete actions")
    return LogEpisodes(env), env_params


# --- main (shared) ---


def mean_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended, NaN where none did. [seeds, updates] -> [seeds]."""
    episodes = metrics["episodes"]
    total = np.where(episodes > 0, episodes * metrics["episodic_return"], 0.0).sum(axis=1)
    count = episodes.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def final_return(agent, metrics, num_updates: int) -> np.ndarray:
    """Mean return of the episodes in the last updates. [seeds], NaN if diverged or without any.

    The last updates are a tenth of `num_updates`, the number that was planned. If no episode ended
    in them, the last update in which one ended counts alone.
    """
    episodes = metrics["episodes"]
    index = np.arange(episodes.shape[1])
    last = np.where(episodes > 0, index, 0).max(axis=1, keepdims=True)
    first = len(index) - math.ceil(num_updates / 10)
    counted = index >= np.minimum(last, first)
    final = mean_return(metrics | {"episodes": counted * episodes})
    for x in jax.tree.leaves(agent):  # a diverged agent may still act, and earn a return
        final[np.isnan(x).any(axis=tuple(range(1, x.ndim)))] = np.nan
    return final


def spread_over_devices(function, num_seeds: int):
    """`function(tree, count)` for all seeds, on as many devices as divide their number evenly.

    `tree` has leaves [seeds, ...]. Its memory is donated: do not use it afterwards.
    """
    num_devices = max(n for n in range(1, jax.device_count() + 1) if num_seeds % n == 0)
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("seed",))
    seeds = PartitionSpec("seed")

    @jax.shard_map(mesh=mesh, in_specs=(seeds, PartitionSpec()), out_specs=seeds, check_vma=False)
    def on_all_devices(tree, count):
        if num_seeds > num_devices:
            return jax.vmap(function, in_axes=(0, None))(tree, count)
        # One seed on each device: on CPUs `vmap` would copy a large state in each update.
        result = function(jax.tree.map(lambda x: x[0], tree), count)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return jax.jit(on_all_devices, donate_argnums=0)


@contextlib.contextmanager
def catch_signals():
    """A list that Ctrl-C and SIGTERM are added to. A second signal ends the program at once."""
    caught = []
    handlers = {}

    def catch(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_in_chunks(config: Config, learner, num_seeds: int, seed: int):
    """Train all seeds at once, in at most 200 chunks of updates.

    After each chunk it yields the runner state, leaves [seeds, ...], whose memory the next chunk
    uses again, and the metrics of the chunk, {name: [seeds, updates]}.
    """
    init, update = learner
    update = jax.jit(update)  # traced once
    length = math.ceil(config.num_updates / 200)

    def train_chunk(state, count):
        """`count` updates; the metrics are [length], so that one program does all chunks."""

        def body(i, carry):
            state, metrics = carry
            state, new = update(state)
            return state, jax.tree.map(lambda row, x: row.at[i].set(x), metrics, new)

        _, shapes = jax.eval_shape(update, state)
        if "episodes" not in shapes:
            raise ValueError("update: its metrics lack `episodes`, which `episode_metrics` returns")
        metrics = jax.tree.map(lambda x: jnp.zeros(length, x.dtype), shapes)
        return jax.lax.fori_loop(0, count, body, (state, metrics))

    keys = jax.random.split(jax.random.key(seed), num_seeds)
    state = spread_over_devices(lambda key, _: init(key), num_seeds)(keys, 0)
    train_chunk = spread_over_devices(train_chunk, num_seeds)
    for first in range(0, config.num_updates, length):
        count = min(length, config.num_updates - first)
        state, metrics = train_chunk(state, count)
        while not metrics["episodes"].is_ready():  # signals are handled between lines of Python
            time.sleep(0.001)
        yield state, {name: np.asarray(x)[:, :count] for name, x in metrics.items()}


def as_yaml(config: Config) -> str:
    """The text of config.yaml, in which numbers of NumPy and JAX are Python's."""
    settings = {}
    for name, value in vars(config).items():
        value = dict(value) if name == "env_params" else value  # not the FrozenDict
        settings[name] = jax.tree.map(lambda x: x.item() if hasattr(x, "item") else x, value)
    return yaml.safe_dump(settings, sort_keys=False)


def save_results(settings: str, seed: int, script: bytes, agent, metrics, run_dir: Path) -> None:
    """Write config, metrics, agents and the script."""
    (run_dir / "config.yaml").write_text(settings)
    try:
        np.savez_compressed(run_dir / "metrics.npz", **metrics)
    finally:  # the agents are saved even if the metrics cannot be
        about = {"run": yaml.safe_dump({"script": Path(__file__).stem, "seed": int(seed)})}
        tensors = {}
        for path, x in jax.tree_util.tree_leaves_with_path(agent):
            tensors[jax.tree_util.keystr(path, simple=True, separator=".")] = x
        (run_dir / "agent.safetensors").write_bytes(save(tensors, metadata=about))
    copy = run_dir / Path(__file__).name
    if not copy.exists():  # the results may lie next to the script itself
        copy.write_bytes(script)


def draw_learning_curve(config: Config, metrics, run_dir: Path) -> None:
    """The return in each hundredth of the training: all seeds, mean and two standard errors."""
    num_updates = metrics["episodes"].shape[1]
    chunks = np.array_split(np.arange(num_updates), min(100, num_updates))
    curve = [mean_return({name: x[:, chunk] for name, x in metrics.items()}) for chunk in chunks]
    curve = np.ma.masked_invalid(curve)  # [points, seeds]
    ended = curve.count(axis=1) > 0  # lines go on over points where no episode ended
    curve = curve[ended]
    mean = curve.mean(axis=1)
    error = curve.std(axis=1, ddof=1) / np.sqrt(curve.count(axis=1))
    steps = np.array([chunk[-1] + 1 for chunk in chunks]) * config.num_envs * config.num_steps
    steps = steps[ended] + getattr(config, "warmup_timesteps", 0)
    axes = Figure(layout="constrained").subplots()
    axes.plot(steps, curve, color="gray", linewidth=0.5, alpha=0.3, zorder=0)
    axes.fill_between(steps, mean - 2 * error, mean + 2 * error, color="C0", alpha=0.3)
    axes.plot(steps, mean, color="C0", linewidth=2)
    title = f"{config.env_name}, mean of {curve.shape[1]} seeds"
    axes.set(title=title, xlabel="environment steps", ylabel="episodic return")
    axes.figure.savefig(run_dir / "learning_curve.png", dpi=150)


def main(
    config: Config = Config(), num_seeds: int = 4, seed: int = 0, run_dir: Path | None = None
) -> None:
    """Train agents; write config, metrics, learning curve and networks into a new directory.

    Args:
        config: hyperparameters. `--config FILE.yaml` reads them from a file, and flags win
        num_seeds: agents to train, all at once, spread over the devices
        seed: seed of all random numbers
        run_dir: a new directory for the results; by default runs/SCRIPT/ENVIRONMENT-TIME-RANDOM
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed}: must be from 0 to 2^32 - 1, others repeat these")
    if num_seeds < 1:
        raise ValueError(f"num_seeds = {num_seeds}: must be at least 1")

    settings = as_yaml(config)
    script = Path(__file__).read_bytes()  # as it trains, also if it is edited meanwhile
    learner = make_learner(config)  # raises its errors before anything is written
    if run_dir is None:
        env_name = config.env_name.rpartition(":")[2]
        name = f"{env_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        run_dir = Path("runs", Path(__file__).stem, name)
    run_dir = Path(run_dir).expanduser()
    if (run_dir / "config.yaml").exists():
        raise FileExistsError(f"run_dir = {run_dir}: has the results of another run")
    run_dir.mkdir(parents=True, exist_ok=True)

    steps_per_update = config.num_envs * config.num_steps * num_seeds
    total = config.num_updates * steps_per_update
    is_terminal = sys.stderr.isatty()
    bar_file = sys.stderr if is_terminal else io.StringIO()
    printed = time.monotonic()
    chunks = []
    with (
        tqdm(total=total, unit="step", unit_scale=True, file=bar_file) as progress,
        catch_signals() as signals,
    ):
        for state, metrics in train_in_chunks(config, learner, num_seeds, seed):
            chunks.append(metrics)
            progress.update(metrics["episodes"].shape[1] * steps_per_update)
            if metrics["episodes"].any():
                progress.set_postfix(episodic_return=np.nanmean(mean_return(metrics)))
            if not (is_terminal or progress.disable) and time.monotonic() - printed > 60:
                print(progress, flush=True)
                printed = time.monotonic()
            if signals:
                break

    metrics = {name: np.concatenate([x[name] for x in chunks], axis=1) for name in chunks[0]}
    save_results(settings, seed, script, state.agent, metrics, run_dir)
    final = final_return(state.agent, metrics, config.num_updates)
    lost = np.isnan(final).sum()
    if lost < num_seeds:
        print(f"training return: mean {np.nanmean(final):.4g}, worst agent {np.nanmin(final):.4g}")
    if lost:
        print(f"{lost} of {num_seeds} seeds diverged, or ended no episode")
    num_updates = metrics["episodes"].shape[1]
    if num_updates < config.num_updates:
        print(f"stopped after {num_updates} of {config.num_updates} updates")

    matplotlib.rcdefaults()  # a user's style may need fonts or LaTeX that this machine lacks
    if report := globals().get("report"):  # a script may define figures of its own
        report(config, state, run_dir)
    draw_learning_curve(config, metrics, run_dir)
    print(f"learning curve: {run_dir / 'learning_curve.png'}")
    print(f"results in {run_dir}")


def read_flags(args: list[str]) -> list[str]:
    """The command line. All flags override what stands in `--config FILE.yaml`."""
    if "--config" in args:
        at = args.index("--config")
        flags = []
        for name, value in yaml.safe_load(Path(args[at + 1]).read_text()).items():
            if isinstance(value, dict):
                value = list(value.items())
            flags += [f"--{name}", *map(str, jax.tree.leaves(value))]
        args = flags + args[:at] + args[at + 2 :]

    def write_out(match):
        return f"{match[1]}{float(match[2]):.16g}"

    # 5e5 may stand for a whole number, also in --total-timesteps=5e5
    return [re.sub(r"(^|=)(\d+(\.\d+)?e\+?\d+)$", write_out, arg) for arg in args]


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # MODULE:NAME may be a file here, or next to this script
    sys.stdout.reconfigure(errors="replace")  # names of folders may have any letters
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    tyro.cli(main, args=read_flags(sys.argv[1:]), config=markers, description=__doc__)
