"""Training of a slice of runs from its last checkpoint to its end."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import onejit.engine.devices  # noqa: F401 - before JAX starts
from onejit.base import statistics
from onejit.base.signals import Stopped, ending_at_once
from onejit.engine.carry import Carry, Evaluations
from onejit.engine.checkpoints import newest, restore, save
from onejit.engine.hosts import agree, fetch, is_first, latest, only_first
from onejit.engine.progress import count_restored
from onejit.envs import host
from onejit.script.steps import steps_of

KEY = 2**31 + 4  # what the key of new episodes is folded from: no training uses it

EPISODE_FIELDS = (
    "obs",
    "env_state",
    "discounted_return",
    "noise",
    "noise_steps_left",
    "tail",
    "first",
    "memory",
    "game_state",
    "matches",
)


@dataclasses.dataclass(kw_only=True)
class Slice:
    """Some of all runs, which train in one program. The last run fills up the program."""

    config: Any
    runs: range
    numbers: np.ndarray  # of the runs, with those that fill up: [size]
    key_data: np.ndarray  # of their random keys: [size, words]
    folder: Path  # of their checkpoints
    last_update: int  # the update after which it ends
    floats: dict[str, Any] = dataclasses.field(default_factory=dict)  # {field: [size]} of a sweep
    first_update: int = 0
    # (program) -> carry after `first_update`; None for the script's `init`
    start: Callable[[Any], Carry] | None = None
    save_last: bool = False  # write a checkpoint at the end, too

    @property
    def steps(self) -> int:
        """Environment steps of all runs in an update."""
        return len(self.runs) * steps_of(self.config)


def runs_of_slice(first: int, size: int, total: int) -> tuple[range, np.ndarray]:
    """The runs of a slice of `total` runs, and their numbers with those that fill it up."""
    numbers = np.minimum(np.arange(first, first + size), total - 1)
    return range(first, min(first + size, total)), numbers


@dataclasses.dataclass(kw_only=True)
class Session:
    """What the slices that a command trains have in common."""

    record: Any  # of run.json: `steps_done`, `seconds` and `not_finite_at_start` are kept here
    write_record: Callable[[], None]
    progress: Any
    caught: Sequence[int]  # receives the signals that end the training
    # (slice, first, last, metrics, returns) -> note for the progress bar, about once in a second
    # after the updates [first, last): their metrics {name: [size, last - first]}, and the returns
    # [size, episodes] of an evaluation after them, if there was one; in process 0
    watch: Callable[..., str]
    checkpoint_interval: float = 60.0  # seconds between checkpoints; 0 for none
    eval_interval: int = 0  # updates between evaluations; 0 for none
    if_stopped: str = ""  # the last words if a signal ends the evaluation after the training

    def count(self, steps: int, restored: bool = False) -> None:
        """Count environment steps, including the steps of earlier sessions."""
        self.record.steps_done += steps
        if restored:
            count_restored(self.progress, steps)
        elif is_first():
            self.progress.update(steps)


class Trained(NamedTuple):
    """What the training of some runs has made, in NumPy arrays [runs, ...] on all processes."""

    metrics: dict  # {name: [runs, updates]}
    agent: dict
    final_return: np.ndarray  # [runs]
    evaluation: np.ndarray | None = None  # returns of greedy episodes at the end: [runs, episodes]
    evaluations: Evaluations | None = None  # during training


def seed_keys(options) -> np.ndarray:
    """The data of the agents' random keys, the same keys as in `main`: [num_seeds, words]."""
    keys = jax.random.split(jax.random.key(options.seed), options.num_seeds)
    return np.asarray(jax.random.key_data(keys))


def holds(tree, kind: type) -> bool:
    """Whether a part of a tree is of this class."""

    def is_kind(node):
        return isinstance(node, kind)

    return any(is_kind(node) for node in jax.tree.leaves(tree, is_leaf=is_kind))


def episode_fields(runner_state) -> tuple[str, ...]:
    """The fields of a runner state that begin anew with an episode.

    A script's own attribute `episode_fields` wins.
    """
    present = tuple(name for name in EPISODE_FIELDS if hasattr(runner_state, name))
    return getattr(runner_state, "episode_fields", present)


