"""Checkpoints of a slice of runs, each with checksums of its files.

Orbax notices files that are cut off, but reads changed bytes as numbers: of 30 checkpoints with 64
changed bytes it restored 23.
"""

import contextlib
import glob
import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from onejit.base.files import delete_folder, write
from onejit.engine.carry import Carry, as_stored, of_stored
from onejit.engine.hosts import only_first

# Orbax logs the traceback of each error, once for each of its threads, and raises it as well.
logging.getLogger("absl").setLevel(logging.CRITICAL)

KNOWN_CAUSES = ("No space left on device", "Read-only file system", "File too large")
CHECKSUMS = "checksums.json"  # in the directory of a checkpoint: {file: SHA-256}

# --- checksums ---


def checksums_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint. Raises OSError."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(CHECKSUMS):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            checksums[path.relative_to(folder).as_posix()] = digest
    return checksums


def write_checksums(folder: Path) -> None:
    write(folder / CHECKSUMS, json.dumps(checksums_of(folder), indent=1))


def has_checksums(folder: Path) -> bool:
    return (folder / CHECKSUMS).is_file()


def damage_of(folder: Path) -> str:
    """What is wrong with the files of a checkpoint. Empty if they are as they were written."""
    if not has_checksums(folder):
        return "it was not written completely"
    try:
        expected = dict(json.loads((folder / CHECKSUMS).read_text()))
        found = checksums_of(folder)
    except (OSError, ValueError, TypeError) as error:
        return f"{CHECKSUMS} cannot be read: {in_one_line(error)}"
    for name, checksum in expected.items():
        if name not in found:
            return f"its file {name} is missing"
        if found[name] != checksum:
            return f"its file {name} has another checksum than when it was written"
    return ""


def delete_damaged(directory: Path) -> None:
    """Delete the checkpoints that are newer than the newest intact one, and say so.

    A checkpoint without checksums counts as intact if no older one has any: it is the first of a
    run that was killed at once. Raises OSError if none is intact.
    """
    folders = [path for path in directory.glob("*") if path.name.isdecimal()]
    folders.sort(key=lambda path: int(path.name), reverse=True)
    damaged = {}
    for i, folder in enumerate(folders):
        if not has_checksums(folder) and not any(map(has_checksums, folders[i + 1 :])):
            break
        damage = damage_of(folder)
        if not damage:
            break
        damaged[folder] = damage
    intact = folders[len(damaged) :]
    if damaged and not intact:
        newest, damage = next(iter(damaged.items()))
        raise OSError(
            f"resume: no checkpoint is intact; {directory.name}/{newest.name} is damaged: "
            f"{damage}. Without the folder {directory} these seeds begin anew"
        )
    for folder, damage in damaged.items():
        delete_folder(folder)
        if folder.exists():  # Orbax would read it
            raise OSError(f"resume: {folder} is damaged ({damage}) and cannot be deleted")
        print(
            f"resume: the checkpoint {directory.name}/{folder.name} is damaged: {damage}; it was "
            f"deleted, and {directory.name}/{intact[0].name} is used",
            file=sys.stderr,
        )


# --- checkpoints ---

KEPT = 2  # checkpoints: the last one may be damaged


@contextlib.contextmanager
def open_checkpoints(directory: Path):
    """Open the checkpoints of a directory; the latest one is intact. Raises OSError."""
    only_first(delete_damaged, Path(directory))
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    handler = ocp.StandardCheckpointHandler()
    with (
        plain_path(Path(directory).absolute()) as path,
        ocp.CheckpointManager(path, options=options, item_handlers=handler) as manager,
    ):
        yield manager


@contextlib.contextmanager
def plain_path(directory: Path):
    """The directory, or a link to it: Orbax takes a path for a pattern, which must be UTF-8."""
    name = str(directory)
    if glob.escape(name) == name.encode(errors="ignore").decode():
        yield directory
        return
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onejit-") as folder:
        link = Path(folder, directory.name)
        link.symlink_to(directory)
        yield link


def delete_old(directory: Path) -> None:
    """Keep the newest checkpoints. Orbax would end the training if a folder cannot be deleted."""
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
    for step in steps[:-KEPT]:
        delete_folder(directory / str(step))


def in_one_line(error) -> str:
    return " ".join(str(error).split())


def without_empty(tree):
    """Replace empty arrays, which physics engines may have, by None: Orbax does not write them."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def save(manager, step: int, carry: Carry) -> None:
    """Write a checkpoint. Raises OSError."""
    try:
        manager.save(step, args=ocp.args.StandardSave(without_empty(as_stored(carry))))
        only_first(write_checksums, Path(manager.directory) / str(step))
        only_first(delete_old, Path(manager.directory))
    except Exception as error:  # Orbax raises many kinds
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process is gone
        text = in_one_line(error)
        known = [cause for cause in KNOWN_CAUSES if cause in text]
        cause = known[0] if known else text[:300]
        raise OSError(f"the checkpoint of update {step} cannot be written: {cause}") from error


def restore(manager, step: int, program) -> Carry:
    """Read the carry of a checkpoint, and lengthen it for the updates of `program`.

    Raises OSError.
    """
    try:
        stored = manager.item_metadata(step).tree
        whole = as_stored(program.abstract)
        abstract = dict(whole)
        abstract["metrics"] = of_stored_length(whole["metrics"], stored["metrics"])
        if "evaluation" in whole:
            returns = whole["evaluation"]["returns"]
            returns = of_stored_length(returns, stored["evaluation"]["returns"])
            abstract["evaluation"] = whole["evaluation"] | {"returns": returns}

        def with_empty(leaf, restored):
            return restored if leaf.size else jnp.zeros_like(leaf)

        arguments = ocp.args.StandardRestore(without_empty(abstract))
        restored = manager.restore(step, args=arguments)
        restored = jax.tree.map(with_empty, abstract, restored)
        return of_stored(jax.tree.map(lengthen, restored, whole))
    except Exception as error:  # Orbax raises many kinds
        name = f"{Path(manager.directory).name}/{step}"
        cause = in_one_line(error)[:300]
        raise OSError(f"resume: the checkpoint {name} cannot be restored: {cause}") from error


def of_stored_length(abstract, stored):
    """Shapes [size, updates] with the number of updates that a checkpoint holds."""

    def shortened(leaf, stored_leaf):
        return leaf.update(shape=(leaf.shape[0], stored_leaf.shape[1]))

    return jax.tree.map(shortened, abstract, stored)


def lengthen(array, like):
    """Add columns of NaN or 0 to `array`, up to the shape of `like`."""
    if array.shape == like.shape:
        return array
    fill = jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else 0
    columns = like.shape[1] - array.shape[1]

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, columns)), constant_values=fill)

    return jax.jit(pad, out_shardings=like.sharding)(array)
