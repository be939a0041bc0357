# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9",
#     "evosax>=0.3.2",
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
"""Evolution of a policy objective: an evolution strategy around whole PPO trainings, all of it in one jit.

Lu et al. 2022, "Discovered Policy Optimisation" (arXiv 2210.05639): PPO's objective is the advantage times the ratio
minus a drift, a penalty on changes of the policy. Here the drift is a small network, the paper's Learnt Policy
Optimisation (LPO), that starts as PPO's clip. OpenES (Salimans et al. 2017, arXiv 1703.03864) evolves its weights with
Adam and mirrored pairs, as in the paper. A network's fitness is the return of the agents trained with it. One
`update` is a generation: `population_size` networks train `inner_seeds` agents each, all from the same keys.

The agents learn as in ppo.py. Differences from the paper: actions are discrete, and trainings are short. The
defaults finish in minutes on two CPU cores. Eight epochs per batch let a drift gain something over PPO's clip.

    python evolve_objective.py --num-seeds 1

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 4))
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
from evosax.algorithms import Open_ES
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
    """Hyperparameters. The defaults are sized for two CPU cores."""

    env_name: str = (
        "Catch-bsuite"  # gymnax environment with discrete actions; MODULE:NAME imports MODULE
    )
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # parameters of the environment: NAME VALUE ...
    num_generations: int = 24  # updates of the evolution strategy
    population_size: int = 16  # drift networks per generation, in mirrored pairs
    inner_seeds: int = (
        2  # agents trained with each drift network; its fitness is the mean of their returns
    )
    fitness_episodes: int = 16  # episodes that a trained agent plays; their mean is its return
    num_slices: int = 1  # parts of the population that train one after the other, to save memory
    es_lr: float = 0.01  # Adam's learning rate in the evolution strategy
    es_sigma: float = 0.03  # standard deviation of the population's parameters around their mean
    drift_size: int = 16  # hidden units of the drift network
    total_timesteps: int = 8_192  # environment steps of one agent's training
    inner_envs: int = 16  # environments per agent
    inner_steps: int = 64  # steps per environment and update of the agent
    update_epochs: int = 8  # passes over the batch of inner_envs * inner_steps steps
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 3e-3  # Adam's learning rate in the training of an agent
    anneal_lr: bool = True  # decay the agent's learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    clip_eps: float = (
        0.2  # clip range of the probability ratio in the drift that evolution starts from
    )
    vf_clip_eps: float = (
        math.inf
    )  # clip range of the change in the predicted value; inf for no clipping
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm; 0 for no limit
    normalize_obs: bool = False  # normalize observations by the agent's running mean and variance
    normalize_reward: bool = (
        False  # divide rewards by the running standard deviation of the discounted return
    )
    torso: Literal["flat", "grid", "nature"] = (
        "grid"  # convolutions of images: none, one of 3 x 3, or Mnih et al. 2015
    )
    hidden_sizes: tuple[int, ...] = (32, 32)  # sizes of the dense hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "tanh"  # activation function of the hidden layers
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def inner_updates(self) -> int:
        """Updates in one agent's training."""
        return self.total_timesteps // (self.inner_envs * self.inner_steps)

    @property
    def num_updates(self) -> int:
        return self.num_generations

    @property
    def num_envs(self) -> int:
        """Environments in one generation."""
        return self.population_size * self.inner_seeds * self.inner_envs

    @property
    def num_steps(self) -> int:
        """Steps of each environment in one generation."""
        return self.inner_updates * self.inner_steps


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


