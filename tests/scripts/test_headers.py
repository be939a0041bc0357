"""Each script, alone in an empty folder, trains with `uv run`, which installs what its header names
and nothing else.

All are in the slow tier, because each takes up to 40 s. uv downloads the packages once and keeps
them in its cache; the first time needs the network.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.compilation import NO_OPTIMIZATION
from support.files import ROOT, SCRIPTS
from support.small import flags, small_config

WRITTEN = {"config.yaml", "metrics.npz", "learning_curve.png", "agent.safetensors"}
OF_MINE = ("PYTHON", "JAX_", "XLA_", "VIRTUAL_ENV", "CONDA_")
OF_MINE += ("UV_EXCLUDE", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_PROJECT")


@pytest.fixture(scope="module")
def uv():
    """The command, as `uv` of the virtual environment or of the path."""
    module = [sys.executable, "-m", "uv"]
    if subprocess.run([*module, "--version"], capture_output=True).returncode == 0:
        return module
    assert shutil.which("uv"), "uv is missing: pip install -c constraints.txt -e '.[dev]'"
    return [shutil.which("uv")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """That of a user's shell, without what the tests or this virtual environment have set."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(OF_MINE)}
    cache = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "headers")
    return mine | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_COMPILATION_CACHE_MAX_SIZE": os.environ.get("JAX_COMPILATION_CACHE_MAX_SIZE", "-1"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "JAX_NUM_CPU_DEVICES": "1",
        # the packages are compiled for all scripts once
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode")),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory, uv, environment):
    """Where a script lies while it is tested. uv keeps an environment per path and makes it what
    the header says.
    """
    path = tmp_path_factory.mktemp("alone") / "script.py"
    yield path
    folder = environment_of(path, uv, environment)
    if folder.name.startswith("script-"):
        shutil.rmtree(folder)


def environment_of(path, uv, environment) -> Path:
    """The folder of the virtual environment in which `uv run` starts the script."""
    found = subprocess.run(
        [*uv, "python", "find", "--script", path], env=environment, capture_output=True, text=True
    )
    return Path(found.stdout.strip()).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_with_the_packages_of_its_header(name, path, uv, environment):
    def run(*words, **more):
        command = [*uv, *words]
        return subprocess.run(
            command, cwd=path.parent, env=environment | more, capture_output=True, text=True
        )

    path.write_text((ROOT / f"{name}.py").read_text())
    python = ["--python", sys.executable]
    done = run("sync", "--script", path.name, *python)
    assert done.returncode == 0, (
        f"uv cannot install the header of {name}.py; it needs the network:\n{done.stderr}"
    )
    small = flags(small_config(importlib.import_module(name), 1))
    train = [*small, "--num-seeds", "1", "--run-dir", "run"]
    done = run("run", *python, path.name, *train, XLA_FLAGS=NO_OPTIMIZATION)
    said = f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, (
        f"{name}.py does not train with the packages of its header:\n{said}"
    )
    assert "Traceback" not in done.stderr and "UserWarning" not in done.stderr, said
    assert {file.name for file in (path.parent / "run").iterdir()} >= WRITTEN
    shutil.rmtree(path.parent / "run")
