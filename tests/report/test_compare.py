"""`onejit compare`: the statistics against plain loops, which runs belong together, what it refuses
and writes.
"""

import csv
import json
import os
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import tyro
import yaml
from safetensors.numpy import save_file
from support.commands import refusal

from onejit import __main__
from onejit.base import statistics
from onejit.report import compare
from onejit.run.record import Record

rng = np.random.default_rng(0)


def make_run(
    folder, returns, script="ppo", env_name="CartPole-v1", seed=0, evaluation=None, **settings
):
    """A run directory as a script leaves it, with the given final returns [seeds]."""
    folder.mkdir(parents=True)
    settings = {"env_name": env_name, "lr": 0.1} | settings
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    about = {"script": script, "seed": str(seed)}
    save_file({"q": np.zeros(len(returns))}, folder / "agent.safetensors", about)
    returns = np.asarray(returns, float)
    episodes = np.ones((len(returns), 10))
    episodes[np.isnan(returns)] = 0
    before = np.tile([-1000.0, *[1000.0] * 8], (len(returns), 1))
    curve = np.column_stack([before, returns])
    np.savez(folder / "metrics.npz", episodes=episodes, episodic_return=curve)
    if evaluation is not None:
        np.save(folder / "evaluation.npy", np.asarray(evaluation, float))
    return str(folder)


def run(*args):
    """As the command line does."""
    return tyro.cli(compare.main, args=list(map(str, args)))


def read_csv(out):
    with (out / "compare.csv").open() as file:
        return {
            (row["environment"], row["statistic"], row["method"], row["versus"]): row
            for row in csv.DictReader(file)
        }


