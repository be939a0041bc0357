"""The tables of results: what benchmarks/returns.py computes, that the page is what was measured, rows made again."""

import importlib
import json
import re
import sys

import numpy as np
import pytest
import scipy.stats
import tyro
from support.files import ROOT, repository_files

sys.path.insert(0, str(ROOT / "benchmarks"))
import returns

from onejit import command_line, runs, statistics

MEASURED = repository_files("benchmarks/results/*_*.json")


def found(**more) -> dict:
    """A row as it is measured."""
    curve = {"steps": [10, 20], "return": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]}
    few = {
        "row": "ppo/cartpole",
        "script": "ppo",
        "environment": "CartPole-v1",
        "total_timesteps": 499_712,
    }
    few |= {"final_return": [490.0, 500.0], "greedy_return": [480.0, 500.0], "curve": curve}
    few |= {"device": "2 x cpu, 2 CPU cores", "processor": "A CPU"}
    return few | {"seconds": 60.0, "processor_seconds": 90.0} | more


def test_learning_curve_against_plain_means():
    class Config:
        num_updates, num_envs, num_steps, warmup_timesteps = 6, 4, 5, 100

    class Script:
        mean_return = staticmethod(importlib.import_module("ppo").mean_return)

    rng = np.random.default_rng(0)
    metrics = {
        "episodes": rng.integers(1, 5, (8, 6)).astype(float),
        "episodic_return": rng.normal(size=(8, 6)),
    }
    for seed, update in (
        (2, 4),
        *((seed, 0) for seed in range(5)),
        *((seed, 1) for seed in range(4)),
    ):
        metrics["episodes"][seed, update] = 0
        metrics["episodic_return"][seed, update] = np.nan
    curve = returns.learning_curve(Script, Config, metrics)
    assert curve["steps"] == [
        140,
        160,
        180,
        200,
        220,
    ]  # without update 0, where 3 of 8 seeds end an episode
    assert curve["seeds"] == [4, 8, 8, 8, 8]
    metrics["episodic_return"][2, 4] = metrics["episodic_return"][2, 3]
    sorted_returns = [
        np.sort(metrics["episodic_return"][:, i]) for i in (1, 2, 3, 4, 5)
    ]  # NaN last
    middle = [slice(1, 3), *[slice(2, 6)] * 4]
    expected = [each[part].mean() for each, part in zip(sorted_returns, middle, strict=True)]
    np.testing.assert_allclose(curve["return"], expected, atol=1e-4)
    assert all(
        low <= mean <= high
        for low, mean, high in zip(curve["low"], curve["return"], curve["high"], strict=True)
    )


@pytest.mark.parametrize(
    ("final", "greedy", "steps", "below"),
    [
        ([480.0] * 4, [481.0] * 4, 499_712, True),  # public: 500 within 1e5 steps
        ([480.0] * 4, [500.0] * 4, 499_712, False),
        ([480.0] * 4, [481.0] * 4, 80_000, False),  # which had more steps
        ([480.0] * 4, [481.0] * 4, 91_000, True),  # at most 1.1 times
    ],
)
def test_a_row_below_what_is_public_is_marked(final, greedy, steps, below):
    row = found(final_return=final, greedy_return=greedy, total_timesteps=steps)
    assert returns.falls_short(row) == below
    assert ("**below**" in "\n".join(returns.table([row]))) == below
    assert not returns.falls_short(row | {"environment": "Nothing-v0"})


def cells(row) -> dict[str, str]:
    """Of the table, by their column."""
    head, _, line = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in returns.table([row])
    )
    return dict(zip(head, line, strict=True))


