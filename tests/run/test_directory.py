"""What is read from a run directory, and the names of folders."""

import dataclasses
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import pytest
from support.files import ROOT

from onejit.run import directory
from onejit.run.lock import lock
from onejit.run.record import Record
from onejit.script import load
from onejit.script.local_modules import hash_of

NAME = "q_learning_gridworld"


def test_the_script_of_a_run(tmp_path, monkeypatch, capfd):
    """Its copy, else onejit's own, never the one in the working directory.

    An edited copy is a warning, or an error. So is onejit's own if it is another version's.
    """
    own = ROOT / f"{NAME}.py"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path(own.name).write_text("raise RuntimeError('not this one')")
    record = Record(settings={"script": NAME})
    assert Path(directory.script_of(tmp_path, record).__file__) == own
    said = capfd.readouterr()
    assert f"has no copy of its script; {own} is used instead" in said.out and not said.err
    record.sha256 = "of another version"
    directory.script_of(tmp_path, record)
    assert f"{own}: is not as it was when the run began" in capfd.readouterr().err
    with pytest.raises(ValueError, match="does not exist, and onejit has no script of this name"):
        directory.script_of(tmp_path, Record(settings={"script": "mine"}))

    copy = Path(shutil.copy(own, tmp_path))
    record.sha256 = hash_of(copy.read_bytes())
    assert Path(directory.script_of(tmp_path, record, accept_edited=False).__file__) == copy
    assert capfd.readouterr() == ("", "")
    record.sha256 = "another"
    with pytest.raises(ValueError, match=f"{copy}: is not as it was .*; --force"):
        directory.script_of(tmp_path, record, accept_edited=False)
    assert Path(directory.script_of(tmp_path, record).__file__) == copy
    assert capfd.readouterr().err == f"warning: {copy}: is not as it was when the run began\n"


def test_the_config_of_an_extended_run():
    config = load.load_script(NAME).Config()
    steps = config.total_timesteps
    for more in (0, 1000):
        record = Record(settings={"total_timesteps": steps + more})
        expected = dataclasses.replace(config, total_timesteps=steps + more)
        assert directory.with_all_steps(config, record) == expected


def test_the_returns_of_a_run(tmp_path):
    """Greedy episodes, else the stored return, else the return of the metrics."""
    metrics = {"episodes": np.ones((2, 20)), "episodic_return": np.tile(np.arange(20.0), (2, 1))}
    np.savez(tmp_path / "metrics.npz", **metrics)
    results = directory.load_results(tmp_path)
    assert results.training_return().tolist() == [18.5, 18.5]
    np.save(tmp_path / "final_return.npy", [1.0, 2.0])
    values, words = directory.load_results(tmp_path).best_known_return()
    assert values.tolist() == [1, 2] and words == "the return at the end of training"
    np.save(tmp_path / "evaluation.npy", [[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    values, words = directory.load_results(tmp_path).best_known_return()
    assert values.tolist() == [3, 1] and "greedy" in words


def test_names_of_folders():
    script = SimpleNamespace(__file__="/somewhere/mine.py")
    names = [directory.new_run_dir(script, SimpleNamespace(env_name="my:Env")) for _ in range(2)]
    assert names[0] != names[1]
    assert all(path.parent == Path("runs/mine") for path in names)
    assert all(path.name.startswith("Env-2") for path in names)
    whole = directory.checkpoints_of("run", range(4), 4)
    assert whole == Path("run/checkpoints")
    assert directory.checkpoints_of("run", range(2, 4), 4) == whole / "00002-00004"


def test_a_look_at_the_lock_stops_nobody(tmp_path):
    """`onejit list` holds it for a moment."""
    look = filelock.FileLock(tmp_path / ".lock", thread_local=False)
    look.acquire()
    threading.Timer(0.1, look.release).start()
    lock(tmp_path).release()
