# /// script
# requires-python = ">=3.11"
# dependencies = [
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
"""Deep Q-learning from replay, the whole training in one jit.

Mnih et al. 2015, "Human-level control through deep reinforcement learning" (Nature 518, algorithm 1): replay and a
target network. `double`: van Hasselt et al. 2016 (arXiv 1509.06461), equation 4. `dueling`: Wang et al. 2016 (arXiv
1511.06581), equation 9. `n_step`: targets with several rewards, as in Hessel et al. 2018 (arXiv 1710.02298).
Differences from the papers: many environments per agent, Adam, and time limits that do not count as terminations.

    python dqn.py --env-name CartPole-v1 --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
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
    """Hyperparameters. The defaults are tuned for a short run on two CPU cores."""

    env_name: str = (
        "CartPole-v1"  # gymnax environment with discrete actions; MODULE:NAME imports MODULE
    )
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # parameters of the environment: NAME VALUE ...
    total_timesteps: int = 500_000  # environment steps per agent, warm-up included
    num_envs: int = 8  # environments per agent
    num_steps: int = 2  # steps per environment and update
    gradient_steps: int = 1  # gradient steps per update, each on a new batch
    batch_size: int = 128  # transitions per gradient step
    buffer_size: int = 10_000  # capacity of the replay in steps, rounded down to a multiple of num_envs * num_steps
    buffer_dtype: Literal["", "float32", "bfloat16", "int32", "uint8", "bool"] = (
        ""  # dtype of stored observations
    )
    learning_starts: int = (
        10_000  # random steps before learning, rounded up to a multiple of num_envs * num_steps
    )
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    n_step: int = 1  # number of rewards in a target; fewer at the end of an episode
    double: bool = True  # double Q-learning: the online network chooses the action, the target network evaluates it
    dueling: bool = (
        False  # dueling network: separate streams for the state's value and the actions' advantages
    )
    epsilon_start: float = 1.0  # epsilon at the start
    epsilon_finish: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.5  # fraction of the updates over which epsilon falls linearly
    target_update_interval: int = 500  # environment steps between updates of the target network
    tau: float = 1.0  # Polyak factor of the target network; 1 copies the online network
    loss: Literal["squared", "huber"] = "squared"  # loss function of the TD error
    torso: Literal["flat", "grid", "nature"] = (
        "grid"  # convolutions of images: none, one of 3 x 3, or Mnih et al. 2015
    )
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the dense hidden layers
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "relu"  # activation function of the hidden layers
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def warmup_timesteps(self) -> int:
        rollout_size = self.num_envs * self.num_steps  # at least `n_step` steps in each environment
        return (
            math.ceil(max(self.learning_starts, self.n_step * self.num_envs) / rollout_size)
            * rollout_size
        )

    @property
    def num_updates(self) -> int:
        return (self.total_timesteps - self.warmup_timesteps) // (self.num_envs * self.num_steps)


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


class QNetwork(nn.Module):
    """The value of each action. With `dueling`, the last hidden layer and the head exist twice, in two streams."""

    obs_shape: tuple[int, ...]
    num_states: (
        int  # of an environment whose observation is the number of its state; 0 of all others
    )
    buffer_dtype: str  # of stored observations
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]  # (features, size, stride)
    hidden_sizes: tuple[int, ...]
    activation: str
    dueling: bool

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., num_actions]
        activation = getattr(nn, self.activation)
        obs = (
            obs / 255.0
            if obs.dtype == jnp.uint8 and self.obs_shape and not self.buffer_dtype
            else obs
        )
        obs = obs.astype(self.buffer_dtype or obs.dtype)  # the same dtype in acting and learning
        x = (
            jax.nn.one_hot(obs, self.num_states, dtype=jnp.float32)
            if self.num_states
            else obs.astype(jnp.float32)
        )
        for features, size, stride in self.convolutions:
            x = activation(nn.Dense(features)(patches(x, size, stride)))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes[:-1]:
            x = activation(nn.Dense(size)(x))

        def stream(outputs):
            hidden = [
                activation(nn.Dense(size)(x)) for size in self.hidden_sizes[-1:]
            ]  # empty without hidden layers
            return nn.Dense(outputs)(hidden[0] if hidden else x)

        return (
            dueling_q(stream(1), stream(self.num_actions))
            if self.dueling
            else stream(self.num_actions)
        )


# --- mathematics: arrays in, arrays out ---


def dueling_q(value, advantage):
    """Q of the two streams (arXiv 1511.06581, equation 9). [..., 1], [..., num_actions] -> [..., num_actions]."""
    return value + advantage - advantage.mean(axis=-1, keepdims=True)


def greedy(values):
    """The action of the highest value. [..., num_actions] -> [...]."""
    return values.argmax(axis=-1).astype(jnp.int32)


def select(values, index):
    """Select an entry along the last axis. [..., n], [...] -> [...]."""
    return jnp.take_along_axis(values, index[..., None], axis=-1).squeeze(-1)


def double_q(target_q, online_q):
    """Q'(s, argmax_a Q(s, a)), arXiv 1509.06461, equation 4. Both [..., num_actions], returns [...]."""
    return select(target_q, greedy(online_q))


