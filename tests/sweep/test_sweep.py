"""`onejit sweep`: what it refuses, what it compiles, what it computes, and going on after a
kill.
"""

import contextlib
import gc
import io
import itertools
import logging
import math
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
import pytest
from safetensors.numpy import load_file
from support.commands import refusal
from support.compilation import jit_quickly
from support.returns import is_mean_with_running
from support.strategies import decide
from support.sweeps import (
    before_compilations,
    before_results,
    config_of,
    draw_nothing,
    fix_size_of_slices,
    memory_of,
    metrics_of,
    note_programs,
    record_of,
    rows_of,
)
from support.trees import assert_same

from onejit import resume, sweep
from onejit.base import statistics
from onejit.report import compare
from onejit.report import list as list_runs
from onejit.run.directory import load_results, load_run
from onejit.run.lock import is_locked
from onejit.script import load
from onejit.watch import render

SIZES = ["--num-steps=200", "--total-timesteps=2000"]  # 10 updates
# Random actions, so that one that hangs on a last bit cannot set two compilations apart.
GRID = ["--height=4", "--width=6", "--start", "3", "5", "--step-reward=-1", "--epsilon=1"]
GRID += ["--max-steps-in-episode=50"]
SMALL = ["q_learning_gridworld", *SIZES, *GRID]
RATES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
SWEEP = [*SMALL, "--lr", *map(str, RATES), "--num-seeds=3"]
TWO_GROUPS = [SMALL[0], SIZES[1], *GRID, "--num-steps", "100", "2e2", "--gamma", "0.5", "0.9"]
TWO_GROUPS += ["--num-seeds=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep over 8 learning rates; what it compiled, and its directory before the results."""
    run_dir = tmp_path_factory.mktemp("sweep") / "run"
    before = run_dir.with_name("before")
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)

    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        before_results(patch, lambda: shutil.copytree(run_dir, before))
        sweep.main([*SWEEP, f"--run-dir={run_dir}"])
    logger.removeHandler(handler)
    return run_dir, messages, before


@pytest.fixture(scope="module")
def finished(trained):
    return trained[0]


@pytest.fixture
def before_the_results(trained, tmp_path):
    """A copy of a sweep as a kill leaves it after training, before there are results."""
    return shutil.copytree(trained[2], tmp_path / "copy")


@pytest.fixture(scope="module")
def trained_alone():
    """What each learning rate's own training returns, seed 0 and three agents."""
    script = load.load_script("q_learning_gridworld")
    keys = jax.random.split(jax.random.key(0), 3)
    run = jit_quickly(jax.vmap(lambda config, key: script.make_train(config)(key), (None, 0)))
    return [run(config_of(script, [*SMALL[1:], f"--lr={rate}"]), keys) for rate in RATES]


# --- what it computes ---


def test_eight_learning_rates_compile_once(trained):
    compiled = [message for message in trained[1] if "XLA compilation of jit(advance)" in message]
    assert len(compiled) == 1


def test_eight_learning_rates_as_eight_runs(finished, trained_alone):
    metrics = metrics_of(finished)
    for trial, out in enumerate(trained_alone):
        assert set(metrics) == {*out["metrics"], "steps_per_update", "warmup_timesteps"}
        for name, values in out["metrics"].items():
            np.testing.assert_allclose(metrics[name][trial], values, rtol=1e-3, atol=1e-5)
    assert np.ptp(metrics["q_value"], axis=0).min() > 0  # the rate matters


