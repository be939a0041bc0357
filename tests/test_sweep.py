"""tools/sweep.py: what it refuses, what it compiles, what it computes, and going on after a kill."""

import csv
import gc
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import scipy.stats
import yaml
from conftest import ROOT, assert_same, jit_quickly

sys.path.insert(0, str(ROOT / "tools"))
import common
import slices
import sweep

SIZES = ["--num-steps=200", "--total-timesteps=2000"]  # 10 updates
SMALL = ["q_learning_gridworld", *SIZES, "--max-episode-steps=50", "--env-name=CliffWalking"]
RATES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
SWEEP = [*SMALL, "--lr", *map(str, RATES), "--seeds=3"]


def metrics_of(run_dir) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep over 8 learning rates; what it compiled, and what it said."""
    run_dir, messages = tmp_path_factory.mktemp("sweep") / "run", []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    with jax.log_compiles():
        sweep.main([*SWEEP, f"--run-dir={run_dir}"])
    logger.removeHandler(handler)
    return run_dir, messages


# --- what it computes ---


def test_eight_learning_rates_compile_once(finished):
    compiled = [message for message in finished[1] if "XLA compilation of jit(advance)" in message]
    assert len(compiled) == 1


def test_eight_learning_rates_as_eight_runs(finished):
    metrics, script = metrics_of(finished[0]), common.load_script("q_learning_gridworld")
    keys = jax.random.split(jax.random.key(0), 3)
    run = jit_quickly(jax.vmap(lambda config, key: script.make_train(config)(key)["metrics"], (None, 0)))
    for trial, rate in enumerate(RATES):
        config, _ = script.parse([*SMALL[1:], f"--lr={rate}"], script.Config)
        out = run(config, keys)
        assert set(metrics) == {*out, "steps_per_update"}
        for name, values in out.items():
            np.testing.assert_allclose(metrics[name][trial, :, :4], values[:, :4], rtol=1e-3, atol=1e-5)
    assert np.ptp(metrics["q_value"], axis=0).min() > 0  # the rate matters


def test_slices_that_fit_agree_with_one_slice(finished, tmp_path, capsys):
    """24 runs in slices that do not divide them, nor end where a trial ends."""
    script = common.load_script("q_learning_gridworld")
    config, _ = script.parse(SMALL[1:], script.Config)
    five = slices.compile_slice(script, config, ["lr"], 5).bytes / slices.GIB
    sweep.main([*SWEEP, f"--run-dir={tmp_path / 'run'}", f"--memory={five * 1.01}"])
    assert "5 slice(s) of 5" in capsys.readouterr().out
    metrics, whole = metrics_of(tmp_path / "run"), metrics_of(finished[0])
    for name, values in metrics.items():
        np.testing.assert_allclose(values[..., :4], whole[name][..., :4], rtol=1e-3, atol=1e-5)


def test_static_fields_make_groups(tmp_path, capsys):
    args = ["--num-steps", "100", "200", "--gamma", "0.5", "0.9", "--seeds=2", f"--run-dir={tmp_path / 'run'}"]
    sweep.main([SMALL[0], *SMALL[2:], *args])
    assert "4 trials x 2 seeds in 2 compile group(s)" in capsys.readouterr().out
    metrics, script = metrics_of(tmp_path / "run"), common.load_script("q_learning_gridworld")
    assert metrics["episodes"].shape == (4, 2, 20)
    assert metrics["steps_per_update"].tolist() == [100, 100, 200, 200]
    assert (metrics["episodes"][2:, :, 10:] == 0).all() and np.isnan(metrics["q_value"][2:, :, 10:]).all()
    config, _ = script.parse([*SMALL[2:], "--num-steps=100", "--gamma=0.9"], script.Config)
    alone = jit_quickly(jax.vmap(script.make_train(config)))(jax.random.split(jax.random.key(0), 2))["metrics"]
    np.testing.assert_allclose(metrics["q_value"][1, :, :4], alone["q_value"][:, :4], rtol=1e-3, atol=1e-6)


def test_trial_that_is_not_finite_disturbs_no_other(tmp_path, capfd):
    """One program with another rate in one trial: the other trial has to be the same bit for bit."""
    source, limit = (ROOT / "q_learning_gridworld.py").read_text(), '"lr", "gamma", "epsilon", low=0, high=1'
    assert source.count(limit) == 1
    (tmp_path / "diverging.py").write_text(source.replace(limit, '"lr", low=0, high=1e30'))
    for name, rate in (("good", "0.5"), ("bad", "1e30")):
        args = [*SMALL[1:], "--seeds=2", "--lr", "0.1", rate, f"--run-dir={tmp_path / name}"]
        sweep.main([str(tmp_path / "diverging.py"), *args])
        assert ("not finite: trial 1 (lr = 1e+30)" in capfd.readouterr().err) == (name == "bad")
    good, bad = (metrics_of(tmp_path / name) for name in ("good", "bad"))
    assert not np.isfinite(bad["q_value"][1]).all() and np.isfinite(bad["q_value"][0]).all()
    for name in set(good) - {"steps_per_update"}:
        np.testing.assert_array_equal(good[name][0], bad[name][0])
    last = (tmp_path / "bad" / "table.txt").read_text().splitlines()[-1].split()
    assert last == ["1", "1e+30", "0", "2"]  # no return, no seed that counts, two that are not finite
    rows = list(csv.DictReader((tmp_path / "bad" / "results.csv").open()))
    assert [row["final_return"] == "" for row in rows] == [False, False, True, True]
    assert all(int(row["first_update_not_finite"]) >= 0 for row in rows[2:])


# --- results ---


def test_results(finished):
    run_dir, script = finished[0], common.load_script("q_learning_gridworld")
    rows, metrics = list(csv.DictReader((run_dir / "results.csv").open())), metrics_of(run_dir)
    assert [(int(row["trial"]), float(row["lr"]), int(row["seed"])) for row in rows] == [
        (trial, rate, seed) for (trial, rate), seed in itertools.product(enumerate(RATES), range(3))
    ]
    for row in rows:
        one = {name: metrics[name][int(row["trial"])] for name in ("episodes", "episodic_return")}
        final = script.mean_return(one, 9, 10)[int(row["seed"])]
        assert np.isnan(final) if row["final_return"] == "" else float(row["final_return"]) == pytest.approx(final)
    table = [line.split() for line in (run_dir / "table.txt").read_text().splitlines()[1:]]
    assert sorted(int(line[0]) for line in table) == list(range(8))
    means = [float(line[2]) for line in table if len(line) > 3]
    assert means == sorted(means, reverse=True)
    best, _ = script.parse(["--config", str(run_dir / "best.yaml")], script.Config)
    assert best.lr == float(table[0][1]) and best.num_steps == 200


def test_what_is_left_in_the_directory(finished):
    names = {path.name for path in finished[0].iterdir()}
    plots = {"learning_curves.png", "final_return.png"}  # no heat map of one field
    assert names == {
        "config.yaml",
        "run.json",
        "metrics.npz",
        "results.csv",
        "table.txt",
        "best.yaml",
        "slices",
        *plots,
    }
    for name in plots:
        assert (finished[0] / name).read_bytes().startswith(b"\x89PNG")
    record = json.loads((finished[0] / "run.json").read_text())
    assert record["command"].startswith("python tools/sweep.py q_learning_gridworld")
    assert record["settings"]["sweep"] == {"lr": [*map(str, RATES)]} and record["slices"] == [24]
    script = common.load_script("q_learning_gridworld")
    assert script.parse(["--config", str(finished[0] / "config.yaml")], script.Config)[0].num_steps == 200


def test_heat_map_and_copy_of_a_script(tmp_path):
    """Somebody's own file, anywhere; two fields, one drawn and one not a number."""
    shutil.copy(ROOT / "q_learning_gridworld.py", tmp_path / "my_algorithm.py")
    args = ["--env-name", "GridWorld", "CliffWalking", "--lr", "uniform", "0.1", "0.5", "--samples=2", "--seeds=2"]
    sweep.main([str(tmp_path / "my_algorithm.py"), *SIZES, *args, f"--run-dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "run" / "results.csv").open()))
    assert [row["env_name"] for row in rows] == ["GridWorld"] * 4 + ["CliffWalking"] * 4
    assert [row["lr"] for row in rows[:4]] == [row["lr"] for row in rows[4:]]  # the same draws at each point


def test_interval_of_one_stratum_is_the_ordinary_bootstrap():
    values = np.random.default_rng(1).normal(size=16)
    mean, low, high = sweep.stratified_interval([values])
    middle = lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis=axis)  # noqa: E731
    interval = scipy.stats.bootstrap((values,), middle, n_resamples=20000, method="percentile", rng=3)
    assert mean == pytest.approx(np.sort(values)[4:12].mean())
    np.testing.assert_allclose((low, high), interval.confidence_interval, atol=0.05)


def test_interval_resamples_within_strata():
    """Seeds that all agree within their trial: nothing is uncertain, however much trials differ."""
    assert sweep.stratified_interval([np.zeros(4), np.ones(4), np.array([])]) == (0.5, 0.5, 0.5)
    assert all(np.isnan(sweep.stratified_interval([np.array([])])))


def test_draws():
    script = common.load_script("ppo")
    words = {"gamma": ["log-uniform", "1e-4", "1"], "lr": ["0.1", "0.2"], "ent_coef": ["uniform", "2", "4"]}
    trials = sweep.make_trials(script, words, 500, 0)
    assert trials == sweep.make_trials(script, words, 500, 0) != sweep.make_trials(script, words, 500, 1)
    assert [list(trial) for trial in trials] == [list(words)] * 1000
    logs, uniform = np.log10([trial["gamma"] for trial in trials]), np.array([trial["ent_coef"] for trial in trials])
    assert -4 <= logs.min() < -3.9 and -0.1 < logs.max() <= 0 and abs(logs.mean() + 2) < 0.2
    assert 2 <= uniform.min() < 2.05 and 3.95 < uniform.max() <= 4 and abs(uniform.mean() - 3) < 0.1
    assert abs(np.corrcoef(logs[:500], uniform[:500])[0, 1]) < 0.2  # drawn by themselves


def test_sizes_of_layers():
    script = common.load_script("ppo")
    assert sweep.make_trials(script, {"hidden_sizes": ["8,8", "16"]}, None, 0) == [
        {"hidden_sizes": (8, 8)},
        {"hidden_sizes": (16,)},
    ]
    request = sweep.read_request(["ppo", "--hidden-sizes", "8", "16", "--lr", "0.1", "0.2"])
    assert request.config.hidden_sizes == (8, 16) and list(request.words) == ["lr"]


@pytest.mark.parametrize("fixed, each, total, step, memory, size", [
    (0, 10, 100, 1, 1000, 100),
    (0, 10, 100, 1, 999, 50),  # two slices of 50 rather than one of 99 and one of 1
    (300, 10, 100, 1, 700, 34),  # 40 fit: three slices
    (300, 10, 100, 8, 700, 40),
    (0, 10, 3, 8, 80, 8),
    (0, 10, 7, 1, 15, 1),
])  # fmt: skip
def test_largest_slice(fixed, each, total, step, memory, size):
    compiled = []

    def compile_size(size):
        compiled.append(size)
        return slices.Program(size, 1, 1, fixed + each * size, *[None] * 6)

    assert slices.largest_slice(compile_size, total, step, memory).size == size
    assert len(compiled) <= 4


def test_memory_grows_with_runs():
    """XLA's figures: more runs need more, by about the same for each."""
    script = common.load_script("q_learning_gridworld")
    config, _ = script.parse(SMALL[1:], script.Config)
    few, many = (slices.compile_slice(script, config, ["lr"], size).bytes for size in (5, 24))
    agents = (config.num_updates * 6 + 48 * 4) * 4  # bytes of metrics and Q table alone, of each
    assert 19 * agents < many - few < 19 * 20 * agents


# --- what it refuses ---


@pytest.mark.parametrize("args, words", [
    ([], "SCRIPT"),
    (["--lr", "1", "2"], "SCRIPT"),
    (["no_such_script"], "script no_such_script"),
    (["pppo", "--lr", "0.1", "0.2"], "pppo ppo"),
    (["tests/toys.py", "--lr", "0.1", "0.2"], "script toys.py Config"),
    (["README.md", "--lr", "0.1", "0.2"], "script README.md"),
    ([*SMALL], "nothing to sweep"),
    ([*SMALL, "--lr"], "lr"),
    ([*SMALL, "--lr", "0.1", "fast"], "lr fast"),
    ([*SMALL, "--lr", "0.1", "0.10"], "lr twice"),
    ([*SMALL, "--lr", "0.1", "2"], "lr 2"),
    ([*SMALL, "--lr", "0.1", "nan"], "lr nan"),
    ([*SMALL, "--lr", "0.1", "0.2", "--lr=0.3"], "lr twice"),
    ([*SMALL, "--gama", "0.1", "0.2"], "gama mean gamma"),
    ([*SMALL, "stray", "--lr", "0.1", "0.2"], "env_name stray"),
    ([SMALL[0], "stray", "--lr", "0.1", "0.2"], "stray"),
    ([*SMALL, "--lr", "0.1", "0.2", "--gamma=1.5"], "gamma 1.5"),
    ([*SMALL, "--lr", "0.1", "0.2", "--config=none.yaml"], "none.yaml"),
    ([SMALL[0], "--lr", "0.1", "0.2", "--env-name=Nowhere"], "env_name Nowhere"),
    ([SMALL[0], "--env-name", "GridWorld", "Nowhere"], "env_name Nowhere"),
    ([SMALL[0], "--num-steps", "200", "0", "--total-timesteps=2000"], "num_steps 0"),
    ([SMALL[0], "--num-steps", "200", "3000", "--total-timesteps=2000"], "total_timesteps 3000"),
    ([SMALL[0], "--num-steps", "log-uniform", "10", "20", "--samples=2"], "num_steps float"),
    ([*SMALL, "--lr", "uniform", "0.1", "--samples=2"], "lr HIGH"),
    ([*SMALL, "--lr", "uniform", "0.2", "0.1", "--samples=2"], "lr 0.2 0.1"),
    ([*SMALL, "--lr", "log-uniform", "0", "0.1", "--samples=2"], "lr log-uniform 0"),
    ([*SMALL, "--lr", "log-uniform", "0.1", "0.2"], "lr --samples"),
    ([*SMALL, "--lr", "0.1", "0.2", "--samples=2"], "samples uniform"),
    ([*SMALL, "--lr", "uniform", "0.1", "0.2", "--samples=0"], "samples 0"),
    ([*SMALL, "--lr", "uniform", "0.1", "0.2", "--samples=few"], "samples few"),
    ([*SWEEP, "--seeds=0"], "num_seeds 0"),
    ([*SWEEP, "--seed=-1"], "seed -1"),
    ([*SWEEP, "--eval-episodes=3"], "eval_episodes"),
    ([*SWEEP, "--memory=0"], "memory 0"),
    ([*SWEEP, "--memory=1e-9"], "memory GiB"),
    ([*SWEEP, "--process-id=0"], "coordinator"),
    ([*SWEEP, "--coordinator=here", "--num-processes=2", "--process-id=0"], "coordinator here HOST:PORT"),
    ([*SWEEP, "--coordinator=here:1", "--num-processes=2", "--process-id=2"], "process_id 2"),
    ([*SWEEP, "--coordinator=here:1", "--distributed"], "distributed"),
])  # fmt: skip
def test_refuses(args, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={tmp_path / 'run'}"] if args else args)
    message = capfd.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1 and message.startswith("sweep.py: error: "), message
    for word in words.split():
        assert word in message, message
    assert not (tmp_path / "run").exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(word in shown for word in ("--samples", "--seeds", "--memory", "--coordinator", "log-uniform"))


def test_directory_that_holds_another_sweep(finished, capfd):
    before = {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}
    for args, words in [
        (SWEEP, ["run_dir", "--resume"]),
        ([*SWEEP[:-2], "--seeds=3", "--resume"], ["resume", "sweep was"]),
        ([*SWEEP[:-1], "--seeds=4", "--resume"], ["resume", "num_seeds was 3 and is 4"]),
    ]:
        with pytest.raises(SystemExit) as stop:
            sweep.main([*args, f"--run-dir={finished[0]}"])
        message = capfd.readouterr().err
        assert stop.value.code == 2 and message.count("\n") == 1 and all(word in message for word in words), message
    assert before == {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}


# --- going on ---


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """Killed with a slice on disk and another half trained, then resumed: as if nothing had been."""
    args = [SMALL[0], "--lr", "0.1", "0.5", "1", "--seeds=4", "--num-steps=20", "--total-timesteps=40000"]
    script = common.load_script(SMALL[0])
    config, _ = script.parse(args[6:], script.Config)
    memory = slices.compile_slice(script, config, ["lr"], 4).bytes * 1.01 / slices.GIB
    args += [f"--memory={memory}", "--checkpoint-interval=0"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    sweep.main([*args, f"--run-dir={whole}"])
    assert len(list((whole / "slices").iterdir())) == 3
    command = [sys.executable, ROOT / "tools" / "sweep.py", *args, f"--run-dir={killed}"]
    one_device = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}  # as here: the slices' size depends on it
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, env=one_device) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None:
            midway = [path for path in killed.glob("unfinished/0-0000004-*/*") if path.name.isdigit()]
            if midway or time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in (killed / "slices").iterdir()] == ["0-0000000-0000004.npz"]
    first = (killed / "slices" / "0-0000000-0000004.npz").stat().st_mtime_ns
    sweep.main([*args, f"--run-dir={killed}", "--resume"])
    assert (killed / "slices" / "0-0000000-0000004.npz").stat().st_mtime_ns == first  # not trained again
    assert_same(metrics_of(whole), metrics_of(killed))
    assert (whole / "results.csv").read_bytes() == (killed / "results.csv").read_bytes()
    assert {path.name for path in whole.iterdir()} == {path.name for path in killed.iterdir()}


