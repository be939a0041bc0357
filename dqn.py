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
"""Deep Q-learning (DQN), the whole training in one jit.

Mnih et al. 2015, "Human-level control through deep reinforcement learning" (Nature 518, algorithm
1), and double Q-learning (van Hasselt et al. 2016, arXiv 1509.06461, equation 4).

Differences from the papers: many environments per agent, Adam instead of RMSProp, and half the
squared error instead of the Huber loss. An episode that its time limit truncates is bootstrapped
from its last observation.

    python dqn.py --env-name CartPole-v1 --num-seeds 8

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
    num_envs: int = 8  # environments per agent
    num_steps: int = 2  # steps per environment and update
    gradient_steps: int = 1  # gradient steps per update, each on a new batch
    batch_size: int = 128  # transitions per gradient step
    buffer_size: int = 10_000  # capacity of the replay in steps, rounded down to whole rollouts
    learning_starts: int = 10_000  # random steps before learning, rounded up to whole rollouts
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # Polyak factor of a target update; 1 copies the online network
    target_update_interval: int = 500  # environment steps between updates of the target network
    double: bool = True  # the online network chooses the action that the target network values
    epsilon_start: float = 1.0  # probability of a random action in the first update
    epsilon_finish: float = 0.05  # probability of a random action at the end
    exploration_fraction: float = 0.5  # fraction of the updates over which epsilon falls linearly
    # dtype of stored observations; bool and int8 are for whole numbers, empty is the environment's
    buffer_dtype: Literal["", "bool", "int8", "bfloat16"] = ""
    # convolutions of images: features, size and stride of each; stride must divide size
    convolutions: tuple[tuple[int, int, int], ...] = ((16, 3, 1),)
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers
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
        return self.warmup_rollouts * self.rollout_size

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


def preprocess(obs, space):
    """What networks take: floats. Bytes up to 255 are brightnesses, and are divided by 255."""
    is_brightness = obs.dtype == jnp.uint8 and np.asarray(space.high).max() == 255
    return obs.astype(jnp.float32) / (255.0 if is_brightness else 1.0)


class QNetwork(nn.Module):
    """The value of each action: [..., *obs_shape] -> [..., num_actions]."""

    obs_space: Any
    buffer_dtype: str
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs):
        activation = getattr(nn, self.activation)
        batch_shape = obs.shape[: obs.ndim - len(self.obs_space.shape)]
        obs = obs.astype(self.buffer_dtype or obs.dtype)  # rounded as in the replay
        if isinstance(self.obs_space, spaces.Discrete):
            x = jax.nn.one_hot(obs, self.obs_space.n)
        else:
            x = preprocess(obs, self.obs_space)
        if len(self.obs_space.shape) == 3:
            for features, size, stride in self.convolutions:
                x = activation(nn.Dense(features)(patches(x, size, stride)))
        x = x.reshape(*batch_shape, -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size)(x))
        return nn.Dense(self.num_actions)(x)


# --- mathematics: arrays in, arrays out ---


def best_action(q, action_mask=None):
    """The valid action of the highest value. [..., num_actions], true where valid -> [...]."""
    if action_mask is not None:
        if action_mask.dtype != bool or action_mask.shape != q.shape:
            raise ValueError(
                f"action_mask: has dtype {action_mask.dtype} and shape {action_mask.shape}, "
                f"but must be bool {q.shape}, true for valid actions; convert numbers by mask > 0"
            )
        q = jnp.where(action_mask, q, -jnp.inf)
    return q.argmax(axis=-1)


def epsilon_greedy(key, q, epsilon, action_mask=None):
    """A random action with probability `epsilon`, else the best one. [N, num_actions] -> [N]."""
    explore_key, value_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, (len(q),)) < epsilon
    random_q = jax.random.uniform(value_key, q.shape)  # its best valid action is uniform
    return best_action(jnp.where(explore[:, None], random_q, q), action_mask)


def linear_epsilon(update_count, duration, start, finish):
    """`start` at update 0, then linear to `finish` at update `duration`, or 1 if that is less."""
    fraction = jnp.minimum(1.0, update_count / jnp.maximum(duration, 1.0))
    return start + fraction * (finish - start)


def select(q, action):
    """The values of the actions. [B, num_actions], [B] -> [B]."""
    return jnp.take_along_axis(q, action[:, None], axis=-1).squeeze(-1)


def q_target(reward, terminated, next_q, next_q_online, next_action_mask, gamma):
    """y = r + gamma (1 - terminated) Q'(s', argmax_a Q(s', a)), arXiv 1509.06461, equation 4.

    `next_q` is the target network's Q' and `next_q_online` chooses the action, both [B, actions].
    The target network chooses for itself (DQN without double Q-learning) if it is passed twice.
    An observation after which no action is valid counts as terminated.
    """
    next_value = select(next_q, best_action(next_q_online, next_action_mask))
    if next_action_mask is not None:
        terminated |= ~next_action_mask.any(axis=-1)
    return reward + gamma * jnp.where(terminated, 0.0, next_value)


# --- replay: a ring of rollouts ---


class Transition(NamedTuple):
    """One step. A rollout is [num_steps, num_envs], the replay [rollouts, num_steps, num_envs]."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # after the step, before auto-reset
    terminated: jax.Array
    next_action_mask: Any  # [..., num_actions], true for valid actions in `next_obs`, or None


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

    params: dict
    target_params: dict
    opt_state: Any
    replay: Transition
    rollout_count: jax.Array  # rollouts so far, warm-up included
    obs: Any  # [num_envs, *obs_shape]; with the action mask, if there is one
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params}