@pytest.mark.usefixtures("quick_pictures")
def test_slices_that_fit_agree_with_one_slice(finished, tmp_path, capsys):
    """24 runs in slices that do not divide them, nor end where a trial ends."""
    sweep.main([*SWEEP, f"--run-dir={tmp_path / 'run'}", f"--memory={memory_of(SMALL, 5)}"])
    assert "5 slices of at most 5" in capsys.readouterr().out
    metrics, whole = metrics_of(tmp_path / "run"), metrics_of(finished)
    for name, values in metrics.items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def of_two_groups(tmp_path_factory):
    """Two compile groups of two trials, and what there was when each of them compiled."""
    run_dir = tmp_path_factory.mktemp("groups") / "run"
    seen = []
    programs = []

    def look(size, config):
        gc.collect()
        slices = record_of(run_dir).get("slices", [])
        ended = sorted(path.name for path in run_dir.glob("slices/*.npz"))
        alive = sum(program() is not None for program in programs)
        seen.append((config.num_steps, slices, ended, alive, is_locked(run_dir)))

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        draw_nothing(patch)
        before_compilations(patch, look)
        note_programs(patch, programs)
        sweep.main([*TWO_GROUPS, f"--run-dir={run_dir}"])
    assert len(programs) == 2
    return run_dir, seen, said.getvalue()


def test_static_fields_make_groups(of_two_groups):
    run_dir, _, said = of_two_groups
    assert "4 trials x 2 seeds in 2 compile groups" in said
    metrics = metrics_of(run_dir)
    script = load.load_script("q_learning_gridworld")
    assert metrics["episodes"].shape == (4, 2, 20)
    assert metrics["steps_per_update"].tolist() == [100, 100, 200, 200]
    assert (metrics["episodes"][2:, :, 10:] == 0).all()
    assert np.isnan(metrics["q_value"][2:, :, 10:]).all()
    config = config_of(script, [SIZES[1], *GRID, "--num-steps=100", "--gamma=0.9"])
    keys = jax.random.split(jax.random.key(0), 2)
    alone = jit_quickly(jax.vmap(script.make_train(config)))(keys)["metrics"]["q_value"]
    np.testing.assert_allclose(metrics["q_value"][1, :, :4], alone[:, :4], rtol=1e-3, atol=1e-6)


def test_groups_compile_one_after_the_other(of_two_groups):
    """Inside a directory that is there and locked.

    The program of a group is gone before the next one compiles.
    """
    _, seen, _ = of_two_groups
    assert seen == [(100, [], [], 0, True), (200, [4], ["0-0000000-0000004.npz"], 0, True)]


@pytest.mark.usefixtures("quick_pictures")
def test_trial_that_is_not_finite_disturbs_no_other(tmp_path, capfd):
    """One program with another rate in one trial: the other trial has to be the same bit for
    bit.
    """
    for name, rate in (("good", "0.5"), ("bad", "1e30")):
        sweep.main([*SMALL, "--num-seeds=2", "--lr", "0.1", rate, f"--run-dir={tmp_path / name}"])
        assert ("not finite: trial 1 (lr = 1e+30)" in capfd.readouterr().err) == (name == "bad")
    good, bad = (metrics_of(tmp_path / name) for name in ("good", "bad"))
    assert not np.isfinite(bad["q_value"][1]).all() and np.isfinite(bad["q_value"][0]).all()
    for name in set(good) - {"steps_per_update", "warmup_timesteps"}:
        np.testing.assert_array_equal(good[name][0], bad[name][0])
    last = (tmp_path / "bad" / "table.txt").read_text().splitlines()[-1]
    cells = ["1", "1e+30", "-inf", "-inf to -inf", "-inf", "-inf", "0 of 2 finite"]
    assert re.split(r"  +", last) == cells
    rows = rows_of(tmp_path / "bad")
    assert [row["final_return"] == "-inf" for row in rows] == [False, False, True, True]
    assert all(int(row["first_update_not_finite"]) >= 0 for row in rows[2:])


@pytest.mark.usefixtures("quick_pictures")
def test_if_all_seeds_diverge_the_exit_code_is_1(tmp_path, capfd):
    """After all results were written."""
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SMALL, "--num-seeds=2", "--lr", "1e30", "2e30", f"--run-dir={run_dir}"])
    last = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert last.startswith("onejit sweep: error: all seeds diverged") and str(run_dir) in last
    assert "finished" in record_of(run_dir) and (run_dir / "results.csv").is_file()


# --- results ---


