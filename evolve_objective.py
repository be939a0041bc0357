# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9",
#     "evosax>=0.3.2",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "orbax-checkpoint>=0.12.8",
#     "pyyaml>=6.0",
#     "scipy>=1.15",
#     "tfp-nightly==0.26.0.dev20261027",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# ///
"""Evolution of a policy objective: an evolution strategy around whole PPO trainings, all of it in one jit.

Lu et al. 2022, "Discovered Policy Optimisation" (arXiv 2210.05639): PPO's loss is the advantage times the ratio less a
drift, a penalty on the policy's change. Here the drift is a small network, the paper's Learnt Policy Optimisation
(LPO), that starts as PPO's clip. Its weights are evolved by OpenES (Salimans et al. 2017, arXiv 1703.03864) with Adam
and mirrored pairs, as in the paper; the fitness of a network is the return that agents reach who learn with it. One
`update` is a generation: `population_size` networks train `inner_seeds` agents each, all from the same keys.

The agents are those of ppo.py, with its names. Unlike the paper's, their actions are discrete, and their trainings are
short: the defaults finish in minutes on two CPU cores. A batch is used for eight epochs, where PPO's clip holds an
agent back and a drift has something to gain. `report` saves the network, draws it, and lets it train beside PPO and
DPO, also on environments that it was not evolved on.

    python evolve_objective.py --num-seeds 1

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 4))
"""

import contextlib
import csv
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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import distrax
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

# gymnax and evosax are imported where they are used: importing them starts JAX's backend, and `main` has to make each
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
    """Hyperparameters. The defaults are sized for two CPU cores."""

    env_name: str = "Catch-bsuite"  # an environment of gymnax with discrete actions
    env_params: Mapping = FrozenDict()  # its parameters or constructor arguments, such as {memory_length: 20}
    max_episode_steps: int = 0  # time limit; 0 keeps the environment's own
    num_generations: int = 24  # updates of the evolution strategy
    population_size: int = 16  # drift networks per generation, in mirrored pairs
    inner_seeds: int = 2  # agents that each network trains; its fitness is the mean of their returns
    num_slices: int = 1  # parts of the population, evaluated one after the other where memory is short
    num_devices: int = 1  # that one population is spread over; 1 leaves the devices to --num-seeds
    es_lr: float = 0.01  # learning rate of the evolution strategy's Adam
    es_sigma: float = 0.03  # standard deviation of the networks around their mean
    drift_size: int = 16  # hidden units of the drift network
    total_timesteps: int = 8_192  # environment steps of one agent's training
    inner_envs: int = 16  # environments per agent
    inner_steps: int = 64  # steps per environment and update of the agent
    update_epochs: int = 8  # passes over the batch of inner_envs * inner_steps steps
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 3e-3  # learning rate of the agent's Adam
    anneal_lr: bool = True  # decay the agent's learning rate linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # decay of the advantage's trace
    clip_eps: float = 0.2  # clip range that evolution starts from, and that of the value where clip_value is set
    clip_value: bool = False  # clip the change of the value prediction too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm
    normalize_obs: bool = False  # by the running mean and variance of this agent
    normalize_reward: bool = False  # by the running standard deviation of the discounted return
    conv_features: int = 16  # of the 3 x 3 convolution that grids [H, W, C] go through first; 0 flattens them
    hidden_sizes: tuple[int, ...] = (32, 32)  # of the dense layers of the actor and of the critic
    activation: str = "tanh"  # tanh, relu, elu, gelu or swish
    test_envs: str = "CartPole-v1,Acrobot-v1"  # where the result trains beside PPO and DPO at the end
    test_seeds: int = 16  # agents per objective and environment there; 0 leaves the comparison out
    test_timesteps: int = 0  # environment steps of each of them; 0 takes total_timesteps

    def __post_init__(self):
        object.__setattr__(self, "env_params", freeze_mapping(self.env_params))

    @property
    def inner_updates(self) -> int:
        """Of one agent's training."""
        return self.total_timesteps // (self.inner_envs * self.inner_steps)

    @property
    def num_updates(self) -> int:
        return self.num_generations

    @property
    def num_envs(self) -> int:
        """Environments in one generation."""
        return self.population_size * self.inner_seeds * self.inner_envs

    @property
    def num_steps(self) -> int:
        """Steps of each of them in one generation."""
        return self.inner_updates * self.inner_steps


