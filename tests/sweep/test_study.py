"""Sweeps on several machines, which share a study of Optuna's: `--storage`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from optuna.trial import TrialState
from support.files import ROOT
from support.strategies import decide
from support.sweeps import record_of, rows_of
from support.tiers import slow

from onejit import resume, sweep
from onejit.report import compare
from onejit.sweep import halving
from onejit.sweep import options as sweep_options
from onejit.sweep import study as shared_study
from onejit.sweep.opening import read_sweep
from onejit.sweep.trials import Trials

pytestmark = pytest.mark.usefixtures("quick_pictures_in_module")

SMALL = ["q_learning_gridworld", "--num-steps=200", "--total-timesteps=2000", "--num-seeds=2"]
SMALL += ["--height=4", "--width=6", "--start", "3", "5", "--epsilon=0.3"]
SMALL += ["--max-steps-in-episode=50"]


def begun(words):
    """The request of a new sweep, with its record but without training."""
    return read_sweep(words, None)


# --- a study that several sweeps share ---

OPTUNA = [*SMALL, "--lr", "log-uniform", "1e-4", "1", "--optuna=tpe", "--samples=6", "--batch=3"]


def study_of(name: str):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.load_study(study_name="onejit", storage=shared_study.open_storage(name))


def states_of(name: str) -> list[str]:
    return [trial.state.name for trial in study_of(name).trials]


def train(request, stop_after: int | None = None) -> None:
    """Give each proposal a return, as if it had been trained. Stops in the batch `stop_after`."""
    values = request.trials.values
    decide(request, lambda trial: -abs(np.log10(values[trial]["lr"]) + 2), stop_after)


@pytest.fixture(params=["journal", slow("sqlite")])
def shared(request, tmp_path):
    """A file, and the URL of a database."""
    if request.param == "journal":
        return str(tmp_path / "study.log")
    return f"sqlite:///{tmp_path / 'study.db'}"


def test_two_sweeps_share_a_study(shared):
    """Each trains batches of its own, and no two trials are the same."""
    requests = [begun([*OPTUNA, f"--storage={shared}"]) for _ in range(2)]
    for request in requests:
        train(request)
    trials = [trial["lr"] for request in requests for trial in request.trials.values]
    assert len(set(trials)) == 12
    study = study_of(shared)
    assert sorted(trial.params["lr"] for trial in study.trials) == sorted(trials)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    for trial in study.trials:
        assert trial.value == pytest.approx(-abs(np.log10(trial.params["lr"]) + 2))
    assert [request.record.numbers for request in requests] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_study_of_another_search_is_refused(direction, tmp_path):
    """`optuna create-study` minimizes by default: the sweep searched the worst settings."""
    name = str(tmp_path / "study.log")
    of_others = optuna.create_study(
        study_name="onejit", storage=shared_study.open_storage(name), direction=direction
    )
    if direction == "maximize":
        of_others.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=1)
    words = {"minimize": "does not maximize", "maximize": "trials of another search"}
    with pytest.raises(ValueError, match=f"study.log: its study onejit .*{words[direction]}"):
        train(begun([*OPTUNA, f"--storage={name}"]))


def test_trials_of_a_sweep_that_died_are_failed(shared, monkeypatch):
    """When its lease has ended, and not before."""
    dead = begun([*OPTUNA, f"--storage={shared}"])
    train(dead, stop_after=1)
    assert states_of(shared) == ["COMPLETE"] * 3 + ["RUNNING"] * 3
    train(begun([*OPTUNA, f"--storage={shared}"]))
    assert states_of(shared) == ["COMPLETE"] * 3 + ["RUNNING"] * 3 + ["COMPLETE"] * 6
    monkeypatch.setattr(shared_study, "LEASE", 0.2)
    time.sleep(0.3)
    train(begun([*OPTUNA, f"--storage={shared}"]))
    assert states_of(shared) == ["COMPLETE"] * 3 + ["FAIL"] * 3 + ["COMPLETE"] * 12


def test_a_lease_is_renewed(shared, monkeypatch):
    monkeypatch.setattr(shared_study, "LEASE", 0.5)
    train(begun([*OPTUNA, f"--storage={shared}"]))
    study = study_of(shared)
    with shared_study.holding_lease(study, "me"):
        first = study.user_attrs["me"]
        time.sleep(0.4)
        assert study.user_attrs["me"] > first
    last = study.user_attrs["me"]
    time.sleep(0.2)
    assert study.user_attrs["me"] == last


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("study.log", "{}/study.log"),
        ("sqlite:///$FOLDER/study.db", "sqlite:///{}/study.db"),
        ("sqlite:////db/study.db", "sqlite:////db/study.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("postgresql://user:word@host/rl", "postgresql://user:word@host/rl"),
    ],
)
def test_a_storage_is_found_from_any_folder(given, expected, tmp_path, monkeypatch):
    """Resuming in another folder made a second, empty study."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLDER", str(tmp_path))
    request = begun([*OPTUNA, "--storage", given])
    options = request.options
    assert options.storage == expected.format(tmp_path)
    assert request.record.options["storage"] == options.storage  # what resuming reads


