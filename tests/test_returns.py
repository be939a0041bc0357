"""What benchmarks/returns.py computes, and that the page of results is what was measured."""

import dataclasses
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
import returns_page

from onejit import configs, statistics

MEASURED = repository_files("benchmarks/results/*_*.json")


def make_row(**more) -> dict:
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
    curve = returns.training_curve(Config, metrics)
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
    expected = [values[part].mean() for values, part in zip(sorted_returns, middle, strict=True)]
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
    row = make_row(final_return=final, greedy_return=greedy, total_timesteps=steps)
    assert returns_page.falls_short(row) == below
    assert ("**below**" in returns_page.table([row])) == below
    assert not returns_page.falls_short(row | {"environment": "Nothing-v0"})


def test_table_shows_means_and_worst_agents():
    row = make_row(
        final_return=[0.0, 400.0, 440.0, 500.0],
        greedy_return=[8.0, 9, 10, 20],
        gymnasium_return=[1.0, 2, 3, 4],
    )
    shown, margin = (
        returns_page.cells_of(row),
        scipy.stats.t.ppf(0.975, 3) * np.std([0, 400, 440, 500], ddof=1) / 2,
    )
    assert shown["final return"] == f"335 ({335 - margin:.4g} to {335 + margin:.4g})"
    assert (shown["steps"], shown["seeds"], shown["IQM"], shown["worst"]) == (
        "5e5",
        "4",
        "420",
        "0",
    )
    assert shown["greedy return"].startswith("11.75 (") and shown["greedy IQM"] == "9.5"
    assert shown["in Gymnasium"].startswith("2.5 (")
    one = returns_page.cells_of(make_row(final_return=[400.0], greedy_return=[500.0]))
    assert (one["final return"], one["IQM"], one["greedy return"]) == (
        "400",
        "400",
        "500",
    )  # no interval


def test_failed_agents_are_counted():
    """Both returns below the threshold, 475 of CartPole; a seed without a return has failed."""
    row = make_row(
        final_return=[0.0, 400.0, 474.0, 500.0, None],
        greedy_return=[100.0, 475.0, 470.0, 0.0, 500.0],
    )
    shown = returns_page.cells_of(row)
    assert (shown["failed"], shown["seeds"], shown["worst"]) == (
        "3",
        "5, 1 without a return",
        "-inf",
    )
    assert shown["final return"].startswith("343.5 (")  # of the others
    assert (
        returns_page.cells_of(row | {"environment": "CartPole-v1, entries 0, 2 observed"})["failed"]
        == "3"
    )
    assert returns_page.cells_of(row | {"environment": "Nothing-v0"})["failed"] == ""
    assert not returns_page.falls_short(row)
    nothing = returns_page.cells_of(make_row(final_return=[None, None], greedy_return=[None, None]))
    assert (nothing["failed"], nothing["final return"]) == ("2", "-inf")


def test_returns_are_stored_as_json_holds_them():
    stored = returns.stored(
        np.array([1.0, np.nan, 3.0, -np.inf]), np.array([False, False, True, False])
    )
    assert json.loads(json.dumps(stored, allow_nan=False)) == [1.0, None, None, None]


def test_thresholds_are_on_the_page():
    text = returns_page.PAGE.read_text()
    measured = {row["environment"].partition(",")[0] for row in returns_page.read_measured()}
    thresholds = returns_page.DATA["thresholds"].items()
    expected = {name: entry["return"] for name, entry in thresholds if name in measured}
    assert expected and not [
        name for name, value in expected.items() if f"| {name} | {value:g} |" not in text
    ]


def test_scores_under_other_rules_are_shown_and_not_compared():
    row = make_row(
        row="dqn/asterix", script="dqn", environment="Asterix-MinAtar", total_timesteps=5_000_000
    )
    row |= {"final_return": [1.0, 1.0], "greedy_return": [1.0, 1.0]}
    shown = returns_page.cells_of(row)["public"]
    assert "17 at 5e6" in shown and "with sticky actions, not comparable" in shown
    assert "54.95 at 1e8" in shown and "more steps" in shown
    assert returns_page.comparable(row)[0] is None and not returns_page.falls_short(row)
    assert (
        returns_page.threshold_of(row) == 8.9
        and returns_page.threshold_of(row | {"total_timesteps": 1_000_000}) == 1.23
    )


