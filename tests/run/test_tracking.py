"""What trackers are given."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from onejit.base import statistics
from onejit.run import tracking
from onejit.run.record import Record


def test_curves_by_hand():
    metrics = {
        "episodes": np.ones((3, 3), int),
        "episodic_return": np.array([[1.0, 2, 3], [0, 0, 1], [np.nan, 1, 1]]),
    }
    evaluation = np.array([[1.0, 3.0], [5.0, 5.0], [8.0, 8.0]])
    expected = {"episodes/mean": 1.0}
    # the third seed has no number
    for name, values in (("episodic", [2.0, 1 / 3]), ("greedy", [2.0, 5.0, 8.0])):
        numbers = (*statistics.student_interval(np.array(values)), min(values))
        for which, number in zip(("mean", "low", "high", "worst_agent"), numbers, strict=True):
            expected[f"{name}_return/{which}"] = number
    values = tracking.curves(metrics, range(3), evaluation)
    assert values == pytest.approx(expected)
    expected |= {"episodic_return/seed_0004": 2.0, "episodic_return/seed_0005": 1 / 3}
    values = tracking.curves(metrics, range(4, 7), evaluation, of_seeds=True)
    assert values == pytest.approx(expected)


def test_tags_of_wandb_are_short_enough(tmp_path, monkeypatch):
    """It takes no tag of more than 64 letters, and the run could not begin."""
    started = []

    def init(tags, **settings):
        assert all(1 <= len(tag) <= 64 for tag in tags)
        started.append(tags)
        return SimpleNamespace(define_metric=lambda *args, **settings: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    name = f"{'warehouse_' * 8}:Warehouse-v3"
    settings = {"script": "dqn" * 30, "env_name": name, "num_seeds": 4}
    tracking.open_tracker("wandb", tmp_path, Record(settings=settings, started=""), "", 0)
    assert started[0][1].endswith("Warehouse-v3")


def test_trackio(tmp_path, monkeypatch):
    """By a module with the calls of Trackio 0.43. A resumed run continues the run of its name."""
    runs = []

    class Run:
        def __init__(self, **settings):
            self.settings = settings
            self.logged = []
            self.finished = 0
            runs.append(self)

        def log(self, values, step):
            assert not self.finished
            self.logged.append((step, values))

        def finish(self):
            self.finished += 1

    def init(project, name, group, resume, config, embed):
        return Run(project=project, name=name, group=group, resume=resume, config=config)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    settings = {"script": "dqn", "env_name": "CartPole-v1", "num_seeds": 4}
    record = Record(settings=settings, started="2026-11-26 09:00:00")
    for step in (2000, 2400):
        tracker = tracking.open_tracker("trackio", tmp_path / "run", record, "trial-1", 0)
        tracker.log(step, {"episodic_return/mean": 1.0})
        tracker.close()
    first, second = runs
    assert first.settings == second.settings
    name = first.settings.pop("name")
    assert re.fullmatch("run trial-1 [0-9a-f]{6}", name)
    wanted = {"project": "mine", "group": "CartPole-v1", "resume": "allow", "config": settings}
    assert first.settings == wanted
    assert first.logged == [(2000, {"episodic_return/mean": 1.0})] and second.logged[0][0] == 2400
    assert first.finished == second.finished == 1
    tracking.open_tracker("trackio", tmp_path / "other", record, "trial-1", 0)
    assert runs[2].settings["name"].partition(" ")[0] == "other"
