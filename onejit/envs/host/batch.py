"""Environments that run outside JAX, in C++ or Python, stepped from inside a jitted training.

`HostEnv` puts a batched environment behind gymnax's interface. Every `step` is one call on the host
for all environments of all seeds of a device, however `vmap`, `lax.scan` and `shard_map` are
nested. The batched environment itself stays outside: the state in JAX is a ticket that names the
batch, the row and the number of steps taken. The ticket goes through every step, and data
dependence therefore keeps the steps in order.

What is lost: the environments step on the CPU, and their state cannot be saved. A state can be
stepped only once.
"""

import asyncio
import atexit
import contextlib
import functools
import itertools
import queue
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jax.experimental import buffer_callback

from onejit.envs.host import cuda

NO_LIMIT = 100_000  # steps in an episode of an environment that states no time limit


class Batch:
    """A batched environment of n rows on the host. Its methods take and return NumPy arrays.

    `make(seeds, limit, draw=False)` of `HostEnv` returns one. With `draw` it is one row that can be
    drawn.
    """

    first: np.ndarray  # observations after the first reset [n, *obs_shape]

    def step(self, actions):
        """`(obs, reward, terminated, truncated)` of all rows, without any reset."""
        raise NotImplementedError

    def reset_rows(self, rows):
        """Begin a new episode in `rows` [k]. Returns their observations [k, *obs_shape]."""
        raise NotImplementedError

    def frame(self):
        """A picture [H, W, 3] of bytes."""
        raise NotImplementedError

    def close(self):
        """Release processes, threads and memory."""
        raise NotImplementedError


@struct.dataclass
class HostState:
    """A ticket for one row of a batch, and what replaying an episode needs.

    It is no `EnvState` of gymnax: the environment has its own clock, and nothing here sets it.
    """

    time: jax.Array  # steps since the start of the episode
    batch: jax.Array  # number of the batch in this process
    row: jax.Array
    steps: jax.Array  # of the row since it was made
    seed: jax.Array
    action: jax.Array  # of the last step, in the bounds of the environment


@struct.dataclass
class HostParams(environment.EnvParams):
    """gymnax's parameters. Its own default is 1, which scripts refuse as a forgotten limit."""

    max_steps_in_episode: int = NO_LIMIT


class Thread:
    """A thread that calls functions one after the other.

    Much of what environments use belongs to the thread that made it, such as connections of
    sqlite3, loops of asyncio and contexts of OpenGL. JAX calls the host from any thread.
    """

    def __init__(self):
        self.calls = queue.SimpleQueue()
        # not joined at exit: `close_all` comes after that
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        for answer, function, args in iter(self.calls.get, None):
            try:
                answer.put((function(*args), None))
            except BaseException as error:
                answer.put((None, error))
        loop.close()

    def call(self, function, *args, timeout: float | None = None):
        """The function's result, or exception. Raises `queue.Empty` after `timeout` seconds."""
        answer = queue.SimpleQueue()
        self.calls.put((answer, function, args))
        result, error = answer.get(timeout=timeout)
        if error is not None:
            raise error
        return result

    def end(self):
        self.calls.put(None)


class OpenBatch:
    """A batch that is in use, in a thread of its own where the environment wants one."""

    def __init__(self, env, seeds, limit, draw=False):
        self.env = env
        self.seeds = seeds
        self.limit = limit
        self.order = np.arange(len(seeds))
        self.steps = 0
        self.thread = Thread() if env.own_thread else None
        try:
            with _making:  # one device at a time: few libraries expect threads there
                self.batch = self.call(env.make, seeds.tolist(), limit, draw)
        except BaseException:
            self.end_thread()
            raise
        try:
            self.check(self.batch.first)
        except BaseException:
            self.close()
            raise

    def check(self, obs):
        """Raise ValueError if the first observations are not of the observation space."""
        space = self.env.spaces[0]
        is_bytes = space.dtype == np.uint8
        if obs.shape != (len(self.seeds), *space.shape) or (obs.dtype == np.uint8) != is_bytes:
            raise ValueError(
                f"env_name: {len(self.seeds)} observations of the space {space.shape} "
                f"{np.dtype(space.dtype)} have shape {obs.shape} and dtype {obs.dtype}"
            )

    def call(self, function, *args):
        if self.thread is None:
            return function(*args)
        return self.thread.call(function, *args)

    def end_thread(self):
        if self.thread is not None:
            self.thread.end()

    def close(self):
        try:
            if self.thread is None:
                self.batch.close()
            else:
                with contextlib.suppress(queue.Empty):  # it still does a step, which may never end
                    self.thread.call(self.batch.close, timeout=10)
        finally:
            self.end_thread()

    def step(self, actions):
        """`(next_obs, obs, reward, terminated, truncated)`, with `obs` from before any reset."""
        obs, reward, terminated, truncated = end_broken_rows(*self.batch.step(actions))
        next_obs = obs
        ended = np.flatnonzero(np.logical_or(terminated, truncated))
        if ended.size:
            next_obs = obs.copy()
            next_obs[ended] = self.batch.reset_rows(ended)
        return next_obs, obs, reward, terminated, truncated


