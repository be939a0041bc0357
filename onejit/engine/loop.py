"""Training of a slice of runs from its last checkpoint to its end."""

import math
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import onejit.engine.devices  # noqa: F401 - before JAX starts
from onejit.base import statistics
from onejit.base.signals import Stopped
from onejit.engine.checkpoints import open_checkpoints, restore, save
from onejit.engine.hosts import agree, is_first, latest
from onejit.engine.job import Job

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
    # a warm-up would be thrown away
    new = program.restart(floats, jax.device_put(new_key_data, program.sharding))["runner_state"]
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


def restore_or_start(program, job: Job, floats: dict, manager, end: int):
    """`(carry, number of updates done)` from the last checkpoint, or as the job starts.

    Environments outside of JAX begin new episodes, unless `end` updates are done.
    """
    from onejit.envs import host  # not at the top: it starts JAX, which must be after `connect`

    host.close_all()  # left by an earlier slice
    done = agree(manager.latest_step() or 0)  # a shared disk may show files later to some processes
    if done:
        carry = restore(manager, done, program)
    else:
        carry, done = job.start(program, floats)
        if not done:
            names = not_finite_leaves(carry["runner_state"].agent)
            job.not_finite += [name for name in names if name not in job.not_finite]
    if 0 < done < end and holds(program.abstract["runner_state"], host.HostState):
        state = carry["runner_state"]
        carry["runner_state"] = with_new_episodes(program, state, floats, job.key_data, done)
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


def evaluate(program, job: Job, carry: dict, index: int) -> np.ndarray:
    """The returns [size, episodes] of evaluation number `index`, which the carry remembers."""
    returns = job.evaluate(program, carry)
    agents = carry["runner_state"].agent
    left_out = tuple(job.not_finite)
    carry["evaluation"] = program.remember(carry["evaluation"], agents, returns, index, left_out)
    return np.asarray(returns)


def train(program, job: Job, manager):
    """Train a job from its last checkpoint, or from its start, to its end. Returns its carry.

    Process 0 decides when a checkpoint is written, because clocks differ. A signal ends training
    with a checkpoint and raises `Stopped`.
    """
    floats = {}
    for name, values in job.floats.items():
        floats[name] = jax.device_put(np.asarray(values, np.float32), program.sharding)

    end = program.num_updates if job.last_update is None else job.last_update
    carry, done = restore_or_start(program, job, floats, manager, end)
    read = make_reader(program)
    chunk = 1
    saved_at = time.perf_counter()
    job.on_begin()
    while done < end:
        begun = time.perf_counter()
        last = end_of_chunk(done, chunk, end, job.eval_interval)
        length = last - done
        trained = {name: carry[name] for name in ("runner_state", "metrics")}
        carry |= jax.block_until_ready(program.advance(trained, floats, done, last))
        metrics = read(carry["metrics"], done, last)
        ended = time.perf_counter()
        returns = None
        if job.eval_interval and last % job.eval_interval == 0:
            returns = evaluate(program, job, carry, last // job.eval_interval - 1)
        job.clock.train += ended - begun
        job.clock.evaluate += time.perf_counter() - ended
        if is_first():
            job.on_chunk(done, last, metrics, returns)

        done = last
        now = time.perf_counter()
        stop = latest(job.caught)
        is_time = stop > 0 or 0 < job.checkpoint_interval <= now - saved_at
        due = job.save_last if done == end else is_time
        chunk, due = agree([length_of_next_chunk(length, ended - begun), due])
        if due:
            if is_first():
                job.before_save()
            save(manager, done, carry)
            if is_first():
                job.after_save()
            saved_at = time.perf_counter()
        if stop and done < end:
            raise Stopped(stop)
    return carry


def run(program, job: Job):
    """Train a job, whose last checkpoint is continued, and finish it."""
    with open_checkpoints(job.folder) as manager:
        job.open(manager.latest_step() or 0)
        try:
            carry = train(program, job, manager)
        finally:
            job.close()
    return job.finish(program, carry)
