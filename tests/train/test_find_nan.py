"""`onejit find-nan`: the first update and the first operation that is not finite."""

import contextlib
import importlib
import inspect
import io
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import refusal
from support.files import ROOT
from support.small import field_names, small_config
from support.tiers import slow

from onejit import __main__, train
from onejit.base import statistics
from onejit.envs import host
from onejit.report import list as list_runs
from onejit.run.directory import load_run
from onejit.run.record import read_record
from onejit.train import find_nan

SMALL = ["q_learning_gridworld", "--max-steps-in-episode=50", "--num-steps=100", "--goal", 4, 5]
SIZES = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "buffer_size", "batch_size")
SIZES += ("learning_starts",)
SMALL += ["--total-timesteps=2000", "--num-seeds=2", "--eval-episodes=0"]


def log_of(x):
    return jnp.log(x).sum()


def ratio(x):
    return (x / x).sum()


def masked(x):
    """Its value is finite where x is 0, but its gradient is not."""
    return jnp.where(x > 0.0, jnp.sqrt(x), 0.0).sum()


def masked_value(x):
    """Finite: what is not finite is not selected."""
    return jnp.where(x > 0.0, jnp.log(x), 0.0).sum()


def of_a_loss(loss):
    def update(state, _=None):
        return state | {"loss": loss(state["x"])}, {}

    return update


def of_a_gradient(loss):
    def update(state, _=None):
        return state | {"x": state["x"] - jax.grad(loss)(state["x"])}, {}

    return update


def over_steps(loss):
    """The third step fails: a scan in a scan, one of them backwards, within a jit and a cond."""

    def inner(carry, x):
        return carry + jax.lax.cond(x > -1.0, loss, jnp.sum, x), x

    def outer(carry, rows):
        total, _ = jax.lax.scan(inner, carry, rows, reverse=True)
        return total, total

    @jax.jit
    def update(state, _=None):
        rows = jnp.stack([jnp.ones(2), jnp.ones(2), state["x"], jnp.ones(2)])
        total, totals = jax.lax.scan(outer, 0.0, rows)
        unused = jnp.log(-1.0 - rows)  # NaN that nothing depends on
        state = state | {"x": state["x"] + 0.0 * total, "totals": totals}
        return state, {"unused": unused.mean()}

    return update


def trace(update):
    state = {"x": jnp.array([1.0, 0.0]), "loss": jnp.zeros(()), "totals": jnp.zeros(4)}
    script = SimpleNamespace(make_learner=lambda config: (None, update))
    return find_nan.trace_update(script, None, state)


@pytest.mark.parametrize(
    ("update", "value", "function", "is_gradient"),
    [
        (of_a_loss(log_of), "infinity", log_of, False),
        (of_a_loss(ratio), "NaN", ratio, False),
        (of_a_gradient(log_of), "infinity", log_of, True),
        (of_a_gradient(masked), "NaN", masked, True),
        (over_steps(ratio), "NaN", ratio, False),
        (over_steps(log_of), "infinity", log_of, False),
    ],
)
def test_the_first_operation_is_named_with_its_line(update, value, function, is_gradient):
    origin = trace(update)
    lines, first = inspect.getsourcelines(function)
    if origin.value == "NaN" and value == "infinity":
        origin = origin.cause  # such as 0 times infinity
    file, number, name = origin.frames[0]
    assert (file, name) == (__file__, function.__name__)
    assert first <= number < first + len(lines)
    assert origin.value == value
    text = find_nan.text_of(origin)
    assert f"line {number}, in {name}" in text and ("a gradient" in text) == is_gradient


def test_what_is_not_selected_is_not_blamed():
    assert trace(of_a_loss(masked_value)) is None


BROKEN = """

learner_of_the_script = make_learner


def make_learner(config):
    init, update = learner_of_the_script(config)

    def with_broken_metrics(state, _=None):
        state, metrics = update(state)
        episodes = metrics["episodes"]
        mine = jnp.sqrt(-1.0 * episodes)
        return state, metrics | {"mine": mine, "wins": jnp.where(episodes > 0, 1.0, jnp.nan)}

    return init, with_broken_metrics
"""


