"""What a sweep writes of trials: tables, results.csv, pictures and curves of a tracker."""

import dataclasses
import re
from functools import partial

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from support.event_files import events
from support.sweeps import metrics_of, record_of, rows_of, write_results_of

from onejit.base import statistics
from onejit.script import load
from onejit.sweep import pictures


@pytest.fixture
def fake_sweep(tmp_path, monkeypatch):
    """`write_results_of` with a folder."""
    return partial(write_results_of, monkeypatch, tmp_path)


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
    """Of a single trial."""
    script, figures = load.load_script("dqn"), []
    make = lambda **how: figures.append(Figure(**how)) or figures[-1]  # noqa: E731
    monkeypatch.setattr(pictures, "Figure", make)
    metrics = metrics_of(fake_sweep(script, {"lr": [0.1]}, [[1.0, 2.0]]))
    config = dataclasses.replace(script.Config(), total_timesteps=20_000)
    assert config.warmup_timesteps > 0
    assert metrics["warmup_timesteps"].tolist() == [config.warmup_timesteps]
    last = config.warmup_timesteps + config.num_updates * config.num_envs * config.num_steps
    assert [line.get_xdata()[-1] for line in figures[0].axes[0].lines] == [last]


def test_a_seed_without_a_return_is_the_worst(fake_sweep):
    """One of eight is trimmed away; three are not, however good the others are."""
    lost = [[2.0, *[3.0] * 6, 4.0], [np.nan, *[4.0] * 7], [np.nan, np.inf, np.nan, *[9.0] * 5]]
    run_dir = fake_sweep(load.load_script("ppo"), {"lr": [0.1, 0.2, 0.3]}, lost)
    lines = (run_dir / "table.txt").read_text().splitlines()[1:]
    rows = [re.split(r"  +", line) for line in lines]
    assert [row[:3] + row[5:] for row in rows] == [
        ["1", "0.2", "4", "4", "7 of 8 finite"],
        ["0", "0.1", "3", "2", "8"],
        ["2", "0.3", "-inf", "9", "5 of 8 finite"],
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
    assert record_of(run_dir)["trials"] == [{"lr": 0.1}, {"lr": 0.2}]
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
        assert found["final_return/worst_agent"] == (20_000, pytest.approx(min(returns[trial])))
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
