"""run.json as a `Record`: what is written is read again, also what another version has written."""

import json
import math

import numpy as np
import pytest

from onejit.run.agents import as_bytes
from onejit.run.record import Record, make_record, numerics, read_record, write_record
from onejit.run.resume import options_of
from onejit.script.load import load_script
from onejit.train.options import Options

SETTINGS = {"script": "ppo", "num_seeds": 2, "seed": 0, "env_name": "CartPole-v1", "lr": 0.1}
STORED = {
    "train": {
        "kind": "train",
        "settings": SETTINGS,
        "command": "onejit train ppo",
        "versions": {"python": "3.11"},
        "seconds": {"compile": 1.0, "train": 2.0, "evaluate": 3.0},
        "steps_total": 100,
        "options": {"eval_episodes": 16},
        "slice": 2,
        "final return": {"mean": 1.0},
        "finished": "now",
    },
    "replay of an older version": {
        "kind": "sweep",
        "settings": SETTINGS,
        "modules": {"mine.py": "12"},
        "options": {"pbt": True},
        "swept": {"lr": ["uniform", "0.1", "1"]},
        "num_trials": 4,
        "seconds": {"compile": 1.0, "train": 0.0, "evaluate": 0.0},
        "replay": {"of": "runs/found", "schedule": {"lr": [0.1, 0.2]}},
    },
    "trial": {"kind": "trial", "settings": SETTINGS, "trial": 0, "rung": 1, "sha256": "12"},
    "another version": {"kind": "trial", "settings": SETTINGS, "unheard_of": {"a": [1]}},
}


@pytest.mark.parametrize("kind", STORED)
def test_what_is_read_is_written_again(kind, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(STORED[kind]))
    record = read_record(tmp_path)
    write_record(tmp_path, record)
    assert json.loads((tmp_path / "run.json").read_text()) == STORED[kind]


def test_an_option_of_another_version_is_named(tmp_path):
    record = Record.of_stored(dict(STORED["replay of an older version"]))
    with pytest.raises(ValueError, match=f"^{tmp_path}: --pbt is an option of another version"):
        options_of(Options, tmp_path, record)
    record.options["pbt"] = False
    assert options_of(Options, tmp_path, record).num_seeds == SETTINGS["num_seeds"]


def test_what_identifies_a_run_comes_first(tmp_path):
    write_record(tmp_path, Record(settings={"lr": 0.1, "seed": 0, "script": "ppo", "num_seeds": 2}))
    assert list(read_record(tmp_path).settings) == ["script", "num_seeds", "seed", "lr"]


@pytest.mark.parametrize("damage", ["[]", "{}", '{"settings": {}}', '{"settings": 5}', "{"])
def test_a_damaged_record_is_named(damage, tmp_path):
    (tmp_path / "run.json").write_text(damage)
    with pytest.raises(ValueError, match=f"{tmp_path}/run.json: cannot be read"):
        read_record(tmp_path)


def test_the_record_of_a_script_s_own_run(tmp_path):
    """Infinite from the start is what is infinite in each agent, and NaN in none."""
    with pytest.raises(ValueError, match="is not a run directory"):
        read_record(tmp_path)
    agents = {
        "mask": np.array([[-np.inf, 0.0], [-np.inf, 1.0]]),
        "grown": np.array([[np.inf], [1.0]]),
        "lost": np.array([[np.inf, np.nan], [np.inf, 0.0]]),
    }
    data = as_bytes(agents, {"run": "script: ppo\nseed: 3\n"})
    (tmp_path / "agent.safetensors").write_bytes(data)
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    record = read_record(tmp_path)
    assert record.settings == {"script": "ppo", "num_seeds": 2, "seed": 3, "lr": 0.1}
    assert record.not_finite_at_start == ["mask"]


def test_options_that_are_settings_are_kept_once():
    script = load_script("q_learning_gridworld")
    options = Options(seed=3, eval_episodes=5)
    record = make_record("train", script, script.Config(), options, [])
    assert record.settings["seed"] == 3 and record.options["eval_episodes"] == 5
    assert not {"seed", "num_seeds", "run_dir"} & set(record.options)


def test_flags_of_xla_that_change_no_numbers_are_left_out(monkeypatch):
    flags = "--xla_b=1 --xla_force_host_platform_device_count=2 --xla_dump_to=x --xla_a=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert numerics()["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


def test_a_record_is_json(tmp_path):
    """It holds no Infinity."""
    write_record(tmp_path, Record(settings={"clip": math.inf, "sizes": (1, math.nan)}))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    stored = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert stored["settings"]["clip"] == "inf" and stored["settings"]["sizes"] == [1, "nan"]