def n_step_target(rewards, last, terminated, next_value, gamma):
    """Rewards up to step `last`, plus the value of the observation after it unless it terminated. [..., n], [...].

    y = sum_{k <= last} gamma^k r_k + gamma^(last + 1) (1 - terminated) next_value
    """
    step = jnp.arange(rewards.shape[-1])
    returns = jnp.where(step <= last[..., None], gamma**step * rewards, 0.0).sum(axis=-1)
    return returns + gamma ** (last + 1) * jnp.where(terminated, 0.0, next_value)


def td_loss(q, target, kind):
    """Mean over the batch of half the squared error, or of the Huber loss, which is linear beyond 1. Both [B]."""
    return {"huber": optax.huber_loss, "squared": optax.l2_loss}[kind](q, target).mean()


def linear_epsilon(count, duration, start, finish):
    return start + (finish - start) * jnp.minimum(1.0, count / jnp.maximum(duration, 1.0))


def update_towards(old_params, params, update_count, steps, interval, tau):
    """One Polyak update with factor `tau` for each multiple of `interval` that the last `steps` steps reached."""
    now = (
        update_count % interval * steps
    )  # modulo `interval` updates, because the number of steps may overflow
    times = now // interval - (now - steps) // interval
    return optax.incremental_update(
        params, old_params, jnp.asarray(1.0 - (1.0 - tau) ** times, jnp.float32)
    )


