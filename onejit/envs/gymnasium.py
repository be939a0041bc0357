"""Gymnasium: every id of its registry, also one that you registered in a module of your own.

    python ppo_continuous.py --env-name onejit.envs.gymnasium:HalfCheetah-v5

A module of your own makes its environments known like this, and
`--env-name my_module:MyEnv-v0` then finds them:

    gymnasium.register("MyEnv-v0", entry_point=MyEnv, max_episode_steps=200)
    onejit.envs.gymnasium.register_ids("MyEnv-v0")

The environments step on the CPU. docs/host_environments.md says what is lost compared with
environments in JAX.
"""

import threading

import jax

from onejit.base.cores import number_of_cores
from onejit.envs.adapter import needs, register
from onejit.envs.host.batch import NO_LIMIT, HostEnv, Thread, as_gymnax, say_once

with needs("gymnasium==1.3.0"):
    import gymnasium

    from onejit.envs.host.rows import Processes, Rows


_compiling = set()  # threads in which JAX has compiled


@jax.monitoring.register_event_duration_secs_listener
def _note_the_thread(event, duration_secs, **others):
    _compiling.add(threading.get_ident())


class Gymnasium(HostEnv):
    """`parameters` are the environment's own, and three of the adapter.

    `vectorization_mode` is "sync", or "async" for `num_processes` processes, by default one for
    each processor core. `image_axes` is "HWC" or "CHW" for images whose axes cannot be told apart.
    """

    def __init__(self, name: str, **parameters):
        try:
            self.prepare(name, **parameters)
        except Exception as error:
            if parameters:
                raise
            self.failure = error

    def prepare(
        self,
        name: str,
        vectorization_mode: str = "sync",
        num_processes: int | None = None,
        image_axes: str = "",
        **arguments,
    ):
        super().__init__(self.make_batch, None, None, limit=NO_LIMIT)
        if vectorization_mode not in ("sync", "async"):
            raise ValueError(f"vectorization_mode = {vectorization_mode}: must be sync or async")
        if num_processes is not None and vectorization_mode == "sync":
            raise ValueError(f"num_processes = {num_processes}: is for vectorization_mode async")
        if num_processes is not None and (num_processes != int(num_processes) or num_processes < 1):
            raise ValueError(f"num_processes = {num_processes}: must be a whole number, 1 or more")
        self.spec = gymnasium.spec(name)
        if self.spec.entry_point is None:
            raise ValueError(
                f"env_name: {name} exists only as a vector environment: register the environment "
                "itself, with an entry_point"
            )
        self.arguments = arguments
        self.image_axes = image_axes
        self.num_processes = 0
        if vectorization_mode == "async":
            self.num_processes = number_of_cores() if num_processes is None else int(num_processes)
        self.own_thread = vectorization_mode == "sync"

        observations, actions, limit = self.describe()
        if observations.note:
            say_once(f"{name}: {observations.note}")
        self.spaces = as_gymnax(observations, actions)
        self.limit = limit or NO_LIMIT

    def make_batch(self, seeds, limit, draw=False):
        """Environments in which row i has seed i."""
        arguments = self.arguments
        if limit != self.limit:
            arguments = arguments | {"max_episode_steps": limit}
        if draw:
            arguments = arguments | {"render_mode": "rgb_array"}
        rows = self.make_rows(arguments, len(seeds))
        try:
            rows.first = rows.reset_rows(range(len(seeds)), seeds)
        except BaseException:
            rows.close()
            raise
        return rows

    def make_rows(self, arguments, number: int):
        if self.num_processes:
            return Processes(self.spec, arguments, self.image_axes, number, self.num_processes)
        return Rows(self.spec, arguments, self.image_axes, number)

    def describe(self):
        """What an environment says about itself, in a thread such as it will be stepped in."""

        def make_and_describe():
            thread = threading.get_ident()
            _compiling.discard(thread)
            with jax.default_matmul_precision("tensorfloat32"):  # nothing is compiled already
                rows = self.make_rows(self.arguments, 1)
                try:
                    described = rows.describe()
                finally:
                    rows.close()
            if thread in _compiling:
                raise ValueError(
                    "env_params: vectorization_mode must be async, because the environment uses "
                    "JAX: it could hang here, where JAX waits for it"
                )
            return described

        thread = Thread()
        try:
            return thread.call(make_and_describe)
        except ValueError as error:
            if "main thread" not in str(error):
                raise
            raise ValueError(
                f"env_params: vectorization_mode = sync: {error}; async makes environments in the "
                "main threads of processes"
            ) from error
        finally:
            thread.end()


def register_ids(*names: str) -> None:
    """Make ids of Gymnasium's registry known as environments of the scripts."""
    register(names, Gymnasium)


register(gymnasium.registry, Gymnasium, __name__)