def split_mask(obs):
    """`(obs, action_mask)` of an environment's observation. Without a mask it is None."""
    if hasattr(obs, "shape"):
        return obs, None
    if not hasattr(obs, "action_mask"):
        raise ValueError(f"obs: {type(obs).__name__} is no array, and has no `obs` and action_mask")
    return obs.obs, obs.action_mask


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
    )


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    for name in ("batch_size", "gradient_steps", "target_update_interval"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
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

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // config.gradient_steps)

    optimizer = optax.adam(learning_rate if config.anneal_lr else config.lr)

    def init(rng):
        """Initialize the network, and fill the replay by `warmup_timesteps` random steps."""
        params_key, env_key, warmup_key, key = jax.random.split(rng, 4)
        env_obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        obs, action_mask = split_mask(env_obs)
        params = network.init(params_key, obs)

        shape = (num_rollouts, config.num_steps, config.num_envs)
        empty_obs = jnp.zeros((*shape, *obs.shape[1:]), config.buffer_dtype or obs.dtype)
        empty_mask = None
        if action_mask is not None:
            empty_mask = jnp.zeros((*shape, network.num_actions), bool)
        replay = Transition(
            obs=empty_obs,
            action=jnp.zeros(shape, jnp.int32),
            reward=jnp.zeros(shape),
            next_obs=empty_obs,
            terminated=jnp.zeros(shape, bool),
            next_action_mask=empty_mask,
        )
        state = RunnerState(
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            replay=replay,
            rollout_count=jnp.int32(0),
            obs=env_obs,
            env_state=env_state,
            key=key,
        )

        def warm_up(state, key):
            state, _ = collect(state, key, epsilon=1.0)
            return state, None

        warmup_keys = jax.random.split(warmup_key, config.warmup_rollouts)
        state, _ = jax.lax.scan(warm_up, state, warmup_keys)
        return state

    def collect(state, key, epsilon):
        """Act epsilon-greedily for `num_steps` steps, and add them to the replay."""

        def step(carry, key):
            env_obs, env_state = carry
            action_key, env_key = jax.random.split(key)
            obs, action_mask = split_mask(env_obs)
            q = network.apply(state.params, obs)
            action = epsilon_greedy(action_key, q, epsilon, action_mask)

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, reward, terminated, _, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs, next_mask = split_mask(info.pop("final_observation"))  # before auto-reset
            transition = Transition(
                obs=obs,
                action=action,
                reward=reward,
                next_obs=next_obs,
                terminated=terminated,
                next_action_mask=next_mask,
            )
            return (obs_after_reset, env_state), (transition, info)

        carry = (state.obs, state.env_state)
        keys = jax.random.split(key, config.num_steps)
        (env_obs, env_state), (rollout, info) = jax.lax.scan(step, carry, keys)
        state = state._replace(
            replay=add_rollout(state.replay, rollout, state.rollout_count),
            rollout_count=state.rollout_count + 1,
            obs=env_obs,
            env_state=env_state,
        )
        return state, info

    def loss_fn(params, target_params, batch):
        q_taken = select(network.apply(params, batch.obs), batch.action)
        next_q = network.apply(target_params, batch.next_obs)
        next_q_online = network.apply(params, batch.next_obs) if config.double else next_q
        target = q_target(
            batch.reward,
            batch.terminated,
            next_q=next_q,
            next_q_online=next_q_online,
            next_action_mask=batch.next_action_mask,
            gamma=config.gamma,
        )
        loss = optax.l2_loss(q_taken, jax.lax.stop_gradient(target)).mean()
        return loss, {"td_loss": loss, "q_value": q_taken.mean()}

    def gradient_step(state, key):
        batch = sample(key, state.replay, state.rollout_count, config.batch_size)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, state.target_params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        update_count = state.rollout_count - config.warmup_rollouts
        epsilon = linear_epsilon(
            update_count,
            duration=config.exploration_fraction * config.num_updates,
            start=config.epsilon_start,
            finish=config.epsilon_finish,
        )
        state, info = collect(state._replace(key=key), collect_key, epsilon)
        keys = jax.random.split(learn_key, config.gradient_steps)
        state, metrics = jax.lax.scan(gradient_step, state, keys)

        # Due if the number of one of the steps just taken is a multiple of the interval.
        step_count = (state.rollout_count - config.warmup_rollouts) * config.rollout_size
        due = step_count % config.target_update_interval < config.rollout_size
        tau = jnp.where(due, config.tau, 0.0)
        target_params = optax.incremental_update(state.params, state.target_params, tau)
        state = state._replace(target_params=target_params)
        return state, jax.tree.map(jnp.mean, metrics) | {"epsilon": epsilon} | episode_metrics(info)

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
    network = make_network(config, *make_env(config))

    def act(agent, obs):
        obs, action_mask = split_mask(obs)
        return best_action(network.apply(agent["params"], obs), action_mask)

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
