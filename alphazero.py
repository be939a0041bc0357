# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2,<0.11",
#     "matplotlib>=3.10",
#     "mctx>=0.0.71",
#     "numpy>=2.0",
#     "optax>=0.2.8",
#     "pgx>=2.6.0",
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
"""Gumbel AlphaZero for board games of two players, the whole training in one jit.

Silver et al. 2017, "Mastering Chess and Shogi by Self-Play with a General Reinforcement Learning Algorithm" (arXiv
1712.01815): one network predicts a policy and a value, a tree search that uses the network plays against itself, and
the network learns the result of the search and the outcome of the game (equation 1). The search is Danihelka et al.
2022, "Policy improvement by planning with Gumbel" (openreview.net/forum?id=bERaNdoegnO), by DeepMind's mctx: Gumbel
noise and sequential halving choose the actions at the root, and equation 11 gives the target of the policy.

Differences from the papers: moves are sampled in proportion to visit counts, because self-play with the action that
the search returns can collapse to one game; there is no replay; a game that the end of a rollout cuts off is
bootstrapped with the value of a search; the residual network has layer instead of batch normalization.

    python alphazero.py --env-name tic_tac_toe --num-seeds 2

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 4))
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
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pgx
import scipy.special
import tyro
import yaml
from flax.traverse_util import flatten_dict
from gymnax.environments import environment, spaces
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
    """Hyperparameters. The defaults are tuned for tic_tac_toe on two CPU cores."""

    env_name: str = "tic_tac_toe"  # Pgx game of two players with perfect information; MODULE:NAME is your own game
    total_timesteps: int = 400_000  # moves of self-play per agent
    num_envs: int = 128  # games that are played at the same time
    num_steps: int = 16  # moves per game and update
    simulations: int = 32  # simulations of each search in self-play
    max_considered_actions: int = 16  # actions that a search considers at its root
    sampled_moves: int = (
        30  # number of first moves sampled by visit counts; the search chooses the later moves
    )
    update_epochs: int = 2  # passes over the batch of num_envs * num_steps moves
    num_minibatches: int = 8  # gradient steps per pass
    lr: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount factor per move; 1 counts a late win as much as an early one
    vf_coef: float = 1.0  # weight of the value loss
    weight_decay: float = 1e-4  # weight decay per gradient step, multiplied by the learning rate
    network: Literal["mlp", "residual"] = (
        "mlp"  # mlp: only hidden layers; residual: residual blocks before them
    )
    hidden_sizes: tuple[int, ...] = (128, 128)  # sizes of the hidden layers
    channels: int = 64  # channels of the residual network
    num_blocks: int = 4  # blocks of the residual network, each with two convolutions
    activation: Literal["tanh", "relu", "elu", "gelu", "swish"] = (
        "relu"  # activation function of the hidden layers
    )
    opponent_simulations: int = (
        32  # simulations of the opponent's plain MCTS in evaluations; 0 for random moves alone
    )
    eval_simulations: int = (
        0  # simulations of the greedy policy's search; 0 plays by the network alone
    )
    eval_games: int = (
        16  # games that are played at the same time against each opponent during training
    )
    eval_steps: int = 2  # moves of the agent per update in each evaluation game

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


# --- networks ---


def neighborhoods(
    x,
):  # a dense layer on neighborhoods is a convolution that `orthogonal` can initialize
    """The squares of 3 x 3 around each point, with zeros outside: [..., H, W, C] -> [..., H, W, 9 * C]."""
    h, w = x.shape[-3:-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    return jnp.concatenate(
        [x[..., i : i + h, j : j + w, :] for i in range(3) for j in range(3)], axis=-1
    )


class Network(nn.Module):
    """Logits of the policy [..., num_actions] and the value for the player to move [...], in [-1, 1]."""

    network: str
    hidden_sizes: tuple[int, ...]
    channels: int
    num_blocks: int
    activation: str
    num_actions: int

    @nn.compact
    def __call__(self, obs):  # [..., H, W, planes]
        activation, scale = getattr(nn, self.activation), orthogonal(math.sqrt(2))
        x, flat = obs.astype(jnp.float32), obs.shape[:-3]
        if (
            self.network == "residual"
        ):  # He et al. 2016 (arXiv 1603.05027): normalize, activate, convolve, add
            x = nn.Dense(self.channels, kernel_init=scale)(neighborhoods(x))
            for _ in range(self.num_blocks):
                y = nn.Dense(self.channels, kernel_init=scale)(
                    neighborhoods(activation(nn.LayerNorm()(x)))
                )
                y = nn.Dense(self.channels, kernel_init=scale)(
                    neighborhoods(activation(nn.LayerNorm()(y)))
                )
                x = x + y
            x = activation(nn.Dense(8, kernel_init=scale)(activation(nn.LayerNorm()(x))))
        x = x.reshape(*flat, -1)
        for size in self.hidden_sizes:
            x = activation(nn.Dense(size, kernel_init=scale)(x))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        return logits, jnp.tanh(nn.Dense(1, kernel_init=orthogonal(0.01))(x)).squeeze(-1)


# --- mathematics: arrays in, arrays out ---


def mask_logits(logits, legal):
    """Illegal actions get a probability of 0. [..., num_actions]."""
    return jnp.where(legal, logits, jnp.finfo(logits.dtype).min)


def value_targets(rewards, discounts, last_value):
    """The outcome of the game for the player to move, z_t = r_t + d_t z_{t+1}. [T, N], [T, N], [N] -> [T, N].

    r_t is the reward of the player who moved. d_t is 0 if the move ended the game, -gamma if the opponent moves next,
    gamma if the same player does. `last_value` is the value of the position after the last move for the player to
    move. It bootstraps the games that the end of the rollout cuts off, instead of calling them draws.
    """

    def step(target, inputs):
        reward, discount = inputs
        target = reward + discount * target
        return target, target

    return jax.lax.scan(step, last_value, (rewards, discounts), reverse=True)[1]


def policy_loss(logits, legal, weights):
    """Cross entropy between the search's improved policy and the network's (Gumbel paper, equation 12). -> [B]."""
    return -(weights * jax.nn.log_softmax(mask_logits(logits, legal))).sum(axis=-1)


def select(condition, state, other):
    """One of two states of a game."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), state, other)


