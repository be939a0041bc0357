"""What benchmarks/returns.py computes, and that the page of results is what was measured."""

import hashlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from support.files import ROOT, repository_files

sys.path.insert(0, str(ROOT / "benchmarks"))
import guide
import returns
import returns_page

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
    few |= {"settings": {"total_timesteps": 500_000}, "started": "2026-12-01"}
    few |= {"seed": 2000, "earlier_seeds": [], "episodes_at_end": 4.0}
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
    # without update 0, where 3 of 8 seeds end an episode
    assert curve["steps"] == [140, 160, 180, 200, 220]
    assert curve["seeds"] == [4, 8, 8, 8, 8]
    metrics["episodic_return"][2, 4] = metrics["episodic_return"][2, 3]
    sorted_returns = [np.sort(metrics["episodic_return"][:, i]) for i in range(1, 6)]  # NaN last
    middle = [slice(1, 3), *[slice(2, 6)] * 4]
    expected = [values[part].mean() for values, part in zip(sorted_returns, middle, strict=True)]
    np.testing.assert_allclose(curve["return"], expected, atol=1e-4)
    assert all(
        low <= mean <= high
        for low, mean, high in zip(curve["low"], curve["return"], curve["high"], strict=True)
    )


@pytest.mark.parametrize(
    ("final", "greedy", "steps", "state"),
    [
        ([480.0] * 4, [481.0] * 4, 499_712, "below"),  # published: 500 within 1e5 steps, greedy
        ([480.0] * 4, [500.0] * 4, 499_712, "undecided"),
        ([500.0] * 4, [400.0, 401.0, 402.0, 403.0], 499_712, "below"),  # compares greedy returns
        ([480.0] * 4, [470.0, 480.0, 490.0, 520.0], 499_712, "undecided"),
        ([480.0] * 4, [501.0, 502.0, 501.0, 502.0], 499_712, "above"),
        ([480.0] * 4, [481.0] * 4, 80_000, ""),  # which had more steps
        ([480.0] * 4, [481.0] * 4, 91_000, "below"),  # at most 1.1 times
        ([480.0], [481.0], 499_712, "below"),  # one seed
    ],
)
def test_state_of_a_row_beside_what_is_published(final, greedy, steps, state):
    row = make_row(final_return=final, greedy_return=greedy, total_timesteps=steps)
    assert returns_page.state(row) == state
    assert ("**below**" in returns_page.table([row])) == (state == "below")
    assert returns_page.summary_of(row)[-1] == state
    assert returns_page.state(row | {"environment": "Nothing-v0"}) == ""


@pytest.mark.parametrize(
    ("mean", "state"),
    # published: 1443, standard deviation 46 of 3 seeds, so 1443 +- 4.303 * 46 / sqrt(3), about 114
    [(1340.0, "undecided"), (1320.0, "below"), (1550.0, "undecided"), (1565.0, "above")],
)
def test_the_published_spread_counts(monkeypatch, mean, state):
    scores = [score for score in returns_page.PUBLISHED["HalfCheetah-v4"] if score.score == 1443]
    monkeypatch.setitem(returns_page.PUBLISHED, "HalfCheetah-v4", scores)
    row = make_row(row="ppo_continuous/mujoco_halfcheetah", script="ppo_continuous")
    row |= {"environment": "HalfCheetah-v4", "total_timesteps": 1_000_000}
    row |= {"final_return": [mean] * 4, "greedy_return": [9e3] * 4}  # compares final returns
    assert returns_page.state(row) == state
    assert "1443 (1329 to 1557) at 1e6" in returns_page.cells_of(row)["public"]


def test_highest_point_is_compared_with_the_highest_point():
    row = make_row(row="ppo_continuous/mujoco_ant", script="ppo_continuous")
    row |= {"environment": "Ant-v4", "total_timesteps": 1_000_000}
    row |= {"final_return": [9e3] * 4, "greedy_return": [9e3] * 4}
    assert returns_page.state(row) == "undecided"  # a row without a curve of evaluations
    assert returns_page.state(row | {"highest_return": [2e3] * 4}) == "below"
    evaluations = {"returns": np.array([[1.0, 5.0, 3.0], [1.0, 0.0, 3.0]])}
    assert returns.highest_return(evaluations).tolist() == [3.0, 3.0]
    evaluations = {"returns": np.array([[1.0, 3, 2], [0, 1, np.nan]])}
    assert returns.highest_return(evaluations).tolist() == [3.0, 1.0]


