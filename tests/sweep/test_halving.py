"""`onejit sweep --halving`: which trials go on, how they train, and resuming."""

import contextlib
import dataclasses
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.files import ROOT
from support.returns import is_mean_with_running
from support.strategies import decide
from support.sweeps import before_compilations, metrics_of, record_of, rows_of
from support.tiers import slow
from support.trees import assert_same

from onejit import resume, sweep
from onejit.base import files, statistics
from onejit.engine import compilation
from onejit.script import load
from onejit.sweep import halving, proposals, slices, strategies
from onejit.sweep.trials import sort_trials

pytestmark = pytest.mark.usefixtures("quick_pictures_in_module")

SMALL = ["q_learning_gridworld", "--num-steps=200", "--total-timesteps=5400"]  # 27 updates
SMALL += ["--height=4", "--width=6", "--start", "3", "5", "--step-reward=-1", "--epsilon=0.3"]
SMALL += ["--max-steps-in-episode=50", "--num-seeds=2"]
RATES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]
SWEEP = [*SMALL, "--lr", *map(str, RATES)]
HALVING = [*SWEEP, "--halving=3"]


@pytest.fixture(scope="module", autouse=True)
def compiled_for():
    """Slices of the same size in all sweeps, whose runs can then agree bit for bit.

    A slice may end within the seeds of a trial. In later rungs, which have few runs, slices are
    padded. The list has the number of runs for which each program was compiled.
    """
    totals = []

    def four_runs(compile_size, total, *_):
        totals.append(total)
        return compile_size(4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "largest_slice", four_runs)
        yield totals


