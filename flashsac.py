# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2", "distrax>=0.1.9",
#     "tfp-nightly==0.26.0.dev20261027",  # for distrax, which does not ask for it
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "optax>=0.2.8", "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""FlashSAC, the whole training in one jit.

Kim et al. 2026, "FlashSAC: Fast and Stable Off-Policy Reinforcement Learning for High-Dimensional
Robot Control" (arXiv 2604.04539): soft actor-critic (arXiv 1812.05905) with networks whose weights
cannot grow. They are residual blocks with batch normalization, and each weight vector is scaled to
a fixed norm after each step of the optimizer. The critics are classifiers over evenly spaced values
(C51, arXiv 1707.06887), rewards are scaled to fit them, and exploration noise is held for some
steps.

Differences from the paper: one-step targets, single precision, and smaller networks by default. The
discounted return that scales the rewards begins anew after the last step of an episode; in the
authors' code, the reward of the last step counts for the next episode. An episode that its time
limit truncates is bootstrapped from its last observation.

Before learning, `init` takes `learning_starts` random steps into the replay. The replay is a ring
of `buffer_size` steps in `runner_state`. A step takes 4 (2 obs_dim + action_dim + 1) + 1 bytes:
with the defaults 0.66 MB per agent.

    python flashsac.py --env-name Pendulum-v1 --num-seeds 8

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
import re
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

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
from flax.struct import dataclass as pytree
from gymnax.environments import environment, spaces
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save
from tqdm import tqdm

with contextlib.redirect_stdout(io.StringIO()):  # brax prints which optional packages it lacks
    import brax.envs


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
    """Hyperparameters. The defaults are tuned for a short run on two CPU cores.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "Pendulum-v1"  # brax or gymnax environment; MODULE:NAME imports MODULE first
    # parameters of the environment: NAME VALUE ...; brax's `backend` is spring by default
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    total_timesteps: int = 20_000  # environment steps per agent, warm-up included
    num_envs: int = 4  # environments per agent
    num_steps: int = 1  # steps per environment and update
    gradient_steps: int = 4  # gradient steps per update, each on a new batch
    batch_size: int = 256  # transitions per gradient step
    buffer_size: int = 20_000  # capacity of the replay in steps, rounded down to whole rollouts
    learning_starts: int = 1000  # random steps before learning, rounded up to whole rollouts
    lr: float = 1e-3  # Adam's learning rate at the start
    lr_end_fraction: float = 0.5  # share of lr at the end of half a cosine, for the critics
    gamma: float = 0.99  # discount factor
    tau: float = 0.01  # Polyak factor of the target critics, in each gradient step
    policy_delay: int = 2  # critic updates per policy update; must divide gradient_steps
    ent_coef: float = 0.01  # initial weight of the entropy of scaled rewards; the weight is learned
    target_std: float = 0.15  # the target entropy is a Gaussian's with this standard deviation
    max_noise_steps: int = 16  # longest time in steps that exploration noise is held; 1 for fresh
    warmup_noise_steps: int = 1  # the same for the random actions before learning
    noise_exponent: float = 2.0  # noise is held for k steps with probability ~ k^-noise_exponent
    normalize_reward: bool = True  # scale rewards by the discounted return's std and largest value
    value_limit: float = 5.0  # largest |value| that the critics can represent, of scaled rewards
    num_atoms: int = 101  # atoms of the critics between -value_limit and value_limit
    hidden_size: int = 32  # units of the actor's blocks
    critic_hidden_size: int = 32  # units of the critics' blocks
    num_blocks: int = 1  # residual blocks of each network, each of two layers

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))  # hashable

    @property
    def rollout_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def warmup_rollouts(self) -> int:
        return math.ceil(self.learning_starts / self.rollout_size)

    @property
    def warmup_timesteps(self) -> int:
        return self.warmup_rollouts * self.rollout_size

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.warmup_timesteps) // self.rollout_size


# --- networks ---

# bounds of the log standard deviation before squashing
LOG_STD_MIN = -10.0
LOG_STD_MAX = 2.0


def preprocess(obs, space):
    """What networks take: floats. Bytes up to 255 are brightnesses, and are divided by 255."""
    is_brightness = obs.dtype == jnp.uint8 and np.asarray(space.high).max() == 255
    return obs.astype(jnp.float32) / (255.0 if is_brightness else 1.0)


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


def linear(size: int, use_bias: bool = False):
    return nn.Dense(size, use_bias=use_bias, kernel_init=orthogonal(1.0))


def batch_norm(training: bool, use_fast_variance: bool = True):
    """In training the batch's own statistics normalize, and the running statistics follow them."""
    return nn.BatchNorm(
        use_running_average=not training,
        momentum=0.99,
        epsilon=1e-5,
        use_fast_variance=use_fast_variance,
    )