def test_policies_in_gymnasium_have_a_memory_and_bounded_actions():
    """Half of an episode at full force, at a cost of 0.1 in each of 999 steps."""

    def act(agent, steps, obs):
        return jnp.where(steps < 500, agent, 0.0)[None], steps + 1

    script = SimpleNamespace(make_policy=lambda config: (lambda: jnp.int32(0), act))
    config = SimpleNamespace(env_name="MountainCarContinuous-v0")
    agents = jnp.array([0.5, 7.0])  # without bounds the second would pay 49 times as much
    played = returns.play_in_gymnasium(script, config, agents, seed=0, episodes=2)
    np.testing.assert_allclose(played, [-12.5, -50.0], rtol=1e-4)


def test_an_interval_that_passes_the_best_return_is_a_bootstrap_interval():
    row = make_row(final_return=[400.0, 500.0, 500.0, 500.0, 500.0], greedy_return=[500.0] * 5)
    shown = returns_page.cells_of(row)
    assert re.fullmatch(r"480 \(4\d\d to 500\) b", shown["training return"])
    assert shown["evaluation return"] == "500 (500 to 500)"
    few = make_row(final_return=[400.0, 500.0, 500.0, 500.0], greedy_return=[500.0] * 4)
    assert re.fullmatch(r"475 \(395\S* to 500\) c", returns_page.cells_of(few)["training return"])
    row = make_row(final_return=[100.0, 200.0, 150.0, 120.0], greedy_return=[500.0] * 4)
    assert returns_page.cells_of(row)["training return"].endswith(")")


def test_table_shows_means_and_worst_agents():
    row = make_row(
        final_return=[0.0, 400.0, 440.0, 500.0],
        greedy_return=[8.0, 9, 10, 20],
        gymnasium_return=[1.0, 2, 3, 4],
        environment="Nothing-v0",  # whose best return is not known
    )
    shown = returns_page.cells_of(row)
    margin = scipy.stats.t.ppf(0.975, 3) * np.std([0, 400, 440, 500], ddof=1) / 2
    assert shown["training return"] == f"335 ({335 - margin:.4g} to {335 + margin:.4g})"
    assert (shown["steps"], shown["seeds"]) == ("5e5", "4, from 2000")
    assert (shown["IQM"], shown["worst"]) == ("420", "0")
    assert shown["evaluation return"].startswith("11.75 (") and shown["evaluation IQM"] == "9.5"
    assert shown["in Gymnasium"].startswith("2.5 (")
    one = returns_page.cells_of(make_row(final_return=[400.0], greedy_return=[500.0]))
    # no interval
    assert (one["training return"], one["IQM"], one["evaluation return"]) == ("400", "400", "500")


def test_failed_agents_are_counted():
    """Both returns below the threshold, 475 of CartPole; a seed without a return has failed."""
    row = make_row(
        final_return=[0.0, 400.0, 474.0, 500.0, None],
        greedy_return=[100.0, 475.0, 470.0, 0.0, 500.0],
    )
    shown = returns_page.cells_of(row)
    assert (shown["failed"], shown["worst"]) == ("3", "-inf")
    assert shown["seeds"] == "5, from 2000, 1 without a return"
    assert shown["training return"].startswith("343.5 (")  # of the others
    part = row | {"environment": "CartPole-v1, entries 0, 2 observed"}
    assert returns_page.cells_of(part)["failed"] == "3"
    assert returns_page.cells_of(row | {"environment": "Nothing-v0"})["failed"] == ""
    nothing = returns_page.cells_of(make_row(final_return=[None, None], greedy_return=[None, None]))
    assert (nothing["failed"], nothing["training return"]) == ("2", "-inf")


def test_returns_are_stored_as_json_holds_them():
    stored = returns.stored(
        np.array([1.0, np.nan, 3.0, -np.inf]), np.array([False, False, True, False])
    )
    assert json.loads(json.dumps(stored, allow_nan=False)) == [1.0, None, None, None]


def test_scores_under_other_rules_are_shown_and_not_compared():
    row = make_row(
        row="dqn/asterix", script="dqn", environment="Asterix-MinAtar", total_timesteps=5_000_000
    )
    row |= {"final_return": [1.0, 1.0], "greedy_return": [1.0, 1.0]}
    shown = returns_page.cells_of(row)["public"]
    assert "17 at 5e6" in shown and "with sticky actions, not comparable" in shown
    assert "54.95 at 1e8" in shown and "more steps" in shown
    assert returns_page.comparable(row)[0] is None and returns_page.state(row) == ""
    assert returns_page.threshold_of(row) is None


