"""`onejit list`: the state of runs of every kind."""

import io
import json
import os
import re
import sys
import time

import numpy as np
import yaml
from safetensors.numpy import save_file
from support.commands import refusal
from support.small import small_config

from onejit import __main__, train
from onejit.report import compare
from onejit.report import list as list_runs
from onejit.run.lock import lock
from onejit.run.record import make_record, planned_updates, write_record
from onejit.script.configs import plain, write_config


def make_run(folder, record=None, finished=False, **settings):
    """A run directory of `onejit train` as far as `list` reads it."""
    settings = {"script": "ppo", "num_seeds": 2, "seed": 0, "env_name": "CartPole-v1"} | settings
    folder.mkdir(parents=True)
    written = {"settings": settings, "kind": "train", "steps_done": 250, "steps_total": 1000}
    record = written | (record or {})
    if finished:
        final = {"mean": 123.4567, "worst": -7.5}
        record |= {"finished": "2026-11-23 12:00:00", "final return": final}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def make_run_of_a_script(folder, returns, lost=()):
    """A run directory as `python SCRIPT.py` leaves it, after 10 updates."""
    folder.mkdir(parents=True)
    table = np.zeros(len(returns))
    table[list(lost)] = np.nan
    save_file({"q": table}, folder / "agent.safetensors", {"script": "mine", "seed": "3"})
    settings = {"env_name": "Catch-bsuite", "env_params": {"rows": 7}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    curve = np.repeat(np.array([returns]).T, 10, axis=1)
    np.savez(folder / "metrics.npz", episodes=np.ones(curve.shape), episodic_return=curve)
    return folder


def rows(capsys, folder):
    """`{name of the run: its cells}`, in the order of the table."""
    __main__.main(["list", str(folder)])
    titles, *lines = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert titles == list_runs.TITLES and all(len(line) == len(titles) for line in lines)
    return {line[0].removeprefix(f"{folder}/"): line[1:] for line in lines}


def test_states(tmp_path, capsys):
    of_main = ["3", "finished", "100 %", "2, worst agent 1 (ended episodes)"]
    what = ["ppo", "CartPole-v1", "2"]
    make_run(tmp_path / "a" / "finished", finished=True)
    make_run(tmp_path / "stopped")
    none = {"finished": "x", "final return": {"mean": None, "worst": None}}
    make_run(tmp_path / "diverged", none, num_seeds=8)
    make_run(tmp_path / "begun", {"steps_total": None})
    make_run(tmp_path / "sweep", {"kind": "sweep"})
    make_run(tmp_path / "whole_sweep", {"kind": "sweep", "finished": "x"})
    failed = make_run(tmp_path / "failed_sweep", {"kind": "sweep"})
    (failed / "results.csv").write_text("")  # and its agents could not be written
    (make_run(tmp_path / "damaged") / "run.json").write_text("{")
    make_run_of_a_script(tmp_path / "of_a_script", [1.0, 3.0, -2.0], lost=[2])
    make_run(tmp_path / "stopped" / "checkpoints" / "inner")  # what a run holds is no run
    held = lock(make_run(tmp_path / "running", {"steps_done": 900}))
    found = {name: cells[:-1] for name, cells in rows(capsys, tmp_path).items()}
    held.release()
    damaged = found.pop("damaged")
    assert damaged[:3] == ["-"] * 3
    assert damaged[3].startswith("cannot be read: ") and "run.json" in damaged[3]
    assert found == {
        "a/finished": [*what, "finished", "100 %", "123.5, worst agent -7.5"],
        "stopped": [*what, "stopped", "25 %", "-"],
        "running": [*what, "running", "90 %", "-"],
        "diverged": [*what[:2], "8", "finished", "100 %", "none"],
        "begun": [*what, "stopped", "-", "-"],
        "sweep": [*what, "stopped", "25 %", "a sweep"],
        "whole_sweep": [*what, "finished", "100 %", "a sweep"],
        "failed_sweep": [*what, "stopped", "25 %", "a sweep"],
        "of_a_script": ["mine", "Catch-bsuite rows=7", *of_main],
    }
    assert rows(capsys, tmp_path)["running"][3] == "stopped", "the lock is released"
    assert not (tmp_path / "stopped" / ".lock").exists(), "to look changes nothing"


def test_a_script_that_was_stopped(script, tmp_path, capsys):
    """`list` and `compare` say it, from the fields of its config alone."""
    finished = small_config(script, num_updates=10)
    stopped = small_config(script, num_updates=40)
    for name, config in {"finished": finished, "stopped": stopped}.items():
        settings = plain(config) | {"env_name": "Catch-bsuite"}
        assert planned_updates(settings) == config.num_updates
        least = config.total_timesteps - 5  # without what `small_config` adds
        assert planned_updates(settings | {"total_timesteps": least}) == config.num_updates
        write_config(make_run_of_a_script(tmp_path / name, [1.0, 3.0]) / "config.yaml", config)
    found = rows(capsys, tmp_path)
    assert found["finished"][3:6] == ["finished", "100 %", "2, worst agent 1 (ended episodes)"]
    assert found["stopped"][3] == "stopped" and found["stopped"][4] == "25 %"
    compare.read_run(str(tmp_path / "finished"), "final")
    assert "was stopped" not in capsys.readouterr().out
    compare.read_run(str(tmp_path / "stopped"), "final")
    assert re.search(r"stopped: was stopped after 2[45] % of its updates", capsys.readouterr().out)


def test_runs_behind_links(tmp_path, capsys):
    """Each run once, also if a link leads back to a folder around it."""
    make_run(tmp_path / "disk" / "moved")
    make_run(tmp_path / "disk" / "project" / "one")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "moved").symlink_to("../disk/moved")
    (tmp_path / "runs" / "project").symlink_to("../disk/project")
    (tmp_path / "runs" / "around").symlink_to("..")
    assert len(rows(capsys, tmp_path / "runs")) == 2