def end_broken_rows(obs, reward, terminated, truncated):
    """A step that is not finite terminates the episode with reward 0 and an observation of zeros.

    obs: [n, *obs_shape], all others [n].
    """
    is_broken = ~np.isfinite(reward)
    if np.issubdtype(obs.dtype, np.floating):
        is_broken |= ~np.isfinite(obs.reshape(len(obs), -1)).all(axis=1)
    if not is_broken.any():
        return obs, reward, terminated, truncated
    say_once("an environment outside JAX returned a value that is not finite: its episode ends")
    obs = np.array(obs)
    obs[is_broken] = 0
    reward = np.where(is_broken, 0, reward)
    return obs, reward, terminated | is_broken, truncated & ~is_broken


_open: dict[int, OpenBatch] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()
_making = threading.Lock()


def _add(entry: OpenBatch) -> int:
    with _lock:
        number = next(_numbers)
        _open[number] = entry
    return number


def _close(numbers) -> None:
    with contextlib.ExitStack() as closing, _lock:  # closes all, also where one fails
        for number in set(numbers) & set(_open):
            closing.callback(_open.pop(number).close)


def find_batch(batch, steps) -> tuple[int, OpenBatch]:
    """`(number, batch)` of the environments that a step belongs to. Raises ValueError.

    batch, steps: of all rows, of any shape.
    """
    number = int(batch.flat[0])
    opened = _open.get(number)
    if opened is None:
        raise ValueError(
            "these environments are closed, or belong to another process: begin with env.reset"
        )
    if (batch != number).any() or (steps != opened.steps).any():
        raise ValueError(
            "a state of an environment on the host can be stepped once, and with its whole "
            "batch: use jax.lax.scan, because a while_loop under vmap does not step all of them"
        )
    return number, opened


@atexit.register
def close_all() -> None:
    """Close every batch of this process. Earlier states cannot be stepped any more."""
    _close(list(_open))


def call_host(function, shapes, *args):
    """Call `function(out, *args)` on NumPy arrays; it fills `out`.

    It is one call for all axes that `vmap` adds.
    """
    driver = cuda.driver()
    if driver is not None:

        def fill(context, out, *args):
            arrays = driver.read(args, context.stream)
            results = jax.tree.map(lambda buffer: np.empty(buffer.shape, buffer.dtype), out)
            function(results, *arrays)
            driver.write(jax.tree.leaves(out), jax.tree.leaves(results), context.stream)

    elif jax.default_backend() == "cpu":  # 14 us a call, results written in place

        def fill(context, out, *args):
            function(jax.tree.map(np.asarray, out), *map(np.asarray, args))

    else:

        def compute_results(*args):
            args = [np.asarray(arg) for arg in args]
            lead = args[0].shape  # the first argument is a number
            out = jax.tree.map(lambda shape: np.empty(lead + shape.shape, shape.dtype), shapes)
            function(out, *args)
            return out

        return jax.pure_callback(compute_results, shapes, *args, vmap_method="broadcast_all")

    # never left out by XLA, in contrast to jax.pure_callback
    call = buffer_callback.buffer_callback(
        fill, shapes, has_side_effect=True, vmap_method="broadcast_all"
    )
    return call(*args)


