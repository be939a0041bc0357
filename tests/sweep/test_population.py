"""`onejit sweep --pbt`: who copies whom, the floats, results, resuming; and `--replay`."""

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from support.files import ROOT
from support.returns import is_mean_with_running
from support.sweeps import metrics_of, record_of, rows_of
from support.tiers import slow
from support.trees import assert_same

from onejit import sweep
from onejit.base import statistics
from onejit.engine import compilation, progress
from onejit.script import load
from onejit.sweep import population, population_results
from onejit.sweep.exchange import Exchange, exchange_agents, first_population, own_fields, perturb

SMALL = ["q_learning_gridworld", "--num-steps=200", "--total-timesteps=5400"]  # 27 updates
SMALL += ["--height=4", "--width=6", "--start", "3", "5", "--step-reward=-1"]
SMALL += ["--max-steps-in-episode=50"]
LR = ["--lr", "log-uniform", "0.01", "1"]
GAMMA = ["--gamma", "one-minus-log-uniform", "0.5", "0.99"]
EPSILON = ["--epsilon", "uniform", "0", "1"]
PBT = ["--pbt", "--samples=8", "--exploit-interval=3"]  # 9 stretches
SWEEP = [*SMALL, *LR, *GAMMA, *EPSILON, *PBT, "--num-seeds=2"]
STEPS = 16 * 200  # of all agents in an update
FLOATS = ("lr", "gamma", "epsilon")


def run(words, run_dir: Path) -> Path:
    return sweep.main([*words, f"--run-dir={run_dir}"])


