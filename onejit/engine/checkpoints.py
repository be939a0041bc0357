"""Checkpoints of a slice of runs: a folder for each, whose NumPy files have checksums (CRC-32).

Each process writes what its devices hold. A checkpoint is complete when all of its parts are there.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from onejit.base.files import delete_folder, write
from onejit.engine.carry import Carry
from onejit.engine.hosts import only_first

KEPT = 2  # checkpoints: the last one may be damaged
NUMBER = "number"  # of the arrays in a file: the directory of a zip file has no checksum
GROWING = (".metrics", ".evaluations.returns")  # what has more columns in an extended run

# --- arrays ---


def as_data(leaf):
    """Random keys as numbers, which NumPy's files know."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def rows_of_process(leaf) -> np.ndarray:
    """The rows of an array [size, ...] that the devices of this process hold."""
    shards = sorted(as_data(leaf).addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def leaf_from(arrays: dict[str, np.ndarray], path, like):
    """The leaf of a carry from the arrays of a checkpoint, lengthened to the shape of `like`."""
    name = jax.tree_util.keystr(path)
    array = arrays[name]
    data = jax.eval_shape(as_data, like)
    if array.dtype.kind == "V":  # of a type that NumPy does not know, such as bfloat16
        array = array.view(data.dtype)
    if name.startswith(GROWING):
        missing = data.shape[1] - array.shape[1]
        fill = np.nan if jnp.issubdtype(data.dtype, jnp.floating) else 0
        array = np.pad(array, ((0, 0), (0, missing)), constant_values=fill)
    if array.shape != data.shape:
        raise ValueError(f"{name} has shape {array.shape}, and {data.shape} in the script")
    leaf = jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
    return leaf if data.dtype == like.dtype else jax.random.wrap_key_data(leaf, dtype=like.dtype)


def carry_from(arrays: dict[str, np.ndarray], program) -> Carry:
    """Raises KeyError and ValueError if the arrays do not fit the program."""
    return jax.tree_util.tree_map_with_path(partial(leaf_from, arrays), program.abstract)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Parts of all rows, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- files ---


def parts_of(folder: Path) -> list[Path]:
    """The files of a checkpoint, none if it is not complete."""
    files = sorted(folder.glob("*-of-*.npz"))
    number = int(files[0].stem.split("-")[-1]) if files else 0
    return files if len(files) == number else []


def folders_of(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if path.name.isdecimal()]


def updates_of(directory: Path) -> list[int]:
    """The updates after which complete checkpoints were written, in order."""
    return sorted(int(folder.name) for folder in folders_of(directory) if parts_of(folder))


def save(directory: Path, update: int, carry: Carry) -> None:
    """Write a checkpoint. Raises OSError."""
    leaves = jax.tree_util.tree_leaves_with_path(carry)
    arrays = {jax.tree_util.keystr(path): rows_of_process(leaf) for path, leaf in leaves}
    name = f"{jax.process_index():05d}-of-{jax.process_count()}.npz"
    write(directory / str(update) / name, partial(np.savez, **arrays, **{NUMBER: len(arrays)}))
    only_first(delete_old, directory)


def delete_old(directory: Path) -> None:
    for update in updates_of(directory)[:-KEPT]:
        delete_folder(directory / str(update))


def read(folder: Path) -> dict[str, np.ndarray]:
    """The arrays [size, ...] of a checkpoint by their paths in the carry.

    Raises OSError if it is damaged.
    """
    parts = []
    try:
        for file in parts_of(folder):
            with np.load(file) as stored:
                arrays = {name: stored[name] for name in stored.files}
            if arrays.pop(NUMBER) != len(arrays):
                raise ValueError("it lacks arrays")
            parts.append(arrays)
        if not parts:
            raise ValueError("it is not complete")
        return parts[0] if len(parts) == 1 else joined(parts)
    except Exception as error:  # many kinds, of NumPy and of zip files
        cause = " ".join(str(error).split())[:300]
        raise OSError(f"{folder.parent.name}/{folder.name} is damaged: {cause}") from error


def newest(directory: Path) -> int:
    """The update of the newest checkpoint that is intact; 0 if there is none at all.

    Newer ones get another name, as they may be read again where a disk or the memory was the
    cause, and a line says so. Raises OSError if none of several is intact.
    """
    if any(directory.glob("*/default")):
        raise OSError(
            f"resume: {directory} is of an older version of onejit, which can continue it"
        )
    for folder in folders_of(directory):
        if not parts_of(folder):  # a kill came while it was written
            delete_folder(folder)
    damages = {}
    for update in reversed(updates_of(directory)):
        try:
            read(directory / str(update))
        except OSError as error:
            damages[update] = error
            continue
        for damaged, error in damages.items():
            kept = directory / f"{damaged}.damaged"
            delete_folder(kept)
            (directory / str(damaged)).rename(kept)
            used = f"it is now {kept.name}, and {directory.name}/{update} is used"
            print(f"resume: the checkpoint {error}; {used}", file=sys.stderr)
        return update
    if damages:
        raise OSError(
            f"resume: no checkpoint is intact; {next(iter(damages.values()))}. "
            f"Without the folder {directory} these seeds begin anew"
        )
    return 0


def restore(directory: Path, update: int, program) -> Carry:
    """Read the carry of a checkpoint, and lengthen it for the updates of `program`.

    Raises OSError.
    """
    arrays = read(directory / str(update))
    try:
        return carry_from(arrays, program)
    except (KeyError, ValueError) as error:
        name = f"{directory.name}/{update}"
        raise OSError(f"resume: the checkpoint {name} does not fit the script: {error}") from error
