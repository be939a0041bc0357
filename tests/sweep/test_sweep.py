"""`onejit sweep`: what it refuses, what it compiles, what it computes, and going on after a
kill.
"""

import contextlib
import dataclasses
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
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from safetensors.numpy import load_file
from support.compilation import jit_quickly
from support.event_files import events
from support.returns import is_mean_with_running
from support.strategies import groups_of
from support.sweeps import draw_nothing, metrics_of, record_of, rows_of
from support.trees import assert_same

from onejit import __main__, resume, sweep
from onejit.base import statistics
from onejit.engine import compilation, loop
from onejit.engine.memory import GIB
from onejit.engine.progress import Lines
from onejit.report import compare
from onejit.report import list as list_runs
from onejit.run.directory import load_metrics, load_run
from onejit.run.lock import is_locked
from onejit.run.record import Record
from onejit.script import command_line, load
from onejit.sweep import execution, pictures, proposals, results
from onejit.sweep.trials import Search, Sweep, Trials, make_groups
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


def config_of(script, words):
    return command_line.parse_with(script, command_line.split_flags(words), sweep.Options, "")[0]


def compiled_in_order(monkeypatch, call):
    """`call(size, config)` before each compilation."""
    compile_slice = compilation.compile_slice

    def compile_it(script, config, names, size):
        call(size, config)
        return compile_slice(script, config, names, size)

    monkeypatch.setattr(compilation, "compile_slice", compile_it)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep over 8 learning rates; what it compiled, and its directory before the results."""
    run_dir = tmp_path_factory.mktemp("sweep") / "run"
    before = run_dir.with_name("before")
    messages = []
    write_results = results.write_results
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)

    def copy_and_write(request):
        shutil.copytree(run_dir, before)
        return write_results(request)

    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "write_results", copy_and_write)
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
    script = load.load_script("q_learning_gridworld")
    config = config_of(script, SMALL[1:])
    five = compilation.compile_slice(script, config, ["lr"], 5).bytes / GIB
    sweep.main([*SWEEP, f"--run-dir={tmp_path / 'run'}", f"--memory={five * 1.01}"])
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
    run = loop.run

    def look(size, config):
        gc.collect()
        slices = record_of(run_dir)["slices"]
        ended = sorted(path.name for path in run_dir.glob("slices/*.npz"))
        alive = sum(program() is not None for program in programs)
        seen.append((config.num_steps, slices, ended, alive, is_locked(run_dir)))

    def remember(program, *args, **how):
        programs.append(weakref.ref(program.advance))
        return run(program, *args, **how)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        draw_nothing(patch)
        compiled_in_order(patch, look)
        patch.setattr(loop, "run", remember)
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


def test_means_and_worst_seeds(finished):
    """An interquartile mean alone hides agents that failed: the table and results.csv say more."""
    header, *lines = (finished / "table.txt").read_text().splitlines()
    titles = ["interquartile mean", "95 % interval", "mean", "worst seed", "seeds"]
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
    names = {path.name for path in finished.iterdir()} - {"script.diff"}
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
        metrics = load_metrics(run_dir)
        del metrics["final_return"]
        for name, values in metrics.items():
            np.testing.assert_array_equal(values, whole[name][int(trial)])
        assert record_of(run_dir)["final return"]["seeds"] == 3
    best = folder / f"trial-{ranked[0]}"
    (picture,) = render.main(best, agents=("best",), formats=("gif",), out=tmp_path)
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
    args = ["--lr", "0.1", "0.2", "0.5", "1", "--num-seeds=2", f"--keep={keep}"]
    sweep.main([*SMALL, *args, f"--run-dir={tmp_path / 'run'}"])
    assert left == most
    assert len(list((tmp_path / "run").glob("agents/*/agent.safetensors"))) == keep


@pytest.fixture
def fake_sweep(tmp_path, monkeypatch):
    """A function that writes results of trials without training: `returns` [trials, seeds] of every
    update.
    """
    monkeypatch.setattr(results, "keep_agents", lambda *_: None)

    def write(script, swept, returns, weights=None, running=(0.0, 0), track=None, **more):
        config = dataclasses.replace(script.Config(), total_timesteps=20_000)
        columns = zip(*swept.values(), strict=True)
        trials = [dict(zip(swept, values, strict=True)) for values in columns]
        options = sweep.Options(num_seeds=len(returns[0]), track=track)
        search = Search(script, config, options, swept)
        request = Sweep(search, Trials(trials), tmp_path, Record(settings={}))
        for number, group in enumerate(make_groups(search, trials, range(len(trials)))):
            request.trials.groups.append(group)
            of_runs = np.ravel(np.array(returns)[group.trials])
            rows = np.repeat(of_runs[:, None], group.config.num_updates, axis=1)
            metrics = {"episodes": np.ones(rows.shape, int), "episodic_return": rows, **more}
            final = statistics.final_return(metrics, group.config.num_updates, running)
            agent = {"weights": np.zeros(len(rows)) if weights is None else np.array(weights)}
            trained = loop.Trained(metrics, agent, final)
            name = f"{number}-0000000-{len(rows):07d}"
            (tmp_path / "unfinished" / name).mkdir(parents=True)
            execution.finish_slice(request, group, trained, 0, name, Lines(1))
        results.write_results(request)
        return tmp_path

    return write


def test_environments_are_not_ranked_in_one_table(fake_sweep, capfd, recwarn):
    """Nor do they share a best.yaml or a picture, whatever letters their names have."""
    script = load.load_script("ppo")
    swept = {
        "env_name": ["倒立$_$", "倒立$_$", "小车", "小车"],
        "lr": [0.1, 0.2, 0.1, 0.2],
    }
    run_dir = fake_sweep(script, swept, [[100.0] * 3, [200.0] * 3, [1.0] * 3, [-1.0] * 3])
    first, second = (run_dir / "table.txt").read_text().strip().split("\n\n")
    assert [line.split()[0] for line in first.splitlines()] == ["倒立$_$:", "trial", "1", "0"]
    assert [line.split()[0] for line in second.splitlines()] == ["小车:", "trial", "2", "3"]
    names = {path.name for path in run_dir.iterdir()}
    assert names - {"run.json", "table.txt", "results.csv", "metrics.npz"} == {
        f"{name}-{env}{end}"
        for env in ("_", "_-2")
        for name, end in (("best", ".yaml"), ("learning_curves", ".png"), ("final_return", ".png"))
    }
    assert yaml.safe_load((run_dir / "best-_-2.yaml").read_text())["lr"] == 0.1
    assert yaml.safe_load((run_dir / "best-_.yaml").read_text())["lr"] == 0.2
    assert "cannot be drawn" not in capfd.readouterr().err
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_the_step_axis_counts_the_warm_up(fake_sweep, monkeypatch):
    script, figures = load.load_script("dqn"), []
    make = lambda **how: figures.append(Figure(**how)) or figures[-1]  # noqa: E731
    monkeypatch.setattr(pictures, "Figure", make)
    metrics = metrics_of(fake_sweep(script, {"lr": [0.1, 0.2]}, [[1.0, 2.0], [3.0, 4.0]]))
    config = dataclasses.replace(script.Config(), total_timesteps=20_000)
    assert config.warmup_timesteps > 0
    assert metrics["warmup_timesteps"].tolist() == [config.warmup_timesteps] * 2
    last = config.warmup_timesteps + config.num_updates * config.num_envs * config.num_steps
    assert [line.get_xdata()[-1] for line in figures[0].axes[0].lines] == [last, last]


def test_a_seed_without_a_return_is_the_worst(fake_sweep):
    """One of eight is trimmed away; three are not, however good the others are."""
    lost = [[3.0] * 8, [np.nan, *[4.0] * 7], [np.nan, np.inf, np.nan, *[9.0] * 5]]
    run_dir = fake_sweep(load.load_script("ppo"), {"lr": [0.1, 0.2, 0.3]}, lost)
    lines = (run_dir / "table.txt").read_text().splitlines()[1:]
    rows = [re.split(r"  +", line) for line in lines]
    assert [row[:3] + row[6:] for row in rows] == [
        ["1", "0.2", "4", "7 of 8 finite"],
        ["0", "0.1", "3", "8"],
        ["2", "0.3", "-inf", "5 of 8 finite"],
    ]


def test_a_value_that_is_not_finite_is_drawn(fake_sweep, capfd):
    """And one seed has no interval, neither in the table nor in the pictures."""
    run_dir = fake_sweep(load.load_script("ppo"), {"lr": [0.1, np.nan]}, [[1.0], [-np.inf]])
    for name in ("final_return.png", "learning_curves.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")
    assert "warning" not in capfd.readouterr().err
    best = (run_dir / "table.txt").read_text().splitlines()[1]
    assert best.split() == ["0", "0.1", "1", "none", "1", "1", "1"]


def test_two_fields_have_a_heat_map(fake_sweep):
    """Also if one is not a number."""
    swept = {"anneal_lr": [True, True, False, False], "lr": [0.1, 0.2, 0.1, 0.2]}
    run_dir = fake_sweep(load.load_script("ppo"), swept, [[1.0], [2.0], [3.0], [4.0]])
    assert (run_dir / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    assert [row["anneal_lr"] for row in rows_of(run_dir)] == ["True", "True", "False", "False"]


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
    script = load.load_script("ppo")
    config = dataclasses.replace(script.Config(), total_timesteps=20_000)
    loss = np.zeros((6, config.num_updates))
    loss[0, 3:] = np.nan
    success = np.full(loss.shape, np.nan)
    weights = [0.0, 0.0, 0.0, np.inf, 0.0, 0.0]
    swept = {"lr": [0.1, 0.2, 0.3]}
    run_dir = fake_sweep(script, swept, np.ones((3, 2)), weights, value_loss=loss, success=success)
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


@pytest.mark.usefixtures("quick_pictures")
def test_tensorboard(fake_sweep):
    pytest.importorskip("tensorboardX")
    script = load.load_script("q_learning_gridworld")
    returns = [[1.0, 2.0], [3.0, 7.0]]
    run_dir = fake_sweep(script, {"lr": [0.1, 0.5]}, returns, track="tensorboard")
    for trial, rate in enumerate((0.1, 0.5)):
        folder = run_dir / "tensorboard" / f"trial-{trial}"
        found = {tag: (step, value) for tag, step, value in events(folder)}
        mean = np.mean(returns[trial])
        assert found["final_return/mean"] == (20_000, pytest.approx(mean))
        assert found["final_return/worst_seed"] == (20_000, pytest.approx(min(returns[trial])))
        assert found["final_return/low"][1] < mean < found["final_return/high"][1]
        assert found["hyperparameters/lr"] == (20_000, pytest.approx(rate))


def test_interval_draws_the_seeds_of_all_trials_jointly_and_no_trials():
    """A seed is good or bad luck in all trials, so trials that are alike are no further evidence.

    Where all seeds of a trial agree nothing is uncertain, however much trials differ.
    """
    values = np.random.default_rng(1).normal(size=16)
    expected = statistics.bootstrap_interval(statistics.interquartile_mean, values)
    for num_trials in (1, 20):
        found = pictures.interval_over_trials(np.tile(values, (num_trials, 1)))
        np.testing.assert_allclose(found, expected)
    assert pictures.interval_over_trials(np.array([[0.0] * 4, [1.0] * 4])) == [0.5, 0.5, 0.5]


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


def test_directory_that_holds_another_sweep(finished, tmp_path, capfd):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for args, words in [
        (["sweep", *SWEEP, f"--run-dir={finished}"], ["run_dir", "onejit resume"]),
        (["resume", finished, "--lr", "0.5"], ["--lr"]),
        (["resume", finished, "--total-timesteps", "9e9"], ["a sweep cannot be extended"]),
        (["sweep", "--resume", finished], ["--resume: is gone; use onejit resume RUN_DIR"]),
        (["resume", tmp_path], [str(tmp_path)]),
    ]:
        with pytest.raises(SystemExit) as stop:
            __main__.main(args)
        message = capfd.readouterr().err
        assert stop.value.code == 2 and message.count("\n") == 1
        assert all(word in message for word in words), message
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


# --- going on ---


@pytest.mark.usefixtures("quick_pictures")
def test_stopped_while_a_group_compiles(of_two_groups, tmp_path, monkeypatch, capfd):
    """Its slices keep their size whatever memory there is later, and what is finished does not
    compile again.
    """
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(compilation, "largest_slice", lambda compile_size, *_: compile_size(2))
        compiled_in_order(
            patch, lambda _, config: config.num_steps == 200 and os.kill(os.getpid(), signal.SIGINT)
        )
        sweep.main([*TWO_GROUPS, f"--run-dir={run_dir}"])
    assert stop.value.code == 130
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"onejit sweep: stopped by SIGINT; onejit resume {run_dir} continues"
    assert record_of(run_dir)["slices"] == [2, 2] and "finished" not in record_of(run_dir)
    assert list_runs.row_of(run_dir)[4:6] == ["stopped", "50 %"]
    compiled = []
    compiled_in_order(monkeypatch, lambda size, config: compiled.append((size, config.num_steps)))
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
    script = load.load_script(SMALL[0])
    memory = compilation.compile_slice(script, config_of(script, args[1:]), ["lr"], 4).bytes
    args = [SMALL[0], "--lr", "0.1", "0.5", "1", *args]
    args += [f"--memory={memory * 1.01 / GIB}", "--checkpoint-interval=1e-9"]
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
            checkpoints = killed.glob("unfinished/0-0000004-*/*")
            is_midway = any(path.name.isdigit() for path in checkpoints)
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
def test_metrics_stay_in_slices_until_they_are_written_whole(
    finished, before_the_results, monkeypatch
):
    def fail(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(results, "stack_metrics", fail)
        resume.main(before_the_results)
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
    for group in groups_of(request, proposals.Optuna(request)):
        request.trials.returns.update(
            {trial: np.full(2, returns_of(request.trials.values[trial])) for trial in group.trials}
        )
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
        next(groups_of(request, proposals.Optuna(request)))


@pytest.mark.usefixtures("quick_pictures")
def test_optuna_stopped_and_resumed(stop_at, tmp_path, monkeypatch):
    """Stopped in the second of three batches: the same trials and the same numbers.

    One compilation each time.
    """
    args = [*SMALL, *LR_AND_GAMMA, "--optuna=tpe", "--samples=14", "--batch=6", "--num-seeds=2"]
    compiled = []
    args[args.index("--epsilon=1")] = "--epsilon=0.1"  # or the rate would not change the returns
    compiled_in_order(monkeypatch, lambda size, _: compiled.append(size))
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
    slices = [path.name for path in (disk / "run" / "slices").glob("*.npz")]
    assert slices == ["0-0000000-0000004.npz"]
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    resume.main(copy)
    episodes = metrics_of(copy)["episodes"]
    assert episodes.shape == (2, 4, 5000) and (episodes > 0).all()
    assert not list(copy.rglob("*.partial"))
