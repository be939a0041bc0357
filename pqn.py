# /// script
# requires-python = ">=3.11"
# dependencies = [
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
"""PQN: Q(lambda) on parallel environments without replay and target network, the whole training in one jit.

Gallici et al. 2025, "Simplifying Deep Temporal Difference Learning" (arXiv 2407.04811), section 4: layer normalization
takes the place of the target network, many environments that of the replay. Targets: the lambda-returns of Peng's
Q(lambda), Peng and Williams 1996, computed backwards.

Beside the paper: an episode that ends by its time limit is bootstrapped from the value of its last observation, one
that terminates is not.

    python pqn.py --env-name CartPole-v1 --num-seeds 8

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
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
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

# gymnax is imported where it is used: importing it starts JAX's backend, and `main` has to make each core a device
# before that.


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

    env_name: str = "CartPole-v1"  # an environment of gymnax with discrete actions
    env_params: Mapping = FrozenDict()  # its parameters or constructor arguments, such as {memory_length: 20}
    max_episode_steps: int = 0  # time limit; 0 keeps the environment's own
    total_timesteps: int = 500_000  # environment steps per agent
    num_envs: int = 32  # environments per agent
    num_steps: int = 64  # steps per environment and update
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 16  # gradient steps per pass
    lr: float = 2e-3  # RAdam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount
    q_lambda: float = 0.95  # decay of the trace: 0 bootstraps after one step, 1 where the rollout or an episode ends
    epsilon_start: float = 1.0  # share of random actions at first
    epsilon_finish: float = 0.02  # and at last
    exploration_fraction: float = 0.2  # of the updates, in which epsilon falls linearly
    max_grad_norm: float = 10.0  # limit of the gradient's global norm
    layer_norm: bool = True  # before each activation; keeps learning stable without a target network
    conv_features: int = 16  # of the 3 x 3 convolution that grids [H, W, C] go through first; 0 flattens them
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the dense layers
    activation: str = "relu"  # tanh, relu, elu, gelu or swish

    def __post_init__(self):
        object.__setattr__(self, "env_params", freeze_mapping(self.env_params))

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


def check(config: Config) -> None:
    """Raise ValueError, naming the field, for a config that cannot train."""
    require(config, "total_timesteps", "num_envs", "num_steps", "update_epochs", "num_minibatches", low=1)
    require(config, "gamma", "q_lambda", "epsilon_start", "epsilon_finish", "exploration_fraction", low=0, high=1)
    require(config, "max_episode_steps", "conv_features", "lr", "max_grad_norm", low=0)
    batch = config.num_envs * config.num_steps
    if batch % config.num_minibatches:
        raise ValueError(f"num_minibatches = {config.num_minibatches}: must divide num_envs * num_steps = {batch}")
    if config.num_updates < 1:
        raise ValueError(f"total_timesteps = {config.total_timesteps}: one update takes num_envs * num_steps = {batch}")
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


def make_env(config: Config):
    """`(env, env_params)`: gymnax's interface, statistics of episodes in `info`."""
    from gymnax.environments import spaces
    from gymnax.wrappers import LogWrapper

    env, env_params = make_gymnax_env(config)
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError(f"env_name = {config.env_name}: must have discrete actions, as CartPole-v1 has")
    return LogWrapper(env), env_params


def patches(x):
    """The 3 x 3 neighbourhood of each inner cell: [..., H, W, C] -> [..., H - 2, W - 2, 9 C]."""
    height, width = x.shape[-3] - 2, x.shape[-2] - 2
    return jnp.concatenate([x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)], axis=-1)