def running_episodes(runner_state) -> tuple:
    """`(total, number)` [runs] of the returns so far of running episodes, by LogWrapper's state.

    Only an episode that is already longer than the last one that ended counts, and every one of an
    agent that has ended none: an agent that never fails would otherwise have no return. This is
    biased upwards, because it leaves out young episodes. Both are 0 without LogWrapper.
    """

    def is_log(node):
        return hasattr(node, "episode_returns") and hasattr(node, "returned_episode_lengths")

    nodes = jax.tree.leaves(runner_state, is_leaf=is_log)
    num_runs = len(jax.tree.leaves(runner_state.agent)[0])
    for log in filter(is_log, nodes):
        length = log.episode_lengths.reshape(num_runs, -1)  # [runs, num_envs]
        ended = log.returned_episode_lengths.reshape(num_runs, -1)  # 0 before the first end
        since_end = jnp.where(ended > 0, length, jnp.iinfo(jnp.int32).max)
        last = since_end.argmin(axis=1, keepdims=True)
        last_length = jnp.take_along_axis(ended, last, axis=1)
        counts = length > last_length
        returns = log.episode_returns.reshape(num_runs, -1)
        return jnp.where(counts, returns, 0.0).sum(axis=1), counts.sum(axis=1)
    return jnp.zeros(num_runs), jnp.zeros(num_runs, jnp.int32)


def not_finite_leaves(agents) -> list[str]:
    """Dotted names of the leaves [runs, ...] with values that are not finite."""
    leaves = statistics.named_leaves(agents)
    is_finite = {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}
    return [name for name in leaves if not is_finite[name]]


def with_new_episodes(program, runner_state, floats, key_data, done: int):
    """A restored runner state whose environments start new episodes.

    No checkpoint holds the state of environments outside JAX.
    """
    if is_first():
        print(
            "resume: note: checkpoints do not contain the state of environments outside of JAX; "
            "new episodes begin",
            file=sys.stderr,
        )
    keys = jax.random.wrap_key_data(jnp.asarray(key_data))
    keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, KEY), done))(keys)
    new_key_data = np.asarray(jax.random.key_data(keys))
    new = program.start(floats, jax.device_put(new_key_data, program.sharding)).runner_state
    names = episode_fields(runner_state)
    return runner_state._replace(**{name: getattr(new, name) for name in names})


def make_reader(program):
    """`read(metrics, first, last) -> {name: [size, last - first]}`.

    The result has NumPy arrays on all processes.
    """

    @partial(jax.jit, static_argnums=2, out_shardings=program.axis.replicated)
    def window(metrics, first, width):
        def columns(values):
            return jax.lax.dynamic_slice_in_dim(values, first, width, axis=1)

        return {name: columns(values) for name, values in metrics.items()}

    def read(metrics, first, last):
        width = 1 << (last - first - 1).bit_length()  # few widths, few compilations
        width = min(program.num_updates, width)
        first_read = min(first, program.num_updates - width)
        part = {}
        for name, values in window(metrics, first_read, width).items():
            part[name] = np.asarray(values)[:, first - first_read : last - first_read]
        return part

    return read


def restore_or_start(
    program, piece: Slice, session: Session, floats: dict, done: int, end: int
) -> tuple[Carry, int]:
    """The carry from the checkpoint after `done` updates, or as the slice starts, and its updates.

    Environments outside of JAX begin new episodes, unless `end` updates are done.
    """
    host.close_all()  # left by an earlier slice
    if done:
        carry = restore(piece.folder, done, program)
    elif piece.start is not None:
        carry = piece.start(program)
        done = piece.first_update
    else:
        carry = program.start(floats, jax.device_put(piece.key_data, program.sharding))
        known = session.record.not_finite_at_start
        names = not_finite_leaves(carry.runner_state.agent)
        known += [name for name in names if name not in known]
    if 0 < done < end and holds(program.abstract.runner_state, host.HostState):
        state = with_new_episodes(program, carry.runner_state, floats, piece.key_data, done)
        carry = carry._replace(runner_state=state)
    return carry, done


def length_of_next_chunk(chunk: int, took: float) -> int:
    """The number of updates that take about a second, at most eight times as many as before.

    The factor is a power of two: see `make_reader`.
    """
    exponent = round(math.log2(min(8.0, 1.0 / took)))
    return max(1, int(chunk * 2.0**exponent))


