"""`onejit new`: a copy trains at once, under its own name, from a checkout and from an installed
package.
"""

import ast
import os
import subprocess
import sys
import zipfile

import pytest
import tyro
from support.files import ROOT, SCRIPTS

from onejit import __main__, train
from onejit.run.record import read_record
from onejit.script import load, new

TINY = ["--total-timesteps=600", "--num-steps=100", "--num-seeds=2"]


def start(*words, folder, **environment):
    """A process in `folder`; returns what it printed."""
    how = dict(
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    done = subprocess.run([sys.executable, *map(str, words)], **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_copied(name, tmp_path):
    """The header and the code are the same; the docstring has a new first line and starts the
    copy.
    """
    path = new.main(name, tmp_path / "mine.py")
    old, text = ((ROOT / f"{name}.py").read_text(), path.read_text())
    assert text.split('"""')[0] == old.split('"""')[0] and text.startswith("# /// script")
    assert text.split('"""', 2)[2] == old.split('"""', 2)[2]
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring.startswith(
        f"mine: say here what it does. It began as a copy of onejit's {name}.py.\n\n"
    )
    assert "python mine.py" in docstring and f"python {name}.py" not in docstring


def test_a_copy_trains(tmp_path, monkeypatch):
    """By itself in a folder without onejit, and by `onejit train`; its runs bear its name."""
    path = new.main("q_learning_gridworld", tmp_path / "my_algorithm.py")
    start(path.name, *TINY, "--run-dir=own", folder=tmp_path, PYTHONPATH="")
    monkeypatch.chdir(tmp_path)
    run_dir = train.main([path.name, *TINY, "--run-dir=runs/mine"])
    for folder in ("own", run_dir):
        assert read_record(folder).settings["script"] == "my_algorithm"
    assert (run_dir / "my_algorithm.py").read_bytes() == path.read_bytes()


def test_names_of_copies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path, expected in (
        (None, "my_dqn.py"),
        ("folder", "folder/my_dqn.py"),
        ("mine", "mine.py"),
    ):
        assert (
            str(new.main("dqn", path and tmp_path / path)).endswith(expected)
            and (tmp_path / expected).is_file()
        )
    assert "mine.py is a copy of dqn.py" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["dqn", "mine.py"], "path = mine.py: already exists"),
    (["dqm"], "script = dqm: is not a script of onejit; known scripts are alphazero, "),
    ([], "script = : is not a script of onejit"),
    (["dqn", "my-dqn.py"], "path = my-dqn.py: must have a name that Python can import"),
    (["dqn", "random.py"], "path = random.py: must have a name"),
    (["dqn", "optax.py"], "path = optax.py: must have a name"),
    (["ppo_continuous", "brax.py"], "path = brax.py: must have a name"),  # imported in a function
    (["dqn", "chex.py"], "path = chex.py: must have a name"),  # needed by optax
    (["dqn", "class.py"], "path = class.py: must have a name"),
    (["dqn", "a.py", "b.py"], "b.py"),
])  # fmt: skip
def test_bad_input(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        __main__.main(["new", *words])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and said.count("\n") == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_list(capsys):
    tyro.cli(new.main, args=["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == SCRIPTS
    assert all(len(line.split()) > 4 for line in lines)
    assert "Proximal Policy Optimization" in lines[SCRIPTS.index("ppo")]


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
    """The wheel holds all scripts: a copy of one trains, and so does one by its name."""
    start(
        "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, folder=tmp_path
    )
    (wheel,) = tmp_path.glob("onejit-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    listed = start("-m", "onejit", "new", "--list", folder=tmp_path, **environment)
    assert [line.split()[0] for line in listed.splitlines()] == SCRIPTS
    start("-m", "onejit", "new", "q_learning_gridworld", "mine.py", folder=tmp_path, **environment)
    for script in ("mine.py", "q_learning_gridworld"):
        words = ["-m", "onejit", "train", script, *TINY, f"--run-dir={script}-run"]
        start(*words, folder=tmp_path, **environment)
        assert (tmp_path / f"{script}-run" / "run.json").is_file()
    where = start("-c", "import onejit; print(onejit.__file__)", folder=tmp_path, **environment)
    assert where.startswith(str(tmp_path))


def test_a_reader_that_is_gone():
    """As `onejit new --list | head -1`: no complaint."""
    command = [sys.executable, "-m", "onejit", "new", "--list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 2
