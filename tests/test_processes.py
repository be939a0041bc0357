"""Scripts as people run them: alone in a folder, killed and resumed, on several devices."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT, assert_close, assert_same, flags, shifted_config, slow, small_config, trained

pytestmark = pytest.mark.common
NUM_UPDATES = 1000
TIME_LIMIT = 300  # seconds; no run takes a tenth of it on an idle machine


def command(script, run_dir: Path) -> list[str]:
    args = flags(small_config(script, NUM_UPDATES))
    return [*args, "--num-seeds=4", "--eval-episodes=2", "--checkpoint-interval=0", f"--run-dir={run_dir}"]


def run(args, folder: Path, **env) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, *args], cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert finished.returncode == 0, finished.stderr
    return finished


def steps(run_dir: Path) -> list[int]:
    """The committed checkpoints."""
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit())


def checkpoint(run_dir: Path):
    """The last one in NumPy arrays, on however many devices it was written."""
    checkpointer, path = ocp.StandardCheckpointer(), run_dir / "checkpoints" / str(steps(run_dir)[-1]) / "default"
    saved = checkpointer.metadata(path).item_metadata.tree
    return checkpointer.restore(path, jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved))


@pytest.fixture(scope="session")
def alone(script, tmp_path_factory):
    """A folder that holds nothing but the script and what a whole run of it left there, and what that run said."""
    folder = tmp_path_factory.mktemp(script.__name__)
    shutil.copy(script.__file__, folder)
    bare = {"PYTHONPATH": "", "PATH": ""}  # no sibling to import, not even git to ask
    return folder, run([f"{script.__name__}.py", *command(script, Path("whole"))], folder, **bare)


def test_alone_in_an_empty_folder(script, alone):
    folder, finished = alone
    assert {path.name for path in folder.iterdir()} <= {f"{script.__name__}.py", "__pycache__", "whole"}
    left = {path.name for path in (folder / "whole").iterdir()}
    assert left >= {"config.yaml", "run.json", "metrics.npz", "learning_curve.png", "checkpoints"}
    assert json.loads((folder / "whole" / "run.json").read_text())["first_update"] == 0
    assert np.load(folder / "whole" / "metrics.npz")["episodes"].shape == (4, NUM_UPDATES)
    assert "Traceback" not in finished.stderr and "Warning" not in finished.stderr


def test_killed_and_resumed(script, alone):
    folder, run_dir = alone[0], alone[0] / "killed"
    args = [sys.executable, f"{script.__name__}.py", *command(script, run_dir)]
    with subprocess.Popen(args, cwd=folder, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + TIME_LIMIT
        while process.poll() is None:
            saving = any(run_dir.glob("checkpoints/*tmp*"))  # a worse moment to die than most
            if (saving and max(steps(run_dir), default=0) > 1) or time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    done = max(steps(run_dir), default=0)
    assert 1 < done < NUM_UPDATES and not (run_dir / "metrics.npz").exists()  # it was midway

    finished = run([*args[1:], "--resume"], folder)
    assert f"{done} of them done" in finished.stdout
    assert json.loads((run_dir / "run.json").read_text())["first_update"] == done
    assert_same(*(dict(np.load(path / "metrics.npz")) for path in (folder / "whole", run_dir)))
    assert_same(checkpoint(folder / "whole"), checkpoint(run_dir))
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in (folder / "whole").iterdir()}
    assert not list(run_dir.rglob("*tmp*")), "what was being written at the kill is still there"


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    "env, before, devices",
    [
        ({}, "", CORES),
        slow({"JAX_NUM_CPU_DEVICES": "3"}, "", 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "", 3),
        ({}, "import jax.numpy; jax.numpy.zeros(1)", 1),  # JAX has started
    ],
)
def test_each_core_is_a_device_unless_chosen(env, before, devices, tmp_path):
    code = f"import jax, ppo\n{before}\nppo.use_all_cores()\nprint(jax.local_device_count())"
    finished = run(["-c", code], tmp_path, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), **env)
    assert int(finished.stdout) == devices


FOUR_DEVICES = """
import sys
import {name} as script
script.main(sys.argv[1:])
_, advance, abstract, _ = script.compile_training(*script.parse(sys.argv[1:], script.Config))
open("program.txt", "w").write(advance.lower(abstract, 0, 1).compile().as_text())
"""


def test_seeds_spread_over_devices(script, tmp_path):
    xla_flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"  # compiles twice as fast
    code = FOUR_DEVICES.format(name=script.__name__)
    args = [*flags(shifted_config(script)), "--num-seeds=4", "--eval-episodes=2", f"--run-dir={tmp_path / 'run'}"]
    finished = run(["-c", code, *args], tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags, PYTHONPATH=str(ROOT))
    assert "4 seeds on 4 device" in finished.stdout
    metrics = dict(np.load(tmp_path / "run" / "metrics.npz"))
    assert metrics.pop("evaluation").shape == (4, 2)
    assert_close(trained(script) | {"metrics": metrics}, trained(script))
    program = (tmp_path / "program.txt").read_text()
    assert "num_partitions=4" in program
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", program)