class HostEnv(environment.Environment):
    """gymnax's interface for `make(seeds, limit, draw=False) -> Batch`.

    The spaces are gymnax's, and `limit` is the time limit. With `own_thread` one thread makes,
    steps, draws and closes a batch.
    """

    own_thread = True
    # Why the environment cannot be made without parameters. A script makes it so first, to see
    # which parameters there are, and only then with those that it was given.
    failure: Exception | None = None

    def __init__(self, make, observation_space, action_space, limit: int):
        self.make = make
        self.spaces = (observation_space, action_space)
        self.limit = limit

    @property
    def default_params(self):
        return HostParams(max_steps_in_episode=self.limit)

    def observation_space(self, params):
        if self.failure is not None:
            raise self.failure
        return self.spaces[0]

    def action_space(self, params=None):
        if self.failure is not None:
            raise self.failure
        return self.spaces[1]

    @property
    def shapes(self):
        """Of an observation, and of an action."""
        obs = self.observation_space(None)
        action = self.action_space()
        kind = np.float32 if isinstance(action, spaces.Box) else np.int32
        return jax.ShapeDtypeStruct(obs.shape, obs.dtype), jax.ShapeDtypeStruct(action.shape, kind)

    def reset(self, key, params=None):
        number = jax.ShapeDtypeStruct((), np.int32)
        obs, action = self.shapes
        seed = jax.random.randint(key, (), 0, np.iinfo(np.int32).max)
        limit = jnp.asarray((params or self.default_params).max_steps_in_episode, jnp.int32)
        obs, batch, row = call_host(self._reset, (obs, number, number), seed, limit)
        zero = jnp.int32(0)
        return obs, HostState(zero, batch, row, zero, seed, jnp.zeros(action.shape, action.dtype))

    def step(self, key, state, action, params=None):
        number = jax.ShapeDtypeStruct((), np.int32)
        flag = jax.ShapeDtypeStruct((), np.bool_)
        reward = jax.ShapeDtypeStruct((), np.float32)
        obs, action_shape = self.shapes
        action = jnp.asarray(action, action_shape.dtype).reshape(action_shape.shape)
        outputs = (obs, obs, reward, flag, flag, number, number)
        obs, final, reward, terminated, truncated, batch, row = call_host(
            self._step, outputs, state.batch, state.row, state.steps, action
        )
        time: Any = jnp.where(terminated | truncated, 0, state.time + 1)
        state = HostState(time, batch, row, state.steps + 1, state.seed, action)
        info = {"terminated": terminated, "truncated": truncated, "final_observation": final}
        return obs, state, reward, terminated, truncated, info

    def release(self, state) -> None:
        """Close the batches of `state`, which nothing will step again."""
        done = jax.ShapeDtypeStruct((), np.int32)

        def call(out, batch):
            _close(batch.ravel().tolist())
            out[...] = 0

        return call_host(call, done, state.batch)

    def frames(self, states, steps):
        """Pictures of the steps `steps` of an episode, played again in an environment of its own.

        states: [T], the episode's, before each step.
        """
        limit = max(self.limit, len(states.time))
        opened = OpenBatch(self, np.asarray(states.seed[:1]), limit, draw=True)
        try:
            for step in range(steps[-1] + 1):
                if step:
                    opened.call(opened.batch.step, np.asarray(states.action[step])[None])
                if step in steps:
                    yield opened.call(opened.batch.frame)
        finally:
            opened.close()

    # --- on the host ---

    def _reset(self, out, seeds, limit):
        obs, batch, row = out
        # a copy of `seeds`: XLA uses their memory again
        opened = OpenBatch(self, seeds.flatten(), int(limit.flat[0]))
        obs[...] = opened.batch.first.reshape(obs.shape)
        batch[...] = _add(opened)
        row[...] = np.arange(row.size).reshape(row.shape)

    def _step(self, out, batch, row, steps, action):
        *out_of_step, out_batch, out_row = out
        lead = row.shape
        rows = row.ravel()
        number, opened = find_batch(batch, steps)
        is_in_order = np.array_equal(rows, opened.order)  # it mostly is, and all else takes longer
        if not is_in_order and not np.array_equal(np.sort(rows), opened.order):
            raise ValueError(
                f"{len(opened.seeds)} environments on the host got {rows.size} actions"
            )

        actions = action.reshape(-1, *action.shape[len(lead) :])
        # a copy in any case: XLA uses the memory again
        actions = actions.copy() if is_in_order else actions[np.argsort(rows)]
        results = opened.call(opened.step, actions)
        opened.steps += 1

        for out_array, value in zip(out_of_step, results, strict=True):
            value = value if is_in_order else value[rows]
            out_array[...] = value.reshape(out_array.shape)
        out_batch[...] = number
        out_row[...] = rows.reshape(lead)


def as_gymnax(observations, actions):
    """gymnax's spaces for `Observations` and `Actions` of Gymnasium's."""
    if observations.num_states:
        obs = spaces.Discrete(observations.num_states)
    else:
        bounds = (0, 255) if observations.dtype == np.uint8 else (-jnp.inf, jnp.inf)
        obs = spaces.Box(*bounds, observations.shape, observations.dtype)
    if actions.num_actions:
        return obs, spaces.Discrete(actions.num_actions)
    return obs, spaces.Box(actions.low, actions.high, actions.space.shape)


@functools.cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr)