def test_a_lock_of_a_killed_sweep(tmp_path, monkeypatch):
    """Optuna waited for ever for a lock that was left on a relative path in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/study.log").touch()
    Path("runs/study.log.lock").symlink_to("runs/study.log")
    train(begun([*OPTUNA, "--storage=runs/study.log"]))
    assert states_of("runs/study.log") == ["COMPLETE"] * 6


def test_a_storage_that_is_away(shared, monkeypatch):
    """For a moment: the sweep goes on. For longer than a lease: one line."""
    failures = [OSError("no route to host")] * 2
    ask = optuna.Study.ask

    def ask_or_fail(self, *args):
        if failures:
            raise failures.pop()
        return ask(self, *args)

    monkeypatch.setattr(shared_study, "LEASE", 5.0)
    monkeypatch.setattr(optuna.Study, "ask", ask_or_fail)
    train(begun([*OPTUNA, f"--storage={shared}"]))
    assert states_of(shared) == ["COMPLETE"] * 6
    failures += [OSError("no route to host")] * 1000
    monkeypatch.setattr(shared_study, "LEASE", 0.1)
    with pytest.raises(OSError, match=r"away \(no route to host\); `onejit resume` continues"):
        train(begun([*OPTUNA, f"--storage={shared}"]))


def test_a_study_names_what_was_proposed(shared):
    """Optuna's own tools show its parameters: 1 - gamma is none of the name gamma."""
    words = ["--gamma", "one-minus-log-uniform", "0.9", "0.999"]
    request = begun([*OPTUNA, *words, f"--storage={shared}"])
    train(request)
    for trial, values in zip(study_of(shared).trials, request.trials.values, strict=True):
        assert set(trial.params) == {"lr", "one_minus_gamma"}
        assert trial.user_attrs["gamma"] == values["gamma"] == 1 - trial.params["one_minus_gamma"]
        assert 0.9 <= values["gamma"] <= 0.999


def test_passwords_are_not_printed():
    for name in ("sqlite:///a.db", "study.log", "a@b/study.log"):
        assert sweep_options.without_password(name) == name
    for user in ("me:SECRET@", "me:SEC/RET@", "me:SEC@RET@", "SECRET@"):
        name = f"nodb://{user}host/rl?password=SECRET"
        assert sweep_options.without_password(name) == "nodb://host/rl"
        with pytest.raises(ValueError, match="storage = nodb://host/rl: cannot be opened") as error:
            shared_study.open_storage(name)
        assert "SEC" not in str(error.value)


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_resumed_sweep_tells_its_results(shared, is_failed, monkeypatch):
    """Each result is told once, even if its trial was marked as failed in the meantime."""
    request = begun([*OPTUNA, f"--storage={shared}"])
    train(request, stop_after=1)
    if is_failed:
        with monkeypatch.context() as patch:
            patch.setattr(shared_study, "LEASE", 0.0)
            shared_study.fail_expired(study_of(shared))
    for _ in range(2):
        resumed = request._replace(trials=Trials([]))
        train(resumed)
        study = study_of(shared)
        complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
        assert sorted(trial.params["lr"] for trial in complete) == sorted(
            trial["lr"] for trial in resumed.trials.values
        )
        assert len(study.trials) == (9 if is_failed else 6)
    for trial in complete:
        assert trial.value == pytest.approx(-abs(np.log10(trial.params["lr"]) + 2))


def test_a_trial_that_was_failed_while_it_trained_is_told(shared, monkeypatch):
    """As of a machine that slept for longer than a lease."""

    def return_of(trial):
        if trial == 0:
            with monkeypatch.context() as patch:
                patch.setattr(shared_study, "LEASE", 0.0)
                shared_study.fail_expired(study_of(shared))
        return trial

    decide(begun([*OPTUNA, f"--storage={shared}"]), return_of)
    assert states_of(shared) == ["FAIL"] * 3 + ["COMPLETE"] * 6