class Block(nn.Module):
    """Residual block that widens its inputs four times: [..., features] -> [..., features]."""

    @nn.compact
    def __call__(self, x, training: bool):
        size = x.shape[-1]
        y = linear(4 * size)(x)
        y = nn.relu(batch_norm(training)(y))
        y = linear(size)(y)
        return x + nn.relu(batch_norm(training)(y))


class ResNet(nn.Module):
    """Normalized inputs, residual blocks and a linear head: [..., features] -> [..., outputs]."""

    hidden_size: int
    num_blocks: int
    outputs: int

    @nn.compact
    def __call__(self, x, training: bool):
        x = x.astype(jnp.float32)  # as the statistics are, also in 64-bit mode
        # the fast variance, E[x^2] - E[x]^2, is wrong where observations are far from 0
        x = batch_norm(training, use_fast_variance=False)(x)
        x = linear(self.hidden_size)(x)
        for _ in range(self.num_blocks):
            x = Block()(x, training)
        x = nn.RMSNorm()(x)
        return linear(self.outputs, use_bias=True)(x)


class Actor(nn.Module):
    """Gaussian before squashing: [..., obs_dim] -> distribution over [..., action_dim]."""

    obs_space: Any
    action_dim: int
    hidden_size: int
    num_blocks: int

    @nn.compact
    def __call__(self, obs, training: bool):
        x = preprocess(obs, self.obs_space)
        network = ResNet(self.hidden_size, self.num_blocks, 2 * self.action_dim)
        mean, log_std = jnp.split(network(x, training), 2, axis=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (jnp.tanh(log_std) + 1.0)
        return distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))


class Critic(nn.Module):
    """Distribution of Q(s, a): [..., obs_dim], [..., action_dim] -> logits [..., num_atoms]."""

    obs_space: Any
    hidden_size: int
    num_blocks: int
    num_atoms: int

    @nn.compact
    def __call__(self, obs, action, training: bool):
        x = jnp.concatenate([preprocess(obs, self.obs_space), action], axis=-1)
        return ResNet(self.hidden_size, self.num_blocks, self.num_atoms)(x, training)


# --- mathematics: arrays in, arrays out ---


def squash(gaussian):
    """The distribution of tanh(u), where u is Gaussian (arXiv 1801.01290, equation 21).

    Sample and score it in one call, `sample_and_log_prob`: tanh has no inverse where it saturates.
    """
    return distrax.Transformed(gaussian, distrax.Block(distrax.Tanh(), ndims=1))


def mean_value(logits, support):
    """Q, the mean of the distribution over the atoms of `support` [K]. [..., K] -> [...]."""
    return (nn.softmax(logits) * support).sum(axis=-1)  # not `@`, which GPUs round to TF32


def bellman_target(reward, terminated, next_logits, next_log_prob, support, ent_coef, gamma):
    """Values and probabilities of r + gamma (1 - terminated) (Z'(s', a') - alpha log pi(a'|s')).

    Z' is the distribution of the target critic with the lower mean. next_logits: [2, B, K],
    support: [K], all others [B] -> [B, K], [B, K].
    """
    lower = mean_value(next_logits, support).argmin(axis=0)
    next_logits = jnp.take_along_axis(next_logits, lower[None, :, None], axis=0)[0]
    next_values = support - ent_coef * next_log_prob[:, None]
    next_values = jnp.where(terminated[:, None], 0.0, next_values)
    return reward[:, None] + gamma * next_values, nn.softmax(next_logits)


def project(values, probability, support):
    """Split the probability of each value between its two nearest atoms.

    Equation 7 of arXiv 1707.06887.

    `values` and `probability` are [B, K]. The atoms of `support` [K] are evenly spaced. -> [B, K].
    """
    width = jnp.maximum((support[-1] - support[0]) / (len(support) - 1), 1e-6)
    place = jnp.clip((values - support[0]) / width, 0.0, len(support) - 1.0)  # in units of atoms

    def add_value(target, place_and_probability):  # of one value of each sample: [B], [B]
        place, probability = place_and_probability
        distance = jnp.abs(place[:, None] - jnp.arange(len(support)))
        return target + jnp.clip(1.0 - distance, 0.0, 1.0) * probability[:, None], None

    # A loop: on CPUs, XLA takes 15 times as long for a sum over all values at once.
    columns = (place.T, probability.T)
    target, _ = jax.lax.scan(add_value, jnp.zeros_like(probability), columns, unroll=16)
    return target