class Network(nn.Module):
    """The actor or the critic: a convolution of grids, hidden layers, a linear head; orthogonal initialization."""

    obs_shape: tuple[int, ...]
    num_states: (
        int  # of an environment whose observation is the number of its state; 0 of all others
    )
    convolutions: tuple[tuple[int, int, int], ...]  # (features, size, stride)
    hidden_sizes: tuple[int, ...]
    activation: str
    num_actions: int  # 0 of the critic

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> logits [..., num_actions], or values [...]
        activation = getattr(nn, self.activation)
        obs = obs / 255.0 if obs.dtype == jnp.uint8 and self.obs_shape else obs
        x = (
            jax.nn.one_hot(obs, self.num_states, dtype=jnp.float32)
            if self.num_states
            else obs.astype(jnp.float32)
        )
        for features, size, stride in self.convolutions:
            x = activation(
                nn.Dense(features, kernel_init=orthogonal(math.sqrt(2)))(patches(x, size, stride))
            )
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        if self.num_actions:
            return nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        return nn.Dense(1, kernel_init=orthogonal(1.0))(x).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def ppo_drift(log_ratio, advantage, clip_eps):
    """What PPO's clip subtracts: ratio * A minus this drift is equation 7 of arXiv 1707.06347. All [B]."""
    ratio = jnp.exp(log_ratio)
    return nn.relu((ratio - jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)) * advantage)


def dpo_drift(log_ratio, advantage, alpha=2.0, beta=0.6):
    """The closed form of an evolved drift from the paper, as in dpo_continuous.py. All [B]."""
    gain, log_gain = jnp.expm1(log_ratio) * advantage, log_ratio * advantage
    positive = nn.relu(gain - alpha * jnp.tanh(gain / alpha))
    negative = nn.relu(log_gain - beta * jnp.tanh(log_gain / beta))
    return jnp.where(advantage >= 0.0, positive, negative)


def init_weights(key, size: int) -> dict:
    """Initial weights of a drift network without biases. The last layer is 0, and the drift is therefore PPO's."""
    return {"hidden": jax.random.normal(key, (8, size)) / math.sqrt(8), "output": jnp.zeros(size)}


def network_drift(weights, log_ratio, advantage, clip_eps):
    """LPO's drift (arXiv 2210.05639), added to PPO's. All [B].

    With any weights the drift is not negative, and it and its gradient are 0 at a ratio of 1, as mirror learning
    requires: the inputs are 0 there, there are no biases, and 1e-4 is subtracted.
    """
    change = -jnp.expm1(log_ratio)  # 1 - ratio
    features = jnp.stack([log_ratio, jnp.square(log_ratio), change, jnp.square(change)], axis=-1)
    features = jnp.concatenate([features, features * advantage[..., None]], axis=-1)  # [B, 8]
    added = jnp.tanh(features @ weights["hidden"]) @ weights["output"]
    return nn.relu(ppo_drift(log_ratio, advantage, clip_eps) + added - 1e-4)


def policy_loss(log_prob, old_log_prob, advantage, drift):
    """The objective minus `drift(log_ratio, advantage)`, negated; advantages are normalized here. All [B]."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = log_prob - old_log_prob
    return -(jnp.exp(log_ratio) * advantage - drift(log_ratio, advantage)).mean()


def value_loss(value, old_value, target, clip_eps):
    """Half the mean of the larger squared error: of `value`, or of `value` clipped around `old_value`. All [B]."""
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()


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


def best_agent(returns, agents):
    """The best agent of the fittest network. Returns [P, S], NaN if diverged; leaves [P, S, ...] -> leaves [...]."""
    member = jnp.nanargmax(returns.mean(axis=1))
    seed = jnp.nanargmax(returns[member])
    return jax.tree.map(lambda leaf: leaf[member, seed], agents)


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


# --- block scan: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def unrolled_scan(step, carry, xs, unroll=8):
    """`jax.lax.scan`, unrolled only on GPUs, which then run fewer kernels. A CPU would only compile for longer."""
    rolled, unrolled = (
        functools.partial(jax.lax.scan, step, unroll=steps) for steps in (1, unroll)
    )
    return jax.lax.platform_dependent(carry, xs, cpu=rolled, default=unrolled)


# --- training ---


class Transition(NamedTuple):
    """One step, or, with leading axes [inner_steps, inner_envs], a rollout."""

    obs: jax.Array  # raw while acting; normalized afterwards, if `normalize_obs` is set
    logits: jax.Array  # of the policy that acted
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset; normalized like `obs`


class AgentState(NamedTuple):
    """All that an agent's training carries from one of its updates to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    update_count: jax.Array  # updates so far
    obs: jax.Array  # [inner_envs, *obs_shape]
    env_state: Any  # [inner_envs, ...]
    obs_statistics: RunningMeanStd
    return_statistics: RunningMeanStd
    discounted_return: jax.Array  # [inner_envs]
    key: jax.Array


