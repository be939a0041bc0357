# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20",
#     "flax>=0.12.8",
#     "gymnax>=1.0.1",
#     "jax>=0.10.2,<0.11",
#     "matplotlib>=3.10",
#     "numpy>=2.0",
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
"""Tabular Q-learning on a GridWorld, environment included, the whole training in one jit.

Watkins 1989, "Learning from Delayed Rewards"; Watkins & Dayan 1992, "Q-learning"; equation 6.8 of Sutton & Barto 2018,
"Reinforcement Learning", second edition. The behaviour is epsilon-greedy, and actions of equal value are chosen with
equal probability. A time limit is not a termination: the value of the state after the last step is bootstrapped.

    python q_learning_gridworld.py --num-seeds 30

    out = jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 256))
"""

import contextlib
import dataclasses
import functools
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

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import tyro
import yaml
from flax.struct import dataclass as pytree
from flax.traverse_util import flatten_dict
from gymnax.environments import spaces
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
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
    """Hyperparameters and the grid. The defaults take a few seconds on two CPU cores."""

    env_name: Literal["GridWorld"] = (
        "GridWorld"  # the only environment; cells are ROW COLUMN, and 0 0 is top left
    )
    height: int = 8  # rows of the grid
    width: int = 12  # columns of the grid
    start: tuple[int, int] = (
        7,
        11,
    )  # cell in which episodes start, and to which the cliff puts the agent back
    random_starts: bool = (
        False  # start episodes in any free cell from which the goal can be reached
    )
    goal: tuple[int, int] = (0, 0)  # goal cell; reaching it ends the episode
    walls: tuple[tuple[int, int], ...] = ()  # cells that cannot be entered
    cliff: tuple[tuple[int, int], ...] = ()  # cells that put the agent back to the start
    cliff_terminates: bool = False  # the cliff ends the episode instead of putting the agent back
    step_reward: float = (
        0.0  # reward of all other steps, including steps against a wall or the border
    )
    goal_reward: float = 1.0  # reward of the step to the goal
    cliff_reward: float = -100.0  # reward of the step onto the cliff
    max_steps_in_episode: int = 1000  # time limit of an episode
    total_timesteps: int = 300_000  # environment steps per agent
    num_steps: int = 1000  # steps per update; every step learns, and each update reports metrics
    lr: float = 0.1  # step size alpha
    gamma: float = 0.9  # discount factor
    epsilon: float = 0.1  # probability of a random action
    q_init: float = 0.0  # initial value of every Q(s, a)
    snapshot_interval: int = 0  # steps between snapshots of Q, kept in snapshots.npz; 0 for none

    @property
    def num_envs(self) -> int:
        return 1

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)


# --- mathematics: arrays in, arrays out ---


def td_error(value, reward, terminated, next_values, gamma):
    """The temporal-difference error in equation 6.8 of Sutton & Barto. `next_values` [4] are Q(s', .)."""
    return reward + gamma * jnp.where(terminated, 0.0, next_values.max()) - value


def plain_step(q, cell, key, env, config):
    """One step of Q-learning in its plain form. Training takes the same step faster, from `draw` to `td_error`."""
    explore_key, random_key, tie_key = jax.random.split(key, 3)
    greedy = jax.random.categorical(
        tie_key, jnp.where(q[cell] == q[cell].max(), 0.0, -jnp.inf)
    )  # random among equals
    explore, random_action = (
        jax.random.uniform(explore_key) < config.epsilon,
        jax.random.randint(random_key, (), 0, 4),
    )
    action = jnp.where(explore, random_action, greedy)
    next_cell, outcome = (
        jnp.asarray(env.next_cell)[cell, action],
        jnp.asarray(env.outcome)[cell, action],
    )
    delta = td_error(
        q[cell, action],
        env.reward(outcome, config),
        env.terminated(outcome),
        q[next_cell],
        config.gamma,
    )
    return q.at[cell, action].add(config.lr * delta), next_cell, env.terminated(outcome)


