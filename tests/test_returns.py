"""The tables of results: what benchmarks/returns.py computes, that the page is what was measured, rows made again."""

import importlib
import json
import re
import sys

import numpy as np
import pytest
import scipy.stats
import tyro
from conftest import ROOT, repository_files

sys.path.insert(0, str(ROOT / "benchmarks"))
import returns

from onejit import command_line, runs, statistics

MEASURED = repository_files("benchmarks/results/*_*.json")


def found(**more) -> dict:
    """A row as it is measured."""
    curve = {"steps": [10, 20], "return": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]}
    few = {"row": "ppo/cartpole", "script": "ppo", "environment": "CartPole-v1", "total_timesteps": 499_712}
    few |= {"final_return": [490.0, 500.0], "greedy_return": [480.0, 500.0], "curve": curve}
    return few | {"seconds": 60.0, "processor_seconds": 90.0} | more


def test_learning_curve_against_plain_means():
    class Config:
        num_updates, num_envs, num_steps, warmup_timesteps = 6, 4, 5, 100

    class Script:
        mean_return = staticmethod(importlib.import_module("ppo").mean_return)

    rng = np.random.default_rng(0)
    metrics = {"episodes": rng.integers(1, 5, (8, 6)).astype(float), "episodic_return": rng.normal(size=(8, 6))}
    metrics["episodes"][2, 4] = 0  # an update without an episode in one seed: no point there
    metrics["episodic_return"][2, 4] = np.nan
    curve = returns.learning_curve(Script, Config, metrics)
    assert curve["steps"] == [120, 140, 160, 180, 220]
    expected = [np.sort(metrics["episodic_return"][:, i])[2:6].mean() for i in (0, 1, 2, 3, 5)]
    np.testing.assert_allclose(curve["return"], expected, atol=1e-4)
    assert all(
        low <= mean <= high for low, mean, high in zip(curve["low"], curve["return"], curve["high"], strict=True)
    )


@pytest.mark.parametrize(
    ("final", "greedy", "steps", "below"),
    [
        ([480.0] * 4, [481.0] * 4, 499_712, True),  # public: 500 within 1e5 steps
        ([480.0] * 4, [500.0] * 4, 499_712, False),
        ([480.0] * 4, [481.0] * 4, 80_000, False),  # which had more steps
    ],
)
def test_a_row_below_what_is_public_is_marked(final, greedy, steps, below):
    row = found(final_return=final, greedy_return=greedy, total_timesteps=steps)
    assert returns.falls_short(row) == below
    assert ("**below**" in "\n".join(returns.table([row]))) == below
    assert not returns.falls_short(row | {"environment": "Nothing-v0"})


def cells(row) -> dict[str, str]:
    """Of the table, by their column."""
    head, _, line = ([cell.strip() for cell in line.split("|")[1:-1]] for line in returns.table([row]))
    return dict(zip(head, line, strict=True))


def test_table_shows_means_and_worst_agents():
    row = found(
        final_return=[0.0, 400.0, 440.0, 500.0], greedy_return=[8.0, 9, 10, 20], gymnasium_return=[1.0, 2, 3, 4]
    )
    shown, margin = cells(row), scipy.stats.t.ppf(0.975, 3) * np.std([0, 400, 440, 500], ddof=1) / 2
    assert shown["final return"] == f"335 ({335 - margin:.4g} to {335 + margin:.4g})"
    assert (shown["steps"], shown["seeds"], shown["IQM"], shown["worst"]) == ("5e5", "4", "420", "0")
    assert shown["greedy return"].startswith("11.75 (") and shown["greedy IQM"] == "9.5"
    assert shown["in Gymnasium"].startswith("2.5 (")
    one = cells(found(final_return=[400.0], greedy_return=[500.0]))
    assert (one["final return"], one["IQM"], one["greedy return"]) == ("400", "400", "500")  # no interval


def test_failed_agents_are_counted():
    """Those that reach the threshold, 475 of CartPole, neither way; a seed without a return has failed."""
    row = found(final_return=[0.0, 400.0, 474.0, 500.0, None], greedy_return=[100.0, 475.0, 470.0, 0.0, 500.0])
    shown = cells(row)
    assert (shown["failed"], shown["seeds"], shown["worst"]) == ("3", "5, 1 without a return", "-inf")
    assert shown["final return"].startswith("343.5 (")  # of the others
    assert cells(row | {"environment": "CartPole-v1, entries 0, 2 observed"})["failed"] == "3"
    assert cells(row | {"environment": "Nothing-v0"})["failed"] == ""
    assert not returns.falls_short(row)
    nothing = cells(found(final_return=[None, None], greedy_return=[None, None]))
    assert (nothing["failed"], nothing["final return"]) == ("2", "-inf")


