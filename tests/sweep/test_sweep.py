"""`onejit sweep`: what it refuses, what it compiles, what it computes, and going on after a
kill.
"""

import csv
import dataclasses
import gc
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.stats
import yaml
from matplotlib.figure import Figure
from safetensors.numpy import load_file
from support.compilation import jit_quickly
from support.event_files import events
from support.files import ROOT
from support.refusals import assert_sweep_refuses
from support.returns import is_mean_with_running
from support.strategies import groups_of
from support.tiers import slow
from support.trees import assert_same

from onejit import __main__, sweep
from onejit.base import statistics
from onejit.engine import compilation, loop
from onejit.engine.memory import GIB
from onejit.engine.progress import Lines
from onejit.report import list as list_runs
from onejit.run.directory import load_metrics, load_run
from onejit.run.lock import is_locked
from onejit.run.record import Record
from onejit.script import command_line, load
from onejit.sweep import execution, jobs, pictures, results, search
from onejit.sweep import request as sweep_request
from onejit.watch import render

SIZES = ["--num-steps=200", "--total-timesteps=2000"]  # 10 updates
# Random actions, so that one that hangs on a last bit cannot set two compilations apart.
GRID = [
    "--height=4",
    "--width=6",
    "--start",
    "3",
    "5",
    "--step-reward=-1",
    "--epsilon=1",
    "--max-steps-in-episode=50",
]
SMALL = ["q_learning_gridworld", *SIZES, *GRID]
RATES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
SWEEP = [*SMALL, "--lr", *map(str, RATES), "--num-seeds=3"]


def config_of(script, words):
    return command_line.parse_with(script, words, sweep.Options, "")[0]


def metrics_of(run_dir) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


def record_of(run_dir) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def rows_of(run_dir) -> list[dict]:
    return list(csv.DictReader((run_dir / "results.csv").open()))


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


@pytest.fixture
def quick_pictures(monkeypatch):
    for name in ("draw_curves", "draw_returns", "draw_heat_map"):  # their intervals take seconds
        monkeypatch.setattr(pictures, name, lambda *args: args[-1].write(b"picture"))


def test_eight_learning_rates_compile_once(finished):
    compiled = [message for message in finished[1] if "XLA compilation of jit(advance)" in message]
    assert len(compiled) == 1


def test_eight_learning_rates_as_eight_runs(finished):
    metrics, script = metrics_of(finished[0]), load.load_script("q_learning_gridworld")
    keys = jax.random.split(jax.random.key(0), 3)
    run = jit_quickly(
        jax.vmap(lambda config, key: script.make_train(config)(key)["metrics"], (None, 0))
    )
    for trial, rate in enumerate(RATES):
        config = config_of(script, [*SMALL[1:], f"--lr={rate}"])
        out = run(config, keys)
        assert set(metrics) == {*out, "steps_per_update", "warmup_timesteps"}
        for name, values in out.items():
            np.testing.assert_allclose(metrics[name][trial], values, rtol=1e-3, atol=1e-5)
    assert np.ptp(metrics["q_value"], axis=0).min() > 0  # the rate matters


def test_slices_that_fit_agree_with_one_slice(finished, tmp_path, capsys):
    """24 runs in slices that do not divide them, nor end where a trial ends."""
    script = load.load_script("q_learning_gridworld")
    config = config_of(script, SMALL[1:])
    five = compilation.compile_slice(script, config, ["lr"], 5).bytes / GIB
    sweep.main([*SWEEP, f"--run-dir={tmp_path / 'run'}", f"--memory={five * 1.01}"])
    assert "5 slices of at most 5" in capsys.readouterr().out
    metrics, whole = metrics_of(tmp_path / "run"), metrics_of(finished[0])
    for name, values in metrics.items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-3, atol=1e-5)


def test_static_fields_make_groups(tmp_path, capsys):
    args = [
        "--num-steps",
        "100",
        "2e2",
        "--gamma",
        "0.5",
        "0.9",
        "--num-seeds=2",
        f"--run-dir={tmp_path / 'run'}",
    ]
    sweep.main([SMALL[0], SIZES[1], *GRID, *args])
    assert "4 trials x 2 seeds in 2 compile groups" in capsys.readouterr().out
    metrics, script = metrics_of(tmp_path / "run"), load.load_script("q_learning_gridworld")
    assert metrics["episodes"].shape == (4, 2, 20)
    assert metrics["steps_per_update"].tolist() == [100, 100, 200, 200]
    assert (metrics["episodes"][2:, :, 10:] == 0).all() and np.isnan(
        metrics["q_value"][2:, :, 10:]
    ).all()
    config = config_of(script, [SIZES[1], *GRID, "--num-steps=100", "--gamma=0.9"])
    alone = jit_quickly(jax.vmap(script.make_train(config)))(
        jax.random.split(jax.random.key(0), 2)
    )["metrics"]
    np.testing.assert_allclose(
        metrics["q_value"][1, :, :4], alone["q_value"][:, :4], rtol=1e-3, atol=1e-6
    )


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
    last = (tmp_path / "bad" / "table.txt").read_text().splitlines()[-1].split()
    assert last == [
        "1",
        "1e+30",
        "-inf",
        "-inf",
        "to",
        "-inf",
        "-inf",
        "-inf",
        "0",
        "of",
        "2",
        "finite",
    ]
    rows = list(csv.DictReader((tmp_path / "bad" / "results.csv").open()))
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


