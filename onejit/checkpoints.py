"""Checkpoints of a slice of runs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

KNOWN_CAUSES = ("No space left on device", "Read-only file system", "File too large")


def open_checkpoints(directory: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(Path(directory).absolute(), options=options, item_handlers=handler)


def in_one_line(error) -> str:
    return " ".join(str(error).split())


def without_empty(tree):
    """Replace empty arrays, which physics engines may have, by None: Orbax does not write them."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def save(manager, step: int, carry) -> None:
    """Write a checkpoint. Raises OSError."""
    try:
        manager.save(step, args=ocp.args.StandardSave(without_empty(carry)))
    except Exception as error:  # Orbax raises many kinds
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process is gone
        text = in_one_line(error)
        known = [cause for cause in KNOWN_CAUSES if cause in text]
        cause = known[0] if known else text[:300]
        raise OSError(f"the checkpoint of update {step} cannot be written: {cause}") from error


def restore(manager, step: int, program):
    """Read the `carry` of a checkpoint, and lengthen it for the updates of `program`.

    Raises OSError.
    """
    try:
        stored = manager.item_metadata(step).tree
        abstract = dict(program.abstract)
        abstract["metrics"] = of_stored_length(abstract["metrics"], stored["metrics"])
        if "evaluation" in abstract:
            evaluation = dict(abstract["evaluation"])
            stored_returns = stored["evaluation"]["returns"]
            evaluation["returns"] = of_stored_length(evaluation["returns"], stored_returns)
            abstract["evaluation"] = evaluation

        def with_empty(leaf, restored):
            return restored if leaf.size else jnp.zeros_like(leaf)

        arguments = ocp.args.StandardRestore(without_empty(abstract))
        carry = manager.restore(step, args=arguments)
        carry = jax.tree.map(with_empty, abstract, carry)
        return jax.tree.map(lengthen, carry, program.abstract)
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