def test_resume_of_a_finished_sweep(finished, tmp_path):
    copy = shutil.copytree(finished[0], tmp_path / "copy")
    (copy / "metrics.npz").unlink()
    sweep.main([*SWEEP, f"--run-dir={copy}", "--resume"])
    assert_same(metrics_of(finished[0]), metrics_of(copy))


def test_resume_with_a_damaged_slice(finished, tmp_path, capfd):
    copy = shutil.copytree(finished[0], tmp_path / "copy")
    (file,) = (copy / "slices").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SWEEP, f"--run-dir={copy}", "--resume"])
    assert stop.value.code == 1 and f"{file.name}: cannot be read" in capfd.readouterr().err
    file.unlink()
    sweep.main([*SWEEP, f"--run-dir={copy}", "--resume"])
    assert_same(metrics_of(finished[0]), metrics_of(copy))


def test_best_values_can_be_trained(finished):
    assert yaml.safe_load((finished[0] / "best.yaml").read_text())["lr"] in RATES


# --- disks ---


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of so many bytes, or skips the test; it is gone afterwards."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int, options: str = "rw"):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "tmpfs", place]).returncode:
            pytest.skip("may not mount a file system")
        return place

    if os.name != "posix" or os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a file system")
    yield mount
    subprocess.run(["umount", place])