def test_a_resumed_sweep_tells_which_trials_stopped(shared):
    """With --halving: pruned trials, with the update at which they stopped."""
    words = [*OPTUNA, f"--storage={shared}", "--halving=3", "--rungs=2"]
    request = begun(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halving, "any_episode", lambda *_: True)
        decide(request, float, stop_after=2)  # after the rungs of the first batch
        decide(request._replace(trials=Trials([])), float)
    trials = [trial for trial in study_of(shared).trials if trial.state != TrialState.FAIL]
    assert sorted((trial.state.name, trial.value) for trial in trials) == [
        ("COMPLETE", 2.0),
        ("COMPLETE", 5.0),
        ("PRUNED", 0.0),
        ("PRUNED", 1.0),
        ("PRUNED", 3.0),
        ("PRUNED", 4.0),
    ]


def test_a_study_belongs_to_one_sweep(tmp_path):
    name = str(tmp_path / "study.log")
    train(begun([*OPTUNA, f"--storage={name}"]))
    train(begun([*OPTUNA, f"--storage={name}", "--seed=3"]))  # may differ
    for change, field in [("--num-seeds=3", "num_seeds"), ("--gamma=0.8", "gamma")]:
        words = [word for word in OPTUNA if not change.startswith(word.split("=")[0])]
        with pytest.raises(ValueError, match=f"belongs to a sweep with another {field}"):
            train(begun([*words, change, f"--storage={name}"]))


@pytest.mark.slow
def test_two_processes_on_one_study(tmp_path):
    """One is killed in its first batch. The other ends, and the study keeps no running trial."""
    study = tmp_path / "study.log"
    command = [sys.executable, "-m", "onejit", "sweep", *OPTUNA, f"--storage={study}"]
    longer = ["--total-timesteps=2000000", "--checkpoint-interval=0.5"]
    command = [word for word in command if not word.startswith("--total-timesteps")] + longer
    processes = []
    for name in ("killed", "left-alone"):
        words = [*command, f"--run-dir={tmp_path / name}"]
        processes.append(subprocess.Popen(words, start_new_session=True))
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("unfinished/*/*/*.npz")):
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.05)
    os.killpg(processes[0].pid, signal.SIGKILL)
    assert processes[0].wait() == -signal.SIGKILL
    assert processes[1].wait(timeout=300) == 0
    assert states_of(str(study)).count("COMPLETE") == 6
    resume.main(tmp_path / "killed")
    assert states_of(str(study)).count("COMPLETE") == 12
    assert "RUNNING" not in states_of(str(study))
    rates = [row["lr"] for name in ("killed", "left-alone") for row in rows_of(tmp_path / name)]
    assert len(set(rates)) == 12


# --- a grid that several sweeps share ---

GRID = [*SMALL, "--lr", "0.1", "0.5", "1e30", "--random-starts", "True", "False"]
GRID += ["--optuna=grid", "--batch=2"]


def points_of(request) -> list[tuple]:
    return [(trial["random_starts"], trial["lr"]) for trial in request.trials.values]


def test_sweeps_share_a_grid(shared):
    """Each point is trained once, in the order of compile groups, and all values stay exact."""
    first, second, third = (begun([*GRID, f"--storage={shared}"]) for _ in range(3))
    assert first.options.samples == 6
    train(first, stop_after=1)  # it has the points of two batches
    train(second)
    train(third)
    assert points_of(first) == [(True, 0.1), (True, 0.5), (True, 1e30), (False, 0.1)]
    assert points_of(second) == [(False, 0.5), (False, 1e30)]
    params = [trial.params for trial in study_of(shared).trials[-2:]]
    assert params == [{"lr": lr, "random_starts": False} for lr in (0.5, 1e30)]
    assert not third.trials.values
    assert states_of(shared) == ["COMPLETE"] * 2 + ["RUNNING"] * 2 + ["COMPLETE"] * 2
    train(first._replace(trials=Trials([])))  # resumed
    assert states_of(shared) == ["COMPLETE"] * 6


def test_a_point_that_two_sweeps_draw_at_once_counts_once(shared, monkeypatch):
    """Both have seen that nobody has it. The second trial of the study fails."""
    add_trial = optuna.Study.add_trial
    others = [begun([*GRID, f"--storage={shared}", "--samples=1"])]

    def add_after_another(study, trial):
        if others:
            train(others.pop(), stop_after=0)
        add_trial(study, trial)

    monkeypatch.setattr(optuna.Study, "add_trial", add_after_another)
    request = begun([*GRID, f"--storage={shared}"])
    train(request)
    assert points_of(request) == [
        (True, 0.5),
        (True, 1e30),
        *((False, lr) for lr in (0.1, 0.5, 1e30)),
    ]
    assert states_of(shared) == ["RUNNING", "FAIL"] + ["COMPLETE"] * 5