class QNetwork(nn.Module):
    """The value of each action: a convolution where observations are grids, hidden layers, and a linear head."""

    obs_shape: tuple[int, ...]
    num_states: int  # of an environment whose observation is the number of its state; 0 of all others
    num_actions: int
    conv_features: int
    hidden_sizes: tuple[int, ...]
    activation: str
    layer_norm: bool

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., num_actions]
        def layer(size, x):
            x = nn.Dense(size, kernel_init=nn.initializers.he_normal())(x)
            return getattr(nn, self.activation)(nn.LayerNorm()(x) if self.layer_norm else x)

        x = jax.nn.one_hot(obs, self.num_states) if self.num_states else obs.astype(jnp.float32)
        if len(self.obs_shape) == 3 and self.conv_features:
            # A 3 x 3 convolution as a matrix product: nn.Conv is very slow where vmap gives each seed its own filters.
            x = layer(self.conv_features, patches(x))
        x = x.reshape(*obs.shape[: obs.ndim - len(self.obs_shape)], -1)
        for size in self.hidden_sizes:
            x = layer(size, x)
        return nn.Dense(self.num_actions)(x)


def at(values, index):
    """The entry of the last axis. [..., n], [...] -> [...]."""
    chosen = jnp.arange(values.shape[-1]) == index[..., None]  # much faster than a gather where n is small
    return jnp.where(chosen, values, 0).sum(axis=-1)


