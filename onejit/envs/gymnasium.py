"""Gymnasium: every id of its registry, also one that you registered in a module of your own.

    python ppo_continuous.py --env-name onejit.envs.gymnasium:HalfCheetah-v5

A module of your own makes its environments known like this, and
`--env-name my_module:MyEnv-v0` then finds them:

    gymnasium.register("MyEnv-v0", entry_point=MyEnv, max_episode_steps=200)
    onejit.envs.gymnasium.register_ids("MyEnv-v0")

The environments step on the CPU. docs/host_environments.md says what is lost compared with
environments in JAX.
"""

import contextlib
import functools
import signal
import warnings

import numpy as np

from onejit.envs import needs, register
from onejit.envs.host import NO_LIMIT, Batch, HostEnv, as_gymnax, in_float32

with needs("gymnasium"):
    import gymnasium


@contextlib.contextmanager
def without_interrupts():
    """Processes that begin here do not get Ctrl-C.

    It is for the training, which saves a checkpoint first.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Vector(Batch):
    """One vector environment of Gymnasium, in which row i has seed i."""

    def __init__(self, env, name, arguments, seeds, limit, draw=False):
        if limit != NO_LIMIT:
            arguments = arguments | {"max_episode_steps": limit}
        if draw:
            arguments = arguments | {"render_mode": "rgb_array"}
        mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        if arguments["vectorization_mode"] == "async":
            # its logger fails on a traceback with a "%" in it
            gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
        with warnings.catch_warnings(action="ignore"), without_interrupts():
            self.envs = gymnasium.make_vec(
                name, num_envs=len(seeds), vector_kwargs=mode, **arguments
            )
        self.workers = getattr(self.envs, "processes", [])
        self.space = self.envs.single_observation_space
        self.start = getattr(self.envs.single_action_space, "start", 0)
        self.kind = self.envs.single_action_space.dtype
        self.first = in_float32(self.space, self.envs.reset(seed=seeds)[0])

    def step(self, actions):
        try:
            obs, reward, terminated, truncated, _ = self.envs.step(
                (actions + self.start).astype(self.kind)
            )
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(
                f"a process or connection of the environment has ended: {error!r}"
            ) from error
        return in_float32(self.space, obs).copy(), reward, terminated, truncated

    def reset_rows(self, rows):
        mask = np.isin(np.arange(self.envs.num_envs), rows)
        return in_float32(self.space, self.envs.reset(options={"reset_mask": mask})[0])[rows]

    def frame(self):
        return np.asarray(self.envs.render()[0])

    def close(self):
        if not self.workers:
            self.envs.close()
            return
        with contextlib.suppress(EOFError, OSError):  # pipes of processes that have died
            self.envs.close(timeout=1)
        self.envs.closed = True
        for worker in self.workers:
            worker.terminate()


class Gymnasium(HostEnv):
    """`arguments` are the environment's own.

    `vectorization_mode` is "sync", or "async" for processes.
    """

    def __init__(self, name: str, vectorization_mode: str = "sync", **arguments):
        if vectorization_mode not in ("sync", "async"):
            raise ValueError(f"vectorization_mode = {vectorization_mode}: must be sync or async")
        try:
            with warnings.catch_warnings(action="ignore"):
                one = gymnasium.make(name, **arguments)
        except gymnasium.error.DependencyNotInstalled as error:
            raise ValueError(str(error)) from error
        try:
            obs_space, action_space = as_gymnax(one.observation_space, one.action_space)
            limit = one.spec.max_episode_steps or NO_LIMIT
        finally:
            one.close()
        arguments = arguments | {"vectorization_mode": vectorization_mode}
        make = functools.partial(Vector, self, name, arguments)
        super().__init__(make, obs_space, action_space, limit=limit)


def register_ids(*names: str) -> None:
    """Make ids of Gymnasium's registry known as environments of the scripts."""
    register(names, Gymnasium)


register_ids(*gymnasium.registry)
