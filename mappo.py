# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "distrax>=0.1.9", "jaxmarl>=0.2.0",
#     "tfp-nightly==0.26.0.dev20261027",  # for distrax, which does not ask for it
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "optax>=0.2.8", "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""PPO for teams of agents, independent (IPPO) or with a centralized critic (MAPPO), in one jit.

MAPPO: Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games" (arXiv
2103.01955). IPPO: de Witt et al. 2020 (arXiv 2011.09533). The loss is that of PPO: Schulman et al.
2017 (arXiv 1707.06347), equations 7 and 9.

Differences from ppo.py: all agents of a team act with one network, which sees an agent's own
observation and number. `centralized_critic` chooses what the critic sees: the state of the whole
game (MAPPO) or the observation of its agent (IPPO). Unavailable actions have probability 0, and
dead agents add nothing to the policy loss. `--cell gru` adds a memory. Environments are JaxMARL's
(arXiv 2311.10090). An episode that its time limit truncates is bootstrapped from the value of its
last observation.

    python mappo.py --env-name MPE_simple_spread_v3 --num-seeds 4

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import importlib
import inspect
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
from unittest import mock

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
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from safetensors.flax import save
from tqdm import tqdm

# JaxMARL prints when it is imported, and where brax is installed it resets both streams.
with mock.patch.multiple(
    sys, stdout=io.StringIO(), __stdout__=io.StringIO(), __stderr__=sys.stderr
):
    import jaxmarl
    from jaxmarl.environments import overcooked, smax
    from jaxmarl.environments.mpe.simple import SimpleMPE
    from jaxmarl.environments.multi_agent_env import MultiAgentEnv


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
    """Hyperparameters. The defaults are JaxMARL's for IPPO, and a centralized critic and ids.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "MPE_simple_spread_v3"  # JaxMARL's, or MODULE:NAME; actions must be discrete
    # parameters of the environment: NAME VALUE ...
    env_params: Mapping[str, bool | int | float | str] = FrozenDict()
    total_timesteps: int = 1_000_000  # environment steps per seed; in each step all agents act
    num_envs: int = 16  # environments per seed
    num_steps: int = 128  # steps per environment and update; with cell gru the length of a sequence
    update_epochs: int = 4  # passes over the num_envs * num_steps steps of an update
    num_minibatches: int = 4  # gradient steps per pass; with cell gru it must divide num_envs
    lr: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation (GAE)
    clip_eps: float = 0.2  # clip range of the probability ratio
    vf_clip_eps: float = 0.2  # clip range of the change in the predicted value; inf for no clipping
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm; inf for no limit
    centralized_critic: bool = True  # MAPPO: the critic sees the game's state; if false, IPPO
    agent_ids: bool = True  # actor and critic also see the number of their agent, as one-hot vector
    shared_reward: bool = False  # agents learn from the mean reward of the team, not from their own
    shaping_fraction: float = 0.5  # shaped rewards decay to 0 in this part of training; 0 for none
    cell: Literal["none", "gru"] = "none"  # memory of actor and critic, after the hidden layers
    cell_size: int = 128  # size of the memory of each agent
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "tanh"  # activation function

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float
        object.__setattr__(self, "env_params", FrozenDict(self.env_params))  # hashable

    @property
    def rollout_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.rollout_size


# --- networks ---


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


class Network(nn.Module):
    """Hidden layers, a memory and a linear head: one network for all agents of a team."""

    agent_ids: bool
    hidden_sizes: tuple[int, ...]
    activation: str
    cell: str
    cell_size: int
    outputs: int
    head_scale: float

    @nn.compact
    def __call__(self, memory, x, first):
        """Outputs [T, ..., A, outputs] of A agents, and the memory after each step.

        `memory` [..., A, cell_size] is from before the steps, `x` is [T, ..., A, *shape], and
        `first` [T, ...] marks the steps that are the first of their episode.
        """
        activation = getattr(nn, self.activation)
        shape = x.shape[: first.ndim + 1]
        num_rows = math.prod(shape)
        # In two dimensions: the gradients take 0.7 of the time.
        x = x.astype(jnp.float32).reshape(num_rows, -1)
        if self.agent_ids:
            num_agents = shape[-1]
            ids = jnp.tile(jnp.eye(num_agents), (num_rows // num_agents, 1))
            x = jnp.concatenate([x, ids], axis=-1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        if self.cell == "gru":
            x = x.reshape(*shape, -1)
            memory = Gru(self.cell_size)(memory, x, first[..., None])
            x = memory.reshape(num_rows, -1)
        x = nn.Dense(self.outputs, kernel_init=orthogonal(self.head_scale))(x)
        return x.reshape(*shape, self.outputs), memory


class Actor(nn.Module):
    """The policy of each agent: a distribution over actions [T, ..., A], and the memory."""

    network: Network

    def setup(self):
        nn.share_scope(self, self.network)  # names of parameters do not change

    def __call__(self, memory, obs, first):
        logits, memory = self.network(memory, obs.obs, first)
        return distrax.Categorical(logits=mask_logits(logits, obs.available)), memory


class Critic(nn.Module):
    """The value of a state for each agent: [T, ..., A], and the memory."""

    network: Network
    centralized: bool

    def setup(self):
        nn.share_scope(self, self.network)

    def __call__(self, memory, obs, first):
        values, memory = self.network(memory, critic_input(obs, self.centralized), first)
        return values.squeeze(-1), memory


def start_memory(config: Config, *shape: int):
    """The memory at the start of an episode: [*shape, cell_size], or nothing."""
    if config.cell == "none":
        return ()
    return jnp.zeros((*shape, config.cell_size))


# --- mathematics: arrays in, arrays out ---


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) with time limits.

    All [T, N, A], but `terminated` and `truncated`, of all agents at once, are [T, N, 1].
    `next_values` are the values of the observations after each step, before auto-reset.
    A truncated step is bootstrapped, a terminated step is not; both cut the trace.
    Returns advantages and value targets [T, N, A].
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decays = jnp.where(terminated | truncated, 0.0, gamma * gae_lambda)

    def step(next_advantage, delta_and_decay):
        delta, decay = delta_and_decay
        advantage = delta + decay * next_advantage
        return advantage, advantage

    after_the_last = jnp.zeros_like(deltas[0])
    # `unroll` is for speed: 8 seeds of ppo.py train 1.1 times as fast
    _, advantages = jax.lax.scan(step, after_the_last, (deltas, decays), reverse=True, unroll=16)
    return advantages, advantages + values


def policy_loss(log_prob, old_log_prob, advantage, alive, clip_eps):
    """The clipped objective (arXiv 1707.06347, equation 7), negated. All [..., A].

    Advantages are normalized here, within the minibatch. Dead agents count neither in their mean
    and variance nor in the loss. Also returns metrics.
    """
    advantage = advantage - advantage.mean(where=alive)
    advantage = advantage / (advantage.std(where=alive) + 1e-8)
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage)
    loss = -objective.mean(where=alive)
    approx_kl = ratio - 1.0 - log_ratio  # http://joschu.net/blog/kl-approx.html
    metrics = {
        "policy_loss": loss,
        "approx_kl": approx_kl.mean(where=alive),
        "clip_fraction": (jnp.abs(ratio - 1.0) > clip_eps).mean(where=alive),
    }
    return loss, metrics


def value_loss(value, old_value, target, clip_eps):
    """Half the larger squared error: of `value`, or of `value` clipped around `old_value`."""
    clipped_value = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    error = jnp.maximum(jnp.square(value - target), jnp.square(clipped_value - target))
    return 0.5 * error.mean()


def mask_logits(logits, available):
    """Logits [..., num_actions] of a policy that takes `available` actions (arXiv 2103.01955)."""
    return jnp.where(available, logits, -1e10)


def critic_input(obs, centralized: bool):
    """What the critic sees of each agent, [..., A, *shape].

    Its own observation, or the state of the whole game, the same for all agents. The state is zeros
    for agents that died (death masking, arXiv 2103.01955).
    """
    if not centralized:
        return obs.obs
    axis = obs.alive.ndim - 1
    state = jnp.expand_dims(obs.state, axis)
    alive = jnp.expand_dims(obs.alive, range(axis + 1, state.ndim))
    return jnp.where(alive, state, 0)


def shaping_weight(progress, fraction):
    """Weight of shaped rewards: from 1 to 0 over a fraction of the training, 0 without one."""
    remaining = 1.0 - progress / jnp.maximum(fraction, 1e-8)
    return jnp.where(fraction > 0.0, jnp.maximum(remaining, 0.0), 0.0)


# --- training ---


class Observation(NamedTuple):
    """What the A agents of one environment see."""

    obs: jax.Array  # [A, *obs_shape], of each agent
    available: jax.Array  # [A, num_actions], which actions an agent can take
    alive: jax.Array  # [A]
    state: jax.Array  # [*state_shape], for a centralized critic; empty if there is none


class Transition(NamedTuple):
    """One step in all environments, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: Observation
    first: jax.Array  # whether `obs` is the first one of its episode
    memory: jax.Array  # of the critic after `obs`, [A, cell_size]
    action: jax.Array  # [A]
    log_prob: jax.Array  # [A]
    value: jax.Array  # [A]
    reward: jax.Array  # [A]
    shaped_reward: jax.Array  # [A]
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Observation  # after the step, before auto-reset
    info: dict  # statistics of episodes