def test_results(finished):
    script = load.load_script("q_learning_gridworld")
    rows = rows_of(finished)
    metrics = metrics_of(finished)
    assert [(int(row["trial"]), float(row["lr"]), int(row["seed"])) for row in rows] == [
        (trial, rate, seed) for (trial, rate), seed in itertools.product(enumerate(RATES), range(3))
    ]
    for row in rows:
        one = {name: metrics[name][int(row["trial"])] for name in ("episodes", "episodic_return")}
        end = statistics.at_the_end(one)
        episodes = end["episodes"][int(row["seed"])]
        total = np.nansum(episodes * end["episodic_return"][int(row["seed"])])
        assert is_mean_with_running(float(row["final_return"]), total, episodes.sum())
    for run_dir in (finished / "agents").iterdir():  # the same numbers, as `compare` reads them
        trial = run_dir.name.removeprefix("trial-")
        of_trial = [float(row["final_return"]) for row in rows if row["trial"] == trial]
        assert list(compare.read_run(str(run_dir), "final").returns.values()) == of_trial
    table = [line.split() for line in (finished / "table.txt").read_text().splitlines()[1:]]
    assert sorted(int(line[0]) for line in table) == list(range(8))
    means = [float(line[2]) for line in table]
    assert means == sorted(means, reverse=True)
    best = config_of(script, ["--config", str(finished / "best.yaml")])
    assert best.lr == float(table[0][1]) and best.num_steps == 200


def test_means_and_worst_agents(finished):
    """An interquartile mean alone hides agents that failed: the table and results.csv say more."""
    header, *lines = (finished / "table.txt").read_text().splitlines()
    titles = ["interquartile mean", "95 % interval", "mean", "worst agent", "seeds"]
    assert re.split(r"  +", header)[2:] == titles
    rows = rows_of(finished)
    for line in lines:
        cells = re.split(r"  +", line)
        mine = [row for row in rows if row["trial"] == cells[0]]
        returns = [float(row["final_return"]) for row in mine]
        assert len(returns) == 3
        assert float(cells[4]) == pytest.approx(np.mean(returns), rel=1e-3)
        assert float(cells[5]) == pytest.approx(min(returns), rel=1e-3)
        for row in mine:
            assert float(row["trial_mean"]) == pytest.approx(np.mean(returns))
            assert float(row["trial_worst"]) == pytest.approx(min(returns))


def test_what_is_left_in_the_directory(finished):
    names = {path.name for path in finished.iterdir()}
    plots = {"learning_curves.png", "final_return.png"}  # no heat map of one field
    files = {"config.yaml", "run.json", "metrics.npz", "results.csv", "table.txt", "best.yaml"}
    # metrics are kept once: no slices
    assert names == {*files, *plots, ".lock", "q_learning_gridworld.py", "agents"}
    for name in plots:
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    script = load.load_script("q_learning_gridworld")
    assert config_of(script, ["--config", str(finished / "config.yaml")]).num_steps == 200


def test_record(finished):
    record = record_of(finished)
    assert record["command"].startswith("onejit sweep q_learning_gridworld")
    assert record["slices"] == [24] and "finished" in record
    assert record["steps_done"] == 8 * 3 * 2000
    assert record["seconds"]["compile"] > 0 and record["seconds"]["train"] > 0
    shown = list_runs.row_of(finished)
    assert shown[1:6] == ["q_learning_gridworld", "GridWorld", "3", "finished", "100 %"]


