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
"""Parallelised Q-Networks (PQN) with memory, the whole training in one jit.

Gallici et al. 2025, "Simplifying Deep Temporal Difference Learning" (arXiv 2407.04811), section 4:
Q-learning without replay and target network. Layer normalization replaces the target network, and
many environments replace the replay. The targets are the lambda-returns of Peng's Q(lambda) (Peng
and Williams 1996), computed backwards. The memory is a gated recurrent unit (Cho et al. 2014, arXiv
1406.1078, section 2.3).

Differences from pqn.py: the network has a memory, which is zeros at the start of each episode. A
minibatch holds whole sequences of `num_steps` steps, and the gradient goes back through all of
them. The value of the last observation of a truncated episode comes from the memory of that
episode.

Differences from the authors' recurrent network: the memory is normalized too before the output
layer, and the network does not see the last action. The targets of an update are computed once, by
the network that acted.

    python pqn_rnn.py --env-name MemoryChain-bsuite --env-params memory_length 20 --num-seeds 8

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
    """Hyperparameters. The defaults suit small tasks of memory.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "CartPole-v1"  # gymnax environment; MODULE:NAME imports MODULE first
    # parameters of the environment: NAME VALUE ...
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    observe: tuple[int, ...] = ()  # indices of the observed entries, such as 0 2; () for all
    total_timesteps: int = 500_000  # environment steps per agent
    num_envs: int = 32  # environments per agent
    num_steps: int = 64  # steps per environment and update
    update_epochs: int = 4  # passes over the num_envs sequences of num_steps steps
    num_minibatches: int = 16  # gradient steps per pass; must divide num_envs
    lr: float = 1e-3  # RAdam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.95  # lambda of Q(lambda): 0 for one-step targets, 1 for whole returns
    epsilon_start: float = 1.0  # probability of a random action at the start
    epsilon_finish: float = 0.1  # probability of a random action at the end
    exploration_fraction: float = 0.2  # fraction of the updates over which epsilon falls linearly
    max_grad_norm: float = 10.0  # limit of the gradient's global norm; inf for no limit
    layer_norm: bool = True  # normalize layers; keeps learning stable without a target network
    cell_size: int = 64  # size of the memory
    # convolutions of images: features, size and stride of each; stride must divide size
    convolutions: tuple[tuple[int, int, int], ...] = ((16, 3, 1),)
    hidden_sizes: tuple[int, ...] = (64,)  # sizes of the hidden layers before the memory
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "relu"  # activation function

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))  # hashable

    @property
    def rollout_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.rollout_size


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


def scan_over_time(step, memory, inputs):
    """`jax.lax.scan`, unrolled by 8 on GPUs: 2.3 times fewer kernels.

    On CPUs it would only compile longer.
    """

    def step_by_step(memory, inputs):
        return jax.lax.scan(step, memory, inputs)

    def unrolled(memory, inputs):
        return jax.lax.scan(step, memory, inputs, unroll=8)

    return jax.lax.platform_dependent(memory, inputs, cpu=step_by_step, default=unrolled)


class Gru(nn.Module):
    """A gated recurrent unit (arXiv 1406.1078, section 2.3) over time.

    memory [..., size], x [T, ..., features], first [T, ...] -> the memory after each step
    [T, ..., size]. It is zeros before the steps that are `first` in their episode.
    """

    size: int

    @nn.compact
    def __call__(self, memory, x, first):
        x = nn.Dense(3 * self.size)(x)  # of all steps at once; only the rest waits for the memory
        shape = (self.size, self.size)
        kernels = [self.param(gate, orthogonal(1.0), shape) for gate in ("reset", "update", "new")]
        kernel = jnp.concatenate(kernels, axis=1)
        bias = self.param("bias", nn.initializers.zeros, (self.size,), jnp.float32)

        def step(memory, x_and_first):
            x, first = x_and_first
            memory = jnp.where(first[..., None], 0.0, memory)
            x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
            m_reset, m_update, m_new = jnp.split(memory @ kernel, 3, axis=-1)
            reset = nn.sigmoid(x_reset + m_reset)
            update = nn.sigmoid(x_update + m_update)
            new = jnp.tanh(x_new + reset * (m_new + bias))
            memory = update * memory + (1.0 - update) * new
            return memory, memory

        _, memories = scan_over_time(step, memory, (x, first))
        return memories