def test_pictures_have_none_of_the_users_style(tmp_path, capsys):
    """LaTeX in matplotlibrc, and the backend that notebooks set for their children."""
    make_run(tmp_path / "run", [1.0, 2.0])
    with matplotlib.rc_context():
        matplotlib.rcParams["text.usetex"] = True
        __main__.main(["compare", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "compare.png").is_file() and not capsys.readouterr().err
    code = "from onejit.__main__ import prepare_pictures as f; f(); import matplotlib.figure"
    environment = os.environ | {"MPLBACKEND": "module://not_installed.backend_inline"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


# --- statistics ---


def test_probability_of_improvement_against_a_loop():
    x = [rng.integers(0, 5, 7).astype(float), rng.integers(0, 3, 4).astype(float)]
    y = [rng.integers(0, 5, 6).astype(float), rng.integers(0, 3, 9).astype(float)]
    won = []
    for xs, ys in zip(x, y, strict=True):
        won.append(np.mean([(a > b) + 0.5 * (a == b) for a in xs for b in ys]))
    assert len(set(won)) == 2
    assert statistics.probability_of_improvement(*x, *y) == pytest.approx(np.mean(won))
    twice = [np.stack([each, each], axis=1) for each in (*x, *y)]
    np.testing.assert_allclose(statistics.probability_of_improvement(*twice), np.mean(won))


def test_intervals_against_a_plain_bootstrap():
    samples = [rng.normal(0, 1, 20), rng.normal(5, 3, 12)]
    value, *interval = statistics.bootstrap_interval(statistics.middle_mean, *samples)
    draws = []
    for _ in range(4000):
        drawn = np.concatenate([rng.choice(sample, len(sample)) for sample in samples])
        draws.append(np.sort(drawn)[8:24].mean())
    width = np.ptp(interval)
    assert value == pytest.approx(np.sort(np.concatenate(samples))[8:24].mean())
    expected = np.percentile(draws, [2.5, 97.5])
    np.testing.assert_allclose(interval, expected, atol=0.1 * width)


def test_seeds_are_drawn_again_within_an_environment_only():
    """All seeds of one environment are alike, so that nothing but a draw across environments could
    vary.
    """
    samples = [np.zeros(8), np.ones(8)]
    assert statistics.bootstrap_interval(statistics.middle_mean, *samples) == [0.5, 0.5, 0.5]


def test_large_returns_are_shown_without_exponents():
    assert statistics.show(9106, 7903.2, 10306.4) == "9106 (7903 to 10306)"
    assert statistics.show(0.00123, np.nan, np.nan) == "0.00123"
    assert statistics.show(-np.inf, np.nan, np.nan) == "-inf"


def test_intervals_of_a_mean_against_scipy():
    """Of one environment Student's t.

    Of two the interval of a sum, which Welch's is of a difference.
    """
    x, y = rng.normal(0, 1, 12), rng.normal(5, 3, 7)
    expected = scipy.stats.ttest_1samp(x, 0).confidence_interval()
    np.testing.assert_allclose(statistics.student_interval(x), [x.mean(), *expected])
    _, *interval = statistics.student_interval(x, y)
    expected = np.array(scipy.stats.ttest_ind(x, -y, equal_var=False).confidence_interval()) / 2
    np.testing.assert_allclose(interval, expected)
    assert statistics.student_interval(np.ones(4), np.ones(3)) == [1.0, 1.0, 1.0]
    value, *interval = statistics.student_interval(np.array([3.0, 5.0]), np.array([3.0]))
    assert value == 3.5 and np.isnan(interval).all()  # one seed of an environment
    interval, kind = compare.mean_of_finite(np.append(x, -np.inf))
    assert interval == statistics.student_interval(x) and kind == "student"
    assert compare.mean_of_finite(x, np.full(2, -np.inf))[0][0] == -np.inf


def test_seeds_that_are_not_finite_are_the_worst():
    """In ranks and trimmed means; a mean is over the others."""
    few, many = np.array([-np.inf, 1, 2, 3, 4, 5, 6, 7]), np.array([-np.inf] * 7 + [9.0])
    assert statistics.middle_mean(few) == np.mean([2, 3, 4, 5])
    assert statistics.middle_mean(many) == -np.inf
    assert statistics.median(few) == 3.5
    assert statistics.median(few, np.full(2, -np.inf), np.zeros(2)) == 0
    assert statistics.median(few, *[np.full(2, -np.inf)] * 2) == -np.inf
    assert statistics.optimality_gap(np.array([-np.inf, 0.5, 0.0])) == 0.75
    won = [(a > b) + 0.5 * (a == b) for a in few for b in many]
    assert statistics.probability_of_improvement(few, many) == pytest.approx(np.mean(won))
    assert statistics.bootstrap_interval(statistics.middle_mean, few)[1] == -np.inf


# --- which runs belong together ---


def test_a_whole_comparison(tmp_path, capsys):
    """Two methods, two environments, seeds of one run spread over two directories: every number by
    hand.
    """
    a, b = rng.normal(150, 30, 8), rng.normal(80, 30, 6)
    c, d = rng.normal(0.2, 0.3, 5), rng.normal(-0.5, 0.3, 5)
    catch = {"env_name": "Catch-bsuite"}
    of_dqn = {"script": "dqn", "gamma": 0.9} | catch
    runs = [
        make_run(tmp_path / "1", a[:4]),
        make_run(tmp_path / "2", a[4:], seed=1),
        make_run(tmp_path / "3", b, script="dqn", gamma=0.5),
        make_run(tmp_path / "4", c, lr=0.2, **catch),
    ]
    other = make_run(tmp_path / "5", d, env_params={"rows": 7}, **of_dqn)
    with pytest.raises(ValueError, match="ppo has no run on Catch-bsuite rows=7"):
        run(*runs, other)
    runs.append(make_run(tmp_path / "6", d, **of_dqn))
    with pytest.raises(ValueError, match="give --scale CartPole-v1 LOW HIGH"):
        run(*runs)
    scale = ["--scale", "CartPole-v1", 10, 210, "Catch-bsuite", -1, 1]
    out = run(*runs, *scale, "--out", tmp_path / "out")
    both, rows = "CartPole-v1, Catch-bsuite", read_csv(out)
    a, b, c, d = (a - 10) / 200, (b - 10) / 200, (c + 1) / 2, (d + 1) / 2
    expected = {
        ("interquartile mean", "ppo", ""): statistics.middle_mean(a, c),
        ("median", "dqn", ""): (b.mean() + d.mean()) / 2,
        ("optimality gap", "ppo", ""): 1 - np.mean([np.minimum(x, 1).mean() for x in (a, c)]),
        ("mean", "dqn", ""): (b.mean() + d.mean()) / 2,
    }
    for key, value in expected.items():
        row = rows[both, *key]
        assert float(row["value"]) == pytest.approx(value), key
        assert float(row["low"]) < value < float(row["high"])
    worst = rows[both, "worst agent", "ppo", ""]
    assert float(worst["value"]) == pytest.approx(min([*a, *c])) and worst["low"] == "nan"
    improvement = rows[both, "probability of improvement", "ppo", "dqn"]
    won = [np.mean([x > y for x in xs for y in ys]) for xs, ys in ((a, b), (c, d))]
    assert float(improvement["value"]) == pytest.approx(np.mean(won))
    assert improvement["seeds"] == "8+6/5+5"
    raw = rows["CartPole-v1", "interquartile mean", "dqn", ""]
    assert float(raw["value"]) == pytest.approx(statistics.middle_mean(b * 200 + 10))
    said = capsys.readouterr().out
    assert (
        f"{float(improvement['value']):.4g} (" in said and "training return on Catch-bsuite" in said
    )
    columns = r" +seeds +mean +worst agent +interquartile mean +median +optimality gap\n"
    assert re.search(columns, said) and f"  {min([*a, *c]):.4g}  " in said
    picture = matplotlib.image.imread(out / "compare.png")[..., :3]
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.01


def test_a_latex_table_has_the_best_mean_in_bold_where_intervals_are_apart(tmp_path, capsys):
    runs = []
    for script, returns in {"ppo": [10.0, 11.0, 12.0], "dqn": [1.0, 2.0, 3.0]}.items():
        run_dir = make_run(tmp_path / script, returns, script, env_name="a_task")
        runs.append(f"{script}_100%={run_dir}")
        other = make_run(tmp_path / f"{script}_b", [5.0, 6.0, 7.0], script, env_name="b")
        runs.append(f"{script}_100%={other}")
    run(*runs, "--scale", "a_task", 0, 1, "b", 0, 1, "--latex", "--out", tmp_path / "out")
    lines = (tmp_path / "out" / "compare.tex").read_text().splitlines()
    assert lines[2] == r"environment & ppo\_100\% & dqn\_100\% \\"
    assert lines[4] == r"a\_task & \textbf{11 (8.516 to 13.48)} & 2 (-0.4841 to 4.484) \\"
    assert lines[5] == r"b & 6 (3.516 to 8.484) & 6 (3.516 to 8.484) \\"


def test_methods_are_named_by_what_sets_them_apart(tmp_path):
    runs = []
    for env, size in (("Acrobot-v1", 8), ("Catch-bsuite", 16)):
        for lr in (0.5, 0.25):
            settings = {"lr": lr, "env_name": env, "num_steps": size}
            path = make_run(tmp_path / f"{lr}{env}", [1, 2], **settings)
            runs.append(compare.read_run(path, "final"))
    assert [run.label for run in compare.label_runs(runs)] == ["ppo lr=0.5", "ppo lr=0.25"] * 2
    assert [run.label for run in compare.label_runs(runs[::2])] == ["ppo", "ppo"]
    assert set(compare.gather(runs)) == {"ppo lr=0.5", "ppo lr=0.25"}


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"sha256": "a"}, {"sha256": "b"}, "the text of the script"),
        ({"total_updates": 93}, {}, "the number of updates"),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_two_methods(tmp_path, first, second, what):
    runs = []
    for seed, record in enumerate((first, second)):
        folder = tmp_path / str(seed)
        runs.append(make_run(folder, [1.0, 2.0], seed=seed))
        settings = {"script": "ppo", "num_seeds": 2, "seed": seed, "env_name": "CartPole-v1"}
        if "total_updates" in record:
            metrics = dict(np.load(folder / "metrics.npz"))
            np.savez(folder / "metrics.npz", **{k: v[:, 5:] for k, v in metrics.items()})
        record = {"settings": settings, "kind": "trial"} | record
        (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"differ in {what}; give each a label"):
        run(*runs)
    run(f"one={runs[0]}", f"two={runs[1]}")