def critic_loss(logits, target):
    """Mean cross-entropy of both critics. logits: [2, B, K], target: [B, K]."""
    return optax.softmax_cross_entropy(logits, target).mean()


def policy_loss(q, log_prob, ent_coef):
    """E[alpha log pi - min_j Q_j] (arXiv 1812.05905, equation 9). q: [2, B], log_prob: [B]."""
    return (ent_coef * log_prob - q.min(axis=0)).mean()


def ent_coef_loss(log_ent_coef, entropy, target_entropy):
    """alpha (H - target), where H = E[-log pi] (arXiv 1812.05905, equation 18). Scalars."""
    return jnp.exp(log_ent_coef) * (entropy - target_entropy)


def gaussian_entropy(std):
    """Entropy of a Gaussian with this standard deviation, per dimension."""
    return 0.5 * jnp.log(2.0 * jnp.pi * jnp.e * jnp.square(std) + 1e-12)


def fix_norms(params: dict) -> dict:
    """Give each weight vector of one network a fixed norm. Biases of linear layers stay.

    The weights of a unit have norm 1. The gain and bias of a normalization of d features together
    have norm sqrt(d).
    """
    fixed = {}
    for name, layer in params.items():
        if "kernel" in layer and layer["kernel"].ndim == 2:  # [inputs, units]
            norm = jnp.linalg.norm(layer["kernel"], axis=0)
            fixed[name] = layer | {"kernel": layer["kernel"] / (norm + 1e-8)}
        elif "scale" in layer:  # [d], and a bias in batch normalization
            norm = jnp.linalg.norm(jnp.concatenate(list(layer.values())))
            factor = math.sqrt(len(layer["scale"])) / (norm + 1e-8)
            fixed[name] = {key: factor * value for key, value in layer.items()}
        elif all(isinstance(entry, dict) for entry in layer.values()):
            fixed[name] = fix_norms(layer)
        else:
            raise ValueError(f"fix_norms: {name} has weights that are not of a dense layer")
    return fixed


def sample_noise_steps(key, max_steps: int, exponent):
    """For how many steps noise is held: k from 1 to max_steps with probability ~ k^-exponent."""
    log_probability = -exponent * jnp.log(jnp.arange(1.0, max_steps + 1.0))
    return 1 + jax.random.categorical(key, log_probability).astype(jnp.int32)


def normal_to_uniform(noise):
    """Standard normal `noise` becomes uniform in [-1, 1]: 2 Phi(noise) - 1."""
    return jax.lax.erf(noise / math.sqrt(2.0))


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


def reward_divisor(return_statistics: RunningMeanStd, largest_return, value_limit):
    """What rewards are divided by: the std of discounted returns, or more to fit the largest."""
    std = jnp.sqrt(return_statistics.var + 1e-8)
    return jnp.maximum(std, largest_return / jnp.maximum(value_limit, 1e-6))


# --- replay: a ring of rollouts ---


class Transition(NamedTuple):
    """One step. A rollout is [num_steps, num_envs], the replay [rollouts, num_steps, num_envs]."""

    obs: jax.Array
    action: jax.Array  # in [-1, 1]
    reward: jax.Array  # not scaled
    next_obs: jax.Array  # after the step, before auto-reset
    terminated: jax.Array


def add_rollout(replay: Transition, rollout: Transition, count) -> Transition:
    """Overwrite the oldest rollout. `count` rollouts were added before."""
    return jax.tree.map(
        lambda ring, new: ring.at[count % len(ring)].set(new.astype(ring.dtype)), replay, rollout
    )