class RunnerState(NamedTuple):
    """All that evolution carries from one generation to the next."""

    params: dict  # of the best agent that the last generation's fittest network trained
    obs_statistics: RunningMeanStd  # of the same agent
    drift: dict  # weights of the mean network of the evolution strategy
    es_state: Any
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs, and the drift: `main` saves it, `make_policy` takes it."""
        return {
            "params": self.params,
            "obs_statistics": self.obs_statistics._asdict(),
            "drift": self.drift,
        }


def make_networks(config: Config, env, env_params):
    space = env.observation_space(env_params)
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    if num_states and config.normalize_obs:
        raise ValueError(
            f"normalize_obs = True: must be False, observations of {config.env_name} are state numbers"
        )
    layers = convolutions(config.torso, space.shape), config.hidden_sizes, config.activation
    actor = Network(space.shape, num_states, *layers, num_actions=env.action_space(env_params).n)
    return actor, Network(space.shape, num_states, *layers, num_actions=0)


def make_inner(config: Config):
    """`train(drift, rng) -> agent_state`, an agent's whole training with a drift, and `play(agent_state, rng)`."""
    batch_size = config.inner_envs * config.inner_steps
    if min(config.inner_envs, config.inner_steps, config.update_epochs, config.num_minibatches) < 1:
        raise ValueError(
            "inner_envs, inner_steps, update_epochs, num_minibatches: must all be at least 1"
        )
    if config.inner_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update of an agent takes {batch_size}"
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
            jax.random.split(env_key, config.inner_envs), env_params
        )
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        return AgentState(
            params=params,
            opt_state=optimizer.init(params),
            update_count=jnp.zeros((), jnp.int32),
            obs=obs,
            env_state=env_state,
            obs_statistics=init_mean_std(obs.shape[1:]),
            return_statistics=init_mean_std(()),
            discounted_return=jnp.zeros(config.inner_envs),
            key=key,
        )

    def act(state, obs, gumbel):
        seen = normalize(state.obs_statistics, obs) if config.normalize_obs else obs
        logits = actor.apply(state.params["actor"], seen)
        return logits, jnp.argmax(logits + gumbel, axis=-1).astype(
            jnp.int32
        )  # a sample of the policy

    def collect(state, key):
        """Act for `inner_steps` steps with the current policy."""

        def step(carry, randomness):
            obs, env_state = carry
            gumbel, env_keys = randomness
            logits, action = act(state, obs, gumbel)
            after, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            return (after, env_state), Transition(
                obs=obs,
                logits=logits,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=info["final_observation"],
            )

        action_key, env_key = jax.random.split(
            key
        )  # randomness of all steps at once: much faster than in each step
        shape = config.inner_steps, config.inner_envs
        randomness = (
            jax.random.gumbel(action_key, (*shape, actor.num_actions)),
            jax.random.split(env_key, shape),
        )
        (obs, env_state), rollout = unrolled_scan(step, (state.obs, state.env_state), randomness)
        if config.normalize_obs:  # values and loss use the observations that the policy acted on
            old, raw = state.obs_statistics, rollout.obs
            rollout = rollout._replace(
                obs=normalize(old, raw), next_obs=normalize(old, rollout.next_obs)
            )
            state = state._replace(
                obs_statistics=update_mean_std(old, raw.reshape(batch_size, *raw.shape[2:]))
            )
        return state._replace(obs=obs, env_state=env_state), rollout

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
            "log_prob": distrax.Categorical(rollout.logits).log_prob(rollout.action),
        }
        return state, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def loss(params, batch, drift):
        policy = distrax.Categorical(actor.apply(params["actor"], batch["obs"]))
        value = critic.apply(params["critic"], batch["obs"])
        actor_loss = policy_loss(
            policy.log_prob(batch["action"]), batch["log_prob"], batch["advantage"], drift
        )
        critic_loss = value_loss(value, batch["value"], batch["target"], config.vf_clip_eps)
        entropy = policy.entropy().mean()
        return (
            actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        )  # arXiv 1707.06347, equation 9

    def learn(state, batch, drift, key):
        """`update_epochs` passes over the batch, each in a new order."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.inner_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            updates, opt_state = optimizer.update(
                jax.grad(loss)(params, minibatch, drift), opt_state, params
            )
            return (
                jax.tree.map(lambda param, update: param - lr * update, params, updates),
                opt_state,
            ), None

        def epoch(carry, key):
            order = jax.random.permutation(
                key, batch_size
            )  # pqn.py has a faster way for many minibatches
            return jax.lax.scan(gradient_step, carry, order.reshape(config.num_minibatches, -1))

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), _ = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
        return state._replace(
            params=params, opt_state=opt_state, update_count=state.update_count + 1
        )

    def train(drift, rng):
        def update(state, _):
            key, collect_key, learn_key = jax.random.split(state.key, 3)
            state, rollout = collect(state._replace(key=key), collect_key)
            state, batch = make_batch(state, rollout)
            return learn(state, batch, drift, learn_key), None

        return jax.lax.scan(update, init(rng), None, config.inner_updates)[0]

    def play(state, rng):
        """Mean return and length of `fitness_episodes` new episodes, each from its beginning to its end."""

        def step(carry):
            obs, env_state, going_on, returns, lengths, key = carry
            key, action_key, env_key = jax.random.split(key, 3)
            env_keys = jax.random.split(env_key, config.fitness_episodes)
            _, action = act(
                state,
                obs,
                jax.random.gumbel(action_key, (config.fitness_episodes, actor.num_actions)),
            )
            obs, env_state, reward, terminated, truncated, _ = step_env(
                env_keys, env_state, action, env_params
            )
            returns, lengths = returns + jnp.where(going_on, reward, 0.0), lengths + going_on
            return obs, env_state, going_on & ~(terminated | truncated), returns, lengths, key

        reset_key, key = jax.random.split(rng)
        reset_keys = jax.random.split(reset_key, config.fitness_episodes)
        obs, env_state = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
        going_on, returns = (
            jnp.ones(config.fitness_episodes, bool),
            jnp.zeros(config.fitness_episodes),
        )
        carry = obs, env_state, going_on, returns, returns, key
        *_, returns, lengths, _ = jax.lax.while_loop(lambda carry: carry[2].any(), step, carry)
        return returns.mean(), lengths.mean()

    return train, play


def make_strategy(config: Config):
    """evosax's OpenES over drift networks: Adam, mirrored pairs, centered ranks. It minimizes."""
    sigma = jnp.asarray(config.es_sigma, jnp.float32)
    shapes = jax.eval_shape(
        functools.partial(init_weights, size=config.drift_size), jax.random.key(0)
    )
    example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    adam, constant = optax.adam(config.es_lr), optax.constant_schedule(sigma)
    return Open_ES(config.population_size, example, optimizer=adam, std_schedule=constant)