def test_table_shows_means_and_worst_agents():
    row = found(
        final_return=[0.0, 400.0, 440.0, 500.0],
        greedy_return=[8.0, 9, 10, 20],
        gymnasium_return=[1.0, 2, 3, 4],
    )
    shown, margin = cells(row), scipy.stats.t.ppf(0.975, 3) * np.std([0, 400, 440, 500], ddof=1) / 2
    assert shown["final return"] == f"335 ({335 - margin:.4g} to {335 + margin:.4g})"
    assert (shown["steps"], shown["seeds"], shown["IQM"], shown["worst"]) == (
        "5e5",
        "4",
        "420",
        "0",
    )
    assert shown["greedy return"].startswith("11.75 (") and shown["greedy IQM"] == "9.5"
    assert shown["in Gymnasium"].startswith("2.5 (")
    one = cells(found(final_return=[400.0], greedy_return=[500.0]))
    assert (one["final return"], one["IQM"], one["greedy return"]) == (
        "400",
        "400",
        "500",
    )  # no interval


def test_failed_agents_are_counted():
    """Those that reach the threshold, 475 of CartPole, neither way; a seed without a return has failed."""
    row = found(
        final_return=[0.0, 400.0, 474.0, 500.0, None],
        greedy_return=[100.0, 475.0, 470.0, 0.0, 500.0],
    )
    shown = cells(row)
    assert (shown["failed"], shown["seeds"], shown["worst"]) == (
        "3",
        "5, 1 without a return",
        "-inf",
    )
    assert shown["final return"].startswith("343.5 (")  # of the others
    assert cells(row | {"environment": "CartPole-v1, entries 0, 2 observed"})["failed"] == "3"
    assert cells(row | {"environment": "Nothing-v0"})["failed"] == ""
    assert not returns.falls_short(row)
    nothing = cells(found(final_return=[None, None], greedy_return=[None, None]))
    assert (nothing["failed"], nothing["final return"]) == ("2", "-inf")


def test_returns_are_stored_as_json_holds_them():
    stored = returns.stored(
        np.array([1.0, np.nan, 3.0, -np.inf]), np.array([False, False, True, False])
    )
    assert json.loads(json.dumps(stored, allow_nan=False)) == [1.0, None, None, None]


def test_thresholds_are_on_the_page():
    text = returns.PAGE.read_text()
    measured = {row["environment"].partition(",")[0] for row in returns.read_measured()}
    expected = {name: value for name, (value, _) in returns.THRESHOLDS.items() if name in measured}
    assert expected and not [
        name for name, value in expected.items() if f"| {name} | {value:g} |" not in text
    ]


def test_scores_under_other_rules_are_shown_and_not_compared():
    row = found(
        row="dqn/asterix", script="dqn", environment="Asterix-MinAtar", total_timesteps=5_000_000
    )
    row |= {"final_return": [1.0, 1.0], "greedy_return": [1.0, 1.0]}
    shown = cells(row)["public"]
    assert "17 at 5e6" in shown and "with sticky actions, not comparable" in shown
    assert "54.95 at 1e8" in shown and "more steps" in shown
    assert returns.comparable(row)[0] is None and not returns.falls_short(row)
    assert (
        returns.threshold_of(row) == 8.9
        and returns.threshold_of(row | {"total_timesteps": 1_000_000}) == 1.23
    )


def test_every_public_score_has_a_source_and_scripts():
    for environment, scores in returns.PUBLIC.items():
        for each in scores:
            assert set(each.scripts) <= set(returns.DISCRETE + returns.CONTINUOUS), environment
            assert re.match(r"\[([^]]+)\]\(https://", each.source)[1] in returns.SOURCES, (
                environment
            )


@pytest.mark.parametrize(
    ("more", "short"),
    [
        ({"settings": {"num_envs": 128}}, True),  # 390 steps of episodes of about 495
        ({"settings": {"num_envs": 64}}, False),
        (
            {"settings": {"num_envs": 128}, "final_return": [100.0, 110.0]},
            False,
        ),  # shorter episodes
        ({"settings": {"num_envs": 128}, "episodes_at_end": 1.5}, False),  # counted
        ({"settings": {"num_envs": 4}, "episodes_at_end": 0.5}, True),
        ({"settings": {"num_envs": 4096}, "environment": "Nothing-v0"}, False),  # nothing is known
        ({"settings": {}}, False),
    ],
)
def test_a_training_with_few_whole_episodes_shows_greedy_returns(more, short):
    row = found(**more)
    shown = cells(row)
    assert (shown["final return"] == "too short") == short
    assert (
        short
        == (shown["IQM"] == "")
        == (shown["worst"] == "")
        == ("greedy" in returns.mean_and_steps(row))
    )
    assert (shown["greedy worst"], shown["greedy IQM"]) == ("480", "490")
    if short:  # what counts is greedy: no failure for the final return's sake
        assert (
            returns.count_failed(
                row | {"final_return": [None, None], "greedy_return": [470.0, 500.0]}
            )
            == 1
        )


