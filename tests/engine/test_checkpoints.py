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
from onejit.engine.checkpoints import newest, restore, save

CARRY = Carry(
    {
        "keys": jax.random.split(jax.random.key(0), 2),
        "few": jnp.ones((2, 3), jnp.bfloat16),
        "none": jnp.zeros((2, 0), jnp.int32),
    },
    {"loss": jnp.arange(6.0).reshape(2, 3)},
)
PROGRAM = SimpleNamespace(abstract=CARRY)


def make_checkpoint(directory: Path, update: int) -> Path:
    """Write a checkpoint. Returns its file."""
    save(directory, update, CARRY)
    (file,) = (directory / str(update)).iterdir()
    return file


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_what_is_written_is_read(tmp_path):
    make_checkpoint(tmp_path, 10)
    assert_same(restore(tmp_path, 10, PROGRAM), CARRY)
    longer = CARRY._replace(metrics={"loss": jnp.zeros((2, 5))})
    found = restore(tmp_path, 10, SimpleNamespace(abstract=longer))
    np.testing.assert_array_equal(found.metrics["loss"][0], [0, 1, 2, np.nan, np.nan])
    for other in ({"keys": CARRY.runner_state["keys"]}, {"few": jnp.ones((2, 4), jnp.bfloat16)}):
        program = SimpleNamespace(abstract=CARRY._replace(runner_state={"one": other} | other))
        with pytest.raises(OSError, match=r"checkpoint .*/10 does not fit the script"):
            restore(tmp_path, 10, program)


@pytest.mark.parametrize(
    "damage", [lambda file: os.truncate(file, 100), lambda file: flip(file, -700)]
)
def test_the_checkpoint_before_a_damaged_one_is_used(damage, tmp_path, capsys):
    directory = tmp_path / "lr=0.1,hidden_sizes=[64]" / "checkpoints"
    for update in (9, 10, 20):
        file = make_checkpoint(directory, update)
    damage(file)
    assert newest(directory) == 10
    assert {path.name for path in directory.iterdir()} == {"10", "20.damaged"}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "checkpoints/20 is damaged: " in said
    assert said.endswith("is now 20.damaged, and checkpoints/10 is used\n")


def test_a_changed_bit_is_noticed_or_changes_nothing(tmp_path):
    file = make_checkpoint(tmp_path, 10)
    data = file.read_bytes()
    expected = checkpoints.read(file.parent)
    noticed = 0
    for place in range(0, len(data), 3):
        flip(file, place)
        try:
            found = checkpoints.read(file.parent)
            assert found.keys() == expected.keys()
            assert all((found[name] == expected[name]).all() for name in expected)
        except OSError:
            noticed += 1
        file.write_bytes(data)
    assert noticed > len(data) / 6


def test_a_checkpoint_that_was_being_written_is_none(tmp_path, capsys):
    """Also one of several processes of which one has not written its part."""
    assert newest(tmp_path / "none") == 0
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "00000-of-1.npz.partial").touch()
    part = make_checkpoint(tmp_path, 20)
    part.rename(part.with_name("00000-of-2.npz"))
    assert newest(tmp_path) == 0
    assert not any(tmp_path.iterdir()) and not capsys.readouterr().err


def test_checkpoints_of_an_older_version_stay(tmp_path):
    (tmp_path / "10" / "default").mkdir(parents=True)
    with pytest.raises(OSError, match=f"{tmp_path} is of an older version of onejit"):
        newest(tmp_path)
    assert (tmp_path / "10" / "default").is_dir()


def test_checkpoints_that_cannot_be_deleted_stay(tmp_path, monkeypatch, capsys):
    """Under another name."""
    carry = Carry({}, {"loss": jnp.zeros((2, 3))})
    for update in range(1, 5):
        (tmp_path / "part").mkdir()
        save(tmp_path / "part", update, carry)
        (tmp_path / "part" / str(update)).rename(tmp_path / str(update))
        (tmp_path / "part").rmdir()
    os.truncate(tmp_path / "4" / "00000-of-1.npz", 100)

    def rmdir(*args, **kwargs):
        raise OSError("Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        assert newest(tmp_path) == 3
        checkpoints.delete_old(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == 4 and {name for name in names if name.isdecimal()} == {"2", "3"}
    assert "4 is damaged" in capsys.readouterr().err
    save(tmp_path, 5, carry)
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4.damaged", "5"}
    assert checkpoints.KEPT == 2


def test_a_checkpoint_on_a_full_disk_is_one_line(full_disk):
    carry = Carry({}, {"loss": jnp.asarray(np.random.default_rng(0).normal(size=(2, 10_000)))})
    with (
        full_disk("files", 20_000) as (folder, cause),
        pytest.raises(OSError, match=rf"1/00000-of-1.npz: cannot be written \({cause}\)"),
    ):
        save(folder, 1, carry)
