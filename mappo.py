# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9",
#     "filelock>=3.20",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2,<0.11",
#     "jaxmarl>=0.2.0",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "pyyaml>=6.0",
#     "safetensors>=0.8",
#     "scipy>=1.15",
#     "six>=1.17",
#     "tfp-nightly==0.26.0.dev20261027",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""PPO for teams of agents, independent (IPPO) or with a centralized critic (MAPPO), the whole training in one jit.

MAPPO: Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games" (arXiv 2103.01955).
IPPO: de Witt et al. 2020 (arXiv 2011.09533). PPO's loss: Schulman et al. 2017 (arXiv 1707.06347), equations 7 and 9.

Differences from ppo.py: all agents of a team act with one network, which sees an agent's own observation and number.
`centralized_critic` chooses what the critic sees: the state of the whole game (MAPPO) or the observation of its agent
(IPPO). Unavailable actions have probability 0, and dead agents add nothing to the policy loss. `--cell gru` adds a
memory. Environments are JaxMARL's (arXiv 2311.10090). Truncated episodes are bootstrapped from their last observation.

    python mappo.py --env-name MPE_simple_spread_v3 --num-seeds 4

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

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

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import tyro
import yaml
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict
from gymnax.environments import environment, spaces
from gymnax.wrappers import LogWrapper
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save_file
from tqdm import tqdm

with mock.patch.multiple(
    sys, stdout=io.StringIO(), __stdout__=io.StringIO(), __stderr__=sys.stderr
):  # it prints
    import jaxmarl
    from jaxmarl.environments import overcooked, smax
    from jaxmarl.environments.multi_agent_env import MultiAgentEnv


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
    """Hyperparameters. The defaults are from JaxMARL's ippo_ff_mpe, plus a centralized critic and agent ids."""

    env_name: str = "MPE_simple_spread_v3"  # JaxMARL environment with discrete actions; MODULE:NAME imports MODULE
    env_params: Mapping[str, bool | int | float | str] = (
        FrozenDict()
    )  # settings of the environment: NAME VALUE ...
    total_timesteps: int = (
        1_000_000  # environment steps per seed; all agents of a team act in each step
    )
    num_envs: int = 16  # environments per seed
    num_steps: int = 128  # steps per environment and update; with a memory, gradients go back through all of them
    update_epochs: int = 4  # passes over the batch of num_envs * num_steps steps
    num_minibatches: int = 4  # gradient steps per pass, each on whole sequences of num_steps steps if there is a memory
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    clip_eps: float = 0.2  # clip range of the probability ratio
    vf_clip_eps: float = 0.2  # clip range of the change in the predicted value; inf for no clipping
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm; 0 for no limit
    centralized_critic: bool = (
        True  # MAPPO: the critic sees the state of the game; if false (IPPO), one observation
    )
    agent_ids: bool = (
        True  # actor and critic also see the number of their agent, as a one-hot vector
    )
    shared_reward: bool = (
        False  # each agent learns from the mean reward of the team instead of its own
    )
    shaping_fraction: float = (
        0.5  # fraction of training over which shaped rewards (Overcooked) decay to 0; 0 for none
    )
    cell: Literal["none", "gru"] = (
        "none"  # memory cell of actor and critic, after the hidden layers
    )
    cell_size: int = 128  # size of the memory of each agent
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "tanh"  # activation function of the hidden layers
    )
    unroll: int = (
        16  # rollout steps that are unrolled on a GPU: fewer kernels, but a longer compilation
    )

    def __post_init__(self):
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


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


# --- block scan: the same in every script, by tests/sync_blocks.py; rename this banner to make it yours ---
def unrolled_scan(step, carry, xs, unroll=8):
    """`jax.lax.scan`, unrolled only on GPUs, which then run fewer kernels. A CPU would only compile for longer."""
    rolled, unrolled = (
        functools.partial(jax.lax.scan, step, unroll=steps) for steps in (1, unroll)
    )
    return jax.lax.platform_dependent(carry, xs, cpu=rolled, default=unrolled)