@pytest.mark.slow
def test_one_seed_has_no_interval(tmp_path):
    """Neither in the table nor in the pictures, which are drawn."""
    run_dir = sweep.main(
        [*SMALL, "--num-seeds=1", "--lr", "0.1", "0.5", f"--run-dir={tmp_path / 'run'}"]
    )
    table = [line.split() for line in (run_dir / "table.txt").read_text().splitlines()[1:]]
    assert [[line[3], line[-1]] for line in table] == [["none", "1"]] * 2
    assert all(math.isfinite(float(line[2])) for line in table)
    assert (run_dir / "final_return.png").exists() and (run_dir / "learning_curves.png").exists()


def test_results(finished):
    run_dir, script = finished[0], load.load_script("q_learning_gridworld")
    rows, metrics = list(csv.DictReader((run_dir / "results.csv").open())), metrics_of(run_dir)
    assert [(int(row["trial"]), float(row["lr"]), int(row["seed"])) for row in rows] == [
        (trial, rate, seed) for (trial, rate), seed in itertools.product(enumerate(RATES), range(3))
    ]
    for row in rows:
        one = {name: metrics[name][int(row["trial"])] for name in ("episodes", "episodic_return")}
        end = statistics.at_the_end(one)
        episodes = end["episodes"][int(row["seed"])]
        total = np.nansum(episodes * end["episodic_return"][int(row["seed"])])
        assert is_mean_with_running(float(row["final_return"]), total, episodes.sum())
    table = [line.split() for line in (run_dir / "table.txt").read_text().splitlines()[1:]]
    assert sorted(int(line[0]) for line in table) == list(range(8))
    means = [float(line[2]) for line in table]
    assert means == sorted(means, reverse=True)
    best = config_of(script, ["--config", str(run_dir / "best.yaml")])
    assert best.lr == float(table[0][1]) and best.num_steps == 200


def test_means_and_worst_seeds(finished):
    """An interquartile mean alone hides agents that failed: the table and results.csv say more."""
    header, *lines = (finished[0] / "table.txt").read_text().splitlines()
    assert re.split(r"  +", header)[2:] == [
        "interquartile mean",
        "95 % interval",
        "mean",
        "worst seed",
        "seeds",
    ]
    rows = rows_of(finished[0])
    for line in lines:
        cells = re.split(r"  +", line)
        mine = [row for row in rows if row["trial"] == cells[0]]
        returns = [float(row["final_return"]) for row in mine]
        assert len(returns) == 3
        for cell, name, value in zip(
            cells[4:6], ["mean", "worst"], [np.mean(returns), min(returns)], strict=True
        ):
            assert float(cell) == pytest.approx(value, rel=1e-3)
            assert all(float(row[f"trial_{name}"]) == pytest.approx(value) for row in mine)


def test_what_is_left_in_the_directory(finished):
    names = {path.name for path in finished[0].iterdir()} - {"script.diff"}
    plots = {"learning_curves.png", "final_return.png"}  # no heat map of one field
    files = {
        "config.yaml",
        "run.json",
        "metrics.npz",
        "results.csv",
        "table.txt",
        "best.yaml",
        ".lock",
    }
    # metrics are kept once: no slices
    assert names == {*files, *plots, "q_learning_gridworld.py", "agents"}
    for name in plots:
        assert (finished[0] / name).read_bytes().startswith(b"\x89PNG")
    script = load.load_script("q_learning_gridworld")
    assert config_of(script, ["--config", str(finished[0] / "config.yaml")]).num_steps == 200


def test_record(finished):
    record = record_of(finished[0])
    assert record["command"].startswith("onejit sweep q_learning_gridworld")
    assert record["slices"] == [24] and record["num_trials"] == 8 and "finished" in record
    assert record["steps_done"] == 8 * 3 * 2000
    assert record["seconds"]["compile"] > 0 and record["seconds"]["train"] > 0
    shown = list_runs.describe(finished[0])
    assert shown[1:6] == ["q_learning_gridworld", "GridWorld", "3", "finished", "100 %"]