def test_a_trial_that_was_stopped_counts_the_episodes_that_its_sweep_counted(tmp_path):
    """A tenth of the updates that it was meant to have: 10 of 100, and so all that it has."""
    folder = make_run(tmp_path / "a", [0.0, 10.0])
    record = Record(settings={})
    assert compare.read_returns(folder, "final", record)[0].tolist() == [0.0, 10.0]
    record.total_updates = 100
    assert compare.read_returns(folder, "final", record)[0].tolist() == [700.0, 701.0]


def test_agents_without_a_return_are_the_worst_and_named(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "1", [1, np.nan, 3, np.inf, 5]),
        make_run(tmp_path / "2", [0, 0, 0, 0, 0], lr=0.2),
    ]
    rows = read_csv(run(*runs, "--out", tmp_path / "out"))
    row = rows["CartPole-v1", "interquartile mean", "ppo lr=0.1", ""]
    assert row["seeds"] == "3 of 5 finite" and float(row["low"]) == -np.inf
    expected = {"interquartile mean": -np.inf, "median": 1.0, "mean": 3.0, "worst agent": -np.inf}
    for name, value in expected.items():
        assert float(rows["CartPole-v1", name, "ppo lr=0.1", ""]["value"]) == value
    won = rows["CartPole-v1", "probability of improvement", "ppo lr=0.2", "ppo lr=0.1"]
    assert float(won["value"]) == 0.4
    assert "agents [1, 3] of 5" in capsys.readouterr().out


