"""The package's own reading of configs: YAML files and flags."""

import dataclasses
from types import SimpleNamespace

import pytest

from onejit.run.directory import read_config
from onejit.script import command_line, configs, load


@pytest.fixture(scope="module")
def script():
    return load.load_script("ppo")


def parse(script, *words):
    @dataclasses.dataclass(frozen=True)
    class Options:
        num_seeds: int = 4

    flags = command_line.split_flags([str(word) for word in words])
    config, _, _ = command_line.parse_with(script, flags, Options, "")
    return config


def test_flags_override_the_file_wherever_it_stands(script, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("total_timesteps: 7e5\ngamma: 0.5\nhidden_sizes: [8, 16]\nlr: 1e-3\n")
    expected = dataclasses.replace(
        script.Config(), total_timesteps=700_000, gamma=0.25, hidden_sizes=(8, 16), lr=1e-3
    )
    for words in (
        ["--config", file, "--gamma", 0.25],
        ["--gamma=0.25", f"--config={file}"],
        ["--num-seeds", 2, "--config", file, "--gamma=0.25"],
    ):
        assert parse(script, *words) == expected


def test_whole_numbers_as_people_write_them(script):
    for word in ("5e5", "500000", "5.0e+05"):
        config = parse(script, "--total-timesteps", word, "--num-envs=8e0", "--num-seeds=1e1")
        assert (config.total_timesteps, config.num_envs) == (500_000, 8)
        assert type(config.total_timesteps) is int
    with pytest.raises(ValueError, match=r"--num-envs 4\.5: takes a whole number"):
        parse(script, "--num-envs", 4.5)
    assert parse(script, "--lr=5e5").lr == 5e5


def test_config_of_a_file_is_the_config(script, tmp_path):
    config = dataclasses.replace(
        script.Config(), hidden_sizes=(3,), env_params={"a": 1, "b": "x y", "c": True}
    )
    configs.write_config(tmp_path / "config.yaml", config)
    assert read_config(script, tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["- lr\n- 0.1", "fast", "3", "", "lr: [1", "lr: 1: 2", "lr: \x00"])
def test_a_file_that_holds_no_config(script, tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"--config .*bad\.yaml: "):
        parse(script, "--config", tmp_path / "bad.yaml")


def test_config_without_a_file(script):
    with pytest.raises(ValueError, match="--config: needs a file"):
        parse(script, "--config")
    with pytest.raises(ValueError, match=r"--config none\.yaml: FileNotFoundError"):
        parse(script, "--config=none.yaml")


def test_whole_numbers_of_a_script_that_imports_annotations():
    """Its types are words."""
    code = """from __future__ import annotations
@dataclasses.dataclass
class Config:
    total_timesteps: int = 3
    lr: float = 1.0
"""
    names = {"dataclasses": dataclasses, "__name__": __name__}
    exec(code, names)
    script = SimpleNamespace(Config=names["Config"], __file__="mine.py")
    flags = command_line.flags_of(script.Config)
    assert (flags["total_timesteps"].kind, flags["lr"].kind) == (int, float)