@pytest.mark.slow
def test_disk_full(small_disk, tmp_path, capfd):
    """The second slice does not fit on the disk. With more room, the sweep goes on after the first."""
    args = [each for each in SMALL if "total" not in each] + ["--total-timesteps=1000000"]
    script = common.load_script(SMALL[0])
    config, _ = script.parse(args[1:], script.Config)
    four = slices.compile_slice(script, config, ["lr"], 4).bytes * 1.01 / slices.GIB
    args += ["--lr", "0.1", "0.5", "--seeds=4", f"--memory={four}"]
    disk = small_disk(600_000)  # a slice is 4 x 5000 updates of five metrics of 4 bytes: 400 kB
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("sweep.py: error: "), message
    assert "No space left on device" in message
    assert [path.name for path in (disk / "run" / "slices").glob("*.npz")] == ["0-0000000-0000004.npz"]
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    sweep.main([*args, f"--run-dir={copy}", "--resume"])
    assert metrics_of(copy)["episodes"].shape == (2, 4, 5000) and (metrics_of(copy)["episodes"] > 0).all()
    assert {path.name for path in (copy / "slices").iterdir()} == {"0-0000000-0000004.npz", "0-0000004-0000008.npz"}
    assert not list(copy.rglob("*.partial"))


def test_disk_full_while_a_checkpoint_is_written(small_disk, tmp_path, capfd):
    """Checkpoints grow as metrics, at first zeros, fill up. The last that was committed stays good."""
    disk = small_disk(120_000)
    args = [each for each in SMALL if "total" not in each] + ["--total-timesteps=400000", "--lr", "0.1", "0.5"]
    args += ["--seeds=4", "--checkpoint-interval=0"]
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "cannot be written: No space left on device" in message, message
    del stop
    gc.collect()  # or it meets Orbax's failed tasks while Python parses; their report parses too: a SystemError in 3.11
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    sweep.main([*args, f"--run-dir={copy}", "--resume"])
    assert re.search(r"resume: [1-9]\d* of 2000 updates of the next slice are done", capfd.readouterr().out)
    assert (metrics_of(copy)["episodes"] > 0).all()


def test_read_only_run_directory(small_disk, capfd):
    disk = small_disk(100_000, "ro")
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SWEEP, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1 and "run_dir" in message and "Read-only" in message
