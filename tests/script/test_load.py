"""Where scripts are found: in a checkout, and in an installed package."""

import os
import subprocess
import sys
import zipfile

import pytest
from support.files import ROOT

from onejit.script import load

TINY = ["--total-timesteps=600", "--num-steps=100", "--num-seeds=2"]


def start(*words, folder, **environment):
    """A process in `folder`; returns what it printed."""
    how = dict(
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    done = subprocess.run([sys.executable, *map(str, words)], **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_scripts_lie(tmp_path, monkeypatch):
    """Next to the package in a checkout, inside of it where it is installed: then not what lies
    next to it.
    """
    package = tmp_path / "onejit"
    package.mkdir()
    (tmp_path / "ppo.py").write_text("")
    (tmp_path / "configs" / "ppo").mkdir(parents=True)
    (tmp_path / "plot.py").write_text("")  # a user's own file
    monkeypatch.setattr(load, "PACKAGE", package)
    monkeypatch.setattr(load, "ROOT", tmp_path)
    assert load.known_scripts() == {"ppo": tmp_path / "ppo.py"}
    (package / "scripts").mkdir()
    (package / "scripts" / "dqn.py").write_text("")
    assert load.known_scripts() == {"dqn": package / "scripts" / "dqn.py"}


@pytest.mark.slow
def test_from_a_wheel(tmp_path):
    """The wheel holds the scripts: one trains by its name."""
    start(
        "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, folder=tmp_path
    )
    (wheel,) = tmp_path.glob("onejit-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    words = ["-m", "onejit", "train", "q_learning_gridworld", *TINY, "--run-dir=run"]
    start(*words, folder=tmp_path, **environment)
    assert (tmp_path / "run" / "run.json").is_file()
    where = start("-c", "import onejit; print(onejit.__file__)", folder=tmp_path, **environment)
    assert where.startswith(str(tmp_path))