def one(state):
    """A batch of a single state."""
    return jax.tree.map(lambda leaf: leaf[None], state)


def sample_by_visits(key, visit_counts):
    """An action in proportion to the visits of the root's children (arXiv 1712.01815, page 3). [N, A] -> [N]."""
    return jax.random.categorical(key, jnp.log(visit_counts)).astype(jnp.int32)


# --- search ---


def play_move(game, state, action, gamma):
    """`(next state, reward of the player who moved, discount)` of one game; see `value_targets`."""
    after = game.step(state, action)
    sign = jnp.where(after.current_player == state.current_player, 1.0, -1.0)
    return (
        after,
        after.rewards[state.current_player],
        jnp.where(after.terminated, 0.0, sign * gamma),
    )


def make_search(algorithm, game, evaluate, gamma, **settings):
    """`search(params, key, states, **more) -> mctx's output` for states [N, ...], by an algorithm of mctx.

    `evaluate(params, key, states) -> logits [N, A], values [N]` is for the player to move.
    """

    def look(params, key, states):
        logits, values = evaluate(params, key, states)
        return mask_logits(logits, states.legal_action_mask), jnp.where(
            states.terminated, 0.0, values
        )

    def expand(
        params, key, actions, states
    ):  # a game that has ended stays ended: its discount and value are 0
        states, rewards, discounts = jax.vmap(play_move, (None, 0, 0, None))(
            game, states, actions, gamma
        )
        logits, values = look(params, key, states)
        return mctx.RecurrentFnOutput(
            reward=rewards, discount=discounts, prior_logits=logits, value=values
        ), states

    def search(params, key, states, **more):
        root_key, key = jax.random.split(key)
        logits, values = look(params, root_key, states)
        root = mctx.RootFnOutput(prior_logits=logits, value=values, embedding=states)
        return algorithm(
            params, key, root, expand, invalid_actions=~states.legal_action_mask, **settings, **more
        )

    return search


