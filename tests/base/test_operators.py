"""What clusters and other people's files do to a training: each case was met."""

import dataclasses
import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from gymnasium.envs.registration import EnvSpec

import ppo
from onejit.base import files, paths
from onejit.engine import memory
from onejit.envs.host import rows
from onejit.run import record, resume
from onejit.script import command_line

IN_A_SCRIPT = """
import gymnasium
import numpy as np


class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **kwargs):
        return np.zeros(1, np.float32), {}
"""


def test_a_class_of_the_script_reaches_other_processes(monkeypatch):
    """They cannot import the script."""
    module = types.ModuleType("script_of_a_test")
    vars(module)["SOURCE"] = b""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(IN_A_SCRIPT, vars(module))
    spec = EnvSpec("Mine-v0", entry_point=module.Mine, disable_env_checker=True)
    process = rows.Process(spec, {}, "", 1)
    try:
        assert process.receive() is None
    finally:
        process.end()
        process.wait()


def test_nested_aliases_are_refused():
    lines = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, 10):
        lines.append(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]")
    for text in ("\n".join(lines), "x: &x [*x]"):
        with pytest.raises(ValueError, match="too many values"):
            files.load_yaml(text)
    assert files.load_yaml("x: &x [1, 2]\ny: *x") == {"x": [1, 2], "y": [1, 2]}


def test_folders_are_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert paths.as_folder("$SCRATCH/a") == Path("/scratch/a")
    assert paths.as_folder("~/a") == Path.home() / "a"
    (tmp_path / "$HOME").mkdir()
    assert paths.as_folder(f"{tmp_path}/$HOME") == tmp_path / "$HOME"  # it exists as it is
    monkeypatch.setenv("BUCKET", "gs://bucket")
    monkeypatch.delenv("NOT_SET", raising=False)
    for text, message in {
        "gs://bucket/a": "address",
        "$BUCKET/a": "address",
        "${NOT_SET}/a": "NOT_SET",
        "~nobody_here/a": "user",
    }.items():
        with pytest.raises(ValueError, match=message):
            paths.as_folder(text)
    from onejit.train.options import Options

    for words in (["--run-dir", "gs://bucket/a"], ["--run-dir=gs://bucket/a"]):
        with pytest.raises(ValueError, match=r"run-dir.*address"):
            command_line.parse_with(ppo, command_line.split_flags(words), Options, None)
    flags = {"": [], "run_dir": ["$SCRATCH/a"]}
    _, options, _ = command_line.parse_with(ppo, flags, Options, None)
    assert options.run_dir == Path("/scratch/a")


@pytest.mark.parametrize(
    "change",
    [{"lr": math.nan}, {"env_params": {"gravity": math.nan}}, {"total_timesteps": -100_000}],
)
def test_the_command_line_names_the_field(change):
    with pytest.raises(ValueError, match=rf"{next(iter(change))} = "):
        command_line.check_config(dataclasses.replace(ppo.Config(), **change))


def test_memory_of_a_gpu_without_statistics(monkeypatch):
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])
    with pytest.raises(ValueError, match="give --memory"):
        memory.free_memory(None)
    assert memory.free_memory(2.0) == 2 * memory.GIB


@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "JAX_THREEFRY_PARTITIONABLE", "XLA_FLAGS"])
def test_resume_refuses_other_numerics(name):
    numerics = record.numerics()
    stored = record.Record(settings={}, numerics=numerics)
    resume.check_random_numbers(stored)
    stored.numerics = numerics | {name: "other"}
    with pytest.raises(ValueError, match=name):
        resume.check_random_numbers(stored)
    assert "onejit" in record.versions()