def test_escape_codes_of_a_record_are_shown_as_text(tmp_path, capsys):
    make_run(tmp_path / "a", env_name="\x1b[31mred\x1b]0;title\x07\r")
    make_run(tmp_path / "b\x1b[2J")
    __main__.main(["list", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert r"\x1b[31mred\x1b]0;title\x07\r" in said and r"b\x1b[2J" in said


def test_progress_counts_the_steps_of_all_updates(script, tmp_path):
    """In evolve_objective `total_timesteps` is of one of the many trainings in a generation."""
    config = small_config(script, num_updates=8)
    record = make_record("train", script, config, train.Options(num_seeds=3), [])
    record.steps_done = 3 * 2 * config.num_envs * config.num_steps
    write_record(tmp_path, record)
    assert list_runs.row_of(tmp_path)[4:6] == ["stopped", "25 %"]


def test_ages(tmp_path, capsys):
    """The run that was changed last is the last one."""
    ages = {
        "b": (30, "30 s ago"),
        "d": (200, "3 min ago"),
        "a": (7300, "2 h ago"),
        "c": (200_000, "2 d ago"),
    }
    for name, (age, _) in ages.items():
        then = time.time() - age
        os.utime(make_run(tmp_path / name) / "run.json", (then, then))
    found = {name: cells[-1] for name, cells in rows(capsys, tmp_path).items()}
    assert list(found) == ["c", "a", "d", "b"]
    assert found.pop("b") in ("30 s ago", "31 s ago", "32 s ago")
    assert all(found[name] == ages[name][1] for name in found)


def test_no_runs(tmp_path, capfd):
    for folder in (tmp_path, tmp_path / "none"):
        message = f"folder = {folder}: contains no run of a script, onejit train or onejit sweep"
        assert message in refusal(["list", folder], capfd)


def test_output_in_ascii_shows_all_names(tmp_path, monkeypatch):
    """Also names of files that are not UTF-8."""
    make_run(tmp_path / os.fsdecode(b"r\xe9sum\xe9"), env_name="\u03c0")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    __main__.main(["list", tmp_path])
    said = output.buffer.getvalue().decode("ascii")
    assert "sum" in said and r"\u03c0" in said