def test_agents_of_the_best_trials_are_kept(finished, tmp_path):
    """As runs that can be loaded and played: the agents that the trials' own training makes."""
    folder = finished[0] / "agents"
    ranked = [line.split()[0] for line in (finished[0] / "table.txt").read_text().splitlines()[1:]]
    assert {path.name for path in folder.iterdir()} == {f"trial-{trial}" for trial in ranked[:5]}
    for trial in ranked[:2]:
        script, config, agent = load_run(folder / f"trial-{trial}")
        assert (
            config.lr == RATES[int(trial)]
            and Path(script.__file__).parent == folder / f"trial-{trial}"
        )
        train = jit_quickly(jax.vmap(script.make_train(config)))
        alone = train(jax.random.split(jax.random.key(0), 3))["runner_state"].agent
        np.testing.assert_allclose(agent["q"], alone["q"], rtol=1e-3, atol=1e-5)
        whole, own = metrics_of(finished[0]), load_metrics(folder / f"trial-{trial}")
        for name, values in own.items():
            np.testing.assert_array_equal(values, whole[name][int(trial)])
        assert record_of(folder / f"trial-{trial}")["final return"]["seeds"] == 3
    (picture,) = render.main(
        folder / f"trial-{ranked[0]}", agents=("best",), formats=("gif",), out=tmp_path
    )
    assert picture.read_bytes().startswith(b"GIF")


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize("keep, most", [(0, [0, 0, 0, 0]), (1, [1, 1, 1, 1])])
def test_agents_that_cannot_be_kept_leave_the_disk(tmp_path, monkeypatch, keep, most):
    """A slice for each trial. Of those that ended only the best ones' agents stay."""
    left, finish = [], execution.finish_slice

    def count_files(*args):
        finish(*args)
        left.append(len(list((tmp_path / "run" / "slices").glob("*.safetensors"))))

    monkeypatch.setattr(execution, "finish_slice", count_files)
    monkeypatch.setattr(compilation, "largest_slice", lambda compile_size, *_: compile_size(2))
    args = [
        "--lr",
        "0.1",
        "0.2",
        "0.5",
        "1",
        "--num-seeds=2",
        f"--keep={keep}",
        f"--run-dir={tmp_path / 'run'}",
    ]
    sweep.main([*SMALL, *args])
    assert left == most
    assert len(list((tmp_path / "run").glob("agents/*/agent.safetensors"))) == keep


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    run_dir = sweep.main(
        [
            *SMALL,
            "--lr",
            "0.1",
            "0.5",
            "--num-seeds=2",
            "--track=tensorboard",
            f"--run-dir={tmp_path / 'run'}",
        ]
    )
    rows = rows_of(run_dir)
    for trial, rate in enumerate((0.1, 0.5)):
        found = {
            tag: (step, value)
            for tag, step, value in events(run_dir / "tensorboard" / f"trial-{trial}")
        }
        returns = [float(row["final_return"]) for row in rows if row["trial"] == str(trial)]
        assert found["final_return/mean"] == (2000, pytest.approx(np.mean(returns)))
        assert found["final_return/worst_seed"] == (2000, pytest.approx(min(returns)))
        assert (
            found["final_return/low"][1]
            < found["final_return/mean"][1]
            < found["final_return/high"][1]
        )
        assert found["hyperparameters/lr"] == (2000, pytest.approx(rate))


