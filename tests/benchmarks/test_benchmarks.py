"""What benchmarks keep of a measurement, and that nothing old is taken for something new."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import alphazero_strength
import gpu
import gpu_checks
import halving
import origin
import returns_page
import returns_vs_peers


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
    monkeypatch.setattr(alphazero_strength, "read_config", lambda *_: config)
    metrics = {"episodes": np.zeros((1, 4))}
    results = SimpleNamespace(metrics=metrics)
    monkeypatch.setattr(alphazero_strength, "load_results", lambda _: results)
    with pytest.raises(ValueError, match="has 4 of 8 updates"):
        alphazero_strength.check_finished(tmp_path)
    metrics["episodes"] = np.zeros((1, 8))
    alphazero_strength.check_finished(tmp_path)


def test_kept_speeds_name_their_machine():
    for row in json.loads((returns_page.MEASURED / "speed.json").read_text()):
        assert row["machine"] and row["cores"] == 2


@pytest.mark.parametrize("name", ["peers", "jaxmarl", "sbx"])
def test_returns_of_peers_are_kept_in_one_form(name):
    kept = json.loads((returns_page.MEASURED / f"{name}.json").read_text())
    for row in kept.values():
        assert row["environment"] and row["steps"] and row["returns"]


# --- benchmarks/gpu.py ---


def run_gpu(*words) -> str:
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *map(str, words)]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_measurement_on_a_gpu_tried_on_a_cpu(tmp_path):
    words = ["speed/ppo/2/script", "--small", "--out", tmp_path]
    run_gpu(*words)
    results = gpu.read(tmp_path)
    assert set(results) == {"compiled/ppo/2/script", "speed/ppo/2/script"}
    measured = results["speed/ppo/2/script"]
    assert measured["compiled before"] and len(measured["seconds"]) == 3
    assert measured["jax"] == jax.__version__ and results["compiled/ppo/2/script"]["kernels"]
    assert "| speed | ppo | 2 | 1,024 |" in (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "gpu_seconds.png").exists() and (tmp_path / "programs_0.tar").exists()
    assert "speed: 0 min are left" in run_gpu(*words, "--list")


@pytest.mark.slow
def test_all_lanes_tried_on_a_cpu(tmp_path):
    run_gpu("--small", "--seconds", 3000, "--out", tmp_path)
    results = gpu.read(tmp_path)
    assert {key: result for key, result in results.items() if "failed" in result} == {}
    assert {key.partition("/")[0] for key in results} == {"compiled", *gpu.MEASURE}
    assert results["checks/resume"]["was stopped"] and results["checks/resume"]["equal"]


def test_a_failure_is_tried_again_and_a_result_is_not(tmp_path):
    gpu.keep(tmp_path, "speed/a", {"failed": "no memory"})
    gpu.keep(tmp_path, "speed/b", {"seconds": [1.0]})
    gpu.keep(tmp_path, "speed/c", {})  # the peer is not there
    gpu.forget_failures(tmp_path)
    assert gpu.read(tmp_path) == {"speed/b": {"seconds": [1.0]}}


def test_rows_for_a_gpu_have_configs_and_planned_seconds_fit_a_call():
    for name, (seeds, seconds, packages) in gpu.ROWS.items():
        assert (ROOT / returns_page.config_of(name)).exists() and packages in gpu.PACKAGES, name
        assert seeds >= 1 and seconds < 540
    keys = [job.key for job in gpu.all_jobs()]
    assert len(keys) == len(set(keys))


def test_loops_of_some_lengths_are_unrolled_and_no_others():
    scan = gpu_checks.unrolling_scan(jax.lax.scan, (16,))

    def run(xs):
        return scan(lambda carry, x: (carry + x, x), 0.0, xs)

    assert "unroll=8" in str(jax.make_jaxpr(run)(jnp.ones(16)))
    assert "unroll=1" in str(jax.make_jaxpr(run)(jnp.ones(15)))


def test_kernels_and_planned_seconds_of_a_program():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((64, 64))).compile()
    plan = gpu.plan_of(compiled, "h100")
    assert plan["kernels"] >= 1 and plan["planned"] > 0
    assert gpu.planned_gpu("NVIDIA H100 80GB HBM3") == "h100" and gpu.planned_gpu("x") == ""