def test_agents_of_the_best_trials_are_kept(finished, trained_alone, tmp_path):
    """As runs that can be loaded and played: the agents that the trials' own training makes."""
    folder = finished / "agents"
    ranked = [line.split()[0] for line in (finished / "table.txt").read_text().splitlines()[1:]]
    assert {path.name for path in folder.iterdir()} == {f"trial-{trial}" for trial in ranked[:5]}
    for trial in ranked[:2]:
        run_dir = folder / f"trial-{trial}"
        script, config, agent = load_run(run_dir)
        assert config.lr == RATES[int(trial)] and Path(script.__file__).parent == run_dir
        alone = trained_alone[int(trial)]["runner_state"].agent
        np.testing.assert_allclose(agent["q"], alone["q"], rtol=1e-3, atol=1e-5)
        whole = metrics_of(finished)
        for name, values in load_results(run_dir).metrics.items():
            np.testing.assert_array_equal(values, whole[name][int(trial)])
        assert record_of(run_dir)["final return"]["seeds"] == 3
    best = folder / f"trial-{ranked[0]}"
    (picture,) = render.main(best, agents=("best",), formats=("gif",), out=tmp_path)
    assert picture.read_bytes().startswith(b"GIF")


def test_config_file(tmp_path):
    """Its values are those of all trials; what is swept on the command line wins.

    A resumed sweep needs no file.
    """
    file = tmp_path / "some.yaml"
    file.write_text(
        "lr: 0.3\nnum_steps: 50\nhidden_sizes: [8, 8]\nenv_params: {max_steps_in_episode: 9}\n"
    )
    request = sweep.read_sweep(["ppo", "--config", str(file), "--lr", "0.1", "0.2"], None)
    assert request.trials.values == [{"lr": 0.1}, {"lr": 0.2}]
    assert request.search.config.num_steps == 50 and request.search.config.hidden_sizes == (8, 8)
    assert dict(request.search.config.env_params) == {"max_steps_in_episode": 9}
    assert request.record.swept == {"lr": ["0.1", "0.2"]}
    assert request.record.settings["num_steps"] == 50


# --- what it refuses ---


def test_directory_that_holds_another_sweep(finished, capfd):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for args, words in [
        (["sweep", *SWEEP, f"--run-dir={finished}"], "; onejit resume"),
        (["resume", finished, "--total-timesteps", "9e9"], "a sweep cannot be extended"),
    ]:
        assert words in refusal(args, capfd)
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


# --- going on ---


