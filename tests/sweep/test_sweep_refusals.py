"""What `onejit sweep` refuses: in one line, and without leaving a directory."""

import sys

import pytest

from onejit import sweep

SMALL = "q_learning_gridworld --num-steps=200 --total-timesteps=5400"  # 27 updates
SWEEP = f"{SMALL} --lr 0.01 0.02 0.05 0.1 0.2 0.3 0.5 0.8 1.0"
DRAWN = f"{SMALL} --lr log-uniform 0.01 1 --samples=8"
OPTUNA = f"{DRAWN} --optuna=tpe"


def check_refused(command, words, run_dir, capfd):
    """The message is one line with all words, the exit code is 2, and there is no `run_dir`."""
    with pytest.raises(SystemExit) as stop:
        sweep.main([*command.split(), f"--run-dir={run_dir}"])
    message = capfd.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1 and message.startswith("onejit sweep: error: "), message
    for word in words.split():
        assert word in message, message
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        # fields and their values
        ("pppo --lr 0.1 0.2", "pppo did you mean ppo"),
        (SMALL, "nothing to sweep over"),
        (f"{SMALL} --lr", "lr"),
        (f"{SMALL} --lr 0.1 fast", "lr fast"),
        (f"{SMALL} --lr 0.1 0.10", "lr twice"),
        (f"{SMALL} --lr 0.1 0.2 --lr=0.3", "lr twice"),
        (f"{SMALL} --gama 0.1 0.2", "gama did you mean gamma"),
        (f"{SMALL} --max-steps-in-episode=50 stray --lr 0.1 0.2", "max-steps-in-episode stray"),
        ("q_learning_gridworld stray --lr 0.1 0.2", "stray"),
        ("ppo --env-name CartPole-v1 Nowhere", "env_name Nowhere"),
        ("q_learning_gridworld --num-steps 200 0", "num_steps 1"),
        (
            "q_learning_gridworld --num-steps 200 3000 --total-timesteps=2000",
            "total_timesteps 3000",
        ),
        ("q_learning_gridworld --num-steps log-uniform 10 20 --samples=2", "num_steps float"),
        (
            f"{SMALL} --lr log-uniform 1 0.01 --samples=2",
            "lr: log-uniform 1 0.01 needs 0 < LOW < HIGH",
        ),
        # options
        (f"{SMALL} --lr log-uniform 0.1 0.2", "lr: log-uniform needs --samples, draw"),
        (f"{SWEEP} --samples=2", "samples = 2: needs uniform --optuna"),
        (f"{SMALL} --lr uniform 0.1 0.2 --samples=0", "samples = 0: must be at least 1"),
        (f"{SWEEP} --keep=-1", "keep = -1"),
        (f"{SWEEP} --memory=1e-9", "memory GiB"),
        (f"{SWEEP} --process-id=0", "coordinator"),
        # --optuna and --storage
        (f"{SWEEP} --optuna=tpe", "optuna = tpe: needs --samples, trials"),
        (f"{SWEEP} --batch=4", "batch = 4: goes with --optuna"),
        (f"{OPTUNA} --batch=0", "batch = 0: must be at least 1"),
        (f"{DRAWN} --optuna=cmaes", "cmaes two tpe"),
        (f"{OPTUNA} --random-starts True False", "random_starts float"),
        (f"{SWEEP} --storage=study.log", "storage = study.log: --optuna"),
        (f"{OPTUNA} --storage=/nowhere/at/all/study.log", "storage = /nowhere cannot be opened"),
        (f"{OPTUNA} --storage=nodb://host/x", "storage = nodb://host/x: cannot be opened"),
        (f"{OPTUNA} --storage=", "storage: needs a file"),
        (f"{SWEEP} --optuna=grid", "optuna = grid: needs --storage"),
        (f"{DRAWN} --optuna=grid --storage=study.log", "lr: lists --optuna random"),
        # --halving
        (f"{SWEEP} --halving=1", "halving = 1: at least 2"),
        (f"{SWEEP} --halving=10", "halving = 10: at least 10 trials there are 9"),
        (f"{OPTUNA} --batch=2 --halving=3", "halving = 3: at least 3 trials there are 2"),
        (f"{SWEEP} --rungs=2", "rungs = 2: goes with --halving"),
        (f"{SWEEP} --first-rung=1000", "first_rung = 1000: goes with --halving"),
        (f"{SWEEP} --halving=3 --rungs=1", "rungs = 1: at least 2"),
        (f"{SWEEP} --halving=3 --rungs=5", "rungs = 5: more than 4"),
        (f"{SWEEP} --halving=3 --rungs=2 --first-rung=1000", "first_rung = 1000: --rungs"),
        (f"{SWEEP} --halving=3 --first-rung=100", "first_rung = 100: at least 200"),
        (f"{SWEEP} --halving=3 --first-rung=0", "first_rung = 0: at least 200"),
        (
            "q_learning_gridworld --num-steps=200 --total-timesteps=5500 --lr 0.1 0.2 0.3"
            " --halving=3 --first-rung=5450",
            "first_rung = 5450: the last rung no update",
        ),
        (
            f"{SWEEP} --halving=3 --first-rung=5400",
            "first_rung = 5400: below total_timesteps = 5400",
        ),
        (
            "q_learning_gridworld --num-steps=200 --total-timesteps=400 --lr 0.1 0.2 0.3"
            " --halving=3",
            "halving = 3: total_timesteps = 400 few updates",
        ),
        (
            "q_learning_gridworld --total-timesteps 5400 9000 --lr 0.1 0.2 --halving=2",
            "total_timesteps: --halving",
        ),
        # what an older version took
        (f"{DRAWN} --pbt", "--pbt: is gone examples/population.py"),
        (f"{DRAWN} --exploit-interval=3", "--exploit-interval: is gone examples/population.py"),
        (f"{SWEEP} --part=1/4", "--part: is gone --storage --optuna grid"),
        ("--merge a b", "--merge: is gone onejit compare"),
        ("--replay /nowhere", "--replay: is gone examples/population.py"),
    ],
)
def test_refuses(command, words, tmp_path, capfd):
    check_refused(command, words, tmp_path / "run", capfd)


@pytest.mark.parametrize(
    ("option", "package"),
    [("--optuna=tpe", "optuna"), ("--optuna=cmaes", "cmaes"), ("--track=wandb", "wandb")],
)
def test_package_that_is_missing(option, package, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    command = f"{DRAWN} --gamma uniform 0.5 1 {option}"
    check_refused(command, f"pip install {package}", tmp_path / "run", capfd)
