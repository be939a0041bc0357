# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "optax>=0.2.8", "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Rainbow: DQN with six improvements, the whole training in one jit.

Hessel et al. 2018, "Rainbow" (arXiv 1710.02298). Each improvement can be switched off alone:

- `double`: double Q-learning, arXiv 1509.06461, equation 4
- `dueling`: dueling network, arXiv 1511.06581, equation 9
- `n_step`: several rewards in a target
- `priority_exponent`: prioritized replay, arXiv 1511.05952, section 3
- `noisy`: noisy networks, arXiv 1706.10295, equations 8 to 11
- `distribution`: the distribution of the return, "categorical" as in C51 (arXiv 1707.06887,
  equation 7) or "quantile" as in QR-DQN (arXiv 1710.10044, equation 10)

Differences from the papers: an agent has many environments, which share the noise of a step;
epsilon falls linearly in addition to the noise; the norm of the gradient is clipped; an episode
that its time limit truncates is bootstrapped from its last observation.

    python rainbow.py --env-name CartPole-v1 --num-seeds 8

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
    """Hyperparameters. The defaults are tuned for a short run on two CPU cores.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "CartPole-v1"  # gymnax environment; MODULE:NAME imports MODULE first
    # parameters of the environment: NAME VALUE ...
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    total_timesteps: int = 500_000  # environment steps per agent, warm-up included
    num_envs: int = 16  # environments per agent
    num_steps: int = 1  # steps per environment and update
    gradient_steps: int = 2  # gradient steps per update, each on a new batch
    batch_size: int = 64  # transitions per gradient step
    buffer_size: int = 16_384  # transitions in the replay, rounded down to whole rollouts
    learning_starts: int = 2_000  # random transitions before learning, rounded up to whole rollouts
    lr: float = 5e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # Polyak factor of a target update; 1 copies the online network
    target_update_interval: int = 800  # environment steps between updates of the target network
    n_step: int = 3  # rewards in a target; fewer at the end of an episode
    priority_exponent: float = 0.5  # exponent omega of new priorities; 0 samples uniformly
    importance_exponent: float = 0.4  # exponent beta of the importance weights; rises linearly to 1
    double: bool = True  # the online network chooses the action that the target network values
    dueling: bool = True  # streams for the state's value and the actions' advantages
    # the return's distribution: none learns its mean alone, categorical is C51, quantile is QR-DQN
    distribution: Literal["none", "categorical", "quantile"] = "categorical"
    num_atoms: int = 51  # atoms of a categorical distribution, or number of quantiles
    v_min: float = 0.0  # lowest atom if categorical; should not exceed any discounted return
    v_max: float = 100.0  # highest atom if categorical; should reach any discounted return
    noisy: bool = True  # noisy networks: layers add noise of a learned size to their weights
    noisy_std: float = 0.5  # initial size of the noise, divided by the root of a layer's inputs
    epsilon_start: float = 1.0  # probability of a random action after the warm-up
    epsilon_finish: float = 0.01  # probability of a random action at the end
    exploration_fraction: float = 0.1  # fraction of the updates over which epsilon falls linearly
    max_grad_norm: float = 10.0  # limit of the gradient's global norm; inf for no limit
    # dtype of stored observations; bool and int8 are for whole numbers, empty is the environment's
    buffer_dtype: Literal["", "bool", "int8", "bfloat16"] = ""
    # convolutions of images: features, size and stride of each; stride must divide size
    convolutions: tuple[tuple[int, int, int], ...] = ((16, 3, 1),)
    hidden_sizes: tuple[int, ...] = (128, 128)  # sizes of the hidden layers
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "relu"  # activation function

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
        """A transition is complete when `n_step` - 1 more steps have followed."""
        return self.warmup_rollouts * self.rollout_size + self.num_envs * (self.n_step - 1)

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.warmup_timesteps) // self.rollout_size


# --- network ---


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


class NoisyDense(nn.Module):
    """A dense layer whose weights have factorized Gaussian noise (arXiv 1706.10295, section 3).

    The noise of the weight from input i to output j is f(p_i) f(q_j) (equations 10 and 11). A batch
    shares one sample, which `draw_noise` draws. Without it the layer has no noise.
    """

    features: int
    std: float

    @nn.compact
    def __call__(self, x):  # [..., inputs] -> [..., features]
        inputs = x.shape[-1]
        bound = inputs**-0.5

        def uniform(key, shape):
            return jax.random.uniform(key, shape, jnp.float32, minval=-bound, maxval=bound)

        constant = nn.initializers.constant(self.std * bound, jnp.float32)
        kernel = self.param("kernel", uniform, (inputs, self.features))
        bias = self.param("bias", uniform, (self.features,))
        kernel_std = self.param("kernel_std", constant, (inputs, self.features))
        bias_std = self.param("bias_std", constant, (self.features,))
        if self.has_variable("noise", "sample"):
            p, q = jnp.split(self.get_variable("noise", "sample"), [inputs])  # f(p), f(q)
            kernel += kernel_std * jnp.outer(p, q)
            bias += bias_std * q
        return x @ kernel + bias


def draw_noise(key, params, num_samples: int):
    """Samples for all noisy layers, {layer: {"sample": [num_samples, inputs + features]}}.

    Drawn ahead of a loop, because drawing in each layer and step takes up to half of a training.
    """
    sizes = {}
    for name in sorted(params["params"]):
        layer = params["params"][name]
        if "kernel_std" in layer:
            sizes[name] = sum(layer["kernel_std"].shape)

    normal = jax.random.normal(key, (num_samples, sum(sizes.values())))
    noise = jnp.sign(normal) * jnp.sqrt(jnp.abs(normal))  # f
    samples = {}
    first = 0
    for name, size in sizes.items():
        samples[name] = {"sample": noise[:, first : first + size]}
        first += size
    return samples


def preprocess(obs, space):
    """What networks take: floats. Bytes up to 255 are brightnesses, and are divided by 255."""
    is_brightness = obs.dtype == jnp.uint8 and np.asarray(space.high).max() == 255
    return obs.astype(jnp.float32) / (255.0 if is_brightness else 1.0)


class QNetwork(nn.Module):
    """Outputs of each action: [..., *obs_shape] -> [..., num_actions, num_atoms].

    With `dueling`, the last hidden layer and the head exist twice, in two streams.
    """

    obs_space: Any
    buffer_dtype: str
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]
    hidden_sizes: tuple[int, ...]
    activation: str
    dueling: bool
    num_atoms: int
    noisy: bool
    noisy_std: float

    @nn.compact
    def __call__(self, obs):
        activation = getattr(nn, self.activation)
        batch_shape = obs.shape[: obs.ndim - len(self.obs_space.shape)]

        def dense(size):
            if self.noisy:
                return NoisyDense(size, self.noisy_std)
            return nn.Dense(size)

        obs = obs.astype(self.buffer_dtype or obs.dtype)  # acts on the values that the replay holds
        if isinstance(self.obs_space, spaces.Discrete):
            x = jax.nn.one_hot(obs, self.obs_space.n)
        else:
            x = preprocess(obs, self.obs_space)
        if len(self.obs_space.shape) == 3:
            for features, size, stride in self.convolutions:
                x = activation(nn.Dense(features)(patches(x, size, stride)))
        x = x.reshape(*batch_shape, -1)
        for size in self.hidden_sizes[:-1]:
            x = activation(dense(size)(x))

        def stream(actions):
            hidden = x
            if self.hidden_sizes:
                hidden = activation(dense(self.hidden_sizes[-1])(x))
            outputs = dense(actions * self.num_atoms)(hidden)
            return outputs.reshape(*outputs.shape[:-1], actions, self.num_atoms)

        if not self.dueling:
            return stream(self.num_actions)
        value = stream(1)
        advantage = stream(self.num_actions)
        return dueling_q(value, advantage)


# --- mathematics: arrays in, arrays out ---


def dueling_q(value, advantage):
    """The sum of the streams, atom by atom (arXiv 1511.06581, equation 9).

    [..., 1, num_atoms], [..., num_actions, num_atoms] -> [..., num_actions, num_atoms].
    """
    return value + advantage - advantage.mean(axis=-2, keepdims=True)


def action_values(outputs, support, distribution: str):
    """Each action's value, the mean of its distribution. [..., A, num_atoms] -> [..., A]."""
    if distribution == "categorical":
        return (nn.softmax(outputs) * support).sum(axis=-1)
    return outputs.mean(axis=-1)


