# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "mctx>=0.0.71", "pgx>=2.6.0",
#     "flax>=0.12.8", "gymnax>=1.0.1", "jax>=0.10.2,<0.12", "matplotlib>=3.10", "numpy>=2.0",
#     "optax>=0.2.8", "pyyaml>=6.0", "safetensors>=0.8", "tqdm>=4.67", "tyro>=1.0.17",
#     "six>=1.17",  # for gymnax, which does not ask for it
# ]
# [tool.uv]
# exclude-newer = "2026-11-22T00:00:00Z"
# ///
"""Gumbel AlphaZero for board games of two players, the whole training in one jit.

Silver et al. 2017, "Mastering Chess and Shogi by Self-Play with a General Reinforcement Learning
Algorithm" (arXiv 1712.01815): one network predicts a policy and a value, a tree search that uses
the network plays against itself, and the network learns the result of the search and the outcome of
the game (equation 1). The search is Danihelka et al. 2022, "Policy improvement by planning with
Gumbel" (openreview.net/forum?id=bERaNdoegnO), by DeepMind's mctx: Gumbel noise and sequential
halving choose the actions at the root, and equation 11 gives the target of the policy.

Differences from the papers: moves are sampled in proportion to visit counts, because self-play with
the action that the search returns can collapse to one game; there is no replay; a game that the end
of a rollout cuts off is bootstrapped with the value of a search; the residual network has layer
instead of batch normalization.

    python alphazero.py --env-name tic_tac_toe --num-seeds 2

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 4))
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import math
import os
import platform
import re
import signal
import sys
import time
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
import jax
import jax.numpy as jnp
import matplotlib
import mctx
import numpy as np
import optax
import pgx
import tyro
import yaml
from gymnax.environments import environment, spaces
from gymnax.wrappers import LogWrapper
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
    """Hyperparameters. The defaults are tuned for tic_tac_toe on two CPU cores.

    Float fields may be traced: branch on them with `jnp.where`, not with `if`.
    """

    env_name: str = "tic_tac_toe"  # Pgx game of two players; MODULE:NAME is your own game
    total_timesteps: int = 400_000  # moves of self-play per agent
    num_envs: int = 128  # games that are played at the same time
    num_steps: int = 16  # moves per game and update
    simulations: int = 32  # simulations of each search in self-play
    max_considered_actions: int = 16  # actions that a search considers at its root
    sampled_moves: int = 30  # first moves of a game that are sampled by visit counts
    update_epochs: int = 2  # passes over the num_envs * num_steps moves of an update
    num_minibatches: int = 8  # gradient steps per pass
    lr: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount factor per move; 1 counts a late win as much as an early one
    vf_coef: float = 1.0  # weight of the value loss
    weight_decay: float = 1e-4  # weight decay per gradient step, multiplied by the learning rate
    network: Literal["mlp", "residual"] = "mlp"  # residual: with blocks before the hidden layers
    hidden_sizes: tuple[int, ...] = (128, 128)  # sizes of the hidden layers
    channels: int = 64  # channels of the residual network
    num_blocks: int = 4  # blocks of the residual network, each with two convolutions
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = "relu"  # activation function
    opponent_simulations: int = 32  # simulations of the opponent's plain MCTS; 0: random moves
    eval_simulations: int = 0  # simulations of the greedy policy; 0 plays by the network alone
    eval_games: int = 16  # games at the same time against each opponent during training
    eval_steps: int = 2  # moves of the agent per update in each evaluation game

    def __post_init__(self):
        object.__setattr__(self, "total_timesteps", int(self.total_timesteps))  # 2e4 is a float

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


def neighborhoods(x):
    """The 3 x 3 squares around each point, zeros outside: [..., H, W, C] -> [..., H, W, 9 * C].

    A dense layer on neighborhoods is a convolution that `orthogonal` can initialize.
    """
    height, width = x.shape[-3:-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    shifted = [x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1)


class Network(nn.Module):
    """Boards [..., H, W, planes], as the player to move sees them -> the player's policy and value.

    Logits [..., num_actions] and values [...] in [-1, 1].
    """

    network: str
    hidden_sizes: tuple[int, ...]
    channels: int
    num_blocks: int
    activation: str
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        activation = getattr(nn, self.activation)
        scale = orthogonal(math.sqrt(2))
        x = obs.astype(jnp.float32)
        if self.network == "residual":
            x = nn.Dense(self.channels, kernel_init=scale)(neighborhoods(x))
            for _ in range(self.num_blocks):
                y = x  # normalize, activate, convolve, add: He et al. 2016 (arXiv 1603.05027)
                for _ in range(2):
                    y = activation(nn.LayerNorm()(y))
                    y = nn.Dense(self.channels, kernel_init=scale)(neighborhoods(y))
                x = x + y
            x = activation(nn.LayerNorm()(x))
            x = activation(nn.Dense(8, kernel_init=scale)(x))
        x = x.reshape(*obs.shape[:-3], -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=scale)(x))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        value = nn.Dense(1, kernel_init=orthogonal(0.01))(x)
        return logits, jnp.tanh(value).squeeze(-1)


def make_network(config: Config, game) -> Network:
    return Network(
        network=config.network,
        hidden_sizes=config.hidden_sizes,
        channels=config.channels,
        num_blocks=config.num_blocks,
        activation=config.activation,
        num_actions=game.num_actions,
    )


# --- mathematics: arrays in, arrays out ---


def mask_logits(logits, legal):
    """Illegal actions get a probability of 0. [..., num_actions]."""
    return jnp.where(legal, logits, jnp.finfo(logits.dtype).min)


def value_targets(rewards, discounts, last_value):
    """The outcome of the game for the player to move, z_t = r_t + d_t z_{t+1}.

    rewards [T, N] are of the player who moved. discounts [T, N] are 0 if the move ended the game,
    -gamma if the opponent moves next, gamma if the same player does. last_value [N] is the value of
    the position after the last move for the player to move: it bootstraps the games that the end of
    the rollout cuts off, instead of calling them draws. Returns z [T, N].
    """

    def step(next_target, reward_and_discount):
        reward, discount = reward_and_discount
        target = reward + discount * next_target
        return target, target

    _, targets = jax.lax.scan(step, last_value, (rewards, discounts), reverse=True)
    return targets


def policy_loss(logits, legal, action_weights):
    """Cross entropy of the network's policy and the search's (Gumbel paper, equation 12). -> [B]"""
    log_policy = jax.nn.log_softmax(mask_logits(logits, legal))
    return -(action_weights * log_policy).sum(axis=-1)


def sample_by_visits(key, visit_counts):
    """An action in proportion to the visits of the root's children (arXiv 1712.01815, page 3).

    [N, num_actions] -> [N].
    """
    return jax.random.categorical(key, jnp.log(visit_counts)).astype(jnp.int32)


# --- games and searches ---


def where_state(condition, state, other):
    """One of two states of a game."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), state, other)


