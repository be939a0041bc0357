# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2",
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
"""Twin delayed deep deterministic policy gradient for continuous actions, the whole training in one jit.

Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods" (arXiv 1802.09477, algorithm 1):
the smaller of two target critics, target actions that are smoothed by noise, a policy that is updated less often.

Beside the paper: many environments per agent, any number of gradient steps per update, exploration whose noise may be
correlated in time. An episode that ends by its time limit is bootstrapped from its last observation; one that
terminates is not. Before training, `init` fills the replay with steps of uniformly random actions, so that no update
has to ask whether to learn.

The replay is a ring in `runner_state`, written in place: `buffer_size` steps and never more. A step takes 4 bytes times
(2 obs_dim + action_dim + 2): with the defaults 36 bytes, 0.72 MB per agent, 184 MB for 256 seeds. A replay of 1e6 steps
of brax's hopper takes 108 MB per agent and 28 GB for 256 seeds.

    python td3.py --env-name Pendulum-v1 --num-seeds 8

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
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
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

# gymnax and brax are imported where they are used: importing gymnax starts JAX's backend, and `main` has to make each
# core a device before that.


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

    env_name: str = "Pendulum-v1"  # a brax or a gymnax environment with continuous actions
    env_params: Mapping = FrozenDict()  # its parameters or constructor arguments, such as {backend: positional} in brax
    max_episode_steps: int = 0  # time limit; 0 keeps the environment's own (1000 in brax)
    total_timesteps: int = 20_000  # environment steps per agent, with learning_starts
    num_envs: int = 4  # environments per agent
    num_steps: int = 1  # steps per environment and update
    gradient_steps: int = 4  # per update, each on a batch of its own
    batch_size: int = 256  # steps that a gradient step learns from
    buffer_size: int = 20_000  # steps that the replay holds, rounded down to a multiple of num_envs
    learning_starts: int = 1000  # steps with random actions before learning, rounded up to a multiple of num_envs
    lr: float = 1e-3  # Adam's learning rate, of all that is learned
    gamma: float = 0.98  # discount
    tau: float = 0.01  # share of the way that the target networks go to the networks with each step of the policy
    policy_delay: int = 2  # steps of the critics for one of the policy; fastest where it divides gradient_steps
    target_noise: float = 0.2  # standard deviation of the noise on the actions of targets
    noise_clip: float = 0.5  # and its largest value
    exploration_noise: float = 0.1  # standard deviation of the noise on actions, in units in which they are in [-1, 1]
    noise_correlation: float = 0.0  # of the noise in successive steps of exploration, random actions too; 0 is white
    reward_scale: float = 1.0  # that rewards are multiplied with
    normalize_obs: bool = False  # by the running mean and variance of this agent
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the actor and of each critic
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
    sizes = ("num_envs", "num_steps", "gradient_steps", "batch_size", "buffer_size", "policy_delay")
    require(config, "total_timesteps", *sizes, low=1)
    require(config, "gamma", "tau", "noise_correlation", low=0, high=1)
    require(config, "max_episode_steps", "learning_starts", "lr", low=0)
    require(config, "target_noise", "noise_clip", "exploration_noise", low=0)
    require(config, "reward_scale", low=-1e12)
    batch = config.num_envs * config.num_steps
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: learning_starts = {config.learning_starts} is taken off, "
            f"and one update takes num_envs * num_steps = {batch}"
        )
    rows = max(config.num_steps, config.warmup_steps)
    if config.buffer_size < rows * config.num_envs:
        raise ValueError(
            f"buffer_size = {config.buffer_size}: must be at least {rows * config.num_envs}, num_envs times the "
            "larger of num_steps and the steps of the warm-up"
        )
    if not config.hidden_sizes or min(config.hidden_sizes) < 1:
        raise ValueError(f"hidden_sizes = {config.hidden_sizes}: must be positive sizes, such as (64, 64)")
    if config.activation not in ("tanh", "relu", "elu", "gelu", "swish"):
        raise ValueError(f"activation = {config.activation}: must be tanh, relu, elu, gelu or swish")


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


# --- block continuous: the same in every script, copied by tools/sync_blocks.py ---
@flax.struct.dataclass
class BraxParams:
    """What a brax environment is given at each step, as gymnax's EnvParams are."""

    max_steps_in_episode: int
    start_states: Any = None  # brax states [pool, ...], one pool per agent