def test_episodes_at_the_end_are_of_an_environment():
    class Config:
        num_envs = 4

    metrics = {"episodes": np.ones((3, 40))}
    assert returns.episodes_at_end(Config, metrics) == 1.0


def test_a_row_with_steps_is_its_config_and_a_flag(monkeypatch):
    monkeypatch.setitem(returns.ALSO, "ppo/breakout@1e7", ["--eval-interval", "20", "--lr", "1e-3"])
    script, flags, options = returns.load("ppo/breakout@1e7")
    expected = ["--config", "configs/ppo/breakout.yaml", "--total-timesteps", "1e7", "--lr", "1e-3"]
    assert (script.Config.__name__, flags, options) == (
        "Config",
        expected,
        ["--eval-interval", "20"],
    )
    assert "ppo/breakout" not in returns.not_measured({"ppo/breakout@1e7"})


def test_figure_has_curves_of_evaluations_and_public_scores(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        returns.Figure, "savefig", lambda figure, path, **how: figures.append(figure)
    )
    row = found(
        evaluation_curve={
            "steps": [10, 20],
            "return": [1.0, 3.0],
            "low": [0.5, 2.0],
            "high": [2.0, 4.0],
        }
    )
    returns.draw([row], tmp_path / "figure.png")
    styles = {line.get_label(): line.get_linestyle() for line in figures[0].axes[0].get_lines()}
    public = "published: PPO, 500 at 1e5"
    assert styles == {"ppo/cartpole": "-", "ppo/cartpole, greedy": "--", public: ":"}
    assert {text.get_text() for text in figures[0].axes[0].texts} == set(styles)


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_config_of_a_measured_row_quotes_no_return(path):
    """Its comment says where the results are, and nothing that another measurement would contradict."""
    row = json.loads(path.read_text())["row"]
    comment = [
        line
        for line in (ROOT / returns.config_of(row)).read_text().splitlines()
        if line.startswith("#")
    ]
    rows = [each for each in returns.ROWS if returns.config_of(each) == returns.config_of(row)]
    pointers = [
        [
            f"# Results{after}: docs/results.md, row {each}. To measure it again:",
            f"#     python benchmarks/returns.py {each}",
        ]
        for each in rows
        for after in ("", " after 1e6 steps", f" after {each.partition('@')[2]} steps")
    ]
    assert comment[-2:] in pointers
    quoted = r"(final|greedy) returns? (of |is )?-?\d|interval|interquartile|-?[\d.]+ to -?[\d.]+\)|\d seeds?:"
    assert not re.findall(quoted, " ".join(comment))


def test_rows_have_configs():
    assert not [row for row in returns.PLANNED if not (ROOT / returns.config_of(row)).exists()]
    rows = " ".join(returns.SEEDS.values()).split()
    assert len(rows) == len(set(rows))
    coming = {
        row for row in rows if "/mujoco_" in row or row == "dqn/seaquest@5e6"
    }  # may have no config yet
    assert set(rows) - coming <= set(returns.ROWS) <= set(rows)
    assert set(returns.WHY) <= set(returns.ROWS) and set(returns.ALSO) <= set(returns.ROWS)