def epsilon_greedy(key, q, epsilon):
    """A random action with probability `epsilon`, else the best one. [N, num_actions] -> [N]."""
    explore_key, value_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, (len(q),)) < epsilon
    random_q = jax.random.uniform(value_key, q.shape)
    return jnp.where(explore[:, None], random_q, q).argmax(axis=-1)


def linear_epsilon(update_count, duration, start, finish):
    """`start` at update 0, then linear to `finish` at update `duration`, or 1 if that is less."""
    fraction = jnp.minimum(1.0, update_count / jnp.maximum(duration, 1.0))
    return start + fraction * (finish - start)


def select(values, index):
    """The entry `index` of the last axis. [..., n], [...] -> [...]."""
    return jnp.take_along_axis(values, index[..., None], axis=-1).squeeze(-1)


def at_action(outputs, action):
    """The outputs of one action. [..., num_actions, num_atoms], [...] -> [..., num_atoms]."""
    return jnp.take_along_axis(outputs, action[..., None, None], axis=-2).squeeze(-2)


def project(values, probability, support):
    """Move the probability of each value to the nearest atoms (arXiv 1707.06887, equation 7).

    `values` and `probability` are [B, K]. The atoms of `support` [K] are evenly spaced. -> [B, K].
    """
    width = jnp.maximum((support[-1] - support[0]) / (len(support) - 1), 1e-6)  # not 0
    place = jnp.clip((values - support[0]) / width, 0.0, len(support) - 1.0)  # in units of atoms
    distance = jnp.abs(place[:, :, None] - jnp.arange(len(support)))  # [B, value, atom]
    return (jnp.clip(1.0 - distance, 0.0, 1.0) * probability[:, :, None]).sum(axis=1)