def read_schedule(run_dir: Path) -> dict:
    """{column: [populations, agents, stretches]}."""
    rows = rows_of(run_dir, "schedule.csv")
    columns = {}
    for name in set(rows[0]) - {"population", "agent", "first_update", "last_update"}:
        values = np.array([float(row[name]) for row in rows])
        columns[name] = values.reshape(-1, 9, 8).swapaxes(1, 2)
    return columns


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two populations of eight agents, eight exchanges."""
    return run(SWEEP, tmp_path_factory.mktemp("pbt") / "run")


# --- one exchange ---


class State(NamedTuple):
    """A runner state: arrays [runs, ...]."""

    params: Any
    count: Any
    replay: Any
    obs: Any
    env_state: Any
    empty: Any
    key: Any

    episode_fields = ("obs", "env_state")

    @property
    def agent(self):
        return {"params": self.params}


SIZE = 8
RUNS = 2 * SIZE


EXCHANGE = Exchange(
    size=SIZE,
    interval=3,
    num_stretches=3,
    distributions={"lr": ("log-uniform", 0.01, 1.0)},
    keeps_replay=False,
)
exchange_once = jax.jit(partial(exchange_agents, EXCHANGE))


def make_carry(returns, exchange=EXCHANGE):
    """A carry after 3 updates, in which each agent has ended an episode with its return."""
    keys = jax.random.split(jax.random.key(0), RUNS)
    rows = jnp.arange(RUNS)
    state = State(
        params={"w": rows[:, None] + jnp.arange(4) / 8},
        count=rows,
        replay=(rows % 2 == 0),
        obs=rows.astype(jnp.uint8),
        env_state=jnp.full((RUNS, 3, 2), 1.0) * rows[:, None, None],
        empty=jnp.zeros((RUNS, 0)),
        key=keys,
    )
    episodes = jnp.zeros((RUNS, 9), jnp.int32).at[:, 1].set(1)
    metrics = {
        "episodes": episodes,
        "episodic_return": jnp.full((RUNS, 9), jnp.nan).at[:, 1].set(jnp.asarray(returns)),
        "loss": jnp.zeros((RUNS, 9)),
    }
    floats = {"lr": jnp.linspace(0.1, 0.2, RUNS)}
    remembered = first_population(exchange, floats, jax.random.key_data(keys))
    return {"runner_state": state, "metrics": metrics, "population": remembered}


RETURNS = np.array([3.0, 5, 1, 8, 2, 7, 6, 4, 30, 20, 80, 70, 60, 50, 40, 10])
BEST = [{3, 5}, {10, 11}]  # quarters of the two populations
WORST = [{2, 4}, {15, 9}]


def parents_of(carry, stretch=1) -> np.ndarray:
    """The run that each run copied."""
    first = SIZE * (np.arange(RUNS) // SIZE)
    return first + np.asarray(carry["population"]["parent"])[:, stretch]


def test_worst_quarter_copies_best_quarter():
    before = make_carry(RETURNS)
    after = exchange_once(before, 3)
    parents = parents_of(after)
    for best, worst in zip(BEST, WORST, strict=True):
        assert set(parents[list(worst)]) <= best
    others = sorted(set(range(RUNS)) - WORST[0] - WORST[1])
    assert list(parents[others]) == others
    old = before["runner_state"]
    new = after["runner_state"]
    for name in ("params", "count", "replay", "obs", "env_state", "empty"):
        expected = jax.tree.map(lambda leaf: leaf[parents], getattr(old, name))
        assert_same(getattr(new, name), expected)
    assert_same(new.key, old.key)  # or they would explore alike
    rank = np.asarray(after["population"]["rank"])[:, 0]
    assert list(rank[:SIZE]) == [6, 4, 8, 1, 7, 2, 3, 5]
    assert list(rank[SIZE:]) == [6, 7, 1, 2, 3, 4, 5, 8]
    assert_same(after["population"]["return"][:, 0], jnp.asarray(RETURNS, jnp.float32))


def test_floats_of_children_and_of_others():
    before = make_carry(RETURNS)
    after = exchange_once(before, 3)
    parents = parents_of(after)
    old = np.asarray(before["population"]["floats"]["lr"])
    new = np.asarray(after["population"]["floats"]["lr"])
    changed = new != old
    assert set(np.flatnonzero(changed)) == WORST[0] | WORST[1]
    for child in np.flatnonzero(changed):
        factors = new[child] / old[parents[child]]
        is_multiplied = np.isclose(factors, [0.8, 1.25], rtol=1e-5).any()
        assert is_multiplied or 0.01 <= new[child] <= 1.0
    assert_same(after["population"]["schedule"]["lr"][:, 1], jnp.asarray(new))


def test_end_of_training_changes_nothing_but_ranks():
    before = make_carry(RETURNS)
    metrics = before["metrics"]
    for name in ("episodes", "episodic_return"):  # of the last stretch
        metrics[name] = metrics[name].at[:, 7].set(metrics[name][:, 1])
    after = exchange_once(before, 9)
    assert_same(after["runner_state"], before["runner_state"])
    assert_same(after["population"]["floats"], before["population"]["floats"])
    rank = np.asarray(after["population"]["rank"])
    assert list(rank[:SIZE, 2]) == [6, 4, 8, 1, 7, 2, 3, 5] and not rank[:, :2].any()
    assert_same(after["population"]["parent"], before["population"]["parent"])


def test_agents_that_are_not_finite_come_last():
    """And those without an episode before them. A best quarter without returns has no children."""
    carry = make_carry(RETURNS)
    state = carry["runner_state"]
    metrics = dict(carry["metrics"])
    params = state.params["w"].at[3, 2].set(jnp.nan)  # the best one
    carry["runner_state"] = state._replace(params={"w": params})
    metrics["loss"] = metrics["loss"].at[5, 1].set(jnp.inf)  # the second best
    episodes = metrics["episodes"].at[6].set(0)  # the third
    metrics["episodes"] = episodes.at[SIZE:].set(0).at[12, 5].set(1)  # of a later stretch
    carry["metrics"] = metrics
    after = exchange_once(carry, 3)
    rank = np.asarray(after["population"]["rank"])[:, 0]
    assert sorted(rank[[3, 5]]) == [7, 8] and rank[6] == 6 and rank[7] == 2
    returns = np.asarray(after["population"]["return"])[:, 0]
    assert list(returns[[3, 5]]) == [-np.inf, -np.inf] and np.isnan(returns[6])
    parents = parents_of(after)
    assert set(parents[[3, 5]]) <= {1, 7}
    assert list(parents[SIZE:]) == list(range(SIZE, RUNS))  # nothing to choose by
    floats = [each["population"]["floats"]["lr"][SIZE:] for each in (after, carry)]
    assert_same(*floats)


def test_only_agents_with_a_return_are_copied():
    """Also if the best quarter has others."""
    carry = make_carry(RETURNS)
    episodes = carry["metrics"]["episodes"]
    carry["metrics"]["episodes"] = episodes.at[:SIZE].set(0).at[4, 1].set(1)
    for trial in range(4):
        keys = jax.random.split(jax.random.key(trial), RUNS)
        carry["population"]["key"] = jax.random.key_data(keys)
        parents = parents_of(exchange_once(carry, 3))
        changed = np.flatnonzero(parents[:SIZE] != np.arange(SIZE))
        assert len(changed) == 2 and set(parents[changed]) == {4}


@pytest.mark.slow
def test_kept_replay():
    before = make_carry(RETURNS)
    keeping = jax.jit(partial(exchange_agents, EXCHANGE._replace(keeps_replay=True)))
    after = keeping(before, 3)["runner_state"]
    for name in ("replay", "obs", "env_state"):
        assert_same(getattr(after, name), getattr(before["runner_state"], name))
    assert not np.array_equal(after.count, before["runner_state"].count)


@pytest.mark.slow
def test_episodes_outside_of_jax_are_not_copied():
    from onejit.envs.host.batch import HostState

    rows = jnp.arange(RUNS)
    carry = make_carry(RETURNS)
    host_state = HostState(time=rows, batch=rows, row=rows, steps=rows, seed=rows, action=rows)
    state = carry["runner_state"]._replace(env_state=host_state)
    assert own_fields(state, False) == ("obs", "env_state")
    carry["runner_state"] = state
    after = exchange_once(carry, 3)["runner_state"]
    assert_same(after.env_state, host_state)
    assert_same(after.obs, state.obs)
    assert not np.array_equal(after.count, state.count)


@pytest.mark.parametrize("kind", [slow("uniform"), "one-minus-log-uniform"])
def test_perturbed_floats(kind):
    """0.8 and 1.25 times on the scale of the distribution, or drawn again; within the range."""
    value, low, high = (0.5, -1.0, 2.0) if kind == "uniform" else (0.9, 0.0, 0.999)
    values = jnp.full(4000, value)
    new = np.asarray(perturb(jax.random.key(0), values, kind, low, high))
    scale = 1 - new if kind == "one-minus-log-uniform" else new
    base = 1 - value if kind == "one-minus-log-uniform" else value
    is_down = np.isclose(scale, 0.8 * base, rtol=1e-4)
    is_up = np.isclose(scale, 1.25 * base, rtol=1e-4)
    assert abs(is_down.mean() - 0.375) < 0.04 and abs(is_up.mean() - 0.375) < 0.04
    drawn = new[~is_down & ~is_up]
    assert low <= drawn.min() and drawn.max() <= high
    at_the_end = np.asarray(perturb(jax.random.key(0), jnp.full(100, high), kind, low, high))
    assert (at_the_end <= np.float32(high)).all() and (at_the_end >= np.float32(low)).all()
    assert (at_the_end == np.float32(high)).any()  # clipped


@pytest.mark.slow
def test_an_exchange_copies_a_quarter():
    """Memory: the population, and no more than a copy of a quarter of it."""
    carry = make_carry(RETURNS)
    large = jnp.zeros((RUNS, 100_000))
    carry["runner_state"] = carry["runner_state"]._replace(params={"w": large})
    step = jax.jit(partial(exchange_agents, EXCHANGE), donate_argnums=0)
    stats = step.lower(carry, 3).compile().memory_analysis()
    extra = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert extra < 0.3 * large.nbytes


def test_agents_that_never_fail_keep_their_rank():
    """No episode ends in the second stretch. A return of the stretch before counts, or that of the
    parent, and a long running episode counts by its return so far.
    """
    after = exchange_once(make_carry(RETURNS), 3)
    parents = parents_of(after)
    again = exchange_once(after, 6)
    returns = np.asarray(again["population"]["return"])[:, 1]
    np.testing.assert_array_equal(returns, RETURNS[parents])

    running = jnp.zeros(RUNS).at[0].set(1000.0), jnp.zeros(RUNS, jnp.int32).at[0].set(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onejit.sweep.exchange.running_episodes", lambda state: running)
        last = jax.jit(partial(exchange_agents, EXCHANGE))(after, 6)["population"]
    assert last["return"][0, 1] == 500 and last["rank"][0, 1] == 1


# --- a sweep ---


def total_return_of(metrics, population, agent, first, last) -> tuple[float, int]:
    """The sum of the returns of the episodes that ended in these updates, and their number."""
    total = 0.0
    number = 0
    for update in range(first, last):
        episodes = metrics["episodes"][population, agent, update]
        if episodes:
            total += episodes * metrics["episodic_return"][population, agent, update]
            number += episodes
    return total, number


def test_schedule_agrees_with_metrics(trained):
    """Ranks by the return since the exchange before, quarters, and floats: plain loops."""
    metrics = metrics_of(trained)
    schedule = read_schedule(trained)
    bounds = {"lr": (0.01, 1), "gamma": (0.5, 0.99), "epsilon": (0, 1)}
    num_multiplied = 0
    for p in range(2):
        assert list(schedule["parent"][p, :, 0]) == list(range(8))
        for s in range(9):
            for a in range(8):
                total, number = total_return_of(metrics, p, a, 3 * s, 3 * s + 3)
                assert is_mean_with_running(schedule["return"][p, a, s], total, number)
            order = sorted(range(8), key=lambda a: (-schedule["return"][p, a, s], a))
            assert list(schedule["rank"][p, order, s]) == list(range(1, 9))
            if s == 8:
                break
            for a in range(8):
                parent = int(schedule["parent"][p, a, s + 1])
                if a not in order[-2:]:
                    assert parent == a
                    for name in FLOATS:
                        assert schedule[name][p, a, s + 1] == schedule[name][p, a, s]
                    continue
                assert parent in order[:2]
                for name, (low, high) in bounds.items():
                    new = schedule[name][p, a, s + 1]
                    old = schedule[name][p, parent, s]
                    assert np.float32(low) <= np.float32(new) <= np.float32(high)
                    expected = [np.clip(old * factor, low, high) for factor in (0.8, 1.25)]
                    if name == "gamma":
                        mirrored = [1 - (1 - old) * factor for factor in (0.8, 1.25)]
                        expected = np.clip(mirrored, low, high)
                    num_multiplied += np.isclose(new, expected, rtol=1e-4).any()
    assert 0.6 < num_multiplied / (2 * 8 * 2 * 3) < 0.9
    assert not np.array_equal(schedule["lr"][0, :, 0], schedule["lr"][1, :, 0])


def test_results(trained):
    names = {path.name for path in trained.iterdir()}
    files = {"agents", "best.yaml", "config.yaml", "evaluation.npy", "metrics.npz", "run.json"}
    files |= {"population.png", "results.csv", "schedule.csv", "table.txt", ".lock"}
    assert names == files | {"q_learning_gridworld.py"}
    assert (trained / "population.png").read_bytes().startswith(b"\x89PNG")
    record = record_of(trained)
    assert record["steps_done"] == record["steps_total"] == 27 * STEPS
    schedule = read_schedule(trained)
    last = np.where(schedule["rank"][:, :, -1] == 1, schedule["return"][:, :, -1], -np.inf)
    p, a = np.unravel_index(last.argmax(), last.shape)
    assert record["winner"] == {"population": p, "agent": a}
    best = yaml.safe_load((trained / "best.yaml").read_text())
    assert [best[name] for name in FLOATS] == [schedule[name][p, a, -1] for name in FLOATS]
    evaluation = np.load(trained / "evaluation.npy")
    assert evaluation.shape == (2, 8, 16)
    means = evaluation.mean(axis=(1, 2))
    numbers = record["greedy return"]
    mean, low, high = statistics.student_interval(means)
    assert [numbers["all agents"][name] for name in ("mean", "low", "high")] == [mean, low, high]
    assert numbers["worst"] == evaluation.mean(axis=2).min()
    table = (trained / "table.txt").read_text()
    assert "The column return is biased" in table and "greedy return of all agents" in table
    kept = np.load(trained / "agents" / "best" / "evaluation.npy")
    ranks = schedule["rank"][:, :, -1]
    assert_same(kept, evaluation[np.arange(2), ranks.argmin(axis=1)])


def test_lineage_of_the_winner(trained):
    """The schedule in run.json follows the parents backwards."""
    record = record_of(trained)
    schedule = read_schedule(trained)
    p = record["winner"]["population"]
    agent = record["winner"]["agent"]
    for stretch in range(8, -1, -1):
        for name in FLOATS:
            assert record["schedule"][name][stretch] == schedule[name][p, agent, stretch]
        agent = int(schedule["parent"][p, agent, stretch])
    assert len(record["schedule"]["lr"]) == 9


def test_metrics_of_the_best_agents_are_those_of_their_lineage(trained):
    """An agent that has copied another one does not have that one's past in its slot."""
    schedule = read_schedule(trained)
    populations = np.load(trained / "metrics.npz")
    best = np.load(trained / "agents" / "best" / "metrics.npz")
    has_copied = False
    for p in range(2):
        agent = schedule["rank"][p, :, -1].argmin()
        for stretch in range(8, -1, -1):
            for name in best.files:
                updates = slice(3 * stretch, 3 * stretch + 3)
                wanted = populations[name][p, agent, updates]
                np.testing.assert_array_equal(best[name][p, updates], wanted)
            if stretch:
                parent = int(schedule["parent"][p, agent, stretch])
                has_copied |= parent != agent
                agent = parent
    assert has_copied
    assert record_of(trained / "agents" / "best")["population"] == "the best agents"