def test_each_row_below_what_is_public_says_why():
    rows = [json.loads(path.read_text()) for path in MEASURED]
    assert {row["row"] for row in rows if returns.falls_short(row)} == set(returns.WHY) & {
        row["row"] for row in rows
    }


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_what_was_measured_is_of_a_row_as_it_is(path):
    """The settings are those of the config that is here: a changed config has to be measured again.

    A field that has come since has its default, which does what was done before.
    """
    row = json.loads(path.read_text())
    assert path.stem == row["row"].replace("/", "_").replace("@", "_")
    script, flags, _ = returns.load(row["row"])
    _, file, *also = flags
    words = command_line.read_flags(script, ["--config", str(ROOT / file), *also])
    config = command_line.parse(tyro.conf.FlagConversionOff[script.Config], words)
    now, default = (json.loads(json.dumps(runs.plain(each))) for each in (config, script.Config()))
    then = row["settings"]
    if "clip_value" in then:  # a switch in place of which there is a clip range of its own
        then["vf_clip_eps"] = then.get("clip_eps", 0.2) if then["clip_value"] else float("inf")
    if then.get("conv_features") == 0:  # what `torso` chooses since then
        then["torso"] = "flat"
    assert {name: then.get(name, default[name]) for name in now} == now
    assert len(row["final_return"]) == len(row["greedy_return"]) == then["num_seeds"]
    assert then["seed"] == returns.SEED


def test_page_is_what_was_measured():
    assert returns.page(returns.read_measured(), returns.read_plans()) == returns.PAGE.read_text()
    environments = returns.by_environment(returns.read_measured())
    assert not [
        each for each in environments if not (returns.FIGURES / returns.figure_name(each)).exists()
    ]


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
    [
        ("ppo/cartpole_fast", 475),
        ("ppo/acrobot", -100),
        ("ppo/mountaincar", -130),
        ("ppo_continuous/pendulum", -250),
    ],
)
def test_policies_work_in_gymnasium(row, least):
    """Trained here, played in Gymnasium's own environments: their observations, actions and limits are the same."""
    again = returns.measure(row, num_seeds=4, seed=7)
    assert np.mean(again["gymnasium_return"]) > least


def test_curves_reach_the_end():
    """A seed keeps its last return where it ended no episode. It has none before its first one, and a loss stays."""
    nan, lost = np.nan, -np.inf
    found = returns.carried_forward(
        np.array([[nan, 1.0, nan, 2.0, nan], [3.0, lost, nan, nan, 4.0]])
    )
    np.testing.assert_array_equal(found, [[nan, 1, 1, 2, 2], [3, lost, lost, lost, 4]])


def test_labels_do_not_overlap():
    for places in ([0.5], [0.2, 0.9], [1.0] * 8, [0.0, 0.0, 0.5, 0.5, 1.2]):
        found = np.array(returns.apart(places, 0.06))
        assert (
            (np.diff(found) > 0.055).all()
            and found.min() > -0.01
            and found.max() < 1.01 + 0.2 * (len(places) == 1)
        )


def test_what_the_page_says_about_the_peers():
    apart = []
    for row, found in json.loads(returns.PEERS_FILE.read_text()).items():
        (low, high), (peer_low, peer_high) = (
            statistics.mean_interval(each)[1:] for each in found["returns"].values()
        )
        if max(low, peer_low) > min(high, peer_high):
            apart.append(row)
            assert low > peer_high
    said = " ".join(returns.WITH_PEERS.split())
    assert apart == ["sac"] and "The intervals overlap in all rows but sac." in said


def test_the_page_on_mappo_has_the_returns_of_both_codes():
    page = (ROOT / "docs" / "mappo.md").read_text()
    rows = {"simple_spread": "", "cramped_room": "", "smax_3m": "_1e6", "smax_2s3z": "_5e5"}
    for row, theirs in json.loads((returns.MEASURED / "jaxmarl.json").read_text()).items():
        ours = json.loads((returns.MEASURED / f"mappo_{row}{rows[row]}.json").read_text())
        cells = []
        for found, name in ((ours, "final_return"), (theirs, "return")):
            cell = (
                f"{statistics.show(*statistics.mean_interval(found[name]))}, {min(found[name]):.4g}"
            )
            if row.startswith("smax"):
                mean, low, high = 100 * np.array(statistics.mean_interval(found["win_rate"]))
                cell += f"; won {mean:.1f} % ({low:.1f} to {high:.1f})"
            cells.append(cell)
        seeds = f"{len(ours['final_return'])}, {len(theirs['return'])}"
        assert f"| {seeds} | {' | '.join(cells)} |" in page