def draw(key, num_steps: int, epsilon):
    """For each of `num_steps` choices: whether to explore, and a number below 12, both from one random word."""
    words = jax.random.bits(key, (num_steps,), jnp.uint32)
    return (words >> 16) < epsilon * 2**16, (words & 0xFFFF) * 12 >> 16


def twelve_choices(members: int) -> int:
    """Twelve actions of two bits each. All members of the set occur equally often, because 1, 2, 3 and 4 divide 12."""
    actions = [action for action in range(4) if members >> action & 1]
    return sum(actions[i % len(actions)] << 2 * i for i in range(12)) if actions else 0


CHOICES = np.array([twelve_choices(members) for members in range(16)], np.uint32)


def epsilon_greedy(values, explore, number):
    """The action of the largest of `values` [4], random among equals. Exploring counts all four as equal."""
    members = jnp.where(
        explore | (values == values.max()), jnp.array([1, 2, 4, 8]), 0
    ).sum()  # the set of equals
    return (jnp.asarray(CHOICES)[members] >> 2 * number & 3).astype(jnp.int32)


def pick(values, action):
    """`values[action]` [4] as a sum. On CPUs XLA would repeat a plain look-up after Q is written, and copy Q for it."""
    return jnp.where(jnp.arange(4) == action, values, 0.0).sum()


def episode_statistics(state, rewards, done):
    """Metrics of the episodes that ended in this update, and the return so far of the current one. All [num_steps]."""
    episodes, steps = done.sum(), jnp.arange(len(done))
    last = jnp.where(done, steps, -1).max()  # the last step that ended an episode
    ended = jnp.where(steps <= last, rewards, 0.0).sum() + state.episode_return
    going_on = jnp.where(steps > last, rewards, 0.0).sum()
    metrics = {
        "episodic_return": jnp.where(episodes > 0, ended / episodes, jnp.nan),
        "episodic_length": jnp.where(
            episodes > 0, (state.env_state.time + last + 1) / episodes, jnp.nan
        ),
        "episodes": episodes,
    }
    return metrics, jnp.where(episodes > 0, 0.0, state.episode_return) + going_on


# --- training ---


class RunnerState(NamedTuple):
    """All that training carries from one update to the next."""

    q: jax.Array  # [cells, 4]
    env_state: Any  # GridState
    episode_return: jax.Array  # of the current episode so far
    update_count: jax.Array
    snapshots: (
        jax.Array | None
    )  # Q after each `snapshot_interval` steps: [snapshots, cells, 4]; None for none
    key: jax.Array

    @property
    def agent(self) -> dict:
        """What acting needs: `main` saves it, `make_policy` takes it."""
        return {"q": self.q}