def make_gumbel_search(config, game, network, simulations: int):
    """A search by the network. `action_weights` are softmax(logits + sigma(completed Q)), Gumbel paper, equation 11."""

    def evaluate(params, _, states):
        return network.apply(params, states.observation)

    settings = {
        "num_simulations": simulations,
        "max_num_considered_actions": config.max_considered_actions,
    }
    return make_search(mctx.gumbel_muzero_policy, game, evaluate, config.gamma, **settings)


def make_mcts(game, simulations: int):
    """`choose(key, state) -> move` of plain MCTS: equal priors, and one game of random moves as the value of a leaf."""

    def evaluate(_, key, states):
        values = jax.vmap(functools.partial(playout, game))(
            jax.random.split(key, len(states.terminated)), states
        )
        return jnp.zeros(states.legal_action_mask.shape), values

    settings = {"num_simulations": simulations, "dirichlet_fraction": 0.0, "temperature": 0.0}
    search = make_search(mctx.muzero_policy, game, evaluate, 1.0, **settings)
    return lambda key, state: search((), key, one(state)).action[0].astype(jnp.int32)


def playout(game, key, state):
    """The outcome for the player to move if both players move at random, and 0 if the game has ended."""

    def move(carry):
        key, after, outcome = carry
        key, move_key = jax.random.split(key)
        after = game.step(after, random_move(move_key, after))
        return key, after, outcome + after.rewards[state.current_player]

    return jax.lax.while_loop(
        lambda carry: ~carry[1].terminated, move, (key, state, jnp.float32(0.0))
    )[2]


def random_move(key, state):
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf)).astype(
        jnp.int32
    )


# --- training ---


class Transition(NamedTuple):
    """One move in each game, or, with leading axes [num_steps, num_envs], a rollout."""

    obs: jax.Array  # the board as the player to move sees it
    legal: jax.Array  # whether an action is legal, [num_actions]
    weights: jax.Array  # the search's improved policy, [num_actions]
    search_value: jax.Array  # the search's value for the player to move
    reward: jax.Array  # of the player who moved
    discount: jax.Array  # 0 if the move ended the game; negative if the opponent moves next
    terminated: jax.Array


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict
    opt_state: Any
    update_count: jax.Array  # updates so far
    game_state: Any  # games of self-play, [num_envs, ...]
    matches: dict  # `(obs, env_state)` of the games against each opponent, [eval_games, ...]
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"params": self.params}