def test_progress_shows_the_best_return_so_far():
    bar = progress.Lines(100)
    assert progress.note_of_returns(bar, np.array([np.nan])) == ""
    assert progress.note_of_returns(bar, np.array([1.0, 3.0])) == "return 1 to 3, best 3"
    assert progress.note_of_returns(bar, np.array([np.nan, 2.0])) == "return 2 to 2, best 3"


# --- resuming, slices and devices ---


def assert_same_results(run_dir: Path, other: Path) -> None:
    assert_same(metrics_of(run_dir), metrics_of(other))
    for name in ("results.csv", "schedule.csv", "table.txt", "best.yaml", "evaluation.npy"):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes()
    agent = Path("agents", "best", "agent.safetensors")
    assert (run_dir / agent).read_bytes() == (other / agent).read_bytes()
    names = {path.relative_to(run_dir) for path in run_dir.rglob("*")}
    assert names == {path.relative_to(other) for path in other.rglob("*")}


@pytest.mark.slow
def test_stopped_and_resumed(trained, stop_at, tmp_path):
    stop_at(10 * STEPS)
    with pytest.raises(SystemExit) as stop:
        run(SWEEP, tmp_path / "run")
    assert stop.value.code == 143
    assert record_of(tmp_path / "run")["steps_done"] < 27 * STEPS
    sweep.main(["--resume", tmp_path / "run"])
    assert_same_results(tmp_path / "run", trained)


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 9])
def test_killed_during_an_exchange(trained, tmp_path, monkeypatch, number):
    """Without a last checkpoint. The ninth is the end of training."""
    add_exchange = population.add_exchange
    calls = []

    def add_one_that_is_killed(*args):
        program = add_exchange(*args)

        def exchange(carry, done):
            carry = program.exchange(carry, done)
            calls.append(done)
            if len(calls) == number:
                raise KeyboardInterrupt
            return carry

        return program._replace(exchange=exchange)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(population, "add_exchange", add_one_that_is_killed)
        run([*SWEEP, "--checkpoint-interval=1e-9"], tmp_path / "run")
    assert calls == [3 * (i + 1) for i in range(number)]
    sweep.main(["--resume", tmp_path / "run"])
    assert_same_results(tmp_path / "run", trained)