def run(words, run_dir: Path) -> Path:
    return sweep.main([*words, f"--run-dir={run_dir}"])


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A sweep without halving."""
    return run(SWEEP, tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def watched(tmp_path_factory, compiled_for):
    """9 trials to update 3, 3 trials to update 9, 1 trial to update 27.

    And what the sweep has printed, and for how many runs it has compiled programs.
    """
    compiled_for.clear()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_dir = run(HALVING, tmp_path_factory.mktemp("halved") / "run")
    return run_dir, said.getvalue(), list(compiled_for)


@pytest.fixture(scope="module")
def halved(watched):
    return watched[0]


def test_trials_of_equal_interquartile_mean_are_ranked_by_their_mean():
    """As on CartPole-v1, whose returns are at most 500. Equal trials stay in their order."""
    returns = {
        0: [500.0, 500.0, 500.0, 118.0],
        1: [500.0, 500.0, 500.0, 499.0],
        2: [490.0, 490.0, 490.0, 490.0],
        3: [500.0, 500.0, 500.0, 499.0],
        4: [500.0, 500.0, 500.0, -np.inf],
        5: [-np.inf, -np.inf, -np.inf, 500.0],
    }
    returns = {trial: np.array(of_trial) for trial, of_trial in returns.items()}
    trials = list(returns)
    assert sort_trials(trials, returns, dict.fromkeys(trials, 0)) == [1, 3, 0, 4, 2, 5]


def best_of(metrics: dict, trials: list[int], end: int, number: int) -> list[int]:
    """The best trials by the interquartile mean of the return in the last stretch before `end`.

    Plain loops over what a full sweep has measured.
    """
    num_updates = metrics["episodes"].shape[2]
    width = num_updates - num_updates * 9 // 10
    means = {}
    for trial in trials:
        of_seeds = []
        for seed in range(metrics["episodes"].shape[1]):
            episodes = metrics["episodes"][trial, seed, max(0, end - width) : end]
            returns = metrics["episodic_return"][trial, seed, max(0, end - width) : end]
            of_seeds.append(sum(n * r for n, r in zip(episodes, returns, strict=True) if n))
            of_seeds[-1] /= episodes.sum()
        means[trial] = statistics.interquartile_mean(np.array(of_seeds))
    return sorted(trials, key=lambda trial: (-means[trial], trial))[:number]


# --- which trials go on, and how they train ---


def test_the_best_third_goes_on(full, halved):
    """Chosen by what a full sweep has measured up to each rung."""
    metrics = metrics_of(full)
    three = best_of(metrics, list(range(9)), 3, 3)
    (one,) = best_of(metrics, three, 9, 1)
    reached = {int(row["trial"]): int(row["trial_rung"]) for row in rows_of(halved)}
    expected = dict.fromkeys(range(9), 1) | dict.fromkeys(three, 2) | {one: 3}
    assert reached == expected
    assert set(best_of(metrics, list(range(9)), 27, 3)) != set(three)  # the end would say another


def test_trials_train_as_in_a_full_sweep(full, halved):
    """Bit for bit, up to the rung that they have reached; then there is nothing."""
    metrics = metrics_of(halved)
    whole = metrics_of(full)
    for row in rows_of(halved):
        trial = int(row["trial"])
        end = int(row["trial_updates"])
        assert end == [3, 9, 27][int(row["trial_rung"]) - 1]
        for name in set(metrics) - {"steps_per_update", "warmup_timesteps"}:
            assert metrics[name][trial, :, :end].tobytes() == whole[name][trial, :, :end].tobytes()
        assert not metrics["episodes"][trial, :, end:].any()
        assert np.isnan(metrics["q_value"][trial, :, end:]).all()


@pytest.mark.slow
def test_schedules_are_those_of_the_full_budget(tmp_path):
    """A rate that falls to 0 at the end of the budget, not at the end of a rung."""
    words = [
        *["ppo", "--num-envs=4", "--num-steps=8", "--num-minibatches=1", "--hidden-sizes", "8"],
        *["--total-timesteps=288", "--anneal-lr=True", "--num-seeds=2", "--lr", "0.001", "0.1"],
    ]
    whole = metrics_of(run(words, tmp_path / "full"))
    halved = run([*words, "--halving=2", "--rungs=2"], tmp_path / "halved")
    metrics = metrics_of(halved)
    (survivor,) = {row["trial"] for row in rows_of(halved) if row["trial_updates"] == "9"}
    for name in ("policy_loss", "value_loss", "entropy"):
        assert_same(metrics[name][int(survivor)], whole[name][int(survivor)])


def test_one_program_for_each_rung(watched):
    run_dir, said, totals = watched
    assert totals == [18, 6, 2]
    assert record_of(run_dir)["slices"] == [4, 4, 4]
    assert "halving: 9 trials to 600, 3 trials to 1,800, 1 trial to 5,400 timesteps" in said
    for rung, updates in enumerate(("0 to 3", "3 to 9", "9 to 27"), start=1):
        assert f"rung {rung}" in said and f"updates {updates} of 27" in said


@pytest.mark.slow
def test_two_devices(halved, tmp_path):
    """Trials that go on are gathered from both devices, with the numbers of one device."""
    command = [sys.executable, "-m", "onejit", "sweep", *HALVING, f"--run-dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"})
    assert "2 x cpu" in record_of(tmp_path / "run")["device"]
    assert record_of(tmp_path / "run")["slices"] == [18, 6, 2]
    of_two = metrics_of(tmp_path / "run")
    for name, values in metrics_of(halved).items():
        np.testing.assert_allclose(of_two[name], values, rtol=1e-3)


# --- results ---


def test_rung_and_rank_in_the_table(halved):
    header, *lines = (halved / "table.txt").read_text().splitlines()
    assert header.split()[-1] == "rung"
    rungs = [int(line.split()[-1]) for line in lines]
    assert rungs == [3, 2, 2, 1, 1, 1, 1, 1, 1]
    rank = {int(row["trial"]): int(row["trial_rank"]) for row in rows_of(halved)}
    assert [rank[int(line.split()[0])] for line in lines] == list(range(1, 10))
    for first, last in ((1, 3), (3, 9)):  # within a rung
        means = [float(line.split()[2]) for line in lines[first:last]]
        assert means == sorted(means, reverse=True)
    best = yaml.safe_load((halved / "best.yaml").read_text())
    assert best["lr"] == float(lines[0].split()[1])


def test_returns_are_those_of_the_rung(halved):
    """The last stretch before the rung's end, as long as the last tenth of the full budget.

    Long running episodes count as well.
    """
    metrics = metrics_of(halved)
    for row in rows_of(halved):
        end = int(row["trial_updates"])
        where = (int(row["trial"]), int(row["seed"]), slice(end - 3, end))
        episodes = metrics["episodes"][where]
        total = np.nansum(episodes * metrics["episodic_return"][where])
        assert is_mean_with_running(float(row["final_return"]), total, episodes.sum())


def test_what_is_left_in_the_directory(full, halved):
    names = {path.name for path in halved.iterdir()}
    assert names - {path.name for path in full.iterdir()} == {"halving.png"}
    assert (halved / "halving.png").read_bytes().startswith(b"\x89PNG")
    record = record_of(halved)
    assert record["steps_done"] == record["steps_total"] == (9 * 3 + 3 * 6 + 1 * 18) * 2 * 200
    ranked = [line.split()[0] for line in (halved / "table.txt").read_text().splitlines()[1:]]
    agents = {path.name for path in (halved / "agents").iterdir()}
    assert agents == {f"trial-{trial}" for trial in ranked[:5]}
    for trial, updates in zip(ranked[:5], [27, 9, 9, 3, 3], strict=True):
        assert record_of(halved / "agents" / f"trial-{trial}")["num_updates"] == updates


def test_the_kept_agents_are_those_of_the_last_rung(full, halved):
    """Not of a rung before, whose agents are on the disk for a while, too."""
    ranked = [line.split()[0] for line in (halved / "table.txt").read_text().splitlines()[1:]]
    best_of_full = {path.name for path in (full / "agents").iterdir()}
    assert f"trial-{ranked[0]}" in best_of_full
    agent = Path("agents") / f"trial-{ranked[0]}" / "agent.safetensors"
    assert (halved / agent).read_bytes() == (full / agent).read_bytes()


@pytest.mark.slow
def test_groups_and_environments(tmp_path):
    """Trials of all compile groups compete, and trials of different environments do not."""
    words = [
        *["ppo", "--num-steps=8", "--num-minibatches=1", "--hidden-sizes", "8"],
        *["--total-timesteps=1024", "--num-envs", "4", "8", "--lr", "0.001", "0.01"],
        *["--env-name", "CartPole-v1", "Catch-bsuite", "--num-seeds=2", "--halving=2"],
    ]
    rows = rows_of(run(words, tmp_path / "run"))
    for env_name in ("CartPole-v1", "Catch-bsuite"):
        mine = {row["trial"]: row for row in rows if row["env_name"] == env_name}
        assert sorted(int(row["trial_rung"]) for row in mine.values()) == [1, 1, 2, 3]
        for row in mine.values():
            steps = int(row["num_envs"]) * 8 * int(row["trial_updates"])
            assert steps == [256, 512, 1024][int(row["trial_rung"]) - 1]


@pytest.mark.slow
def test_rungs_before_any_episode_has_ended(tmp_path, capfd):
    """There is nothing to choose by: one line, instead of trials in the order of their numbers."""
    words = ["q_learning_gridworld", "--num-steps=10", "--total-timesteps=900", "--num-seeds=2"]
    words += ["--height=30", "--width=30", "--start", "29", "29", "--max-steps-in-episode=500"]
    words += ["--halving=3"]
    with pytest.raises(SystemExit) as stop:
        run([*words, "--lr", "0.1", "0.2", "0.3", "--rungs=2"], tmp_path / "run")
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert "rungs: no episode has ended in 300 timesteps" in message


@pytest.mark.parametrize(("episodes", "expected"), [([[0, 0], [0, 1]], True), ([[0, 0]], False)])
def test_any_episode(episodes, expected, tmp_path):
    """One that has ended, in one update of one run, is enough."""
    (tmp_path / "slices").mkdir()
    for first in (0, 2):
        file = tmp_path / "slices" / f"{slices.slice_name(3, first, first + 2)}.npz"
        np.savez(file, episodes=np.array(episodes) * (first > 0))
    assert halving.any_episode(SimpleNamespace(run_dir=tmp_path), [1, 3]) == expected


# --- Optuna ---


@pytest.mark.slow
def test_each_batch_of_optuna_is_a_bracket(stop_at, tmp_path):
    """Also in a sweep that is stopped and resumed."""
    words = [*SMALL, "--lr", "uniform", "0.01", "1", "--optuna=tpe", "--samples=10", "--batch=4"]
    words += ["--halving=2"]
    whole = run(words, tmp_path / "whole")
    rows = {int(row["trial"]): int(row["trial_rung"]) for row in rows_of(whole)}
    assert [sorted(rows[i] for i in batch) for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])] == [
        [1, 1, 2, 3],
        [1, 1, 2, 3],
        [1, 3],
    ]
    record = record_of(whole)
    assert record["steps_done"] == record["steps_total"]
    assert record["slices"] == [4, 4, 4]  # each rung has compiled once
    stop_at(record["steps_total"] * 3 // 4)
    with pytest.raises(SystemExit):
        run(words, tmp_path / "run")
    resume.main(tmp_path / "run")
    assert_same_results(tmp_path / "run", whole)


def test_the_last_batch_may_be_too_small_for_rungs():
    """Of nine trials in batches of four, the last one trains to the end."""
    words = [*SMALL, "--lr", "uniform", "0.01", "1", "--optuna=tpe", "--samples=9", "--batch=4"]
    request = sweep.read_sweep([*words, "--halving=2"], None)
    updates_of_four = 4 * 6 + 2 * (13 - 6) + (27 - 13)
    steps = (2 * updates_of_four + 27) * 200 * request.options.num_seeds
    assert strategies.make_plan(request).steps == steps


@pytest.mark.parametrize("sampler", ["tpe", slow("cmaes")])
def test_optuna_knows_which_trials_stopped(sampler):
    """They are pruned at the update of their rung, with their return."""
    words = [*SMALL, "--lr", "log-uniform", "1e-4", "1", "--gamma", "uniform", "0.5", "1"]
    words += [f"--optuna={sampler}", "--samples=48", "--batch=8", "--halving=2"]
    request = sweep.read_sweep(words, None)
    studies = []
    make_study = proposals.make_study
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proposals,
            "make_study",
            lambda request: studies.append(make_study(request)) or studies[0],
        )
        patch.setattr(halving, "any_episode", lambda *_: True)
        decide(request, lambda trial: -abs(np.log10(request.trials.values[trial]["lr"]) + 2))
    (study,) = studies
    assert not study.user_attrs  # no lease on a study that no other sweep has
    states = [trial.state.name for trial in study.trials]
    assert states.count("PRUNED") == 6 * 7 and states.count("COMPLETE") == 6
    for trial in study.trials:
        (value,) = trial.values
        assert value == pytest.approx(-abs(np.log10(trial.params["lr"]) + 2))
        if trial.state.name == "PRUNED":
            assert list(trial.intermediate_values) in ([3], [6], [13])


# --- where the rungs are ---


@pytest.mark.parametrize(
    "options, num_trials, ends",
    [
        ({}, 9, [3, 9, 27]),
        ({}, 8, [9, 27]),
        ({}, 81, [1, 3, 9, 27]),  # a fifth rung would have no update
        ({"rungs": 2}, 9, [9, 27]),
        ({"rungs": 4}, 9, [1, 3, 9, 27]),
    ],
)
def test_ends_of_rungs(options, num_trials, ends):
    script = load.load_script("q_learning_gridworld")
    config = dataclasses.replace(script.Config(), num_steps=200, total_timesteps=5400)
    options = sweep.Options(halving=3, **options)
    groups = [SimpleNamespace(config=config)]
    assert halving.ends_of_rungs(config, options, num_trials, groups) == ends


def test_all_groups_have_the_rungs_of_the_one_with_the_longest_updates():
    """27 updates of 200 steps would allow four rungs, and 6 of 900 allow two."""
    config = load.load_script("q_learning_gridworld").Config()
    config = dataclasses.replace(config, num_steps=200, total_timesteps=5400)
    longer = dataclasses.replace(config, num_steps=900)
    options = sweep.Options(halving=3)
    groups = [SimpleNamespace(config=config), SimpleNamespace(config=longer)]
    assert halving.ends_of_rungs(config, options, 81, groups) == [9, 27]
    assert halving.ends_of_rungs(longer, options, 81, groups) == [2, 6]


def test_rungs_count_the_warm_up():
    config = dataclasses.replace(load.load_script("dqn").Config(), total_timesteps=90_000)
    options = sweep.Options(halving=3, rungs=2)
    steps = config.num_envs * config.num_steps
    assert config.warmup_timesteps > 0
    expected = (30_000 - config.warmup_timesteps) // steps
    groups = [SimpleNamespace(config=config)]
    assert halving.ends_of_rungs(config, options, 9, groups) == [expected, config.num_updates]


# --- resuming ---


def assert_same_results(run_dir: Path, other: Path) -> None:
    assert_same(metrics_of(run_dir), metrics_of(other))
    for name in ("results.csv", "table.txt", "best.yaml"):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes()
    for path in other.glob("agents/*/agent.safetensors"):
        assert path.read_bytes() == (run_dir / path.relative_to(other)).read_bytes()
    names = {path.relative_to(run_dir) for path in run_dir.rglob("*")}
    assert names == {path.relative_to(other) for path in other.rglob("*")}


def test_stopped_and_resumed(halved, stop_at, tmp_path, monkeypatch):
    """Within the third rung. Nothing of the rungs before is compiled again."""
    stop_at((27 + 18 + 4) * 2 * 200)
    with pytest.raises(SystemExit) as stop:
        run(HALVING, tmp_path / "run")
    assert stop.value.code == 143
    before = record_of(tmp_path / "run")
    assert before["steps_done"] < before["steps_total"]
    compiled = []
    before_compilations(monkeypatch, lambda size, _: compiled.append(size))
    resume.main(tmp_path / "run")
    assert compiled == [4]
    assert_same_results(tmp_path / "run", halved)


@pytest.mark.slow
def test_killed_while_checkpoints_of_a_rung_are_deleted(halved, tmp_path, monkeypatch):
    calls = []

    def rmtree(path, ignore_errors=False):
        if path.exists() and path.parent.name == "unfinished":
            calls.append(path)
        if len(calls) == 2:  # a file of the second folder
            next(file for file in path.rglob("*") if file.is_file()).unlink()
            raise KeyboardInterrupt
        shutil.rmtree(path, ignore_errors)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(files, "shutil", SimpleNamespace(rmtree=rmtree))
        run(HALVING, tmp_path / "run")
    assert len(calls) == 2
    resume.main(tmp_path / "run")
    assert_same_results(tmp_path / "run", halved)


@pytest.mark.slow
def test_damaged_checkpoint_of_a_rung(halved, tmp_path, monkeypatch, capfd):
    """After a kill before the trials were chosen, without a last checkpoint.

    The runs of the slice are trained again from the checkpoint before it, or from the start.
    """

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(halving, "choose", interrupt)
        run([*HALVING, "--checkpoint-interval=1e-9"], tmp_path / "run")
    folder = tmp_path / "run" / "unfinished" / "0-0000004-0000008" / "3"
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-8])
    resume.main(tmp_path / "run")
    assert "0-0000004-0000008/3 is damaged" in capfd.readouterr().err
    assert_same_results(tmp_path / "run", halved)