def sample(key, replay: Transition, count, batch_size: int) -> Transition:
    """Draw steps uniformly, with replacement, from the `count` rollouts so far. [B, ...]."""
    num_rollouts, num_steps, num_envs = replay.reward.shape
    filled = jnp.minimum(count, num_rollouts) * num_steps * num_envs
    index = jax.random.randint(key, (batch_size,), 0, filled)
    return jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[3:])[index], replay)


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor", both "critics" [2, ...] and "log_ent_coef"
    target_params: dict  # of both target "critics" [2, ...]
    batch_stats: dict  # running statistics of "actor" and both "critics" [2, ...]
    opt_state: dict  # one for each entry of `params`
    replay: Transition
    rollout_count: jax.Array  # rollouts so far, warm-up included
    obs: jax.Array  # [num_envs, obs_dim]
    env_state: Any  # [num_envs, ...]
    return_statistics: RunningMeanStd
    largest_return: jax.Array  # largest |discounted return| so far
    discounted_return: jax.Array  # [num_envs], of the running episodes: R = gamma R + r
    noise: jax.Array  # [num_envs, action_dim], exploration noise of the last step
    noise_steps_left: jax.Array  # for how many more steps it is held in all environments
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {
            "params": {"actor": self.params["actor"]},
            "batch_stats": {"actor": self.batch_stats["actor"]},
        }


