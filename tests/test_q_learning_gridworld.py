"""The GridWorld, its training table and tabular Q-learning, against a plain Python model of both."""

import dataclasses
import itertools
import math

import gymnax.wrappers
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import tyro
from support.compilation import jit_quickly
from support.files import ROOT

import q_learning_gridworld as script

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
each_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)


def read_config(name):
    """Of a file of configs/, as the command line reads it."""
    words = script.read_flags(
        ["--config", str(ROOT / "configs" / "q_learning_gridworld" / f"{name}.yaml")]
    )
    return tyro.cli(tyro.conf.FlagConversionOff[script.Config], args=words)


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


def every_cell_and_action(env):
    cells, actions = np.divmod(np.arange(env.next_cell.size), 4)
    return cells.astype(np.int32), actions.astype(np.int32)


# --- the environment ---


@each_grid
def test_every_transition(grid):
    """The limit is 10 steps: the last of these times is truncated, also where the step terminates."""
    env, params = script.make_env(make_config(grid, max_steps_in_episode=10))
    cells, actions = (np.repeat(each, 3) for each in every_cell_and_action(env))
    times = np.tile(np.array([0, 8, 9], np.int32), len(cells) // 3)
    keys = jax.random.split(jax.random.key(0), len(cells))
    step = jit_quickly(jax.vmap(env.step, (0, 0, 0, None)))
    made = jax.device_get(step(keys, script.GridState(cells, times), actions, params))
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


@pytest.mark.parametrize(
    "name, shape, start, goal, distance",
    [("gridworld_8x12", (8, 12), (7, 11), (0, 0), 18), ("cliff", (4, 12), (3, 0), (3, 11), 13)],
)
def test_configured_grids(name, shape, start, goal, distance):
    env, params = script.make_env(read_config(name))
    assert params.max_steps_in_episode == 1000
    obs, state = env.reset(jax.random.key(0), params)
    assert (env.height, env.width) == shape and env.observation_space(params).n == math.prod(shape)
    assert env.action_space(params).n == 4
    assert (
        divmod(int(obs), env.width) == divmod(int(state.cell), env.width) == start
        and state.time == 0
    )
    assert divmod(env.goal, env.width) == goal and env.distances()[obs] == distance


def test_cliff_walking_is_that_of_the_book():
    env, params = script.make_env(read_config("cliff"))
    assert np.flatnonzero(env.cliff).tolist() == list(range(37, 47))
    reward, ends = (
        np.asarray(env.reward(env.outcome, params)),
        np.asarray(env.terminated(env.outcome)),
    )
    assert (env.next_cell[36, 1], reward[36, 1], ends[36, 1]) == (36, -100, False)
    assert (env.next_cell[35, 2], reward[35, 2], ends[35, 2]) == (47, -1, True)
    assert set(np.unique(reward)) == {-100, -1}


def test_distances():
    walls = ((1, 0), (1, 1), (1, 2), (1, 3), (3, 3), (2, 4))
    env, _ = script.make_env(make_config(WALLED | {"walls": walls, "start": (0, 0)}))
    assert env.distances()[:5].tolist() == [
        4,
        3,
        2,
        1,
        1,
    ]  # the goal's own is a step into the border
    assert np.isinf(env.distances()[10:13]).all()


def test_random_starts():
    """Uniform over the free cells that the goal can be reached from, at resets by the environment and in training."""
    config = make_config(
        {"height": 2, "width": 4, "random_starts": True, "goal": (0, 3), "walls": ((0, 1), (1, 0)), "start": (0, 0)},
        max_steps_in_episode=1, num_steps=4000, total_timesteps=4000,
    )  # fmt: skip
    env, params = script.make_env(config)
    free = [2, 5, 6, 7]  # 0 is walled off
    assert env.starts.tolist() == free
    keys = jax.random.split(jax.random.key(0), 4000)
    obs, state = jax.vmap(env.reset, (0, None))(keys, params)
    assert (obs == state.cell).all()
    after = jax.vmap(env.step, (0, 0, None, None))(keys, state, 0, params)[0]
    for cells in (obs, after, env.sample_starts(jax.random.key(1), (4000,))):
        counts = np.bincount(cells, minlength=8)
        assert (
            counts.sum() == counts[free].sum() and scipy.stats.chisquare(counts[free]).pvalue > 1e-3
        )
    init, update = script.make_learner(
        dataclasses.replace(config, gamma=0.0, lr=1.0, q_init=-1.0, epsilon=1.0)
    )
    q = jit_quickly(update)(init(jax.random.key(0)))[0].q
    visited = (q != -1).any(axis=1)  # every step is an episode of its own
    assert np.flatnonzero(visited).tolist() == free


def test_gymnax_wrappers_take_it():
    env, params = script.make_env(make_config(WALLED, max_steps_in_episode=3))
    env = gymnax.wrappers.LogWrapper(env)
    _, state = env.reset(jax.random.key(0), params)
    for _ in range(3):
        *_, info = env.step(jax.random.key(0), state, 0, params)
        _, state, *_ = env.step(jax.random.key(0), state, 0, params)
    assert info["returned_episode"] and info["returned_episode_lengths"] == 3
    assert info["returned_episode_returns"] == -1.5


OUTSIDE, TAKEN = "outside the grid of 8 x 12", "must be a free cell that goal = "
WRONG = [
    ("start: 8 0", {"start": (8, 0)}, OUTSIDE),
    ("start: 0 12", {"start": (0, 12)}, OUTSIDE),
    ("start: -1 0", {"start": (-1, 0)}, OUTSIDE),
    ("goal: 0 99", {"goal": (0, 99)}, OUTSIDE),
    ("walls: 0 99", {"walls": ((1, 1), (0, 99))}, OUTSIDE),
    ("cliff: 99 0", {"cliff": ((99, 0),)}, OUTSIDE),
    ("start = (1, 1)", {"start": (1, 1), "walls": ((1, 1),)}, TAKEN),
    ("start = (1, 1)", {"start": (1, 1), "cliff": ((1, 1),)}, TAKEN),
    ("start = (0, 0)", {"start": (0, 0)}, TAKEN),
    ("goal = (1, 1)", {"goal": (1, 1), "walls": ((1, 1),)}, "reached"),
    ("goal = (0, 0)", {"walls": ((0, 1), (1, 0))}, "reached"),
    ("goal = (0, 0)", {"walls": ((0, 1), (1, 0)), "random_starts": True}, "reached"),
    ("goal = (0, 0)", {"random_starts": True, "height": 1, "width": 1, "start": (0, 0)}, "reached"),
    ("height", {"height": 0}, "at least 1"),
    ("width", {"width": -1}, "at least 1"),
    ("max_steps_in_episode", {"max_steps_in_episode": 0}, "at least 1"),
    ("num_steps", {"num_steps": 0}, "at least 1"),
    (
        "snapshot_interval = 1500",
        {"snapshot_interval": 1500, "num_steps": 1000, "total_timesteps": 3000},
        "multiple",
    ),
    ("snapshot_interval = -1000", {"snapshot_interval": -1000}, "multiple"),
    ("total_timesteps = 999", {"total_timesteps": 999, "num_steps": 1000}, "one update takes 1000"),
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


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_frequencies_of_actions(epsilon):
    """For every set of actions that are equally good, those of epsilon-greedy with uniformly random ties."""
    drawn = script.draw(jax.random.key(3), 120_000, epsilon)
    choose = jit_quickly(jax.vmap(script.epsilon_greedy, (None, 0, 0)))
    for tied in TIED:
        values = np.full(4, -2.0, np.float32)
        values[tied] = -1.0
        counts = np.bincount(choose(values, *drawn), minlength=4)
        expected = np.full(4, epsilon / 4)
        expected[tied] += (1 - epsilon) / len(tied)
        assert (counts[expected == 0] == 0).all()
        possible = expected > 0
        if possible.sum() > 1:
            assert (
                scipy.stats.chisquare(counts[possible], 120_000 * expected[possible]).pvalue > 1e-4
            ), tied


def test_draws_are_independent_of_each_other():
    explores, number = map(np.asarray, script.draw(jax.random.key(4), 120_000, 0.25))
    assert set(explores) == {False, True} and set(number) == set(range(12))
    table = np.stack(
        [np.bincount(number[explores == value], minlength=12) for value in (False, True)]
    )
    assert (
        scipy.stats.chi2_contingency(table).pvalue > 1e-3
    )  # exploring tells nothing of the number
    after = np.histogram2d(number[:-1], number[1:], bins=12)[0]
    assert scipy.stats.chi2_contingency(after).pvalue > 1e-3  # nor a step of the next


def test_epsilon_is_met_to_2_to_the_minus_16():
    for epsilon in (-0.5, 0.0, 2**-16, 0.1, 1.0, 2.0):
        words = jax.random.bits(jax.random.key(0), (200_000,), jnp.uint32) >> 16
        share = np.asarray(script.draw(jax.random.key(0), 200_000, epsilon)[0]).mean()
        assert share == (np.asarray(words) < round(epsilon * 2**16)).mean(), epsilon


# --- learning ---


@each_grid
def test_one_step_of_learning_for_every_cell_and_action(grid):
    """The training table is the environment's; a terminal step is not bootstrapped, a truncated one is."""
    gamma, lr = 0.8, 0.25
    config = make_config(grid, max_steps_in_episode=10, epsilon=0.0, gamma=gamma, lr=lr)
    init, update = script.make_learner(config)
    env, _ = script.make_env(config)
    cells, actions = (np.repeat(each, 2) for each in every_cell_and_action(env))
    times = np.tile(np.array([0, 9], np.int32), len(cells) // 2)
    q = (
        np.random.default_rng(0).permutation(env.next_cell.size).reshape(-1, 4).astype(np.float32)
    )  # no two equal

    def learn(cell, action, time):
        state = init(jax.random.key(0))
        before = jnp.asarray(q).at[cell, action].set(1000.0)  # the greedy one
        state = state._replace(q=before, env_state=script.GridState(cell, time))
        return before, *update(state)

    before, after, metrics = jax.device_get(jit_quickly(jax.vmap(learn))(cells, actions, times))
    for i, (cell, action, time) in enumerate(zip(cells, actions, times, strict=True)):
        reached, reward, terminated = model(grid, cell, action)
        done = terminated or time == 9
        error = reward + (0 if terminated else gamma * before[i, reached].max()) - 1000
        expected = before[i].copy()
        expected[cell, action] = 1000 + lr * error
        np.testing.assert_allclose(after.q[i], expected, rtol=1e-5)
        assert after.env_state.cell[i] == (env.starts[0] if done else reached)
        assert after.env_state.time[i] == (0 if done else time + 1)
        np.testing.assert_allclose(metrics["td_loss"][i], error**2, rtol=1e-4)
        assert metrics["q_value"][i] == 1000 and metrics["episodes"][i] == done
        if done:
            assert (metrics["episodic_return"][i], metrics["episodic_length"][i]) == (
                reward,
                time + 1,
            )


@each_grid
@pytest.mark.parametrize("num_steps", [6, 40])
def test_training_step_by_step(grid, num_steps):
    """The same numbers drawn, the same learning in a loop: Q and all metrics, over updates that cut episodes in two or
    more, some of which see the end of none."""
    config = make_config(
        grid, num_steps=num_steps, total_timesteps=400, max_steps_in_episode=15, epsilon=0.5
    )
    config = dataclasses.replace(
        config, q_init=0.5, gamma=0.5, lr=0.25
    )  # in which rounding breaks no tie
    init, update = script.make_learner(config)
    state, update = init(jax.random.key(5)), jit_quickly(update)
    q, time, total = np.full(state.q.shape, 0.5), 0, 0.0
    start = cell = int(state.env_state.cell)
    for _ in range(10):
        explores, numbers = script.draw(
            jax.random.split(state.key, 3)[1], num_steps, config.epsilon
        )
        state, metrics = update(state)
        returns, lengths, errors, values = [], [], [], []
        for step in range(num_steps):
            equal = [
                a
                for a in range(4)
                if explores[step] or np.float32(q[cell, a]) == np.float32(q[cell].max())
            ]
            action = equal[int(numbers[step]) % len(equal)]
            after, reward, terminated = model(grid, cell, action)
            errors.append(reward + (0 if terminated else 0.5 * q[after].max()) - q[cell, action])
            values.append(q[cell, action])
            q[cell, action] = np.float32(q[cell, action] + 0.25 * errors[-1])
            time, total, cell = time + 1, total + reward, after
            if terminated or time == 15:
                returns.append(total)
                lengths.append(time)
                cell, time, total = start, 0, 0.0
        np.testing.assert_allclose(state.q, q, rtol=1e-5, atol=1e-6)
        assert (state.env_state.cell, state.env_state.time, metrics["episodes"]) == (
            cell,
            time,
            len(returns),
        )
        expected = {"td_loss": np.square(errors).mean(), "q_value": np.mean(values)}
        expected |= {
            "episodic_return": np.mean(returns or np.nan),
            "episodic_length": np.mean(lengths or np.nan),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        q = np.asarray(state.q, np.float64)  # so that rounding does not add up


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_agents_one_after_the_other_are_those_alone(num_seeds):
    """Under `vmap`, which CPUs do not batch, also with rates of their own; and as GPUs would train them."""
    config = make_config(
        CLIFF | {"random_starts": True}, num_steps=20, total_timesteps=100, epsilon=0.3
    )
    configs = dataclasses.replace(
        config, lr=0.1 + 0.2 * np.arange(num_seeds), goal_reward=1.0 + np.arange(num_seeds)
    )
    keys = jax.random.split(jax.random.key(0), num_seeds)
    axes = jax.tree.map(lambda leaf: 0 if np.ndim(leaf) else None, configs)
    run = jit_quickly(lambda config, key: script.make_train(config)(key))
    together = jax.vmap(run, (axes, 0))(configs, keys)
    for i, key in enumerate(keys):
        lr, goal_reward = float(configs.lr[i]), float(configs.goal_reward[i])
        alone = run(dataclasses.replace(config, lr=lr, goal_reward=goal_reward), key)
        np.testing.assert_allclose(
            together["runner_state"].q[i], alone["runner_state"].q, rtol=1e-5, atol=1e-6
        )
        for name, values in alone["metrics"].items():
            np.testing.assert_allclose(
                together["metrics"][name][i], values, rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("seed", range(4))
def test_q_against_value_iteration(seed):
    """On random grids, every step random: Q of all free cells, though most episodes are cut short by the limit."""
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


@pytest.fixture(scope="module")
def thirty_agents():
    """Trained for 3e5 steps with the published settings, Q kept after each 1e5."""
    config = script.Config(
        total_timesteps=300_000, lr=0.1, gamma=0.9, epsilon=0.1, snapshot_interval=100_000
    )
    return jax.jit(jax.vmap(script.make_train(config)))(jax.random.split(jax.random.key(0), 30))[
        "runner_state"
    ]


@pytest.mark.parametrize(("snapshot", "wanted"), [(0, 27), (2, 30)])
def test_thirty_agents_learn_the_shortest_path(thirty_agents, snapshot, wanted):
    env, _ = script.make_env(script.Config())
    q = np.asarray(thirty_agents.snapshots[:, snapshot])
    paths = [script.greedy_path(env, each, env.starts[0]) for each in q]
    assert sum(reaches_goal and len(path) == 19 for path, reaches_goal in paths) >= wanted
    assert np.median(q[:, env.starts[0]].max(axis=1)) == pytest.approx(0.9**17, rel=0.01)
    assert q.max() <= 1 and q.min() >= 0


def test_snapshots():
    """After each interval, also when update is called by itself; what is left over at the end goes nowhere."""
    config = make_config({}, num_steps=20, total_timesteps=220, snapshot_interval=60, q_init=0.5)
    init, update = script.make_learner(config)
    state, update, kept = init(jax.random.key(0)), jit_quickly(update), []
    for _ in range(11):
        state, _ = update(state)
        kept.append(state.q)
    np.testing.assert_array_equal(state.snapshots, np.stack(kept)[[2, 5, 8]])
    assert (kept[8] != kept[10]).any()
    init, _ = script.make_learner(dataclasses.replace(config, snapshot_interval=0))
    assert init(jax.random.key(0)).snapshots is None


def test_memory_does_not_grow_with_the_number_of_steps():
    def bytes_of(num_updates):
        train = script.make_train(script.Config(total_timesteps=1000 * num_updates))
        memory = jit_quickly(train).lower(jax.random.key(0)).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert (
        bytes_of(1100) - bytes_of(100) <= 1000 * 2 * 5 * 4
    )  # five metrics of four bytes, twice at most


# --- what is shown ---


def runner_state(q):
    return script.RunnerState(
        q=np.asarray(q),
        env_state=None,
        episode_return=None,
        update_count=None,
        snapshots=None,
        key=None,
    )


def test_greedy_path():
    env, _ = script.make_env(make_config(WALLED))
    q = value_iteration(WALLED, 20, 0.9)
    path, reaches_goal = script.greedy_path(env, q, 15)
    assert reaches_goal and (path[0], path[-1], len(path)) == (15, 4, 8)
    assert script.greedy_path(env, np.zeros((20, 4)), 15) == (
        [15, 10, 5, 0],
        False,
    )  # up, and against the border
    env, _ = script.make_env(make_config(CLIFF | {"cliff_terminates": True}))
    assert script.greedy_path(env, np.eye(4)[[1] * 12], 8) == (
        [8, 9],
        False,
    )  # over the cliff is no way to the goal


def test_policy_follows_the_greedy_path():
    config = make_config(WALLED, max_steps_in_episode=20)
    env, params = script.make_env(config)
    start, act = script.make_policy(config)
    agent = runner_state(value_iteration(WALLED, 20, 0.9)).agent
    obs, state = env.reset(jax.random.key(0), params)
    cells, rewards, terminated, memory = [], [], False, start()
    while not terminated:
        cells.append(int(obs))
        action, memory = act(agent, memory, obs)
        obs, state, reward, terminated, _, _ = env.step(jax.random.key(0), state, action, params)
        rewards.append(float(reward))
    path, _ = script.greedy_path(env, agent["q"], 15)
    assert cells == path[:-1] and rewards == [-0.5] * 6 + [1]
    assert act({"q": np.zeros((20, 4))}, memory, obs)[0] == 0  # of equals the first


def test_report(tmp_path, capsys):
    """Three agents: the best, the median and one that knows nothing."""
    best = value_iteration(CLIFF, 12, 0.9)
    script.report(make_config(CLIFF), runner_state([best, np.zeros((12, 4)), best / 2]), tmp_path)
    said = capsys.readouterr().out
    assert "2 of 3 agents reach the goal greedily in 5 to 5 steps; 5 is the least" in said
    assert "greedy path of agent 2 (of 0 to 2)" in said and f"{best[8].max() / 2:.4g}" in said
    assert ": (2,0) (1,0) (1,1) (1,2) (1,3) (2,3), the goal after 5 steps" in said
    assert {path.name for path in tmp_path.iterdir()} == {"q_values.png"}
    picture = matplotlib.image.imread(tmp_path / "q_values.png")[..., :3]
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.1


def test_report_keeps_snapshots_and_says_what_fails(tmp_path, capsys):
    config = make_config(
        WALLED | {"random_starts": True}, num_steps=10, total_timesteps=40, snapshot_interval=20
    )
    state = runner_state(np.zeros((2, 20, 4)))._replace(snapshots=np.ones((2, 2, 20, 4)))
    script.report(config, state, tmp_path)
    assert (
        "0 of 2 agents reach the goal" in (said := capsys.readouterr().out)
        and "not to the goal" in said
    )
    saved = np.load(tmp_path / "snapshots.npz")
    assert saved["steps"].tolist() == [20, 40] and saved["q"].shape == (2, 2, 20, 4)


def test_plain_step_is_the_step_of_training():
    """Greedy steps of a table without equal values, until the goal: the same cells and the same table."""
    config = script.Config(
        epsilon=0.0, num_steps=60, max_steps_in_episode=10**6, total_timesteps=60, lr=0.3
    )
    env, _ = script.make_env(config)
    init, update = script.make_learner(config)
    state = init(jax.random.key(0))
    state = state._replace(q=jax.random.uniform(jax.random.key(1), state.q.shape))
    q, cell, plain = (
        state.q,
        state.env_state.cell,
        jax.jit(lambda *args: script.plain_step(*args, env, config)),
    )
    for key in jax.random.split(jax.random.key(2), config.num_steps):
        q, cell, terminated = plain(q, cell, key)
        cell = jnp.where(terminated, env.starts[0], cell)
    state, _ = jax.jit(update)(state)
    np.testing.assert_allclose(state.q, q, rtol=1e-5)
    assert state.env_state.cell == cell


def test_plain_step_chooses_as_training_does():
    """How often it takes each action, where two are equal and it explores, against all numbers that are drawn."""
    values, epsilon = jnp.array([0.5, 1.0, 1.0, 0.0]), 0.2
    greedy, random = (
        np.bincount(
            [int(script.epsilon_greedy(values, explore, number)) for number in range(12)],
            minlength=4,
        )
        / 12
        for explore in (False, True)
    )
    config = script.Config(
        epsilon=epsilon, height=3, width=3, start=(2, 2), lr=1.0, gamma=0.0, step_reward=-7.0
    )
    env, _ = script.make_env(config)
    q = jnp.tile(values, (9, 1))
    step = jax.vmap(lambda key: script.plain_step(q, 4, key, env, config)[0])
    changed = (step(jax.random.split(jax.random.key(0), 20_000)) != q).any(axis=1)  # [keys, 4]
    np.testing.assert_allclose(
        changed.mean(axis=0), (1 - epsilon) * greedy + epsilon * random, atol=0.015
    )