@pytest.mark.usefixtures("quick_pictures")
def test_stopped_while_a_group_compiles(of_two_groups, tmp_path, monkeypatch, capfd):
    """Its slices keep their size whatever memory there is later, and what is finished does not
    compile again.
    """
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        fix_size_of_slices(patch, 2)
        before_compilations(
            patch, lambda _, config: config.num_steps == 200 and os.kill(os.getpid(), signal.SIGINT)
        )
        sweep.main([*TWO_GROUPS, f"--run-dir={run_dir}"])
    assert stop.value.code == 130
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"onejit sweep: stopped by SIGINT; onejit resume {run_dir} continues"
    assert record_of(run_dir)["slices"] == [2, 2] and "finished" not in record_of(run_dir)
    assert list_runs.row_of(run_dir)[4:6] == ["stopped", "50 %"]
    compiled = []
    before_compilations(monkeypatch, lambda size, config: compiled.append((size, config.num_steps)))
    resume.main(run_dir)
    assert compiled == [(2, 200)]
    metrics = metrics_of(run_dir)
    for name, values in metrics_of(of_two_groups[0]).items():
        np.testing.assert_allclose(metrics[name], values, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("quick_pictures")
def test_stopped_by_a_signal_and_resumed(finished, stop_at, tmp_path, capfd):
    """One line, and the same bits as without it. Times of all processes add up."""
    stop_at(5000)
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SWEEP, f"--run-dir={run_dir}"])
    before = record_of(run_dir)
    last = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 143
    assert last == f"onejit sweep: stopped by SIGTERM; onejit resume {run_dir} continues"
    assert 0 < before["steps_done"] < 48_000 and before["seconds"]["train"] > 0
    resume.main(run_dir)
    said = capfd.readouterr().err
    assert re.search(r"resume: runs 0 to 23: [1-9] of 10 updates are done", said)
    after = record_of(run_dir)
    assert after["steps_done"] == 48_000 and "finished" in after
    assert all(after["seconds"][each] > before["seconds"][each] for each in ("compile", "train"))
    assert_same(metrics_of(finished), metrics_of(run_dir))
    assert (finished / "results.csv").read_bytes() == (run_dir / "results.csv").read_bytes()
    for path in finished.glob("agents/*/agent.safetensors"):
        assert_same(load_file(path), load_file(run_dir / path.relative_to(finished)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_killed_and_resumed(tmp_path):
    """Killed with a slice on disk and another half trained, then resumed: as if nothing had
    been.
    """
    args = ["--num-seeds=4", "--num-steps=20", "--total-timesteps=40000"]
    memory = memory_of([SMALL[0], *args], 4)
    args = [SMALL[0], "--lr", "0.1", "0.5", "1", *args]
    args += [f"--memory={memory}", "--checkpoint-interval=1e-9"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    sweep.main([*args, f"--run-dir={whole}"])
    assert record_of(whole)["slices"] == [4]
    command = [sys.executable, "-m", "onejit", "sweep", *args, f"--run-dir={killed}"]
    # as here: the slices' size depends on it
    one_device = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.DEVNULL, env=one_device
    ) as process:
        deadline = time.monotonic() + 300
        while process.poll() is None:
            is_midway = any(killed.glob("unfinished/0-0000004-*/*/*.npz"))
            if is_midway or time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in (killed / "slices").glob("*.npz")] == ["0-0000000-0000004.npz"]
    resume.main(killed)
    assert_same(metrics_of(whole), metrics_of(killed))
    assert (whole / "results.csv").read_bytes() == (killed / "results.csv").read_bytes()
    assert {path.name for path in whole.iterdir()} == {path.name for path in killed.iterdir()}


def test_resume_of_a_finished_sweep_changes_nothing(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    (copy / "slices").mkdir()  # where a kill came between the record and the end
    resume.main(copy)
    assert capsys.readouterr().out == f"{copy} has finished: there is nothing left to do\n"
    assert before.keys() == {path for path in copy.rglob("*")} and not (copy / "slices").exists()
    assert all(path.is_dir() or path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_metrics_stay_in_slices_until_they_are_written_whole(finished, before_the_results):
    (before_the_results / "metrics.npz").mkdir()  # the file cannot be written
    with pytest.raises(SystemExit) as stop:
        resume.main(before_the_results)
    (before_the_results / "metrics.npz").rmdir()
    assert stop.value.code == 1
    assert list((before_the_results / "slices").iterdir())
    assert "finished" not in record_of(before_the_results)
    resume.main(before_the_results)
    assert_same(metrics_of(finished), metrics_of(before_the_results))
    names = {path.relative_to(before_the_results) for path in before_the_results.rglob("*")}
    assert names == {path.relative_to(finished) for path in finished.rglob("*")}


@pytest.mark.usefixtures("quick_pictures")
def test_resume_with_a_damaged_slice(finished, before_the_results, capfd):
    (file,) = (before_the_results / "slices").glob("*.npz")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SystemExit) as stop:
        resume.main(before_the_results)
    assert stop.value.code == 1 and f"{file.name}: cannot be read" in capfd.readouterr().err
    file.unlink()
    resume.main(before_the_results)
    assert_same(metrics_of(finished), metrics_of(before_the_results))


# --- Optuna ---


def propose(words, returns_of) -> list[dict]:
    """The trials of a sweep whose returns a function of the trial gives."""
    request = sweep.read_sweep(["q_learning_gridworld", *words], None)
    decide(request, lambda trial: returns_of(request.trials.values[trial]))
    return request.trials.values


LR_AND_GAMMA = ["--lr", "log-uniform", "1e-4", "1"]
LR_AND_GAMMA += ["--gamma", "one-minus-log-uniform", "0.9", "0.999"]


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "random"])
def test_optuna_proposes(sampler):
    """Within the bounds, the same ones each time, and after some batches better ones, where returns
    are looked at.
    """
    words = [*LR_AND_GAMMA, f"--optuna={sampler}", "--samples=60", "--batch=12"]

    def returns_of(trial):  # best at 1e-2 and 0.99; a fifth of the range is not finite
        log = math.log10(trial["lr"])
        return -np.inf if log > -0.8 else -abs(log + 2) - abs(math.log10(1 - trial["gamma"]) + 2)

    trials = propose(words, returns_of)
    assert len(trials) == 60 and trials == propose(words, returns_of)
    assert trials != propose([*words, "--seed=1"], returns_of)
    assert all(list(each) == ["lr", "gamma"] for each in trials)
    rates, gammas = np.array([list(each.values()) for each in trials]).T
    assert 1e-4 <= rates.min() < 1e-3 and 0.1 < rates.max() <= 1
    assert 0.9 <= gammas.min() < 0.95 and 0.998 < gammas.max() <= 0.999
    far = abs(np.log10(rates) + 2) + abs(np.log10(1 - gammas) + 2)
    assert (np.mean(far[-24:]) < 0.75 * np.mean(far[:12])) == (sampler != "random")


