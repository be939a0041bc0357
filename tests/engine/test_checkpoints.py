"""Checkpoints that are damaged, cannot be written or cannot be deleted."""

import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.trees import assert_same

from onejit.engine import checkpoints
from onejit.engine.carry import Carry
from onejit.engine.checkpoints import open_checkpoints, restore, save

ARRAYS = "default/d/arrays"


def make_checkpoint(directory: Path, step: int, with_checksums: bool = True) -> Path:
    """Files in the places where Orbax writes them."""
    folder = directory / str(step)
    (folder / ARRAYS).parent.mkdir(parents=True)
    (folder / "_METADATA").write_text("{}")
    (folder / ARRAYS).write_bytes(bytes(range(256)))
    if with_checksums:
        checkpoints.write_checksums(folder)
    return folder


def truncate(folder):
    (folder / ARRAYS).write_bytes(bytes(range(50)))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (ARRAYS, bytes(range(50)), "default/d/arrays has another checksum"),
        (ARRAYS, bytes([1, *range(1, 256)]), "default/d/arrays has another checksum"),  # one bit
        ("_METADATA", None, "_METADATA is missing"),
        (checkpoints.CHECKSUMS, None, "was not written completely"),
        (checkpoints.CHECKSUMS, b'{"_METADATA"', "checksums.json cannot be read"),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(file, content, words, tmp_path, capsys):
    directory = tmp_path / "checkpoints"
    for step in (9, 10, 20):
        make_checkpoint(directory, step)
    (directory / "20" / file).unlink()
    if content is not None:
        (directory / "20" / file).write_bytes(content)
    checkpoints.delete_damaged(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["10", "9"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "checkpoints/20 is damaged: " in said and words in said
    assert said.endswith("deleted, and checkpoints/10 is used\n")


@pytest.mark.parametrize("steps", [(), (10,), (10, 20)])
def test_the_first_checkpoints_may_lack_checksums(steps, tmp_path, capsys):
    for step in steps:
        make_checkpoint(tmp_path, step, with_checksums=False)
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()  # of a kill; Orbax deletes it
    checkpoints.delete_damaged(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(steps) + 1 and not capsys.readouterr().err


def test_an_older_checkpoint_without_checksums_stands_in(tmp_path, capsys):
    make_checkpoint(tmp_path, 10, with_checksums=False)
    truncate(make_checkpoint(tmp_path, 20))
    checkpoints.delete_damaged(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


@pytest.mark.parametrize("name", ["lr=0.001,hidden_sizes=[64,64]", b"r\xe9sum\xe9"])
def test_checkpoints_in_a_folder_of_any_name(name, tmp_path):
    """Orbax takes the path for a pattern, and needs names that are UTF-8.

    Environments may have arrays of no entries, of which Orbax keeps none.
    """
    folder = tmp_path / os.fsdecode(name) / "checkpoints"
    carry = Carry({"none": jnp.zeros((2, 0), jnp.int32)}, {"loss": jnp.arange(6.0).reshape(2, 3)})
    program = SimpleNamespace(abstract=jax.eval_shape(lambda: carry))
    with open_checkpoints(folder) as manager:
        save(manager, 1, carry)
    assert not checkpoints.damage_of(folder / "1")
    with open_checkpoints(folder) as manager:
        assert_same(restore(manager, 1, program), carry)


def test_checkpoints_that_cannot_be_deleted_stay(tmp_path, monkeypatch, capsys):
    """Under another name: what Orbax sees are the newest intact ones."""
    for step in range(1, 6):
        (tmp_path / str(step)).mkdir()
        checkpoints.write_checksums(tmp_path / str(step))
    (tmp_path / "5" / checkpoints.CHECKSUMS).unlink()

    def rmdir(*args, **kwargs):
        raise OSError("Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        checkpoints.delete_damaged(tmp_path)
        checkpoints.delete_old(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == 5 and {name for name in names if name.isdecimal()} == {"3", "4"}
    assert "5 is damaged" in capsys.readouterr().err
    (tmp_path / "5").mkdir()
    checkpoints.delete_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"4", "5"} and checkpoints.KEPT == 2


def test_a_checkpoint_on_a_full_disk_is_one_line(full_disk, caplog):
    """Without the tracebacks of Orbax's threads."""
    carry = Carry({}, {"loss": jnp.asarray(np.random.default_rng(0).normal(size=20_000))})
    with (
        full_disk("files", 20_000) as (folder, cause),
        open_checkpoints(folder / "checkpoints") as manager,
        pytest.raises(OSError, match=f"update 1 cannot be written: {cause}"),
    ):
        save(manager, 1, carry)
    assert not [record for record in caplog.records if record.name == "absl"]