def make_learner(config: Config):
    """`init(rng) -> runner_state` and `update(runner_state) -> (runner_state, metrics)`; metrics are scalars."""
    if min(config.height, config.width, config.max_steps_in_episode, config.num_steps) < 1:
        raise ValueError("height, width, max_steps_in_episode, num_steps: must all be at least 1")
    if config.num_updates < 1:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: one update takes {config.num_steps}"
        )
    interval = config.snapshot_interval
    if interval % config.num_steps or interval < 0:
        raise ValueError(
            f"snapshot_interval = {interval}: must be a multiple of num_steps = {config.num_steps}"
        )
    env, env_params = make_env(config)
    num_snapshots = config.num_updates * config.num_steps // interval if interval else 0

    def init(rng):
        env_key, key = jax.random.split(rng)
        _, env_state = env.reset(env_key, env_params)
        q = jnp.full(env.next_cell.shape, config.q_init, jnp.float32)
        return RunnerState(
            q=q,
            env_state=env_state,
            episode_return=jnp.zeros(()),
            update_count=jnp.zeros((), jnp.int32),
            snapshots=jnp.zeros((num_snapshots, *q.shape)) if num_snapshots else None,
            key=key,
        )

    def learn(unroll, config, carry, inputs):
        """Act and learn in each step of an update. `inputs` are drawn ahead for all steps: [num_steps]."""

        def step(carry, inputs):
            q, cell, time = carry
            explore, number, start = inputs
            action = epsilon_greedy(q[cell], explore, number)
            next_cell, outcome = (
                jnp.asarray(env.next_cell)[cell, action],
                jnp.asarray(env.outcome)[cell, action],
            )
            value, reward, terminated = (
                pick(q[cell], action),
                env.reward(outcome, config),
                env.terminated(outcome),
            )
            delta = td_error(value, reward, terminated, q[next_cell], config.gamma)
            q = q.at[cell, action].set(value + config.lr * delta)
            done = terminated | (time + 1 >= config.max_steps_in_episode)
            return (q, jnp.where(done, start, next_cell), jnp.where(done, 0, time + 1)), (
                value,
                delta,
                reward,
                done,
            )

        return jax.lax.scan(step, carry, inputs, unroll=unroll)

    def learn_fast(*args):
        """On CPUs agents train in turn, as only a single agent's loop becomes one function. GPUs unroll it."""
        one_by_one = jax.custom_batching.sequential_vmap(functools.partial(learn, 1))
        return jax.lax.platform_dependent(
            *args, cpu=one_by_one, default=functools.partial(learn, 10)
        )

    def update(state, _=None):
        key, draw_key, start_key = jax.random.split(state.key, 3)
        starts = env.sample_starts(start_key, (config.num_steps,))
        inputs = *draw(draw_key, config.num_steps, config.epsilon), starts
        carry = state.q, state.env_state.cell, state.env_state.time
        (q, cell, time), (value, delta, reward, done) = learn_fast(config, carry, inputs)
        metrics, episode_return = episode_statistics(state, reward, done)
        metrics |= {"td_loss": jnp.square(delta).mean(), "q_value": value.mean()}
        snapshots = state.snapshots
        if num_snapshots:  # the last update of an interval wins; an incomplete interval is dropped
            snapshots = snapshots.at[state.update_count // (interval // config.num_steps)].set(
                q, mode="drop"
            )
        state = state._replace(
            q=q, env_state=GridState(cell=cell, time=time), episode_return=episode_return, key=key
        )
        return state._replace(update_count=state.update_count + 1, snapshots=snapshots), metrics

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

    def act(agent, memory, obs):
        return agent["q"][obs].argmax(), memory  # the first of equals

    return (lambda: ()), act


def greedy_path(env, q, start: int) -> tuple[list[int], bool]:
    """The cells on the greedy path, and whether it reaches the goal. The path ends before it would repeat a cell."""
    path = [int(start)]
    while True:
        action = q[path[-1]].argmax()
        cell, outcome = int(env.next_cell[path[-1], action]), env.outcome[path[-1], action]
        if cell in path:
            return path, False
        path.append(cell)
        if env.terminated(outcome):
            return path, bool(outcome == GOAL)