def check(config: Config) -> None:
    """Raise ValueError, naming the field, for a config that cannot train."""
    require(config, "total_timesteps", "inner_envs", "inner_steps", "update_epochs", "num_minibatches", low=1)
    require(config, "num_generations", "population_size", "inner_seeds", "num_slices", "num_devices", low=1)
    require(config, "drift_size", low=1, high=65536)
    require(config, "gamma", "gae_lambda", low=0, high=1)
    require(config, "max_episode_steps", "conv_features", "test_seeds", "test_timesteps", low=0)
    require(config, "lr", "clip_eps", "ent_coef", "vf_coef", "max_grad_norm", "es_lr", low=0)
    require(config, "es_sigma", low=1e-6)
    batch = config.inner_envs * config.inner_steps
    if batch % config.num_minibatches:
        raise ValueError(f"num_minibatches = {config.num_minibatches}: must divide inner_envs * inner_steps = {batch}")
    for name in ("total_timesteps", "test_timesteps"):
        steps = getattr(config, name)
        if not batch <= steps < 2**31 * batch and (steps or name == "total_timesteps"):
            raise ValueError(f"{name} = {steps}: one update of an agent takes inner_envs * inner_steps = {batch}")
    if not config.hidden_sizes or min(config.hidden_sizes) < 1:
        raise ValueError(f"hidden_sizes = {config.hidden_sizes}: must be positive sizes, such as (64, 64)")
    if config.activation not in ("tanh", "relu", "elu", "gelu", "swish"):
        raise ValueError(f"activation = {config.activation}: must be tanh, relu, elu, gelu or swish")
    check_population(config)


def check_population(config: Config) -> None:
    if config.population_size % 2:
        raise ValueError(f"population_size = {config.population_size}: must be even, for its mirrored pairs")
    if config.population_size % config.num_slices:
        raise ValueError(f"num_slices = {config.num_slices}: must divide population_size = {config.population_size}")
    size = config.population_size // config.num_slices
    if size % config.num_devices or config.num_devices > jax.local_device_count():
        raise ValueError(
            f"num_devices = {config.num_devices}: must divide the {size} networks of a slice, and there have to be as "
            f"many ({jax.local_device_count()} here)"
        )
    for test_config in test_configs(config)[1:]:
        try:
            make_env(test_config)
        except ValueError as error:
            raise ValueError(f"test_envs = {config.test_envs}: {error}") from error


def test_configs(config: Config) -> list[Config]:
    """Of the environments that the result is compared on, the one that it was evolved on first."""
    names = dict.fromkeys(name.strip() for name in config.test_envs.split(","))
    config = dataclasses.replace(config, total_timesteps=config.test_timesteps or config.total_timesteps)
    others = [name for name in names if name not in ("", config.env_name)]
    return [config, *(dataclasses.replace(config, env_name=x, env_params={}, max_episode_steps=0) for x in others)]


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


def patches(x):
    """The 3 x 3 neighbourhood of each inner cell: [..., H, W, C] -> [..., H - 2, W - 2, 9 C]."""
    height, width = x.shape[-3] - 2, x.shape[-2] - 2
    return jnp.concatenate([x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)], axis=-1)