def test_returns_are_stored_as_json_holds_them():
    stored = returns.stored(np.array([1.0, np.nan, 3.0, -np.inf]), np.array([False, False, True, False]))
    assert json.loads(json.dumps(stored, allow_nan=False)) == [1.0, None, None, None]


def test_thresholds_are_on_the_page():
    text = returns.PAGE.read_text()
    assert not [name for name, (value, _) in returns.THRESHOLDS.items() if f"| {name} | {value:g} |" not in text]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_config_of_a_measured_row_quotes_no_return(path):
    """Its comment says where the results are, and nothing that another measurement would contradict."""
    row = json.loads(path.read_text())["row"]
    comment = [line for line in (ROOT / "configs" / f"{row}.yaml").read_text().splitlines() if line.startswith("#")]
    after = " after 1e6 steps" if row in returns.ALSO else ""
    pointer = [f"# Results{after}: docs/results.md, row {row}. To measure it again:"]
    assert comment[-2:] == [*pointer, f"#     python benchmarks/returns.py {row}"]
    quoted = r"(final|greedy) returns? (of |is )?-?\d|interval|interquartile|-?[\d.]+ to -?[\d.]+\)|\d seeds?:"
    assert not re.findall(quoted, " ".join(comment))


def test_rows_have_configs():
    assert not [row for row in (*returns.ROWS, *returns.PLANNED) if not (ROOT / "configs" / f"{row}.yaml").exists()]
    assert set(returns.WHY) <= set(returns.ROWS) and set(returns.ALSO) <= set(returns.ROWS)


def test_each_row_below_what_is_public_says_why():
    rows = [json.loads(path.read_text()) for path in MEASURED]
    assert {row["row"] for row in rows if returns.falls_short(row)} == set(returns.WHY) & {row["row"] for row in rows}


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_what_was_measured_is_of_a_row_as_it_is(path):
    """The settings are those of the config that is here: a changed config has to be measured again.

    A field that has come since has its default, which does what was done before.
    """
    row = json.loads(path.read_text())
    assert path.stem == row["row"].replace("/", "_")
    script, flags = returns.load(row["row"])
    _, file, *also = flags
    words = command_line.read_flags(script, ["--config", str(ROOT / file), *also])
    config = command_line.parse(tyro.conf.FlagConversionOff[script.Config], words)
    now, default = (json.loads(json.dumps(runs.plain(each))) for each in (config, script.Config()))
    then = row["settings"]
    if "clip_value" in then:  # a switch in place of which there is a clip range of its own
        then["vf_clip_eps"] = then.get("clip_eps", 0.2) if then["clip_value"] else float("inf")
    assert {name: then.get(name, default[name]) for name in now} == now
    assert len(row["final_return"]) == len(row["greedy_return"]) == then["num_seeds"]
    assert then["seed"] == returns.SEED


def test_page_is_what_was_measured():
    assert returns.page(returns.read_measured(), returns.read_plans()) == returns.PAGE.read_text()
    environments = returns.by_environment(returns.read_measured())
    assert not [each for each in environments if not (returns.FIGURES / returns.figure_name(each)).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("row", ["ppo/catch", "q_learning_gridworld/walls"])
def test_a_row_measured_again_agrees(row):
    """With other seeds: the 99.9 % intervals of the final return meet."""
    stored = json.loads((returns.MEASURED / f"{row.replace('/', '_')}.json").read_text())
    again = returns.measure(row, num_seeds=16, seed=7)
    (_, low, high), (_, other_low, other_high) = (
        statistics.interval(np.array(each["final_return"]), level=99.9) for each in (stored, again)
    )
    assert low <= other_high and other_low <= high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "least"),
    [("ppo/cartpole_fast", 475), ("ppo/acrobot", -100), ("ppo/mountaincar", -130), ("ppo_continuous/pendulum", -250)],
)
def test_policies_work_in_gymnasium(row, least):
    """Trained here, played in Gymnasium's own environments: their observations, actions and limits are the same."""
    again = returns.measure(row, num_seeds=4, seed=7)
    assert np.mean(again["gymnasium_return"]) > least