def draw_values(env, q, path: list[int], title: str, file: Path) -> None:
    """A heat map of max Q, with an arrow for the greedy action in each cell that was learned, red on `path`."""
    values, hidden = q.max(axis=1), env.walls | env.cliff | (np.arange(len(q)) == env.goal)
    shown = np.where(hidden, np.nan, values)
    figure = Figure(
        figsize=(2 + 0.5 * min(env.width, 40), 1.7 + 0.5 * min(env.height, 40)),
        layout="constrained",
    )
    axes = figure.subplots()
    image = axes.imshow(shown.reshape(env.height, env.width), cmap="viridis")
    figure.colorbar(image, label="max Q", shrink=0.8)
    rows, columns = np.divmod(np.arange(len(q)), env.width)

    def square(cells, label, **style):
        for i in cells:
            axes.add_patch(
                Rectangle(
                    (columns[i] - 0.5, rows[i] - 0.5), 1, 1, label=label, clip_on=False, **style
                )
            )
            label = None  # one entry in the legend

    square(np.flatnonzero(env.walls), "wall", color="0.3", linewidth=0)
    square(
        np.flatnonzero(env.cliff),
        "cliff",
        facecolor="white",
        edgecolor="0.5",
        hatch="xxx",
        linewidth=0,
    )
    square(path[:1], "first cell of the path", fill=False, edgecolor="red", linewidth=2)
    axes.plot(
        columns[env.goal],
        rows[env.goal],
        "*",
        color="goldenrod",
        markersize=16,
        linestyle="",
        label="goal",
    )
    learned = ~hidden & (q.min(axis=1) < values)
    dark = shown > (np.nanmin(shown) + np.nanmax(shown)) / 2  # arrows are dark on light cells
    on_path = np.isin(np.arange(len(q)), path)
    for cells, color in ((on_path, "red"), (~on_path & dark, "black"), (~on_path & ~dark, "white")):
        cells = np.flatnonzero(cells & learned)
        down, right = 0.6 * MOVES[q[cells].argmax(axis=1)].T
        style = {
            "pivot": "mid",
            "units": "xy",
            "width": 0.09,
            "angles": "xy",
            "scale_units": "xy",
            "scale": 1,
        }
        axes.quiver(columns[cells], rows[cells], right, down, color=color, **style)
    axes.set(title=title, xlabel="column", ylabel="row")
    axes.locator_params(integer=True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=150)