class Network(nn.Module):
    """A convolution where observations are grids, hidden layers, and a linear head, initialized orthogonally."""

    obs_shape: tuple[int, ...]
    num_states: int  # of an environment whose observation is the number of its state; 0 of all others
    conv_features: int
    hidden_sizes: tuple[int, ...]
    outputs: int
    activation: str
    head_scale: float

    @nn.compact
    def __call__(self, obs):  # [..., *obs_shape] -> [..., outputs]
        activation = getattr(nn, self.activation)
        x = jax.nn.one_hot(obs, self.num_states) if self.num_states else obs.astype(jnp.float32)
        batch_shape = obs.shape[: obs.ndim - len(self.obs_shape)]
        if len(self.obs_shape) == 3 and self.conv_features:
            # A 3 x 3 convolution as a matrix product: nn.Conv is very slow where vmap gives each seed its own filters.
            x = activation(nn.Dense(self.conv_features, kernel_init=orthogonal(math.sqrt(2)))(patches(x)))
        x = x.reshape(*batch_shape, -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        return nn.Dense(self.outputs, kernel_init=orthogonal(self.head_scale))(x)


class Actor(nn.Module):
    body: nn.Module

    def __call__(self, obs):  # [..., *obs_shape] -> distribution over [...]
        return distrax.Categorical(logits=self.body(obs))


class Critic(nn.Module):
    body: nn.Module

    def __call__(self, obs):  # [..., *obs_shape] -> [...]
        return self.body(obs).squeeze(-1)


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


def discounted_returns(rewards, dones, last_return, gamma):
    """Discounted sum of the rewards up to each step, R = gamma R + r, started anew after an episode's end.

    rewards, dones: [T, N]. last_return: [N], R after the step before the first, 0 if that one ended an episode.
    Returns R [T, N] and the `last_return` for the steps that follow.
    """

    def step(carry, transition):
        reward, done = transition
        discounted = gamma * carry + reward
        return jnp.where(done, 0.0, discounted), discounted

    last_return, returns = jax.lax.scan(step, last_return, (rewards, dones))
    return returns, last_return


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits. All [T, N].

    `next_values` are those of the observations that the steps led to, before any reset. A step that terminated is
    not bootstrapped, one that was truncated is; both cut the trace. Returns advantages and value targets [T, N].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decays = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def step(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True, unroll=16)
    return advantages, advantages + values


def ppo_drift(log_ratio, advantage, clip_eps):
    """What PPO's clip takes from the objective: ratio * A less this is equation 7 of arXiv 1707.06347. All [B]."""
    ratio = jnp.exp(log_ratio)
    return nn.relu((ratio - jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)) * advantage)


def dpo_drift(log_ratio, advantage, alpha=2.0, beta=0.6):
    """The closed form that the paper found for what evolution had found, as in dpo_continuous.py. All [B]."""
    gain, log_gain = jnp.expm1(log_ratio) * advantage, log_ratio * advantage
    positive = nn.relu(gain - alpha * jnp.tanh(gain / alpha))
    negative = nn.relu(log_gain - beta * jnp.tanh(log_gain / beta))
    return jnp.where(advantage >= 0.0, positive, negative)


def init_weights(key, size: int) -> dict:
    """Weights of a drift network without biases, of which the last layer is 0: the drift is PPO's."""
    return {"hidden": jax.random.normal(key, (8, size)) / math.sqrt(8), "output": jnp.zeros(size)}


def network_drift(weights, log_ratio, advantage, clip_eps):
    """LPO's drift (arXiv 2210.05639), from PPO's on. All [B].

    The inputs are 0 at a ratio of 1, there are no biases, and 1e-4 is taken off: whatever the weights, the drift is not
    negative, and it and its gradient are 0 at a ratio of 1, as mirror learning asks.
    """
    change = -jnp.expm1(log_ratio)  # 1 - ratio
    features = jnp.stack([log_ratio, jnp.square(log_ratio), change, jnp.square(change)], axis=-1)
    features = jnp.concatenate([features, features * advantage[..., None]], axis=-1)  # [B, 8]
    added = jnp.tanh(features @ weights["hidden"]) @ weights["output"]
    return nn.relu(ppo_drift(log_ratio, advantage, clip_eps) + added - 1e-4)


def policy_loss(log_prob, old_log_prob, advantage, drift):
    """The objective less `drift(log_ratio, advantage)`, negated; advantages are normalized here. All [B]."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = log_prob - old_log_prob
    return -(jnp.exp(log_ratio) * advantage - drift(log_ratio, advantage)).mean()


def value_loss(value, old_value, target, clip_eps=None):
    """Half the mean squared error; with `clip_eps` the larger of it and that of the clipped prediction. All [B]."""
    error = jnp.square(value - target)
    if clip_eps is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error.mean()


def random_order(key, size: int):
    """0, 1, ..., size - 1 in random order [size]: one sort of one array, much faster on CPUs than `permutation`.

    Sorts random * size + index, where `random` takes (2**32 - 1) // size values. Equal ones, rare while size**2 is far
    below 2**32, keep the order of their indices.
    """
    index = jnp.arange(size, dtype=jnp.uint32)
    high = jax.random.bits(key, (size,)) % jnp.uint32((2**32 - 1) // size)
    return (jnp.sort(high * size + index) % size).astype(jnp.int32)


def final_return(metrics):
    """Mean return of the episodes that ended in the last quarter of a training; NaN where none did. [U] -> []."""
    episodes = metrics["episodes"][-math.ceil(len(metrics["episodes"]) / 4) :]
    returns = metrics["episodic_return"][-len(episodes) :]
    return jnp.where(episodes > 0, episodes * returns, 0.0).sum() / episodes.sum()


class AgentState(NamedTuple):
    """All that an agent's training carries from one of its updates to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    obs: jax.Array  # [inner_envs, *obs_shape]
    env_state: Any  # [inner_envs, ...]
    obs_statistics: Statistics
    return_statistics: Statistics
    discounted_return: jax.Array  # [inner_envs]
    key: jax.Array


