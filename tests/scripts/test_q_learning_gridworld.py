"""The GridWorld and tabular Q-learning, against a plain Python model of both."""

import itertools

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import scipy.stats
from support.compilation import jit_quickly

import q_learning_gridworld as script
from onejit.engine.evaluation import policy_of

WALLED = {
    "height": 4,
    "width": 5,
    "start": (3, 0),
    "goal": (0, 4),
    "walls": ((1, 1), (2, 1), (0, 3)),
}
WALLED |= {"step_reward": -0.5}
CLIFF = {
    "height": 3,
    "width": 4,
    "start": (2, 0),
    "goal": (2, 3),
    "cliff": ((2, 1), (2, 2)),
    "cliff_reward": -7.0,
}
GRIDS = {
    "default": {},
    "one row": {"height": 1, "width": 4, "start": (0, 0), "goal": (0, 3), "goal_reward": 2.0},
    "walls": WALLED,
    "cliff": CLIFF | {"walls": ((0, 2),)},
    "cliff that terminates": CLIFF | {"cliff_terminates": True},
}


def make_config(grid, **values):
    return script.Config(**{"num_steps": 1, "total_timesteps": 1} | grid | values)


def model(grid, cell: int, action: int):
    """`(next cell, reward, terminated)`, written from the rules."""
    default = {"height": 8, "width": 12, "start": (7, 11), "goal": (0, 0), "walls": (), "cliff": ()}
    default |= {"step_reward": 0, "goal_reward": 1, "cliff_reward": -100, "cliff_terminates": False}
    grid = default | grid
    row, column = cell // grid["width"], cell % grid["width"]
    to = [row, column]
    if action == 0 and row > 0:
        to = [row - 1, column]
    if action == 1 and column < grid["width"] - 1:
        to = [row, column + 1]
    if action == 2 and row < grid["height"] - 1:
        to = [row + 1, column]
    if action == 3 and column > 0:
        to = [row, column - 1]
    if tuple(to) in grid["walls"]:
        to = [row, column]
    reward, terminated = grid["step_reward"], False
    if tuple(to) == grid["goal"]:
        reward, terminated = grid["goal_reward"], True
    elif tuple(to) in grid["cliff"]:
        reward, terminated = grid["cliff_reward"], grid["cliff_terminates"]
        to = to if terminated else grid["start"]
    return to[0] * grid["width"] + to[1], reward, terminated


def value_iteration(grid, num_cells: int, gamma: float) -> np.ndarray:
    """The optimal Q, [cells, 4], cells in which no action is ever taken included."""
    q = np.zeros((num_cells, 4))
    while True:
        new = np.zeros_like(q)
        for cell, action in itertools.product(range(num_cells), range(4)):
            after, reward, terminated = model(grid, cell, action)
            new[cell, action] = reward + (0 if terminated else gamma * q[after].max())
        if np.abs(new - q).max() < 1e-7:
            return new
        q = new


def steps_to_goal(grid, num_cells: int) -> np.ndarray:
    """The least number of steps from each cell to the goal, inf where there is no way: [cells]."""
    steps = np.full(num_cells, np.inf)
    for _ in range(num_cells):
        for cell, action in itertools.product(range(num_cells), range(4)):
            after, _, terminated = model(grid, cell, action)
            rest = steps[after]
            if terminated:
                rest = 0 if divmod(after, grid["width"]) == grid["goal"] else np.inf
            steps[cell] = min(steps[cell], 1 + rest)
    return steps


def greedy_path(grid, q, start: int) -> list[int]:
    """The cells from `start` on, which ends before it would repeat a cell."""
    path = [start]
    while True:
        cell, _, terminated = model(grid, path[-1], int(q[path[-1]].argmax()))
        if cell in path:
            return path
        path.append(cell)
        if terminated:
            return path


def every_cell_and_action(env):
    cells, actions = np.divmod(np.arange(env.next_cell.size), 4)
    return cells.astype(np.int32), actions.astype(np.int32)


