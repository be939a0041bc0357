"""The command line, in this process: what it refuses, what it takes, and what it leaves behind."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import common
import jax
import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import toys
import yaml
from conftest import ROOT, assert_close, field_names, flags, origin, shifted_config, small_config, trained

SIZES = ["total_timesteps", "num_envs", "num_steps", "update_epochs", "num_minibatches", "buffer_size", "batch_size"]


def snapshot(path: Path) -> dict:
    """Everything under `path`, byte for byte."""
    return {p: p.read_bytes() if p.is_file() else None for p in [path, *path.rglob("*")] if p.exists()}


def steps_field(script) -> str:
    return "num_steps" if "num_steps" in field_names(script) else "inner_steps"


def toys_that_it_takes(script) -> list[str]:
    """Those of the two toy environments whose actions are of the script's kind; few scripts take both kinds."""
    if origin(script) == "script":
        pytest.skip("knows only its own environment")
    taken = []
    for name in toys.NAMES:
        with contextlib.suppress(ValueError):
            script.make_env(small_config(script, env_name=name))
            taken.append(name)
    assert taken
    return taken


def toy_that_it_takes(script) -> str:
    return toys_that_it_takes(script)[0]


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Runs here take few steps: what `main` compiles takes longer than they do."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def refuses(script, tmp_path, capfd):
    """A function that runs `main`, sees it stop as it should for bad input, and looks for words in the message."""

    def check(args, *words, run_dir=tmp_path / "run"):
        before = snapshot(run_dir)
        with pytest.raises(SystemExit) as stop:
            script.main([*flags(small_config(script)), "--num-seeds=2", f"--run-dir={run_dir}", *map(str, args)])
        message = capfd.readouterr().err
        assert stop.value.code == 2
        assert message.count("\n") == 1 and message.endswith("\n"), message
        said = message.replace(str(tmp_path), "").replace("_", "-")  # the path holds the name of the test
        for word in words:
            assert str(word).replace("_", "-") in said, f"{word} is not in: {message}"
        assert snapshot(run_dir) == before, "the run directory has changed"

    return check


@pytest.fixture
def refuses_yaml(refuses, tmp_path):
    def check(text, *words):
        (tmp_path / "bad.yaml").write_text(text)
        refuses([f"--config={tmp_path / 'bad.yaml'}"], "bad.yaml", *words)

    return check


# --- values that cannot be ---


def test_sizes_that_are_not_positive(script, refuses):
    for name in field_names(script, int):
        refuses([f"--{name}=-1"], name, -1)
        if name in SIZES:
            refuses([f"--{name}=0"], name, 0)


@pytest.mark.parametrize("value", ["nan", "inf", -0.1])
def test_learning_rates_that_cannot_be(script, refuses, value):
    refuses([f"--lr={value}"], "lr", value)


@pytest.mark.parametrize("value", [1.5, -0.5, "nan"])
def test_discounts_that_cannot_be(script, refuses, value):
    refuses([f"--gamma={value}"], "gamma", value)


@pytest.mark.common
def test_floats_that_are_not_finite(script, refuses):
    for name in field_names(script, float):
        refuses([f"--{name}=nan"], name, "nan")


def test_batch_that_does_not_divide(script, refuses):
    keeps_sequences = "cell" in field_names(script)  # and splits the environments, not the steps
    if "num_minibatches" in field_names(script):
        envs = "num_envs" if "num_envs" in field_names(script) else "inner_envs"
        size = " = 4" if keeps_sequences else " = 32"
        refuses(["--num_minibatches=5"], "num_minibatches = 5", f"divide {envs}", size)


def test_too_few_steps_for_one_update(script, refuses):
    refuses(["--total_timesteps=31"], "total_timesteps", 31)


@pytest.mark.common
def test_options_that_cannot_be(refuses):
    for flag in ("num-seeds=0", "num-seeds=-1", "seed=-1", "eval-episodes=-1", "checkpoint-interval=-1"):
        refuses([f"--{flag}"], *flag.split("="))


# --- environments ---