def end_of_chunk(done: int, chunk: int, end: int, eval_interval: int) -> int:
    """The update after which a chunk ends: no evaluation lies within it."""
    last = min(done + chunk, end)
    if eval_interval:
        last = min(last, (done // eval_interval + 1) * eval_interval)
    return last


def evaluate(program, piece: Slice, carry: Carry):
    """Returns [size, episodes] of greedy episodes."""
    numbers = jax.device_put(piece.numbers.astype(np.int32), program.sharding)
    return program.evaluate(carry.runner_state.agent, numbers)


def train(program, piece: Slice, session: Session, done: int) -> Carry:
    """Train a slice from its checkpoint after `done` updates, or from its start. Returns its carry.

    Process 0 decides when a checkpoint is written, because clocks differ. A signal ends training
    with a checkpoint and raises `Stopped`.
    """
    floats = {}
    for name, values in piece.floats.items():
        floats[name] = jax.device_put(np.asarray(values, np.float32), program.sharding)

    end = piece.last_update
    seconds = session.record.seconds
    left_out = session.record.not_finite_at_start
    carry, done = restore_or_start(program, piece, session, floats, done, end)
    read = make_reader(program)
    chunk = 1
    saved_at = time.perf_counter()
    session.progress.unpause()
    while done < end:
        begun = time.perf_counter()
        last = end_of_chunk(done, chunk, end, session.eval_interval)
        length = last - done
        evaluations = carry.evaluations
        carry = program.advance(carry._replace(evaluations=None), floats, done, last)
        carry = jax.block_until_ready(carry)
        metrics = read(carry.metrics, done, last)
        ended = time.perf_counter()
        returns = None
        if session.eval_interval and last % session.eval_interval == 0:
            index = last // session.eval_interval - 1
            returns = evaluate(program, piece, carry)
            agents = carry.runner_state.agent
            evaluations = program.remember(evaluations, agents, returns, index, tuple(left_out))
        carry = carry._replace(evaluations=evaluations)
        seconds["train"] += ended - begun
        seconds["evaluate"] += time.perf_counter() - ended
        session.count(length * piece.steps)
        if is_first():
            note = session.watch(piece, done, last, metrics, returns)
            session.progress.set_postfix_str(note, refresh=False)

        done = last
        now = time.perf_counter()
        stop = latest(session.caught)
        is_time = stop > 0 or 0 < session.checkpoint_interval <= now - saved_at
        due = piece.save_last if done == end else is_time
        chunk, due = agree([length_of_next_chunk(length, ended - begun), due])
        if due:
            save(piece.folder, done, carry)
            if is_first():
                session.write_record()
            saved_at = time.perf_counter()
        if stop and done < end:
            raise Stopped(stop)
    return carry


def run(program, piece: Slice, session: Session) -> tuple[Trained, Any]:
    """Train and evaluate a slice, whose last checkpoint is continued.

    Returns what it made, and the runner state on its devices.
    """
    done = only_first(newest, piece.folder)
    if done:
        session.count((done - piece.first_update) * piece.steps, restored=True)
    if done and is_first():
        which = f"runs {piece.runs.start} to {piece.runs.stop - 1}"
        note = f"resume: {which}: {done} of {piece.last_update} updates are done"
        session.progress.write(note, file=sys.stderr)
    carry = train(program, piece, session, done)

    number = len(piece.runs)
    state = carry.runner_state
    arrays = carry.metrics, state.agent, carry.evaluations, jax.jit(running_episodes)(state)
    arrays = jax.tree.map(lambda leaf: leaf[:number], fetch(arrays))
    metrics, agent, evaluations, running = arrays
    metrics = {name: values[:, : piece.last_update] for name, values in metrics.items()}
    trained = Trained(
        metrics=metrics,
        agent=agent,
        final_return=statistics.final_return(metrics, piece.config.num_updates, running),
        evaluations=evaluations,
    )
    if program.evaluate is not None:
        stop = latest(session.caught)  # the last checkpoint is written, and this may take long
        if stop:
            raise Stopped(stop)
        begun = time.perf_counter()
        with ending_at_once(session.if_stopped):
            returns = np.asarray(evaluate(program, piece, carry))
        session.record.seconds["evaluate"] += time.perf_counter() - begun
        trained = trained._replace(evaluation=returns[:number])
    return trained, state