@pytest.mark.slow
def test_heat_map_and_copy_of_a_script(tmp_path):
    """Somebody's own file, anywhere; two fields, one drawn and one not a number."""
    shutil.copy(ROOT / "q_learning_gridworld.py", tmp_path / "my_algorithm.py")
    args = [
        "--random-starts",
        "True",
        "False",
        "--lr",
        "uniform",
        "0.1",
        "0.5",
        "--samples=2",
        "--num-seeds=2",
    ]
    sweep.main([str(tmp_path / "my_algorithm.py"), *SIZES, *args, f"--run-dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "run" / "results.csv").open()))
    assert [row["random_starts"] for row in rows] == ["True"] * 4 + ["False"] * 4
    # the same draws at each point
    assert [row["lr"] for row in rows[:4]] == [row["lr"] for row in rows[4:]]


@pytest.fixture
def fake_sweep(tmp_path, monkeypatch):
    """A function that writes results of trials without training: `returns` [trials, seeds] of every
    update.
    """

    def write(script, swept, returns, weights=None, running=(0.0, 0), **more):
        config = dataclasses.replace(script.Config(), total_timesteps=20_000)
        trials = [
            dict(zip(swept, values, strict=True)) for values in zip(*swept.values(), strict=True)
        ]
        options = sweep.Options(num_seeds=len(returns[0]))
        request = sweep_request.Request(
            script, config, options, tmp_path, swept, trials, Record(settings={}), [], {}
        )
        for number, group in enumerate(sweep_request.make_groups(request)):
            request.groups.append(group)
            rows = np.repeat(
                np.ravel(np.array(returns)[group.trials])[:, None], group.config.num_updates, axis=1
            )
            metrics = {"episodes": np.ones(rows.shape, int), "episodic_return": rows, **more}
            agent = {"weights": np.zeros(len(rows)) if weights is None else np.array(weights)}
            name = f"{number}-0000000-{len(rows):07d}"
            (tmp_path / "unfinished" / name).mkdir(parents=True)
            execution.finish_slice(request, group, metrics, agent, running, 0, name, Lines(1))
        monkeypatch.setattr(results, "keep_agents", lambda *_: None)
        results.write_results(request)
        return tmp_path

    return write


def test_environments_are_not_ranked_in_one_table(fake_sweep):
    """Nor do they share a best.yaml or a picture: their returns have no common unit."""
    script = load.load_script("ppo")
    swept = {
        "env_name": ["CartPole-v1", "CartPole-v1", "Catch-bsuite", "Catch-bsuite"],
        "lr": [0.1, 0.2, 0.1, 0.2],
    }
    run_dir = fake_sweep(script, swept, [[100.0] * 3, [200.0] * 3, [1.0] * 3, [-1.0] * 3])
    first, second = (run_dir / "table.txt").read_text().strip().split("\n\n")
    assert [line.split()[0] for line in first.splitlines()] == ["CartPole-v1:", "trial", "1", "0"]
    assert [line.split()[0] for line in second.splitlines()] == ["Catch-bsuite:", "trial", "2", "3"]
    names = {path.name for path in run_dir.iterdir()} - {
        "run.json",
        "table.txt",
        "results.csv",
        "metrics.npz",
    }
    assert names == {
        f"{name}-{env}{end}"
        for env in ("CartPole-v1", "Catch-bsuite")
        for name, end in (("best", ".yaml"), ("learning_curves", ".png"), ("final_return", ".png"))
    }
    assert yaml.safe_load((run_dir / "best-Catch-bsuite.yaml").read_text())["lr"] == 0.1
    assert yaml.safe_load((run_dir / "best-CartPole-v1.yaml").read_text())["lr"] == 0.2


def test_the_step_axis_counts_the_warm_up(fake_sweep, monkeypatch):
    script, figures = load.load_script("dqn"), []
    make = lambda **how: figures.append(Figure(**how)) or figures[-1]  # noqa: E731
    monkeypatch.setattr(pictures, "Figure", make)
    metrics = metrics_of(fake_sweep(script, {"lr": [0.1, 0.2]}, [[1.0, 2.0], [3.0, 4.0]]))
    config = dataclasses.replace(script.Config(), total_timesteps=20_000)
    assert (
        metrics["warmup_timesteps"].tolist() == [config.warmup_timesteps] * 2
        and config.warmup_timesteps > 0
    )
    last = config.warmup_timesteps + config.num_updates * config.num_envs * config.num_steps
    assert [line.get_xdata()[-1] for line in figures[0].axes[0].lines] == [last, last]


def test_a_seed_without_a_return_is_the_worst(fake_sweep):
    """One of eight is trimmed away; three are not, however good the others are."""
    lost = [[3.0] * 8, [np.nan, *[4.0] * 7], [np.nan, np.inf, np.nan, *[9.0] * 5]]
    table = (
        fake_sweep(load.load_script("ppo"), {"lr": [0.1, 0.2, 0.3]}, lost) / "table.txt"
    ).read_text()
    rows = [re.split(r"  +", line) for line in table.splitlines()[1:]]
    assert [row[:3] + row[6:] for row in rows] == [
        ["1", "0.2", "4", "7 of 8 finite"],
        ["0", "0.1", "3", "8"],
        ["2", "0.3", "-inf", "5 of 8 finite"],
    ]


def test_a_value_that_is_not_finite_is_drawn(fake_sweep, capfd):
    run_dir = fake_sweep(load.load_script("ppo"), {"lr": [0.1, np.nan]}, [[1.0], [-np.inf]])
    assert (run_dir / "final_return.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in capfd.readouterr().err


def test_a_picture_that_fails_is_one_warning(fake_sweep, monkeypatch, capfd):
    """And what else a sweep writes is complete."""

    def fail(*_):
        raise ValueError("need at least one array\nto concatenate")

    monkeypatch.setattr(pictures, "draw_returns", fail)
    run_dir = fake_sweep(load.load_script("ppo"), {"lr": [0.1, 0.2]}, [[1.0], [2.0]])
    lines = capfd.readouterr().err.splitlines()
    cause = "ValueError: need at least one array to concatenate"
    assert lines == [f"warning: final_return.png cannot be drawn ({cause})"]
    names = {path.name for path in run_dir.iterdir()}
    assert {"results.csv", "table.txt", "best.yaml", "metrics.npz"} <= names
    assert "final_return.png" not in names and "learning_curves.png" in names
    assert "finished" in record_of(run_dir) and not (run_dir / "slices").exists()


@pytest.mark.usefixtures("quick_pictures")
def test_what_is_not_finite(fake_sweep, capfd):
    """Losses and parameters count. A metric of one's own may be NaN where no episode ended."""
    shape = (
        6,
        dataclasses.replace(load.load_script("ppo").Config(), total_timesteps=20_000).num_updates,
    )
    loss, success = np.zeros(shape), np.full(shape, np.nan)
    loss[0, 3:], weights = np.nan, [0.0, 0.0, 0.0, np.inf, 0.0, 0.0]
    swept = {"lr": [0.1, 0.2, 0.3]}
    run_dir = fake_sweep(
        load.load_script("ppo"),
        swept,
        np.ones((3, 2)),
        weights,
        value_loss=loss,
        success=success,
    )
    rows = rows_of(run_dir)
    assert [row["first_update_not_finite"] for row in rows] == ["3", "", "", "", "", ""]
    assert [row["diverged"] for row in rows] == ["False"] * 3 + ["True"] + ["False"] * 2
    assert [float(row["final_return"]) for row in rows] == [-np.inf, 1, 1, -np.inf, 1, 1]
    said = capfd.readouterr().err.splitlines()
    assert said == ["not finite: trial 0 (lr = 0.1)", "not finite: trial 1 (lr = 0.2)"]


@pytest.mark.usefixtures("quick_pictures")
def test_a_trial_that_never_fails_is_the_best(fake_sweep, capfd):
    """No episode of the second trial ends anymore. It counts by its running ones, not as -inf."""
    episodes = np.ones((4, 39), int)
    episodes[2:, 10:] = 0
    running = np.array([0.0, 0, 9000, 9000]), np.array([0, 0, 1, 1])
    swept = {"lr": [0.1, 0.2]}
    returns = [[300.0, 300.0], [20.0, 20.0]]
    run_dir = fake_sweep(
        load.load_script("ppo"), swept, returns, running=running, episodes=episodes
    )
    assert yaml.safe_load((run_dir / "best.yaml").read_text())["lr"] == 0.2
    assert [float(row["final_return"]) for row in rows_of(run_dir)] == [300, 300, 9000, 9000]
    said = capfd.readouterr().out
    assert "2 of 4 runs ended less than one episode per environment" in said


def test_interval_of_one_trial_is_the_ordinary_bootstrap():
    values = np.random.default_rng(1).normal(size=16)
    mean, low, high = pictures.interval_over_trials(values[None])
    middle = lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis=axis)  # noqa: E731
    interval = scipy.stats.bootstrap(
        (values,), middle, n_resamples=20000, method="percentile", rng=3
    )
    assert mean == pytest.approx(np.sort(values)[4:12].mean())
    np.testing.assert_allclose((low, high), interval.confidence_interval, atol=0.05)


def test_interval_draws_the_seeds_of_all_trials_jointly():
    """Trials that are all alike are no evidence beyond the one: a seed is good or bad luck in all
    of them.
    """
    values = np.random.default_rng(1).normal(size=16)
    one, many = (pictures.interval_over_trials(np.tile(values, (n, 1))) for n in (1, 20))
    np.testing.assert_allclose(one, many)


def test_interval_draws_no_trials():
    """Seeds that all agree within their trial: nothing is uncertain, however much trials differ."""
    assert pictures.interval_over_trials(np.array([[0.0] * 4, [1.0] * 4])) == [0.5, 0.5, 0.5]


def test_config_file(tmp_path):
    """Its values are those of all trials; what is swept on the command line wins.

    A resumed sweep needs no file.
    """
    file = tmp_path / "some.yaml"
    file.write_text(
        "lr: 0.3\nnum_steps: 50\nhidden_sizes: [8, 8]\nenv_params: {max_steps_in_episode: 9}\n"
    )
    request = sweep.read_request(["ppo", "--config", str(file), "--lr", "0.1", "0.2"], None)
    assert request.trials == [{"lr": 0.1}, {"lr": 0.2}]
    assert request.config.num_steps == 50 and request.config.hidden_sizes == (8, 8)
    assert dict(request.config.env_params) == {"max_steps_in_episode": 9}
    assert request.record.swept == {"lr": ["0.1", "0.2"]}
    assert request.record.settings["num_steps"] == 50


# --- what it refuses ---


@pytest.mark.parametrize(
    "args, words",
    [
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
        ([*SMALL, "--lr", "0.1", "0.2", "--lr=0.3"], "lr twice"),
        ([*SMALL, "--gama", "0.1", "0.2"], "gama mean gamma"),
        ([*SMALL, "stray", "--lr", "0.1", "0.2"], "max-steps-in-episode stray"),
        ([SMALL[0], "stray", "--lr", "0.1", "0.2"], "stray"),
        ([*SMALL, "--lr", "0.1", "0.2", "--config=none.yaml"], "none.yaml"),
        ([SMALL[0], "--lr", "0.1", "0.2", "--env-name=Nowhere"], "env-name Nowhere"),
        (["ppo", "--env-name", "CartPole-v1", "Nowhere"], "env_name Nowhere"),
        ([SMALL[0], "--num-steps", "200", "0", "--total-timesteps=2000"], "num_steps 1"),
        (
            [SMALL[0], "--num-steps", "200", "3000", "--total-timesteps=2000"],
            "total_timesteps 3000",
        ),
        ([SMALL[0], "--num-steps", "log-uniform", "10", "20", "--samples=2"], "num_steps float"),
        ([*SMALL, "--lr", "uniform", "0.1", "--samples=2"], "lr HIGH"),
        ([*SMALL, "--lr", "uniform", "0.2", "0.1", "--samples=2"], "lr 0.2 0.1"),
        ([*SMALL, "--lr", "log-uniform", "0", "0.1", "--samples=2"], "lr log-uniform 0"),
        (
            [*SMALL, "--lr", "one-minus-log-uniform", "0.9", "1", "--samples=2"],
            "lr one-minus-log-uniform 1",
        ),
        ([*SMALL, "--lr", "log-uniform", "0.1", "0.2"], "lr: log-uniform needs --samples, draw"),
        ([*SMALL, "--lr", "0.1", "0.2", "--samples=2"], "samples = 2: needs uniform --optuna"),
        ([*SMALL, "--lr", "uniform", "0.1", "0.2", "--samples=0"], "samples 0"),
        ([*SMALL, "--lr", "uniform", "0.1", "0.2", "--samples=few"], "samples few"),
        ([*SWEEP[:-1], "--num-seeds=0"], "num_seeds 0"),
        ([*SWEEP, "--seed=-1"], "seed -1"),
        ([*SWEEP, "--eval-episodes=3"], "eval-episodes"),
        ([*SWEEP, "--optuna=tpe"], "optuna = tpe: needs --samples, trials"),
        ([*SWEEP, "--batch=4"], "batch 4 --optuna"),
        ([*SWEEP, "--optuna=bohb", "--samples=4"], "optuna bohb"),
        ([*SWEEP, "--optuna=tpe", "--samples=4", "--batch=0"], "batch 0"),
        ([*SMALL, "--lr", "uniform", "0.1", "1", "--optuna=cmaes", "--samples=4"], "cmaes two tpe"),
        (
            [*SWEEP, "--random-starts", "True", "False", "--optuna=tpe", "--samples=4"],
            "random_starts float",
        ),
        ([*SWEEP, "--track=paper"], "track paper"),
        ([*SWEEP, "--keep=-1"], "keep -1"),
        ([*SWEEP, "--memory=0"], "memory 0"),
        ([*SWEEP, "--memory=1e-9"], "memory GiB"),
        ([*SWEEP, "--process-id=0"], "coordinator"),
        (
            [*SWEEP, "--coordinator=here", "--num-processes=2", "--process-id=0"],
            "coordinator here HOST:PORT",
        ),
        ([*SWEEP, "--coordinator=here:1", "--num-processes=2", "--process-id=2"], "process_id 2"),
        ([*SWEEP, "--coordinator=here:1", "--distributed"], "distributed"),
    ],
)
def test_refuses(args, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert_sweep_refuses(args, words, tmp_path / "run", capfd)


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["sweep", "--help"])
    assert not stop.value.code and "onejit sweep SCRIPT --help" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        __main__.main(["sweep", "ppo", "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(
        word in shown
        for word in (
            "usage: onejit sweep ppo ",
            "--samples",
            "--num-seeds",
            "--memory",
            "--coordinator",
            "log-uniform",
        )
    )


def test_directory_that_holds_another_sweep(finished, tmp_path, capfd):
    before = {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}
    for args, words in [
        ([*SWEEP, f"--run-dir={finished[0]}"], ["run_dir", "--resume"]),
        (["--resume", finished[0], "--lr", "0.5"], ["--lr"]),
        (["--resume"], ["resume", "RUN_DIR"]),
        (["--resume", tmp_path], [str(tmp_path)]),
    ]:
        with pytest.raises(SystemExit) as stop:
            sweep.main(args)
        message = capfd.readouterr().err
        assert (
            stop.value.code == 2
            and message.count("\n") == 1
            and all(word in message for word in words)
        ), message
    assert before == {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}


# --- going on ---


def compiled_in_order(monkeypatch, call):
    """`call(size, config)` before each compilation."""
    compile_slice = compilation.compile_slice

    def compile_it(script, config, names, size):
        call(size, config)
        return compile_slice(script, config, names, size)

    monkeypatch.setattr(compilation, "compile_slice", compile_it)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_groups_compile_one_after_the_other(tmp_path, monkeypatch):
    """Inside a directory that is there and locked.

    The program of a group is gone before the next one compiles.
    """
    run_dir, seen, programs, run = tmp_path / "run", [], [], loop.run

    def look(size, config):
        gc.collect()
        ended = sorted(path.name for path in run_dir.glob("slices/*.npz"))
        alive = sum(program() is not None for program in programs)
        seen.append(
            (
                config.num_steps,
                record_of(run_dir)["slices"],
                ended,
                alive,
                is_locked(run_dir),
            )
        )

    def remember(program, *args, **how):
        programs.append(weakref.ref(program.advance))
        return run(program, *args, **how)

    compiled_in_order(monkeypatch, look)
    monkeypatch.setattr(loop, "run", remember)
    sweep.main(
        [
            SMALL[0],
            SIZES[1],
            *GRID,
            "--num-steps",
            "100",
            "200",
            "--num-seeds=2",
            f"--run-dir={run_dir}",
        ]
    )
    assert seen == [(100, [], [], 0, True), (200, [2], ["0-0000000-0000002.npz"], 0, True)]
    assert len(programs) == 2


def test_no_group_trains_where_one_cannot(tmp_path, monkeypatch):
    compiled_in_order(monkeypatch, lambda *_: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as stop:
        sweep.main(
            [
                SMALL[0],
                SIZES[1],
                *GRID,
                "--num-steps",
                "100",
                "3000",
                f"--run-dir={tmp_path / 'run'}",
            ]
        )
    assert stop.value.code == 2 and not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick_pictures")
def test_stopped_while_a_group_compiles(tmp_path, monkeypatch, capfd):
    """Its slices keep their size whatever memory there is later, and what is finished does not
    compile again.
    """
    args = [SMALL[0], SIZES[1], *GRID, "--num-steps", "100", "200", "--num-seeds=4"]
    whole = sweep.main([*args, f"--run-dir={tmp_path / 'whole'}"])
    with monkeypatch.context() as patch:
        sizes = iter([2, 2])
        patch.setattr(
            compilation, "largest_slice", lambda compile_size, *_: compile_size(next(sizes))
        )
        compiled_in_order(
            patch, lambda _, config: config.num_steps == 200 and os.kill(os.getpid(), signal.SIGINT)
        )
        with pytest.raises(SystemExit) as stop:
            sweep.main([*args, f"--run-dir={tmp_path / 'run'}"])
    assert stop.value.code == 130
    said = capfd.readouterr().err.splitlines()
    assert (
        said[-1]
        == f"onejit sweep: stopped by SIGINT; onejit sweep --resume {tmp_path / 'run'} continues"
    )
    assert record_of(tmp_path / "run")["slices"] == [2, 2] and "finished" not in record_of(
        tmp_path / "run"
    )
    assert list_runs.describe(tmp_path / "run")[4:6] == ["stopped", "50 %"]
    with monkeypatch.context() as patch:
        compiled = []
        compiled_in_order(patch, lambda size, config: compiled.append((size, config.num_steps)))
        sweep.main(["--resume", tmp_path / "run"])
    assert compiled == [(2, 200)]
    for name, values in metrics_of(whole).items():
        np.testing.assert_allclose(metrics_of(tmp_path / "run")[name], values, rtol=1e-3, atol=1e-5)


@pytest.fixture
def stop_at(monkeypatch):
    """A function that sends this process a signal when so many steps are done."""

    def arrange(number, steps):
        count, sent = jobs.count, []

        def count_and_stop(request, progress, done, **how):
            count(request, progress, done, **how)
            if request.record.steps_done >= steps and not sent:
                sent.append(os.kill(os.getpid(), number))

        monkeypatch.setattr(jobs, "count", count_and_stop)

    return arrange


@pytest.mark.parametrize(
    "number, name, code", [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_stopped_by_a_signal_and_resumed(finished, stop_at, tmp_path, capfd, number, name, code):
    """One line, and the same bits as without it. Times of all processes add up."""
    stop_at(number, 5000)
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SWEEP, f"--run-dir={run_dir}"])
    before, said = record_of(run_dir), capfd.readouterr().err.splitlines()
    assert stop.value.code == code
    assert said[-1] == f"onejit sweep: stopped by {name}; onejit sweep --resume {run_dir} continues"
    assert 0 < before["steps_done"] < 48_000 and before["seconds"]["train"] > 0
    sweep.main(["--resume", run_dir])
    assert re.search(
        r"resume: [1-9] of 10 updates of the next slice are done", capfd.readouterr().out
    )
    after = record_of(run_dir)
    assert after["steps_done"] == 48_000 and "finished" in after
    assert all(after["seconds"][each] > before["seconds"][each] for each in ("compile", "train"))
    assert_same(metrics_of(finished[0]), metrics_of(run_dir))
    assert (finished[0] / "results.csv").read_bytes() == (run_dir / "results.csv").read_bytes()
    for path in finished[0].glob("agents/*/agent.safetensors"):
        assert_same(load_file(path), load_file(run_dir / path.relative_to(finished[0])))


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """Killed with a slice on disk and another half trained, then resumed: as if nothing had
    been.
    """
    args = [
        SMALL[0],
        "--lr",
        "0.1",
        "0.5",
        "1",
        "--num-seeds=4",
        "--num-steps=20",
        "--total-timesteps=40000",
    ]
    script = load.load_script(SMALL[0])
    config = config_of(script, args[6:])
    memory = compilation.compile_slice(script, config, ["lr"], 4).bytes * 1.01 / GIB
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
            midway = [
                path for path in killed.glob("unfinished/0-0000004-*/*") if path.name.isdigit()
            ]
            if midway or time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in (killed / "slices").glob("*.npz")] == ["0-0000000-0000004.npz"]
    sweep.main(["--resume", killed])
    assert_same(metrics_of(whole), metrics_of(killed))
    assert (whole / "results.csv").read_bytes() == (killed / "results.csv").read_bytes()
    assert {path.name for path in whole.iterdir()} == {path.name for path in killed.iterdir()}


def test_resume_of_a_finished_sweep_changes_nothing(finished, tmp_path, capsys):
    copy = shutil.copytree(finished[0], tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    (copy / "slices").mkdir()  # where a kill came between the record and the end
    assert sweep.main(["--resume", copy]) == copy
    assert capsys.readouterr().out == f"{copy} has finished: there is nothing left to do\n"
    assert before.keys() == {path for path in copy.rglob("*")} and not (copy / "slices").exists()
    assert all(path.is_dir() or path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.fixture(scope="module")
def before_the_results(tmp_path_factory):
    """A sweep as a kill leaves it after training, before there are results."""
    run_dir = tmp_path_factory.mktemp("sweep") / "run"

    def fail(*_):
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(results, "write_results", fail)
        sweep.main([*SWEEP, f"--run-dir={run_dir}"])
    assert stop.value.code == 1
    return run_dir


@pytest.mark.slow
@pytest.mark.usefixtures("quick_pictures")
def test_metrics_stay_in_slices_until_they_are_written_whole(
    finished, before_the_results, tmp_path, monkeypatch
):
    copy = shutil.copytree(before_the_results, tmp_path / "copy")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            results,
            "stack_metrics",
            lambda *_: (_ for _ in ()).throw(OSError("No space left on device")),
        )
        sweep.main(["--resume", copy])
    assert list((copy / "slices").iterdir()) and "finished" not in record_of(copy)
    sweep.main(["--resume", copy])
    assert_same(metrics_of(finished[0]), metrics_of(copy))
    assert {path.relative_to(copy) for path in copy.rglob("*")} == {
        path.relative_to(finished[0]) for path in finished[0].rglob("*")
    }


def test_resume_with_a_damaged_slice(finished, before_the_results, tmp_path, capfd):
    copy = shutil.copytree(before_the_results, tmp_path / "copy")
    (file,) = (copy / "slices").glob("*.npz")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SystemExit) as stop:
        sweep.main(["--resume", copy])
    assert stop.value.code == 1 and f"{file.name}: cannot be read" in capfd.readouterr().err
    file.unlink()
    sweep.main(["--resume", copy])
    assert_same(metrics_of(finished[0]), metrics_of(copy))


def test_best_values_can_be_trained(finished):
    assert yaml.safe_load((finished[0] / "best.yaml").read_text())["lr"] in RATES


# --- Optuna ---


def propose(words, returns_of) -> list[dict]:
    """The trials of a sweep whose returns a function of the trial gives."""
    request = sweep.read_request(["q_learning_gridworld", *words], None)
    for group in groups_of(request, search.Optuna(request)):
        request.returns.update(
            {trial: np.full(2, returns_of(request.trials[trial])) for trial in group.trials}
        )
    return request.trials


LR_AND_GAMMA = [
    "--lr",
    "log-uniform",
    "1e-4",
    "1",
    "--gamma",
    "one-minus-log-uniform",
    "0.9",
    "0.999",
]


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
    assert len(trials) == 60 and trials == propose(words, returns_of) != propose(
        [*words, "--seed=1"], returns_of
    )
    assert all(list(each) == ["lr", "gamma"] for each in trials)
    rates, gammas = np.array([list(each.values()) for each in trials]).T
    assert 1e-4 <= rates.min() < 1e-3 and 0.1 < rates.max() <= 1
    assert 0.9 <= gammas.min() < 0.95 and 0.998 < gammas.max() <= 0.999
    far = [
        abs(math.log10(each["lr"]) + 2) + abs(math.log10(1 - each["gamma"]) + 2) for each in trials
    ]
    assert (np.mean(far[-24:]) < 0.75 * np.mean(far[:12])) == (sampler != "random")


def test_optuna_chooses_listed_values():
    trials = propose(
        ["--lr", "0.1", "0.5", "--gamma", "uniform", "0.5", "1", "--optuna=tpe", "--samples=20"],
        lambda trial: trial["lr"],
    )
    rates = [trial["lr"] for trial in trials]
    assert set(rates) == {0.1, 0.5} and rates[8:].count(0.5) > rates[8:].count(0.1)


def test_optuna_resumed_with_another_version(tmp_path):
    request = sweep.read_request([*SMALL, *LR_AND_GAMMA, "--optuna=tpe", "--samples=4"], None)
    request.record.proposed = [{"lr": 0.1, "gamma": 0.9}] * 4
    with pytest.raises(ValueError, match="has its version changed"):
        next(groups_of(request, search.Optuna(request)))


@pytest.mark.usefixtures("quick_pictures")
def test_optuna_stopped_and_resumed(stop_at, tmp_path, monkeypatch):
    """Stopped in the second of three batches: the same trials and the same numbers.

    One compilation each time.
    """
    args, compiled = (
        [*SMALL, *LR_AND_GAMMA, "--optuna=tpe", "--samples=14", "--batch=6", "--num-seeds=2"],
        [],
    )
    args[args.index("--epsilon=1")] = "--epsilon=0.1"  # or the rate would not change the returns
    compiled_in_order(monkeypatch, lambda size, _: compiled.append(size))
    sweep.main([*args, f"--run-dir={tmp_path / 'whole'}"])
    assert compiled == [12]
    stop_at(signal.SIGTERM, 6 * 2 * 2000 + 1)
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={tmp_path / 'run'}"])
    assert stop.value.code == 143 and len(list((tmp_path / "run" / "slices").glob("*.npz"))) == 1
    assert len(record_of(tmp_path / "run")["proposed"]) == 12
    sweep.main(["--resume", tmp_path / "run"])
    assert compiled == [12] * 3
    rows = rows_of(tmp_path / "run")
    assert (
        rows == rows_of(tmp_path / "whole")
        and len(rows) == 28
        and len({row["lr"] for row in rows}) == 14
    )
    assert_same(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "whole"))
    assert len({row["trial_interquartile_mean"] for row in rows}) > 1


@pytest.mark.parametrize(
    "option, package",
    [("--optuna=tpe", "optuna"), ("--optuna=cmaes", "cmaes"), ("--track=wandb", "wandb")],
)
def test_package_that_is_missing(option, package, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SMALL, *LR_AND_GAMMA, option, "--samples=4", f"--run-dir={tmp_path / 'run'}"])
    message = capfd.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1 and f"pip install {package}" in message
    assert not (tmp_path / "run").exists()


# --- disks ---


@pytest.mark.slow
def test_disk_full(small_disk, tmp_path, capfd):
    """The second slice does not fit on the disk.

    With more room, the sweep goes on after the first.
    """
    args = [SMALL[0], SIZES[0], *GRID, "--total-timesteps=1000000"]
    script = load.load_script(SMALL[0])
    config = config_of(script, args[1:])
    four = compilation.compile_slice(script, config, ["lr"], 4).bytes * 1.01 / GIB
    args += ["--lr", "0.1", "0.5", "--num-seeds=4", f"--memory={four}"]
    disk = small_disk(680_000)  # a slice is 4 x 5000 updates of five metrics of 4 bytes: 400 kB
    with pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit sweep: error: "), message
    assert "No space left on device" in message
    assert [path.name for path in (disk / "run" / "slices").glob("*.npz")] == [
        "0-0000000-0000004.npz"
    ]
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    sweep.main(["--resume", copy])
    assert (
        metrics_of(copy)["episodes"].shape == (2, 4, 5000)
        and (metrics_of(copy)["episodes"] > 0).all()
    )
    assert not list(copy.rglob("*.partial"))


@pytest.mark.parametrize(("kind", "size"), [slow("files", 36_000), slow("disk", 190_000)])
def test_disk_full_while_a_checkpoint_is_written(kind, size, full_disk, tmp_path, capfd):
    """Checkpoints grow as metrics, at first zeros, fill up. The last that was committed stays good.

    The limit lies at about 520 updates. A chunk is at most 8 times the one before, so one ends
    between there and 6000.
    """
    args = [
        SMALL[0],
        SIZES[0],
        *GRID,
        "--total-timesteps=1200000",
        "--lr",
        "0.1",
        "0.5",
        "--num-seeds=4",
    ]
    args += ["--checkpoint-interval=1e-9"]
    with full_disk(kind, size) as (disk, cause), pytest.raises(SystemExit) as stop:
        sweep.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and f"cannot be written: {cause}" in message, message
    del stop
    # Else it meets Orbax's failed tasks while Python parses; their report parses too: a
    # SystemError in 3.11.
    gc.collect()
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    sweep.main(["--resume", copy])
    assert re.search(
        r"resume: [1-9]\d* of 6000 updates of the next slice are done", capfd.readouterr().out
    )
    assert (metrics_of(copy)["episodes"] > 0).all()


def test_read_only_run_directory(small_disk, capfd):
    disk = small_disk(100_000, "ro")
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SWEEP, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err
    assert (
        stop.value.code == 2
        and message.count("\n") == 1
        and "run_dir" in message
        and "Read-only" in message
    )
