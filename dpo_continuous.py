# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2",
#     "distrax>=0.1.9",
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
#     "tfp-nightly==0.26.0.dev20261027",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Discovered Policy Optimization for continuous actions, the whole training in one jit.

Lu et al. 2022, "Discovered Policy Optimisation" (arXiv 2210.05639): a drift, which penalizes changes of the policy,
replaces PPO's clip. It is the closed form of a drift that evolution had found. `diff ppo_continuous.py
dpo_continuous.py` shows the algorithm. Advantages: Schulman et al. 2016 (arXiv 1506.02438), equation 16.

Differences from the paper, as in ppo_continuous.py: the value loss is clipped, the learning rate is annealed, and an
episode that its time limit truncates is bootstrapped from the value of its last observation.

    python dpo_continuous.py --env-name hopper --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import math
import os
import platform
import sys
import time
import traceback
import warnings
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

import distrax
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
from flax.struct import dataclass as pytree
from flax.traverse_util import flatten_dict
from gymnax.environments import spaces
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save_file
from tqdm import tqdm

with contextlib.redirect_stdout(io.StringIO()):  # brax prints which optional packages it lacks
    import brax.envs


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
        "hopper"  # brax or gymnax environment with continuous actions; MODULE:NAME imports MODULE
    )
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # parameters of the environment: NAME VALUE ...
    total_timesteps: int = 1_000_000  # environment steps per agent
    num_envs: int = 64  # environments per agent
    num_steps: int = 64  # steps per environment and update
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 16  # gradient steps per pass
    lr: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    dpo_alpha: float = 2.0  # scale of the drift where the advantage is positive
    dpo_beta: float = 0.6  # scale of the drift where the advantage is negative
    vf_clip_eps: float = 0.2  # clip range of the change in the predicted value; inf for no clipping
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm; 0 for no limit
    normalize_obs: bool = True  # normalize observations by the agent's running mean and variance
    normalize_reward: bool = (
        True  # divide rewards by the running standard deviation of the discounted return
    )
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "tanh"  # activation function of the hidden layers
    )
    log_std_init: float = (
        0.0  # initial log of the policy's standard deviation; actions lie between -1 and 1
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


# --- block orthogonal: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def orthogonal(scale: float):
    """Orthogonal initialization (arXiv 1312.6120) by matrix products alone: flax's QR can hang under `vmap` on CPUs."""

    def init(key, shape, dtype=jnp.float32):
        x = jax.random.normal(key, shape, dtype)
        x = x / jnp.linalg.norm(x)
        # Newton-Schulz; multi_dot begins with the smaller of x @ x.T and x.T @ x.
        return scale * jax.lax.fori_loop(
            0, 50, lambda _, x: 1.5 * x - 0.5 * jnp.linalg.multi_dot([x, x.T, x]), x
        )

    return init


# --- networks ---


class Mlp(nn.Module):
    """Hidden layers and a linear head, with orthogonal initialization. [..., features] -> [..., outputs]."""

    hidden_sizes: tuple[int, ...]
    outputs: int
    activation: str
    head_scale: float

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32)
        for size in self.hidden_sizes:
            x = nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x)
            x = getattr(nn, self.activation)(x)
        return nn.Dense(self.outputs, kernel_init=orthogonal(self.head_scale))(x)


class Actor(nn.Module):
    """Gaussian policy whose standard deviation does not depend on the state."""

    action_dim: int
    hidden_sizes: tuple[int, ...]
    activation: str
    log_std_init: float

    @nn.compact
    def __call__(self, obs):  # [..., obs_dim] -> distribution over [..., action_dim]
        mean = Mlp(self.hidden_sizes, self.action_dim, self.activation, 0.01)(obs)
        log_std = self.param(
            "log_std", nn.initializers.constant(self.log_std_init), (self.action_dim,), jnp.float32
        )
        return distrax.MultivariateNormalDiag(mean, jnp.broadcast_to(jnp.exp(log_std), mean.shape))


class Critic(nn.Module):
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs):  # [..., obs_dim] -> [...]
        return Mlp(self.hidden_sizes, 1, self.activation, 1.0)(obs).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits. All [T, N].

    `next_values` are the values of the observations after each step, before auto-reset. A truncated step is
    bootstrapped, a terminated step is not; both cut the trace. Returns advantages and value targets [T, N].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decays = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def step(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(
        step, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True, unroll=16
    )
    return advantages, advantages + values


def drift(log_ratio, advantage, alpha, beta):
    """The penalty on a change of the policy (arXiv 2210.05639, the definition of DPO). It is not negative. At a
    ratio of 1 it and its gradient are 0. All [B]; advantages are normalized.

    Only a change that gains is penalized. With a positive advantage the gain minus the drift levels off at alpha. With
    a negative advantage it reaches a maximum and falls again, because a log ratio has no bound.
    """
    gain = jnp.expm1(log_ratio) * advantage  # (ratio - 1) A
    positive = nn.relu(gain - alpha * jnp.tanh(gain / alpha))
    log_gain = log_ratio * advantage
    negative = nn.relu(log_gain - beta * jnp.tanh(log_gain / beta))
    return jnp.where(advantage >= 0.0, positive, negative)


def policy_loss(log_prob, old_log_prob, advantage, alpha, beta):
    """The objective minus the drift, negated; advantages are normalized here. All [B]."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    penalty = drift(log_ratio, advantage, alpha, beta)
    metrics = {
        "approx_kl": (
            ratio - 1.0 - log_ratio
        ).mean(),  # the k3 estimator of http://joschu.net/blog/kl-approx.html
        "drift": penalty.mean(),
    }
    return -(ratio * advantage - penalty).mean(), metrics


def value_loss(value, old_value, target, clip_eps):
    """Half the mean of the larger squared error: of `value`, or of `value` clipped around `old_value`. All [B]."""
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()


def discounted_returns(rewards, dones, last_return, gamma):
    """Discounted sum of the rewards up to each step, R = gamma R + r, reset after the end of an episode.

    rewards, dones: [T, N]. last_return: [N], R before the first step, 0 at the start of an episode.
    Returns R [T, N] and the `last_return` for the steps that follow.
    """

    def step(carry, transition):
        reward, done = transition
        discounted = gamma * carry + reward
        return jnp.where(done, 0.0, discounted), discounted

    last_return, returns = jax.lax.scan(step, last_return, (rewards, dones))
    return returns, last_return


class RunningMeanStd(NamedTuple):
    """Running mean and variance of each entry of an array."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array


def init_mean_std(shape: tuple[int, ...]) -> RunningMeanStd:
    return RunningMeanStd(jnp.zeros(shape), jnp.ones(shape), jnp.asarray(1e-4))


def update_mean_std(old: RunningMeanStd, batch: jax.Array) -> RunningMeanStd:
    """Add a batch [B, *shape] to the statistics, by the pairwise formula of Chan, Golub and LeVeque 1979."""
    count = old.count + batch.shape[0]
    delta, share = batch.mean(axis=0) - old.mean, batch.shape[0] / count
    var = (
        old.var * (1.0 - share)
        + batch.var(axis=0) * share
        + jnp.square(delta) * share * (1.0 - share)
    )
    return RunningMeanStd(old.mean + delta * share, var, count)


def normalize(statistics: RunningMeanStd, x: jax.Array) -> jax.Array:
    """Zero mean, unit variance, clipped to 10 standard deviations."""
    return jnp.clip((x - statistics.mean) / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)


def random_order(key, size: int):
    """0 to `size` - 1 in random order, by one sort of one array: much faster on CPUs than `jax.random.permutation`."""
    index = jnp.arange(size, dtype=jnp.uint32)
    high = jax.random.bits(key, (size,)) % jnp.uint32(
        (2**32 - 1) // size
    )  # sort key: random high part, low part index
    return (jnp.sort(high * size + index) % size).astype(jnp.int32)


# --- training ---


class Transition(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array  # as the policy saw it, normalized
    policy: tuple  # mean and standard deviation of the action
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset; normalized like `obs`
    info: dict  # statistics of episodes


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    update_count: jax.Array  # updates so far
    obs: jax.Array  # [num_envs, obs_dim]
    env_state: Any  # [num_envs, ...]
    obs_statistics: RunningMeanStd
    return_statistics: RunningMeanStd
    discounted_return: jax.Array  # [num_envs]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params, "obs_statistics": self.obs_statistics._asdict()}


def make_networks(config: Config, env, env_params):
    action_dim = math.prod(env.action_space(env_params).shape)
    actor = Actor(action_dim, config.hidden_sizes, config.activation, config.log_std_init)
    return actor, Critic(config.hidden_sizes, config.activation)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    batch_size = config.num_envs * config.num_steps
    if min(config.num_envs, config.num_steps, config.update_epochs, config.num_minibatches) < 1:
        raise ValueError(
            "num_envs, num_steps, update_epochs, num_minibatches: must all be at least 1"
        )
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {batch_size}"
        )
    if batch_size % config.num_minibatches or batch_size == config.num_minibatches:
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide {batch_size}, into two or more each"
        )
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)
    clip = optax.clip_by_global_norm(
        jnp.where(config.max_grad_norm > 0, config.max_grad_norm, jnp.inf)
    )
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            update_count=jnp.zeros((), jnp.int32),
            obs=obs,
            env_state=env_state,
            obs_statistics=init_mean_std(obs.shape[1:]),
            return_statistics=init_mean_std(()),
            discounted_return=jnp.zeros(config.num_envs),
            key=key,
        )

    def collect(state, key):
        """Act for `num_steps` steps with the current policy."""

        def step(carry, randomness):
            obs, env_state, statistics = carry
            noise, env_keys = randomness
            statistics = update_mean_std(statistics, obs) if config.normalize_obs else statistics
            seen = normalize(statistics, obs) if config.normalize_obs else obs
            policy = actor.apply(state.params["actor"], seen)
            action = policy.loc + policy.scale_diag * noise
            obs, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")
            return (obs, env_state, statistics), Transition(
                obs=seen,
                policy=(policy.loc, policy.scale_diag),
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=normalize(statistics, next_obs) if config.normalize_obs else next_obs,
                info=info,
            )

        action_key, env_key = jax.random.split(
            key
        )  # randomness of all steps at once: much faster than in each step
        shape = config.num_steps, config.num_envs
        randomness = (
            jax.random.normal(action_key, (*shape, actor.action_dim)),
            jax.random.split(env_key, shape),
        )
        carry = state.obs, state.env_state, state.obs_statistics
        (obs, env_state, statistics), rollout = jax.lax.scan(step, carry, randomness)
        return state._replace(obs=obs, env_state=env_state, obs_statistics=statistics), rollout

    def make_batch(state, rollout):
        """Compute advantages and targets of a rollout, in units of normalized rewards, as one flat batch."""
        rewards = rollout.reward
        if config.normalize_reward:
            done = rollout.terminated | rollout.truncated
            returns, last_return = discounted_returns(
                rewards, done, state.discounted_return, config.gamma
            )
            statistics = update_mean_std(state.return_statistics, returns.reshape(-1))
            state = state._replace(return_statistics=statistics, discounted_return=last_return)
            rewards = jnp.clip(rewards / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)
        values = critic.apply(state.params["critic"], rollout.obs)
        next_values = critic.apply(state.params["critic"], rollout.next_obs)
        ended = rollout.terminated, rollout.truncated
        advantages, targets = gae(
            rewards, values, next_values, *ended, config.gamma, config.gae_lambda
        )
        batch = {
            "obs": rollout.obs,
            "action": rollout.action,
            "advantage": advantages,
            "target": targets,
        }
        batch |= {
            "value": values,
            "log_prob": distrax.MultivariateNormalDiag(*rollout.policy).log_prob(rollout.action),
        }
        return state, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def loss(params, batch):
        policy = actor.apply(params["actor"], batch["obs"])
        value = critic.apply(params["critic"], batch["obs"])
        log_prob, scales = policy.log_prob(batch["action"]), (config.dpo_alpha, config.dpo_beta)
        actor_loss, metrics = policy_loss(log_prob, batch["log_prob"], batch["advantage"], *scales)
        critic_loss = value_loss(value, batch["value"], batch["target"], config.vf_clip_eps)
        entropy = policy.entropy().mean()
        total = (
            actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        )  # arXiv 1707.06347, equation 9
        return total, metrics | {
            "policy_loss": actor_loss,
            "value_loss": critic_loss,
            "entropy": entropy,
        }

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            grads, metrics = jax.grad(loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (
                jax.tree.map(lambda param, update: param - lr * update, params, updates),
                opt_state,
            ), metrics

        def epoch(carry, key):
            order = random_order(key, batch_size)
            return jax.lax.scan(gradient_step, carry, order.reshape(config.num_minibatches, -1))

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
        state = state._replace(
            params=params, opt_state=opt_state, update_count=state.update_count + 1
        )
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state, rollout = collect(state._replace(key=key), collect_key)
        state, batch = make_batch(state, rollout)
        state, metrics = learn(state, batch, learn_key)
        metrics["value"] = batch["value"].mean()
        metrics["explained_variance"] = 1.0 - (batch["target"] - batch["value"]).var() / (
            batch["target"].var() + 1e-8
        )
        return state, metrics | episode_metrics(rollout.info)

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
    actor, _ = make_networks(config, *make_env(config))

    def act(agent, memory, obs):
        if config.normalize_obs:
            obs = normalize(RunningMeanStd(**agent["obs_statistics"]), obs)
        return actor.apply(agent["params"]["actor"], obs).mode(), memory

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


# --- block continuous: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
@pytree
class BraxParams:
    max_steps_in_episode: int = 1000


class BraxEnv:
    """A brax environment behind gymnax's interface: six-value `step`, auto-reset, `final_observation`.

    An episode begins in one of `start_states`, because looking one up is much cheaper than brax's reset.
    """

    def __init__(self, name: str, **kwargs):
        backend = (
            "generalized" if name == "swimmer" else "spring"
        )  # spring compiles fastest; it has no swimmer
        with warnings.catch_warnings(
            action="ignore"
        ):  # brax is no longer maintained: docs/questions.md
            self.env = brax.envs.get_environment(name, **{"backend": backend} | kwargs)

    @functools.cached_property
    def start_states(self):  # brax states [1024, ...]
        with jax.ensure_compile_time_eval():
            quickly = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
            reset = jax.jit(jax.vmap(self.env.reset), compiler_options=quickly)
            return reset(jax.random.split(jax.random.key(0), 1024))

    def observation_space(self, params):
        return spaces.Box(
            -jnp.inf, jnp.inf, jax.eval_shape(self.env.reset, jax.random.key(0)).obs.shape
        )

    def action_space(self, params):
        return spaces.Box(-1.0, 1.0, (self.env.action_size,))

    def reset(self, key, params):
        index = jax.random.randint(key, (), 0, len(self.start_states.obs))
        state = jax.tree.map(lambda leaf: leaf[index], self.start_states)
        return state.obs, (state, jnp.zeros((), jnp.int32))

    def step(self, key, state, action, params):
        brax_state, time = self.env.step(state[0], action), state[1] + 1
        finite = jnp.isfinite(brax_state.obs).all() & jnp.isfinite(brax_state.reward)
        obs, reward = (jnp.where(finite, x, 0.0) for x in (brax_state.obs, brax_state.reward))
        terminated, truncated = (
            (brax_state.done > 0.5) | ~finite,
            time >= params.max_steps_in_episode,
        )
        done, after, info = (
            terminated | truncated,
            (obs, (brax_state, time)),
            {"final_observation": obs},
        )
        obs, state = jax.tree.map(
            lambda start, leaf: jnp.where(done, start, leaf), self.reset(key, params), after
        )
        return obs, state, reward, terminated, truncated, info


class RescaleAction(GymnaxWrapper):
    """Clip actions to [-1, 1] and rescale them to the environment's bounds."""

    def step(self, key, state, action, params):
        space = self._env.action_space(params)
        unit = (jnp.clip(action, -1.0, 1.0).reshape(space.shape) + 1.0) / 2.0
        obs, state, reward, *rest = self._env.step(
            key, state, space.low + unit * (space.high - space.low), params
        )
        return obs, state, jnp.asarray(reward, jnp.float32), *rest


def make_env(config):
    """`(env, env_params)`: gymnax's interface, actions in [-1, 1], statistics of episodes in `info`."""
    params = dict(config.env_params)
    if config.env_name in brax.envs._envs:
        limit = {key: params.pop(key) for key in list(params) if key == "max_steps_in_episode"}
        env, env_params = BraxEnv(config.env_name, **params), BraxParams(**limit)
    else:
        env, env_params = make_gymnax_env(config.env_name, params)
    with jax.ensure_compile_time_eval():  # the bounds stay concrete numbers, also inside a jit
        space = env.action_space(env_params)
        bounded = isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).all()
    if not bounded:
        raise ValueError(
            f"env_name = {config.env_name}: must have bounded continuous actions, as Pendulum-v1 has"
        )
    return LogWrapper(FlattenObservationWrapper(RescaleAction(env))), env_params


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