def bellman_target(n_step_return, discount, next_outputs, support, distribution: str):
    """The distribution of R + discount Z(s', a*), as the network represents it.

    [B], [B], [B, K] -> [B, K]: probabilities of the support's atoms if "categorical", quantiles if
    "quantile", the value itself if "none". A discount of 0 means that the episode has terminated.
    """
    continues = discount[:, None] > 0.0
    next_values = support if distribution == "categorical" else next_outputs
    next_values = jnp.where(continues, discount[:, None] * next_values, 0.0)
    values = n_step_return[:, None] + next_values
    if distribution != "categorical":
        return values
    probability = jnp.where(continues, nn.softmax(next_outputs), 1.0 / next_outputs.shape[-1])
    return project(values, probability, support)


def quantile_huber_loss(quantiles, target):
    """Mean over the target's quantiles, sum over the predicted ones. [B, N], [B, N] -> [B].

    Equation 10 of arXiv 1710.10044, with kappa = 1.
    """
    midpoint = (jnp.arange(quantiles.shape[-1]) + 0.5) / quantiles.shape[-1]
    error = target[:, None] - quantiles[:, :, None]  # [B, predicted, target]
    weight = jnp.where(error < 0.0, 1.0 - midpoint[:, None], midpoint[:, None])
    return (weight * optax.huber_loss(error)).mean(axis=-1).sum(axis=-1)


