"""tools/train.py: as `main`, in slices, tracked, resumed, and on several processes that are joined."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, assert_same

sys.path.insert(0, str(ROOT / "tools"))
import common
import render
import slices
import train

SMALL = ["q_learning_gridworld", "--env-name=CliffWalking", "--max-episode-steps=50", "--num-steps=100"]
SMALL += ["--total-timesteps=2000", "--eval-episodes=2", "--num-seeds=4"]  # 20 updates
NUM_UPDATES = 20
TIME_LIMIT = 180  # seconds; no run takes a tenth of it on an idle machine


def metrics_of(run_dir) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


def assert_agree(metrics, others):
    """Over the first updates: differently compiled programs part later."""
    assert set(metrics) == set(others)
    for name in set(metrics) - {"evaluation"}:
        assert metrics[name].shape == others[name].shape
        np.testing.assert_allclose(metrics[name][:, :8], others[name][:, :8], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def script():
    return common.load_script(SMALL[0])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train.main([*SMALL, f"--run-dir={tmp_path_factory.mktemp('train') / 'run'}"])


# --- one process ---


def test_as_main(script, finished, tmp_path):
    script.main([*SMALL[1:], f"--run-dir={tmp_path / 'main'}"])
    assert_agree(metrics_of(finished), metrics_of(tmp_path / "main"))
    assert metrics_of(finished)["evaluation"].shape == (4, 2)
    assert {path.name for path in finished.iterdir()} == {path.name for path in (tmp_path / "main").iterdir()}
    record, other = (json.loads((path / "run.json").read_text()) for path in (finished, tmp_path / "main"))
    assert record["settings"] == other["settings"]
    assert {"final return", "greedy return"} & set(record) == {"final return", "greedy return"} & set(other)
    assert record["command"].startswith("python tools/train.py q_learning_gridworld") and record["slice"] == 4


def test_report_sees_what_main_shows_it(script, finished, tmp_path, monkeypatch):
    """The run directory holds the metrics then: a picture of the script's own may be of them."""
    seen = []
    monkeypatch.setattr(script, "report", lambda config, agents, run_dir: seen.append((agents, metrics_of(run_dir))))
    train.main([*SMALL, f"--run-dir={tmp_path / 'tool'}"])
    script.main([*SMALL[1:], f"--run-dir={tmp_path / 'main'}"])
    (agents, metrics), (others, _) = seen
    assert_same(metrics, metrics_of(tmp_path / "tool"))
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(agents)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)
    ]


def test_copy_from_before_the_blocks_changed(tmp_path):
    source = (ROOT / "q_learning_gridworld.py").read_text().replace("def write_results(", "def save_results(")
    (tmp_path / "older.py").write_text(source)
    with pytest.raises(ValueError, match="its blocks are not those of these tools, it has no write_results"):
        common.load_script(str(tmp_path / "older.py"))