class Policy(NamedTuple):
    """What is kept of a trained agent."""

    params: dict  # of "actor" and "critic"
    obs_statistics: Statistics


class RunnerState(NamedTuple):
    """All that evolution carries from one generation to the next."""

    params: dict  # of the better of the agents that the last generation's best network has trained
    obs_statistics: Statistics  # of the same agent
    es_state: Any  # with the mean of the networks, as one vector
    key: jax.Array


class Transition(NamedTuple):
    """One step, or, with leading axes [inner_steps, inner_envs], a rollout."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: dict  # with `final_observation`, what the step led to before any reset


def make_networks(config: Config, env, env_params):
    from gymnax.environments import spaces

    space = env.observation_space(env_params)
    num_states = space.n if isinstance(space, spaces.Discrete) else 0
    if num_states and config.normalize_obs:
        raise ValueError(f"normalize_obs = True: must be False, observations of {config.env_name} are state numbers")
    body = partial(Network, space.shape, num_states, config.conv_features, config.hidden_sizes)
    num_actions = env.action_space(env_params).n
    return Actor(body(num_actions, config.activation, 0.01)), Critic(body(1, config.activation, 1.0))


def make_inner(config: Config):
    """`train(drift, rng) -> (Policy, metrics)`: an agent's whole training with a drift; metrics are [inner_updates]."""
    env, env_params = make_env(config)
    actor, critic = make_networks(config, env, env_params)
    obs_shape = env.observation_space(env_params).shape
    gradient_steps = config.update_epochs * config.num_minibatches

    def learning_rate(count):  # constant within an update
        return config.lr * (1.0 - (count // gradient_steps) / config.inner_updates)

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    adam = optax.adam(learning_rate if config.anneal_lr else config.lr, eps=1e-5)
    optimizer = optax.flatten(optax.chain(clip, adam))  # on one vector: small networks have more overhead than work

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, config.inner_envs), env_params)
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        statistics = init_statistics(obs_shape), init_statistics(()), jnp.zeros(config.inner_envs)
        return AgentState(params, optimizer.init(params), obs, env_state, *statistics, key)

    def observe(state, obs):
        return normalize(state.obs_statistics, obs) if config.normalize_obs else obs

    def value_of(state, obs):
        """[inner_steps, inner_envs, *obs_shape] -> [inner_steps, inner_envs], in pieces that stay in cache."""
        pieces = obs.reshape(config.num_minibatches, -1, *obs_shape)
        return jax.lax.map(partial(critic.apply, state.params["critic"]), pieces).reshape(obs.shape[:2])

    def collect(state, key):
        """Act for `inner_steps` steps with the policy as it is."""

        def step(carry, keys):
            obs, env_state = carry
            action_key, env_keys = keys
            policy = actor.apply(state.params["actor"], observe(state, obs))
            action, log_prob = policy.sample_and_log_prob(seed=action_key)
            next_obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
                env_keys, env_state, action, env_params
            )
            transition = Transition(obs, action, log_prob, reward, terminated, truncated, info)
            return (next_obs, env_state), transition

        action_key, env_key = jax.random.split(key)
        env_keys = jax.random.split(env_key, (config.inner_steps, config.inner_envs))
        keys = jax.random.split(action_key, config.inner_steps), env_keys  # all at once: much faster than in each step
        (obs, env_state), rollout = jax.lax.scan(step, (state.obs, state.env_state), keys)
        return state._replace(obs=obs, env_state=env_state), rollout

    def make_batch(state, rollout):
        """Advantages and targets of a rollout, in the units of normalized rewards, as one flat batch."""
        rewards = rollout.reward
        if config.normalize_reward:
            done = rollout.terminated | rollout.truncated
            returns, last_return = discounted_returns(rewards, done, state.discounted_return, config.gamma)
            statistics = merge_statistics(state.return_statistics, returns.reshape(-1))
            state = state._replace(return_statistics=statistics, discounted_return=last_return)
            rewards = rewards / jnp.sqrt(statistics.var + 1e-8)
        obs, next_obs = observe(state, rollout.obs), observe(state, rollout.info["final_observation"])
        values, next_values = value_of(state, obs), value_of(state, next_obs)
        advantages, targets = gae(
            rewards, values, next_values, rollout.terminated, rollout.truncated, config.gamma, config.gae_lambda
        )
        batch = {"obs": obs, "action": rollout.action, "log_prob": rollout.log_prob}
        batch |= {"value": values, "advantage": advantages, "target": targets}
        return state, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def loss(params, batch, drift):
        policy = actor.apply(params["actor"], batch["obs"])
        value = critic.apply(params["critic"], batch["obs"])
        actor_loss = policy_loss(policy.log_prob(batch["action"]), batch["log_prob"], batch["advantage"], drift)
        critic_loss = value_loss(value, batch["value"], batch["target"], config.clip_eps if config.clip_value else None)
        entropy = policy.entropy().mean()
        return actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy  # arXiv 1707.06347, equation 9

    def learn(state, batch, drift, key):
        """`update_epochs` passes over the batch, each in a new order."""

        def gradient_step(carry, minibatch):
            params, opt_state = carry
            updates, opt_state = optimizer.update(jax.grad(loss)(params, minibatch, drift), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        def epoch(carry, _):
            *carry, key = carry
            key, order_key = jax.random.split(key)
            order = random_order(order_key, config.inner_envs * config.inner_steps)
            shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
            minibatches = jax.tree.map(lambda leaf: leaf.reshape(config.num_minibatches, -1, *leaf.shape[1:]), shuffled)
            carry, _ = jax.lax.scan(gradient_step, tuple(carry), minibatches)
            return (*carry, key), None

        carry = state.params, state.opt_state, key
        (params, opt_state, _), _ = jax.lax.scan(epoch, carry, None, config.update_epochs)
        return state._replace(params=params, opt_state=opt_state)

    def update(drift, state, _):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        state, rollout = collect(state._replace(key=key), collect_key)
        state, batch = make_batch(state, rollout)
        state = learn(state, batch, drift, learn_key)
        if config.normalize_obs:  # only now: acting, values and the loss have to see the same statistics
            seen = rollout.obs.reshape(-1, *obs_shape)
            state = state._replace(obs_statistics=merge_statistics(state.obs_statistics, seen))
        return state, episode_metrics(rollout.info)

    def train(drift, rng):
        state, metrics = jax.lax.scan(partial(update, drift), init(rng), None, config.inner_updates)
        return Policy(state.params, state.obs_statistics), metrics

    return train


def make_strategy(config: Config):
    """evosax's OpenES over drift networks: Adam, mirrored pairs, centered ranks. It minimizes."""
    from evosax.algorithms import Open_ES

    sigma = jnp.asarray(config.es_sigma, jnp.float32)
    shapes = jax.eval_shape(partial(init_weights, size=config.drift_size), jax.random.key(0))
    example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    adam, constant = optax.adam(config.es_lr), optax.constant_schedule(sigma)
    return Open_ES(config.population_size, example, optimizer=adam, std_schedule=constant)


def best_policy(fitness, returns, policies):
    """Of the fittest network, the policy that reached the most. [P], [P, S] and leaves [P, S, ...] -> leaves [...]."""
    member = jnp.nanargmax(fitness)
    seed = jnp.nanargmax(returns[member])
    return jax.tree.map(lambda leaf: leaf[member, seed], policies)


def make_evaluate(config: Config):
    """`evaluate(population, keys) -> (returns [P, S], metrics, policy)`: a generation's trainings.

    Each network [P, ...] trains an agent from each key [S]. `metrics` are those of all trainings, with leading axes
    [slices, P / slices, S, inner_updates]; the policy is that of `best_policy`.
    """
    train_agent = make_inner(config)

    def train(weights, key):
        return train_agent(partial(network_drift, weights, clip_eps=config.clip_eps), key)

    def evaluate_slice(population, keys):
        if config.num_devices > 1:
            mesh = jax.sharding.Mesh(
                np.asarray(jax.local_devices()[: config.num_devices]),
                ("member",),
                axis_types=(jax.sharding.AxisType.Auto,),
            )
            member = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("member"))
            population = jax.lax.with_sharding_constraint(population, member)
        policies, metrics = jax.vmap(jax.vmap(train, (None, 0)), (0, None))(population, keys)
        returns = jax.vmap(jax.vmap(final_return))(metrics)
        return returns, metrics, best_policy(returns.mean(axis=1), returns, policies)

    def evaluate(population, keys):
        slices = jax.tree.map(lambda leaf: leaf.reshape(config.num_slices, -1, *leaf.shape[1:]), population)
        returns, metrics, policies = jax.lax.map(partial(evaluate_slice, keys=keys), slices)
        best = jnp.nanargmax(jnp.nanmax(returns.mean(axis=2), axis=1))
        policy = jax.tree.map(lambda leaf: leaf[best], policies)
        return returns.reshape(config.population_size, -1), metrics, policy

    return evaluate