def test_threshold_is_half_of_the_score_that_a_row_is_compared_with():
    row = make_row(row="sac/mujoco_hopper", script="sac", environment="Hopper-v4")
    assert returns_page.threshold_of(row | {"total_timesteps": 300_000}) == 1200.5  # of SAC
    assert returns_page.threshold_of(row | {"total_timesteps": 50_000}) is None
    cost = row | {"script": "ppo_continuous", "environment": "Reacher-v4"}
    assert returns_page.threshold_of(cost | {"total_timesteps": 1_000_000}) == -8.2


def test_every_published_score_has_a_source_and_known_scripts():
    scripts = set(returns_page.SCRIPTS)
    for environment, scores in returns_page.PUBLISHED.items():
        for score in scores:
            assert set(score.scripts) <= scripts, environment
            assert score.source in returns_page.DATA["sources"], environment
            assert re.match(r"\[[^]]+\]\(https://\S+\)", score.link()), environment


@pytest.mark.parametrize(("episodes", "short"), [(1.5, False), (1.0, False), (0.5, True)])
def test_a_training_with_few_whole_episodes_shows_greedy_returns(episodes, short):
    row = make_row(episodes_at_end=episodes)
    shown = returns_page.cells_of(row)
    assert (shown["training return"] == "too short") == short
    assert (shown["IQM"] == "") == (shown["worst"] == "") == short
    assert ("evaluation" in returns_page.summary_of(row)[1]) == short
    assert (shown["evaluation worst"], shown["evaluation IQM"]) == ("480", "490")
    if short:  # what counts is greedy: no failure for the final return's sake
        row |= {"final_return": [None, None], "greedy_return": [470.0, 500.0]}
        assert returns_page.count_failed(row) == 1


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


def test_cost_of_a_row():
    row = make_row(seconds=7380.0, processor_seconds=9000.0, peak_memory=1.6 * 2**30)
    took = "# 2 seeds took 120 min and 1.6 GiB on 2 cores (A CPU)."
    assert returns_page.cost(row, 5e5) == took
    waited = "# 2 seeds took 60 min of a core (A CPU) and 1.6 GiB."  # other programs ran
    assert returns_page.cost(row | {"processor_seconds": 3600.0}, 5e5) == waited
    on_gpu = row | {"device": "1 x NVIDIA H200, 16 CPU cores"}  # peak_memory is the host's
    assert returns_page.cost(on_gpu, 5e5) == "# 2 seeds took 120 min on 1 NVIDIA H200."
    assert returns_page.cost(row | {"processor_seconds": None}, 5e5) == ""  # it was resumed
    config = "# What it is.\n# Results: there.\nlr: 1\n"
    once = returns_page.update_config(config, [took])
    assert once == f"# What it is.\n{took}\n# Results: there.\nlr: 1\n"
    assert returns_page.update_config(once, [took]) == once


def test_two_rows_are_compared_by_welch(monkeypatch):
    monkeypatch.setitem(returns_page.DATA, "pairs", [["ppo/catch", "ppo_rnn/catch+x"]])
    first = make_row(row="ppo/catch", seed=2000, episodes_at_end=9.0)
    first |= {"final_return": [1.0, 2.0, 9.0], "greedy_return": [3.0, 3.0, 3.0]}
    second = first | {"row": "ppo_rnn/catch+x", "final_return": [3.0, 5.0]}
    lines = returns_page.pairs_table([first, second]).splitlines()
    interval = scipy.stats.ttest_ind([3, 5], [1, 2, 9], equal_var=False).confidence_interval()
    expected = f"| 0 ({interval.low:.4g} to {interval.high:.4g}) |"
    assert lines[2].startswith("| ppo/catch | ppo_rnn/catch+x | training return | 4 (")
    assert lines[2].endswith(expected)
    assert "| evaluation return |" in lines[3] and lines[3].endswith("| 0 (0 to 0) |")
    assert returns_page.pairs_table([first]) == ""


def test_a_variant_is_its_config_with_flags():
    name = "ppo_rnn/bandit+no_memory"
    assert str(returns_page.config_of(name)) == "configs/ppo_rnn/bandit.yaml"
    assert returns_page.file_of(name).name == "ppo_rnn_bandit_no_memory.json"
    script, flags = returns.load(name)
    assert script.__file__.endswith("/ppo_rnn.py")
    assert flags == ["--config", "configs/ppo_rnn/bandit.yaml", "--cell", "none"]
    assert returns.settings_of(name)["cell"] == "none"