def make_network(config: Config, game):
    layers = (
        config.network,
        config.hidden_sizes,
        config.channels,
        config.num_blocks,
        config.activation,
    )
    return Network(*layers, num_actions=game.num_actions)


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    batch_size = config.num_envs * config.num_steps
    sizes = [
        "num_envs",
        "num_steps",
        "update_epochs",
        "num_minibatches",
        "eval_games",
        "eval_steps",
        "channels",
    ]
    if min(getattr(config, name) for name in sizes) < 1:
        raise ValueError(f"{', '.join(sizes)}: must all be at least 1")
    if min(config.simulations, config.max_considered_actions) < 2:
        raise ValueError(
            "simulations, max_considered_actions: must both be at least 2, for moves to be compared"
        )
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {batch_size}"
        )
    if batch_size % config.num_minibatches:
        raise ValueError(f"num_minibatches = {config.num_minibatches}: must divide {batch_size}")
    game = make_game(config.env_name)
    network = make_network(config, game)
    search = make_gumbel_search(config, game, network, config.simulations)
    _, act = make_policy(config)
    opponents = {"random": make_env(dataclasses.replace(config, opponent_simulations=0))}
    opponents |= {"mcts": make_env(config)} if config.opponent_simulations else {}
    optimizer = optax.scale_by_adam()
    new_games, play_moves = jax.vmap(game.init), jax.vmap(play_move, (None, 0, 0, None))

    def init(rng):
        network_key, game_key, match_key, key = jax.random.split(rng, 4)
        game_state = new_games(jax.random.split(game_key, config.num_envs))
        params, matches = network.init(network_key, game_state.observation), {}
        for i, (name, (env, env_params)) in enumerate(opponents.items()):
            keys = jax.random.split(jax.random.fold_in(match_key, i), config.eval_games)
            matches[name] = jax.vmap(env.reset, (0, None))(keys, env_params)
        return RunnerState(
            params, optimizer.init(params), jnp.zeros((), jnp.int32), game_state, matches, key
        )

    def collect(state, key):
        """Play `num_steps` moves of each game. Also returns the search's values of the positions after them."""

        def step(states, key):
            search_key, action_key, game_key = jax.random.split(key, 3)
            found = search(state.params, search_key, states)
            root = found.search_tree.summary()
            sampled = sample_by_visits(action_key, root.visit_counts)
            action = jnp.where(states._step_count < config.sampled_moves, sampled, found.action)
            after, reward, discount = play_moves(game, states, action, config.gamma)
            ended, new = after.terminated, new_games(jax.random.split(game_key, config.num_envs))
            seen = states.observation, states.legal_action_mask
            transition = Transition(
                *seen, found.action_weights, root.value, reward, discount, ended
            )
            # A new game keeps nothing of the old one. With the old flag `terminated` a search would find no value.
            return jax.vmap(select)(ended, new, after), transition

        keys = jax.random.split(key, config.num_steps + 1)
        game_state, rollout = jax.lax.scan(step, state.game_state, keys[:-1])
        last = search(state.params, keys[-1], game_state)
        return state._replace(game_state=game_state), rollout, last.search_tree.summary().value

    def loss(params, batch):
        logits, value = network.apply(params, batch["obs"])
        actor_loss = policy_loss(logits, batch["legal"], batch["weights"]).mean()
        critic_loss = jnp.square(value - batch["target"]).mean()
        entropy = (
            jax.scipy.special.entr(jax.nn.softmax(mask_logits(logits, batch["legal"])))
            .sum(axis=-1)
            .mean()
        )
        metrics = {"policy_loss": actor_loss, "value_loss": critic_loss, "entropy": entropy}
        return (
            actor_loss + config.vf_coef * critic_loss,
            metrics,
        )  # arXiv 1712.01815, equation 1, without weight decay

    def learn(state, batch, key):
        """`update_epochs` passes over the batch, each in a new order."""
        remaining = jnp.maximum(0.0, 1.0 - state.update_count / config.num_updates)
        lr = config.lr * remaining if config.anneal_lr else config.lr

        def gradient_step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            grads, metrics = jax.grad(loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            decayed = jax.tree.map(
                lambda param, step: step + config.weight_decay * param, params, updates
            )
            return (
                jax.tree.map(lambda param, step: param - lr * step, params, decayed),
                opt_state,
            ), metrics

        def epoch(carry, key):
            order = jax.random.permutation(key, batch_size)
            return jax.lax.scan(gradient_step, carry, order.reshape(config.num_minibatches, -1))

        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
        state = state._replace(
            params=params, opt_state=opt_state, update_count=state.update_count + 1
        )
        return state, jax.tree.map(jnp.mean, metrics)

    def evaluate(state, key):
        """Continue the greedy games against each opponent. A game lasts several updates, which share its cost."""
        matches, metrics = {}, {}
        for i, (name, (env, env_params)) in enumerate(opponents.items()):

            def step(match, key, env=env, env_params=env_params):
                obs, env_state = match
                action, _ = jax.vmap(act, (None, None, 0))(state.agent, (), obs)
                keys = jax.random.split(key, config.eval_games)
                after = jax.vmap(env.step, (0, 0, 0, None))(keys, env_state, action, env_params)
                return after[:2], {
                    key: each for key, each in after[-1].items() if key.startswith("returned")
                }

            keys = jax.random.split(jax.random.fold_in(key, i), config.eval_steps)
            matches[name], info = jax.lax.scan(step, state.matches[name], keys)
            ended, returns, lengths = (
                info[f"returned_episode{each}"] for each in ("", "_returns", "_lengths")
            )
            metrics |= {  # the episodes are the games against the last, strongest opponent
                "episodic_return": jnp.where(ended, returns, 0.0).sum() / ended.sum(),
                "episodic_length": jnp.where(ended, lengths, 0).sum() / ended.sum(),
                "episodes": ended.sum(),
                f"{name}_wins": (ended & (returns > 0)).sum(),
                f"{name}_draws": (ended & (returns == 0)).sum(),
                f"{name}_losses": (ended & (returns < 0)).sum(),
            }
        return state._replace(matches=matches), metrics

    def update(state, _=None):
        key, collect_key, learn_key, match_key = jax.random.split(state.key, 4)
        state, rollout, last_value = collect(state._replace(key=key), collect_key)
        targets = value_targets(rollout.reward, rollout.discount, last_value)
        batch = {
            "obs": rollout.obs,
            "legal": rollout.legal,
            "weights": rollout.weights,
            "target": targets,
        }
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        state, metrics = learn(state, batch, learn_key)
        metrics["value"] = rollout.search_value.mean()
        metrics["self_play_games"] = rollout.terminated.sum()
        metrics["self_play_draws"] = (rollout.terminated & (rollout.reward == 0)).sum()
        state, match_metrics = evaluate(state, match_key)
        return state, metrics | match_metrics

    return init, update


def make_train(config: Config):
    """`train(rng) -> {"runner_state", "metrics"}`, the whole training; each metric has shape [num_updates]."""
    init, update = make_learner(config)

    def train(rng):
        runner_state, metrics = jax.lax.scan(update, init(rng), None, config.num_updates)
        return {"runner_state": runner_state, "metrics": metrics}

    return train


def make_policy(config: Config):
    """`start() -> memory` and `act(agent, memory, obs) -> (action, memory)`, greedy; here there is no memory.

    `obs` is the state of the game, which has the board, the legal actions and what a search needs.
    """
    game = make_game(config.env_name)
    network = make_network(config, game)
    search = make_gumbel_search(config, game, network, config.eval_simulations)

    def act(agent, memory, obs):
        if config.eval_simulations:
            found = search(
                agent["params"], jax.random.key(0), one(obs), gumbel_scale=0.0
            )  # nothing is random
            return found.action[0].astype(jnp.int32), memory
        logits, _ = network.apply(agent["params"], obs.observation)
        return mask_logits(logits, obs.legal_action_mask).argmax(axis=-1).astype(jnp.int32), memory

    return (lambda: ()), act


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw a game of the first agent against itself and the value of its positions for the first player."""
    game, (_, act) = make_game(config.env_name), make_policy(config)
    agent = jax.tree.map(lambda leaf: leaf[0], runner_state.agent)
    start = game.init(jax.random.key(0))

    def move(state, _):
        _, value = make_network(config, game).apply(agent["params"], state.observation)
        sign = jnp.where(state.current_player == start.current_player, 1.0, -1.0)
        value = jnp.where(state.terminated, state.rewards[start.current_player], sign * value)
        return game.step(state, act(agent, (), state)[0]), (state, value)

    _, (states, values) = jax.jit(lambda: jax.lax.scan(move, start, None, game.longest + 1))()
    length = int(jnp.argmax(states.terminated)) + 1 if states.terminated.any() else len(values)
    if config.env_name in LONGEST:  # Pgx draws its own games
        jax.tree.map(lambda leaf: leaf[:length], states).save_svg(run_dir / "game.svg")
    axes = Figure(layout="constrained").subplots()
    axes.plot(values[:length], marker="o", markersize=3)
    axes.set(
        title=f"{config.env_name}: agent 0 against itself",
        xlabel="moves",
        ylabel="value for the first player",
    )
    axes.figure.savefig(run_dir / "game_value.png", dpi=150)


# --- environment ---

LONGEST = {  # moves of both players in the longest game; Pgx itself ends long games after this many moves
    "tic_tac_toe": 9, "connect_four": 42, "othello": 128, "hex": 122, "animal_shogi": 256, "gardner_chess": 256,
    "chess": 512, "shogi": 512, "go_9x9": 162, "go_19x19": 722,
}  # fmt: skip


@functools.cache
@jax.ensure_compile_time_eval()  # making a game needs concrete numbers, also inside a jit
def make_game(name: str):
    """A game with Pgx's interface, and the moves of its `longest` game. MODULE:NAME calls NAME() of a module."""
    module, _, own = name.rpartition(":")
    if not module and name not in LONGEST:
        raise ValueError(
            f"env_name = {name}: must be one of {', '.join(LONGEST)}, or MODULE:NAME of your own game"
        )
    make = (
        getattr(importlib.import_module(module), own, None)
        if module
        else functools.partial(pgx.make, name)
    )
    game = make() if make else None
    if getattr(game, "num_players", None) != 2:
        raise ValueError(f"env_name = {name}: must be a game of Pgx's interface with two players")
    game.longest = getattr(game, "longest", LONGEST.get(name, 512))
    return game


class Match:
    """A game against an opponent, for one agent behind gymnax's interface. The agent is Pgx's player 0.

    The observation is the state of the game in which the agent is to move. The rules choose who begins. The opponent
    plays by `simulations` of plain MCTS, or at random. If it begins, its first turn is random, to vary the games.
    """

    def __init__(self, game, simulations: int):
        self.game, self.choose = game, make_mcts(game, simulations) if simulations else random_move

    def observation_space(self, params):
        return spaces.Box(
            -jnp.inf, jnp.inf, self.game.observation_shape
        )  # the board within the state

    def action_space(self, params):
        return spaces.Discrete(self.game.num_actions)

    def reset(self, key, params):
        init_key, opening_key = jax.random.split(key)
        state, _ = self.reply(opening_key, self.game.init(init_key), random_move)
        return state, (state, jnp.zeros((), jnp.int32))

    def step(self, key, state, action, params):
        reply_key, reset_key = jax.random.split(key)
        after, time = self.game.step(state[0], action), state[1] + 1
        replied, reward = self.reply(reply_key, after, self.choose)
        terminated, truncated = replied.terminated, time >= params.max_steps_in_episode
        info = {"final_observation": replied, "positions": (after, replied)}
        new, ended = self.reset(reset_key, params), terminated | truncated
        return (
            *select(ended, new, (replied, (replied, time))),
            after.rewards[0] + reward,
            terminated,
            truncated,
            info,
        )

    def reply(self, key, state, choose):
        """Moves of the opponent until the agent is to move, and the agent's reward for them."""

        def move(carry):
            key, state, reward = carry
            key, move_key = jax.random.split(key)
            state = self.game.step(state, choose(move_key, state))
            return key, state, reward + state.rewards[0]

        def is_to_move(carry):
            return (carry[1].current_player != 0) & ~carry[1].terminated

        return jax.lax.while_loop(is_to_move, move, (key, state, jnp.float32(0.0)))[1:]


def make_env(config):
    """`(env, env_params)`: gymnax's interface for one agent against an opponent, statistics of episodes in `info`."""
    if min(config.opponent_simulations, config.eval_simulations) < 0:
        raise ValueError("opponent_simulations, eval_simulations: must not be negative")
    game = make_game(config.env_name)
    return LogWrapper(Match(game, config.opponent_simulations)), environment.EnvParams(game.longest)


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