@flax.struct.dataclass
class BraxState:
    brax_state: Any
    time: jax.Array  # steps in this episode
    partial_episode: jax.Array  # the clock of this episode did not start at 0


class BraxEnv:
    """A brax environment behind gymnax's interface: six-value `step`, auto-reset, `final_observation`.

    A reset is much dearer to compile and run than a lookup, so an episode starts from a random state of a pool, which
    `reset_envs` fills anew for each agent.
    """

    def __init__(self, env):
        from gymnax.environments import spaces

        self.env = env
        state = jax.eval_shape(env.reset, jax.random.key(0))  # `env.observation_size` would run it
        jax.eval_shape(env.step, state, jax.ShapeDtypeStruct((env.action_size,), jnp.float32))  # raises what it may
        self.observation_space = lambda params: spaces.Box(-jnp.inf, jnp.inf, state.obs.shape)
        self.action_space = lambda params: spaces.Box(-1.0, 1.0, (env.action_size,))

    def reset(self, key, params):
        state = self.env.reset(key)
        return state.obs, BraxState(state, jnp.zeros((), jnp.int32), jnp.zeros((), bool))

    def step(self, key, state, action, params):
        after = self.env.step(state.brax_state, action)
        time = state.time + 1
        terminated = after.done > 0.5
        truncated = time >= params.max_steps_in_episode
        done = terminated | truncated
        index = jax.random.randint(key, (), 0, jax.tree.leaves(params.start_states)[0].shape[0])
        brax_state = jax.tree.map(lambda pool, leaf: jnp.where(done, pool[index], leaf), params.start_states, after)
        next_state = BraxState(brax_state, jnp.where(done, 0, time), state.partial_episode & ~done)
        info = {"final_observation": after.obs, "partial_episode": state.partial_episode}
        return brax_state.obs, next_state, after.reward, terminated, truncated, info


class RescaleAction:
    """Take actions in [-1, 1], clipped, and pass on actions between the environment's bounds."""

    def __init__(self, env, space):
        self._env, self.space = env, space

    def __getattr__(self, name):
        return getattr(self._env, name)

    def step(self, key, state, action, params):
        unit = (jnp.clip(action, -1.0, 1.0).reshape(self.space.shape) + 1.0) / 2.0
        action = self.space.low + unit * (self.space.high - self.space.low)
        return self._env.step(key, state, action, params)


def make_brax_env(config):
    """`(env, env_params)` of a name that brax knows, made with `config.env_params`. Raises ValueError."""
    import gymnax

    name, overrides = config.env_name, dict(config.env_params)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # of parts that are not used here
        warnings.simplefilter("ignore")
        from brax import envs

        if name not in envs._envs:
            hint = nearest(name, [*gymnax.registered_envs, *envs._envs])
            raise ValueError(f"env_name = {name}: neither gymnax nor brax knows it{hint}")
        backend = "generalized" if name == "swimmer" else "spring"  # by far the fastest to compile; swimmer has none
        try:
            env = BraxEnv(envs.get_environment(name, **({"backend": backend} | overrides)))
        except Exception as error:  # of any kind, where an environment looks at its arguments
            raise cannot_be_made(config, error) from error
    return env, BraxParams(max_steps_in_episode=config.max_episode_steps or 1000)


def reset_envs(key, env, env_params, num_envs: int, pool_size: int = 256):
    """Start `num_envs` environments: `(obs, env_state, env_params)`, the first two with a leading axis [num_envs].

    In brax this fills the pool of start states too, and staggers the clocks: episodes that all last to the time limit
    would otherwise end in the same update for ever.
    """
    reset_key, clock_key = jax.random.split(key)
    is_brax = isinstance(env_params, BraxParams)
    keys = jax.random.split(reset_key, max(num_envs, pool_size) if is_brax else num_envs)
    obs, env_state = jax.vmap(env.reset, (0, None))(keys, env_params)
    if is_brax:
        env_params = env_params.replace(
            start_states=jax.tree.map(lambda leaf: leaf[:pool_size], env_state.env_state.brax_state)
        )
        obs, env_state = jax.tree.map(lambda leaf: leaf[:num_envs], (obs, env_state))
        time = jax.random.randint(clock_key, (num_envs,), 0, env_params.max_steps_in_episode)
        state = env_state.env_state.replace(time=time, partial_episode=time > 0)
        env_state = env_state.replace(env_state=state)
    return obs, env_state, jax.tree.map(jnp.asarray, env_params)
# --- end of block continuous ---