class Batch(NamedTuple):
    """A rollout with its advantages, [T, num_sequences, ...]; or a minibatch of sequences."""

    steps: Transition
    advantage: jax.Array
    target: jax.Array  # of the value


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # of "actor" and "critic"
    opt_state: Any
    update_count: jax.Array  # updates so far
    obs: Observation  # [num_envs, ...]
    first: jax.Array  # [num_envs], whether `obs` is the first one of its episode
    memory: dict  # of "actor" and "critic", [num_envs, A, cell_size]; not yet reset where `first`
    env_state: Any  # [num_envs, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params}


def make_networks(config: Config, env, env_params):
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    layers = {
        "agent_ids": config.agent_ids,
        "hidden_sizes": config.hidden_sizes,
        "activation": config.activation,
        "cell": config.cell,
        "cell_size": config.cell_size,
    }
    num_actions = obs.available.shape[-1]
    actor = Actor(Network(**layers, outputs=num_actions, head_scale=0.01))
    critic = Critic(Network(**layers, outputs=1, head_scale=1.0), config.centralized_critic)
    return actor, critic


def add_time(tree):
    """One step as a sequence: [...] -> [1, ...]."""
    return jax.tree.map(lambda x: x[None], tree)


def last(tree):
    """The last step of a sequence: [T, ...] -> [...]."""
    return jax.tree.map(lambda x: x[-1], tree)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update adds {config.rollout_size}"
        )
    for name in ("update_epochs", "num_minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    # A minibatch holds whole sequences: rollouts with a memory, single steps without one.
    num_sequences = config.num_envs if config.cell == "gru" else config.rollout_size
    minibatch_size, remainder = divmod(num_sequences, config.num_minibatches)
    if remainder or config.num_minibatches == config.rollout_size:  # one step per minibatch
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide the {num_sequences} "
            "environments (with a memory) or steps of an update, into two or more steps each"
        )
    env, env_params = make_env(config)
    reset_env = jax.vmap(env.reset, in_axes=(0, None))
    step_env = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    actor, critic = make_networks(config, env, env_params)

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // (config.update_epochs * config.num_minibatches))

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(learning_rate if config.anneal_lr else config.lr, eps=1e-5),  # OpenAI's eps
    )

    def init(rng):
        actor_key, critic_key, env_key, key = jax.random.split(rng, 4)
        obs, env_state = reset_env(jax.random.split(env_key, config.num_envs), env_params)
        first = jnp.ones(config.num_envs, bool)
        memory = start_memory(config, *obs.alive.shape)
        params = {
            "actor": actor.init(actor_key, memory, add_time(obs), add_time(first)),
            "critic": critic.init(critic_key, memory, add_time(obs), add_time(first)),
        }
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            update_count=jnp.int32(0),
            obs=obs,
            first=first,
            memory={"actor": memory, "critic": memory},
            env_state=env_state,
            key=key,
        )

    def collect(state, key):
        """Act for `num_steps` steps with the current policy."""

        def step(carry, key):
            obs, first, memory, env_state = carry
            action_key, env_key = jax.random.split(key)
            policy, actor_memories = actor.apply(
                state.params["actor"], memory["actor"], add_time(obs), add_time(first)
            )
            value, critic_memories = critic.apply(
                state.params["critic"], memory["critic"], add_time(obs), add_time(first)
            )
            memory = last({"actor": actor_memories, "critic": critic_memories})
            action, log_prob = last(policy.sample_and_log_prob(seed=action_key))

            env_keys = jax.random.split(env_key, config.num_envs)
            obs_after_reset, env_state, _, terminated, truncated, info = step_env(
                env_keys, env_state, action, env_params
            )
            transition = Transition(
                obs=obs,
                first=first,
                memory=memory["critic"],
                action=action,
                log_prob=log_prob,
                value=last(value),
                reward=info.pop("reward"),
                shaped_reward=info.pop("shaped_reward"),
                terminated=terminated,
                truncated=truncated,
                next_obs=info.pop("final_observation"),  # before auto-reset
                info=info,
            )
            return (obs_after_reset, terminated | truncated, memory, env_state), transition

        carry = (state.obs, state.first, state.memory, state.env_state)
        keys = jax.random.split(key, config.num_steps)
        (obs, first, memory, env_state), rollout = jax.lax.scan(step, carry, keys)
        return state._replace(obs=obs, first=first, memory=memory, env_state=env_state), rollout

    def reward_to_learn_from(update_count, rollout):
        """With shaping, and shared by the team if `shared_reward`."""
        weight = shaping_weight(update_count / config.num_updates, config.shaping_fraction)
        reward = rollout.reward + weight * rollout.shaped_reward
        if config.shared_reward:
            mean = reward.mean(axis=-1, keepdims=True)
            reward = jnp.broadcast_to(mean, reward.shape)
        return reward

    def make_batch(state, rollout):
        """Advantages and value targets of the rollout."""
        # `next_obs` follows `obs` in the same episode: one step from the memory after `obs`.
        not_first = jnp.zeros_like(rollout.first)
        next_value, _ = critic.apply(
            state.params["critic"], rollout.memory, add_time(rollout.next_obs), add_time(not_first)
        )
        advantage, target = gae(
            reward_to_learn_from(state.update_count, rollout),
            rollout.value,
            last(next_value),
            terminated=rollout.terminated[..., None],
            truncated=rollout.truncated[..., None],
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        batch = Batch(steps=rollout, advantage=advantage, target=target)
        if config.cell == "none":
            batch = jax.tree.map(lambda x: x.reshape(1, config.rollout_size, *x.shape[2:]), batch)
        return batch

    def loss_fn(params, minibatch, memory):
        """The actor-critic loss (arXiv 1707.06347, equation 9, negated).

        `memory` is from before the sequences of the minibatch.
        """
        steps = minibatch.steps
        policy, _ = actor.apply(params["actor"], memory["actor"], steps.obs, steps.first)
        value, _ = critic.apply(params["critic"], memory["critic"], steps.obs, steps.first)
        log_prob = policy.log_prob(steps.action)
        alive = steps.obs.alive
        actor_loss, metrics = policy_loss(
            log_prob, steps.log_prob, minibatch.advantage, alive, clip_eps=config.clip_eps
        )
        critic_loss = value_loss(value, steps.value, minibatch.target, config.vf_clip_eps)
        entropy = policy.entropy().mean(where=alive)
        loss = actor_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        return loss, metrics | {"value_loss": critic_loss, "entropy": entropy}

    def learn(state, batch, memory, key):
        """`update_epochs` passes over the batch in minibatches, each pass in a new order.

        `memory` is from before the rollout.
        """

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda x: x[:, indices], batch)
            start = jax.tree.map(lambda x: x[indices], memory)
            grads, metrics = jax.grad(loss_fn, has_aux=True)(params, minibatch, start)
            updates, opt_state = optimizer.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), metrics

        def epoch(carry, key):
            # a random order; `jax.random.permutation` takes longer
            order = jax.random.bits(key, (num_sequences,)).argsort()
            order = order.reshape(config.num_minibatches, minibatch_size)
            return jax.lax.scan(gradient_step, carry, order)

        carry = (state.params, state.opt_state)
        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, carry, keys)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def update(state, _=None):
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        memory = state.memory
        state, rollout = collect(state._replace(key=key), collect_key)
        batch = make_batch(state, rollout)
        state, metrics = learn(state, batch, memory, learn_key)
        state = state._replace(update_count=state.update_count + 1)
        error = batch.target - batch.steps.value
        metrics["value"] = batch.steps.value.mean()
        metrics["explained_variance"] = 1.0 - error.var() / (batch.target.var() + 1e-8)
        return state, metrics | episode_metrics(rollout.info)

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, the greedy policy.

    `obs` and `action` are those of all agents of a team.
    """
    env, env_params = make_env(config)
    actor, _ = make_networks(config, env, env_params)

    def start():
        return start_memory(config, *env.action_space(env_params).shape)

    def act(agent, memory, obs):
        not_first = jnp.zeros(1, bool)  # `start` has given an empty memory
        policy, memories = actor.apply(agent["params"]["actor"], memory, add_time(obs), not_first)
        return last(policy.mode()), last(memories)

    return start, act


# --- environments ---


class TeamState(NamedTuple):
    time: jax.Array
    inner: Any  # JaxMARL's state
    out_of_time: jax.Array  # whether the environment's own clock has ended the episode


class Team(environment.Environment):
    """A JaxMARL environment behind gymnax's interface. The arrays of its A agents are stacked.

    `reward` is the mean over the agents. `info` has the `reward` and `shaped_reward` of each agent,
    and in SMAX whether the battle is `won`. JaxMARL's `step` drops the last observation of an
    episode; gymnax's, which calls `step_env` of this class, keeps it.
    """

    def __init__(self, env: MultiAgentEnv, centralized: bool):
        self.env = env
        self.base = getattr(env, "_env", env)  # SMAX without the policy of its enemies
        self.centralized = centralized
        agent_spaces = [env.action_space(agent) for agent in env.agents]
        if not all(hasattr(space, "n") for space in agent_spaces):
            raise ValueError("actions must be discrete")
        self.action_counts = np.array([space.n for space in agent_spaces])

    def action_space(self, params):
        return spaces.Box(0, max(self.action_counts) - 1, self.action_counts.shape, jnp.int32)

    def stack(self, values: dict):
        """{agent: array} -> [A, ...]. Vectors are padded with zeros to the longest one."""
        arrays = [jnp.asarray(values[agent]) for agent in self.env.agents]
        if arrays[0].ndim == 1:
            longest = max(len(x) for x in arrays)
            arrays = [jnp.pad(x, (0, longest - len(x))) for x in arrays]
        return jnp.stack(arrays)

    def available_actions(self, inner):
        """[A, num_actions]"""
        available = jnp.arange(max(self.action_counts)) < self.action_counts[:, None]
        if hasattr(self.env, "get_legal_moves"):  # Hanabi
            available &= self.stack(self.env.get_legal_moves(inner)) > 0
        elif type(self.env).get_avail_actions is not MultiAgentEnv.get_avail_actions:
            available &= self.stack(self.env.get_avail_actions(inner)) > 0
        return available

    def observe(self, obs: dict, inner, alive):
        if not self.centralized:
            state = jnp.zeros(0)
        elif "world_state" in obs:
            state = obs["world_state"]
        else:
            state = jnp.concatenate([obs[agent] for agent in self.env.agents], axis=-1)
        return Observation(
            obs=self.stack(obs), available=self.available_actions(inner), alive=alive, state=state
        )

    def reset_env(self, key, params):
        obs, inner = self.env.reset(key)
        alive = jnp.ones(len(self.env.agents), bool)
        state = TeamState(time=jnp.int32(0), inner=inner, out_of_time=jnp.zeros((), bool))
        return self.observe(obs, inner, alive), state

    def step_env(self, key, state, action, params):
        actions = dict(zip(self.env.agents, action, strict=True))
        with jax.default_matmul_precision("highest"):  # GPUs would round products in the physics
            obs, inner, rewards, dones, info = self.env.step_env(key, state.inner, actions)

        reward = self.stack(rewards).astype(jnp.float32)
        shaped_reward = jnp.zeros_like(reward)
        if "shaped_reward" in info:
            shaped_reward = self.stack(info["shaped_reward"]).astype(jnp.float32)
        team_info = {"reward": reward, "shaped_reward": shaped_reward}
        if hasattr(self.env, "won_battle_bonus"):
            team_info["won"] = self.is_won(inner)

        step_count = state.time + 1
        done = dones["__all__"]
        clock = getattr(self.env, "max_steps", math.inf)
        out_of_time = done & (step_count >= clock) & ~self.is_decided(inner)
        died = self.stack(dones)
        alive = ~died | died.all()  # at the end some environments set the flags of all agents
        obs = self.observe(obs, inner, alive)
        state = TeamState(time=step_count, inner=inner, out_of_time=out_of_time)
        return obs, state, reward.mean(), done & ~out_of_time, team_info

    def is_won(self, inner):
        """Whether the allies of SMAX have beaten their enemies."""
        units = getattr(inner, "state", inner).unit_alive
        allies = units[: self.base.num_allies]
        enemies = units[self.base.num_allies :]
        return allies.any() & ~enemies.any()

    def is_decided(self, inner):
        """Whether the episode would have ended without its clock, which ends most episodes."""
        if not hasattr(self.base, "is_terminal"):
            return jnp.zeros((), bool)
        state = getattr(inner, "state", inner)
        at_the_start = {
            "step": jnp.zeros_like(state.step),
            "done": jnp.zeros_like(state.done),
        }
        return self.base.is_terminal(state.replace(**at_the_start))

    def is_truncated(self, state, params):
        return state.out_of_time | (state.time >= params.max_steps_in_episode)


def check_mpe_params(env, params: dict) -> None:
    """MPE's constructors ignore keyword arguments that they do not know. Raises TypeError."""
    known = {"contact_force", "contact_margin", "damping"}  # SimpleMPE looks them up in its kwargs
    for base in type(env).__mro__:
        known |= set(inspect.signature(base.__init__).parameters)
    for name in params:
        if name not in known:
            raise TypeError(f"{name} is no parameter of {type(env).__name__}")