# --- networks ---


class Gru(nn.Module):
    """A gated recurrent unit (arXiv 1406.1078, section 2.3) over time. The memory is zeros at `first` steps."""

    size: int

    @nn.compact
    def __call__(
        self, hidden, x, first
    ):  # [..., size], [T * ..., features], [T, ...] -> [T, ..., size]
        x = nn.Dense(3 * self.size)(x).reshape(
            len(first), *hidden.shape[:-1], -1
        )  # of all steps and gates at once
        kernels = [
            self.param(name, orthogonal(1.0), (self.size, self.size))
            for name in ("reset", "update", "new")
        ]
        kernel = jnp.concatenate(kernels, axis=1)
        bias = self.param("bias", nn.initializers.zeros, (self.size,), jnp.float32)

        def step(hidden, inputs):
            x, first = inputs
            hidden = jnp.where(first[..., None], 0.0, hidden)
            x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
            reset, update, new = jnp.split(hidden @ kernel, 3, axis=-1)
            reset, update = nn.sigmoid(x_reset + reset), nn.sigmoid(x_update + update)
            hidden = update * hidden + (1.0 - update) * jnp.tanh(x_new + reset * (new + bias))
            return hidden, hidden

        return unrolled_scan(step, hidden, (x, first))[1]


class Network(nn.Module):
    """The actor or the critic, one for all agents: hidden layers, a memory, a linear head."""

    obs_ndim: int  # dimensions of what it sees of one agent
    hidden_sizes: tuple[int, ...]
    activation: str
    cell: str
    cell_size: int
    agent_ids: bool
    num_actions: int  # 0 of the critic

    @nn.compact
    def __call__(self, memory, obs, first):
        """Logits [T, ..., A, num_actions] or values [T, ..., A] of A agents, and the memory after each step.

        `memory` [..., A, cell_size] is from before the steps, `obs` is [T, ..., A, *obs_shape], and `first` [T, ...]
        marks the first observation of each episode.
        """
        activation, shape = getattr(nn, self.activation), obs.shape[: obs.ndim - self.obs_ndim]
        x = obs.astype(jnp.float32).reshape(
            math.prod(shape), -1
        )  # two dimensions: 30 % less time for the gradients
        if self.agent_ids:
            x = jnp.concatenate(
                [x, jnp.tile(jnp.eye(shape[-1]), (len(x) // shape[-1], 1))], axis=-1
            )
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        memory = (
            Gru(self.cell_size)(memory, x, first[..., None])
            if self.cell == "gru"
            else jnp.zeros((*shape, 0))
        )
        x = memory.reshape(len(x), -1) if self.cell == "gru" else x
        if self.num_actions:
            return nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x).reshape(
                *shape, -1
            ), memory
        return nn.Dense(1, kernel_init=orthogonal(1.0))(x).reshape(shape), memory


# --- mathematics: arrays in, arrays out ---


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits. All [T, N, A], ends [T, N, 1].

    `next_values` are the values of the observations after each step, before auto-reset. A truncated step is
    bootstrapped, a terminated step is not; both cut the trace. Returns advantages and value targets [T, N, A].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decays = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def step(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(
        step, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True, unroll=16
    )
    return advantages, advantages + values


def policy_loss(log_prob, old_log_prob, advantage, alive, clip_eps):
    """The clipped objective (arXiv 1707.06347, equation 7), negated; advantages are normalized here. All [B, A].

    Dead agents count neither in the loss nor in the mean and variance of the advantages.
    """
    advantage = (advantage - advantage.mean(where=alive)) / (advantage.std(where=alive) + 1e-8)
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    metrics = {
        "approx_kl": (ratio - 1.0 - log_ratio).mean(
            where=alive
        ),  # k3 of http://joschu.net/blog/kl-approx.html
        "clip_fraction": (jnp.abs(ratio - 1.0) > clip_eps).mean(where=alive),
    }
    return -jnp.minimum(ratio * advantage, clipped * advantage).mean(where=alive), metrics


def value_loss(value, old_value, target, clip_eps):
    """Half the mean of the larger squared error: of `value`, or of `value` clipped around `old_value`. All [B, A]."""
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()


def mask_logits(logits, available):
    """Logits [..., num_actions] of a policy that takes only the `available` actions (arXiv 2103.01955)."""
    return jnp.where(available, logits, -1e10)


def shaping_weight(progress, fraction):
    """Weight of shaped rewards: falls linearly from 1 to 0 over a fraction of the training; 0 if the fraction is 0."""
    return jnp.where(
        fraction > 0, jnp.maximum(0.0, 1.0 - progress / jnp.maximum(fraction, 1e-8)), 0.0
    )


def critic_input(obs, centralized: bool):
    """What the critic sees of each agent, [..., A, *shape]: its own observation, or the state of the whole game.

    The state is zeros for agents that died (death masking, arXiv 2103.01955).
    """
    state, alive = jnp.expand_dims(obs.state, obs.alive.ndim - 1), obs.alive
    alive = alive.reshape(*alive.shape, *[1] * (state.ndim - alive.ndim))
    return jnp.where(alive, state, 0) if centralized else obs.obs


# --- training ---


class Observation(NamedTuple):
    """What the A agents of one environment see."""

    obs: jax.Array  # [A, *obs_shape], of each agent
    available: jax.Array  # [A, num_actions], which actions an agent can take
    alive: jax.Array  # [A]
    state: jax.Array  # [*state_shape], for a centralized critic; empty if there is none


class Transition(NamedTuple):
    """One step, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: Observation
    first: jax.Array  # whether `obs` is the first of its episode
    logits: jax.Array  # [A, num_actions], of the policy that acted
    action: jax.Array  # [A]
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Observation  # after the step, before auto-reset
    info: dict  # rewards of each agent, and statistics of episodes


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    update_count: jax.Array  # updates so far
    obs: Observation  # [num_envs, ...]
    first: jax.Array  # [num_envs], whether `obs` is the first of its episode
    memory: dict  # of "actor" and "critic", [num_envs, A, cell_size]; not yet reset if `obs` is the first
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params}


def make_networks(config: Config, env, env_params):
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    layers = config.hidden_sizes, config.activation, config.cell, config.cell_size, config.agent_ids
    actor = Network(obs.obs.ndim - 1, *layers, num_actions=obs.available.shape[-1])
    return actor, Network(
        obs.state.ndim if config.centralized_critic else obs.obs.ndim - 1, *layers, num_actions=0
    )


def start_memory(config: Config, *shape: int):
    return jnp.zeros((*shape, config.cell_size if config.cell == "gru" else 0))


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
    sequences = (
        config.num_envs if config.cell == "gru" else batch_size
    )  # one step each without a memory
    if sequences % config.num_minibatches or batch_size == config.num_minibatches:
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide {sequences}, into two steps or more"
        )
    env, env_params = make_env(config)
    step_env = jax.vmap(env.step, (0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)
    clip = optax.clip_by_global_norm(
        jnp.where(config.max_grad_norm > 0, config.max_grad_norm, jnp.inf)
    )
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))
    see = functools.partial(critic_input, centralized=config.centralized_critic)

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        obs, env_state = jax.vmap(env.reset, (0, None))(
            jax.random.split(env_key, config.num_envs), env_params
        )
        first, memory = jnp.ones(config.num_envs, bool), start_memory(config, *obs.alive.shape)
        params = {"actor": actor.init(actor_key, memory, obs.obs[None], first[None])}
        params |= {"critic": critic.init(critic_key, memory, see(obs)[None], first[None])}
        memory, updates = {"actor": memory, "critic": memory}, jnp.zeros((), jnp.int32)
        return RunnerState(
            params, optimizer.init(params), updates, obs, first, memory, env_state, key
        )

    def collect(state, key):
        """Act for `num_steps` steps with the current policy."""

        def step(carry, randomness):
            obs, first, memory, env_state = carry
            gumbel, env_keys = randomness
            logits, memory = actor.apply(state.params["actor"], memory, obs.obs[None], first[None])
            logits, memory = mask_logits(logits[0], obs.available), memory[0]
            action = jnp.argmax(logits + gumbel, axis=-1).astype(
                jnp.int32
            )  # a sample of the policy
            after, env_state, _, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            seen = (
                obs,
                first,
                logits,
                action,
                terminated,
                truncated,
                info.pop("final_observation"),
                info,
            )
            return (after, terminated | truncated, memory, env_state), Transition(
                *seen
            )  # they end for all agents

        action_key, env_key = jax.random.split(
            key
        )  # randomness of all steps at once: much faster than in each step
        env_keys = jax.random.split(env_key, (config.num_steps, config.num_envs))
        randomness = (
            jax.random.gumbel(action_key, (config.num_steps, *state.obs.available.shape)),
            env_keys,
        )
        carry = state.obs, state.first, state.memory["actor"], state.env_state
        carry, rollout = unrolled_scan(step, carry, randomness, config.unroll)
        obs, first, memory, env_state = carry
        memory = state.memory | {"actor": memory}
        return state._replace(obs=obs, first=first, memory=memory, env_state=env_state), rollout

    def make_batch(state, rollout, memory):
        """Compute advantages and targets; `memory` is from before the rollout."""
        weight = shaping_weight(state.update_count / config.num_updates, config.shaping_fraction)
        rewards = rollout.info["reward"] + weight * rollout.info["shaped_reward"]  # [T, N, A]
        if config.shared_reward:
            rewards = jnp.broadcast_to(rewards.mean(axis=-1, keepdims=True), rewards.shape)
        terminated, truncated = rollout.terminated[..., None], rollout.truncated[..., None]
        values, memories = critic.apply(
            state.params["critic"], memory["critic"], see(rollout.obs), rollout.first
        )
        not_first = jnp.zeros_like(rollout.first)[
            None
        ]  # `next_obs` continues the episode, from the memory after `obs`
        next_values = critic.apply(
            state.params["critic"], memories, see(rollout.next_obs)[None], not_first
        )[0][0]
        state = state._replace(memory=state.memory | {"critic": memories[-1]})
        advantages, targets = gae(
            rewards, values, next_values, terminated, truncated, config.gamma, config.gae_lambda
        )
        batch = {
            "obs": rollout.obs,
            "first": rollout.first,
            "action": rollout.action,
            "value": values,
        }
        batch |= {"log_prob": distrax.Categorical(rollout.logits).log_prob(rollout.action)}
        batch |= {
            "advantage": advantages,
            "target": targets,
            "memory": jax.tree.map(lambda leaf: leaf[None], memory),
        }
        if config.cell == "gru":
            return state, batch  # a minibatch takes whole environments, along axis 1
        return state, jax.tree.map(lambda leaf: leaf.reshape(1, batch_size, *leaf.shape[2:]), batch)

    def loss(params, batch):
        obs, first, memory = (
            batch["obs"],
            batch["first"],
            jax.tree.map(lambda leaf: leaf[0], batch["memory"]),
        )
        logits, _ = actor.apply(params["actor"], memory["actor"], obs.obs, first)
        value, _ = critic.apply(params["critic"], memory["critic"], see(obs), first)
        policy = distrax.Categorical(mask_logits(logits, obs.available))
        log_prob, old = policy.log_prob(batch["action"]), (batch["log_prob"], batch["advantage"])
        actor_loss, metrics = policy_loss(log_prob, *old, obs.alive, config.clip_eps)
        critic_loss = value_loss(value, batch["value"], batch["target"], config.vf_clip_eps)
        entropy = policy.entropy().mean(where=obs.alive)
        total = (
            actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        )  # arXiv 1707.06347, equation 9
        return total, metrics | {
            "policy_loss": actor_loss,
            "value_loss": critic_loss,
            "entropy": entropy,
        }

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[:, indices], batch)
            grads, metrics = jax.grad(loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (
                jax.tree.map(lambda param, update: param - lr * update, params, updates),
                opt_state,
            ), metrics

        def epoch(carry, key):
            order = jax.random.permutation(
                key, sequences
            )  # pqn.py has a faster way for many minibatches
            return jax.lax.scan(gradient_step, carry, order.reshape(config.num_minibatches, -1))

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
        state = state._replace(
            params=params, opt_state=opt_state, update_count=state.update_count + 1
        )
        return state, jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        memory = state.memory
        state, rollout = collect(state._replace(key=key), collect_key)
        state, batch = make_batch(state, rollout, memory)
        state, metrics = learn(state, batch, learn_key)
        metrics["value"] = batch["value"].mean()
        metrics["explained_variance"] = 1.0 - (batch["target"] - batch["value"]).var() / (
            batch["target"].var() + 1e-8
        )
        return state, metrics | episode_metrics(rollout.info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole training; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), None, config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, greedy, for all agents of a team."""
    env, env_params = make_env(config)
    actor, _ = make_networks(config, env, env_params)

    def start():
        return start_memory(config, *env.action_space(env_params).shape)

    def act(agent, memory, obs):
        logits, memory = actor.apply(
            agent["params"]["actor"], memory, obs.obs[None], jnp.zeros(1, bool)
        )
        return mask_logits(logits[0], obs.available).argmax(axis=-1), memory[0]

    return start, act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw the script's own figures at the end of `main`: none here. `runner_state` is [num_seeds, ...]."""


# --- environments ---


class TeamState(NamedTuple):
    time: jax.Array
    inner: Any  # JaxMARL's state
    out_of_time: jax.Array  # whether the environment's own clock has ended the episode


class Team(environment.Environment):
    """A JaxMARL environment behind gymnax's interface. The arrays of its A agents are stacked.

    `reward` is the mean over the agents. `info` has each agent's own `reward` and `shaped_reward`, and in SMAX whether
    the battle is `won`. JaxMARL's `step` resets and drops the last observation; gymnax's `step` keeps it.
    """

    def __init__(self, env: MultiAgentEnv, centralized: bool):
        self.env, self.centralized = env, centralized
        self.base = getattr(env, "_env", env)  # SMAX without the policy of its enemies
        agent_spaces = [env.action_space(name) for name in env.agents]
        if not all(hasattr(space, "n") for space in agent_spaces):
            raise ValueError("actions must be discrete")
        self.action_counts = np.array([space.n for space in agent_spaces])
        masked = type(env).get_avail_actions is not MultiAgentEnv.get_avail_actions
        self.get_available = getattr(
            env, "get_legal_moves", env.get_avail_actions if masked else None
        )

    def action_space(self, params):
        return spaces.Box(0, max(self.action_counts) - 1, self.action_counts.shape, jnp.int32)

    def stack(self, values):  # vectors are padded with zeros to the length of the longest
        values = [jnp.asarray(values[name]) for name in self.env.agents]
        if values[0].ndim == 1:
            values = [jnp.pad(value, (0, max(map(len, values)) - len(value))) for value in values]
        return jnp.stack(values)

    def see(self, obs, inner, alive):
        everything = jnp.concatenate([obs[name] for name in self.env.agents], axis=-1)
        state = obs.get("world_state", everything) if self.centralized else jnp.zeros(0)
        available = jnp.arange(max(self.action_counts)) < self.action_counts[:, None]
        if self.get_available:
            available &= self.stack(self.get_available(inner)) > 0
        return Observation(self.stack(obs), available, alive, state)

    def reset_env(self, key, params):
        obs, inner = self.env.reset(key)
        alive = jnp.ones(len(self.env.agents), bool)
        return self.see(obs, inner, alive), TeamState(jnp.int32(0), inner, jnp.zeros((), bool))

    def step_env(self, key, state, action, params):
        actions = dict(zip(self.env.agents, action, strict=True))
        obs, inner, rewards, dones, info = self.env.step_env(key, state.inner, actions)
        reward, died, done = (
            self.stack(rewards).astype(jnp.float32),
            self.stack(dones),
            dones["__all__"],
        )
        shaped = (
            self.stack(info["shaped_reward"]) if "shaped_reward" in info else jnp.zeros_like(reward)
        )
        own = {"reward": reward, "shaped_reward": shaped.astype(jnp.float32)}
        if hasattr(self.env, "won_battle_bonus"):
            units, allies = getattr(inner, "state", inner).unit_alive, self.base.num_allies
            own["won"] = units[:allies].any() & ~units[allies:].any()
        time, clock = state.time + 1, getattr(self.env, "max_steps", np.inf)
        out_of_time = done & (time >= clock) & ~self.is_decided(inner)
        alive = (
            ~died | died.all()
        )  # at the end of an episode some environments set the flags of all agents
        return (
            self.see(obs, inner, alive),
            TeamState(time, inner, out_of_time),
            reward.mean(),
            done & ~out_of_time,
            own,
        )

    def is_decided(self, inner):
        """Whether the episode would have ended without its clock. In most environments only the clock ends it."""
        if not hasattr(self.base, "is_terminal"):
            return jnp.zeros((), bool)
        state = getattr(inner, "state", inner)
        return self.base.is_terminal(
            state.replace(step=jnp.zeros_like(state.step), done=jnp.zeros_like(state.done))
        )

    def is_truncated(self, state, params):
        return state.out_of_time | (state.time >= params.max_steps_in_episode)


@jax.ensure_compile_time_eval()  # making some environments needs concrete numbers, also inside a jit
def make_env(config):
    """`(env, env_params)`: gymnax's interface for a team, statistics of episodes in `info`."""
    (module, _, name), params = config.env_name.rpartition(":"), dict(config.env_params)
    limit = params.pop("max_steps_in_episode", 0)
    try:
        if name == "overcooked" and "layout" in params:
            params["layout"] = FrozenDict(overcooked.overcooked_layouts[params["layout"]])
        if "scenario" in params:
            params["scenario"] = smax.map_name_to_scenario(params["scenario"])
        make = (
            getattr(importlib.import_module(module), name)
            if module
            else functools.partial(jaxmarl.make, name)
        )
        env = Team(make(**params), config.centralized_critic)
        env_params = environment.EnvParams(
            int(limit) or 1 + getattr(env.env, "max_steps", 999)
        )  # one after its own
        jax.eval_shape(env.reset, jax.random.key(0), env_params)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        near = (
            " or ".join(difflib.get_close_matches(name, jaxmarl.registered_envs))
            or "MPE_simple_spread_v3"
        )
        given = f"env_name = {config.env_name}, env_params = {dict(config.env_params)}: must be a JaxMARL environment"
        raise ValueError(f"{given} with discrete actions, such as {near} ({error!r})") from error
    return LogWrapper(env), env_params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did. `info`: [num_steps, num_envs]."""
    ended, episodes = info["returned_episode"], info["returned_episode"].sum()
    won = {"win_rate": (ended & info["won"]).sum() / episodes} if "won" in info else {}
    return won | {
        "episodic_return": jnp.where(ended, info["returned_episode_returns"], 0.0).sum() / episodes,
        "episodic_length": jnp.where(ended, info["returned_episode_lengths"], 0).sum() / episodes,
        "episodes": episodes,
    }


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
