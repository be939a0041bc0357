"""The package's own reading of configs: YAML files and flags, and fields of older versions."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from support.files import ROOT

from onejit import command_line, configs, old_fields, run_directory, scripts


@pytest.fixture(scope="module")
def script():
    return scripts.load_script("ppo")


def parse(script, *words):
    @dataclasses.dataclass(frozen=True)
    class Options:
        num_seeds: int = 4

    config, _, _ = command_line.parse_with(script, [str(word) for word in words], Options, "")
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
    with pytest.raises(ValueError, match=r"--num-envs: invalid .*4\.5"):
        parse(script, "--num-envs", 4.5)
    assert parse(script, "--lr=5e5").lr == 5e5


def test_config_of_a_file_is_the_config(script, tmp_path):
    config = dataclasses.replace(
        script.Config(), hidden_sizes=(3,), env_params={"a": 1, "b": "x y", "c": True}
    )
    configs.write_config(tmp_path / "config.yaml", config)
    assert run_directory.read_config(script, tmp_path / "config.yaml") == config


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


# --- fields of older versions ---


def test_an_old_field_says_what_replaces_it(script, tmp_path):
    message = "clip_value: is a field of an older version; use vf_clip_eps"
    with pytest.raises(ValueError, match=message):
        parse(script, "--clip-value=True")
    (tmp_path / "old.yaml").write_text("lr: 0.1\nclip_value: true\n")
    with pytest.raises(ValueError, match=rf"--config .*old\.yaml: {message}"):
        parse(script, "--config", tmp_path / "old.yaml")
    with pytest.raises(ValueError, match=rf"old\.yaml: is not a config of .*{message}"):
        run_directory.read_config(script, tmp_path / "old.yaml")


def test_an_old_field_of_one_script_is_none_of_others():
    with pytest.raises(ValueError, match=r"dueling: .* the network is always dueling"):
        old_fields.check_old_fields("apex_dqn", known=["lr"], names=["dueling"])
    with pytest.raises(ValueError, match=r"dueling: .* rainbow\.py has the dueling network"):
        old_fields.check_old_fields("dqn", known=["lr"], names=["dueling"])
    old_fields.check_old_fields("ppo", known=["lr"], names=["loss"])


def test_an_old_value_says_what_to_use(script, tmp_path):
    """In a script of onejit. A copy of an older script keeps the old meaning."""
    with pytest.raises(ValueError, match=r"max_grad_norm = 0\.0: 0 stood for no limit .* use inf"):
        parse(script, "--max-grad-norm=0.0")
    (tmp_path / "copy.py").write_text((ROOT / "ppo.py").read_text())
    copy = scripts.load_script(str(tmp_path / "copy.py"))
    assert parse(copy, "--max-grad-norm=0.0").max_grad_norm == 0.0


def test_a_field_that_a_script_has_is_none_of_an_older_version():
    for name in old_fields.OLD_FIELDS:
        old_fields.check_old_fields("mine", known=[name], names=[name])


def test_a_changed_meaning_is_said_where_a_config_is_old():
    for name, meaning in old_fields.CHANGED_MEANINGS.items():
        with pytest.raises(ValueError, match=meaning):
            old_fields.check_old_fields(name, known=["lr"], names=["lr", "unroll"])


def test_no_config_of_the_repository_has_an_old_field():
    for path in sorted((ROOT / "configs").glob("*/*.yaml")):
        known = configs.field_names(scripts.load_script(path.parent.name))
        names = configs.read_yaml(str(path))
        old_fields.check_old_fields(path.parent.name, known, names)


# --- records of older versions ---


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"kind": "train", "words": []}, "train"),
        ({"kind": "sweep"}, "sweep"),
        ({"words": ["--lr", "1"], "slices": []}, "sweep"),
        ({"slice": 4}, "train"),
        ({"trial": 3}, "trial"),
        ({"settings": {}}, "script"),
    ],
)
def test_kind_of_a_record(record, kind):
    """Records of versions before 0.3.0 do not say it."""
    assert run_directory.kind_of(json.loads(json.dumps(record))) == kind


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
    words = configs.read_flags(script, ["--total-timesteps", "1e4", "--lr", "1e4"])
    assert words == ["--total-timesteps", "10000", "--lr", "1e4"]
