"""The loop of a training by hand: a program that counts its updates, on a clock of its own."""

import signal
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.wrappers.purerl import LogEnvState

from onejit.base.signals import Stopped
from onejit.engine import loop, progress
from onejit.engine.axis import Axis
from onejit.engine.carry import Carry, Evaluations
from onejit.engine.compilation import Program

NUM_UPDATES = 40
NAMES = ("count", "episodes", "episodic_return")  # of the metrics
SECONDS = {"update": 0.25, "evaluate": 5.0, "save": 100.0}


class State(NamedTuple):
    count: jax.Array
    env_state: Any = ()

    @property
    def agent(self):
        return {"count": self.count}


CONFIG = SimpleNamespace(num_envs=1, num_steps=1, num_updates=NUM_UPDATES)


def slice_in(folder, **settings) -> loop.Slice:
    """Two runs."""
    keys = np.zeros((2, 2), np.uint32)
    settings = {"runs": range(2), "numbers": np.arange(2), "last_update": NUM_UPDATES} | settings
    return loop.Slice(config=CONFIG, key_data=keys, folder=folder, **settings)


class Log:
    """A session that writes down what the loop does."""

    def __init__(self, clock, **settings):
        self.now = clock
        self.chunks = []
        self.evaluations = {}
        self.saved = []
        self.record = SimpleNamespace(
            steps_done=0, seconds=defaultdict(float), not_finite_at_start=[]
        )
        self.session = loop.Session(
            record=self.record,
            write_record=self.write_record,
            progress=progress.progress_bar(2 * NUM_UPDATES, disable=False),
            **{"caught": [], "watch": self.watch} | settings,
        )

    def watch(self, piece, first, last, metrics, returns):
        np.testing.assert_array_equal(metrics["count"], [range(first, last)] * 2)
        assert self.record.steps_done == 2 * last
        self.chunks.append((first, last))
        if returns is not None:
            self.evaluations[last] = returns.tolist()
        return ""

    def write_record(self):
        self.saved.append(self.chunks[-1][1])
        self.now["time"] += SECONDS["save"]


@pytest.fixture
def clock(monkeypatch):
    now = {"time": 0.0}
    fake = SimpleNamespace(perf_counter=lambda: now["time"])
    monkeypatch.setattr("onejit.engine.loop.time", fake)
    monkeypatch.setattr("tqdm.std.time", lambda: now["time"])
    return now


def program_of(clock) -> Program:
    carry = Carry(
        runner_state=State(jnp.zeros(2)),
        metrics=dict.fromkeys(NAMES, jnp.zeros((2, NUM_UPDATES))),
        evaluations=Evaluations(
            returns=jnp.zeros((2, NUM_UPDATES)), best_return=jnp.zeros(2), best_agent={}
        ),
    )

    def advance(carry, floats, first, last):
        clock["time"] += SECONDS["update"] * (last - first)
        counts = jnp.arange(first, last, dtype=float)
        metrics = {}
        for name, values in carry.metrics.items():
            metrics[name] = values.at[:, first:last].set(counts)
        count = carry.runner_state.count + (last - first) * floats.get("lr", 1.0)
        return Carry(State(count), metrics)

    def evaluate(agents, numbers):
        assert numbers.tolist() == [0, 1]
        clock["time"] += SECONDS["evaluate"]
        return 10.0 * agents["count"][:, None]

    def remember(evaluations, agents, returns, index, left_out):
        np.testing.assert_array_equal(returns[:, 0], 10.0 * agents["count"])
        return evaluations._replace(returns=evaluations.returns.at[:, index].set(returns[:, 0]))

    return Program(
        axis=Axis(2, num_devices=1, sharding=None, replicated=None),
        num_updates=NUM_UPDATES,
        bytes=0,
        held=0,
        abstract=jax.tree.map(abstract_of, carry),
        start=lambda floats, key_data: carry,
        advance=advance,
        evaluate=evaluate,
        remember=remember,
    )