def test_every_published_score_has_a_source_and_scripts():
    scripts = set(returns_page.DISCRETE + returns_page.CONTINUOUS)
    for environment, scores in returns_page.PUBLISHED.items():
        for score in scores:
            assert score.scripts and set(score.scripts) <= scripts, environment
            assert score.source in returns_page.DATA["sources"], environment
            assert re.match(r"\[[^]]+\]\(https://\S+\)", score.link()), environment


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
    row = make_row(**more)
    shown = returns_page.cells_of(row)
    assert (shown["final return"] == "too short") == short
    assert (
        short
        == (shown["IQM"] == "")
        == (shown["worst"] == "")
        == ("greedy" in returns_page.mean_and_steps(row))
    )
    assert (shown["greedy worst"], shown["greedy IQM"]) == ("480", "490")
    if short:  # what counts is greedy: no failure for the final return's sake
        assert (
            returns_page.count_failed(
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
    entry = {"seeds": 8, "flags": ["--eval-interval", 20, "--lr", "1e-3"]}
    monkeypatch.setitem(returns_page.DATA["rows"], "ppo/breakout@1e7", entry)
    script, flags = returns.load("ppo/breakout@1e7")
    expected = ["--config", "configs/ppo/breakout.yaml", "--total-timesteps", "1e7"]
    expected += ["--eval-interval", "20", "--lr", "1e-3"]
    assert (script.Config.__name__, flags) == ("Config", expected)
    assert "ppo/breakout" not in returns_page.not_measured({"ppo/breakout@1e7"})


def test_figure_has_curves_of_evaluations_and_public_scores(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        returns_page.Figure, "savefig", lambda figure, path, **how: figures.append(figure)
    )
    row = make_row(
        evaluation_curve={
            "steps": [10, 20],
            "return": [1.0, 3.0],
            "low": [0.5, 2.0],
            "high": [2.0, 4.0],
        }
    )
    returns_page.draw([row], tmp_path / "figure.png")
    styles = {line.get_label(): line.get_linestyle() for line in figures[0].axes[0].get_lines()}
    public = "published: PPO, 500 at 1e5"
    assert styles == {"ppo/cartpole": "-", "ppo/cartpole, greedy": "--", public: ":"}
    assert {text.get_text() for text in figures[0].axes[0].texts} == set(styles)


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_config_of_a_measured_row_quotes_no_return(path):
    """Its comment says where the results are, and nothing that a new measurement contradicts."""
    config = returns_page.config_of(json.loads(path.read_text())["row"])
    lines = (ROOT / config).read_text().splitlines()
    comment = [line for line in lines if line.startswith("#")]
    pointers = []
    for row in returns_page.ROWS:
        if returns_page.config_of(row) != config:
            continue
        for after in ("", " after 1e6 steps", f" after {row.partition('@')[2]} steps"):
            pointer = f"# Results{after}: docs/results.md, row {row}. To measure it again:"
            pointers.append([pointer, f"#     python benchmarks/returns.py {row}"])
    assert comment[-2:] in pointers
    quoted = r"(final|greedy) returns? (of |is )?-?\d|interval|interquartile"
    quoted += r"|-?[\d.]+ to -?[\d.]+\)|\d seeds?:"
    assert not re.findall(quoted, " ".join(comment))


def test_rows_have_configs():
    data = returns_page.DATA
    rows = set(data["rows"])
    for row in data["planned"]:
        assert (ROOT / returns_page.config_of(row)).exists(), row
    # These may have no config yet.
    coming = {row for row in rows if "/mujoco_" in row or row == "dqn/seaquest@5e6"}
    assert rows - coming <= set(returns_page.ROWS) <= rows
    assert set(data["below"]) | set(data["notes"]) <= set(returns_page.ROWS)
    assert set(data["tuning"]) <= {row.partition("@")[0] for row in rows}


def test_each_row_below_what_is_public_says_why():
    rows = [json.loads(path.read_text()) for path in MEASURED]
    below = {row["row"] for row in rows if returns_page.falls_short(row)}
    assert below == set(returns_page.DATA["below"]) & {row["row"] for row in rows}


def settings_with_todays_fields(row: dict) -> dict:
    """The settings of a row, where fields have changed since it was measured."""
    settings = dict(row["settings"])
    if "clip_value" in settings:  # a switch, before the clip range had a field of its own
        clips = settings["clip_value"]
        settings["vf_clip_eps"] = settings.get("clip_eps", 0.2) if clips else float("inf")
    if settings.get("conv_features") == 0:  # what `torso` chooses since then
        settings["torso"] = "flat"
    if row["script"] in ("apex_dqn", "rainbow") and row["started"] < "2026-11-26":
        # Gradient steps became environment steps.
        rollout_size = settings["num_envs"] * settings["num_steps"]
        for name in ("target_update_interval", "actor_sync_interval"):
            if name in settings:
                settings[name] *= rollout_size // settings["gradient_steps"]
    return settings


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_what_was_measured_is_of_a_row_as_it_is(path):
    """The settings are those of the config that is here: a changed config is measured again.

    A field that is newer than the row has its default, which does what was done before.
    """
    row = json.loads(path.read_text())
    assert path == returns_page.file_of(row["row"])
    script, (_, file, *more) = returns.load(row["row"])
    fields = {field.name for field in dataclasses.fields(script.Config)}
    pairs = list(zip(more[::2], more[1::2], strict=True))
    flags = [word for pair in pairs if configs.field_of(pair[0]) in fields for word in pair]
    words = configs.read_flags(script, ["--config", str(ROOT / file), *flags])
    config = tyro.cli(tyro.conf.FlagConversionOff[script.Config], args=words)
    now = json.loads(json.dumps(configs.plain(config)))
    default = json.loads(json.dumps(configs.plain(script.Config())))
    then = settings_with_todays_fields(row)
    assert {name: then.get(name, default[name]) for name in now} == now
    assert len(row["final_return"]) == len(row["greedy_return"]) == then["num_seeds"]
    assert then["seed"] == returns.SEED


def test_page_is_what_was_measured():
    rows = returns_page.read_measured()
    page = returns_page.page(rows, returns_page.read_plans())
    assert page == returns_page.PAGE.read_text()
    for environment in returns_page.by_environment(rows):
        assert (returns_page.FIGURES / returns_page.figure_name(environment)).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo/catch", "q_learning_gridworld/walls"])
def test_a_row_measured_again_agrees(name):
    """With other seeds: the 99.9 % intervals of the final return meet."""
    row = json.loads(returns_page.file_of(name).read_text())
    again = returns.measure(name, num_seeds=16, seed=7)
    _, low, high = statistics.interval(np.array(row["final_return"]), level=99.9)
    _, low_again, high_again = statistics.interval(np.array(again["final_return"]), level=99.9)
    assert low <= high_again and low_again <= high


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
    """Gymnasium's own environments have the same observations, actions and limits."""
    again = returns.measure(row, num_seeds=4, seed=7)
    assert np.mean(again["gymnasium_return"]) > least


def test_curves_reach_the_end():
    """A seed keeps its last return, from its first one on. A seed that is lost stays lost."""
    nan = np.nan
    lost = -np.inf
    given = np.array([[nan, 1.0, nan, 2.0, nan], [3.0, lost, nan, nan, 4.0]])
    expected = [[nan, 1, 1, 2, 2], [3, lost, lost, lost, 4]]
    np.testing.assert_array_equal(returns.carried_forward(given), expected)


@pytest.mark.parametrize("places", [[0.5], [0.2, 0.9], [1.0] * 8, [0.0, 0.0, 0.5, 0.5, 1.2]])
def test_labels_do_not_overlap(places):
    moved = np.array(returns_page.apart(places, 0.06))
    assert (np.diff(moved) > 0.055).all()
    assert moved.min() > -0.01
    assert moved.max() < 1.01 + 0.2 * (len(places) == 1)


def test_what_the_page_says_about_the_peers():
    apart = []
    for name, entry in json.loads(returns_page.PEERS_FILE.read_text()).items():
        ours, theirs = entry["returns"].values()
        _, low, high = statistics.mean_interval(ours)
        _, peer_low, peer_high = statistics.mean_interval(theirs)
        if max(low, peer_low) > min(high, peer_high):
            apart.append(name)
            assert low > peer_high
    sentences = " ".join(returns_page.TEXT["with_peers"].split())
    assert apart == ["sac"] and "The intervals overlap in all rows but sac." in sentences


def show_returns(entry: dict, name: str, with_wins: bool) -> str:
    mean = statistics.show(*statistics.mean_interval(entry[name]))
    cell = f"{mean}, {min(entry[name]):.4g}"
    if with_wins:
        mean, low, high = 100 * np.array(statistics.mean_interval(entry["win_rate"]))
        cell += f"; won {mean:.1f} % ({low:.1f} to {high:.1f})"
    return cell


def test_the_page_on_mappo_has_the_returns_of_both_codes():
    page = (ROOT / "docs" / "mappo.md").read_text()
    steps = {"simple_spread": "", "cramped_room": "", "smax_3m": "_1e6", "smax_2s3z": "_5e5"}
    for row, theirs in json.loads((returns_page.MEASURED / "jaxmarl.json").read_text()).items():
        file = returns_page.MEASURED / f"mappo_{row}{steps[row]}.json"
        ours = json.loads(file.read_text())
        with_wins = row.startswith("smax")
        cells = [
            f"{len(ours['final_return'])}, {len(theirs['return'])}",
            show_returns(ours, "final_return", with_wins),
            show_returns(theirs, "return", with_wins),
        ]
        assert f"| {' | '.join(cells)} |" in page