def add_batch_axis(state):
    return jax.tree.map(lambda x: x[None], state)


def random_move(key, state):
    logits = jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def playout(game, key, state):
    """The outcome for the player to move if both players move at random; 0 after the end."""

    def is_running(carry):
        _, state, _ = carry
        return ~state.terminated

    def move(carry):
        key, later_state, outcome = carry
        key, move_key = jax.random.split(key)
        later_state = game.step(later_state, random_move(move_key, later_state))
        return key, later_state, outcome + later_state.rewards[state.current_player]

    _, _, outcome = jax.lax.while_loop(is_running, move, (key, state, jnp.float32(0.0)))
    return outcome


def play_move(game, state, action, gamma):
    """`(next state, reward of the player who moved, discount)` of a game; see `value_targets`."""
    next_state = game.step(state, action)
    reward = next_state.rewards[state.current_player]
    sign = jnp.where(next_state.current_player == state.current_player, 1.0, -1.0)
    discount = jnp.where(next_state.terminated, 0.0, sign * gamma)
    return next_state, reward, discount


def make_tree_functions(game, evaluate, gamma):
    """What mctx asks for: `root(params, key, states)` and `expand(params, key, actions, states)`.

    `evaluate(params, key, states) -> logits [N, num_actions], values [N]` is for the player to
    move. `states` are [N, ...].
    """

    def evaluate_legal(params, key, states):
        logits, values = evaluate(params, key, states)
        logits = mask_logits(logits, states.legal_action_mask)
        return logits, jnp.where(states.terminated, 0.0, values)

    def root(params, key, states):
        logits, values = evaluate_legal(params, key, states)
        return mctx.RootFnOutput(prior_logits=logits, value=values, embedding=states)

    def move(state, action):
        return play_move(game, state, action, gamma)

    def expand(params, key, actions, states):
        """A game that has ended stays ended: its discount and value are 0."""
        states, rewards, discounts = jax.vmap(move)(states, actions)
        logits, values = evaluate_legal(params, key, states)
        output = mctx.RecurrentFnOutput(
            reward=rewards, discount=discounts, prior_logits=logits, value=values
        )
        return output, states

    return root, expand