def make_env(config: Config):
    """`(env, env_params)`: gymnax's interface, actions in [-1, 1], statistics of episodes in `info`."""
    import gymnax
    from gymnax.environments import spaces
    from gymnax.wrappers import FlattenObservationWrapper, LogWrapper

    make = make_gymnax_env if config.env_name in gymnax.registered_envs else make_brax_env
    env, env_params = make(config)
    with jax.ensure_compile_time_eval():  # the bounds are constants, also where this runs inside a jit
        space = env.action_space(env_params)
        bounded = isinstance(space, spaces.Box) and bool(jnp.isfinite(jnp.asarray([space.low, space.high])).all())
    if not bounded:
        raise ValueError(f"env_name = {config.env_name}: must have bounded continuous actions, as Pendulum-v1 has")
    if len(env.observation_space(env_params).shape) != 1:
        env = FlattenObservationWrapper(env)
    return LogWrapper(RescaleAction(env, space)), env_params


# --- block orthogonal: the same in every script, copied by tools/sync_blocks.py ---
def orthogonal(scale: float):
    """Orthogonal initialization (Saxe et al. 2014, arXiv 1312.6120) of a matrix: `init(key, shape, dtype)`.

    The same matrices as `nn.initializers.orthogonal` up to rounding, by Gram-Schmidt, each vector twice for precision.
    Flax's QR factorization can hang for ever on CPUs: under `vmap` it blocks a thread of XLA's pool while it waits for
    others of the pool, and several layers at once may block them all. It is the slower one, too.
    """

    def init(key, shape, dtype=jnp.float32):
        small, large = sorted(shape)
        gaussian = jax.random.normal(key, (large, small), dtype)

        def step(basis, inputs):
            i, vector = inputs
            for _ in range(2):
                vector -= basis @ (basis.T @ vector)
            return basis.at[:, i].set(vector / jnp.linalg.norm(vector)), None

        basis, _ = jax.lax.scan(step, jnp.zeros_like(gaussian), (jnp.arange(small), gaussian.T))
        return scale * (basis if shape[0] == large else basis.T)

    return init
# --- end of block orthogonal ---


@jax.custom_vjp
def product(x, kernel):
    """x @ kernel: [..., n], [n, m] -> [..., m].

    The gradient of the kernel is written out for XLA's CPU compiler, which multiplies a matrix that is read by columns,
    or one with many more columns than rows, at half the speed: the barrier makes it transpose the input first.
    """
    return x @ kernel


def product_backward(saved, gradient):
    x, kernel = saved
    (n, m), pieces = kernel.shape, math.gcd(4, x.size // x.shape[-1])  # of the batch
    transposed = jax.lax.optimization_barrier(x.reshape(pieces, -1, n).swapaxes(1, 2))
    return gradient @ kernel.T, (transposed @ gradient.reshape(pieces, -1, m)).sum(axis=0)


product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), product_backward)


class Mlp(nn.Module):
    """Hidden layers and a linear head, with orthogonal initialization. [..., features] -> [..., outputs]."""

    hidden_sizes: tuple[int, ...]
    outputs: int
    activation: str
    head_scale: float

    @nn.compact
    def __call__(self, x):
        def dense(size, scale):
            init = orthogonal(scale)
            return nn.Dense(size, kernel_init=init, dot_general=lambda x, kernel, *_, **__: product(x, kernel))

        for size in self.hidden_sizes:
            x = getattr(nn, self.activation)(dense(size, math.sqrt(2))(x))
        return dense(self.outputs, self.head_scale)(x)


class Actor(nn.Module):
    """Deterministic policy."""

    action_dim: int
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs):  # [..., obs_dim] -> [..., action_dim], in [-1, 1]
        return jnp.tanh(Mlp(self.hidden_sizes, self.action_dim, self.activation, 0.01)(obs))


class Critic(nn.Module):
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs, action):  # [..., obs_dim], [..., action_dim] -> [...]
        x = jnp.concatenate([obs, action], axis=-1)
        return Mlp(self.hidden_sizes, 1, self.activation, 1.0)(x).squeeze(-1)


