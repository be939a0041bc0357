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
"""PQN: Q(lambda) on parallel environments without replay and target network, the whole training in one jit.

Gallici et al. 2025, "Simplifying Deep Temporal Difference Learning" (arXiv 2407.04811), section 4: layer normalization
replaces the target network, and many environments replace the replay. Targets: the lambda-returns of Peng's Q(lambda),
Peng and Williams 1996, computed backwards.

Difference from the paper: an episode that its time limit truncates is bootstrapped from its last observation.

    python pqn.py --env-name CartPole-v1 --num-seeds 8

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import functools
import importlib
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
    total_timesteps: int = 500_000  # environment steps per agent
    num_envs: int = 32  # environments per agent
    num_steps: int = 64  # steps per environment and update
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 16  # gradient steps per pass
    lr: float = 2e-3  # RAdam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.95  # decay of the trace: 0 bootstraps after one step, 1 at the end of the rollout or episode
    epsilon_start: float = 1.0  # epsilon at the start
    epsilon_finish: float = 0.02  # epsilon at the end
    exploration_fraction: float = 0.2  # fraction of the updates over which epsilon falls linearly
    max_grad_norm: float = 10.0  # limit of the gradient's global norm; 0 for no limit
    layer_norm: bool = True  # normalize layers before each activation; keeps learning stable without a target network
    torso: Literal["flat", "grid", "nature"] = (
        "grid"  # convolutions of images: none, one of 3 x 3, or Mnih et al. 2015
    )
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the dense hidden layers
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "relu"  # activation function of the hidden layers
    )
    unroll: int = 8  # rollout and gradient steps that are unrolled on a GPU: fewer kernels, but a longer compilation

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


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
    """The value of each action: a convolution where observations are grids, hidden layers, and a linear head."""

    obs_shape: tuple[int, ...]
    num_states: (
        int  # of an environment whose observation is the number of its state; 0 of all others
    )
    num_actions: int
    convolutions: tuple[tuple[int, int, int], ...]  # (features, size, stride)
    hidden_sizes: tuple[int, ...]
    activation: str
    layer_norm: bool

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., num_actions]
        def layer(size, x):
            x = nn.Dense(size, kernel_init=nn.initializers.he_normal())(x)
            return getattr(nn, self.activation)(nn.LayerNorm()(x) if self.layer_norm else x)

        obs = obs / 255.0 if obs.dtype == jnp.uint8 and self.obs_shape else obs
        x = (
            jax.nn.one_hot(obs, self.num_states, dtype=jnp.float32)
            if self.num_states
            else obs.astype(jnp.float32)
        )
        for features, size, stride in self.convolutions:
            x = layer(features, patches(x, size, stride))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes:
            x = layer(size, x)
        return nn.Dense(self.num_actions)(x)


# --- mathematics: arrays in, arrays out ---


def q_lambda_target(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """Lambda-returns of Q(lambda) with time limits (arXiv 2407.04811, section 4). All [T, N].

    G_t = r_t + gamma (1 - terminated) B_t, with B_t = max_a Q(s', a) where the episode was truncated or the rollout
    ends, and B_t = lambda G_{t+1} + (1 - lambda) max_a Q(s', a) elsewhere. `next_values` are max_a Q(s', a) for
    the observation s' after the step, before auto-reset.
    """

    def step(next_target, inputs):
        reward, next_value, terminated, truncated = inputs
        mixed = jnp.where(
            truncated, next_value, q_lambda * next_target + (1.0 - q_lambda) * next_value
        )
        target = reward + gamma * jnp.where(terminated, 0.0, mixed)
        return target, target

    # After the last step there is no target, and the next value replaces it.
    steps = rewards, next_values, terminated, truncated
    return jax.lax.scan(step, next_values[-1], steps, reverse=True, unroll=16)[1]


def td_loss(q, target):
    """Half the mean squared error. Both [B]."""
    return 0.5 * jnp.square(q - target).mean()


def linear_epsilon(count, duration, start, finish):
    return start + (finish - start) * jnp.minimum(1.0, count / jnp.maximum(duration, 1.0))


def random_order(key, size: int):
    """0 to `size` - 1 in random order, by one sort of one array: much faster on CPUs than `jax.random.permutation`."""
    index = jnp.arange(size, dtype=jnp.uint32)
    high = jax.random.bits(key, (size,)) % jnp.uint32(
        (2**32 - 1) // size
    )  # sort key: random high part, low part index
    return (jnp.sort(high * size + index) % size).astype(jnp.int32)


# --- block scan: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def unrolled_scan(step, carry, xs, unroll=8):
    """`jax.lax.scan`, unrolled only on GPUs, which then run fewer kernels. A CPU would only compile for longer."""
    rolled, unrolled = (
        functools.partial(jax.lax.scan, step, unroll=steps) for steps in (1, unroll)
    )
    return jax.lax.platform_dependent(carry, xs, cpu=rolled, default=unrolled)


# --- training ---


class Transition(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_value: jax.Array  # max_a Q of the observation after the step, before auto-reset
    terminated: jax.Array
    truncated: jax.Array
    info: dict  # statistics of episodes


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    opt_state: Any
    update_count: jax.Array
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
    layers = convolutions(config.torso, space.shape), config.hidden_sizes, config.activation
    return QNetwork(space.shape, num_states, num_actions, *layers, config.layer_norm)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    batch_size = config.num_envs * config.num_steps
    if (
        min(
            config.num_envs,
            config.num_steps,
            config.update_epochs,
            config.num_minibatches,
            config.unroll,
        )
        < 1
    ):
        raise ValueError(
            "num_envs, num_steps, update_epochs, num_minibatches, unroll: must all be at least 1"
        )
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {batch_size}"
        )
    if batch_size % config.num_minibatches:
        raise ValueError(f"num_minibatches = {config.num_minibatches}: must divide {batch_size}")
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    network = make_network(config, env, env_params)
    clip = optax.clip_by_global_norm(
        jnp.where(config.max_grad_norm > 0, config.max_grad_norm, jnp.inf)
    )
    optimizer = optax.chain(clip, optax.scale_by_radam())

    def init(rng):
        params_key, env_key, key = jax.random.split(rng, 3)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        params, zero = network.init(params_key, obs), jnp.zeros((), jnp.int32)
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            update_count=zero,
            obs=obs,
            env_state=env_state,
            key=key,
        )

    def collect(state, key, epsilon):
        """Act epsilon-greedily for `num_steps` steps."""

        def step(carry, inputs):
            obs, q, env_state = carry
            explore, random_action, env_keys = inputs
            action = jnp.where(explore, random_action, q.argmax(axis=-1).astype(jnp.int32))
            after, env_state, reward, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            both = jnp.stack(
                [after, info.pop("final_observation")]
            )  # for the next action, and to bootstrap from
            q, final_q = network.apply(state.params, both)
            transition = Transition(
                obs=obs,
                action=action,
                reward=reward,
                next_value=final_q.max(axis=-1),
                terminated=terminated,
                truncated=truncated,
                info=info,
            )
            return (after, q, env_state), transition

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
        carry = state.obs, network.apply(state.params, state.obs), state.env_state
        (obs, _, env_state), rollout = unrolled_scan(step, carry, inputs, config.unroll)
        return state._replace(obs=obs, env_state=env_state), rollout

    def make_batch(state, rollout):
        """Compute the targets of a rollout, and flatten both into one batch."""
        steps = rollout.reward, rollout.next_value, rollout.terminated, rollout.truncated
        targets = q_lambda_target(*steps, config.gamma, config.q_lambda)
        batch = {"obs": rollout.obs, "action": rollout.action, "target": targets}
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def loss(params, batch):
        q = network.apply(params, batch["obs"])
        q = jnp.take_along_axis(q, batch["action"][:, None], axis=1).squeeze(1)
        return td_loss(q, batch["target"]), q.mean()

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            (error, q), grads = jax.value_and_grad(loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = jax.tree.map(lambda param, update: param - lr * update, params, updates)
            return (params, opt_state), {"td_loss": error, "q_value": q}

        def epoch(carry, key):
            order = random_order(key, batch_size)
            return unrolled_scan(
                gradient_step, carry, order.reshape(config.num_minibatches, -1), config.unroll
            )

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
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
        state, rollout = collect(state._replace(key=key), collect_key, epsilon)
        state, metrics = learn(state, make_batch(state, rollout), learn_key)
        return state, metrics | episode_metrics(rollout.info) | {"epsilon": epsilon}

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
        return network.apply(agent["params"], obs).argmax(axis=-1), memory

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