def make_gumbel_search(game, evaluate, gamma, simulations: int, max_considered_actions: int):
    """`search(params, key, states) -> mctx's output`, by the policy and the value of `evaluate`.

    `action_weights` are softmax(logits + sigma(completed Q)), equation 11 of the Gumbel paper.
    """
    root, expand = make_tree_functions(game, evaluate, gamma)

    def search(params, key, states, gumbel_scale=1.0):
        root_key, key = jax.random.split(key)
        return mctx.gumbel_muzero_policy(
            params,
            key,
            root(params, root_key, states),
            expand,
            num_simulations=simulations,
            invalid_actions=~states.legal_action_mask,
            max_num_considered_actions=max_considered_actions,
            gumbel_scale=gumbel_scale,
        )

    return search


def make_network_search(config: Config, game, simulations: int):
    """A Gumbel search by the network, whose parameters it takes."""
    network = make_network(config, game)

    def evaluate(params, key, states):
        return network.apply(params, states.observation)

    return make_gumbel_search(
        game, evaluate, config.gamma, simulations, config.max_considered_actions
    )


def make_mcts(game, simulations: int):
    """`choose(key, state) -> move` of plain MCTS.

    All moves have equal priors, and the value of a leaf is the outcome of one game at random.
    """

    def evaluate(params, key, states):
        num_states, num_actions = states.legal_action_mask.shape
        keys = jax.random.split(key, num_states)
        values = jax.vmap(functools.partial(playout, game))(keys, states)
        return jnp.zeros((num_states, num_actions)), values

    root, expand = make_tree_functions(game, evaluate, gamma=1.0)

    def choose(key, state):
        root_key, key = jax.random.split(key)
        states = add_batch_axis(state)
        output = mctx.muzero_policy(
            (),  # no parameters
            key,
            root((), root_key, states),
            expand,
            num_simulations=simulations,
            invalid_actions=~states.legal_action_mask,
            dirichlet_fraction=0.0,
            temperature=0.0,
        )
        return output.action[0].astype(jnp.int32)

    return choose


# --- training ---


