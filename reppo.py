# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2",
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
"""Relative Entropy Pathwise Policy Optimization (REPPO), the whole training in one jit.

Voelcker et al. 2025, "Relative Entropy Pathwise Policy Optimization" (arXiv 2507.11019): on-policy like PPO, but the
policy follows the gradient of a critic Q(s, a), as in SAC, with no replay, target network or second critic. The critic
is a classifier over bins (HL-Gauss, arXiv 2403.03950), trained on soft Q(lambda) targets. A bound on the divergence
from the policy of the rollout replaces PPO's clip.

Differences from the paper: the divergence is in closed form, no auxiliary loss predicts features, rewards are divided
by a running standard deviation, and terminal states have no entropy bonus. An episode that its time limit truncates is
bootstrapped from its last observation; a terminated episode is not.

    python reppo.py --env-name Pendulum-v1 --num-seeds 8

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

    env_name: str = "Pendulum-v1"  # brax or gymnax environment with continuous actions; MODULE:NAME imports MODULE
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # parameters of the environment: NAME VALUE ...
    total_timesteps: int = 200_000  # environment steps per agent
    num_envs: int = 32  # environments per agent
    num_steps: int = 64  # steps per environment and update
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 16  # gradient steps per pass, each of the critic and then of the policy
    lr: float = 1e-3  # Adam's learning rate
    gamma: float = 0.95  # discount factor
    q_lambda: float = 0.95  # decay of the trace: 0 bootstraps after one step, 1 at the end of the rollout or episode
    ent_coef: float = 0.01  # initial weight of the entropy; the weight is learned
    target_entropy: float = (
        -0.5
    )  # target of the policy's entropy, per dimension of an action in [-1, 1]
    kl_coef: float = (
        0.01  # initial weight of the KL divergence from the rollout's policy; the weight is learned
    )
    kl_bound: float = 0.03  # largest KL divergence; above it, a state's policy is pulled back to the rollout's policy
    v_min: float = (
        -10.0
    )  # lowest value that the critic can represent, in units of normalized reward
    v_max: float = (
        10.0  # highest value that the critic can represent, in units of normalized reward
    )
    num_bins: int = 51  # bins of the critic between v_min and v_max
    max_grad_norm: float = (
        0.5  # limit of the global norm of each network's gradient; 0 for no limit
    )
    normalize_obs: bool = True  # normalize observations by the agent's running mean and variance
    normalize_reward: bool = (
        True  # divide rewards by the running standard deviation of the discounted return
    )
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "swish"  # activation function of the hidden layers
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


# --- networks ---


class Mlp(nn.Module):
    """Hidden layers, each normalized, and a linear head that begins near 0. [..., features] -> [..., outputs]."""

    hidden_sizes: tuple[int, ...]
    outputs: int
    activation: str

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32)
        for size in self.hidden_sizes:
            x = getattr(nn, self.activation)(nn.RMSNorm()(nn.Dense(size)(x)))
        return nn.Dense(self.outputs, kernel_init=nn.initializers.normal(0.01))(x)


class Actor(nn.Module):
    """Gaussian policy before squashing."""

    action_dim: int
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(
        self, obs
    ):  # [..., obs_dim] -> mean and log of the standard deviation, both [..., action_dim]
        return jnp.split(
            Mlp(self.hidden_sizes, 2 * self.action_dim, self.activation)(obs), 2, axis=-1
        )


class Critic(nn.Module):
    """Distribution of Q(s, a) over bins. A learned offset of the logits makes it begin near 0."""

    hidden_sizes: tuple[int, ...]
    activation: str
    num_bins: int
    v_min: float
    v_max: float

    @nn.compact
    def __call__(
        self, obs, action
    ):  # [..., obs_dim], [..., action_dim] -> logits [..., num_bins] and Q [...]
        x = jnp.concatenate([obs, action], axis=-1)
        offset = self.param(
            "offset", lambda _: hl_gauss(jnp.float32(0.0), self.v_min, self.v_max, self.num_bins)
        )
        logits = 40.0 * offset + Mlp(self.hidden_sizes, self.num_bins, self.activation)(x)
        centers = self.v_min + (self.v_max - self.v_min) * jnp.linspace(0.0, 1.0, self.num_bins)
        return logits, nn.softmax(logits) @ centers


# --- mathematics: arrays in, arrays out ---


def soft_q_lambda_target(
    rewards, next_q, next_log_prob, terminated, truncated, ent_coef, gamma, q_lambda
):
    """Soft Q(lambda) targets with time limits (arXiv 2507.11019). All [T, N].

    G_t = r_t + gamma (1 - terminated) (B_t - alpha log pi(a'|s')), with a' drawn from the policy at s', the observation
    after the step, before auto-reset. B_t = Q(s', a') where the episode was truncated or the rollout ends, and
    B_t = lambda G_{t+1} + (1 - lambda) Q(s', a') elsewhere.
    """

    def step(next_target, inputs):
        reward, q, log_prob, terminated, truncated = inputs
        mixed = jnp.where(truncated, q, q_lambda * next_target + (1.0 - q_lambda) * q)
        target = reward + gamma * jnp.where(terminated, 0.0, mixed - ent_coef * log_prob)
        return target, target

    steps = (
        rewards,
        next_q,
        next_log_prob,
        terminated,
        truncated,
    )  # the target after the last step is Q
    return jax.lax.scan(step, next_q[-1], steps, reverse=True, unroll=16)[1]


def hl_gauss(target, v_min, v_max, num_bins: int):
    """Probabilities of bins under a Gaussian around `target` (arXiv 2403.03950). [...] -> [..., num_bins]."""
    width = jnp.maximum(v_max - v_min, 1e-6) / (
        num_bins - 1
    )  # the outer bins have their centers at v_min and v_max
    place = jnp.clip((target - v_min) / width, 0.0, num_bins - 1.0)  # in units of bins; v_min is 0
    edges = jnp.arange(num_bins + 1, dtype=jnp.float32) - 0.5
    below = jax.scipy.special.ndtr((edges - place[..., None]) / 0.75)
    return jnp.diff(below) / (below[..., -1:] - below[..., :1])


def squashed_gaussian(mean, log_std, noise):
    """An action tanh(u) and its log-probability (arXiv 1801.01290, equation 21), in a form without log(0)."""
    u = mean + jnp.exp(log_std) * noise
    log_gaussian = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2.0 * math.pi)
    log_derivative = 2.0 * (math.log(2.0) - u - nn.softplus(-2.0 * u))
    return jnp.tanh(u), (log_gaussian - log_derivative).sum(axis=-1)


def gaussian_kl(old_mean, old_log_std, mean, log_std):
    """KL(old || new) between diagonal Gaussians, which squashing does not change. [..., action_dim] -> [...]."""
    ratio = jnp.square(jnp.exp(old_log_std - log_std)) + jnp.square(
        (old_mean - mean) * jnp.exp(-log_std)
    )
    return (log_std - old_log_std + 0.5 * ratio - 0.5).sum(axis=-1)


def policy_loss(q, log_prob, kl, ent_coef, kl_coef, kl_bound):
    """alpha log pi - Q for each state within the bound of the divergence, beta KL for the others. All [B]."""
    return jnp.where(kl < kl_bound, ent_coef * log_prob - q, kl_coef * kl).mean()


def coef_loss(log_coefs, entropy, target_entropy, kl, kl_bound):
    """Loss of log alpha and log beta: each falls where its constraint has slack, and rises where it is violated."""
    slack = jax.lax.stop_gradient(jnp.stack([entropy - target_entropy, kl_bound - kl]))
    return (jnp.exp(log_coefs) * slack).sum()


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
    policy: list  # mean and log standard deviation of the action before squashing
    action: jax.Array  # in [-1, 1]
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset; normalized like `obs`
    info: dict  # statistics of episodes


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of the "critic", and of the "policy": its "actor" and "log_coefs", of the entropy and of the KL
    opt_state: dict  # of the "critic" and of the "policy"
    obs: jax.Array  # [num_envs, obs_dim]
    env_state: Any  # [num_envs, ...]
    obs_statistics: RunningMeanStd
    return_statistics: RunningMeanStd
    discounted_return: jax.Array  # [num_envs]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {
            "params": {"actor": self.params["policy"]["actor"]},
            "obs_statistics": self.obs_statistics._asdict(),
        }


def make_networks(config: Config, env, env_params):
    action_dim = math.prod(env.action_space(env_params).shape)
    actor = Actor(action_dim, config.hidden_sizes, config.activation)
    return actor, Critic(
        config.hidden_sizes, config.activation, config.num_bins, config.v_min, config.v_max
    )


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    batch_size = config.num_envs * config.num_steps
    if (
        min(
            config.num_envs,
            config.num_steps,
            config.update_epochs,
            config.num_minibatches,
            config.num_bins - 1,
        )
        < 1
    ):
        raise ValueError(
            "num_envs, num_steps, update_epochs, num_minibatches: must all be at least 1, num_bins at least 2"
        )
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {batch_size}"
        )
    if batch_size % config.num_minibatches:
        raise ValueError(f"num_minibatches = {config.num_minibatches}: must divide {batch_size}")
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)
    clip = optax.clip_by_global_norm(
        jnp.where(config.max_grad_norm > 0, config.max_grad_norm, jnp.inf)
    )
    optimizer = optax.chain(clip, optax.adam(config.lr))

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        critic_params = critic.init(critic_key, obs, jnp.zeros((config.num_envs, actor.action_dim)))
        log_coefs = jnp.log(
            jnp.maximum(jnp.array([config.ent_coef, config.kl_coef], jnp.float32), 1e-8)
        )
        params = {
            "critic": critic_params,
            "policy": {"actor": actor.init(actor_key, obs), "log_coefs": log_coefs},
        }
        return RunnerState(
            params=params,
            opt_state={name: optimizer.init(leaves) for name, leaves in params.items()},
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
            policy = actor.apply(state.params["policy"]["actor"], seen)
            action, _ = squashed_gaussian(*policy, noise)
            obs, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")
            return (obs, env_state, statistics), Transition(
                obs=seen,
                policy=policy,
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

    def make_batch(state, rollout, key):
        """Compute targets of a rollout, in units of normalized rewards, as one flat batch."""
        rewards = rollout.reward
        if config.normalize_reward:
            done = rollout.terminated | rollout.truncated
            returns, last_return = discounted_returns(
                rewards, done, state.discounted_return, config.gamma
            )
            statistics = update_mean_std(state.return_statistics, returns.reshape(-1))
            state = state._replace(return_statistics=statistics, discounted_return=last_return)
            rewards = jnp.clip(rewards / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)
        noise = jax.random.normal(key, rollout.action.shape)
        policy, ent_coef = state.params["policy"], jnp.exp(state.params["policy"]["log_coefs"][0])
        next_action, next_log_prob = squashed_gaussian(
            *actor.apply(policy["actor"], rollout.next_obs), noise
        )
        _, next_q = critic.apply(state.params["critic"], rollout.next_obs, next_action)
        steps = rewards, next_q, next_log_prob, rollout.terminated, rollout.truncated
        targets = soft_q_lambda_target(*steps, ent_coef, config.gamma, config.q_lambda)
        batch = {
            "obs": rollout.obs,
            "action": rollout.action,
            "policy": rollout.policy,
            "target": targets,
        }
        return state, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def critic_objective(params, batch):
        logits, q = critic.apply(params, batch["obs"], batch["action"])
        probabilities = hl_gauss(batch["target"], config.v_min, config.v_max, config.num_bins)
        loss = optax.softmax_cross_entropy(logits, probabilities).mean()
        outside = (batch["target"] < config.v_min) | (batch["target"] > config.v_max)
        return loss, {"critic_loss": loss, "q_value": q.mean(), "outside_support": outside.mean()}

    def policy_objective(params, batch, noise, critic_params):
        """Loss of the policy and of both coefficients; each treats the others as constants."""
        policy = actor.apply(params["actor"], batch["obs"])
        action, log_prob = squashed_gaussian(*policy, noise)
        _, q = critic.apply(critic_params, batch["obs"], action)
        kl = gaussian_kl(*batch["policy"], *policy)
        ent_coef, kl_coef = jax.lax.stop_gradient(jnp.exp(params["log_coefs"]))
        loss = policy_loss(q, log_prob, kl, ent_coef, kl_coef, config.kl_bound)
        metrics = {
            "policy_loss": loss,
            "entropy": -log_prob.mean(),
            "ent_coef": ent_coef,
            "kl_coef": kl_coef,
        }
        metrics |= {"kl": kl.mean(), "outside_kl_bound": (kl >= config.kl_bound).mean()}
        limits = (
            metrics["entropy"],
            config.target_entropy * actor.action_dim,
            metrics["kl"],
            config.kl_bound,
        )
        return loss + coef_loss(params["log_coefs"], *limits), metrics

    def descend(name, grads, params, opt_state):
        updates, new = optimizer.update(grads, opt_state[name])
        return params | {name: optax.apply_updates(params[name], updates)}, opt_state | {name: new}

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""

        def gradient_step(carry, inputs):
            (params, opt_state), (indices, noise) = carry, inputs
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            grads, metrics = jax.grad(critic_objective, has_aux=True)(params["critic"], minibatch)
            params, opt_state = descend("critic", grads, params, opt_state)
            objective = jax.grad(
                policy_objective, has_aux=True
            )  # against the critic that was just updated
            grads, more = objective(params["policy"], minibatch, noise, params["critic"])
            return descend("policy", grads, params, opt_state), metrics | more

        def epoch(carry, key):
            order_key, noise_key = jax.random.split(key)
            order = random_order(order_key, batch_size).reshape(config.num_minibatches, -1)
            noise = jax.random.normal(noise_key, (*order.shape, actor.action_dim))
            return jax.lax.scan(gradient_step, carry, (order, noise))

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, batch_key, learn_key = jax.random.split(state.key, 4)
        state, rollout = collect(state._replace(key=key), collect_key)
        state, batch = make_batch(state, rollout, batch_key)
        state, metrics = learn(state, batch, learn_key)
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
        return jnp.tanh(actor.apply(agent["params"]["actor"], obs)[0]), memory

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
