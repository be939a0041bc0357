"""What benchmarks keep of a measurement, and that nothing old is taken for something new."""

import json
import re
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import alphazero_strength
import halving
import origin
import population
import returns_page
import returns_vs_peers
import speed


def test_origin_names_the_machine_and_the_commit():
    known = origin.origin()
    assert set(known) == {"machine", "commit", "jax"}
    assert known["machine"] and "(R)" not in known["machine"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", known["commit"])


def test_a_run_of_another_command_is_not_reused(tmp_path):
    run_dir = tmp_path / "my runs"
    run_dir.mkdir()
    command = ["onejit", "sweep", "ppo", "--lr", "1", "--run-dir", str(run_dir)]
    record = {"command": shlex.join(command), "finished": "today"}
    (run_dir / "run.json").write_text(json.dumps(record))
    assert halving.run(["sweep", "ppo", "--lr", "1"], run_dir) == record
    with pytest.raises(ValueError, match="is of another command, onejit sweep ppo --lr 1 "):
        halving.run(["sweep", "ppo", "--lr", "2"], run_dir)


def test_a_row_of_another_command_is_measured_again(tmp_path, monkeypatch):
    measured = []

    def measure(task, name, args):
        measured.append(name)
        return {"command": " ".join(["onejit", *halving.words_of(task, name, args)])}

    monkeypatch.setattr(halving, "measure", measure)
    monkeypatch.setattr(halving, "make_table", lambda results: "")
    words = ["halving.py", "ppo/cartpole_fast", "--results", str(tmp_path / "results.json")]
    for more in ([], [], ["--samples", "9"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        halving.main()
    assert measured == ["full", "halving"] * 2


@pytest.mark.parametrize(("script", "flag"), [(halving, "--samples=9"), (population, "--agents=8")])
def test_the_page_shows_trainings_of_the_default_sizes(script, flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "ppo/cartpole_fast", flag])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2 and "needs --results" in capsys.readouterr().err


def test_seeds_of_another_machine_are_not_added(tmp_path, monkeypatch):
    file = tmp_path / "peers.json"
    results = {}

    def train(seed):
        return {"return": seed}

    returns_vs_peers.measure("ppo", {"onejit": train}, 2, results, file)
    assert json.loads(file.read_text())["ppo"]["returns"] == {"onejit": [0.0, 1.0]}
    returns_vs_peers.measure("ppo", {"onejit": train}, 3, results, file)
    assert results["ppo"]["returns"]["onejit"] == [0.0, 1.0, 2.0]
    monkeypatch.setattr(returns_vs_peers, "origin", lambda: {"machine": "other"})
    returns_vs_peers.measure("ppo", {"onejit": train}, 3, results, file)  # nothing is left to do
    with pytest.raises(ValueError, match=r"peers\.json: ppo was begun with .*; use --out"):
        returns_vs_peers.measure("ppo", {"onejit": train}, 4, results, file)
    del results["ppo"]["origin"]  # a file of an earlier version
    with pytest.raises(ValueError, match="was begun with None"):
        returns_vs_peers.measure("ppo", {"onejit": train}, 4, results, file)


def test_an_interrupted_training_of_alphazero_is_refused(monkeypatch, tmp_path):
    config = SimpleNamespace(num_updates=8)
    monkeypatch.setattr(alphazero_strength.run_directory, "read_config", lambda *_: config)
    metrics = {"episodes": np.zeros((1, 4))}
    monkeypatch.setattr(alphazero_strength.run_directory, "load_metrics", lambda _: metrics)
    with pytest.raises(ValueError, match="has 4 of 8 updates"):
        alphazero_strength.check_finished(tmp_path)
    metrics["episodes"] = np.zeros((1, 8))
    alphazero_strength.check_finished(tmp_path)


def test_speeds_of_two_machines_are_two_lines(tmp_path):
    rows = [
        {"row": "ppo", "seeds": seeds, "machine": machine, "bare steps/s": 2.0, "peer steps/s": 1.0}
        for seeds, machine in ((1, "one"), (8, "one"), (8, "two"), (32, "two"))
    ]
    figure = speed.Figure()
    axes = figure.subplots()
    speed.draw_throughput(axes, rows)
    drawn = [line.get_xdata().tolist() for line in axes.lines if len(line.get_xdata())]
    assert drawn == [[1, 8], [1, 8], [8, 32], [8, 32]]


def test_kept_speeds_name_their_machine():
    for row in json.loads((returns_page.MEASURED / "speed.json").read_text()):
        assert row["machine"] and row["cores"] == 2


@pytest.mark.parametrize("name", ["peers", "jaxmarl", "sbx"])
def test_returns_of_peers_are_kept_in_one_form(name):
    kept = json.loads((returns_page.MEASURED / f"{name}.json").read_text())
    for row in kept.values():
        assert row["environment"] and row["steps"] and row["returns"]