def generation_metrics(returns, metrics) -> dict:
    """Scalars of one generation. Returns are [P, S], metrics, with any leading axes, of agents' updates [..., U]."""
    fitness = returns.mean(axis=1)
    last = math.ceil(metrics["episodes"].shape[-1] / 4)
    episodes = metrics["episodes"][..., -last:]
    ended = {"episodes": episodes.sum()}
    for name in ("episodic_return", "episodic_length"):
        sums = jnp.where(episodes > 0, episodes * metrics[name][..., -last:], 0.0)
        ended[name] = sums.sum() / ended["episodes"]  # 0 / 0 is NaN
    best, spread = jnp.nanmax(fitness), jnp.nanstd(fitness)
    return ended | {"fitness_mean": jnp.nanmean(fitness), "fitness_best": best, "fitness_spread": spread}


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars.

    One `update` is a generation.
    """
    check(config)
    env, env_params = make_env(config)
    actor, critic = make_networks(config, env, env_params)
    strategy, evaluate = make_strategy(config), make_evaluate(config)

    def init(rng):
        actor_key, critic_key, weights_key, es_key, obs_key, key = jax.random.split(rng, 6)
        obs, _ = env.reset(obs_key, env_params)
        params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
        weights = init_weights(weights_key, config.drift_size)
        es_state = strategy.init(es_key, weights, strategy.default_params)
        es_state = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), es_state)  # not weak types
        return RunnerState(params, init_statistics(env.observation_space(env_params).shape), es_state, key)

    def update(state, _=None):
        key, ask_key, tell_key, train_key = jax.random.split(state.key, 4)
        population, es_state = strategy.ask(ask_key, state.es_state, strategy.default_params)
        returns, metrics, policy = evaluate(population, jax.random.split(train_key, config.inner_seeds))
        cost = -returns.mean(axis=1)  # NaN, where no episode ended, ranks last
        es_state, _ = strategy.tell(tell_key, population, cost, es_state, strategy.default_params)
        return RunnerState(*policy, es_state, key), generation_metrics(returns, metrics)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole evolution; each metric has shape [num_generations]."""
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
    """`rollout(runner_state, rng) -> Episode`: one greedy episode of the best agent, statistics frozen."""
    env, env_params = make_env(config)
    actor, _ = make_networks(config, env, env_params)

    def rollout(runner_state, rng):
        def step(carry, key):
            obs, env_state, valid = carry
            if config.normalize_obs:
                obs = normalize(runner_state.obs_statistics, obs)
            action = actor.apply(runner_state.params["actor"], obs).mode()
            next_obs, next_env_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
            episode = Episode(env_state.env_state, reward, valid)
            return (next_obs, next_env_state, valid & ~(terminated | truncated)), episode

        reset_key, step_key = jax.random.split(rng)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, int(env_params.max_steps_in_episode))
        _, episode = jax.lax.scan(step, (obs, env_state, jnp.asarray(True)), keys)
        return episode

    return rollout


