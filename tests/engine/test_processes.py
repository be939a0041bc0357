"""Runs as people start them: killed and resumed, on several devices, and what carries over in every
script.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.files import ROOT
from support.small import flags, shifted_config, small_config
from support.tiers import slow
from support.training import trained
from support.trees import arrays, assert_close, assert_same

from onejit.engine import checkpoints, compilation, loop
from onejit.run.directory import load_run

NUM_UPDATES = 100
TIME_LIMIT = 300  # seconds; no run takes a tenth of it on an idle machine
TRAIN = "-m", "onejit", "train"


def command(script, run_dir: Path) -> list[str]:
    args = [script.__file__, *flags(small_config(script, NUM_UPDATES)), f"--run-dir={run_dir}"]
    return [*args, "--num-seeds=4", "--eval-episodes=2", "--checkpoint-interval=0.001"]


def run(args, folder: Path, **env) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert finished.returncode == 0, finished.stderr
    return finished


def steps(run_dir: Path) -> list[int]:
    """The complete checkpoints."""
    return checkpoints.updates_of(run_dir / "checkpoints")


def checkpoint(run_dir: Path) -> dict:
    """The last one in NumPy arrays, on however many devices it was written."""
    return checkpoints.read(run_dir / "checkpoints" / str(steps(run_dir)[-1]))


@pytest.fixture(scope="session")
def whole(script, tmp_path_factory):
    """A run of onejit train that was left alone."""
    run_dir = tmp_path_factory.mktemp(script.__name__) / "whole"
    run([*TRAIN, *command(script, run_dir)], run_dir.parent)
    return run_dir


@pytest.mark.common
@pytest.mark.parametrize("how", [signal.SIGKILL, slow(signal.SIGINT)])
def test_killed_and_resumed(script, whole, how, tmp_path):
    run_dir = tmp_path / "killed"
    args = [sys.executable, *TRAIN, *command(script, run_dir)]
    with subprocess.Popen(
        args, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + TIME_LIMIT
        while process.poll() is None:
            if steps(run_dir) or time.monotonic() > deadline:
                os.killpg(process.pid, how)
                process.wait()
            time.sleep(0.001)
        complaints = process.stderr.read()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"stopped by SIGINT; onejit resume {run_dir} continues" in complaints
        assert "Traceback" not in complaints
    else:
        assert process.returncode == -signal.SIGKILL
    done = max(steps(run_dir), default=0)
    assert 0 < done < NUM_UPDATES and not (run_dir / "metrics.npz").exists()  # it was midway

    finished = run([*TRAIN[:2], "resume", run_dir], tmp_path)
    assert f"{done} of {NUM_UPDATES} updates are done" in finished.stderr
    assert_same(*(dict(np.load(path / "metrics.npz")) for path in (whole, run_dir)))
    assert_same(*(load_file(path / "agent.safetensors") for path in (whole, run_dir)))
    for name in ("evaluation.npy", "learning_curve.png", "config.yaml"):
        assert (whole / name).read_bytes() == (run_dir / name).read_bytes(), name
    assert_same(checkpoint(whole), checkpoint(run_dir))
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in whole.iterdir()}
    assert not list(run_dir.rglob("*.partial")), "what was being written at the kill is still there"


@pytest.mark.common("ppo_rnn")  # it carries most
def test_every_script_resumes(script, tmp_path):
    """What each carries comes back from a checkpoint bit for bit, replay, statistics, optimizer,
    keys, and can play.
    """
    options = SimpleNamespace(seed=0, eval_episodes=3, eval_interval=0)
    program = compilation.compile_slice(script, small_config(script, 2), [], 2, options)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 2)))
    carry = program.advance(program.start({}, jax.device_put(keys, program.sharding)), {}, 0, 1)
    loop.save(tmp_path, 1, carry)
    again = loop.restore(tmp_path, 1, program)
    assert_same(carry, again)
    carry, again = program.advance(carry, {}, 1, 2), program.advance(again, {}, 1, 2)
    assert_same(carry, again)
    numbers = jax.device_put(np.arange(2, dtype=np.int32), program.sharding)  # of the agents
    returns = np.asarray(program.evaluate(again.runner_state.agent, numbers))
    assert returns.shape == (2, 3) and np.isfinite(returns).all()


@pytest.mark.parametrize(
    "env, before, devices",
    [
        ({}, "", len(os.sched_getaffinity(0))),
        slow({"JAX_NUM_CPU_DEVICES": "3"}, "", 3),
        slow({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "", 3),
        slow({}, "import jax.numpy; jax.numpy.zeros(1)", 1),  # JAX has started
    ],
)
def test_each_core_is_a_device_unless_chosen(env, before, devices, tmp_path):
    code = f"import jax\n{before}\nfrom onejit import train\nprint(jax.local_device_count())"
    unset = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    env = unset | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | env
    finished = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert int(finished.stdout) == devices


FOUR_DEVICES = """
import sys
from onejit.engine import compilation
from onejit import train
from onejit.run.directory import load_run
run_dir = train.main(sys.argv[1:])
script, config, agent = load_run(run_dir)
options = train.Options(eval_episodes=2)
program = compilation.compile_slice(script, config, [], 4, options)
open("program.txt", "w").write(program.advance.as_text())
"""


@pytest.mark.common
def test_seeds_spread_over_devices(script, tmp_path):
    """And nothing crosses them: their program has no collective operation."""
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    args = [script.__file__, *flags(shifted_config(script)), f"--run-dir={tmp_path / 'run'}"]
    args += ["--num-seeds=4", "--eval-episodes=2"]
    finished = run(["-c", FOUR_DEVICES, *args], tmp_path, **env)
    assert "4 seeds in 1 slice on 4 devices" in finished.stdout
    assert np.load(tmp_path / "run" / "evaluation.npy").shape == (4, 2)
    metrics = dict(np.load(tmp_path / "run" / "metrics.npz"))
    assert_close(trained(script) | {"metrics": metrics}, trained(script))
    program = (tmp_path / "program.txt").read_text()
    assert "num_partitions=4" in program
    assert not re.findall(
        r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", program
    )


UNEVEN = """
import sys
from onejit.engine import compilation
from onejit import train
compilation.largest_slice = lambda compile_size, total, step, memory: compile_size(4)
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_slices_of_different_size_lie_on_different_devices(tmp_path):
    """Six agents on four devices, four and two at once."""
    args = ["q_learning_gridworld", "--num-steps=100", "--total-timesteps=500", "--num-seeds=6"]
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    finished = run(["-c", UNEVEN, *args, "--run-dir=run"], tmp_path, **env)
    assert "6 seeds in 2 slices of at most 4 on 4 devices" in finished.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["slice"] == 4 and record["final return"]["seeds"] == 6

    agents = load_run(tmp_path / "run")[2]
    assert all(len(leaf) == 6 for leaf in jax.tree.leaves(agents))
    run(
        [*TRAIN[:2], "resume", "run"], tmp_path, JAX_NUM_CPU_DEVICES="3"
    )  # as many as there are now
    again = load_run(tmp_path / "run")[2]
    for leaf, other in zip(arrays(agents), arrays(again), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-5)