def loss_and_error(outputs, target, distribution: str):
    """The loss of each transition, and the error that gives its priority. [B, K] -> [B], [B].

    "categorical": the Kullback-Leibler divergence is both (arXiv 1710.02298, section "The
    Integrated Agent"). "quantile": the quantile Huber loss is both. "none": half the squared TD
    error, and its size.
    """
    if distribution == "none":
        td_error = (target - outputs).squeeze(-1)
        return 0.5 * jnp.square(td_error), jnp.abs(td_error)
    if distribution == "quantile":
        loss = quantile_huber_loss(outputs, target)
    else:
        loss = optax.kl_divergence(nn.log_softmax(outputs), target)
    return loss, loss


# --- transitions of several steps ---


class Step(NamedTuple):
    """One step of all environments, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # after the step, before auto-reset
    terminated: jax.Array
    truncated: jax.Array


class Transition(NamedTuple):
    """`n_step` steps, or fewer at the end of an episode."""

    obs: jax.Array
    action: jax.Array
    rewards: jax.Array  # [..., n_step], 0 after the end of the episode
    length: jax.Array  # number of steps
    next_obs: jax.Array  # after the last step, before auto-reset
    terminated: jax.Array


def n_step_transitions(steps: Step, n_step: int) -> Transition:
    """The transitions that begin at each of the first T of T + n_step - 1 successive steps.

    Leaves of `steps` are [T + n_step - 1, N, ...], leaves of the result [T, N, ...].
    """
    length = len(steps.reward) - n_step + 1
    done = steps.terminated | steps.truncated
    rewards = []
    last = jnp.zeros_like(steps.action[:length])  # index of the transition's last step
    running = jnp.ones_like(done[:length])
    for k in range(n_step):
        rewards.append(jnp.where(running, steps.reward[k : k + length], 0.0))
        last = jnp.where(running, k, last)
        running &= ~done[k : k + length]

    time = jnp.arange(length)[:, None] + last
    env = jnp.arange(done.shape[1])
    return Transition(
        obs=steps.obs[:length],
        action=steps.action[:length],
        rewards=jnp.stack(rewards, axis=-1),
        length=last + 1,
        next_obs=steps.next_obs[time, env],
        terminated=steps.terminated[time, env],
    )


def discounted(transition: Transition, gamma):
    """The n-step return, and the discount of the value of `next_obs`: 0 after a termination."""
    n_step_return = 0.0
    for k in range(transition.rewards.shape[-1]):
        n_step_return += gamma**k * transition.rewards[..., k]
    discount = jnp.where(transition.terminated, 0.0, gamma**transition.length)
    return n_step_return, discount


# --- priorities: a sum tree ---

FANOUT = 8  # children per node


def init_sum_tree(size: int) -> tuple:
    """A sum tree of `size` priorities, all 0. Levels [rows, FANOUT], from the items to the root.

    With 2^20 items, a batch takes 0.13 ms; sums over all priorities instead of a tree take 2.7 ms.
    """
    levels = []
    while not levels or size > 1:
        size = math.ceil(size / FANOUT)
        levels.append(jnp.zeros((size, FANOUT)))
    return tuple(levels)


def set_priorities(tree: tuple, index, priority) -> tuple:
    """Set the priorities of items, [B] each.

    Sums are taken anew from the children: adding differences would accumulate rounding errors.
    """
    levels = []
    for level in tree:
        row = index // FANOUT
        level = level.at[row, index % FANOUT].set(priority)
        levels.append(level)
        index = row
        priority = level[row].sum(axis=-1)
    return tuple(levels)


def total_priority(tree: tuple):
    return tree[-1].sum()


def sample_sum_tree(tree: tuple, mass):
    """The item in which each point of [0, total_priority) falls, and its priority. [B] -> 2 x [B].

    From the root down, a point falls into one of the node's children, which divide its range.
    """
    node = jnp.zeros(mass.shape, jnp.int32)
    for level in reversed(tree):
        children = level[node]  # [B, FANOUT]
        not_empty = children > 0
        upper = jnp.cumsum(children, axis=-1)
        above = (upper > mass[:, None]) & not_empty
        last = FANOUT - 1 - not_empty[:, ::-1].argmax(axis=-1)  # if none is above, by rounding
        child = jnp.where(above.any(axis=-1), above.argmax(axis=-1), last)

        priority = select(children, child)
        lower = select(upper, child) - priority
        mass = jnp.maximum(0.0, mass - lower)
        node = node * FANOUT + child
    return node, priority


def priority_of(error, exponent):
    """p ** omega with p = |error| + 1e-6 (arXiv 1511.05952, section 3.3), from e^-30 to e^30."""
    log_priority = exponent * jnp.log(jnp.abs(error) + 1e-6)
    return jnp.exp(jnp.clip(log_priority, -30.0, 30.0))  # sums of priorities stay finite


def importance_weights(probability, size, exponent):
    """(N P(i)) ** -beta over its maximum in the batch (arXiv 1511.05952, section 3.4). [B]."""
    log_weight = -exponent * jnp.log(size * probability)
    return jnp.exp(log_weight - log_weight.max())


# --- replay: a ring of rollouts ---


def add_rollout(replay: Transition, rollout: Transition, count) -> Transition:
    """Overwrite the oldest rollout. `count` rollouts were added before."""
    return jax.tree.map(
        lambda ring, new: ring.at[count % len(ring)].set(new.astype(ring.dtype)), replay, rollout
    )


def sample(key, replay: Transition, tree: tuple, size, batch_size: int, importance_exponent):
    """Draw by priority among the `size` transitions in the replay, with importance weights.

    One point is drawn from each of `batch_size` equal parts of the sum of all priorities
    (arXiv 1511.05952, appendix B.2.1). Returns the batch, its index in the replay, its weights.
    """
    total = total_priority(tree)
    part = jnp.arange(batch_size) + jax.random.uniform(key, (batch_size,))
    index, priority = sample_sum_tree(tree, part / batch_size * total)
    weight = importance_weights(priority / total, size, importance_exponent)
    batch = jax.tree.map(lambda ring: ring.reshape(-1, *ring.shape[3:])[index], replay)
    return batch, index, weight


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    target_params: dict
    opt_state: Any
    replay: Transition  # [num_rollouts, num_steps, num_envs, ...]
    tree: tuple  # sum tree of the priorities ** omega of all transitions in the replay
    max_priority: jax.Array  # the highest priority ** omega so far, which new transitions get
    tail: Any  # the last n_step - 1 steps, which begin no transition yet; () if n_step is 1
    rollout_count: jax.Array  # rollouts added to the replay so far, warm-up included
    obs: jax.Array  # [num_envs, *obs_shape]
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params}


def make_network(config: Config, env, env_params) -> QNetwork:
    with jax.ensure_compile_time_eval():  # its bounds stay concrete numbers, also inside a jit
        space = env.observation_space(env_params)
    if config.buffer_dtype and not jnp.issubdtype(space.dtype, jnp.floating):
        raise ValueError(f"buffer_dtype = {config.buffer_dtype}: is for observations of floats")
    return QNetwork(
        obs_space=space,
        buffer_dtype=config.buffer_dtype,
        num_actions=env.action_space(env_params).n,
        convolutions=config.convolutions,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        dueling=config.dueling,
        num_atoms=1 if config.distribution == "none" else config.num_atoms,
        noisy=config.noisy,
        noisy_std=config.noisy_std,
    )


def make_support(config: Config):
    """The atoms of a categorical distribution, [num_atoms]."""
    return jnp.linspace(config.v_min, config.v_max, config.num_atoms, dtype=jnp.float32)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    for name in ("batch_size", "gradient_steps", "n_step", "target_update_interval"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    if config.num_atoms < 2 and config.distribution != "none":
        raise ValueError(
            f"num_atoms = {config.num_atoms}: must be at least 2; distribution none has no atoms"
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
    network = make_network(config, env, env_params)

    support = make_support(config)

    def values_of(outputs):
        return action_values(outputs, support, config.distribution)

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // config.gradient_steps)

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(learning_rate if config.anneal_lr else config.lr, eps=1.5e-4),  # as in the paper
    )

    def init(rng):
        """Initialize the networks, and fill the replay by `warmup_timesteps` random steps."""
        params_key, env_key, tail_key, warmup_key, key = jax.random.split(rng, 5)
        obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        if not hasattr(obs, "shape"):
            kind = type(obs).__name__
            raise ValueError(f"obs: {kind} is no array; only ppo.py and dqn.py take action masks")
        params = network.init(params_key, obs)

        shape = (num_rollouts, config.num_steps, config.num_envs)
        empty_obs = jnp.zeros((*shape, *obs.shape[1:]), config.buffer_dtype or obs.dtype)
        replay = Transition(
            obs=empty_obs,
            action=jnp.zeros(shape, jnp.int32),
            rewards=jnp.zeros((*shape, config.n_step)),
            length=jnp.zeros(shape, jnp.int32),
            next_obs=empty_obs,
            terminated=jnp.zeros(shape, bool),
        )
        state = RunnerState(
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            replay=replay,
            tree=init_sum_tree(math.prod(shape)),
            max_priority=jnp.ones(()),
            tail=(),
            rollout_count=jnp.int32(0),
            obs=obs,
            env_state=env_state,
            key=key,
        )
        if config.n_step > 1:
            state, tail, _ = collect(state, tail_key, config.n_step - 1, epsilon=1.0)
            state = state._replace(tail=tail)

        def warm_up(state, key):
            state, rollout, _ = collect(state, key, config.num_steps, epsilon=1.0)
            return store(state, rollout), None

        warmup_keys = jax.random.split(warmup_key, config.warmup_rollouts)
        state, _ = jax.lax.scan(warm_up, state, warmup_keys)
        return state

    def noisy_outputs(params, obs, noise):
        return network.apply(params | {"noise": noise}, obs)

    def collect(state, key, num_steps, epsilon):
        """Act epsilon-greedily on noisy values for `num_steps` steps."""

        def step(carry, inputs):
            obs, env_state = carry
            key, noise = inputs
            action_key, env_key = jax.random.split(key)
            q = values_of(noisy_outputs(state.params, obs, noise))
            action = epsilon_greedy(action_key, q, epsilon)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")  # before auto-reset
            one_step = Step(
                obs=obs,
                action=action,
                reward=reward,
                next_obs=next_obs,
                terminated=terminated,
                truncated=truncated,
            )
            return (obs_after_reset, env_state), (one_step, info)

        carry = (state.obs, state.env_state)
        step_key, noise_key = jax.random.split(key)
        keys = jax.random.split(step_key, num_steps)
        noise = draw_noise(noise_key, state.params, num_steps)
        (obs, env_state), (rollout, info) = jax.lax.scan(step, carry, (keys, noise))
        return state._replace(obs=obs, env_state=env_state), rollout, info

    def store(state, rollout):
        """Add the transitions that are now complete to the replay, with the highest priority."""
        steps = rollout
        if config.n_step > 1:
            steps = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), state.tail, rollout)
            tail = jax.tree.map(lambda x: x[config.num_steps :], steps)
            state = state._replace(tail=tail)
        transitions = n_step_transitions(steps, config.n_step)

        first = (state.rollout_count % num_rollouts) * config.rollout_size
        index = first + jnp.arange(config.rollout_size)
        priority = jnp.full(config.rollout_size, state.max_priority)
        return state._replace(
            replay=add_rollout(state.replay, transitions, state.rollout_count),
            tree=set_priorities(state.tree, index, priority),
            rollout_count=state.rollout_count + 1,
        )

    def loss_fn(params, target_params, batch, weight, noise):
        """The loss, its target's values and the choice of the next action have noise of their own.

        Section 4 of arXiv 1706.10295.
        """
        outputs = at_action(noisy_outputs(params, batch.obs, noise["loss"]), batch.action)
        next_outputs = noisy_outputs(target_params, batch.next_obs, noise["target"])
        next_q = values_of(next_outputs)
        if config.double:
            next_q = values_of(noisy_outputs(params, batch.next_obs, noise["choice"]))
        next_outputs = at_action(next_outputs, next_q.argmax(axis=-1))
        n_step_return, discount = discounted(batch, config.gamma)
        target = bellman_target(n_step_return, discount, next_outputs, support, config.distribution)
        target = jax.lax.stop_gradient(target)

        loss, error = loss_and_error(outputs, target, config.distribution)
        loss = (weight * loss).mean()
        metrics = {"td_loss": loss, "q_value": values_of(outputs).mean()}
        if config.distribution == "categorical":
            # probability at both ends of the support: far from 0, the support is too narrow
            metrics["support_edge"] = target[:, [0, -1]].sum(axis=-1).mean()
        return loss, (error, metrics)

    def gradient_step(state, sample_key, noise, importance_exponent):
        """Learn from a batch drawn by priority, and update its priorities."""
        size = jnp.minimum(state.rollout_count, num_rollouts) * config.rollout_size
        batch, index, weight = sample(
            sample_key, state.replay, state.tree, size, config.batch_size, importance_exponent
        )
        grads, (error, metrics) = jax.grad(loss_fn, has_aux=True)(
            state.params, state.target_params, batch, weight, noise
        )
        updates, opt_state = optimizer.update(grads, state.opt_state)
        priority = priority_of(error, config.priority_exponent)
        state = state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            tree=set_priorities(state.tree, index, priority),
            max_priority=jnp.maximum(state.max_priority, priority.max()),
        )
        return state, metrics

    def learn(state, key, importance_exponent):
        def step(state, inputs):
            sample_key, noise = inputs
            return gradient_step(state, sample_key, noise, importance_exponent)

        sample_key, loss_key, target_key, choice_key = jax.random.split(key, 4)
        sample_keys = jax.random.split(sample_key, config.gradient_steps)
        noise = {
            "loss": draw_noise(loss_key, state.params, config.gradient_steps),
            "target": draw_noise(target_key, state.params, config.gradient_steps),
            "choice": draw_noise(choice_key, state.params, config.gradient_steps),
        }
        state, metrics = jax.lax.scan(step, state, (sample_keys, noise))
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        update_count = state.rollout_count - config.warmup_rollouts
        epsilon = linear_epsilon(
            update_count,
            duration=config.exploration_fraction * config.num_updates,
            start=config.epsilon_start,
            finish=config.epsilon_finish,
        )
        state = state._replace(key=key)
        state, rollout, info = collect(state, collect_key, config.num_steps, epsilon)
        state = store(state, rollout)

        remaining = jnp.maximum(0.0, 1.0 - update_count / config.num_updates)
        importance_exponent = 1.0 - (1.0 - config.importance_exponent) * remaining
        state, metrics = learn(state, learn_key, importance_exponent)

        # Due if the number of one of the steps just taken is a multiple of the interval.
        step_count = (update_count + 1) * config.rollout_size  # since the warm-up
        due = step_count % config.target_update_interval < config.rollout_size
        tau = jnp.where(due, config.tau, 0.0)
        target_params = optax.incremental_update(state.params, state.target_params, tau)
        state = state._replace(target_params=target_params)
        return state, metrics | {"epsilon": epsilon} | episode_metrics(info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`act(agent, obs) -> action`, the greedy policy, without noise."""
    network = make_network(config, *make_env(config))

    def act(agent, obs):
        outputs = network.apply(agent["params"], obs)
        q = action_values(outputs, make_support(config), config.distribution)
        return q.argmax(axis=-1)

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