def test_unknown_environment(script, refuses):
    refuses(["--env_name=Nowhere"], "env_name", "Nowhere")
    if origin(script) != "script":
        for wrong, right in (("CartPol-v1", "CartPole-v1"), ("pendulum-1", "Pendulum-v1")):
            refuses([f"--env_name={wrong}"], "env_name", wrong, right)
    if origin(script) == "brax":
        refuses(["--env_name=hoper"], "env_name", "hoper", "hopper")


def test_environment_with_the_other_kind_of_actions(script, refuses):
    taken = toys_that_it_takes(script)
    if len(taken) > 1:
        pytest.skip("takes both kinds")
    other = {"ToyContinuous": "CartPole-v1", "ToyDiscrete": "Pendulum-v1"}[taken[0]]
    refuses([f"--env_name={other}"], "env_name", other)


@pytest.mark.common
def test_unknown_env_params(script, refuses):
    for env_name in {toy_that_it_takes(script), script.Config().env_name}:
        refuses([f"--env_name={env_name}", "--env_params={wings: 2}"], "env_params", "wings")
    refuses(["--env_params=wings"], "env_params", "wings")


@pytest.mark.common
def test_env_params_of_a_wrong_type(script, refuses):
    refuses([f"--env_name={toy_that_it_takes(script)}", "--env_params={noise: loud}"], "env_params", "noise", "loud")


@pytest.mark.common
def test_env_params_that_fail_only_in_use(script, refuses):
    """Some environments look at their arguments in `reset` or `step`."""
    if origin(script) == "script":
        pytest.skip("knows only its own environment")
    for env_name, name, value in [("Catch-bsuite", "rows", -1), ("SimpleBandit-bsuite", "num_actions", -1)]:
        refuses([f"--env_name={env_name}", f"--env_params={{{name}: {value}}}"], "env_params", name, value)


def test_time_limit_that_cannot_be(script, refuses):
    toy = toy_that_it_takes(script)
    args = ["--env-name", toy, "--max-episode-steps", 0]
    refuses([*args, "--env-params", "{max_steps_in_episode: 0}"], "env_params", "max_steps_in_episode")


# --- YAML ---


@pytest.mark.common
def test_misspelt_key(script, refuses_yaml):
    refuses_yaml("gama: 0.9", "gama", "gamma")
    for name in field_names(script):
        refuses_yaml(f"{name}z: 1", f"{name}z is not", f"did you mean {name}?")


@pytest.mark.common
def test_wrong_types(script, refuses_yaml):
    steps = steps_field(script)
    refuses_yaml(f"{steps}: many", steps, "many")
    refuses_yaml(f"{steps}: true", steps, "True")
    refuses_yaml(f"{steps}: 4.5", steps, "4.5")
    refuses_yaml(f"{steps}: [4, 5]", steps)
    refuses_yaml(f"{steps}:", steps)
    refuses_yaml("lr: [1, 2]", "lr")
    refuses_yaml("lr: fast", "lr", "fast")
    refuses_yaml("lr: {a: 1}", "lr")
    refuses_yaml("lr: true", "lr")
    refuses_yaml("env_params: 3", "env_params", "3")
    for name in field_names(script, bool)[:1]:
        refuses_yaml(f"{name}: 3", name, "3")
    if "hidden_sizes" in field_names(script):
        refuses_yaml("hidden_sizes: [8, wide]", "hidden_sizes", "wide")
        refuses_yaml("hidden_sizes: ['--seed', 3]", "hidden_sizes", "--seed")  # not a flag


@pytest.mark.parametrize("text", ["- lr\n- 0.1", "fast", "3", ""])
@pytest.mark.common
def test_yaml_that_is_not_a_mapping(refuses_yaml, text):
    refuses_yaml(text, "mapping")


@pytest.mark.parametrize("text", ["lr: [1", "lr: 1: 2", "\tlr: 1", "lr: !!python/object:os.system {}", "lr: \x00"])
@pytest.mark.common
def test_yaml_that_cannot_be_read(refuses_yaml, text):
    refuses_yaml(text)