def test_a_metric_that_is_nan_although_episodes_ended(tmp_path, capsys):
    """All parameters are finite. The end of the run, the search and the list say it."""
    script = tmp_path / "broken.py"
    script.write_text((ROOT / "q_learning_gridworld.py").read_text() + BROKEN)
    run_dir = tmp_path / "runs" / "broken"
    train.main([script, *SMALL[1:], "--find-nan", f"--run-dir={run_dir}"])
    said = capsys.readouterr().out
    assert "mine: NaN in 2 of 2 seeds, first in update" in said and "wins" not in said
    assert "first: NaN by the operation sqrt" in said and "metrics.mine: NaN in 1 place" in said
    list_runs.main(tmp_path / "runs")
    assert ", mine NaN" in capsys.readouterr().out


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """A run whose seeds have all diverged, and the lines on its standard output and error."""
    run_dir = tmp_path_factory.mktemp("find_nan") / "run"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as stopped,
    ):
        train.main([*SMALL, "--eval-episodes=2", "--lr=1e4", f"--run-dir={run_dir}"])
    assert stopped.value.code == 1
    return run_dir, out.getvalue().splitlines(), err.getvalue().splitlines()


def test_seeds_that_diverged_are_said_and_rank_last(diverged):
    """The greedy action of a table of NaN is the first one, whose return is finite."""
    run_dir, out, err = diverged
    assert statistics.diverged(load_run(run_dir)[2]).all()
    assert np.isfinite(np.load(run_dir / "evaluation.npy")).all()
    assert any(line.startswith("evaluation return: 2 seeds diverged") for line in out)
    assert err[-1].startswith("onejit train: error: all seeds diverged") and str(run_dir) in err[-1]
    record = read_record(run_dir)
    for found in (record.final_return, record.greedy_return):
        assert found["diverged"] == found["not_finite"] == 2 and found["no_episode"] == 0
        assert [found[name] for name in ("mean", "worst", "interquartile_mean")] == [None] * 3


def test_a_run_that_diverged(diverged, capsys):
    run_dir, *_ = diverged
    files = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != ".lock"}
    __main__.main(["find-nan", run_dir])
    told = capsys.readouterr().out
    assert re.search(
        r"seed [01]: the first update with a value that is not finite is \d+ of 20", told
    )
    assert "q_learning_gridworld.py, line" in told
    assert "    q: " in told
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_run_that_is_finite(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train.main([*SMALL, f"--run-dir={run_dir}", "--find-nan"])
    assert "first update" not in capsys.readouterr().out  # no seed has diverged
    __main__.main(["find-nan", run_dir])
    assert "all values are finite" in capsys.readouterr().out


LINES = {"reward": "reward = reward * jnp.sqrt", "observation": "obs = obs * jnp.sqrt"}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        slow("ppo_continuous", "observation"),
        slow("sac", "reward"),  # in the warm-up
    ],
)
def test_what_an_environment_breaks(name, what, tmp_path, capsys):
    """The operation is named with its line in the environment, wherever the script uses it."""
    script = importlib.import_module(name)
    config = small_config(script, num_updates=20)
    flags = ["--env-name=toys:BlowsUpContinuous", "--env-params", "what", what]
    for field in SIZES:
        if field in field_names(script):
            flags += [f"--{field.replace('_', '-')}", getattr(config, field)]
    flags += ["--hidden-sizes", 8]
    run_dir = tmp_path / "run"
    options = ["--num-seeds=2", "--eval-episodes=0", f"--run-dir={run_dir}"]
    with contextlib.suppress(SystemExit):
        train.main([name, *flags, *options])
    capsys.readouterr()
    __main__.main(["find-nan", run_dir])
    told = capsys.readouterr().out
    assert re.search(r"seed [01]: the first update with a value that is not finite is \d+ of", told)
    assert re.search(
        "first(, before all updates)?: NaN by the operation sqrt, an observation", told
    )
    assert f"BlowsUpContinuous.step_env: {LINES[what]}" in told


def test_environments_outside_of_jax_are_refused(diverged, monkeypatch, capfd):
    monkeypatch.setattr(find_nan.loop, "holds", lambda tree, kind: kind is host.HostState)
    assert "environments outside of JAX" in refusal(["find-nan", diverged[0]], capfd)