class QNetwork(nn.Module):
    """The value of each action, after convolutions of images, hidden layers and the memory."""

    obs_space: Any
    observe: tuple[int, ...]
    num_actions: int
    cell_size: int
    convolutions: tuple[tuple[int, int, int], ...]
    hidden_sizes: tuple[int, ...]
    activation: str
    layer_norm: bool

    @nn.compact
    def __call__(self, memory, obs, first):
        """The memory after each observation, and the value of each action.

        obs [T, ..., *obs_shape] -> [T, ..., cell_size] and [T, ..., num_actions]. `memory`
        [..., cell_size] is from before the first observation, and `first` [T, ...] marks the
        observations that are the first of their episode.
        """

        def layer(x, size):
            x = nn.Dense(size, kernel_init=nn.initializers.he_normal())(x)
            if self.layer_norm:
                x = nn.LayerNorm()(x)
            return getattr(nn, self.activation)(x)

        if isinstance(self.obs_space, spaces.Discrete):
            x = jax.nn.one_hot(obs, self.obs_space.n)
        else:
            x = preprocess(obs, self.obs_space)
        if self.observe:
            x = x.reshape(*first.shape, -1)[..., np.array(self.observe)]
        elif len(self.obs_space.shape) == 3:
            for features, size, stride in self.convolutions:
                x = layer(patches(x, size, stride), features)
        x = x.reshape(*first.shape, -1)
        for size in self.hidden_sizes:
            x = layer(x, size)
        memories = Gru(self.cell_size)(memory, x, first)
        x = nn.LayerNorm()(memories) if self.layer_norm else memories
        return memories, nn.Dense(self.num_actions)(x)


# --- mathematics: arrays in, arrays out ---


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


def select(q, action):
    """The values of the actions. [T, B, num_actions], [T, B] -> [T, B]."""
    return jnp.take_along_axis(q, action[..., None], axis=-1).squeeze(-1)


