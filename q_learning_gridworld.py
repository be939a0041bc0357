# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
#     "orbax-checkpoint>=0.12.8",
#     "pyyaml>=6.0",
#     "scipy>=1.15",
#     "tqdm>=4.67",
#     "tyro>=1.0.17",
# ]
# ///
"""Tabular Q-learning on a GridWorld, environment included, the whole training in one jit.

Watkins 1989, "Learning from Delayed Rewards"; Watkins & Dayan 1992, "Q-learning"; equation 6.8 of Sutton & Barto 2018,
"Reinforcement Learning", second edition. The behaviour is epsilon-greedy, and actions of equal value are chosen with
equal probability. An episode that ends by its time limit is bootstrapped from its last state; one that terminates is
not.

All dynamics are a table of [cells, actions]. A step of training looks up that table and one of the random bytes that
were drawn ahead for the whole update, so that nothing but the step itself is in the inner loop.

    python q_learning_gridworld.py --num-seeds 30

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import datetime
import difflib
import importlib.metadata
import inspect
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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import scipy.stats
import tyro
import yaml
from flax.core import FrozenDict
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
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
    """Hyperparameters. The defaults take a few seconds on two CPU cores."""

    env_name: str = "GridWorld"  # GridWorld or CliffWalking
    env_params: Mapping = FrozenDict()  # arguments of the GridWorld class, such as {height: 5, walls: [[1, 1], [1, 2]]}
    max_episode_steps: int = 0  # time limit; 0 keeps the environment's own (1000)
    total_timesteps: int = 300_000  # environment steps per agent
    num_steps: int = 1000  # steps per update; each of them learns, an update only reports
    lr: float = 0.1  # step size alpha
    gamma: float = 0.9  # discount
    epsilon: float = 0.1  # probability of a random action, in steps of 2^-16
    q_init: float = 0.0  # what every Q(s, a) starts at
    snapshot_interval: int = 0  # steps between snapshots of Q, kept in snapshots.npz; 0 for none

    def __post_init__(self):
        object.__setattr__(self, "env_params", freeze_mapping(self.env_params))

    @property
    def num_envs(self) -> int:
        return 1

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


def check(config: Config) -> None:
    """Raise ValueError, naming the field, for a config that cannot train."""
    require(config, "total_timesteps", "num_steps", low=1)
    require(config, "lr", "gamma", "epsilon", low=0, high=1)
    require(config, "q_init", low=-1e12)
    require(config, "max_episode_steps", "snapshot_interval", low=0)
    if config.num_updates < 1:
        raise ValueError(f"total_timesteps = {config.total_timesteps}: one update takes num_steps = {config.num_steps}")
    if config.snapshot_interval % config.num_steps:
        raise ValueError(
            f"snapshot_interval = {config.snapshot_interval}: must be a multiple of num_steps = {config.num_steps}"
        )


@flax.struct.dataclass
class GridState:
    cell: jax.Array  # row * width + column
    time: jax.Array  # steps in this episode


@flax.struct.dataclass
class GridParams:
    max_steps_in_episode: int


MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # up, right, down, left, as (row, column)
STEP, GOAL, CLIFF = range(3)  # outcomes of a step
GRIDS = {
    "GridWorld": {"height": 8, "width": 12, "start": (7, 11), "goal": (0, 0)},
    "CliffWalking": {"height": 4, "width": 12, "start": (3, 0), "goal": (3, 11), "step_reward": -1, "goal_reward": -1,
                     "cliff": tuple((3, column) for column in range(1, 11))},  # Sutton & Barto, example 6.6
}  # fmt: skip


class GridWorld:
    """Cells, walls, a cliff and a goal, behind gymnax's interface; a cell is (row, column), (0, 0) at the top left.

    A move into a wall or over the border leaves the agent where it is. The goal ends the episode. The cliff puts the
    agent back to the start or, with `cliff_terminates`, ends the episode. With `start="random"` episodes start in any
    free cell that the goal can be reached from. The observation is the index of the cell, row * width + column.

    `next_cell` and `outcome`, [cells, 4] each, and `starts` are all there is to the dynamics.
    """

    def __init__(self, height, width, start, goal, walls=(), cliff=(), step_reward=0.0, goal_reward=1.0,
                 cliff_reward=-100.0, cliff_terminates=False):  # fmt: skip
        for name, size in {"height": height, "width": width}.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} = {size!r} is not a whole number above 0")
        self.rewards = {"step_reward": step_reward, "goal_reward": goal_reward, "cliff_reward": cliff_reward}
        for name, value in self.rewards.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{name} = {value!r} is not a number")
        if type(cliff_terminates) is not bool:
            raise ValueError(f"cliff_terminates = {cliff_terminates!r} is neither true nor false")
        self.height, self.width, self.cliff_terminates = height, width, cliff_terminates
        self.walls, self.cliff = np.zeros((2, height * width), bool)
        self.walls[self.indices("walls", walls)] = True
        self.cliff[self.indices("cliff", cliff)] = True
        (self.goal,) = self.indices("goal", [goal], self.walls | self.cliff)
        taken = self.walls | self.cliff | (np.arange(height * width) == self.goal)
        self.starts = np.flatnonzero(~taken) if start == "random" else np.array(self.indices("start", [start], taken))
        if start == "random" and self.cliff.any() and not cliff_terminates:
            raise ValueError("start = random needs cliff_terminates, for there is no start to put the agent back to")
        self.next_cell, self.outcome = self.make_table()
        self.starts = self.starts[np.isfinite(self.distances()[self.starts])]
        if not len(self.starts):
            raise ValueError(f"goal = {list(goal)} cannot be reached from start = {start}")

    def indices(self, name, cells, taken=None) -> list[int]:
        """Of cells given as (row, column). Raises ValueError where one is outside the grid or `taken`."""
        if not isinstance(cells, (list, tuple)):
            raise ValueError(f"{name} = {cells!r} is not a list of cells [row, column]")
        for cell in cells:
            if not isinstance(cell, (list, tuple)) or [type(each) for each in cell] != [int, int]:
                raise ValueError(f"{name}: {cell!r} is not a cell [row, column]")
            if not (0 <= cell[0] < self.height and 0 <= cell[1] < self.width):
                raise ValueError(f"{name}: {list(cell)} is outside the grid of {self.height} x {self.width} cells")
        indices = [row * self.width + column for row, column in cells]
        if taken is not None and taken[indices].any():
            raise ValueError(f"{name}: {list(cells[0])} is taken by a wall, the cliff or the goal")
        return indices

    def make_table(self):
        """Where each action leads to from each cell, and its outcome: [cells, 4] each."""
        cells = np.arange(self.height * self.width)
        rows, columns = (np.stack(np.divmod(cells, self.width), axis=1)[:, None] + MOVES).transpose(2, 0, 1)
        reached = rows.clip(0, self.height - 1) * self.width + columns.clip(0, self.width - 1)
        reached = np.where(self.walls[reached], cells[:, None], reached)
        outcome = np.where(reached == self.goal, GOAL, np.where(self.cliff[reached], CLIFF, STEP))
        if not self.cliff_terminates:
            reached[outcome == CLIFF] = self.starts[:1]
        return reached, outcome

    def distances(self) -> np.ndarray:
        """Steps from each cell to the goal, inf where it cannot be reached: [cells]."""
        distance = np.full(len(self.next_cell), np.inf)
        while True:
            after = np.where(self.terminated(self.outcome), np.inf, distance[self.next_cell])
            shorter = np.minimum(distance, 1 + np.where(self.outcome == GOAL, 0, after).min(axis=1))
            if (shorter == distance).all():
                return distance
            distance = shorter

    def reward(self, outcome):
        step, goal, cliff = self.rewards.values()
        return jnp.where(outcome == STEP, step, jnp.where(outcome == GOAL, goal, cliff)).astype(jnp.float32)

    def terminated(self, outcome):
        return (outcome == GOAL) | ((outcome == CLIFF) & self.cliff_terminates)

    def sample_starts(self, key, shape=()):
        starts = jnp.asarray(self.starts, jnp.int32)
        return starts[jax.random.randint(key, shape, 0, len(starts)) if len(starts) > 1 else jnp.zeros(shape, int)]

    def reset(self, key, params):
        state = GridState(self.sample_starts(key), jnp.zeros((), jnp.int32))
        return state.cell, state

    def step(self, key, state, action, params):
        cell = jnp.asarray(self.next_cell, jnp.int32)[state.cell, action]
        outcome = jnp.asarray(self.outcome)[state.cell, action]
        terminated, time = self.terminated(outcome), state.time + 1
        truncated = time >= params.max_steps_in_episode
        _, start = self.reset(key, params)
        after = jax.tree.map(partial(jnp.where, terminated | truncated), start, GridState(cell, time))
        return after.cell, after, self.reward(outcome), terminated, truncated, {"final_observation": cell}

    def observation_space(self, params):
        from gymnax.environments import spaces

        return spaces.Discrete(len(self.next_cell))

    def action_space(self, params=None):
        from gymnax.environments import spaces

        return spaces.Discrete(len(MOVES))


def make_env(config: Config):
    """`(env, env_params)` of a name in GRIDS, `config.env_params` applied. Raises ValueError."""
    name, changes = config.env_name, dict(config.env_params)
    if name not in GRIDS:
        raise ValueError(f"env_name = {name}: must be one of {', '.join(GRIDS)}{nearest(name, GRIDS)}")
    known = inspect.signature(GridWorld).parameters
    for key in changes:
        if key not in known:
            raise ValueError(f"env_params: {key} is not a parameter of GridWorld{nearest(key, known)}")
    try:
        env = GridWorld(**GRIDS[name] | changes)
    except (ValueError, MemoryError) as error:
        raise ValueError(f"env_params: {error}") from None
    return env, GridParams(max_steps_in_episode=config.max_episode_steps or 1000)


def twelve_choices(members: int) -> int:
    """Twelve actions, two bits each, all that are in the set `members` equally often: 1, 2, 3 and 4 divide 12."""
    actions = [action for action in range(4) if members >> action & 1]
    return sum(actions[i % len(actions)] << 2 * i for i in range(12)) if actions else 0


CHOICES = np.array([twelve_choices(members) for members in range(16)], np.uint32)


def draw(key, num_steps: int, epsilon) -> jax.Array:
    """The randomness of `num_steps` choices, ahead of them: [num_steps].

    The lower four bits are all set, to explore, with probability `epsilon`; above them is one of twelve numbers.
    """
    words = jax.random.bits(key, (num_steps,), jnp.uint32)
    explore = (words >> 16) < jnp.round(epsilon * 2**16).astype(jnp.uint32)
    number = (words & 0xFFFF) * 12 >> 16
    return number << 4 | jnp.where(explore, jnp.uint32(15), 0)


def epsilon_greedy(values, drawn) -> jax.Array:
    """An action of the largest of `values` [4], by chance among equals; exploring is as if all four were equal."""
    best = jnp.sum(jnp.where(values == values.max(), jnp.array([1, 2, 4, 8], jnp.uint32), 0), dtype=jnp.uint32)
    choices = jax.lax.dynamic_slice(jnp.asarray(CHOICES), (best | drawn & 15,), (1,))[0]
    return choices >> 2 * (drawn >> 4) & 3


def td_error(value, reward, terminated, next_values, gamma):
    """What equation 6.8 of Sutton & Barto moves Q(s, a) by, divided by alpha. `next_values` [4] are Q(s', .)."""
    return reward + gamma * jnp.where(terminated, 0.0, next_values.max()) - value


def episode_statistics(state, rewards, done):
    """Metrics of the episodes that ended in this update, and the return so far of the one that did not: [num_steps]."""
    episodes, steps = done.sum(), jnp.arange(len(done))
    last = jnp.where(done, steps, -1).max()  # the last step that ended an episode
    ended = jnp.where(steps <= last, rewards, 0.0).sum() + state.episode_return
    going_on = jnp.where(steps > last, rewards, 0.0).sum()
    metrics = {
        "episodic_return": jnp.where(episodes > 0, ended / episodes, jnp.nan),
        "episodic_length": jnp.where(episodes > 0, (state.env_state.time + last + 1) / episodes, jnp.nan),
        "episodes": episodes,
    }
    return metrics, jnp.where(episodes > 0, 0.0, state.episode_return) + going_on


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    params: dict  # "q": [cells, 4]
    env_state: GridState
    episode_return: jax.Array  # so far, of the episode that goes on
    num_updates: jax.Array  # done
    snapshots: Any  # Q after each `snapshot_interval` steps: [snapshots, cells, 4]; None where there are none
    key: jax.Array


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    check(config)
    env, env_params = make_env(config)
    table = jnp.asarray(env.next_cell * 4 + env.outcome, jnp.uint32)  # one look-up is faster than two
    interval = config.snapshot_interval
    num_snapshots = config.num_updates * config.num_steps // interval if interval else 0

    def init(rng):
        env_key, key = jax.random.split(rng)
        _, env_state = env.reset(env_key, env_params)
        q = jnp.full(table.shape, config.q_init, jnp.float32)
        snapshots = jnp.zeros((num_snapshots, *q.shape)) if num_snapshots else None
        return RunnerState({"q": q}, env_state, jnp.float32(0.0), jnp.int32(0), snapshots, key)

    def step(carry, inputs):
        # Each read of Q ends in a sum or a maximum: XLA computes these once, before the write. Other reads it repeats
        # where they are used, for which it keeps a copy of the whole Q in each step.
        q, cell, time = carry
        drawn, start = inputs
        values = jax.lax.dynamic_slice(q, (cell, jnp.uint32(0)), (1, 4))[0]
        action = epsilon_greedy(values, drawn)
        entry = jax.lax.dynamic_slice(table, (cell, action), (1, 1))[0, 0]
        next_cell, outcome = entry >> 2, entry & 3
        next_values = jax.lax.dynamic_slice(q, (next_cell, jnp.uint32(0)), (1, 4))[0]
        terminated, time = env.terminated(outcome), time + 1
        value = jnp.where(jnp.arange(4, dtype=jnp.uint32) == action, values, 0.0).sum()
        delta = td_error(value, env.reward(outcome), terminated, next_values, config.gamma)
        q = jax.lax.dynamic_update_slice(q, (value + config.lr * delta)[None, None], (cell, action))
        done = terminated | (time >= env_params.max_steps_in_episode)
        carry = q, jnp.where(done, start, next_cell), jnp.where(done, 0, time)
        return carry, (value, delta, outcome << 1 | done)

    def update(state, _=None):
        key, draw_key, start_key = jax.random.split(state.key, 3)
        starts = env.sample_starts(start_key, (config.num_steps,)).astype(jnp.uint32)
        inputs = draw(draw_key, config.num_steps, config.epsilon), starts
        carry = state.params["q"], state.env_state.cell.astype(jnp.uint32), state.env_state.time
        (q, cell, time), (value, delta, outcome) = jax.lax.scan(step, carry, inputs, unroll=2)
        metrics, episode_return = episode_statistics(state, env.reward(outcome >> 1), (outcome & 1) > 0)
        metrics |= {"td_loss": jnp.square(delta).mean(), "q_value": value.mean()}
        snapshots = state.snapshots
        if num_snapshots:  # until the interval is over the later ones replace the earlier; the last may go nowhere
            snapshots = snapshots.at[state.num_updates // (interval // config.num_steps)].set(q, mode="drop")
        env_state = GridState(cell.astype(jnp.int32), time)
        return RunnerState({"q": q}, env_state, episode_return, state.num_updates + 1, snapshots, key), metrics

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
    """`rollout(runner_state, rng) -> Episode`: one greedy episode of a trained agent; of equals the first action."""
    env, env_params = make_env(config)

    def rollout(runner_state, rng):
        def step(carry, key):
            obs, env_state, valid = carry
            action = runner_state.params["q"][obs].argmax()
            next_obs, next_env_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
            return (next_obs, next_env_state, valid & ~(terminated | truncated)), Episode(env_state, reward, valid)

        reset_key, step_key = jax.random.split(rng)
        obs, env_state = env.reset(reset_key, env_params)
        keys = jax.random.split(step_key, env_params.max_steps_in_episode)
        _, episode = jax.lax.scan(step, (obs, env_state, jnp.asarray(True)), keys)
        return episode

    return rollout


def greedy_path(env: GridWorld, q, start: int) -> tuple[list[int], bool]:
    """The cells that greedy steps lead through, and whether they reach the goal; it ends where it would repeat."""
    path = [int(start)]
    while True:
        action = q[path[-1]].argmax()
        cell, outcome = int(env.next_cell[path[-1], action]), env.outcome[path[-1], action]
        if cell in path:
            return path, False
        path.append(cell)
        if env.terminated(outcome):
            return path, bool(outcome == GOAL)


def draw_values(env: GridWorld, q, path: list[int], title: str, file) -> None:
    """A heat map of max Q, an arrow for the greedy action of each cell in which anything was learned, red on `path`."""
    values, hidden = q.max(axis=1), env.walls | env.cliff | (np.arange(len(q)) == env.goal)
    shown = np.where(hidden, np.nan, values)
    figure = Figure(figsize=(2 + 0.5 * min(env.width, 40), 1.7 + 0.5 * min(env.height, 40)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shown.reshape(env.height, env.width), cmap="viridis")
    figure.colorbar(image, label="max Q", shrink=0.8)
    rows, columns = np.divmod(np.arange(len(q)), env.width)

    def square(cells, label, **style):
        for i in cells:
            axes.add_patch(Rectangle((columns[i] - 0.5, rows[i] - 0.5), 1, 1, label=label, clip_on=False, **style))
            label = None  # one entry in the legend

    square(np.flatnonzero(env.walls), "wall", color="0.3", linewidth=0)
    square(np.flatnonzero(env.cliff), "cliff", facecolor="white", edgecolor="0.5", hatch="xxx", linewidth=0)
    square(path[:1], "first cell of the path", fill=False, edgecolor="red", linewidth=2)
    goal = rows[env.goal], columns[env.goal]
    axes.plot(*goal[::-1], "*", color="goldenrod", markersize=16, linestyle="", label="goal")
    learned = ~hidden & (q.min(axis=1) < values)
    dark = shown > (np.nanmin(shown) + np.nanmax(shown)) / 2  # the arrow, as the cell is light
    on_path = np.isin(np.arange(len(q)), path)
    for cells, color in ((on_path, "red"), (~on_path & dark, "black"), (~on_path & ~dark, "white")):
        cells = np.flatnonzero(cells & learned)
        down, right = 0.6 * MOVES[q[cells].argmax(axis=1)].T
        axes.quiver(columns[cells], rows[cells], right, down, color=color, pivot="mid", units="xy", width=0.09,
                    angles="xy", scale_units="xy", scale=1)  # fmt: skip
    axes.set(title=title, xlabel="column", ylabel="row")
    axes.locator_params(integer=True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, format="png", dpi=150)


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw and print what the median agent has learned, and save the snapshots. `runner_state` is [num_seeds, ...]."""
    env, _ = make_env(config)
    q, distances = np.asarray(runner_state.params["q"]), env.distances()
    start = env.starts[distances[env.starts].argmax()]  # the farthest, where there are several
    paths = [greedy_path(env, each, start) for each in q]
    lengths = [len(path) - 1 for path, reaches_goal in paths if reaches_goal]
    median = np.argsort(q[:, start].max(axis=1), kind="stable")[(len(q) - 1) // 2]
    path, reaches_goal = paths[median]
    title = f"agent {median} (of 0 to {len(q) - 1}), the median of max Q at the start"
    write(run_dir / "q_values.png", partial(draw_values, env, q[median], path, title))
    spread = f" in {min(lengths)} to {max(lengths)} steps" if lengths else ""
    print(f"{len(lengths)} of {len(q)} agents reach the goal greedily{spread}; {distances[start]:.0f} is the least")
    cells = " ".join("({},{})".format(*divmod(cell, env.width)) for cell in path)
    end = f"the goal after {len(path) - 1} steps" if reaches_goal else "not to the goal"
    print(f"greedy path of {title}, {q[median, start].max():.4g}: {cells}, {end}")
    if runner_state.snapshots is not None:
        steps = config.snapshot_interval * np.arange(1, runner_state.snapshots.shape[1] + 1)
        q = np.asarray(runner_state.snapshots)  # [num_seeds, snapshots, cells, 4]
        write(run_dir / "snapshots.npz", partial(np.savez_compressed, steps=steps, q=q))


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