def make_evaluate(config: Config):
    """`evaluate(population, train_keys, play_keys) -> (returns [P, S], lengths [P, S], agents [P, S, ...])`.

    One generation: each network [P, ...] trains an agent from each key [S], and the agents play.
    """
    train, play = make_inner(config)

    def measure(weights, train_key, play_key):
        state = train(
            functools.partial(network_drift, weights, clip_eps=config.clip_eps), train_key
        )
        returns, lengths = play(state, play_key)
        returns = jnp.where(
            jnp.isfinite(optax.tree.norm(state.params)), returns, jnp.nan
        )  # diverged: ranked last
        return returns, lengths, {"params": state.params, "obs_statistics": state.obs_statistics}

    def evaluate(population, train_keys, play_keys):
        over_seeds = jax.vmap(measure, (None, 0, 0))
        size = config.population_size // config.num_slices
        return jax.lax.map(
            lambda weights: over_seeds(weights, train_keys, play_keys), population, batch_size=size
        )

    return evaluate


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars.

    One `update` is a generation.
    """
    sizes = (
        config.num_generations,
        config.population_size,
        config.inner_seeds,
        config.fitness_episodes,
    )
    if min(*sizes, config.num_slices, config.drift_size) < 1:
        names = "num_generations, population_size, inner_seeds, fitness_episodes, num_slices, drift_size"
        raise ValueError(f"{names}: must all be at least 1")
    if config.population_size % 2:
        raise ValueError(
            f"population_size = {config.population_size}: must be even, for its mirrored pairs"
        )
    if config.population_size % config.num_slices:
        raise ValueError(
            f"num_slices = {config.num_slices}: must divide population_size = {config.population_size}"
        )
    env, env_params = make_env(config)
    actor, critic = make_networks(config, env, env_params)
    strategy, evaluate = make_strategy(config), make_evaluate(config)

    def init(rng):
        actor_key, critic_key, weights_key, es_key, obs_key, key = jax.random.split(rng, 6)
        obs, _ = env.reset(obs_key, env_params)
        weights = init_weights(weights_key, config.drift_size)
        es_state = strategy.init(es_key, weights, strategy.default_params)
        return RunnerState(
            params={"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)},
            obs_statistics=init_mean_std(obs.shape),
            drift=weights,
            es_state=jax.tree.map(
                lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), es_state
            ),  # not weak
            key=key,
        )

    def update(state, _=None):
        key, ask_key, tell_key, train_key, play_key = jax.random.split(state.key, 5)
        population, es_state = strategy.ask(ask_key, state.es_state, strategy.default_params)
        train_keys, play_keys = (
            jax.random.split(each, config.inner_seeds) for each in (train_key, play_key)
        )
        returns, lengths, agents = evaluate(population, train_keys, play_keys)
        fitness = returns.mean(axis=1)
        es_state, _ = strategy.tell(
            tell_key, population, -fitness, es_state, strategy.default_params
        )
        metrics = {
            "episodic_return": jnp.nanmean(returns),
            "episodic_length": lengths.mean(),
            "episodes": jnp.asarray(returns.size * config.fitness_episodes),
            "fitness_best": jnp.nanmax(fitness),
            "fitness_spread": jnp.nanstd(fitness),
            "diverged": jnp.isnan(returns).sum(),
        }
        best = best_agent(returns, agents)
        return RunnerState(
            drift=strategy.get_mean(es_state), es_state=es_state, key=key, **best
        ), metrics

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole evolution; each metric has shape [num_generations]."""
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
        return actor.apply(agent["params"]["actor"], obs).argmax(axis=-1), memory

    return (lambda: ()), act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw PPO, DPO and up to four evolved drifts over ratio and advantage. `runner_state` is [num_seeds, ...]."""
    ratio, advantage = np.meshgrid(np.linspace(0.3, 2.0, 171), np.linspace(-2.5, 2.5, 101))
    inputs = jnp.log(jnp.asarray(ratio)), jnp.asarray(advantage)
    panels = {"PPO": ppo_drift(*inputs, config.clip_eps), "DPO": dpo_drift(*inputs)}
    for i in range(min(4, len(runner_state.drift["output"]))):
        weights = {name: leaf[i] for name, leaf in runner_state.drift.items()}
        panels[f"evolved {i}"] = network_drift(weights, *inputs, config.clip_eps)
    figure = Figure(figsize=(2.6 * len(panels) + 1, 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    top = max(float(np.nanmax(panel)) for panel in panels.values())
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        image = axes.pcolormesh(ratio, advantage, np.asarray(panel), vmin=0.0, vmax=top)
        axes.axvline(1.0, color="white", linewidth=0.5)
        axes.set(title=title, xlabel="ratio")
    all_axes[0].set_ylabel("advantage")
    figure.colorbar(image, ax=all_axes, label="drift")
    figure.savefig(run_dir / "drift.png", dpi=150)


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