class Statistics(NamedTuple):
    """Running mean and variance of each entry of an array."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array


def init_statistics(shape: tuple[int, ...]) -> Statistics:
    return Statistics(jnp.zeros(shape), jnp.ones(shape), jnp.asarray(1e-4))


def merge_statistics(statistics: Statistics, batch: jax.Array) -> Statistics:
    """Take in a batch [B, *shape], by the pairwise formula of Chan, Golub and LeVeque 1979."""
    batch_count = batch.shape[0]
    batch_mean, batch_var = batch.mean(axis=0), batch.var(axis=0)
    count = statistics.count + batch_count
    delta = batch_mean - statistics.mean
    mean = statistics.mean + delta * (batch_count / count)
    squares = statistics.var * statistics.count + batch_var * batch_count
    var = squares / count + jnp.square(delta) * (statistics.count / count) * (batch_count / count)
    return Statistics(mean, var, count)


def normalize(statistics: Statistics, x: jax.Array) -> jax.Array:
    """Zero mean, unit variance, clipped to 10 standard deviations."""
    return jnp.clip((x - statistics.mean) / jnp.sqrt(statistics.var + 1e-8), -10.0, 10.0)


def correlated(noise, white, correlation):
    """The next noise of a process whose every value has unit variance, as `noise` and `white` have. All [...]."""
    return correlation * noise + jnp.sqrt(1.0 - jnp.square(correlation)) * white


def random_action(noise):
    """Uniform in [-1, 1] where `noise` is standard normal: twice its distribution function, less 1."""
    return jax.lax.erf(noise / math.sqrt(2.0))


def noisy_action(action, noise):
    """Exploration (arXiv 1802.09477, algorithm 1). All [..., action_dim]."""
    return jnp.clip(action + noise, -1.0, 1.0)


def smoothed_action(action, noise, noise_clip):
    """The action of a target, clip(mu'(s') + clip(noise)) (arXiv 1802.09477, section 5.3). All [..., action_dim]."""
    return jnp.clip(action + jnp.clip(noise, -noise_clip, noise_clip), -1.0, 1.0)


def clipped_double_target(reward, terminated, next_q, gamma):
    """y = r + gamma (1 - terminated) min_j Q'_j(s', a') (arXiv 1802.09477, equation 10). next_q: [2, ...]."""
    return reward + gamma * jnp.where(terminated, 0.0, next_q.min(axis=0))


def td_loss(q, target):
    """Mean squared error over the batch, the sum of both critics' (arXiv 1802.09477, algorithm 1). [2, B], [B]."""
    return jnp.square(q - target).mean(axis=-1).sum()


def policy_loss(q):
    """-E[Q_1(s, mu(s))] (arXiv 1802.09477, algorithm 1). q, of the first critic: [B]."""
    return -q.mean()