def mean_weights(config: Config, runner_state: RunnerState) -> dict:
    """The networks that evolution has come to. `runner_state` is [num_seeds, ...], and so are they."""
    strategy = make_strategy(config)
    return jax.vmap(strategy.get_mean)(runner_state.es_state)


def compare_objectives(config: Config, weights) -> dict:
    """`{environment: {"PPO", "DPO", "evolved 0", ...: [test_seeds]}}`, final returns of agents with the same keys."""
    weights = jax.tree.map(lambda leaf: jnp.concatenate([jnp.zeros((2, *leaf.shape[1:])), leaf]), weights)
    num_objectives = len(weights["output"])
    kinds = jnp.minimum(jnp.arange(num_objectives), 2)  # 0 is PPO, 1 is DPO, 2 is a network
    keys = jax.random.split(jax.random.key(2**31), config.test_seeds)
    labels = ["PPO", "DPO", *[f"evolved {i}" for i in range(num_objectives - 2)]]
    found = {}
    for test_config in test_configs(config):
        train = make_inner(test_config)

        def measure(kind, weights, key, train=train):
            def drift(log_ratio, advantage):
                known = ppo_drift(log_ratio, advantage, config.clip_eps), dpo_drift(log_ratio, advantage)
                return jnp.stack([*known, network_drift(weights, log_ratio, advantage, config.clip_eps)])[kind]

            return final_return(train(drift, key)[1])

        returns = jax.jit(jax.vmap(jax.vmap(measure, (None, None, 0)), (0, 0, None)))(kinds, weights, keys)
        found[test_config.env_name] = dict(zip(labels, np.asarray(returns), strict=True))
    return found