class Transition(NamedTuple):
    """One step. A rollout is [num_steps, num_envs]. The replay is a ring, [num_rollouts, num_steps, num_envs]."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # observation after the step, before auto-reset
    terminated: jax.Array
    truncated: jax.Array


def add_to_replay(replay: Transition, rollout: Transition, count) -> Transition:
    """Overwrite the oldest rollout in the ring. `count` rollouts were written before."""
    return jax.tree.map(
        lambda ring, leaf: ring.at[count % len(ring)].set(leaf.astype(ring.dtype)), replay, rollout
    )


def sample_replay(key, replay: Transition, count, batch_size, n_step) -> dict:
    """Draw uniformly among the steps that have `n_step` - 1 later steps. `count` rollouts were written.

    "rewards" [B, n_step] begin at each drawn step; "next_obs" is the observation after the step number "last" [B].
    """
    num_rollouts, num_steps, num_envs = replay.reward.shape
    rollout_size, capacity = num_steps * num_envs, replay.reward.size
    filled = jnp.minimum(count, num_rollouts) * rollout_size
    drawn = jax.random.randint(key, (batch_size, 1), 0, filled - (n_step - 1) * num_envs)
    oldest = count % num_rollouts * rollout_size - filled
    index = (
        oldest + drawn + num_envs * jnp.arange(n_step)
    ) % capacity  # [B, n_step]: steps of one environment
    steps = jax.tree.map(lambda ring: ring.reshape(capacity, *ring.shape[3:]), replay)
    last = (steps.terminated[index] | steps.truncated[index]).at[:, -1].set(True).argmax(axis=-1)
    first, reached = index[:, 0], select(index, last)
    batch = {
        "obs": steps.obs[first],
        "action": steps.action[first],
        "rewards": steps.reward[index],
        "last": last,
    }
    return batch | {"next_obs": steps.next_obs[reached], "terminated": steps.terminated[reached]}


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

    params: dict
    target_params: dict
    opt_state: Any
    replay: Transition
    replay_count: jax.Array  # rollouts written to the replay so far
    update_count: jax.Array  # updates so far
    obs: jax.Array  # [num_envs, *obs_shape]
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params}


def make_network(config: Config, env, env_params):
    space, num_actions = env.observation_space(env_params), env.action_space(env_params).n
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    if config.buffer_dtype and space.dtype == jnp.uint8:
        raise ValueError(
            f"buffer_dtype = {config.buffer_dtype}: must be empty, uint8 observations are stored as such"
        )
    layers = convolutions(config.torso, space.shape), config.hidden_sizes, config.activation
    return QNetwork(
        space.shape, num_states, config.buffer_dtype, num_actions, *layers, config.dueling
    )


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    rollout_size, interval = config.num_envs * config.num_steps, config.target_update_interval
    if (
        min(
            config.num_envs,
            config.num_steps,
            config.gradient_steps,
            config.batch_size,
            config.n_step,
            interval,
        )
        < 1
    ):
        names = "num_envs, num_steps, gradient_steps, batch_size, n_step, target_update_interval"
        raise ValueError(f"{names}: must all be at least 1")
    least = config.warmup_timesteps + rollout_size
    if config.total_timesteps < least:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: the warm-up and one update take {least}"
        )
    num_rollouts, warmup_rollouts = (
        config.buffer_size // rollout_size,
        config.warmup_timesteps // rollout_size,
    )
    if num_rollouts * config.num_steps < config.n_step:
        raise ValueError(
            f"buffer_size = {config.buffer_size}: must hold num_steps, and n_step, steps per environment"
        )
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    network = make_network(config, env, env_params)
    optimizer = optax.scale_by_adam()

    def init(rng):
        """Initialize the networks, and fill the replay with the steps of the warm-up."""
        params_key, env_key, warmup_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        params, shape = (
            network.init(params_key, obs),
            (num_rollouts, config.num_steps, config.num_envs),
        )
        seen, ended = (
            jnp.zeros((*shape, *obs.shape[1:]), config.buffer_dtype or obs.dtype),
            jnp.zeros(shape, bool),
        )
        action, reward = jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
        replay = Transition(
            obs=seen, action=action, reward=reward, next_obs=seen, terminated=ended, truncated=ended
        )
        state = RunnerState(
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            replay=replay,
            replay_count=jnp.zeros((), jnp.int32),
            update_count=jnp.zeros((), jnp.int32),
            obs=obs,
            env_state=env_state,
            key=key,
        )
        keys = jax.random.split(warmup_key, warmup_rollouts)
        return jax.lax.scan(lambda state, key: (collect(state, key, 1.0)[0], None), state, keys)[0]

    def collect(state, key, epsilon):
        """Act epsilon-greedily for `num_steps` steps, and store them."""

        def step(carry, inputs):
            obs, env_state = carry
            explore, random_action, env_keys = inputs
            action = jnp.where(explore, random_action, greedy(network.apply(state.params, obs)))
            after, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            next_obs = info.pop("final_observation")
            transition = Transition(
                obs=obs,
                action=action,
                reward=reward,
                next_obs=next_obs,
                terminated=terminated,
                truncated=truncated,
            )
            return (after, env_state), (transition, info)

        explore_key, action_key, env_key = jax.random.split(
            key, 3
        )  # all at once: much faster than in each step
        shape = config.num_steps, config.num_envs
        random_action = jax.random.randint(action_key, shape, 0, network.num_actions)
        inputs = (
            jax.random.uniform(explore_key, shape) < epsilon,
            random_action,
            jax.random.split(env_key, shape),
        )
        (obs, env_state), (rollout, info) = unrolled_scan(
            step, (state.obs, state.env_state), inputs
        )
        replay, count = (
            add_to_replay(state.replay, rollout, state.replay_count),
            state.replay_count + 1,
        )
        return state._replace(replay=replay, replay_count=count, obs=obs, env_state=env_state), info

    def loss(params, batch, target):
        q = select(network.apply(params, batch["obs"]), batch["action"])
        return td_loss(q, target, config.loss), q.mean()

    def learn(state, key):
        """Take the gradient steps, each on a new batch."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, key):
            params, opt_state = carry
            batch = sample_replay(
                key, state.replay, state.replay_count, config.batch_size, config.n_step
            )
            target_q = network.apply(state.target_params, batch["next_obs"])
            next_value = double_q(
                target_q, network.apply(params, batch["next_obs"]) if config.double else target_q
            )
            target = n_step_target(
                batch["rewards"], batch["last"], batch["terminated"], next_value, config.gamma
            )
            (error, q), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, target)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = jax.tree.map(lambda param, update: param - lr * update, params, updates)
            return (params, opt_state), {"td_loss": error, "q_value": q}

        keys = jax.random.split(key, config.gradient_steps)
        (params, opt_state), metrics = jax.lax.scan(
            gradient_step, (state.params, state.opt_state), keys
        )
        state = state._replace(
            params=params, opt_state=opt_state, update_count=state.update_count + 1
        )
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        duration = config.exploration_fraction * config.num_updates
        epsilon = linear_epsilon(
            state.update_count, duration, config.epsilon_start, config.epsilon_finish
        )
        state, info = collect(state._replace(key=key), collect_key, epsilon)
        state, metrics = learn(state, learn_key)
        target, params, count = state.target_params, state.params, state.update_count
        target = update_towards(target, params, count, rollout_size, interval, config.tau)
        return state._replace(target_params=target), metrics | episode_metrics(info) | {
            "epsilon": epsilon
        }

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
    network = make_network(config, *make_env(config))

    def act(agent, memory, obs):
        return greedy(network.apply(agent["params"], obs)), memory

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