def q_lambda_target(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """Lambda-returns of Q(lambda) with time limits (arXiv 2407.04811, section 4). All [T, N].

    G_t = r_t + gamma (1 - terminated) B_t, with B_t = max_a Q(s', a) where the episode was truncated or the rollout
    ends, and B_t = lambda G_{t+1} + (1 - lambda) max_a Q(s', a) elsewhere. `next_values` are max_a Q(s', a) of the
    observations s' that the steps led to, before any reset.
    """

    def step(next_target, inputs):
        reward, next_value, terminated, truncated = inputs
        mixed = jnp.where(truncated, next_value, q_lambda * next_target + (1.0 - q_lambda) * next_value)
        target = reward + gamma * jnp.where(terminated, 0.0, mixed)
        return target, target

    inputs = rewards, next_values, terminated, truncated
    # Beyond the last step there is no target, so that the next value stands in for it.
    return jax.lax.scan(step, next_values[-1], inputs, reverse=True, unroll=16)[1]


def td_loss(q, target):
    """Half the mean squared error. Both [B]."""
    return 0.5 * jnp.square(q - target).mean()


def linear_epsilon(count, duration, start, finish):
    return start + (finish - start) * jnp.minimum(1.0, count / jnp.maximum(duration, 1.0))


def random_order(key, size: int):
    """0, 1, ..., size - 1 in random order [size]: one sort of one array, much faster on CPUs than `permutation`.

    Sorts random * size + index, where `random` takes (2**32 - 1) // size values. Equal ones, rare while size**2 is far
    below 2**32, keep the order of their indices.
    """
    index = jnp.arange(size, dtype=jnp.uint32)
    high = jax.random.bits(key, (size,)) % jnp.uint32((2**32 - 1) // size)
    return (jnp.sort(high * size + index) % size).astype(jnp.int32)


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    opt_state: Any
    num_updates: jax.Array  # so far
    obs: jax.Array  # [num_envs, *obs_shape]
    env_state: Any  # [num_envs, ...]
    key: jax.Array


class Transition(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: dict  # with `final_observation`, what the step led to before any reset


def make_network(config: Config, env, env_params):
    from gymnax.environments import spaces

    space, num_actions = env.observation_space(env_params), env.action_space(env_params).n
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    sizes = config.conv_features, config.hidden_sizes
    return QNetwork(space.shape, num_states, num_actions, *sizes, config.activation, config.layer_norm)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    check(config)
    env, env_params = make_env(config)
    network = make_network(config, env, env_params)
    num_actions = env.action_space(env_params).n
    gradient_steps = config.update_epochs * config.num_minibatches

    def learning_rate(count):  # constant within an update
        return config.lr * (1.0 - (count // gradient_steps) / config.num_updates)

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.chain(clip, optax.radam(learning_rate if config.anneal_lr else config.lr))

    def init(rng):
        params_key, env_key, key = jax.random.split(rng, 3)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, config.num_envs), env_params)
        params = network.init(params_key, obs)
        return RunnerState(params, optimizer.init(params), jnp.zeros((), jnp.int32), obs, env_state, key)

    def collect(state, key, epsilon):
        """Act for `num_steps` steps, at random with probability `epsilon`, else greedily."""

        def step(carry, inputs):
            obs, env_state = carry
            explore, random_action, env_keys = inputs
            action = jnp.where(explore, random_action, network.apply(state.params, obs).argmax(axis=-1))
            next_obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
                env_keys, env_state, action, env_params
            )
            return (next_obs, env_state), Transition(obs, action, reward, terminated, truncated, info)

        action_key, env_key = jax.random.split(key)  # all random numbers at once: much faster than in each step
        uniform = jax.random.uniform(action_key, (2, config.num_steps, config.num_envs))
        random_action = (num_actions * uniform[1]).astype(jnp.int32)
        env_keys = jax.random.split(env_key, (config.num_steps, config.num_envs))
        (obs, env_state), rollout = jax.lax.scan(
            step, (state.obs, state.env_state), (uniform[0] < epsilon, random_action, env_keys)
        )
        return state._replace(obs=obs, env_state=env_state), rollout

    def make_batch(state, rollout):
        """A rollout and its targets as one flat batch."""
        next_obs = rollout.info["final_observation"]  # [T, N, *obs_shape]
        pieces = next_obs.reshape(config.num_minibatches, -1, *next_obs.shape[2:])  # small enough for a CPU's cache
        next_values = jax.lax.map(lambda piece: network.apply(state.params, piece).max(axis=-1), pieces)
        targets = q_lambda_target(
            rollout.reward,
            next_values.reshape(rollout.reward.shape),
            rollout.terminated,
            rollout.truncated,
            config.gamma,
            config.q_lambda,
        )
        batch = {"obs": rollout.obs, "action": rollout.action, "target": targets}
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def loss(params, batch):
        q = at(network.apply(params, batch["obs"]), batch["action"])
        td_error = td_loss(q, batch["target"])
        return td_error, {"td_loss": td_error, "q_value": q.mean()}

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""

        def gradient_step(carry, minibatch):
            params, opt_state = carry
            grads, metrics = jax.grad(loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), metrics

        def epoch(carry, _):
            *carry, key = carry
            key, order_key = jax.random.split(key)
            order = random_order(order_key, config.num_envs * config.num_steps)
            shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
            minibatches = jax.tree.map(lambda leaf: leaf.reshape(config.num_minibatches, -1, *leaf.shape[1:]), shuffled)
            carry, metrics = jax.lax.scan(gradient_step, tuple(carry), minibatches)
            return (*carry, key), metrics

        carry = state.params, state.opt_state, key
        (params, opt_state, _), metrics = jax.lax.scan(epoch, carry, None, config.update_epochs)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        duration = config.exploration_fraction * config.num_updates
        epsilon = linear_epsilon(state.num_updates, duration, config.epsilon_start, config.epsilon_finish)
        state, rollout = collect(state._replace(key=key, num_updates=state.num_updates + 1), collect_key, epsilon)
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


class Episode(NamedTuple):
    """One episode: [time limit, ...]."""

    env_state: Any  # before the step
    reward: jax.Array
    valid: jax.Array  # false after the episode's end


def make_rollout(config: Config):
    """`rollout(runner_state, rng) -> Episode`: one greedy episode of a trained agent."""
    env, env_params = make_env(config)
    network = make_network(config, env, env_params)

    def rollout(runner_state, rng):
        def step(carry, key):
            obs, env_state, valid = carry
            action = network.apply(runner_state.params, obs).argmax(axis=-1)
            next_obs, next_env_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
            episode = Episode(env_state.env_state, reward, valid)
            return (next_obs, next_env_state, valid & ~(terminated | truncated)), episode

        reset_key, step_key = jax.random.split(rng)
        obs, env_state = env.reset(reset_key, env_params)
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
