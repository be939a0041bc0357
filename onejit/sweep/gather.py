"""The runs of a rung that go on, gathered from the checkpoints of the rung."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from onejit.engine import hosts
from onejit.engine.axis import Axis
from onejit.engine.checkpoints import open_checkpoints, restore
from onejit.sweep.slice_files import checkpoints_of, runs_of


def of_size(abstract, size: int):
    """Shapes [size, ...] of the carry of a slice of another size."""
    sharding = Axis.of(size).sharding

    def resized(leaf):
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return jax.tree.map(resized, abstract)


def take(folder: Path, update: int, program, rows: np.ndarray):
    """The rows of the carry of a slice after an update. Raises OSError."""
    with open_checkpoints(folder) as manager:
        if manager.latest_step() != update:
            raise OSError(
                f"{folder}: has no intact checkpoint of update {update}; resuming trains it again"
            )
        stored = manager.item_metadata(update).tree
        size = stored["metrics"]["episodes"].shape[0]
        resized = program._replace(abstract=of_size(program.abstract, size))
        carry = restore(manager, update, resized)
    return jax.tree.map(lambda leaf: leaf[rows], carry)


def gather(run_dir: Path, group: int, update: int, runs: np.ndarray, program):
    """The carry of a slice of `program`, from the checkpoints of `group` after an update.

    `runs` [size] are numbers of runs of that group, in ascending order. Raises OSError.
    """
    names = hosts.only_first(lambda: [str(path) for path in checkpoints_of(run_dir, group)])
    parts = []
    for folder in map(Path, names):
        first, last = runs_of(folder)
        rows = runs[(first <= runs) & (runs < last)] - first
        if len(rows):
            parts.append(take(folder, update, program, rows))
    if sum(len(part["metrics"]["episodes"]) for part in parts) != len(runs):
        raise OSError(f"{run_dir / 'unfinished'}: has no checkpoints of all runs of group {group}")
    carry = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return jax.device_put(carry, program.sharding)