def q_lambda_target(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """Lambda-returns of Q(lambda) with time limits (arXiv 2407.04811, section 4). All [T, N].

    G_t = r_t + gamma (1 - terminated) B_t, where B_t bootstraps from s', the observation after the
    step, before auto-reset. `next_values` are max_a Q(s', a).

    B_t = max_a Q(s', a) where the episode is truncated or the rollout ends, and elsewhere
    B_t = lambda G_{t+1} + (1 - lambda) max_a Q(s', a).
    """

    def step(next_target, inputs):
        reward, next_value, terminated, truncated = inputs
        mixture = q_lambda * next_target + (1.0 - q_lambda) * next_value
        bootstrap = jnp.where(truncated, next_value, mixture)
        target = reward + gamma * jnp.where(terminated, 0.0, bootstrap)
        return target, target

    after_the_last = next_values[-1]  # stands for the target that the rollout does not reach
    inputs = (rewards, next_values, terminated, truncated)
    # `unroll` is for speed: 8 seeds of ppo.py train 1.1 times as fast
    _, targets = jax.lax.scan(step, after_the_last, inputs, reverse=True, unroll=16)
    return targets


def random_order(key, size: int):
    """The numbers below `size` in random order, [size]: `argsort` of random bits in less time.

    It sorts one array of words, with random bits above a number. Among equal bits, which only large
    sizes make likely, the smaller number comes first.
    """
    mask = jnp.uint32(2 ** int(size - 1).bit_length() - 1)
    words = jax.random.bits(key, (size,)) & ~mask | jnp.arange(size, dtype=jnp.uint32)
    return jnp.sort(words) & mask


# --- training ---


class Transition(NamedTuple):
    """One step in all environments, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: jax.Array
    first: jax.Array  # whether `obs` is the first one of its episode
    memory: jax.Array  # after `obs`, [..., cell_size]
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: jax.Array  # after the step, before auto-reset
    info: dict  # statistics of episodes


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    opt_state: Any
    update_count: jax.Array
    obs: jax.Array  # [num_envs, *obs_shape]
    first: jax.Array  # [num_envs], whether `obs` is the first one of its episode
    # [num_envs, cell_size], before `obs`; where `first`, not yet reset to zeros
    memory: jax.Array
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params}


def make_network(config: Config, env, env_params) -> QNetwork:
    with jax.ensure_compile_time_eval():  # its bounds stay concrete numbers, also inside a jit
        space = env.observation_space(env_params)
    size = getattr(space, "n", math.prod(space.shape))
    if any(not 0 <= index < size for index in config.observe):
        raise ValueError(
            f"observe = {config.observe}: must be indices of {size} entries, from 0 to {size - 1}"
        )
    return QNetwork(
        obs_space=space,
        observe=config.observe,
        num_actions=env.action_space(env_params).n,
        cell_size=config.cell_size,
        convolutions=config.convolutions,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        layer_norm=config.layer_norm,
    )


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update adds {config.rollout_size}"
        )
    for name in ("update_epochs", "num_minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    minibatch_size, remainder = divmod(config.num_envs, config.num_minibatches)
    if remainder:
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide the {config.num_envs} "
            "sequences of an update"
        )
    env, env_params = make_env(config)
    reset_env = jax.vmap(env.reset, in_axes=(0, None))
    step_env = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    network = make_network(config, env, env_params)

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // (config.update_epochs * config.num_minibatches))

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.radam(learning_rate if config.anneal_lr else config.lr),
    )

    def init(rng):
        params_key, env_key, key = jax.random.split(rng, 3)
        obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        if not hasattr(obs, "shape"):
            kind = type(obs).__name__
            raise ValueError(f"obs: {kind} is no array; only ppo.py and dqn.py take action masks")
        first = jnp.ones(config.num_envs, bool)
        memory = jnp.zeros((config.num_envs, config.cell_size), jnp.float32)
        params = network.init(params_key, memory, obs[None], first[None])
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            update_count=jnp.int32(0),
            obs=obs,
            first=first,
            memory=memory,
            env_state=env_state,
            key=key,
        )

    def collect(state, key, epsilon):
        """Act epsilon-greedily for `num_steps` steps."""

        def step(carry, key):
            obs, first, memory, env_state = carry
            action_key, env_key = jax.random.split(key)
            memories, q = network.apply(state.params, memory, obs[None], first[None])
            memory = memories[0]
            action = epsilon_greedy(action_key, q[0], epsilon)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")  # before auto-reset
            transition = Transition(
                obs=obs,
                first=first,
                memory=memory,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=next_obs,
                info=info,
            )
            return (obs_after_reset, terminated | truncated, memory, env_state), transition

        carry = (state.obs, state.first, state.memory, state.env_state)
        keys = jax.random.split(key, config.num_steps)
        (obs, first, memory, env_state), rollout = jax.lax.scan(step, carry, keys)
        state = state._replace(obs=obs, first=first, memory=memory, env_state=env_state)
        return state, rollout

    def make_batch(params, rollout):
        """The rollout and its targets, [num_steps, num_envs, ...]."""
        # `next_obs` follows `obs` in the same episode: one step from the memory after `obs`.
        not_first = jnp.zeros_like(rollout.first)
        _, next_q = network.apply(params, rollout.memory, rollout.next_obs[None], not_first[None])
        target = q_lambda_target(
            rollout.reward,
            next_q[0].max(axis=-1),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=config.gamma,
            q_lambda=config.q_lambda,
        )
        return rollout, target

    def loss_fn(params, minibatch, memory):
        """`memory` is from before the sequences of the minibatch."""
        steps, target = minibatch
        _, q = network.apply(params, memory, steps.obs, steps.first)
        q_taken = select(q, steps.action)
        loss = optax.l2_loss(q_taken, target).mean()
        return loss, {"td_loss": loss, "q_value": q_taken.mean()}

    def learn(state, batch, memory, key):
        """`update_epochs` passes over the batch in minibatches, each pass in a new order.

        A minibatch holds whole sequences. `memory` is from before the rollout.
        """

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda x: x[:, indices], batch)
            grads, metrics = jax.grad(loss_fn, has_aux=True)(params, minibatch, memory[indices])
            updates, opt_state = optimizer.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), metrics

        def epoch(carry, key):
            order = random_order(key, config.num_envs)
            order = order.reshape(config.num_minibatches, minibatch_size)
            return jax.lax.scan(gradient_step, carry, order)

        carry = (state.params, state.opt_state)
        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, carry, keys)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        epsilon = linear_epsilon(
            state.update_count,
            duration=config.exploration_fraction * config.num_updates,
            start=config.epsilon_start,
            finish=config.epsilon_finish,
        )
        memory = state.memory
        state, rollout = collect(state._replace(key=key), collect_key, epsilon)
        batch = make_batch(state.params, rollout)
        state, metrics = learn(state, batch, memory, learn_key)
        state = state._replace(update_count=state.update_count + 1)
        return state, metrics | {"epsilon": epsilon} | episode_metrics(rollout.info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, the greedy policy."""
    network = make_network(config, *make_env(config))

    def start():
        return jnp.zeros(config.cell_size, jnp.float32)  # at the start of each episode

    def act(agent, memory, obs):
        not_first = jnp.zeros(1, bool)
        memories, q = network.apply(agent["params"], memory, obs[None], not_first)
        return q[0].argmax(axis=-1), memories[0]

    return start, act


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