def abstract_of(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def test_evaluations_end_chunks_and_have_their_own_time(clock, tmp_path):
    log = Log(clock, eval_interval=15)
    trained, _ = loop.run(program_of(clock), slice_in(tmp_path), log.session)
    ends = [1, 5, 9, 13, 15, 19, 23, 27, 30, 33, 36, 39, 40]  # about a second apart
    assert log.chunks == list(zip([0, *ends], ends, strict=False))
    assert log.evaluations == {15: [[150.0]] * 2, 30: [[300.0]] * 2}
    np.testing.assert_array_equal(trained.evaluations.returns[0, :3], [150.0, 300.0, 0.0])
    np.testing.assert_array_equal(trained.evaluation, [[400.0]] * 2)
    np.testing.assert_array_equal(trained.agent["count"], [40.0] * 2)
    assert log.record.seconds["train"] == NUM_UPDATES * SECONDS["update"]
    assert log.record.seconds["evaluate"] == 3 * SECONDS["evaluate"]


def test_runs_that_fill_up_a_slice_are_left_out(clock, tmp_path):
    runs, numbers = loop.runs_of_slice(2, 2, 3)
    assert runs == range(2, 3) and numbers.tolist() == [2, 2]
    piece = slice_in(tmp_path, runs=range(1), last_update=30)
    program = program_of(clock)._replace(evaluate=None)
    log = Log(clock, watch=lambda *_: "")
    trained, _ = loop.run(program, piece, log.session)
    assert trained.metrics["count"].shape == (1, 30) and trained.final_return.shape == (1,)
    assert log.record.steps_done == 30 and trained.agent["count"].shape == (1,)


def test_checkpoints_are_written_after_their_interval_and_continued(clock, tmp_path):
    log = Log(clock, checkpoint_interval=3.0)
    loop.run(program_of(clock), slice_in(tmp_path, last_update=30, save_last=True), log.session)
    assert log.saved == [13, 25, 30]  # 3 seconds of training each; writing does not count
    log = Log(clock, checkpoint_interval=0)
    clock["time"] += 1000.0  # compiling, which is no part of the speed
    _, state = loop.run(program_of(clock), slice_in(tmp_path), log.session)
    bar = log.session.progress
    elapsed = 10 * SECONDS["update"] + SECONDS["evaluate"]
    assert (bar.n, bar.initial, bar.format_dict["elapsed"]) == (80, 60, elapsed)
    assert log.chunks[0][0] == 30 and log.chunks[-1][1] == NUM_UPDATES and not log.saved
    np.testing.assert_array_equal(state.count, [NUM_UPDATES] * 2)


def test_a_signal_ends_training_after_the_chunk_with_a_checkpoint(clock, tmp_path):
    log = Log(clock, checkpoint_interval=0, caught=[signal.SIGTERM])
    with pytest.raises(Stopped, match="SIGTERM"):
        loop.run(program_of(clock), slice_in(tmp_path), log.session)
    assert log.chunks == [(0, 1)] and log.saved == [1]


@pytest.mark.parametrize("took, length", [(1.0, 16), (0.5, 32), (4.0, 4), (1e-6, 128), (1e6, 1)])
def test_a_chunk_takes_about_a_second(took, length):
    assert loop.length_of_next_chunk(16, took) == length


def test_running_episodes_by_hand():
    """Those that are longer than the last one that ended: of the environment that began last.

    All of an agent that has ended none.
    """
    log = LogEnvState(
        env_state=jnp.zeros((4, 3)),
        episode_returns=jnp.array([[9.0, 8, 1], [9, 8, 1], [5, 6, 7], [5, 6, 2]]),
        episode_lengths=jnp.array([[9, 8, 1], [9, 8, 1], [5, 6, 7], [5, 6, 2]]),
        returned_episode_returns=jnp.zeros((4, 3)),
        returned_episode_lengths=jnp.array([[3, 3, 7], [3, 3, 8], [0, 0, 0], [0, 0, 5]]),
        returned_episode_valid=jnp.zeros((4, 3), bool),
    )
    total, number = loop.running_episodes(State(jnp.zeros(4), log))
    assert total.tolist() == [17.0, 9.0, 18.0, 6.0] and number.tolist() == [2, 1, 3, 1]