class Transition(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array
    action: jax.Array  # in [-1, 1]
    reward: jax.Array
    next_obs: jax.Array  # what the step led to, before any reset
    terminated: jax.Array


def pack(step: Transition):
    """All of a step in one array, which is faster to read and write than five: [..., 2 obs_dim + action_dim + 2]."""
    rest = jnp.stack([step.reward, step.terminated.astype(jnp.float32)], axis=-1)
    return jnp.concatenate([step.obs, step.next_obs, step.action, rest], axis=-1)


def unpack(rows, obs_dim: int) -> Transition:
    obs, next_obs, action, rest = jnp.split(rows, [obs_dim, 2 * obs_dim, rows.shape[-1] - 2], axis=-1)
    return Transition(obs, action, rest[..., 0], next_obs, rest[..., 1] > 0)


def add_to_replay(replay, rollout: Transition, count):
    """Write a rollout [T, N] into the ring [slots, N, ...], over its oldest slots. `count` were written before."""
    num_steps, num_envs = rollout.reward.shape
    slots = (count + jnp.arange(num_steps))[:, None] % replay.shape[0]
    envs = jnp.arange(num_envs)  # not `:`, for which XLA copies the ring where one row of it is written
    return replay.at[slots, envs].set(pack(rollout))


def normal_from_bits(bits):
    """Standard normal numbers from random 32-bit words, two from two (Box and Muller 1958): [2, ...] -> [2, ...].

    The words are drawn at once with those of `sample_replay`.
    """
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # 2^23 values between 0 and 1
    radius, angle = jnp.sqrt(-2.0 * jnp.log(uniform[0])), 2.0 * math.pi * uniform[1]
    return radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def sample_replay(bits, replay, count):
    """A step for each random 32-bit word, uniformly from those in the ring, of which `count` slots were written."""
    num_slots, num_envs = replay.shape[:2]
    eligible = jnp.minimum(count, num_slots) * num_envs
    drawn = (bits % eligible.astype(jnp.uint32)).astype(jnp.int32)
    return replay[drawn // num_envs, drawn % num_envs]


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and of both "critics", [2, ...]
    target_params: dict
    opt_state: dict
    replay: jax.Array  # [slots, num_envs, 2 obs_dim + action_dim + 2]
    timesteps: jax.Array  # environment steps so far
    obs: jax.Array  # [num_envs, obs_dim]
    env_state: Any  # [num_envs, ...]
    env_params: Any  # the environment's parameters; in brax with this agent's pool of start states
    obs_statistics: Statistics
    noise: jax.Array  # [num_envs, action_dim], of exploration in the last step
    key: jax.Array


def make_networks(config: Config, env, env_params):
    action_dim = math.prod(env.action_space(env_params).shape)
    actor = Actor(action_dim, config.hidden_sizes, config.activation)
    return actor, Critic(config.hidden_sizes, config.activation)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    check(config)
    env, env_params = make_env(config)
    actor, critic = make_networks(config, env, env_params)
    critics = jax.vmap(critic.apply, (0, None, None))  # [2, ...]
    (obs_dim,), action_dim = env.observation_space(env_params).shape, actor.action_dim
    optimizer = optax.flatten(optax.adam(config.lr))  # on one vector: faster than on many small arrays
    # Steps of the critics come in groups after which alone the policy can be due: in one group of policy_delay
    # steps after the other, or, where that does not divide gradient_steps, in smaller ones.
    group = math.gcd(config.gradient_steps, config.policy_delay)

    def init(rng):
        """Initial networks, and the replay with the steps of the warm-up."""
        actor_key, critic_key, env_key, noise_key, warmup_key, key = jax.random.split(rng, 6)
        obs, env_state, agent_env_params = reset_envs(env_key, env, env_params, config.num_envs)
        noise = jax.random.normal(noise_key, (config.num_envs, action_dim))
        params = {
            "actor": actor.init(actor_key, obs),
            "critics": jax.vmap(critic.init, (0, None, None))(jax.random.split(critic_key), obs, noise),
        }
        replay = jnp.zeros((config.buffer_size // config.num_envs, config.num_envs, 2 * obs_dim + action_dim + 2))
        opt_state = {name: optimizer.init(leaves) for name, leaves in params.items()}
        start, statistics = jnp.zeros((), jnp.int32), init_statistics((obs_dim,))
        learner = params, params, opt_state, replay, start
        state = RunnerState(*learner, obs, env_state, agent_env_params, statistics, noise, key)
        if config.warmup_steps:
            keys = jax.random.split(warmup_key, 1 + config.warmup_steps * config.num_envs)
            state, _ = collect(state, keys, lambda obs, noise: random_action(noise))
        return state

    def observe(state, obs):
        return normalize(state.obs_statistics, obs) if config.normalize_obs else obs

    def collect(state, keys, act):
        """Steps with actions `act(obs, noise)`, into the replay. One key is for the noise, and one for each step."""
        env_keys = keys[1:].reshape(-1, config.num_envs, *keys.shape[1:])
        num_steps = len(env_keys)

        def step(carry, inputs):
            obs, env_state, noise = carry
            white, env_keys = inputs
            noise = correlated(noise, white, config.noise_correlation)
            action = act(observe(state, obs), noise)
            next_obs, env_state, reward, terminated, _, info = jax.vmap(env.step, (0, 0, 0, None))(
                env_keys, env_state, action, state.env_params
            )
            transition = Transition(obs, action, reward, info["final_observation"], terminated)
            return (next_obs, env_state, noise), (transition, info)

        white = jax.random.normal(keys[0], (num_steps, config.num_envs, action_dim))
        carry = state.obs, state.env_state, state.noise
        (obs, env_state, noise), (rollout, info) = jax.lax.scan(step, carry, (white, env_keys))
        replay = add_to_replay(state.replay, rollout, state.timesteps // config.num_envs)
        if config.normalize_obs:
            seen = rollout.obs.reshape(-1, obs_dim)
            state = state._replace(obs_statistics=merge_statistics(state.obs_statistics, seen))
        timesteps = state.timesteps + num_steps * config.num_envs
        state = state._replace(replay=replay, timesteps=timesteps, obs=obs, env_state=env_state, noise=noise)
        return state, episode_metrics(info)

    def make_batches(state, bits):
        """One batch for each gradient step: [gradient_steps, batch_size, ...]."""
        batches = unpack(sample_replay(bits, state.replay, state.timesteps // config.num_envs), obs_dim)
        return batches._replace(
            obs=observe(state, batches.obs),
            next_obs=observe(state, batches.next_obs),
            reward=config.reward_scale * batches.reward,
        )

    def critic_objective(params, batch, target):
        q = critics(params, batch.obs, batch.action)
        loss = td_loss(q, target)
        return loss, {"td_loss": loss, "q_value": q.mean()}

    def actor_objective(params, batch, critic_params):
        first = jax.tree.map(lambda leaf: leaf[0], critic_params)
        loss = policy_loss(critic.apply(first, batch.obs, actor.apply(params, batch.obs)))
        return loss, {"policy_loss": loss}

    def gradient_steps(carry, inputs):
        """Some steps of the critics, then one of the policy and of the target networks where it is `due`."""
        params, target_params, opt_state = carry
        batches, noise, due = inputs  # [group, batch_size, ...]

        def descend(name, grads, params, opt_state):
            updates, new = optimizer.update(grads, opt_state[name])
            new_params = optax.apply_updates(params[name], updates)
            return params | {name: new_params}, opt_state | {name: new}

        def critic_step(carry, inputs):
            grads, metrics = jax.grad(critic_objective, has_aux=True)(carry[0]["critics"], *inputs)
            return descend("critics", grads, *carry), metrics

        noise = config.target_noise * noise  # the target networks are the same in all of these steps
        next_action = smoothed_action(actor.apply(target_params["actor"], batches.next_obs), noise, config.noise_clip)
        next_q = critics(target_params["critics"], batches.next_obs, next_action)
        targets = clipped_double_target(batches.reward, batches.terminated, next_q, config.gamma)
        (params, opt_state), metrics = jax.lax.scan(critic_step, (params, opt_state), (batches, targets))
        last = jax.tree.map(lambda leaf: leaf[-1], batches)
        grads, actor_metrics = jax.grad(actor_objective, has_aux=True)(params["actor"], last, params["critics"])
        after = descend("actor", grads, params, opt_state)
        after = *after, optax.incremental_update(after[0], target_params, config.tau)
        if group < config.policy_delay:  # else it is due in each group
            after = jax.tree.map(partial(jnp.where, due), after, (params, opt_state, target_params))
        params, opt_state, target_params = after
        return (params, target_params, opt_state), metrics | actor_metrics

    def update(state, _=None):
        keys = jax.random.split(state.key, 3 + config.num_steps * config.num_envs)  # at once: faster than in each step
        key, learn_key = keys[:2]

        def act(obs, noise):
            return noisy_action(actor.apply(state.params["actor"], obs), config.exploration_noise * noise)

        before = (state.timesteps // config.num_envs - config.warmup_steps) // config.num_steps * config.gradient_steps
        state, episodes = collect(state._replace(key=key), keys[2:], act)
        bits = jax.random.bits(learn_key, (1 + 2 * action_dim, config.gradient_steps, config.batch_size))
        noise = jnp.moveaxis(normal_from_bits(bits[1:].reshape(2, action_dim, *bits.shape[1:]))[0], 0, -1)
        inputs = jax.tree.map(
            lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), (make_batches(state, bits[0]), noise)
        )
        due = (before + jnp.arange(group, config.gradient_steps + 1, group)) % config.policy_delay == 0
        carry = state.params, state.target_params, state.opt_state
        (params, target_params, opt_state), metrics = jax.lax.scan(gradient_steps, carry, (*inputs, due))
        state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
        return state, jax.tree.map(jnp.mean, metrics) | episodes

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
    """`rollout(runner_state, rng) -> Episode`: one greedy episode of a trained agent, statistics frozen."""
    env, env_params = make_env(config)
    actor, _ = make_networks(config, env, env_params)

    def rollout(runner_state, rng):
        def step(carry, key):
            obs, env_state, valid = carry
            if config.normalize_obs:
                obs = normalize(runner_state.obs_statistics, obs)
            action = actor.apply(runner_state.params["actor"], obs)
            next_obs, next_env_state, reward, terminated, truncated, _ = env.step(
                key, env_state, action, runner_state.env_params
            )
            episode = Episode(env_state.env_state, reward, valid)
            return (next_obs, next_env_state, valid & ~(terminated | truncated)), episode

        reset_key, step_key = jax.random.split(rng)
        obs, env_state = env.reset(reset_key, runner_state.env_params)
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