def test_comments_that_rows_write_do_not_change_the_code(tmp_path, monkeypatch):
    def commit():
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        for words in (["add", "."], [*who, "commit", "-qm", "All"]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)

    config, results = "configs/ppo/small.yaml", "benchmarks/RESULTS.md"
    files = {config: "# A task.\nlr: 0.1\n", "ppo.py": "x = 1\n", results: "Old\n"}
    for name, contents in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(contents)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit()
    monkeypatch.setattr(returns, "ROOT", tmp_path)
    assert not returns.code_has_changed("HEAD")
    for file, text, changed in (
        (config, "# 32 seeds took 3 min.\nlr: 0.1\n", False),
        (config, "# A task.\nlr: 0.2\n", True),
        ("ppo.py", "x = 2\n", True),
        (results, "New\n", False),
    ):
        (tmp_path / file).write_text(text)
        assert returns.code_has_changed("HEAD") == changed, text
        commit()
        assert returns.code_has_changed("HEAD~") == changed, text  # committed meanwhile
    (tmp_path / "new.py").write_text("x = 3\n")
    assert returns.code_has_changed("HEAD")  # nobody has committed it
    (tmp_path / "new.py").unlink()
    assert not returns.code_has_changed("HEAD") and returns.code_has_changed("no-such-commit")
    assert returns.code_has_changed("")  # there was no repository


def test_the_guide_has_the_best_row_of_each_script():
    rows = [
        make_row(row=name, final_return=[mean] * 4)
        for name, mean in {"ppo/a": 1.0, "ppo/b": 2.0}.items()
    ]
    rows.append(make_row(row="ppo/b+no_memory", final_return=[0.0] * 4))
    assert [row["row"] for row in guide.best_rows(rows, "classic")] == ["ppo/b"]
    assert [row["row"] for row in guide.best_rows(rows, "memory")] == ["ppo/b", "ppo/b+no_memory"]


def test_only_the_same_training_continues(tmp_path):
    """A checkpoint of another seed, script or config is not the row's."""
    name = "ppo/catch"
    command = ["onejit", "train", "ppo", "--config", "configs/ppo/catch.yaml", "--seed", "2000"]
    record = {
        "command": f"{' '.join(command)} --run-dir somewhere",
        "sha256": hashlib.sha256((ROOT / "ppo.py").read_bytes()).hexdigest(),
        "settings": {"script": "ppo", "num_seeds": 2, "seed": 2000, **returns.settings_of(name)},
    }

    def can_continue(**changes):
        (tmp_path / "run.json").write_text(json.dumps(record | changes))
        return returns.can_continue(name, command, tmp_path)

    assert can_continue()
    assert not can_continue(command=record["command"].replace("2000", "3000"))
    assert not can_continue(sha256="0")
    assert not can_continue(settings=record["settings"] | {"lr": 7.0})


def test_a_row_goes_on_after_its_training(tmp_path, monkeypatch):
    """If it was killed while agents play, the training counts with all its seconds."""
    (tmp_path / "checkpoints").mkdir()
    seconds = {"compile": 1.0, "train": 2.5}
    monkeypatch.setattr(returns, "can_continue", lambda *_: True)
    monkeypatch.setattr(returns, "read_record", lambda _: SimpleNamespace(seconds=seconds))
    monkeypatch.setattr(sys, "executable", "true")  # in place of onejit resume
    training = returns.run_training("ppo/catch", [], tmp_path)
    assert (training["seconds"], training["processor_seconds"]) == (3.5, None)