def make_networks(config: Config, env, env_params):
    with jax.ensure_compile_time_eval():  # its bounds stay concrete numbers, also inside a jit
        space = env.observation_space(env_params)
    action_dim = math.prod(env.action_space(env_params).shape)
    actor = Actor(space, action_dim, config.hidden_size, config.num_blocks)
    critic = Critic(space, config.critic_hidden_size, config.num_blocks, config.num_atoms)
    return actor, critic


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    least = {"gradient_steps": 1, "policy_delay": 1, "batch_size": 2, "num_atoms": 2}
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least {minimum}")
    if config.gradient_steps % config.policy_delay != 0:
        raise ValueError(
            f"policy_delay = {config.policy_delay}: must divide "
            f"gradient_steps = {config.gradient_steps}"
        )
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: the warm-up and one update take "
            f"{config.warmup_timesteps + config.rollout_size}"
        )
    num_rollouts = config.buffer_size // config.rollout_size
    if num_rollouts < 1:
        raise ValueError(
            f"buffer_size = {config.buffer_size}: one update adds {config.rollout_size} steps"
        )
    env, env_params = make_env(config)
    reset_env = jax.vmap(env.reset, in_axes=(0, None))
    step_env = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)
    evaluate_actor = functools.partial(actor.apply, training=False)
    train_actor = functools.partial(actor.apply, training=True, mutable=["batch_stats"])
    evaluate_critic = functools.partial(critic.apply, training=False)
    train_critic = functools.partial(critic.apply, training=True, mutable=["batch_stats"])
    evaluate_critics = jax.vmap(evaluate_critic, in_axes=(0, None, None))  # [2, ...]
    train_critics = jax.vmap(train_critic, in_axes=(0, None, None))
    support = config.value_limit * jnp.linspace(-1.0, 1.0, config.num_atoms)
    target_entropy = gaussian_entropy(config.target_std) * actor.action_dim
    num_gradient_steps = config.num_updates * config.gradient_steps
    # One schedule for all, as in the authors' code. Policy and entropy coefficient take fewer
    # steps than the critics, and end on a higher rate.
    schedule = optax.cosine_decay_schedule(config.lr, num_gradient_steps, config.lr_end_fraction)
    optimizer = optax.adam(schedule)

    def init(rng):
        """Initialize the networks, and fill the replay by `warmup_timesteps` random steps."""
        actor_key, critic_key, env_key, noise_key, warmup_key, key = jax.random.split(rng, 6)
        obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        noise = jax.random.normal(noise_key, (config.num_envs, actor.action_dim))

        init_critic = functools.partial(critic.init, training=True)
        init_critics = jax.vmap(init_critic, in_axes=(0, None, None))
        actor_variables = actor.init(actor_key, obs, training=True)
        # noise has the shape of an action; the first step draws its own
        critic_variables = init_critics(jax.random.split(critic_key, 2), obs, noise)
        ent_coef = jnp.maximum(jnp.float32(config.ent_coef), 1e-4)  # from 0 it could not grow
        params = {
            "actor": fix_norms(actor_variables["params"]),
            "critics": jax.vmap(fix_norms)(critic_variables["params"]),
            "log_ent_coef": jnp.log(ent_coef),
        }
        batch_stats = {
            "actor": actor_variables["batch_stats"],
            "critics": critic_variables["batch_stats"],
        }
        opt_state = {name: optimizer.init(params[name]) for name in params}
        shape = (num_rollouts, config.num_steps, config.num_envs)
        empty_obs = jnp.zeros((*shape, *obs.shape[1:]), obs.dtype)
        replay = Transition(
            obs=empty_obs,
            action=jnp.zeros((*shape, actor.action_dim)),
            reward=jnp.zeros(shape),
            next_obs=empty_obs,
            terminated=jnp.zeros(shape, bool),
        )
        state = RunnerState(
            params=params,
            target_params={"critics": params["critics"]},
            batch_stats=batch_stats,
            opt_state=opt_state,
            replay=replay,
            rollout_count=jnp.int32(0),
            obs=obs,
            env_state=env_state,
            return_statistics=init_mean_std(()),
            largest_return=jnp.zeros(()),
            discounted_return=jnp.zeros(config.num_envs),
            noise=noise,
            noise_steps_left=jnp.int32(0),
            key=key,
        )

        def warm_up(state, key):
            return collect(state, key, act_randomly, config.warmup_noise_steps)

        warmup_keys = jax.random.split(warmup_key, config.warmup_rollouts)
        state, _ = jax.lax.scan(warm_up, state, warmup_keys)
        return state

    def variables(state, name):
        """What the network `name` takes."""
        return {"params": state.params[name], "batch_stats": state.batch_stats[name]}

    def act_randomly(state, obs, noise):
        return normal_to_uniform(noise)

    def act_with_noise(state, obs, noise):
        gaussian = evaluate_actor(variables(state, "actor"), obs)
        return jnp.tanh(gaussian.loc + gaussian.scale_diag * noise)

    def collect(state, key, act, max_noise_steps):
        """Take `num_steps` steps with actions `act(state, obs, noise)`, and store them."""

        def step(state, key):  # networks and replay stay
            noise_key, noise_steps_key, env_key = jax.random.split(key, 3)
            new_noise = jax.random.normal(noise_key, state.noise.shape)
            new_steps = sample_noise_steps(noise_steps_key, max_noise_steps, config.noise_exponent)
            is_over = state.noise_steps_left == 0
            noise = jnp.where(is_over, new_noise, state.noise)
            noise_steps_left = jnp.where(is_over, new_steps, state.noise_steps_left) - 1
            action = act(state, state.obs, noise)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, truncated, info = step_env(
                env_keys, state.env_state, action, env_params
            )
            next_obs = info.pop("final_observation")  # before auto-reset
            transition = Transition(
                obs=state.obs,
                action=action,
                reward=reward,
                next_obs=next_obs,
                terminated=terminated,
            )
            discounted_return = config.gamma * state.discounted_return + reward
            state = state._replace(
                obs=obs_after_reset,
                env_state=env_state,
                discounted_return=jnp.where(terminated | truncated, 0.0, discounted_return),
                noise=noise,
                noise_steps_left=noise_steps_left,
            )
            return state, (transition, discounted_return, info)

        keys = jax.random.split(key, config.num_steps)
        state, (rollout, returns, info) = jax.lax.scan(step, state, keys)
        state = state._replace(
            replay=add_rollout(state.replay, rollout, state.rollout_count),
            rollout_count=state.rollout_count + 1,
            return_statistics=update_mean_std(state.return_statistics, returns.reshape(-1)),
            largest_return=jnp.maximum(state.largest_return, jnp.abs(returns).max()),
        )
        return state, info

    def divisor(state):
        if not config.normalize_reward:
            return jnp.float32(1.0)
        return reward_divisor(state.return_statistics, state.largest_return, config.value_limit)

    def make_batch(state, key):
        batch = sample(key, state.replay, state.rollout_count, config.batch_size)
        return batch._replace(reward=batch.reward / divisor(state))

    def critic_loss_fn(critic_params, state, batch, key):
        next_policy = squash(evaluate_actor(variables(state, "actor"), batch.next_obs))
        next_action, next_log_prob = next_policy.sample_and_log_prob(seed=key)

        # One pass over s and s', so that the statistics of one batch normalize both. Running
        # statistics are kept for the online critics alone: targets never run without a batch.
        obs = jnp.concatenate([batch.obs, batch.next_obs])
        action = jnp.concatenate([batch.action, next_action])
        critic_variables = variables(state, "critics") | {"params": critic_params}
        logits, changed = train_critics(critic_variables, obs, action)
        target_variables = variables(state, "critics") | {"params": state.target_params["critics"]}
        target_logits, _ = train_critics(target_variables, obs, action)
        logits = logits[:, : config.batch_size]  # of s
        next_logits = target_logits[:, config.batch_size :]  # of s'

        values, probability = bellman_target(
            batch.reward,
            batch.terminated,
            next_logits=next_logits,
            next_log_prob=next_log_prob,
            support=support,
            ent_coef=jnp.exp(state.params["log_ent_coef"]),
            gamma=config.gamma,
        )
        target = project(values, probability, support)
        loss = critic_loss(logits, target)
        # probability of values that no atom can represent; if it stays above 0, raise value_limit
        outside = jnp.where(jnp.abs(values) > config.value_limit, probability, 0.0).sum(axis=-1)
        metrics = {
            "critic_loss": loss,
            "q_value": mean_value(logits, support).mean(),
            "outside_support": outside.mean(),
        }
        return loss, (changed["batch_stats"], metrics)

    def actor_loss_fn(actor_params, state, batch, key):
        # The statistics of s and s' normalize both, as in the critics. Only s enters the loss.
        gaussian, changed = train_actor(
            variables(state, "actor") | {"params": actor_params},
            jnp.concatenate([batch.obs, batch.next_obs]),
        )
        policy = squash(gaussian[: config.batch_size])
        action, log_prob = policy.sample_and_log_prob(seed=key)
        logits = evaluate_critics(variables(state, "critics"), batch.obs, action)
        q = mean_value(logits, support)
        ent_coef = jnp.exp(state.params["log_ent_coef"])
        loss = policy_loss(q, log_prob, ent_coef)
        metrics = {"policy_loss": loss, "entropy": -log_prob.mean(), "ent_coef": ent_coef}
        return loss, (changed["batch_stats"], metrics)

    def descend(state, name, grads):
        """A step of the optimizer of `params[name]`, and the fixed norms of a network."""
        updates, opt_state = optimizer.update(grads, state.opt_state[name])
        params = optax.apply_updates(state.params[name], updates)
        if name == "actor":
            params = fix_norms(params)
        if name == "critics":
            params = jax.vmap(fix_norms)(params)
        return state._replace(
            params=state.params | {name: params},
            opt_state=state.opt_state | {name: opt_state},
        )

    def critic_step(state, batch_and_key):
        """Update the critics, then the target critics."""
        batch, key = batch_and_key
        critic_grad = jax.grad(critic_loss_fn, has_aux=True)
        grads, (batch_stats, metrics) = critic_grad(state.params["critics"], state, batch, key)
        state = state._replace(batch_stats=state.batch_stats | {"critics": batch_stats})
        state = descend(state, "critics", grads)
        params = {"critics": state.params["critics"]}
        target_params = optax.incremental_update(params, state.target_params, config.tau)
        return state._replace(target_params=target_params), metrics

    def actor_step(state, batch, key):
        """Update the policy, then the entropy coefficient."""
        actor_grad = jax.grad(actor_loss_fn, has_aux=True)
        grads, (batch_stats, metrics) = actor_grad(state.params["actor"], state, batch, key)
        state = state._replace(batch_stats=state.batch_stats | {"actor": batch_stats})
        state = descend(state, "actor", grads)

        ent_coef_grad = jax.grad(ent_coef_loss)
        grads = ent_coef_grad(state.params["log_ent_coef"], metrics["entropy"], target_entropy)
        return descend(state, "log_ent_coef", grads), metrics

    def step_group(state, key):
        """Update policy and entropy coefficient once, then the critics `policy_delay` times.

        The policy comes first, on the first batch, as in the authors' code. In sac.py and td3.py
        the critics come first.
        """
        batch_key, action_key, next_action_key = jax.random.split(key, 3)
        batch_keys = jax.random.split(batch_key, config.policy_delay)
        batches = jax.vmap(make_batch, in_axes=(None, 0))(state, batch_keys)
        first_batch = jax.tree.map(lambda x: x[0], batches)
        state, actor_metrics = actor_step(state, first_batch, action_key)

        next_action_keys = jax.random.split(next_action_key, config.policy_delay)
        state, critic_metrics = jax.lax.scan(critic_step, state, (batches, next_action_keys))
        return state, actor_metrics | critic_metrics

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state = state._replace(key=key)
        state, info = collect(state, collect_key, act_with_noise, config.max_noise_steps)
        num_groups = config.gradient_steps // config.policy_delay
        keys = jax.random.split(learn_key, num_groups)
        state, metrics = jax.lax.scan(step_group, state, keys)
        metrics = jax.tree.map(jnp.mean, metrics) | {"reward_divisor": divisor(state)}
        return state, metrics | episode_metrics(info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`act(agent, obs) -> action`, the greedy policy, with actions in [-1, 1]."""
    actor, _ = make_networks(config, *make_env(config))

    def act(agent, obs):
        variables = {name: agent[name]["actor"] for name in ("params", "batch_stats")}
        return jnp.tanh(actor.apply(variables, obs, training=False).mode())

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


# --- environments with continuous actions (shared) ---


@pytree
class BraxState(environment.EnvState):
    brax: Any


class BraxEnv(environment.Environment):
    """A brax environment. An episode begins in one of 1024 states: a look-up, not a slow reset."""

    def __init__(self, name: str, backend: str = "spring", **kwargs):  # spring compiles fastest
        with warnings.catch_warnings(action="ignore"):  # brax is no longer maintained
            self.env = brax.envs.get_environment(name, backend=backend, **kwargs)

    @functools.cached_property
    def start_states(self):
        """States of brax, [1024, ...]."""
        with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
            quickly = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
            reset = jax.jit(jax.vmap(self.env.reset), compiler_options=quickly)
            return reset(jax.random.split(jax.random.key(0), 1024))

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=1000)

    def reset_env(self, key, params):
        index = jax.random.randint(key, (), 0, len(self.start_states.done))
        start = jax.tree.map(lambda x: x[index], self.start_states)
        return start.obs, BraxState(time=jnp.int32(0), brax=start)

    def step_env(self, key, state, action, params):
        with jax.default_matmul_precision("highest"):  # GPUs would round products in the physics
            brax_state = self.env.step(state.brax, action)
        finite = jnp.isfinite(brax_state.obs).all() & jnp.isfinite(brax_state.reward)
        obs = jnp.where(finite, brax_state.obs, 0.0)  # physics that blew up end the episode
        reward = jnp.where(finite, brax_state.reward, 0.0)
        terminated = (brax_state.done > 0.5) | ~finite
        return obs, BraxState(time=state.time + 1, brax=brax_state), reward, terminated, {}

    def observation_space(self, params):
        """A box. If brax observes a dict, a dict of boxes, for which `make_env` raises an error."""
        start = jax.eval_shape(self.env.reset, jax.random.key(0))
        return jax.tree.map(lambda x: spaces.Box(-jnp.inf, jnp.inf, x.shape), start.obs)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (self.env.action_size,))


class RescaleAction(GymnaxWrapper):
    """Take actions in [-1, 1], clip others, and rescale them to the environment's bounds."""

    def step(self, key, state, action, params):
        space = self._env.action_space(params)
        unit = (jnp.clip(action, -1.0, 1.0).reshape(space.shape) + 1.0) / 2.0
        action = space.low + unit * (space.high - space.low)
        action = jnp.clip(action, space.low, space.high)  # rounding may have left the bounds
        action = action.astype(float)  # in 64-bit mode the environment's state has 64 bits too
        return self._env.step(key, state, action, params)


def make_brax_or_gymnax(name: str, **arguments):
    """`gymnax.make` that knows brax's environments, too. Names that are registered come first."""
    if name in gymnax.registered_envs or name not in brax.envs._envs:
        return gymnax.make(name, **arguments)
    env = BraxEnv(name, **arguments)
    return env, env.default_params


def make_env(config):
    """`(env, env_params)`: gymnax's interface, actions in [-1, 1], statistics in `info`."""
    name = config.env_name
    env, env_params = make_gymnax_env(name, config.env_params, make=make_brax_or_gymnax)
    with jax.ensure_compile_time_eval():  # the bounds stay concrete numbers, also inside a jit
        space = env.action_space(env_params)
        # bounds near the largest float are none: to rescale actions to them would overflow
        bounded = isinstance(space, spaces.Box) and (np.abs([space.low, space.high]) < 1e37).all()
    if not bounded or not jnp.issubdtype(space.dtype, jnp.floating):
        raise ValueError(f"env_name = {name}: must have bounded actions that are floats")
    if not isinstance(env.observation_space(env_params), spaces.Box):
        raise ValueError(f"env_name = {name}: must observe one array, not state indices")
    return LogEpisodes(FlattenObservationWrapper(RescaleAction(env))), env_params


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