class Transition(NamedTuple):
    """One move in all games, [num_envs, ...]. A rollout is [num_steps, num_envs, ...]."""

    obs: jax.Array  # the board as the player to move sees it
    legal: jax.Array  # [num_actions], whether an action is legal
    action_weights: jax.Array  # [num_actions], the search's improved policy
    search_value: jax.Array  # the search's value for the player to move
    reward: jax.Array  # of the player who moved
    discount: jax.Array  # 0 if the move ended the game; negative if the opponent moves next
    terminated: jax.Array


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: Any
    opt_state: Any
    game_state: Any  # of the games of self-play, [num_envs, ...]
    matches: dict  # `(obs, env_state)` of the games against each opponent, [eval_games, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `act` takes the agent of one seed, `main` saves the agents of all."""
        return {"params": self.params}


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`."""
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update adds {config.rollout_size}"
        )
    for name in ("update_epochs", "num_minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    for name in ("simulations", "max_considered_actions"):
        if getattr(config, name) < 2:
            raise ValueError(
                f"{name} = {getattr(config, name)}: must be at least 2, for moves to be compared"
            )
    minibatch_size, remainder = divmod(config.rollout_size, config.num_minibatches)
    if remainder:
        raise ValueError(
            f"num_minibatches = {config.num_minibatches}: must divide the {config.rollout_size} "
            "moves of an update"
        )
    game = make_game(config.env_name)
    network = make_network(config, game)
    search = make_network_search(config, game, config.simulations)
    act = make_policy(config)
    opponents = {"random": make_env(dataclasses.replace(config, opponent_simulations=0))}
    if config.opponent_simulations:
        opponents["mcts"] = make_env(config)

    schedule = optax.linear_schedule(config.lr, 0.0, config.num_updates)

    def learning_rate(gradient_step_count):  # constant within an update
        return schedule(gradient_step_count // (config.update_epochs * config.num_minibatches))

    optimizer = optax.adamw(
        learning_rate if config.anneal_lr else config.lr, weight_decay=config.weight_decay
    )

    def start_games(key):
        return jax.vmap(game.init)(jax.random.split(key, config.num_envs))

    def init(rng):
        network_key, game_key, match_key, key = jax.random.split(rng, 4)
        game_state = start_games(game_key)
        params = network.init(network_key, game_state.observation)
        matches = {}
        for i, (name, (env, env_params)) in enumerate(opponents.items()):
            keys = jax.random.split(jax.random.fold_in(match_key, i), config.eval_games)
            matches[name] = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
        return RunnerState(
            params=params,
            opt_state=optimizer.init(params),
            game_state=game_state,
            matches=matches,
            key=key,
        )

    def move(state, action):
        return play_move(game, state, action, config.gamma)

    def collect(state, key):
        """Play `num_steps` moves of each game. Also returns values of the positions after them."""

        def step(game_state, key):
            search_key, action_key, game_key = jax.random.split(key, 3)
            output = search(state.params, search_key, game_state)
            root = output.search_tree.summary()
            sampled_action = sample_by_visits(action_key, root.visit_counts)
            is_early = game_state._step_count < config.sampled_moves
            action = jnp.where(is_early, sampled_action, output.action)

            next_state, reward, discount = jax.vmap(move)(game_state, action)
            transition = Transition(
                obs=game_state.observation,
                legal=game_state.legal_action_mask,
                action_weights=output.action_weights,
                search_value=root.value,
                reward=reward,
                discount=discount,
                terminated=next_state.terminated,
            )
            # A new game keeps nothing of the old one: with the old flag `terminated`, as in Pgx's
            # auto_reset, a search would find no value.
            new_games = start_games(game_key)
            next_state = jax.vmap(where_state)(next_state.terminated, new_games, next_state)
            return next_state, transition

        keys = jax.random.split(key, config.num_steps + 1)
        game_state, rollout = jax.lax.scan(step, state.game_state, keys[:-1])
        output = search(state.params, keys[-1], game_state)
        last_value = output.search_tree.summary().value
        return state._replace(game_state=game_state), rollout, last_value

    def make_batch(rollout, last_value):
        """The rollout and its value targets, [num_steps * num_envs, ...]."""
        target = value_targets(rollout.reward, rollout.discount, last_value)
        batch = (rollout, target)
        return jax.tree.map(lambda x: x.reshape(config.rollout_size, *x.shape[2:]), batch)

    def loss_fn(params, minibatch):
        """The loss without weight decay (arXiv 1712.01815, equation 1)."""
        steps, target = minibatch
        logits, value = network.apply(params, steps.obs)
        actor_loss = policy_loss(logits, steps.legal, steps.action_weights).mean()
        critic_loss = jnp.square(value - target).mean()
        policy = jax.nn.softmax(mask_logits(logits, steps.legal))
        entropy = jax.scipy.special.entr(policy).sum(axis=-1).mean()
        metrics = {"policy_loss": actor_loss, "value_loss": critic_loss, "entropy": entropy}
        return actor_loss + config.vf_coef * critic_loss, metrics

    def gradient_step(carry, minibatch):
        params, opt_state = carry
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, minibatch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), metrics

    def learn(state, batch, key):
        """`update_epochs` passes over the batch in minibatches, each pass in a new order."""

        def epoch(carry, key):
            # a random order; `jax.random.permutation` takes longer
            order = jax.random.bits(key, (config.rollout_size,)).argsort()
            order = order.reshape(config.num_minibatches, minibatch_size)
            minibatches = jax.tree.map(lambda x: x[order], batch)
            return jax.lax.scan(gradient_step, carry, minibatches)

        carry = (state.params, state.opt_state)
        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, carry, keys)
        return state._replace(params=params, opt_state=opt_state), jax.tree.map(jnp.mean, metrics)

    def play_match(state, key, name):
        """Continue the games of the greedy policy against an opponent."""
        env, env_params = opponents[name]

        def step(match, key):
            obs, env_state = match
            action = jax.vmap(act, in_axes=(None, 0))(state.agent, obs)
            keys = jax.random.split(key, config.eval_games)
            obs, env_state, _, _, _, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                keys, env_state, action, env_params
            )
            del info["final_observation"], info["positions"]
            return (obs, env_state), info

        keys = jax.random.split(key, config.eval_steps)
        match, info = jax.lax.scan(step, state.matches[name], keys)
        ended = info["returned_episode"]
        returns = info["returned_episode_returns"]
        outcomes = {
            f"{name}_wins": (ended & (returns > 0)).sum(),
            f"{name}_draws": (ended & (returns == 0)).sum(),
            f"{name}_losses": (ended & (returns < 0)).sum(),
        }
        return match, outcomes, episode_metrics(info)

    def play_matches(state, key):
        """Some moves against each opponent. A game lasts several updates, which share its cost."""
        matches = {}
        metrics = {}
        for i, name in enumerate(opponents):
            match, outcomes, strongest = play_match(state, jax.random.fold_in(key, i), name)
            matches[name] = match
            metrics |= outcomes
        # `strongest` is from the last opponent: MCTS, or random play without it
        return state._replace(matches=matches), metrics | strongest

    def update(state, _=None):
        key, collect_key, learn_key, match_key = jax.random.split(state.key, 4)
        state, rollout, last_value = collect(state._replace(key=key), collect_key)
        batch = make_batch(rollout, last_value)
        state, metrics = learn(state, batch, learn_key)
        metrics["value"] = rollout.search_value.mean()
        metrics["self_play_games"] = rollout.terminated.sum()
        metrics["self_play_draws"] = (rollout.terminated & (rollout.reward == 0)).sum()
        state, match_metrics = play_matches(state, match_key)
        return state, metrics | match_metrics

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), length=config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`act(agent, obs) -> action`, the greedy policy.

    `obs` is the state of the game, which has the board, the legal actions and what a search needs.
    """
    game = make_game(config.env_name)
    network = make_network(config, game)
    search = make_network_search(config, game, config.eval_simulations)

    def act(agent, obs):
        if config.eval_simulations:
            key = jax.random.key(0)  # without Gumbel noise nothing is random
            output = search(agent["params"], key, add_batch_axis(obs), gumbel_scale=0.0)
            action = output.action[0]
        else:
            logits, _ = network.apply(agent["params"], obs.observation)
            action = mask_logits(logits, obs.legal_action_mask).argmax(axis=-1)
        return action.astype(jnp.int32)

    return act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw a game of the first agent against itself and its values for the first player."""
    game = make_game(config.env_name)
    network = make_network(config, game)
    act = make_policy(config)
    agent = jax.tree.map(lambda x: x[0], runner_state.agent)
    start = game.init(jax.random.key(0))
    first_player = start.current_player

    def step(state, _):
        _, value = network.apply(agent["params"], state.observation)
        value = jnp.where(state.current_player == first_player, value, -value)
        value = jnp.where(state.terminated, state.rewards[first_player], value)
        return game.step(state, act(agent, state)), (state, value)

    def play():
        return jax.lax.scan(step, start, length=game.longest + 1)

    _, (states, values) = jax.jit(play)()
    length = len(values)
    if states.terminated.any():
        length = int(jnp.argmax(states.terminated)) + 1
    if config.env_name in LONGEST:  # Pgx draws its own games
        states = jax.tree.map(lambda x: x[:length], states)
        states.save_svg(run_dir / "game.svg")
    axes = Figure(layout="constrained").subplots()
    axes.plot(values[:length], marker="o", markersize=3)
    axes.set(title=f"{config.env_name}: agent 0 against itself")
    axes.set(xlabel="moves", ylabel="value for the first player")
    axes.figure.savefig(run_dir / "game_value.png", dpi=150)


# --- environments ---

LONGEST = {  # moves of both players in the longest game, after which Pgx itself ends it
    "tic_tac_toe": 9,
    "connect_four": 42,
    "othello": 128,
    "hex": 122,
    "animal_shogi": 256,
    "gardner_chess": 256,
    "chess": 512,
    "shogi": 512,
    "go_9x9": 162,
    "go_19x19": 722,
}


@functools.cache
@jax.ensure_compile_time_eval()  # making a game needs concrete numbers, also inside a jit
def make_game(env_name: str):
    """A game with Pgx's interface, and `longest`, the moves of its longest game.

    MODULE:NAME calls NAME() of a module.
    """
    module, _, name = env_name.rpartition(":")
    if module:
        own_module = importlib.import_module(module)
        if not hasattr(own_module, name):
            raise ValueError(f"env_name = {env_name}: {module} has no {name}")
        game = getattr(own_module, name)()
    elif name in LONGEST:
        game = pgx.make(name)
    else:
        raise ValueError(
            f"env_name = {name}: must be one of {', '.join(LONGEST)}, or MODULE:NAME of your game"
        )
    if getattr(game, "num_players", None) != 2:
        raise ValueError(f"env_name = {env_name}: must be a game of two players in Pgx's form")
    if not hasattr(game, "longest"):
        game.longest = LONGEST.get(name, 512)
    return game


class Match:
    """A game against an opponent, for one agent behind gymnax's interface.

    The agent is Pgx's player 0. The observation is the state of the game in which the agent is to
    move. The rules choose who begins. The opponent plays by `simulations` of plain MCTS, or at
    random. If it begins, its first turn is random, to vary the games.
    """

    def __init__(self, game, simulations: int):
        self.game = game
        self.choose = make_mcts(game, simulations) if simulations else random_move

    def observation_space(self, params):
        """Of the board within the state."""
        return spaces.Box(-jnp.inf, jnp.inf, self.game.observation_shape)

    def action_space(self, params):
        return spaces.Discrete(self.game.num_actions)

    def reset(self, key, params):
        init_key, opening_key = jax.random.split(key)
        state, _ = self.reply(opening_key, self.game.init(init_key), random_move)
        return state, (state, jnp.int32(0))

    def step(self, key, state, action, params):
        game_state, step_count = state
        reply_key, reset_key = jax.random.split(key)
        after_move = self.game.step(game_state, action)
        after_reply, reply_reward = self.reply(reply_key, after_move, self.choose)
        step_count = step_count + 1

        reward = after_move.rewards[0] + reply_reward
        terminated = after_reply.terminated
        truncated = step_count >= params.max_steps_in_episode
        # "positions" are for onejit's evaluation and pictures
        info = {"final_observation": after_reply, "positions": (after_move, after_reply)}
        start = self.reset(reset_key, params)
        running = (after_reply, (after_reply, step_count))
        obs, state = where_state(terminated | truncated, start, running)
        return obs, state, reward, terminated, truncated, info

    def reply(self, key, state, choose):
        """Moves of the opponent until the agent is to move, and the agent's reward for them."""

        def is_opponent_to_move(carry):
            _, state, _ = carry
            return (state.current_player != 0) & ~state.terminated

        def move(carry):
            key, state, reward = carry
            key, move_key = jax.random.split(key)
            state = self.game.step(state, choose(move_key, state))
            return key, state, reward + state.rewards[0]

        carry = (key, state, jnp.float32(0.0))
        _, state, reward = jax.lax.while_loop(is_opponent_to_move, move, carry)
        return state, reward


def make_env(config):
    """`(env, env_params)`: a match in gymnax's interface, statistics of episodes in `info`."""
    for name in ("opponent_simulations", "eval_simulations"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name} = {getattr(config, name)}: must not be negative")
    game = make_game(config.env_name)
    env_params = environment.EnvParams(max_steps_in_episode=game.longest)
    return LogWrapper(Match(game, config.opponent_simulations)), env_params


def episode_metrics(info) -> dict:
    """Means over the episodes that ended in this update, NaN where none did."""
    ended = info["returned_episode"]  # [num_steps, num_envs]
    episodes = ended.sum()
    returns = jnp.where(ended, info["returned_episode_returns"], 0.0).sum()
    lengths = jnp.where(ended, info["returned_episode_lengths"], 0).sum()
    return {
        "episodic_return": returns / episodes,
        "episodic_length": lengths / episodes,
        "episodes": episodes,
    }


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