def test_greedy_returns(tmp_path):
    path = make_run(tmp_path / "1", [1, 2, 3], evaluation=[[10, 20], [30, 30], [0, 100]])
    rows = read_csv(run(path, "--returns", "greedy", "--out", tmp_path / "out"))
    mean = float(rows["CartPole-v1", "mean", "ppo", ""]["value"])
    assert mean == pytest.approx((15 + 30 + 50) / 3)


def test_old_results_are_not_those_of_a_run_that_was_extended(tmp_path):
    run_dir = make_run(tmp_path / "run", [1.0, 2.0])
    settings = {"script": "ppo", "num_seeds": 2, "seed": 0, "env_name": "CartPole-v1"}
    record = Record(settings | {"total_timesteps": 10**7}, kind="train")
    (tmp_path / "run" / "run.json").write_text(json.dumps(record.to_store()))
    with pytest.raises(ValueError, match="extended to 10000000 timesteps"):
        run(run_dir)


# --- what it refuses ---


def test_bad_input(tmp_path, capfd):
    good = make_run(tmp_path / "good", [1, 2, 3])
    other = make_run(tmp_path / "other", [1, 2, 3], gamma=0.5)
    empty, cut, old = tmp_path / "empty", tmp_path / "cut", tmp_path / "old"
    empty.mkdir()
    for folder in (cut, old):
        make_run(folder, [1, 2])
    (cut / "metrics.npz").write_bytes((cut / "metrics.npz").read_bytes()[:200])
    (old / "agent.safetensors").unlink()
    unfinished, sweep = make_run(tmp_path / "unfinished", [1]), tmp_path / "sweep"
    (tmp_path / "unfinished" / "metrics.npz").unlink()
    sweep.mkdir()
    settings = {"script": "ppo", "num_seeds": 3, "seed": 0, "env_name": "CartPole-v1"}
    (sweep / "run.json").write_text(json.dumps({"settings": settings, "kind": "sweep"}))
    cases = {
        (tmp_path / "none",): "none: is not a run directory",
        (empty,): "empty: is not a run directory",
        (old,): "agent.safetensors",
        (cut,): "metrics.npz: cannot be read",
        (unfinished,): "metrics.npz: does not exist",
        (sweep,): "sweep: has not finished",
        (good, good): "agent 0 of seed 0 occurs twice",
        (f"a={good}", f"a={other}"): "differ in gamma; give each a label",
        (good, "--returns", "greedy"): "has no evaluation returns",
        (good, "--scale", "CartPol-v1", "0", "1"): "no run is on CartPol-v1, only on CartPole-v1",
        (good, "--scale", "CartPole-v1", "0", "many"): "--scale",
        (good, "--scale", "CartPole-v1", "5", "5"): "LOW must be less than HIGH",
        (good, "--scale", *["CartPole-v1", "0", "5"] * 2): "scale: CartPole-v1 is given twice",
        (good, "--out", f"{good}/config.yaml"): "config.yaml",
        (good, "--returns", "best"): "--returns",
        (): "runs: give at least one DIR",
    }
    for args, message in cases.items():
        assert message in refusal(["compare", *args], capfd)


def test_a_new_directory_for_each_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = make_run(tmp_path / "a=b", rng.normal(size=4), lr=0.1)
    second = make_run(tmp_path / "c", rng.normal(size=4), lr=0.2)
    __main__.main(["compare", first, second])
    (out,) = (tmp_path / "runs").glob("compare-*")
    assert {path.name for path in out.iterdir()} == {"compare.csv", "compare.png"}