def test_optuna_chooses_listed_values():
    trials = propose(
        ["--lr", "0.1", "0.5", "--gamma", "uniform", "0.5", "1", "--optuna=tpe", "--samples=20"],
        lambda trial: trial["lr"],
    )
    rates = [trial["lr"] for trial in trials]
    assert set(rates) == {0.1, 0.5} and rates[8:].count(0.5) > rates[8:].count(0.1)


def test_optuna_resumed_with_another_version():
    request = sweep.read_sweep([*SMALL, *LR_AND_GAMMA, "--optuna=tpe", "--samples=4"], None)
    request.record.trials = [{"lr": 0.1, "gamma": 0.9}] * 4
    with pytest.raises(ValueError, match="has its version changed"):
        decide(request, float)


@pytest.mark.usefixtures("quick_pictures")
def test_optuna_stopped_and_resumed(stop_at, tmp_path, monkeypatch):
    """Stopped in the second of three batches: the same trials and the same numbers.

    One compilation each time.
    """
    args = [*SMALL, *LR_AND_GAMMA, "--optuna=tpe", "--samples=14", "--batch=6", "--num-seeds=2"]
    compiled = []
    args[args.index("--epsilon=1")] = "--epsilon=0.1"  # or the rate would not change the returns
    before_compilations(monkeypatch, lambda size, _: compiled.append(size))
    sweep.main([*args, f"--run-dir={tmp_path / 'whole'}"])
    assert compiled == [12]
    stop_at(6 * 2 * 2000 + 1)
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={tmp_path / 'run'}"])
    assert stop.value.code == 143 and len(list((tmp_path / "run" / "slices").glob("*.npz"))) == 1
    assert len(record_of(tmp_path / "run")["trials"]) == 12
    resume.main(tmp_path / "run")
    assert compiled == [12] * 3
    rows = rows_of(tmp_path / "run")
    assert rows == rows_of(tmp_path / "whole")
    assert len(rows) == 28 and len({row["lr"] for row in rows}) == 14
    assert_same(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "whole"))
    assert len({row["trial_interquartile_mean"] for row in rows}) > 1


# --- disks ---


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_disk_full(small_disk, tmp_path, capfd):
    """The second slice does not fit on the disk.

    With more room, the sweep goes on after the first.
    """
    args = [SMALL[0], SIZES[0], *GRID, "--total-timesteps=1000000"]
    args += ["--lr", "0.1", "0.5", "--num-seeds=4", f"--memory={memory_of(args, 4)}"]
    disk = small_disk(680_000)  # a slice is 4 x 5000 updates of five metrics of 4 bytes: 400 kB
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit sweep: error: "), message
    assert "No space left on device" in message
    slices = [path.name for path in (disk / "run" / "slices").glob("*.npz")]
    assert slices == ["0-0000000-0000004.npz"]
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    resume.main(copy)
    episodes = metrics_of(copy)["episodes"]
    assert episodes.shape == (2, 4, 5000) and (episodes > 0).all()
    assert not list(copy.rglob("*.partial"))