def report(config: Config, runner_state: RunnerState, run_dir: Path) -> None:
    """Draw and print values and path of the median agent; save the snapshots. `runner_state` is [num_seeds, ...]."""
    env, _ = make_env(config)
    q, distances = np.asarray(runner_state.q), env.distances()
    start = env.starts[distances[env.starts].argmax()]  # the farthest from the goal
    paths = [greedy_path(env, each, start) for each in q]
    lengths = [len(path) - 1 for path, reaches_goal in paths if reaches_goal]
    median = np.argsort(q[:, start].max(axis=1), kind="stable")[(len(q) - 1) // 2]
    path, reaches_goal = paths[median]
    title = f"agent {median} (of 0 to {len(q) - 1}), the median of max Q at the start"
    draw_values(env, q[median], path, title, run_dir / "q_values.png")
    spread = f" in {min(lengths)} to {max(lengths)} steps" if lengths else ""
    print(
        f"{len(lengths)} of {len(q)} agents reach the goal greedily{spread}; {distances[start]:.0f} is the least"
    )
    cells = " ".join("({},{})".format(*divmod(cell, env.width)) for cell in path)
    end = f"the goal after {len(path) - 1} steps" if reaches_goal else "not to the goal"
    print(f"greedy path of {title}, {q[median, start].max():.4g}: {cells}, {end}")
    if runner_state.snapshots is not None:
        steps = config.snapshot_interval * np.arange(1, runner_state.snapshots.shape[1] + 1)
        np.savez_compressed(
            run_dir / "snapshots.npz", steps=steps, q=np.asarray(runner_state.snapshots)
        )


# --- environment ---


@pytree
class GridState:
    cell: jax.Array  # row * width + column
    time: jax.Array  # steps in this episode


MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # up, right, down, left, as (row, column)
STEP, GOAL, CLIFF = range(3)  # outcomes of a step


class GridWorld:
    """Cells, walls, a cliff and a goal, behind gymnax's interface; the observation is row * width + column.

    A move into a wall or over the border leaves the agent where it is. The goal ends the episode. The cliff puts the
    agent back to the start or, with `cliff_terminates`, ends the episode.

    The tables `next_cell` and `outcome`, [cells, 4] each, and `starts` define the dynamics.
    """

    def __init__(
        self,
        height,
        width,
        start,
        goal,
        walls=(),
        cliff=(),
        cliff_terminates=False,
        random_starts=False,
    ):
        self.height, self.width, self.cliff_terminates = height, width, cliff_terminates
        is_start, is_goal, self.walls, self.cliff = np.zeros((4, height * width), bool)
        places = {"start": ([start], is_start), "goal": ([goal], is_goal)}
        places |= {"walls": (walls, self.walls), "cliff": (cliff, self.cliff)}
        for name, (cells, mask) in places.items():
            for row, column in cells:
                if not (0 <= row < height and 0 <= column < width):
                    raise ValueError(
                        f"{name}: {row} {column} is outside the grid of {height} x {width} cells"
                    )
                mask[row * width + column] = True
        self.goal = is_goal.argmax()
        self.next_cell, self.outcome = self.make_table(is_start.argmax())
        free = ~(self.walls | self.cliff | is_goal) & np.isfinite(self.distances())
        self.starts = np.flatnonzero(free if random_starts else free & is_start)
        if not len(self.starts):
            raise ValueError(
                f"start = {start}: must be a free cell that goal = {goal} can be reached from"
            )

    def make_table(self, start):
        """The next cell and the outcome of each action in each cell: [cells, 4] each."""
        cells = np.arange(self.height * self.width)
        rows, columns = (np.stack(np.divmod(cells, self.width), axis=1)[:, None] + MOVES).transpose(
            2, 0, 1
        )
        reached = rows.clip(0, self.height - 1) * self.width + columns.clip(0, self.width - 1)
        reached = np.where(self.walls[reached], cells[:, None], reached)
        outcome = np.where(reached == self.goal, GOAL, np.where(self.cliff[reached], CLIFF, STEP))
        if not self.cliff_terminates:
            reached[outcome == CLIFF] = start
        return reached.astype(np.int32), outcome

    def distances(self) -> np.ndarray:
        """Steps from each cell to the goal, inf if it cannot be reached: [cells]."""
        distance = np.full(len(self.next_cell), np.inf)
        while True:
            after = np.where(self.terminated(self.outcome), np.inf, distance[self.next_cell])
            shorter = np.minimum(distance, 1 + np.where(self.outcome == GOAL, 0, after).min(axis=1))
            if (shorter == distance).all():
                return distance
            distance = shorter

    def terminated(self, outcome):
        return (outcome == GOAL) | ((outcome == CLIFF) & self.cliff_terminates)

    def reward(self, outcome, params):
        reward = jnp.where(outcome == GOAL, params.goal_reward, params.cliff_reward)
        return jnp.where(outcome == STEP, params.step_reward, reward).astype(jnp.float32)

    def sample_starts(self, key, shape=()):
        return jnp.asarray(self.starts, jnp.int32)[
            jax.random.randint(key, shape, 0, len(self.starts))
        ]

    def reset(self, key, params):
        state = GridState(cell=self.sample_starts(key), time=jnp.zeros((), jnp.int32))
        return state.cell, state

    def step(self, key, state, action, params):
        cell = jnp.asarray(self.next_cell)[state.cell, action]
        outcome = jnp.asarray(self.outcome)[state.cell, action]
        terminated, truncated = (
            self.terminated(outcome),
            state.time + 1 >= params.max_steps_in_episode,
        )
        done, after = terminated | truncated, GridState(cell=cell, time=state.time + 1)
        after = jax.tree.map(
            lambda start, leaf: jnp.where(done, start, leaf), self.reset(key, params)[1], after
        )
        return (
            after.cell,
            after,
            self.reward(outcome, params),
            terminated,
            truncated,
            {"final_observation": cell},
        )

    def observation_space(self, params):
        return spaces.Discrete(len(self.next_cell))

    def action_space(self, params):
        return spaces.Discrete(len(MOVES))


def make_env(config: Config):
    """`(env, env_params)`: gymnax's interface; rewards and time limit come from the config."""
    fields = (
        "height",
        "width",
        "start",
        "goal",
        "walls",
        "cliff",
        "cliff_terminates",
        "random_starts",
    )
    return GridWorld(**{name: getattr(config, name) for name in fields}), config


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