def test_slices_that_fit(script, finished, tmp_path, capsys):
    """Seven seeds by threes."""
    args = [*SMALL[:-2], "--eval-episodes=0", "--num-seeds=7"]
    config, options = script.parse(args[1:], script.Config)
    memory = slices.compile_slice(script, config, [], 3, options).bytes * 1.01 / slices.GIB
    run_dir = tmp_path / "run"
    train.main([*args, f"--memory={memory}", f"--run-dir={run_dir}"])
    assert "7 seeds in 3 slice(s) of 3" in capsys.readouterr().out
    checkpoints = sorted(path.name for path in run_dir.glob("checkpoints*"))
    assert checkpoints == ["checkpoints-00000-00003", "checkpoints-00003-00006", "checkpoints-00006-00007"]
    metrics = metrics_of(run_dir)
    assert len(np.unique(metrics["q_value"][:, -1])) == 7
    seven = slices.compile_slice(script, config, [], 7, options)
    with slices.open_checkpoints(tmp_path / "none", keep=1) as manager:
        carry = slices.train_slice(seven, {}, slices.seed_keys(options), manager, 1e9, lambda *_: None, False)
    assert_agree({name: metrics[name] for name in carry["metrics"]}, slices.fetch(seven, carry["metrics"]))
    train.main([*args, "--memory=9", f"--run-dir={run_dir}", "--resume"])  # in the slices that it began with
    assert_same(metrics, metrics_of(run_dir))
    *_, carry, done = render.load_run(run_dir, "")
    assert_same(metrics, {name: np.asarray(values) for name, values in carry["metrics"].items()})
    assert done == NUM_UPDATES and len(carry["runner_state"].params["q"]) == 7
    shutil.rmtree(run_dir / checkpoints[-1])
    with pytest.raises(ValueError, match="only 6 of 7 agents"):
        render.load_run(run_dir, "")


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run that ended at its second checkpoint, and the arguments that go on with it."""
    saved, save = [], slices.save

    def save_and_stop(manager, step, carry):
        save(manager, step, carry)
        saved.append(step)
        if len(saved) == 2:
            raise KeyboardInterrupt

    args = [*SMALL, "--checkpoint-interval=0", f"--run-dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(slices, "save", save_and_stop)
        train.main(args)
    assert 0 < saved[-1] < NUM_UPDATES and not (tmp_path / "run" / "metrics.npz").exists()
    return tmp_path / "run", [*args, "--resume"], saved[-1]


def test_resume(finished, interrupted, capsys):
    run_dir, args, done = interrupted
    train.main(args)
    assert f"{done} of {NUM_UPDATES} updates are done" in capsys.readouterr().out
    assert_same(metrics_of(finished), metrics_of(run_dir))


def test_script_goes_on_with_the_run(script, finished, interrupted):
    script.main(interrupted[1][1:])
    assert_agree(metrics_of(finished), metrics_of(interrupted[0]))


def test_resume_from_a_damaged_checkpoint(finished, tmp_path, capfd):
    copy = shutil.copytree(finished, tmp_path / "copy")
    largest = max((copy / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[:50])
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, f"--run-dir={copy}", "--resume"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("train.py: error: run_dir"), message
    assert "resume: the checkpoint checkpoints/20 cannot be read" in message, message


@pytest.mark.parametrize("args, words", [
    ([], "SCRIPT"),
    (["no_such_script"], "script no_such_script"),
    ([*SMALL, "--gama=0.9"], "gama gamma"),
    ([*SMALL, "--gamma=2"], "gamma 2"),
    ([*SMALL[:-1], "--num-seeds=0"], "num_seeds 0"),
    ([SMALL[0], "--env-name=Nowhere"], "env_name Nowhere"),
    ([*SMALL, "--memory=1e-9"], "memory GiB"),
    ([*SMALL, "--memory=much"], "memory much"),
    ([*SMALL, "--track=paper"], "track paper"),
    ([*SMALL, "--num-processes=2"], "coordinator"),
    ([*SMALL, "--distributed"], "distributed"),
])  # fmt: skip
def test_refuses(args, words, tmp_path, capfd):
    with pytest.raises(SystemExit) as stop:
        train.main([*args, f"--run-dir={tmp_path / 'run'}"] if args else args)
    message = capfd.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1 and message.startswith("train.py: error: "), message
    assert all(word in message for word in words.split()), message
    assert not (tmp_path / "run").exists()


def test_run_dir_that_holds_a_run(finished, capfd):
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, f"--run-dir={finished}"])
    assert stop.value.code == 2 and "--resume goes on with a run" in capfd.readouterr().err


# --- tracking ---


def events(directory) -> list[tuple[str, int, float]]:
    """`(tag, step, value)` of TensorBoard's files: length (8 bytes), checksum (4), event, checksum (4)."""
    from tensorboardX.proto import event_pb2

    found = []
    for file in sorted(directory.glob("events*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard(script, tmp_path):
    run_dir = train.main([*SMALL, "--track=tensorboard", f"--run-dir={tmp_path / 'run'}"])
    found, metrics = events(run_dir / "tensorboard"), metrics_of(run_dir)
    tags = {tag for tag, _, _ in found}
    assert {f"episodic_return/seed_{seed:04d}" for seed in range(4)} | {"episodic_return/interquartile_mean"} <= tags
    assert {f"{name}/mean" for name in metrics if name not in ("episodic_return", "evaluation")} <= tags
    ends = sorted({step // 100 for _, step, _ in found})
    assert ends[-1] == NUM_UPDATES
    for tag, step, value in found:  # each point is of the updates since the one before
        last = step // 100
        first = max([end for end in ends if end < last], default=0)
        name, which = tag.split("/")
        if which == "mean":
            assert value == pytest.approx(np.nanmean(metrics[name][:, first:last]), rel=1e-4)
        elif which.startswith("seed"):
            seed = int(which.removeprefix("seed_"))
            assert value == pytest.approx(script.mean_return(metrics, first, last)[seed], rel=1e-4)


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    summaries, runs, init = [], [], wandb.init

    def init_and_keep(**settings):
        run = init(**settings)
        finish = run.finish
        run.finish = lambda: (summaries.append(dict(run.summary)), finish())
        runs.append(run)
        return run

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", init_and_keep)
    run_dir = train.main([*SMALL, "--track=wandb", f"--run-dir={tmp_path / 'run'}"])
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    (summary,), metrics = summaries, metrics_of(run_dir)
    assert summary["environment_steps"] == 2000 and runs[0].config["num_seeds"] == 4
    assert {f"episodic_return/seed_{seed:04d}" for seed in range(4)} | {"q_value/mean"} <= set(summary)
    assert metrics["q_value"].min() <= summary["q_value/mean"] <= metrics["q_value"].max()


def test_package_that_is_missing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, "--track=wandb", f"--run-dir={tmp_path / 'run'}"])
    message = capfd.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1 and "wandb" in message and "requirements-tools" in message


# --- many processes ---


def start(tool: str, args, count: int) -> list[subprocess.Popen]:
    """The same command in each of `count` processes, two fake CPU devices each."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    xla_flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, ROOT / "tools" / tool, *args, f"--coordinator=127.0.0.1:{port}"]
    return [
        subprocess.Popen(
            [*command, f"--num-processes={count}", f"--process-id={index}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def finish(processes) -> list[str]:
    """What they said. All are ended, whatever happens."""
    try:
        return [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(tool: str, args, count: int) -> list[str]:
    processes = start(tool, args, count)
    said = finish(processes)
    assert [process.returncode for process in processes] == [0] * count, said
    return said


def test_two_processes(finished, tmp_path):
    """Two of the four seeds on each, one on a device."""
    first, second = run("train.py", [*SMALL, f"--run-dir={tmp_path / 'run'}"], 2)
    assert "1 slice(s) of 4 on 4 device(s)" in first and "final return" in first
    assert "slice" not in second and "return" not in second and "step/s" not in second
    assert_agree(metrics_of(tmp_path / "run"), metrics_of(finished))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "steps_per_second" in record
    left = {path.name for path in finished.iterdir()} - {
        "q_values.png"
    }  # the script's own picture needs all agents here
    assert {path.name for path in (tmp_path / "run").iterdir()} == left


@pytest.mark.slow
def test_four_processes(script, tmp_path):
    args = [*SMALL[:-1], "--num-seeds=8"]
    run("train.py", [*args, f"--run-dir={tmp_path / 'four'}"], 4)
    train.main([*args, f"--run-dir={tmp_path / 'one'}"])
    assert_agree(metrics_of(tmp_path / "four"), metrics_of(tmp_path / "one"))


@pytest.mark.slow
def test_seeds_that_do_not_divide(tmp_path):
    processes = start("train.py", [*SMALL[:-1], "--num-seeds=5", f"--run-dir={tmp_path / 'run'}"], 2)
    said = finish(processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("num_seeds = 5: must be a multiple of the 4 devices" in each for each in said)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tool, options", [("train.py", []), ("sweep.py", ["--lr", "0.1", "0.5", "1"])])
@pytest.mark.parametrize("count", [2, 4])
def test_one_of_many_is_killed(tool, options, count, tmp_path):
    """The others end soon and say why. Resumed, they come to the same as without the kill."""
    small = [each for each in SMALL if tool == "train.py" or "eval" not in each]
    args = [*small[:-1], "--num-seeds=8", *options, "--num-steps=10", "--total-timesteps=400000"]
    args = [each for each in args if each not in ("--num-steps=100", "--total-timesteps=2000")]
    args.append("--checkpoint-interval=0.2")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    processes = start(tool, [*args, f"--run-dir={killed}"], count)
    deadline = time.monotonic() + TIME_LIMIT
    while not [path for path in killed.glob("checkpoints/*") if path.name.isdigit()]:
        if tool == "sweep.py" and [path for path in killed.glob("unfinished/*/*") if path.name.isdigit()]:
            break
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[-1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    said = finish(processes)
    assert time.monotonic() - begun < 60
    for process, text in zip(processes[:-1], said, strict=False):
        assert process.returncode not in (0, -signal.SIGKILL)
        assert "another process may be gone" in text or "another task died" in text, text
    assert not (killed / "metrics.npz").exists()
    assert "updates" in run(tool, [*args, f"--run-dir={killed}", "--resume"], count)[0]
    run(tool, [*args, f"--run-dir={whole}"], count)
    assert_same(metrics_of(whole), metrics_of(killed))