# --- the environment ---


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_transition(grid):
    """The limit is 10 steps: the last of these times is truncated, also if the step terminates."""
    params = make_config(grid, max_steps_in_episode=10)
    env = script.GridWorld(params)
    cells, actions = (np.repeat(each, 3) for each in every_cell_and_action(env))
    times = np.tile(np.array([0, 8, 9], np.int32), len(cells) // 3)
    keys = jax.random.split(jax.random.key(0), len(cells))
    step = jit_quickly(jax.vmap(env.step, (0, 0, 0, None)))
    made = jax.device_get(step(keys, script.GridState(cell=cells, time=times), actions, params))
    obs, after, reward, terminated, truncated, info = made
    for i, (cell, action, time) in enumerate(zip(cells, actions, times, strict=True)):
        expected, expected_reward, ends = model(grid, cell, action)
        done = ends or time == 9
        assert (info["final_observation"][i], reward[i], terminated[i]) == (
            expected,
            expected_reward,
            ends,
        )
        assert (truncated[i], after.time[i]) == (time == 9, 0 if done else time + 1)
        assert obs[i] == after.cell[i] == (env.starts[0] if done else expected)
    assert reward.dtype == jnp.float32 and obs.dtype == jnp.int32


def test_starts_that_reach_the_goal():
    walls = ((1, 0), (1, 1), (1, 2), (1, 3), (3, 3), (2, 4))
    config = make_config(WALLED | {"walls": walls, "start": (0, 0), "random_starts": True})
    env, _ = script.make_env(config)
    assert env.starts.tolist() == [0, 1, 2, 3, 9]  # 4 is the goal
    assert steps_to_goal(vars(config), 20)[env.starts].tolist() == [4, 3, 2, 1, 1]
    for grid in (WALLED, CLIFF | {"walls": ((0, 2),)}, CLIFF | {"cliff_terminates": True}):
        config = make_config(grid | {"random_starts": True})
        env, _ = script.make_env(config)
        reachable = np.isfinite(steps_to_goal(vars(config), env.height * env.width))
        blocked = env.walls | env.cliff | (np.arange(len(env.walls)) == env.goal)
        np.testing.assert_array_equal(env.starts, np.flatnonzero(reachable & ~blocked))


def test_random_starts():
    """Uniform over the free cells that reach the goal, at resets and at the ends of episodes."""
    grid = {"height": 2, "width": 4, "goal": (0, 3), "walls": ((0, 1), (1, 0)), "start": (0, 0)}
    params = make_config(grid, random_starts=True, max_steps_in_episode=1)
    env = script.GridWorld(params)
    free = [2, 5, 6, 7]  # 0 is walled off
    assert env.starts.tolist() == free
    keys = jax.random.split(jax.random.key(0), 4000)
    obs, state = jax.vmap(env.reset, (0, None))(keys, params)
    assert (obs == state.cell).all()
    after = jax.vmap(env.step, (0, 0, None, None))(keys, state, 0, params)[0]
    for cells in (obs, after):
        counts = np.bincount(cells, minlength=8)
        assert (
            counts.sum() == counts[free].sum() and scipy.stats.chisquare(counts[free]).pvalue > 1e-3
        )


OUTSIDE, TAKEN = "must be in the grid of 8 x 12", "must be a free cell that goal = "
WRONG = [
    ("start = 8 0", {"start": (8, 0)}, OUTSIDE),
    ("start = 0 12", {"start": (0, 12)}, OUTSIDE),
    ("start = -1 0", {"start": (-1, 0)}, OUTSIDE),
    ("goal = 0 99", {"goal": (0, 99)}, OUTSIDE),
    ("walls = 0 99", {"walls": ((1, 1), (0, 99))}, OUTSIDE),
    ("cliff = 99 0", {"cliff": ((99, 0),)}, OUTSIDE),
    ("start = (1, 1)", {"start": (1, 1), "walls": ((1, 1),)}, TAKEN),
    ("start = (1, 1)", {"start": (1, 1), "cliff": ((1, 1),)}, TAKEN),
    ("start = (0, 0)", {"start": (0, 0)}, TAKEN),
    # starts are random, but the cliff leads to the wall
    (
        "start = (1, 1)",
        {"start": (1, 1), "walls": ((1, 1),), "cliff": ((2, 2),), "random_starts": True},
        TAKEN,
    ),
    ("goal = (1, 1)", {"goal": (1, 1), "walls": ((1, 1),)}, "reached"),
    ("goal = (0, 0)", {"walls": ((0, 1), (1, 0))}, "reached"),
    ("goal = (0, 0)", {"walls": ((0, 1), (1, 0)), "random_starts": True}, "reached"),
    ("goal = (0, 0)", {"random_starts": True, "height": 1, "width": 1, "start": (0, 0)}, "reached"),
    ("start = 7 11", {"height": 0}, "must be in the grid of 0 x 12"),
    ("max_steps_in_episode = 0", {"max_steps_in_episode": 0}, "at least 1"),
    ("total_timesteps = 999", {"total_timesteps": 999, "num_steps": 1000}, "one update adds 1000"),
]


@pytest.mark.parametrize(
    "name, settings, words", WRONG, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(WRONG)]
)
def test_configs_that_cannot_be(name, settings, words):
    with pytest.raises(ValueError) as error:
        script.make_learner(make_config(settings))
    message = str(error.value)
    assert name in message and words in message and "\n" not in message


