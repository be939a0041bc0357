"""Environments that run outside JAX, in C++ or Python, stepped from inside a jitted training.

`HostEnv` puts a batched environment behind gymnax's interface. Every `step` is one call on the host
for all environments of all seeds of a device, however `vmap`, `lax.scan` and `shard_map` are
nested. The batched environment itself stays outside: the state in JAX is a ticket that names the
batch, the row and the number of steps taken. The ticket goes through every step, and data
dependence therefore keeps the steps in order.

What is lost: the environments step on the CPU, and their state cannot be saved. A state can be
stepped only once.
"""

import atexit
import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jax.experimental import buffer_callback

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
class HostState(environment.EnvState):
    """A ticket for one row of a batch, and what replaying an episode needs."""

    batch: jax.Array  # number of the batch in this process
    row: jax.Array
    steps: jax.Array  # of the row since it was made; `time` counts from the start of the episode
    seed: jax.Array
    action: jax.Array  # of the last step, in the bounds of the environment


class Open:
    """A batch that is in use."""

    def __init__(self, env, seeds, limit):
        self.env = env
        self.seeds = seeds
        self.limit = limit
        self.steps = 0
        with _making:  # one device at a time: `warnings.catch_warnings` is of the whole process
            self.batch = env.make(seeds.tolist(), limit)


_open: dict[int, Open] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()
_making = threading.Lock()


def _add(entry: Open) -> int:
    with _lock:
        number = next(_numbers)
        _open[number] = entry
    return number


def _close(numbers) -> None:
    with contextlib.ExitStack() as closing, _lock:  # closes all, also where one fails
        for number in set(numbers) & set(_open):
            closing.callback(_open.pop(number).batch.close)


@atexit.register
def close_all() -> None:
    """Close every batch of this process. Earlier states cannot be stepped any more."""
    _close(list(_open))


def call_host(function, shapes, *args):
    """Call `function(out, *args)` on NumPy arrays; it fills `out`.

    It is one call for all axes that `vmap` adds.
    """
    if jax.default_backend() == "cpu":  # 14 us a call, never left out, results written in place

        def call(_, out, *args):
            function(jax.tree.map(np.asarray, out), *map(np.asarray, args))

        call = buffer_callback.buffer_callback(
            call, shapes, has_side_effect=True, vmap_method="broadcast_all"
        )
        return call(*args)

    def call(*args):
        args = [np.asarray(arg) for arg in args]
        lead = args[0].shape  # the first argument is a number
        out = jax.tree.map(lambda shape: np.empty(lead + shape.shape, shape.dtype), shapes)
        function(out, *args)
        return out

    return jax.pure_callback(call, shapes, *args, vmap_method="broadcast_all")


class HostEnv(environment.Environment):
    """gymnax's interface for `make(seeds, limit, draw=False) -> Batch`.

    The spaces are gymnax's, and `limit` is the time limit.
    """

    def __init__(self, make, observation_space, action_space, limit: int):
        self.make = make
        self.spaces = (observation_space, action_space)
        self.limit = limit

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.limit)

    def observation_space(self, params):
        return self.spaces[0]

    def action_space(self, params=None):
        return self.spaces[1]

    @property
    def shapes(self):
        """Of an observation, and of an action."""
        obs, action = self.spaces
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
        time = jnp.where(terminated | truncated, 0, state.time + 1)
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
        batch = self.make([int(states.seed[0])], max(self.limit, len(states.time)), draw=True)
        try:
            for step in range(steps[-1] + 1):
                if step:
                    batch.step(np.asarray(states.action[step])[None])
                if step in steps:
                    yield batch.frame()
        finally:
            batch.close()

    # --- on the host ---

    def _reset(self, out, seeds, limit):
        obs, batch, row = out
        # a copy of `seeds`: XLA uses their memory again
        opened = Open(self, seeds.flatten(), int(limit.flat[0]))
        obs[...] = opened.batch.first.reshape(obs.shape)
        batch[...] = _add(opened)
        row[...] = np.arange(row.size).reshape(row.shape)

    def _step(self, out, batch, row, steps, action):
        lead = row.shape
        rows = row.ravel()
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
        if rows.size != len(opened.seeds) or not np.array_equal(
            np.sort(rows), np.arange(rows.size)
        ):
            if opened.steps:
                raise ValueError(
                    f"{len(opened.seeds)} environments on the host got {rows.size} actions"
                )
            # Several agents play the episodes of one reset, as in an evaluation: every agent gets
            # environments of its own.
            _close([number])
            opened = Open(self, opened.seeds[rows], opened.limit)
            number = _add(opened)
            rows = np.arange(rows.size)
        inverse = np.argsort(rows)
        flat = action.reshape(-1, *action.shape[len(lead) :])
        obs, reward, terminated, truncated = opened.batch.step(flat[inverse])
        opened.steps += 1
        next_obs = obs
        ended = np.flatnonzero(np.logical_or(terminated, truncated))
        if ended.size:
            next_obs = obs.copy()
            next_obs[ended] = opened.batch.reset_rows(ended)
        results = (next_obs, obs, reward, terminated, truncated)
        *out_of_step, out_batch, out_row = out
        for out_array, value in zip(out_of_step, results, strict=True):
            out_array[...] = value[rows].reshape(out_array.shape)
        out_batch[...] = number
        out_row[...] = rows.reshape(lead)


