"""What the commands say if something is wrong: the right thing, and where."""

import dataclasses
import platform
import signal
import sys
from pathlib import Path

import gymnax
import jax
import pytest
from gymnax.environments.classic_control.cartpole import CartPole
from support.commands import refusal
from support.files import ROOT

from onejit import __main__, sweep, train
from onejit.engine import compilation
from onejit.report import compare
from onejit.run.record import Record
from onejit.run.resume import check_random_numbers
from onejit.run.write import report
from onejit.script import load

SMALL = ["--num-envs=2", "--num-steps=2", "--num-minibatches=1", "--total-timesteps=4"]

# --- errors in the user's own code ---


@dataclasses.dataclass
class NotHashable(CartPole):
    sizes: list = dataclasses.field(default_factory=list)


gymnax.register("test_messages:List", NotHashable)

ENVIRONMENT = """
import gymnax
import jax.numpy as jnp
from gymnax.environments.classic_control import cartpole


class Mine(cartpole.CartPole):
    def step_env(self, key, state, action, params):
        {in_step}
        return super().step_env(key, state, action, params)


{at_import}
gymnax.register("{name}", Mine)
"""


@pytest.fixture
def own_environment(tmp_path, monkeypatch):
    """A function that writes a module with an environment, and returns its `env_name`."""

    def write(in_step="pass", at_import=""):
        name = f"mine_{tmp_path.name}"
        source = ENVIRONMENT.format(in_step=in_step, at_import=at_import, name=name)
        (tmp_path / f"{name}.py").write_text(source)
        return f"{name}:{name}"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ({"in_step": "this"}, NameError),
        ({"in_step": "raise ValueError('levels are missing')"}, ValueError),
        ({"in_step": "jnp.ones(3) @ jnp.ones(4)"}, TypeError),
        ({"at_import": "open('levels.txt')"}, FileNotFoundError),
    ],
)
def test_an_error_in_an_environment_keeps_its_traceback(own_environment, code, error):
    """With a note that names the field. A library below it, such as JAX, is no other case."""
    env_name = own_environment(**code)
    with pytest.raises(error) as caught:
        train.main(["ppo", f"--env-name={env_name}", *SMALL])
    assert any(env_name.startswith(Path(entry.path).stem) for entry in caught.traceback)
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert f"env_name = {env_name}" in notes


def test_a_module_that_is_missing_is_one_line(capfd):
    said = refusal(["train", "ppo", "--env-name=mine_nowhere:Mine", *SMALL], capfd)
    assert "env_name = mine_nowhere:Mine: No module named 'mine_nowhere'" in said


@pytest.mark.parametrize("name", ["platform:Jump", "test_messages:List"])
def test_an_environment_that_cannot_be_used_is_one_line(name, monkeypatch, capfd):
    """MODULE is a module of Python, or the environment is not hashable."""
    monkeypatch.setitem(sys.modules, "test_messages", sys.modules[__name__])
    said = refusal(["train", "ppo", f"--env-name={name}", *SMALL], capfd)
    expected = platform.__file__ if name == "platform:Jump" else "'test_messages.NotHashable'> is"
    assert expected in said


def test_an_error_in_a_script_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nraise ValueError('not today')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="not today") as caught:
        train.main([str(tmp_path / "mine.py")])
    assert Path(caught.traceback[-1].path).name == "mine.py" and caught.traceback[-1].lineno == 1
    assert "cannot be imported" in caught.value.__notes__[0]


def test_a_branch_on_a_swept_float_says_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "def make_learner(config: Config):\n"
    source = (ROOT / "q_learning_gridworld.py").read_text()
    assert head in source
    (tmp_path / "branch.py").write_text(source.replace(head, f"{head}    assert config.lr > 0\n"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        sweep.main([str(tmp_path / "branch.py"), "--lr", "0.1", "0.2"])
    assert any("jnp.where" in note for note in caught.value.__notes__)


def test_a_report_that_fails_costs_no_results(tmp_path, monkeypatch, capfd):
    script = load.load_script("q_learning_gridworld")

    def broken(config, runner_state, run_dir):
        raise KeyError("a mistake of mine")

    monkeypatch.setattr(script, "report", broken)
    report(script, script.Config(), None, tmp_path)
    said = capfd.readouterr().err
    assert "in broken" in said and "warning: report of" in said


# --- what a user sets ---


def test_help_in_a_narrow_terminal_ends(monkeypatch, capsys):
    def give_up(*_):
        raise TimeoutError

    monkeypatch.setenv("COLUMNS", "5")
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        with pytest.raises(SystemExit) as stop:
            __main__.main(["list", "--help"])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not stop.value.code and "folder" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["train", "sweep"])
def test_a_missing_login_is_found_before_anything_is_compiled(tool, tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")

    def login(**_):
        raise wandb.errors.UsageError("No API key configured.")

    def compile_slices(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", login)
    monkeypatch.setattr(compilation, "compile_slices", compile_slices)
    args = ["--track=wandb", f"--run-dir={tmp_path / 'run'}", "--total-timesteps=1000"]
    values = ["--lr", "0.1", "0.2"] if tool == "sweep" else ["--lr", "0.1"]
    said = refusal([tool, "q_learning_gridworld", *values, *args], capfd)
    assert "track = wandb: needs a login: `wandb login`" in said
    assert not list(tmp_path.iterdir())


def test_other_random_keys_are_refused():
    check_random_numbers(Record(settings={}))  # of a script's own `main`
    check_random_numbers(Record(settings={}, random_keys="threefry2x32"))
    with pytest.raises(ValueError, match="set JAX_DEFAULT_PRNG_IMPL=rbg"):
        check_random_numbers(Record(settings={}, random_keys="rbg"))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("lr=1", ("", "lr=1")),
        ("a=lr=1", ("a", "lr=1")),
        ("lr=0.1=plain", ("lr=0.1", "plain")),
        ("plain", ("", "plain")),
        ("a=none=1", ("a", "none=1")),
        ("none", ("", "none")),
    ],
)
def test_labels_and_directories_with_equals_signs(argument, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "plain").mkdir()
    assert compare.split_label(argument) == expected