TRUTH_VALUES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def make_jaxmarl_env(env_name: str, params: dict) -> MultiAgentEnv:
    """A registered environment, or with MODULE:NAME the class NAME of a module.

    Words such as `off`, which are strings on the command line, are truth values.
    """
    params = {key: TRUTH_VALUES.get(str(value).lower(), value) for key, value in params.items()}
    if env_name == "overcooked" and "layout" in params:
        params["layout"] = FrozenDict(overcooked.overcooked_layouts[params["layout"]])
    if "scenario" in params:
        params["scenario"] = smax.map_name_to_scenario(params["scenario"])
    module, _, name = env_name.rpartition(":")
    if module:
        env = getattr(importlib.import_module(module), name)(**params)
    else:
        env = jaxmarl.make(name, **params)
        if isinstance(env, SimpleMPE):
            check_mpe_params(env, params)
    defaults = inspect.signature(type(env)).parameters
    for key, value in params.items():
        is_flag = key in defaults and isinstance(defaults[key].default, bool)
        if is_flag and not isinstance(value, bool):
            raise ValueError(f"{key} = {value}: must be true or false")
    return env


@jax.ensure_compile_time_eval()  # making some environments needs concrete numbers, also in a jit
def make_env(config):
    """`(env, env_params)`: gymnax's interface for a team, statistics of episodes in `info`."""
    params = dict(config.env_params)
    limit = params.pop("max_steps_in_episode", None)
    try:
        env = Team(make_jaxmarl_env(config.env_name, params), config.centralized_critic)
        if limit is None:
            limit = getattr(env.env, "max_steps", 999) + 1  # after the environment's own clock
        if int(limit) < 1 or int(limit) != float(limit):
            raise ValueError(f"max_steps_in_episode = {limit}: must be a whole number above 0")
        env_params = environment.EnvParams(max_steps_in_episode=int(limit))
        jax.eval_shape(env.reset, jax.random.key(0), env_params)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise ValueError(
            f"env_name = {config.env_name}, env_params = {dict(config.env_params)}: must be an "
            f"environment of JaxMARL with discrete actions and its parameters ({error!r})"
        ) from error
    return LogWrapper(env), env_params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did."""
    ended = info["returned_episode"]  # [num_steps, num_envs]
    episodes = ended.sum()
    returns = jnp.where(ended, info["returned_episode_returns"], 0.0).sum()
    lengths = jnp.where(ended, info["returned_episode_lengths"], 0).sum()
    metrics = {
        "episodic_return": returns / episodes,
        "episodic_length": lengths / episodes,
        "episodes": episodes,
    }
    if "won" in info:
        metrics["win_rate"] = (ended & info["won"]).sum() / episodes
    return metrics


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
