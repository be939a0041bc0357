"""benchmarks/gpu.py: its table, and a trial of all parts on a CPU."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from support.files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu


def test_table_of_what_was_measured_failed_and_left_out():
    row = {"row": "ppo", "seeds": 64, "steps": 100}
    measured = row | {"script seconds": 2.0, "peer seconds": 3.0}
    measured["plan"] = {"kernels": 1234, "seconds": 0.5}
    result = {
        "device": "a GPU",
        "jax": "0.10",
        "seconds": 1.0,
        "resume": {"was stopped": True, "equal": True},
        "returns": {"row": "ppo/cartpole", "here": [499.0, 500.0], "on a CPU": [500.0, 500.0]},
        "speed": [
            measured,
            row | {"script failed": "out of memory"},
            row | {"left out": "no time left"},
        ],
        "unrolled": {"as it is": 3.0, "by 8": 2.0, "kernels": {}},
        "precision": {"left out": "no time left"},
    }
    lines = gpu.table(result).splitlines()
    assert "| ppo | 64 | 3,200 | 2,133 | 1.50 | 1,234 | 0.50 | 2.00 |" in lines
    assert any("out of memory" in line for line in lines)
    assert "precision: no time left" in lines
    assert any(line.startswith("unrolled: by 8 1.50 times as fast") for line in lines)
    assert gpu.table(result | {"speed": {"failed": "OSError: x"}}).count("OSError: x") == 1


def test_a_loop_of_environment_steps_is_unrolled_and_no_other():
    scan = gpu.scan_by_8(jax.lax.scan, length=16)

    def run(xs):
        return scan(lambda carry, x: (carry + x, x), 0.0, xs)

    assert "unroll=8" in str(jax.make_jaxpr(run)(jnp.ones(16)))
    assert "unroll=1" in str(jax.make_jaxpr(run)(jnp.ones(15)))


def test_kernels_and_planned_seconds_of_a_program():
    options = types.SimpleNamespace(gpu="h100")
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((64, 64))).compile()
    plan = gpu.plan_of(compiled, options)
    assert plan["kernels"] >= 1 and plan["seconds"] >= plan["starts of kernels"] > 0
    assert gpu.planned_gpu("NVIDIA H100 80GB HBM3") == "h100" and gpu.planned_gpu("x") == ""


@pytest.mark.slow
def test_all_parts_small(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--small", "--out", tmp_path]
    subprocess.run([*command, "--seconds", "3000"], check=True, cwd=tmp_path)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["resume"] == {"was stopped": True, "equal": True}
    assert len(result["speed"]) == 3 and all("script seconds" in row for row in result["speed"])
    assert not [part for part in gpu.PARTS if "failed" in result[part]]
    assert "ppo" in (tmp_path / "gpu.md").read_text()
