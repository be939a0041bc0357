"""Gymnasium's environments, stepped one after the other, in this process or in others.

It imports no JAX: a process starts in a fraction of a second, unless the environment imports JAX.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback

import cloudpickle
import gymnasium
import numpy as np

from onejit.envs.host.spaces import Actions, Observations

SECONDS_TO_CLOSE = 5.0


class Rows:
    """Environments that `gymnasium.make(spec, **arguments)` makes. Each is a row.

    It has the methods of `Batch`. `image_axes` is an argument of `Observations`.
    """

    first: np.ndarray  # observations after the first reset

    def __init__(self, spec, arguments: dict, image_axes: str, number: int):
        self.envs = []
        try:
            for _ in range(number):
                self.envs.append(gymnasium.make(spec, **arguments))
            self.observations = Observations(self.envs[0].observation_space, image_axes)
            self.actions = Actions(self.envs[0].action_space)
        except gymnasium.error.DependencyNotInstalled as error:
            self.close()
            raise ImportError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def describe(self):
        """`(observations, actions, limit)`, after a check of what a reset and a step return.

        The limit is None if there is none. Raises ValueError.
        """
        env = self.envs[0]
        obs, _ = env.reset(seed=0)
        self.observations.check(obs)
        action = self.actions(np.zeros((1, *self.actions.space.shape)))[0]
        results = None
        with contextlib.suppress(Exception):  # which the training will raise
            results = env.step(action)
        if results is not None:
            self.observations.check(results[0])
            reward = np.asarray(results[1])
            if reward.shape or reward.dtype.kind not in "biuf":
                raise ValueError(f"env_name: a reward is {results[1]!r}, and must be one number")
        return self.observations, self.actions, env.spec.max_episode_steps

    def empty(self, number: int):
        return np.empty((number, *self.observations.shape), self.observations.dtype)

    def reset_rows(self, rows, seeds=None):
        """Begin episodes in `rows` [k]. Returns their observations [k, *obs_shape]."""
        out = self.empty(len(rows))
        for i in range(len(rows)):
            seed = None if seeds is None else seeds[i]
            obs, _ = self.envs[rows[i]].reset(seed=seed)
            self.observations.write(out[i, ...], obs)
        return out

    def step(self, actions):
        """`(obs, reward, terminated, truncated)` of all rows, for the actions of a script."""
        number = len(self.envs)
        out = self.empty(number)
        reward = np.empty(number)
        terminated = np.empty(number, bool)
        truncated = np.empty(number, bool)
        actions = self.actions(actions)
        write = self.observations.write
        for i, env in enumerate(self.envs):
            obs, reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            write(out[i, ...], obs)
        return out, reward, terminated, truncated

    def frame(self):
        """A picture of the first row."""
        return np.asarray(self.envs[0].render())

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # closes all, also where one fails
            for env in self.envs:
                closing.callback(env.close)


class Process:
    """`Rows` in a process of its own, in whose main thread the environments are.

    It is a new interpreter: a copy of this process, in which JAX has threads, would hang.
    """

    def __init__(self, *args):
        path = [os.path.abspath(folder) for folder in sys.path]
        code = f"import sys; sys.path = {path!r}; import onejit.envs.host.rows as r; r.serve()"
        with without_interrupts():
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # JAX would take the GPU's memory
            )
        assert self.process.stdin and self.process.stdout
        self.requests = self.process.stdin
        self.answers = self.process.stdout
        # the other process cannot import the script, whose classes it may need
        for name, module in list(sys.modules.items()):
            if name.startswith("script_") and hasattr(module, "SOURCE"):
                cloudpickle.register_pickle_by_value(module)
        self.send(cloudpickle.dumps(args))

    def send(self, request) -> None:
        try:
            pickle.dump(request, self.requests)
            self.requests.flush()
        except OSError as error:
            raise RuntimeError(f"a process of the environment has ended: {error!r}") from error

    def receive(self):
        try:
            is_done, result = pickle.load(self.answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a process of the environment has ended: {error!r}") from error
        if not is_done:
            kind, text, trace = result
            error = kind(text)
            error.add_note(f"In a process of the environment:\n{trace}")
            raise error
        return result

    def call(self, name: str, *args):
        self.send((name, args))
        return self.receive()

    def end(self) -> None:
        """Let the environments close, without waiting for it."""
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(OSError):
                pipe.close()

    def wait(self) -> None:
        try:
            self.process.wait(timeout=SECONDS_TO_CLOSE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def survive_signals() -> None:
    """Do nothing on SIGTERM and SIGHUP, which may go to all processes of a training.

    A handler, in contrast to a blocked signal, does not pass to the processes that an environment
    starts.
    """
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def serve() -> None:
    """The main function of a process: calls methods of `Rows` until nobody asks any more."""
    survive_signals()
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what environments print
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(EOFError, BrokenPipeError), contextlib.ExitStack() as closing:
        rows = None
        while True:
            request = pickle.load(requests)
            try:
                if rows is None:
                    rows = Rows(*cloudpickle.loads(request))
                    closing.callback(rows.close)
                    result = None
                else:
                    name, args = request
                    result = getattr(rows, name)(*args)
                answer = pickle.dumps((True, result))
            except Exception as error:
                answer = pickle.dumps((False, (*kind_and_text(error), traceback.format_exc())))
            results.write(answer)
            results.flush()


def kind_and_text(error: Exception):
    """An exception that the parent can raise, whatever the kind of this one."""
    for kind in (ValueError, TypeError):
        if isinstance(error, kind):
            return kind, str(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


class Processes:
    """The same as `Rows`, with the rows divided among processes."""

    first: np.ndarray

    def __init__(self, spec, arguments: dict, image_axes: str, number: int, num_processes: int):
        self.parts = np.array_split(np.arange(number), min(num_processes, number))
        self.processes = []
        try:
            for part in self.parts:
                self.processes.append(Process(spec, arguments, image_axes, len(part)))
            for process in self.processes:  # all make their environments at the same time
                process.receive()
        except BaseException:
            self.close()
            raise

    def describe(self):
        return self.processes[0].call("describe")

    def reset_rows(self, rows, seeds=None):
        rows = np.asarray(rows)
        asked = []
        for process, part in zip(self.processes, self.parts, strict=True):
            here = np.flatnonzero(np.isin(rows, part))
            if here.size:
                own_seeds = None if seeds is None else [seeds[i] for i in here]
                process.send(("reset_rows", (rows[here] - part[0], own_seeds)))
                asked.append((process, here))
        parts = [process.receive() for process, _ in asked]
        out = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        for (_, here), obs in zip(asked, parts, strict=True):
            out[here] = obs
        return out

    def step(self, actions):
        for process, part in zip(self.processes, self.parts, strict=True):
            process.send(("step", (actions[part],)))
        results = [process.receive() for process in self.processes]
        return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))

    def frame(self):
        return self.processes[0].call("frame")

    def close(self) -> None:
        for process in self.processes:
            process.end()
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def without_interrupts():
    """Processes that begin here do not get the signals that end a training.

    They are for the training, which saves a checkpoint and then closes the connection to its
    processes. `survive_signals` lets through all but SIGINT.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