def write_comparison(config: Config, found, run_dir: Path) -> None:
    """comparison.csv, a line for each agent, and a printed table: interquartile means with 95 % bootstrap intervals."""
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["environment", "objective", "seed", "return"])
    print(f"{f'final return, {config.test_seeds} agents':28} {'objective':12} {'return':32} less PPO, paired")
    for name, objectives in found.items():
        for objective, returns in objectives.items():
            rows.writerows([name, objective, seed, value] for seed, value in enumerate(returns))
            cells = []
            for values in (returns, returns - objectives["PPO"]):
                values = values[~np.isnan(values)]  # of agents of which an episode ended
                cells.append("{:.4g} ({:.4g} to {:.4g})".format(*interval(values)) if len(values) else "none ended")
            print(f"{name:28} {objective:12} {cells[0]:32} {cells[1] if objective != 'PPO' else ''}".rstrip())
    write(run_dir / "comparison.csv", table.getvalue())


def draw_fitness(metrics, file) -> None:
    """Mean and best of each generation, one line per evolution: arrays [num_seeds, generations]."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, color in (("fitness_mean", "tab:blue"), ("fitness_best", "tab:orange")):
        lines = axes.plot(metrics[name].T, color=color, linewidth=0.6, alpha=0.5)
        lines[0].set_label(f"{name.split('_')[1]} of the population, one line per evolution")
        axes.plot(metrics[name].mean(axis=0), color=color, linewidth=2)
    axes.set(xlabel="generation", ylabel="fitness: final return of the agents that a network trained")
    axes.legend(frameon=False)
    figure.savefig(file, format="png", dpi=150)


def draw_drifts(config: Config, weights, file) -> None:
    """Heat maps over ratio and advantage: PPO, DPO and up to four of the evolved networks."""
    ratio, advantage = np.meshgrid(np.linspace(0.3, 2.0, 171), np.linspace(-2.5, 2.5, 101))
    inputs = jnp.log(jnp.asarray(ratio)), jnp.asarray(advantage)
    panels = {"PPO": ppo_drift(*inputs, config.clip_eps), "DPO": dpo_drift(*inputs)}
    for i in range(min(4, len(weights["output"]))):
        network = jax.tree.map(lambda leaf, i=i: leaf[i], weights)
        panels[f"evolved {i}"] = network_drift(network, *inputs, config.clip_eps)
    figure = Figure(figsize=(2.6 * len(panels) + 1, 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    top = max(float(np.nanmax(panel)) for panel in panels.values())
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        image = axes.pcolormesh(ratio, advantage, np.asarray(panel), vmin=0.0, vmax=top)
        axes.axvline(1.0, color="white", linewidth=0.5)
        axes.set(title=title, xlabel="ratio")
    all_axes[0].set_ylabel("advantage")
    figure.colorbar(image, ax=all_axes, label="drift")
    figure.savefig(file, format="png", dpi=150)


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """The evolved networks in drift.npz, pictures of their fitness and of themselves, and a comparison with PPO, DPO.

    `runner_state` is [num_seeds, ...]; each is an evolution of its own.
    """
    weights = mean_weights(config, runner_state)
    write(run_dir / "drift.npz", partial(np.savez_compressed, clip_eps=config.clip_eps, **jax.device_get(weights)))
    if (run_dir / "metrics.npz").exists():
        with np.load(run_dir / "metrics.npz") as metrics:
            write(run_dir / "fitness.png", partial(draw_fitness, dict(metrics)))
    write(run_dir / "drift.png", partial(draw_drifts, config, weights))
    if config.test_seeds:
        write_comparison(config, compare_objectives(config, weights), run_dir)


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