def test_a_training_is_deleted_after_its_row_is_written(tmp_path, monkeypatch, capsys):
    """One process measures a row, and a checkpoint of another training is no part of it."""
    monkeypatch.setattr(returns, "RUNNING", tmp_path)
    monkeypatch.setattr(returns_page, "file_of", lambda name: tmp_path / "ppo_catch.json")
    run_dir = returns.run_dir_of("ppo/catch")
    (run_dir / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(returns, "can_continue", lambda *_: False)
    with pytest.raises(ValueError, match="is of another command, script or config; delete it"):
        returns.run_training("ppo/catch", [], run_dir)

    def fail(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr(returns, "measure", fail)
    with pytest.raises(RuntimeError):
        returns.measure_and_keep("ppo/catch", 2, False, tmp_path)
    assert (run_dir / "checkpoints").exists()
    monkeypatch.setattr(returns, "measure", lambda *_: make_row(row="ppo/catch"))
    with filelock.FileLock(run_dir.with_suffix(".lock")):
        returns.measure_and_keep("ppo/catch", 2, False, tmp_path)
    assert "another process measures it" in capsys.readouterr().out and run_dir.exists()
    returns.measure_and_keep("ppo/catch", 2, False, tmp_path)
    assert (tmp_path / "ppo_catch.json").exists() and not run_dir.exists()


def test_rows_have_configs():
    data = returns_page.DATA
    rows = set(data["rows"])
    for row in data["planned"]:
        assert (ROOT / returns_page.config_of(row)).exists(), row
    assert set(returns_page.ROWS) == rows
    assert set(data["below"]) | set(data["notes"]) <= set(returns_page.ROWS)
    assert set(data["tuning"]) <= set(map(returns_page.config_name, rows))


def test_pairs_have_equal_steps_and_those_of_one_algorithm_equal_settings():
    for names in returns_page.DATA["pairs"]:
        first, second = map(returns.settings_of, names)
        fields = {"env_name", "total_timesteps"}
        if names[1].startswith("dpo_continuous"):
            fields = set(first) & set(second)
        assert [first[name] for name in fields] == [second[name] for name in fields], names


def test_each_row_below_what_is_published_says_why():
    rows = [json.loads(path.read_text()) for path in MEASURED]
    below = {row["row"] for row in rows if returns_page.state(row) == "below"}
    assert below == set(returns_page.DATA["below"])


def test_rows_were_measured_from_seeds_that_no_tuning_has_seen():
    assert returns.faults() == []


def write_row(folder, name="dqn/catch", **more) -> None:
    """A measured row with the settings of its config."""
    row = {"row": name, "seed": 2000, "earlier_seeds": []} | more
    own = returns.settings_of(name) | {"num_seeds": 16, "seed": row["seed"]}
    row["settings"] = own | more.get("settings", {})
    path = folder / f"{name.replace('/', '_')}.json"
    path.write_text(json.dumps(row))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"seed": 100}, "seed 100, not 2000"),
        ({"seed": 3000, "earlier_seeds": [2000]}, None),
        ({"earlier_seeds": [2000]}, "from seed 2000 with other settings"),
        ({"settings": {"lr": 7.0}}, "its config has changed"),
        ({"settings": {"seed": 3000}}, "was trained from seed 3000"),
    ],
)
def test_rows_that_break_the_rules_are_refused(tmp_path, monkeypatch, more, words):
    monkeypatch.setattr(returns_page, "MEASURED", tmp_path)
    write_row(tmp_path, **more)
    faults = returns.faults()
    assert len(faults) == (words is not None)
    assert words is None or words in faults[0]


def test_a_row_that_was_tuned_with_its_seed_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(returns_page, "MEASURED", tmp_path)
    entry = {"tried": "3 settings", "seeds": [7, 2000]}
    monkeypatch.setitem(returns_page.DATA["tuning"], "dqn/catch", entry)
    write_row(tmp_path)
    assert "was tuned with seed 2000" in returns.faults()[0]
    monkeypatch.setattr(sys, "argv", ["returns.py", "--check"])
    with pytest.raises(SystemExit) as end:
        returns.main()
    assert end.value.code == 1 and "tuned with seed 2000" in capsys.readouterr().out


def test_a_config_that_changed_moves_to_the_next_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(returns_page, "MEASURED", tmp_path)
    assert returns.seeds_of("dqn/catch") == (2000, [])
    write_row(tmp_path)
    assert returns.seeds_of("dqn/catch") == (2000, [])
    assert returns.seeds_of("dqn/catch", script_changed=True) == (3000, [2000])
    settings = returns.settings_of("dqn/catch")
    write_row(tmp_path, settings=settings | {"lr": 7.0}, seed=3000, earlier_seeds=[2000])
    assert returns.seeds_of("dqn/catch") == (4000, [2000, 3000])
    seen = {"tried": "something", "seeds": [4000]}
    monkeypatch.setitem(returns_page.DATA["tuning"], "dqn/catch", seen)
    assert returns.seeds_of("dqn/catch") == (5000, [2000, 3000])
    row = make_row(seed=4000, earlier_seeds=[2000, 3000])
    assert returns_page.cells_of(row)["seeds"] == "2, from 4000, moved 2 times"


def test_agents_play_greedy_episodes_of_their_own():
    script, _ = returns.load("dqn/cartpole")
    config = script.Config(num_envs=2, learning_starts=4, buffer_size=8)
    init, _ = script.make_learner(config)
    agent = jax.jit(init)(jax.random.key(0)).agent
    agents = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), agent)  # twins
    played = returns.greedy_returns(script, config, agents, episodes=8, seed=5)
    assert played.shape == (2, 8)
    assert (played[0] != played[1]).any() and len(np.unique(played[0])) > 1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_what_was_measured_is_of_a_row_as_it_is(path):
    row = json.loads(path.read_text())
    assert path == returns_page.file_of(row["row"])
    assert len(row["final_return"]) == len(row["greedy_return"]) == row["settings"]["num_seeds"]
    assert row["settings"]["seed"] == row["seed"]
    assert f"--seed {row['seed']}" in row["command"]