@pytest.mark.slow
def test_killed_before_results_are_complete(trained, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(population_results, "write_pictures", interrupt)
        run(SWEEP, tmp_path / "run")
    sweep.main(["--resume", tmp_path / "run"])
    assert_same_results(tmp_path / "run", trained)


@pytest.mark.slow
def test_slices_hold_whole_populations(tmp_path, monkeypatch, stop_at):
    """There are three populations in slices of two. The last slice is filled up."""
    monkeypatch.setattr(
        compilation, "largest_slice", lambda compile_size, total, step, _: compile_size(2 * step)
    )
    words = [*SWEEP[:-1], "--num-seeds=3"]
    whole = run(words, tmp_path / "whole")
    assert record_of(whole)["slices"] == [2 * 8]
    stop_at(27 * STEPS)
    with pytest.raises(SystemExit):
        run(words, tmp_path / "run")
    sweep.main(["--resume", tmp_path / "run"])
    assert_same_results(tmp_path / "run", whole)
    # the same populations whatever the slices are
    other = metrics_of(whole)["episodic_return"]
    monkeypatch.undo()
    at_once = metrics_of(run(words, tmp_path / "at_once"))["episodic_return"]
    np.testing.assert_allclose(other[..., :10], at_once[..., :10], rtol=1e-3)


ONE = [*SWEEP[:-1], "--num-seeds=1"]  # half of the population is on each of two devices


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    return run(ONE, tmp_path_factory.mktemp("one") / "run")


def start(num_devices: int, run_dir: Path, *words) -> subprocess.Popen:
    command = [sys.executable, "-m", "onejit", "sweep", *ONE, f"--run-dir={run_dir}", *words]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def assert_crosses_and_agrees(run_dir: Path, other: Path) -> None:
    """Agents of each half copy agents of the other one, with the numbers of one device."""
    schedule = read_schedule(run_dir)
    is_crossing = (schedule["parent"] < 4) != (np.arange(8) < 4)[None, :, None]
    assert is_crossing.any()
    for name, values in read_schedule(other).items():
        np.testing.assert_allclose(schedule[name], values, rtol=1e-3)


@pytest.mark.slow
def test_two_devices(on_one_device, tmp_path):
    assert start(2, tmp_path / "run").wait() == 0
    assert "2 x cpu" in record_of(tmp_path / "run")["device"]
    assert_crosses_and_agrees(tmp_path / "run", on_one_device)


@pytest.mark.slow
def test_two_processes(on_one_device, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    words = [f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
    processes = [start(1, tmp_path / "run", *words, f"--process-id={i}") for i in range(2)]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert_crosses_and_agrees(tmp_path / "run", on_one_device)


@pytest.mark.slow
def test_many_exchanges(tmp_path):
    """The length of the next chunk must not grow with each exchange, beyond all numbers."""
    words = [SMALL[0], "--num-steps=2", "--total-timesteps=1600", *LR, "--samples=4"]
    words += ["--pbt", "--exploit-interval=1", "--num-seeds=1"]
    assert len(record_of(run(words, tmp_path / "run"))["schedule"]["lr"]) == 800


# --- replay ---


SCHEDULE = {
    "lr": [0.1, 0.9, 0.3, 0.05, 0.5, 0.1, 0.2, 0.3, 0.4],
    "gamma": [0.9, 0.5, 0.95, 0.6, 0.8, 0.9, 0.7, 0.9, 0.6],
    "epsilon": [0.5, 0.1, 0.9, 0.2, 0.3, 0.1, 0.0, 0.1, 0.2],
}


@pytest.fixture(scope="module")
def found(trained, tmp_path_factory):
    """A sweep whose winner has had other floats in each stretch."""
    run_dir = tmp_path_factory.mktemp("found") / "run"
    shutil.copytree(trained, run_dir)
    record = record_of(run_dir) | {"schedule": SCHEDULE}
    (run_dir / "run.json").write_text(json.dumps(record))
    return run_dir


@pytest.fixture(scope="module")
def replayed(found, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("replay") / "run"
    return sweep.main(["--replay", found, "--num-seeds=3", f"--run-dir={run_dir}"])


@pytest.mark.slow
def test_replay_follows_the_schedule(found, replayed):
    """As a plain loop over updates, with the floats of each stretch."""
    script = load.load_script("q_learning_gridworld")
    settings = yaml.safe_load((found / "config.yaml").read_text())
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    key = jax.random.split(jax.random.key(1), 3)[2]  # the sweep's seed + 1

    @jax.jit
    def update(state, floats):
        _, update = script.make_learner(script.Config(**fields | floats))
        return update(state)

    state = script.make_learner(script.Config(**fields))[0](key)
    expected = []
    for i in range(27):
        floats = {name: jnp.float32(values[i // 3]) for name, values in SCHEDULE.items()}
        state, metrics = update(state, floats)
        expected.append(metrics["q_value"])
    run_dir = replayed / "agents" / "replay"
    q_value = np.load(run_dir / "metrics.npz")["q_value"]
    assert q_value.shape == (3, 27)
    np.testing.assert_allclose(q_value[2, :10], expected[:10], rtol=1e-3)
    assert np.load(run_dir / "evaluation.npy").shape == (3, 16)
    record = record_of(replayed)
    assert record["greedy return"]["seeds"] == 3 and record["replay"]["of"] == str(found)
    rows = rows_of(replayed, "schedule.csv")
    assert [float(row["lr"]) for row in rows] == SCHEDULE["lr"]


@pytest.mark.slow
def test_replay_stopped_and_resumed(found, replayed, stop_at, tmp_path):
    stop_at(2 * STEPS)
    words = ["--replay", found, "--num-seeds=3", f"--run-dir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as stop:
        sweep.main(words)
    assert stop.value.code == 143
    sweep.main(["--resume", tmp_path / "run"])
    for name in ("metrics.npz", "agent.safetensors", "evaluation.npy"):
        path = Path("agents", "replay", name)
        assert (tmp_path / "run" / path).read_bytes() == (replayed / path).read_bytes()


def test_replay_refuses(trained, tmp_path, capfd):
    for flag, words in [
        ("--seed=0", "seed = 0: is the sweep's"),
        ("--num-seeds=0", "num_seeds = 0: must be at least 1"),
    ]:
        with pytest.raises(SystemExit) as stop:
            sweep.main(["--replay", trained, f"--run-dir={tmp_path / 'run'}", flag])
        message = capfd.readouterr().err
        assert stop.value.code == 2 and message.count("\n") == 1 and words in message
        assert not (tmp_path / "run").exists()
