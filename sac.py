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
"""Soft actor-critic for continuous actions, the whole training in one jit.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905, algorithm 1): twin critics, a
squashed Gaussian policy (appendix C of arXiv 1801.01290) and an entropy coefficient that is learned (section 5).

Differences from the papers: many environments per agent, any number of gradient steps per update, and exploration noise
that may be correlated in time. An episode that its time limit truncates is bootstrapped from its last observation.
Before learning, `init` fills the replay with uniformly random actions. The replay is a ring of `buffer_size` steps in
`runner_state`. A step takes 4 (2 obs_dim + action_dim + 1) + 1 bytes: with the defaults 0.66 MB per agent.

    python sac.py --env-name Pendulum-v1 --num-seeds 8

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
    total_timesteps: int = 20_000  # environment steps per agent, warm-up included
    num_envs: int = 4  # environments per agent
    num_steps: int = 1  # steps per environment and update
    gradient_steps: int = 4  # gradient steps per update, each on a new batch
    batch_size: int = 256  # transitions per gradient step
    buffer_size: int = 20_000  # capacity of the replay in steps, rounded down to a multiple of num_envs * num_steps
    learning_starts: int = (
        1000  # random steps before learning, rounded up to a multiple of num_envs * num_steps
    )
    policy_lr: float = 1e-3  # Adam's learning rate for the policy and the entropy coefficient
    q_lr: float = 1e-3  # Adam's learning rate for the critics
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # Polyak factor of the target critics, applied in each gradient step
    ent_coef: float = 1.0  # weight of the entropy; the initial weight if it is learned
    learn_ent_coef: bool = True  # learn ent_coef, to keep the policy's entropy at target_entropy
    target_entropy: float = (
        -1.0
    )  # target of the policy's entropy, per dimension of an action in [-1, 1]
    noise_correlation: float = (
        0.0  # correlation of the exploration noise of successive steps; 0 for white noise
    )
    reward_scale: float = 1.0  # factor that rewards are multiplied by
    normalize_obs: bool = False  # normalize observations by the agent's running mean and variance
    hidden_sizes: tuple[int, ...] = (
        64,
        64,
    )  # sizes of the hidden layers of the actor and of each critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "relu"  # activation function of the hidden layers
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def warmup_timesteps(self) -> int:
        rollout_size = self.num_envs * self.num_steps
        return -(-max(self.learning_starts, 0) // rollout_size) * rollout_size

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.warmup_timesteps) // (self.num_envs * self.num_steps)


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
    """Gaussian policy before squashing. Its standard deviation is between e^-5 and e^2."""

    action_dim: int
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(
        self, obs
    ):  # [..., obs_dim] -> mean and log of the standard deviation, both [..., action_dim]
        outputs = Mlp(self.hidden_sizes, 2 * self.action_dim, self.activation, 0.01)(obs)
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return mean, -1.5 + 3.5 * jnp.tanh(log_std)


class Critic(nn.Module):
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs, action):  # [..., obs_dim], [..., action_dim] -> [...]
        x = jnp.concatenate([obs, action], axis=-1)
        return Mlp(self.hidden_sizes, 1, self.activation, 1.0)(x).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def squashed_gaussian(mean, log_std, noise):
    """An action tanh(u) and its log-probability, where u = mean + std noise (arXiv 1801.01290, equation 21).

    The log-probability is computed from the noise and u, with tanh's derivative in a form that does not underflow for
    large u: log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)). All [..., action_dim], the log-probability [...].
    """
    u = mean + jnp.exp(log_std) * noise
    log_gaussian = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2.0 * math.pi)
    log_derivative = 2.0 * (math.log(2.0) - u - nn.softplus(-2.0 * u))
    return jnp.tanh(u), (log_gaussian - log_derivative).sum(axis=-1)


def soft_target(reward, terminated, next_q, next_log_prob, ent_coef, gamma):
    """y = r + gamma (1 - terminated) [min_j Q'_j(s', a') - alpha log pi(a'|s')], arXiv 1812.05905, equations 3 and 5.

    next_q: [2, ...], all others [...].
    """
    return reward + gamma * jnp.where(
        terminated, 0.0, next_q.min(axis=0) - ent_coef * next_log_prob
    )


def td_loss(q, target):
    """Mean squared error over the batch, summed over both critics (arXiv 1812.05905, equation 5). [2, B], [B]."""
    return jnp.square(q - target).mean(axis=-1).sum()


def policy_loss(q, log_prob, ent_coef):
    """E[alpha log pi - min_j Q_j] (arXiv 1812.05905, equation 9). q: [2, B], log_prob: [B]."""
    return (ent_coef * log_prob - q.min(axis=0)).mean()


def ent_coef_loss(log_ent_coef, log_prob, target_entropy):
    """E[-alpha (log pi + H)] (arXiv 1812.05905, equation 18). log_prob: [B]."""
    return -jnp.exp(log_ent_coef) * (log_prob + target_entropy).mean()


def correlated(noise, white, correlation):
    """The next value of correlated noise. Unit variance of `noise` and `white` gives unit variance. All [...]."""
    return correlation * noise + jnp.sqrt(1.0 - jnp.square(correlation)) * white


def random_action(noise):
    """Map standard normal `noise` to uniform in [-1, 1]: twice the distribution function, minus 1."""
    return jax.lax.erf(noise / math.sqrt(2.0))


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


# --- replay ---


class Transition(NamedTuple):
    """One step. A rollout is [num_steps, num_envs]. The replay is a ring, [num_rollouts, num_steps, num_envs]."""

    obs: jax.Array
    action: jax.Array  # in [-1, 1]
    reward: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset
    terminated: jax.Array


def add_to_replay(replay: Transition, rollout: Transition, count) -> Transition:
    """Overwrite the oldest rollout in the ring. `count` rollouts were written before."""
    return jax.tree.map(lambda ring, leaf: ring.at[count % len(ring)].set(leaf), replay, rollout)


def sample_replay(key, replay: Transition, count, shape: tuple[int, ...]) -> Transition:
    """Draw steps [*shape] uniformly from the ring, into which `count` rollouts were written."""
    num_rollouts, num_steps, num_envs = replay.reward.shape
    index = jax.random.randint(
        key, shape, 0, jnp.minimum(count, num_rollouts) * num_steps * num_envs
    )
    return jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[3:])[index], replay)


# --- block scan: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def unrolled_scan(step, carry, xs, unroll=8):
    """`jax.lax.scan`, unrolled only on GPUs, which then run fewer kernels. A CPU would only compile for longer."""
    rolled, unrolled = (
        functools.partial(jax.lax.scan, step, unroll=steps) for steps in (1, unroll)
    )
    return jax.lax.platform_dependent(carry, xs, cpu=rolled, default=unrolled)


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor", of both "critics", [2, ...], and "log_ent_coef"
    target_critics: dict
    opt_state: dict  # of the "critics", and of the "policy" with the entropy coefficient
    replay: Transition
    replay_count: jax.Array  # rollouts written to the replay so far
    obs: jax.Array  # [num_envs, obs_dim]
    env_state: Any  # [num_envs, ...]
    obs_statistics: RunningMeanStd
    noise: jax.Array  # [num_envs, action_dim], exploration noise of the last step
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {
            "params": {"actor": self.params["actor"]},
            "obs_statistics": self.obs_statistics._asdict(),
        }


def make_networks(config: Config, env, env_params):
    action_dim = math.prod(env.action_space(env_params).shape)
    actor = Actor(action_dim, config.hidden_sizes, config.activation)
    return actor, Critic(config.hidden_sizes, config.activation)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    rollout_size = config.num_envs * config.num_steps
    if min(config.num_envs, config.num_steps, config.gradient_steps, config.batch_size) < 1:
        raise ValueError("num_envs, num_steps, gradient_steps, batch_size: must all be at least 1")
    least = config.warmup_timesteps + rollout_size
    if config.total_timesteps < least:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: the warm-up and one update take {least}"
        )
    if config.buffer_size < rollout_size:
        raise ValueError(f"buffer_size = {config.buffer_size}: one update writes {rollout_size}")
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)
    warmup_rollouts = config.warmup_timesteps // rollout_size
    rates = {"critics": config.q_lr, "policy": config.policy_lr}
    optimizers = {name: optax.adam(lr) for name, lr in rates.items()}

    def init(rng):
        """Initialize the networks, and fill the replay with the steps of the warm-up."""
        actor_key, critic_key, env_key, noise_key, warmup_key, key = jax.random.split(rng, 6)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        noise = jax.random.normal(noise_key, (config.num_envs, actor.action_dim))
        params = {
            "actor": actor.init(actor_key, obs),
            "critics": jax.vmap(critic.init, (0, None, None))(
                jax.random.split(critic_key), obs, noise
            ),
            "log_ent_coef": jnp.log(
                jnp.maximum(jnp.float32(config.ent_coef), 1e-4)
            ),  # it could not grow from 0
        }
        groups = {
            "critics": params["critics"],
            "policy": {name: params[name] for name in ("actor", "log_ent_coef")},
        }
        step = Transition(
            obs=obs, action=noise, reward=noise[:, 0], next_obs=obs, terminated=noise[:, 0] > 0
        )
        leading = config.buffer_size // rollout_size, config.num_steps
        state = RunnerState(
            params=params,
            target_critics=params["critics"],
            opt_state={name: optimizers[name].init(leaves) for name, leaves in groups.items()},
            replay=jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), step),
            replay_count=jnp.zeros((), jnp.int32),
            obs=obs,
            env_state=env_state,
            obs_statistics=init_mean_std(obs.shape[1:]),
            noise=noise,
            key=key,
        )
        warm_up = functools.partial(collect, act=lambda obs, noise: random_action(noise))
        return jax.lax.scan(warm_up, state, jax.random.split(warmup_key, warmup_rollouts))[0]

    def normalize_obs(statistics, obs):
        return normalize(statistics, obs) if config.normalize_obs else obs

    def collect(state, key, act):
        """Take `num_steps` steps with actions `act(obs, noise)`, and store them."""

        def step(carry, inputs):
            obs, env_state, noise = carry
            white, env_keys = inputs
            noise = correlated(noise, white, config.noise_correlation)
            action = act(normalize_obs(state.obs_statistics, obs), noise)
            after, env_state, reward, terminated, _, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")
            transition = Transition(
                obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated
            )
            return (after, env_state, noise), (transition, info)

        noise_key, env_key = jax.random.split(key)
        white = jax.random.normal(noise_key, (config.num_steps, *state.noise.shape))
        env_keys = jax.random.split(
            env_key, (config.num_steps, config.num_envs)
        )  # at once: faster than in each step
        carry = state.obs, state.env_state, state.noise
        (obs, env_state, noise), (rollout, info) = jax.lax.scan(step, carry, (white, env_keys))
        replay = add_to_replay(state.replay, rollout, state.replay_count)
        if config.normalize_obs:
            statistics = update_mean_std(
                state.obs_statistics, rollout.obs.reshape(rollout_size, -1)
            )
            state = state._replace(obs_statistics=statistics)
        state = state._replace(replay=replay, replay_count=state.replay_count + 1)
        return state._replace(obs=obs, env_state=env_state, noise=noise), info

    def make_batches(state, key):
        """One batch for each gradient step: [gradient_steps, batch_size, ...]."""
        shape = config.gradient_steps, config.batch_size
        batches = sample_replay(key, state.replay, state.replay_count, shape)
        return batches._replace(
            obs=normalize_obs(state.obs_statistics, batches.obs),
            next_obs=normalize_obs(state.obs_statistics, batches.next_obs),
            reward=config.reward_scale * batches.reward,
        )

    def critics(params, obs, action):  # [2, ...]
        obs, action = (
            jnp.broadcast_to(x, (2, *x.shape)) for x in (obs, action)
        )  # saves GPUs transposes
        return jax.vmap(critic.apply)(params, obs, action)

    def critic_objective(params, batch, target):
        q = critics(params, batch.obs, batch.action)
        loss = td_loss(q, target)
        return loss, {"td_loss": loss, "q_value": q.mean()}

    def policy_objective(params, batch, noise, critic_params):
        """Loss of the policy and of the entropy coefficient; each treats the other as a constant."""
        action, log_prob = squashed_gaussian(*actor.apply(params["actor"], batch.obs), noise)
        ent_coef = jax.lax.stop_gradient(entropy_coefficient(params))
        loss = policy_loss(critics(critic_params, batch.obs, action), log_prob, ent_coef)
        metrics = {"policy_loss": loss, "entropy": -log_prob.mean(), "ent_coef": ent_coef}
        if config.learn_ent_coef:
            target_entropy = config.target_entropy * actor.action_dim
            loss += ent_coef_loss(
                params["log_ent_coef"], jax.lax.stop_gradient(log_prob), target_entropy
            )
        return loss, metrics

    def entropy_coefficient(params):
        return jnp.exp(params["log_ent_coef"]) if config.learn_ent_coef else config.ent_coef

    def descend(name, grads, params, opt_state):
        updates, new = optimizers[name].update(grads, opt_state[name])
        return optax.apply_updates(params, updates), opt_state | {name: new}

    def gradient_step(carry, inputs):
        """Update the critics, then the policy and the entropy coefficient against the updated critics."""
        params, target_critics, opt_state = carry
        batch, (next_noise, noise) = inputs
        next_action, next_log_prob = squashed_gaussian(
            *actor.apply(params["actor"], batch.next_obs), next_noise
        )
        next_q, ent_coef = (
            critics(target_critics, batch.next_obs, next_action),
            entropy_coefficient(params),
        )
        target = soft_target(
            batch.reward, batch.terminated, next_q, next_log_prob, ent_coef, config.gamma
        )
        critic_params, policy_params = (
            params["critics"],
            {name: params[name] for name in ("actor", "log_ent_coef")},
        )
        grads, metrics = jax.grad(critic_objective, has_aux=True)(critic_params, batch, target)
        critic_params, opt_state = descend("critics", grads, critic_params, opt_state)
        grads, policy_metrics = jax.grad(policy_objective, has_aux=True)(
            policy_params, batch, noise, critic_params
        )
        policy_params, opt_state = descend("policy", grads, policy_params, opt_state)
        target_critics = optax.incremental_update(critic_params, target_critics, config.tau)
        return (
            policy_params | {"critics": critic_params},
            target_critics,
            opt_state,
        ), metrics | policy_metrics

    def learn(state, key):
        batch_key, noise_key = jax.random.split(key)
        noise = jax.random.normal(
            noise_key, (config.gradient_steps, 2, config.batch_size, actor.action_dim)
        )
        carry, inputs = (
            (state.params, state.target_critics, state.opt_state),
            (make_batches(state, batch_key), noise),
        )
        (params, target_critics, opt_state), metrics = unrolled_scan(gradient_step, carry, inputs)
        state = state._replace(params=params, target_critics=target_critics, opt_state=opt_state)
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        def act(obs, noise):
            return squashed_gaussian(*actor.apply(state.params["actor"], obs), noise)[0]

        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state, info = collect(state._replace(key=key), collect_key, act)
        state, metrics = learn(state, learn_key)
        return state, metrics | episode_metrics(info)

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
        return jnp.tanh(actor.apply(agent["params"]["actor"], obs)[0]), memory  # the mean

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