def in_float32(space, arrays):
    """Observations of a Gymnasium space as one array [n, *shape].

    Images are [H, W, C] bytes, all others are numbers. A dictionary becomes one vector; text (the
    "mission" of MiniGrid) is left out.
    """
    if isinstance(arrays, dict) or hasattr(arrays, "_fields"):
        parts = []
        for name in names(space):
            part = in_float32(space[name], arrays[name])
            parts.append(part.reshape(len(part), -1).astype(np.float32))
        return np.concatenate(parts, axis=1)
    arrays = np.asarray(arrays)
    if getattr(space, "start", None) is not None:  # of a Discrete space
        arrays = arrays - space.start
    if arrays.ndim == 4:
        _, channels, height, width = arrays.shape
        if height == width != channels:  # channels come first in Atari
            arrays = np.moveaxis(arrays, 1, 3)
    if arrays.ndim == 4 and arrays.dtype == np.uint8:
        return arrays
    return arrays.astype(np.float32)


def as_gymnax(observation_space, action_space):
    """gymnax's spaces for Gymnasium's. Raises ValueError for actions that no script has."""
    import gymnasium

    kinds = gymnasium.spaces
    if isinstance(observation_space, kinds.Discrete):
        obs = spaces.Discrete(int(observation_space.n))
    elif isinstance(observation_space, kinds.Tuple):
        raise ValueError(
            f"env_name: observations of {observation_space} are neither arrays nor dictionaries"
        )
    else:
        sample = jax.tree.map(lambda x: np.asarray(x)[None], zeros(observation_space))
        sample = in_float32(observation_space, sample)[0]
        bounds = (0, 255) if sample.dtype == np.uint8 else (-jnp.inf, jnp.inf)
        obs = spaces.Box(*bounds, sample.shape, sample.dtype)
    if isinstance(action_space, kinds.Discrete):
        return obs, spaces.Discrete(int(action_space.n))
    if isinstance(action_space, kinds.Box) and np.issubdtype(action_space.dtype, np.floating):
        low = np.asarray(action_space.low, np.float32)
        high = np.asarray(action_space.high, np.float32)
        return obs, spaces.Box(low, high, action_space.shape)
    raise ValueError(
        f"env_name: actions of {action_space} are neither one number nor a vector of real numbers"
    )


def zeros(space):
    """An element of a Gymnasium space, all zeros, dictionaries as dictionaries."""
    if hasattr(space, "spaces"):
        return {name: zeros(space[name]) for name in names(space)}
    return np.zeros(space.shape, space.dtype)


def names(space) -> list[str]:
    """The entries of a dictionary that hold numbers."""
    return [
        name
        for name in space
        if name != "mission" and getattr(space[name].dtype, "kind", "") != "U"
    ]