# --- the choice of an action ---

TIED = [list(tied) for size in range(1, 5) for tied in itertools.combinations(range(4), size)]


def each_tie():
    """For every set of actions that are equally good: the set, and values."""
    for tied in TIED:
        values = np.full(4, -2.0, np.float32)
        values[tied] = -1.0
        yield tied, values


def test_the_extreme_uniform_numbers():
    for epsilon in (0.0, 0.1, 1.0):
        for tied, values in each_tie():
            possible = range(4) if epsilon else tied
            assert script.epsilon_greedy(values, epsilon, 0.0) == possible[0], (epsilon, tied)
            largest = np.float32(1 - 2**-23)
            assert script.epsilon_greedy(values, epsilon, largest) == possible[-1]


# --- learning ---


@pytest.mark.parametrize("seed", range(2))  # without and with a cliff
def test_q_against_value_iteration(seed):
    """On random grids, every step random: Q of all free cells, though the limit cuts episodes."""
    rng = np.random.default_rng(seed)
    height, width = map(int, rng.integers(3, 7, size=2))
    cells = rng.permutation(height * width).tolist()
    places = [divmod(cell, width) for cell in cells]
    num_walls = height * width // 5
    grid = {
        "height": height,
        "width": width,
        "goal": places[0],
        "start": places[0],
        "random_starts": True,
    }
    grid |= {"walls": tuple(places[1 : 1 + num_walls]), "step_reward": -0.25, "goal_reward": 3.0}
    if seed % 2:
        grid |= {"cliff": tuple(places[-1:]), "cliff_reward": -2.0, "cliff_terminates": True}
    config = script.Config(
        **grid,
        total_timesteps=60_000,
        epsilon=1.0,
        lr=0.5,
        gamma=0.9,
        q_init=5.0,
        max_steps_in_episode=6,
    )
    env, _ = script.make_env(config)
    q = jit_quickly(script.make_train(config))(jax.random.key(seed))["runner_state"].q
    expected = value_iteration(grid, height * width, 0.9)
    assert len(env.starts) > 3
    np.testing.assert_allclose(q[env.starts], expected[env.starts], atol=1e-3)


# --- what is shown ---


def test_policy_follows_the_greedy_path():
    config = make_config(WALLED, max_steps_in_episode=20)
    env, params = script.make_env(config)
    start, act = policy_of(script, config)
    agent = {"q": value_iteration(WALLED, 20, 0.9)}
    obs, state = env.reset(jax.random.key(0), params)
    cells, rewards, terminated, memory = [], [], False, start()
    while not terminated:
        cells.append(int(obs))
        action, memory = act(agent, memory, obs)
        obs, state, reward, terminated, _, _ = env.step(jax.random.key(0), state, action, params)
        rewards.append(float(reward))
    path = greedy_path(WALLED, agent["q"], 15)
    assert cells == path[:-1] and (path[-1], len(path)) == (4, 8)
    assert rewards == [-0.5] * 6 + [1]
    assert act({"q": np.zeros((20, 4))}, memory, obs)[0] == 0  # of equals the first


@pytest.mark.parametrize("name", ["one row", "cliff"])
def test_report(name, tmp_path):
    grid = GRIDS[name]
    config = make_config(grid)
    env, _ = script.make_env(config)
    q = value_iteration(grid, env.height * env.width, 0.9)
    state = script.RunnerState(q=q[None], obs=None, env_state=None, key=None)
    script.report(config, state, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"q_values.png"}
    picture = matplotlib.image.imread(tmp_path / "q_values.png")[..., :3]
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.1