def test_points_of_a_sweep_that_died_are_free_again(shared, monkeypatch):
    train(begun([*GRID, f"--storage={shared}"]), stop_after=0)
    killed = begun([*GRID, f"--storage={shared}"])
    monkeypatch.setattr(shared_study, "LEASE", 0.2)
    time.sleep(0.3)
    train(killed)
    assert len(killed.trials.values) == 6
    assert states_of(shared) == ["FAIL"] * 2 + ["COMPLETE"] * 6


def test_a_claim_that_a_kill_left_out_of_the_record(shared):
    request = begun([*GRID, f"--storage={shared}", "--samples=2"])
    train(request, stop_after=0)
    request.record.numbers.clear()
    request.record.trials.clear()
    train(request._replace(trials=Trials([])))
    assert states_of(shared) == ["COMPLETE"] * 2


def test_one_table_of_all_machines(tmp_path, capsys):
    """`onejit compare` of their folders: each trial is a row, and best.yaml has the best one."""
    words = [*SMALL, f"--storage={tmp_path / 'study.log'}", "--lr", "0.1", "0.5", "1"]
    for name in ("a", "b"):
        run_dir = tmp_path / name
        sweep.main([*words, "--optuna=grid", "--batch=2", "--samples=2", f"--run-dir={run_dir}"])
    capsys.readouterr()
    sweep.main([*words, "--optuna=grid", f"--run-dir={tmp_path / 'c'}"])
    assert "nothing is left to do" in capsys.readouterr().out and not (tmp_path / "c").exists()
    shutil.copytree(tmp_path / "b", tmp_path / "copy")  # a point that two machines have trained
    runs = [str(tmp_path / name) for name in ("a", "b", "copy")]
    rows = compare.compare_runs(runs)
    of_trials = {row["lr"]: row for name in "ab" for row in rows_of(tmp_path / name)}
    means = {row["method"]: row for row in rows if row["statistic"] == "interquartile mean"}
    assert len(means) == len(rows) / 4 == 3
    for rate, row in of_trials.items():
        mean = means[f"q_learning_gridworld lr={float(rate)}"]
        assert mean["value"] == float(row["trial_interquartile_mean"]) and mean["seeds"] == "2"
    out = compare.main(tuple(runs), out=tmp_path / "compared")
    best = max(of_trials.values(), key=lambda row: float(row["trial_interquartile_mean"]))
    config = yaml.safe_load((out / "best.yaml").read_text())
    assert config["lr"] == float(best["lr"]) and "num_seeds" not in config


# --- docs/clusters.md ---

PROGRAMS = {
    "onejit": f'exec {sys.executable} -m onejit "$@"',
    "scontrol": 'echo "$@" >> $CALLS',
    # sends SIGTERM to the program when it trains, if STOP_IN is its run directory
    "srun": """
"$@" &
if [ -n "$STOP_IN" ]; then
    until ls $STOP_IN/unfinished/* > /dev/null 2>&1; do sleep 0.1; done
    sleep 1
    kill -TERM $!
fi
wait $!
""",
}


@pytest.mark.slow
def test_job_script(tmp_path):
    """As it is written, with small programs in place of SLURM's and a small script."""
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    page = (ROOT / "docs" / "clusters.md").read_text()
    (job,) = re.findall(r"(?ms)^```text\n(#!/bin/bash.*?)^```", page)
    small = "sweep q_learning_gridworld --num-steps 200 --total-timesteps 500000 "
    job = job.replace("/shared", str(tmp_path)).replace("--num-seeds 16", "--num-seeds 2")
    (tmp_path / "job.sh").write_text(job.replace("sweep ppo ", small))
    calls = tmp_path / "calls"

    def submit(task, **variables):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        variables |= {"PATH": path, "CALLS": str(calls), "SLURM_ARRAY_TASK_ID": task}
        subprocess.run(["bash", tmp_path / "job.sh"], env=os.environ | variables, timeout=500)

    run_dir = tmp_path / "sweeps" / "ppo" / "1"
    submit("1", SLURM_JOB_ID="7", STOP_IN=str(run_dir))
    assert calls.read_text() == "requeue 7\n"
    assert "finished" not in record_of(run_dir)
    submit("2", SLURM_JOB_ID="8")
    submit("1", SLURM_JOB_ID="7")
    assert calls.read_text() == "requeue 7\n" and "finished" in record_of(run_dir)
    assert states_of(str(tmp_path / "sweeps" / "ppo.log")) == ["COMPLETE"] * 12