@pytest.mark.common
def test_yaml_file_that_is_missing(refuses, tmp_path):
    refuses(["--config", tmp_path / "none.yaml"], "none.yaml")
    refuses([f"--config={tmp_path}"], "YAML")


# --- flags ---


@pytest.mark.common
def test_unknown_flag(refuses):
    refuses(["--learning-rat=0.1"], "learning-rat")
    refuses(["stray"], "stray")


@pytest.mark.common
def test_flag_without_a_value(refuses):
    refuses(["--lr"], "lr")
    refuses(["--config"], "config")


@pytest.mark.common
def test_numbers_as_people_write_them(script, tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 1e-3\ngamma: 1\ntotal_timesteps: 5e3\n")
    config, _ = script.parse([f"--config={tmp_path / 'good.yaml'}"], script.Config)
    assert (config.lr, config.gamma, config.total_timesteps) == (0.001, 1.0, 5000)
    assert [type(value) for value in (config.lr, config.gamma, config.total_timesteps)] == [float, float, int]
    config, _ = script.parse(["--total-timesteps", "5e3", "--lr", "1"], script.Config)
    assert config.total_timesteps == 5000 and type(config.total_timesteps) is int
    assert config.lr == 1.0 and type(config.lr) is float


@pytest.mark.common
def test_yaml_in_another_encoding_than_the_locale_s(script, tmp_path):
    (tmp_path / "good.yaml").write_bytes("lr: 0.25  # \u03bb".encode("utf-16"))
    assert script.parse([f"--config={tmp_path / 'good.yaml'}"], script.Config)[0].lr == 0.25


@pytest.mark.common
def test_numbers_in_env_params(script, tmp_path):
    (tmp_path / "numbers.yaml").write_text("env_params: {noise: 1e-3, max_steps_in_episode: 5}")
    from_yaml, _ = script.parse(["--config", str(tmp_path / "numbers.yaml")], script.Config)
    from_flag, _ = script.parse(["--env-params", "{noise: 1e-3, max_steps_in_episode: 5}"], script.Config)
    assert dict(from_yaml.env_params) == dict(from_flag.env_params) == {"noise": 0.001, "max_steps_in_episode": 5}


@pytest.mark.common
def test_flags_override_yaml_and_yaml_the_defaults(script, tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 0.1\ngamma: 0.5\nenv_params: {a: 1}\n")
    config, options = script.parse(["--gamma=0.25", f"--config={tmp_path / 'good.yaml'}", "--seed=7"], script.Config)
    assert config == dataclasses.replace(script.Config(), lr=0.1, gamma=0.25, env_params={"a": 1})
    assert options == script.Options(config=str(tmp_path / "good.yaml"), seed=7)


def test_no_flags_give_the_defaults(script):
    assert script.parse([], script.Config) == (script.Config(), script.Options())


def test_every_config_survives_the_command_line(script):
    config = shifted_config(script, env_params={"a": 1, "b": "x y", "c": 0.5})
    assert script.parse(flags(config), script.Config)[0] == config


def test_help_explains_every_field(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    shown, source = capsys.readouterr().out, Path(script.__file__).read_text()
    words = re.sub(r"[\s\u2500-\u257f]", "", shown)  # tyro wraps lines and draws boxes
    for cls in (script.Config, script.Options):
        for field in dataclasses.fields(cls):
            comment = re.search(rf"^    {field.name}: .*?# (.+)$", source, re.MULTILINE)
            assert comment, f"{field.name} has no comment"
            assert f"--{field.name.replace('_', '-')}" in shown
            assert re.sub(r"\s", "", comment[1]) in words, field.name


# --- a whole run ---


@pytest.fixture(scope="session")
def finished(script, tmp_path_factory):
    """A run, and what it said."""
    run_dir, said = tmp_path_factory.mktemp(script.__name__) / "run", io.StringIO()
    args = [*flags(shifted_config(script)), "--num-seeds=4", "--eval-episodes=2", f"--run-dir={run_dir}"]
    with contextlib.redirect_stdout(said):
        assert script.main(args) == run_dir
    return run_dir, args, said.getvalue()


@pytest.fixture
def copy_of_run(finished, tmp_path):
    """A copy that may be harmed, and the arguments that go on with it."""
    run_dir = shutil.copytree(finished[0], tmp_path / "copy")
    return run_dir, [*finished[1][:-1], f"--run-dir={run_dir}", "--resume"]


def test_config_of_a_run_makes_the_same_again(script, finished):
    config, _ = script.parse(["--config", str(finished[0] / "config.yaml")], script.Config)
    assert config == shifted_config(script)
    assert list(yaml.safe_load((finished[0] / "config.yaml").read_text())) == field_names(script)


@pytest.mark.common
def test_record_of_a_run(script, finished):
    record, said = json.loads((finished[0] / "run.json").read_text()), finished[2]
    assert record["settings"] | {"num_seeds": 4, "seed": 0, "script": script.__name__} == record["settings"]
    assert record["settings"]["lr"] == shifted_config(script).lr
    assert {"python", "jax", "jaxlib", "flax", "gymnax", "numpy"} <= set(record["versions"])
    assert {"command", "device", "started", "commit", "steps_per_second"} <= set(record)
    assert {"compile", "train", "evaluate"} == set(record["seconds"])
    assert all(seconds >= 0 for seconds in record["seconds"].values())
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert record["commit"].removesuffix("-dirty") == head
    for word in ("4 seeds", "1 device", "6 updates", "compiled in", "steps/s", "final return", "greedy return"):
        assert word in said


def test_record_of_the_commit(tmp_path):
    """By its hash, a tag or not, and whether files had changed."""

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        command = ["git", "-C", tmp_path, *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def recorded(name):
        options = script.Options(run_dir=str(tmp_path / "runs" / name))  # files that git does not know
        return script.open_run_dir(script.Config(), options, [])[1]["commit"]

    path = shutil.copy(ROOT / "q_learning_gridworld.py", tmp_path / "copied_for_its_commit.py")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"], ["tag", "-am", "b", "v1"]):
        git(*words)
    script = common.load_script(str(path))
    assert recorded("clean") == git("rev-parse", "HEAD")
    path.write_text(path.read_text() + "# changed\n")
    assert recorded("changed") == f"{git('rev-parse', 'HEAD')}-dirty"


@pytest.mark.parametrize("returns, shown", [([3.0], "return 3]"), ([1.0, np.inf], "return 1]"), ([1.0, 3.0], "+- 2]")])
@pytest.mark.common
def test_progress_shows_the_mean_of_what_is_finite(script, returns, shown, capsys):
    seeds = len(returns)
    metrics = {"episodes": np.ones((seeds, 1)), "episodic_return": np.array(returns)[:, None]}
    config, options = SimpleNamespace(num_updates=1, num_envs=1, num_steps=8), script.Options(num_seeds=seeds)
    saved = []
    manager = SimpleNamespace(save=lambda step, args: saved.append(step))
    script.train_in_chunks(config, options, lambda carry, *_: carry, {"metrics": metrics}, 0, manager)
    assert shown in capsys.readouterr().err and saved == [1]


def test_metrics_of_a_run_are_those_of_make_train(script, finished):
    metrics, out = dict(np.load(finished[0] / "metrics.npz")), trained(script)
    evaluation = metrics.pop("evaluation")
    assert evaluation.shape == (4, 2) and np.isfinite(evaluation).all()
    assert_close(out | {"metrics": metrics}, out)


@pytest.mark.common
def test_final_returns_of_a_run(script, finished):
    """Means over the episodes that ended in the last 10 % of the updates, the last one here; and greedy ones."""
    metrics, record = np.load(finished[0] / "metrics.npz"), json.loads((finished[0] / "run.json").read_text())
    final = metrics["episodic_return"][:, 5]
    returns = {"final return": final[~np.isnan(final)], "greedy return": metrics["evaluation"].mean(axis=1)}
    assert returns.keys() & record.keys() == {name for name, values in returns.items() if len(values)}
    for name in returns.keys() & record.keys():
        values, summary = returns[name], record[name]
        assert summary["seeds"] == len(values)
        assert summary["interquartile_mean"] == pytest.approx(scipy.stats.trim_mean(values, 0.25), rel=1e-5)
        assert values.min() - 1e-6 <= summary["low"] <= summary["high"] <= values.max() + 1e-6


@pytest.mark.common
def test_seeds_that_diverged_are_not_left_out_silently(script, copy_of_run, monkeypatch, capsys):
    run_dir, args = copy_of_run
    monkeypatch.setattr(script, "evaluate", lambda *_: np.array([[1.0, 1.0], [2.0, 2.0], [np.nan, 3.0], [np.inf, 4.0]]))
    script.main(args)
    assert "greedy return: 2 of 4 seeds left out" in capsys.readouterr().out
    assert json.loads((run_dir / "run.json").read_text())["greedy return"]["seeds"] == 2


@pytest.mark.common
def test_learning_curve_of_a_run(finished):
    assert (finished[0] / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    picture = matplotlib.image.imread(finished[0] / "learning_curve.png")[..., :3]
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.01


@pytest.mark.common
def test_learning_curve_where_a_seed_has_diverged(script, tmp_path):
    returns = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, np.inf, np.nan]])
    config = SimpleNamespace(num_updates=4, num_envs=2, num_steps=8, env_name="Toy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = {"episodes": np.ones((2, 4)), "episodic_return": returns}
        script.draw_learning_curve(metrics, config, tmp_path / "curve.png")
    assert matplotlib.image.imread(tmp_path / "curve.png").std() > 0.01


@pytest.mark.common
def test_nothing_else_is_left_behind(finished):
    expected = {"config.yaml", "run.json", "metrics.npz", "learning_curve.png", "checkpoints"}
    assert expected <= {path.name for path in finished[0].iterdir()}
    assert not list(finished[0].rglob("*.partial"))


# --- going on with a run ---


@pytest.mark.common
def test_run_dir_that_holds_a_run(refuses, copy_of_run):
    refuses(copy_of_run[1][:-1], "run_dir", "--resume", run_dir=copy_of_run[0])


@pytest.mark.common
def test_run_dir_that_holds_checkpoints_of_an_unknown_run(refuses, copy_of_run):
    run_dir, args = copy_of_run
    (run_dir / "run.json").unlink()
    refuses(args[:-1], "run_dir", "holds config.yaml", run_dir=run_dir)
    refuses(args, "run_dir", "run.json is missing", run_dir=run_dir)


@pytest.mark.common
def test_run_dir_that_holds_somebodys_config(refuses, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("lr: 0.1")
    refuses([], "run_dir", "config.yaml", run_dir=tmp_path / "mine")


@pytest.mark.common
def test_run_dir_that_is_a_file(refuses, tmp_path):
    (tmp_path / "file").write_text("precious")
    refuses([], "run_dir", run_dir=tmp_path / "file")
    refuses(["--resume"], "run_dir", run_dir=tmp_path / "file")
    refuses([f"--run-dir={tmp_path / 'file' / 'run'}"], "run_dir", run_dir=tmp_path / "file")


@pytest.mark.parametrize("name, value", [("lr", 0.25), ("num_steps", 16), ("num_seeds", 2), ("seed", 3)])
@pytest.mark.common
def test_resume_with_other_settings(script, refuses, copy_of_run, name, value):
    name = steps_field(script) if name == "num_steps" else name
    refuses([*copy_of_run[1], f"--{name}={value}"], "resume", f"{name} was", value, run_dir=copy_of_run[0])


@pytest.mark.common
def test_resume_from_a_truncated_checkpoint(refuses, copy_of_run):
    newest = max((copy_of_run[0] / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    refuses(copy_of_run[1], "resume", "checkpoint", newest.name, run_dir=copy_of_run[0])


@pytest.mark.common
def test_resume_from_an_older_version_s_checkpoint(script, refuses, copy_of_run, monkeypatch):
    """One that carried less, and more."""
    whole = script.compile_training

    def of_today(config, options):
        start, advance, abstract, num_devices = whole(config, options)
        metrics = {name.replace("episodes", "new_loss"): leaf for name, leaf in abstract["metrics"].items()}
        return start, advance, abstract | {"metrics": metrics}, num_devices

    monkeypatch.setattr(script, "compile_training", of_today)
    refuses(copy_of_run[1], "resume", "is another version's", run_dir=copy_of_run[0])


@pytest.mark.common
def test_resume_of_a_run_with_fewer_fields(refuses, copy_of_run):
    record = json.loads((copy_of_run[0] / "run.json").read_text())
    del record["settings"]["gamma"]
    record["settings"]["beta"] = 0.5
    (copy_of_run[0] / "run.json").write_text(json.dumps(record))
    missing = ["resume", "gamma was missing and is", "beta was 0.5 and is missing"]
    refuses(copy_of_run[1], *missing, run_dir=copy_of_run[0])


def test_checkpoints_hold_no_pickled_code(copy_of_run):
    """Nothing in them is a pickle, which could run code where it is read: arrays and JSON alone."""
    files = [path for path in (copy_of_run[0] / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert path.read_bytes()[:1] != pickle.PROTO, path


@pytest.mark.common
def test_resume_from_a_damaged_record(refuses, copy_of_run):
    record = copy_of_run[0] / "run.json"
    record.write_text(record.read_text()[:100])
    refuses(copy_of_run[1], "run.json", run_dir=copy_of_run[0])


def test_resume_of_a_finished_run(script, finished, copy_of_run):
    (copy_of_run[0] / "config.yaml").unlink()  # as where a kill came before it was written
    script.main(copy_of_run[1])
    for name in ("config.yaml", "learning_curve.png"):
        assert (copy_of_run[0] / name).read_bytes() == (finished[0] / name).read_bytes()
    metrics, again = (np.load(run_dir / "metrics.npz") for run_dir in (finished[0], copy_of_run[0]))
    assert set(metrics) == set(again)
    for name in metrics:
        np.testing.assert_array_equal(metrics[name], again[name])


@pytest.mark.common
def test_resume_of_a_run_that_only_lacks_its_results(script, copy_of_run, capsys):
    """Killed after its last checkpoint: this process has trained nothing, and has no speed to tell."""
    run_dir, args = copy_of_run
    record = json.loads((run_dir / "run.json").read_text())
    for name in ("seconds", "steps_per_second", "first_update", "final return"):
        record.pop(name, None)
    (run_dir / "run.json").write_text(json.dumps(record))
    script.main([*args, "--eval-episodes=0"])
    record = json.loads((run_dir / "run.json").read_text())
    assert list(record["seconds"]) == ["evaluate"] and "steps_per_second" not in record
    assert "trained in" not in capsys.readouterr().out
    assert "greedy return" not in record and "evaluation" not in np.load(run_dir / "metrics.npz")


@pytest.mark.common
def test_resume_of_a_run_with_nothing_committed_starts_anew(script, finished, copy_of_run, capsys):
    """Killed before its first checkpoint, perhaps while that was written; or never begun."""
    run_dir, args = copy_of_run
    for path in (run_dir / "checkpoints").iterdir():
        path.rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp"))
    (run_dir / "metrics.npz").unlink()
    for directory in (run_dir, run_dir / "none"):
        script.main([*args, f"--run-dir={directory}"])
        assert "anew" in capsys.readouterr().out
        metrics, again = (np.load(path / "metrics.npz") for path in (finished[0], directory))
        for name in metrics:
            np.testing.assert_array_equal(metrics[name], again[name])


# --- importing ---


@pytest.mark.common
def test_import_has_no_side_effects(script):
    code = f"""
import os
import jax  # sets variables of its own
before = dict(os.environ)
import {script.__name__}
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "the backend has started"
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}  # ours have seen the import
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=120)
