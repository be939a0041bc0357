"""The axis of the runs that train in one program, which is spread over devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import onejit.engine.devices  # noqa: F401 - before JAX starts


def over_one(function):
    """`jax.vmap(function)` for an axis of length 1, which the function's loops do not carry.

    Faster than `vmap` on CPUs, as in a script's `main`. Arguments that are numbers have no axis.
    """

    def first(leaf):
        return leaf[0] if jnp.ndim(leaf) else leaf

    def call(*trees):
        results = function(*jax.tree.map(first, trees))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], results)

    return call


class Axis(NamedTuple):
    """An axis of `size` runs, which are independent of each other."""

    size: int
    num_devices: int
    sharding: Any  # of arrays [size, ...]
    replicated: Any  # sharding of arrays that every device has

    @classmethod
    def of(cls, size: int) -> "Axis":
        """A single process uses as many devices as divide `size`. Raises ValueError."""
        devices = jax.devices()
        if jax.process_count() == 1:
            most = max(n for n in range(1, len(devices) + 1) if size % n == 0)
            devices = devices[:most]
        elif size % len(devices):
            raise ValueError(
                f"{size} runs cannot be spread over the {len(devices)} devices of all processes"
            )
        mesh = Mesh(devices, ("run",))
        sharding = NamedSharding(mesh, PartitionSpec("run"))
        return cls(size, len(devices), sharding, NamedSharding(mesh, PartitionSpec()))

    def shape(self, *of_run: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        """An array with this shape for each run."""
        return jax.ShapeDtypeStruct((self.size, *of_run), dtype, sharding=self.sharding)

    def floats(self, names) -> dict[str, jax.ShapeDtypeStruct]:
        """A float of each run for each of these fields."""
        return {name: self.shape() for name in names}

    def key_data(self) -> jax.ShapeDtypeStruct:
        """The data of a random key for each run."""
        return self.shape(*jax.random.key_data(jax.random.key(0)).shape, dtype=jnp.uint32)

    def over_runs(self, function, arguments: int, shared: int = 0):
        """A function of one run as one of the runs of a device: without a `vmap` if it has one.

        The last `shared` of the arguments are the same for all runs.
        """
        if self.size == self.num_devices:
            return over_one(function)
        return jax.vmap(function, (0,) * (arguments - shared) + (None,) * shared)

    def over_devices(self, function, arguments: int, shared: int = 0):
        """A function of the runs of a device as one of all runs."""
        of_runs = (self.sharding.spec,) * (arguments - shared)
        return jax.shard_map(
            function,
            mesh=self.sharding.mesh,
            in_specs=of_runs + (self.replicated.spec,) * shared,
            out_specs=self.sharding.spec,
            check_vma=False,
        )
