"""`onejit train`: as `main`, in slices, tracked, resumed, and on several processes that are
joined.
"""

import contextlib
import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro
from flax.traverse_util import flatten_dict
from support.event_files import events
from support.files import ROOT
from support.tiers import slow
from support.trees import assert_same

from onejit import __main__, sweep, train
from onejit.base import statistics
from onejit.engine import compilation, evaluation, hosts, loop
from onejit.engine.evaluation import evaluation_keys, policy_of
from onejit.engine.job import Job
from onejit.engine.memory import GIB
from onejit.engine.progress import progress_bar
from onejit.report import tracking
from onejit.run import lock as run_lock
from onejit.run.agents import read_agents
from onejit.run.directory import load_run
from onejit.run.lock import is_locked
from onejit.run.record import Record, make_record, read_record, write_record
from onejit.run.write import save_results
from onejit.script import command_line, configs, contract, load

SMALL = [
    "q_learning_gridworld",
    "--max-steps-in-episode=50",
    "--num-steps=100",
    "--random-starts=True",
]
SMALL += ["--goal", "4", "5", "--epsilon=0.5", "--step-reward=-0.01"]
SMALL += ["--total-timesteps=2000", "--eval-episodes=2", "--num-seeds=4"]  # 20 updates
NUM_UPDATES = 20
TIME_LIMIT = 180  # seconds; no run takes a tenth of it on an idle machine


def without(*names):
    """The words of SMALL without these flags, each of which has one word."""
    return [word for word in SMALL if word.split("=")[0] not in names]


def metrics_of(run_dir) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


def agents_of(run_dir) -> dict:
    return read_agents(run_dir / "agent.safetensors")[0]


def record_of(run_dir) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def assert_agree(metrics, others):
    """Over the first updates: differently compiled programs part later."""
    assert set(metrics) == set(others)
    for name in metrics:
        assert metrics[name].shape == others[name].shape
        np.testing.assert_allclose(metrics[name][:, :6], others[name][:, :6], rtol=1e-3, atol=1e-5)


def assert_same_results(run_dir, other):
    """Bit for bit, and no file more or less."""
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in other.iterdir()}
    assert_same(metrics_of(run_dir), metrics_of(other))
    assert_same(agents_of(run_dir), agents_of(other))
    for name in ("config.yaml", "evaluation.npy", "learning_curve.png"):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes(), name
    for name in ("final return", "greedy return"):
        assert record_of(run_dir)[name] == record_of(other)[name]


def main_of(script, words):
    """Run the script's own `main`."""
    words = configs.read_flags(script, [str(word) for word in words])
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    tyro.cli(script.main, args=words, config=markers)


@pytest.fixture(scope="module")
def script():
    return load.load_script(SMALL[0])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train.main([*SMALL, f"--run-dir={tmp_path_factory.mktemp('train') / 'run'}"])


@pytest.fixture(scope="module")
def by_main(script, tmp_path_factory):
    """The same run by the script itself."""
    run_dir = tmp_path_factory.mktemp("main") / "run"
    main_of(script, [*without("--eval-episodes")[1:], f"--run-dir={run_dir}"])
    return run_dir


# --- one process ---


def test_as_main(script, finished, by_main):
    assert_agree(metrics_of(finished), metrics_of(by_main))
    diff = (
        {"script.diff"}
        if load.git(ROOT / "ppo.py", "diff", "HEAD", "--", script.__file__)
        else set()
    )
    added = {path.name for path in finished.iterdir()} - {path.name for path in by_main.iterdir()}
    assert (
        added
        == {"run.json", "evaluation.npy", "checkpoints", "q_learning_gridworld.py", ".lock"} | diff
    )
    assert (finished / "config.yaml").read_text() == (by_main / "config.yaml").read_text()
    agents, others = (read_agents(path / "agent.safetensors") for path in (finished, by_main))
    assert agents[1] == others[1] == {"script": "q_learning_gridworld", "seed": "0"}
    assert {name: leaf.shape for name, leaf in agents[0].items()} == {
        name: leaf.shape for name, leaf in others[0].items()
    }
    assert not list(finished.rglob("*.partial"))


def test_record(script, finished):
    record, config = (
        record_of(finished),
        command_line.parse_with(script, SMALL[1:], train.Options, "")[0],
    )
    assert record["settings"] == json.loads(
        json.dumps(
            {"script": "q_learning_gridworld", "num_seeds": 4, "seed": 0} | configs.plain(config)
        )
    )
    assert (
        record["command"].startswith("onejit train q_learning_gridworld") and record["slice"] == 4
    )
    assert {"python", "jax", "jaxlib", "flax", "gymnax", "numpy"} <= set(record["versions"])
    assert record["random_keys"] == "threefry2x32"
    assert record["path"] == script.__file__ and len(record["sha256"]) == 64
    assert set(record["seconds"]) == {"compile", "train", "evaluate"}
    assert record["steps_per_second"] == pytest.approx(4 * 2000 / record["seconds"]["train"])
    returns = {"final return": statistics.final_return(metrics_of(finished))}
    returns["greedy return"] = np.load(finished / "evaluation.npy").mean(axis=1)
    for name, values in returns.items():
        middle = statistics.bootstrap_interval(statistics.interquartile_mean, values)
        mean = statistics.student_interval(values)
        numbers = dict(zip(("interquartile_mean", "low", "high"), middle, strict=True))
        numbers |= dict(zip(("mean", "mean_low", "mean_high"), mean, strict=True))
        numbers |= {
            "worst": values.min(),
            "seeds": 4,
            "not_finite": 0,
            "diverged": 0,
            "no_episode": 0,
        }
        assert record[name] == pytest.approx(numbers)


def test_seeds_that_diverged_are_said_and_rank_last(tmp_path, capsys):
    """The greedy action of a table of NaN is the first one, whose return is finite."""
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, "--lr=1e30", f"--run-dir={run_dir}"])
    assert stop.value.code == 1
    assert statistics.diverged(load_run(run_dir)[2]).all()
    assert np.isfinite(np.load(run_dir / "evaluation.npy")).all()
    said = capsys.readouterr()
    assert "greedy return: 4 seeds diverged" in said.out
    last = said.err.splitlines()[-1]
    assert last.startswith("onejit train: error: all seeds diverged") and str(run_dir) in last
    for name in ("final return", "greedy return"):
        found = record_of(run_dir)[name]
        assert found["diverged"] == found["not_finite"] == 4 and found["no_episode"] == 0
        assert [found[each] for each in ("mean", "worst", "interquartile_mean")] == [None] * 3


@pytest.mark.slow
def test_one_seed_has_no_interval(tmp_path, capsys):
    run_dir = train.main(
        [*without("--num-seeds"), "--num-seeds=1", f"--run-dir={tmp_path / 'run'}"]
    )
    for name in ("final return", "greedy return"):
        found = record_of(run_dir)[name]
        assert found["mean"] == found["interquartile_mean"] == found["worst"]
        assert [found[each] for each in ("low", "high", "mean_low", "mean_high")] == [None] * 4
    assert (
        " to "
        not in capsys.readouterr().out.partition("final return")[2].partition("results in")[0]
    )


def test_record_of_the_commit(tmp_path):
    """By its hash, a tag or not, and whether files had changed."""

    def git(*words):
        who = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
            "-c",
            "tag.gpgsign=false",
        ]
        command = ["git", "-C", tmp_path, *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def recorded():
        return make_record("train", script, script.Config(), train.Options(), []).commit

    path = shutil.copy(ROOT / "q_learning_gridworld.py", tmp_path / "copied_for_its_commit.py")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"], ["tag", "-am", "b", "v1"]):
        git(*words)
    script = load.load_script(str(path))
    assert recorded() == git("rev-parse", "HEAD")
    path.write_text(path.read_text() + "# changed\n")
    assert recorded() == f"{git('rev-parse', 'HEAD')}-dirty"


@pytest.mark.slow
def test_time_of_evaluation_is_not_that_of_training(tmp_path, monkeypatch):
    greedy_returns = evaluation.greedy_returns

    def slowly(script, config, options):
        def evaluate(agents, numbers):
            jax.debug.callback(lambda: time.sleep(1))
            return greedy_returns(script, config, options)(agents, numbers)

        return evaluate

    monkeypatch.setattr(evaluation, "greedy_returns", slowly)
    record = record_of(train.main([*SMALL, f"--run-dir={tmp_path / 'run'}"]))
    assert record["seconds"]["evaluate"] >= 1
    assert record["steps_per_second"] == pytest.approx(4 * 2000 / record["seconds"]["train"])


def test_evaluation_by_hand(finished):
    """Episodes played step by step, each with a key of its own."""
    script, config, agents = load_run(finished)
    (env, env_params), (start, act) = script.make_env(config), policy_of(script, config)
    evaluation = np.load(finished / "evaluation.npy")
    assert evaluation.shape == (4, 2) and len(np.unique(evaluation)) > 1
    step = jax.jit(env.step)
    for i in range(4):
        for number, key in enumerate(evaluation_keys(0, 2, agent=i)):
            agent, memory = jax.tree.map(lambda leaf, i=i: leaf[i], agents), start()
            reset_key, step_key = jax.random.split(key)
            obs, state = env.reset(reset_key, env_params)
            total = 0.0
            for each in jax.random.split(step_key, 50):
                action, memory = act(agent, memory, obs)
                obs, state, reward, terminated, truncated, _ = step(each, state, action, env_params)
                total += reward
                if terminated or truncated:
                    break
            assert total == pytest.approx(evaluation[i, number])


def test_others_may_read_the_agents(finished):
    """As far as the umask lets them; safetensors alone makes a file for its owner."""
    modes = {
        (finished / name).stat().st_mode & 0o777 for name in ("agent.safetensors", "metrics.npz")
    }
    assert len(modes) == 1


def test_progress_in_a_log_file_is_lines(capfd, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar(1000, disable=False) as progress:  # the tests' standard error is no terminal
        for _ in range(10):
            now[0] += 10.0
            progress.set_postfix_str("return 5", refresh=False)
            progress.update(100)
    said = capfd.readouterr().err.splitlines()
    first = "30.0% of 1,000 steps, 10 steps/s, 70 s left return 5"
    assert said[0] == first and said[-1].startswith("100.0% of 1,000 steps")
    assert len(said) == 4 and "\r" not in "".join(said)


@pytest.mark.slow
def test_speed_in_a_log_file_is_of_the_updates_of_this_session(
    finished, tmp_path, capfd, monkeypatch
):
    """Compiling and restoring take a thousand seconds here, each new update two, and 4 x 100
    steps.
    """
    copy = shutil.copytree(finished, tmp_path / "run")
    now, restore, make_reader = [0.0], loop.restore, loop.make_reader

    def restore_slowly(*args):
        now[0] += 1000.0
        return restore(*args)

    def read_slowly(program):
        read = make_reader(program)

        def slowly(metrics, first, last):
            now[0] += 2.0 * (last - first)
            return read(metrics, first, last)

        return slowly

    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(loop, "restore", restore_slowly)
    monkeypatch.setattr(loop, "make_reader", read_slowly)
    train.main(["--resume", copy, "--total-timesteps=4000"])
    assert now[0] == 1000.0 + 2.0 * NUM_UPDATES
    assert "\n100.0% of 16,000 steps, 200 steps/s return" in capfd.readouterr().err


def test_report_sees_what_main_shows_it(script, tmp_path, monkeypatch):
    """The directory holds the metrics then: a picture of the script's own may be of them."""
    seen = []
    monkeypatch.setattr(
        script, "report", lambda config, agents, run_dir: seen.append((agents, metrics_of(run_dir)))
    )
    train.main([*SMALL, f"--run-dir={tmp_path / 'tool'}"])
    main_of(script, [*without("--eval-episodes")[1:], f"--run-dir={tmp_path / 'main'}"])
    (agents, metrics), (others, _) = seen
    assert_same(metrics, metrics_of(tmp_path / "tool"))
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(agents)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)
    ]


def test_load_run(script, finished, by_main, tmp_path):
    """Also of a run that the script itself made, and from files alone: no checkpoint is read."""
    copy = shutil.copytree(
        finished, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")
    )
    for run_dir in (copy, by_main):
        loaded, config, agents = load_run(run_dir)
        assert Path(loaded.__file__).read_bytes() == Path(script.__file__).read_bytes()
        assert configs.plain(config) == configs.plain(
            command_line.parse_with(script, SMALL[1:], train.Options, "")[0]
        )
        assert_same(flatten_dict(agents, sep="."), agents_of(run_dir))
        assert all(
            isinstance(leaf, np.ndarray) and len(leaf) == 4 for leaf in jax.tree.leaves(agents)
        )
        settings = read_record(run_dir).settings
        assert (settings["script"], settings["num_seeds"], settings["seed"]) == (
            "q_learning_gridworld",
            4,
            0,
        )
    (copy / "agent.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"agent.safetensors: does not exist; it is written when a run ends"
    ):
        load_run(copy)
    with pytest.raises(ValueError, match="is not a run directory"):
        load_run(tmp_path)


def test_script_of_ones_own(tmp_path, monkeypatch):
    """By its path, with an environment of a module beside it; it is loaded again from anywhere."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "my_algorithm.py").write_text((ROOT / "ppo_continuous.py").read_text())
    toys = (
        (ROOT / "tests" / "toys.py")
        .read_text()
        .replace("register(toy.__name__", 'register("My" + toy.__name__')
    )
    # other tests have registered them under their own names
    (own / "toys_of_my_own.py").write_text(toys)
    args = [
        "--env-name=toys_of_my_own:MyToyContinuous",
        "--num-envs=4",
        "--num-steps=8",
        "--num-minibatches=2",
    ]
    args += [
        "--hidden-sizes",
        "8",
        "--total-timesteps=64",
        "--num-seeds=2",
        "--env-params",
        "max_steps_in_episode",
        "3",
    ]
    run_dir = train.main([str(own / "my_algorithm.py"), *args, f"--run-dir={tmp_path / 'run'}"])
    assert (np.load(run_dir / "evaluation.npy") == 3).all()
    monkeypatch.chdir(tmp_path)
    script, config, agents = load_run("run")
    assert script.__file__ == str(run_dir / "my_algorithm.py")
    assert dict(config.env_params) == {"max_steps_in_episode": 3}
    assert config.hidden_sizes == (8,) and len(agents["params"]["actor"]["params"]["log_std"]) == 2


def test_file_that_is_no_script(tmp_path):
    (tmp_path / "older.py").write_text(
        (ROOT / "ppo_continuous.py").read_text().replace("def make_policy(", "def policy(")
    )
    with pytest.raises(ValueError, match="is not a training script, it has no make_policy"):
        load.load_script(str(tmp_path / "older.py"))
    names = [f"def {name}(): pass" for name in contract.NAMES if name != "Config"]
    (tmp_path / "plain.py").write_text("\n".join(["class Config: pass", *names]))
    with pytest.raises(ValueError, match="its Config must be a dataclass"):
        load.load_script(str(tmp_path / "plain.py"))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        load.load_script(str(tmp_path / "broken.py"))


def test_mistake_in_a_script_keeps_its_traceback(script, tmp_path, monkeypatch):
    """Unlike a value that does not do: with the default it would."""

    def broken(config):
        raise TypeError("a mistake of mine")

    compilation.make_learner.cache_clear()
    monkeypatch.setattr(script, "make_learner", broken)
    with pytest.raises(TypeError, match="a mistake of mine"):
        train.main([*SMALL, f"--run-dir={tmp_path / 'run'}"])
    compilation.make_learner.cache_clear()


@pytest.mark.slow
def test_slices_that_fit(script, tmp_path, capsys):
    """Seven seeds by threes."""
    args = [*SMALL[:-1], "--num-seeds=7"]
    config, options, _ = command_line.parse_with(script, args[1:], train.Options, "")
    memory = compilation.compile_slice(script, config, [], 3, options).bytes * 1.01 / GIB
    run_dir = tmp_path / "run"
    train.main([*args, f"--memory={memory}", f"--run-dir={run_dir}"])
    assert "7 seeds in 3 slices of at most 3" in capsys.readouterr().out
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert checkpoints == ["00000-00003", "00003-00006", "00006-00007"]
    metrics, agents = metrics_of(run_dir), agents_of(run_dir)
    assert len(np.unique(metrics["q_value"][:, -1])) == 7
    seven = compilation.compile_slice(script, config, [], 7, options)
    carry = loop.run(seven, Job(folder=tmp_path / "none", key_data=loop.seed_keys(options)))
    assert_agree(metrics, hosts.fetch(carry["metrics"]))
    whole = flatten_dict(hosts.fetch(carry["runner_state"].agent), sep=".")
    assert {name: leaf.shape for name, leaf in whole.items()} == {
        name: leaf.shape for name, leaf in agents.items()
    }
    # a run that was killed before its results were written keeps its slices
    record = json.loads((run_dir / "run.json").read_text())
    del record["finished"]
    (run_dir / "run.json").write_text(json.dumps(record))
    (run_dir / "agent.safetensors").unlink()
    capsys.readouterr()
    train.main(["--resume", run_dir])
    assert "7 seeds in 3 slices of at most 3" in capsys.readouterr().out
    assert_same(metrics, metrics_of(run_dir))
    assert_same(agents, agents_of(run_dir))


# --- resumed ---


class StopError(Exception):
    pass


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run that ended at its second checkpoint, and how many updates it had done."""
    saved, save = [], loop.save

    def save_and_stop(manager, step, carry):
        save(manager, step, carry)
        saved.append(step)
        if len(saved) == 2:
            raise StopError

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(loop, "save", save_and_stop)
        train.main([*SMALL, "--checkpoint-interval=1e-9", f"--run-dir={tmp_path / 'run'}"])
    assert 0 < saved[-1] < NUM_UPDATES and not (tmp_path / "run" / "metrics.npz").exists()
    return tmp_path / "run", saved[-1]


def test_resume(finished, interrupted, capsys):
    run_dir, done = interrupted
    train.main(["--resume", run_dir])
    said = capsys.readouterr()
    assert f"{done} of {NUM_UPDATES} updates are done" in said.err
    assert_same_results(finished, run_dir)
    assert record_of(run_dir)["steps_done"] == 4 * 100 * NUM_UPDATES


@pytest.mark.slow
def test_seconds_add_up_over_all_processes(interrupted):
    run_dir, _ = interrupted
    record = record_of(run_dir)
    record["seconds"] = {"compile": 1000.0, "train": 2000.0, "evaluate": 3000.0}
    (run_dir / "run.json").write_text(json.dumps(record))
    train.main(["--resume", run_dir])
    seconds = record_of(run_dir)["seconds"]
    assert (
        1000 < seconds["compile"] < 1100
        and 2000 < seconds["train"] < 2100
        and 3000 < seconds["evaluate"] < 3100
    )
    assert record_of(run_dir)["steps_per_second"] == pytest.approx(4 * 2000 / seconds["train"])


@pytest.mark.slow
def test_resume_takes_the_copy_of_the_script(finished, interrupted, tmp_path):
    """The original may have changed or moved, or another script of its name may lie in the working
    directory.
    """
    record = record_of(interrupted[0])
    moved = {"path": str(tmp_path / "gone.py"), "folders": [str(tmp_path / "gone")]}
    (interrupted[0] / "run.json").write_text(json.dumps(record | moved))
    with contextlib.chdir(tmp_path):
        (tmp_path / "q_learning_gridworld.py").write_text(
            "raise AssertionError('another script of this name')"
        )
        train.main(["--resume", interrupted[0]])
    assert_same_results(finished, interrupted[0])


def test_a_script_that_is_edited_while_its_run_starts(tmp_path, monkeypatch):
    """The run directory gets the text that trains, not the file as it is after the compilation."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "edited_early.py"
    text = (ROOT / "q_learning_gridworld.py").read_text()
    mine.write_text(text)
    compile_slices = compilation.compile_slices

    def edit_and_compile(*args, **options):
        mine.write_text(text + "# edited\n")
        return compile_slices(*args, **options)

    monkeypatch.setattr(compilation, "compile_slices", edit_and_compile)
    train.main(["edited_early", *SMALL[1:], "--run-dir", "run"])
    assert (tmp_path / "run" / mine.name).read_text() == text
    train.main(["--resume", "run"])  # is not refused


def test_resume_refuses_a_script_that_was_edited(interrupted, capfd):
    copy = interrupted[0] / "q_learning_gridworld.py"
    copy.write_text(copy.read_text() + "\n# edited\n")
    message = one_line(capfd, ["--resume", interrupted[0]])
    assert f"{copy}: has been edited since the run began; --force" in message
    train.main(["--resume", interrupted[0], "--force"])
    assert "finished" in record_of(interrupted[0])


def test_resume_of_a_run_that_another_process_writes(interrupted, capfd):
    holder = run_lock.lock(interrupted[0])
    assert "another process is writing into this run" in one_line(
        capfd, ["--resume", interrupted[0]]
    )
    holder.release()


def test_resume_of_a_run_that_is_finished_meanwhile(finished, tmp_path, monkeypatch, capsys):
    """Between the first look and the lock: the record is read again."""
    copy = unfinished(finished, tmp_path / "copy")
    before, lock = (copy / "metrics.npz").stat().st_mtime_ns, run_lock.lock

    def lock_at_last(run_dir):
        (copy / "run.json").write_text((finished / "run.json").read_text())
        return lock(run_dir)

    monkeypatch.setattr(run_lock, "lock", lock_at_last)
    train.main(["--resume", copy])
    assert "has finished: there is nothing left to do" in capsys.readouterr().out
    assert (copy / "metrics.npz").stat().st_mtime_ns == before


def test_resume_of_a_finished_run_changes_nothing(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert train.main(["--resume", copy]) == copy
    assert "has finished: there is nothing left to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_agents_of_a_finished_run_that_were_deleted_are_written_again(finished, tmp_path):
    """Bit for bit, from the last checkpoint."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "agent.safetensors").unlink()
    train.main(["--resume", copy])
    written = (copy / "agent.safetensors").read_bytes()
    assert written == (finished / "agent.safetensors").read_bytes()


def test_an_extension_that_is_killed_before_its_first_checkpoint_continues(tmp_path, monkeypatch):
    short = train.main([*SMALL, f"--run-dir={tmp_path / 'run'}"])

    def kill(*args, **more):
        raise KeyboardInterrupt

    for again in ([], ["--total-timesteps=3000"]):
        copy = shutil.copytree(short, tmp_path / f"copy{len(again)}")
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(train, "train", kill)
            train.main(["--resume", copy, "--total-timesteps=3e3"])
        assert "finished" not in record_of(copy)
        assert record_of(copy)["settings"]["total_timesteps"] == 3000
        train.main(["--resume", copy, *again])
        assert metrics_of(copy)["episodes"].shape == (4, 30)
        assert "finished" in record_of(copy)


def test_a_finished_run_is_extended(tmp_path):
    """Bit for bit as if it had been as long from the start, evaluations included."""
    args = [*SMALL, "--eval-interval=5"]
    short = train.main([*args, f"--run-dir={tmp_path / 'short'}"])
    whole = train.main([*args, "--total-timesteps=3000", f"--run-dir={tmp_path / 'whole'}"])
    train.main(["--resume", short, "--total-timesteps=3e3"])
    assert metrics_of(short)["episodes"].shape == (4, 30)
    assert_same_results(whole, short)
    assert_same(dict(np.load(whole / "evaluations.npz")), dict(np.load(short / "evaluations.npz")))


@pytest.mark.slow
def test_extension_that_would_change_the_updates(tmp_path, capfd):
    args = [
        "ppo",
        "--total-timesteps=1024",
        "--num-seeds=1",
        "--eval-episodes=0",
        "--hidden-sizes",
        "4",
    ]
    run_dir = train.main([*args, "--anneal-lr=True", f"--run-dir={tmp_path / 'run'}"])
    capfd.readouterr()
    message = one_line(capfd, ["--resume", run_dir, "--total-timesteps=2048"])
    assert "total_timesteps = 2048: cannot be changed" in message
    assert message.rstrip().endswith("start a new run with --anneal-lr False")
    assert "already has 1024" in one_line(capfd, ["--resume", run_dir, "--total-timesteps=512"])
    for value in ("inf", "nan", "1024.5"):
        message = one_line(capfd, ["--resume", run_dir, f"--total-timesteps={value}"])
        assert f"total_timesteps = {value}: must be a whole number" in message
    assert "2,147,483,647" in one_line(capfd, ["--resume", run_dir, "--total-timesteps=1e30"])
    assert "memory" in one_line(capfd, ["--resume", run_dir, "--memory=1"])  # keeps its slices


def test_evaluation_during_training_changes_no_bit(finished, tmp_path):
    """The curve, and each seed's best agent."""
    run_dir = train.main([*SMALL, "--eval-interval=3", f"--run-dir={tmp_path / 'run'}"])
    assert_same(metrics_of(run_dir), metrics_of(finished))
    assert_same(agents_of(run_dir), agents_of(finished))
    evaluations = dict(np.load(run_dir / "evaluations.npz"))
    np.testing.assert_array_equal(evaluations["timesteps"], 300 * np.arange(1, 7))
    returns = evaluations["returns"]
    assert returns.shape == (4, 6) and np.isfinite(returns).all() and len(np.unique(returns)) > 1
    best = load_run(run_dir, file="best_agent.safetensors")
    options = SimpleNamespace(seed=0, eval_episodes=2)
    again = jax.jit(evaluation.greedy_returns(*best[:2], options))(best[2], np.arange(4))
    np.testing.assert_array_equal(np.asarray(again).mean(axis=1), returns.max(axis=1))


def test_resume_after_a_kill_behind_the_last_checkpoint(finished, tmp_path):
    """Before the results were written."""
    copy = unfinished(finished, tmp_path / "copy")
    for name in ("metrics.npz", "agent.safetensors", "evaluation.npy"):
        (copy / name).unlink()
    (copy / "results.partial").mkdir()
    (copy / "results.partial" / "metrics.npz").write_text("half of it")
    train.main(["--resume", copy])
    assert_same_results(finished, copy)


def test_resume_with_nothing_committed_starts_anew(finished, tmp_path):
    """Killed before its first checkpoint, perhaps while that was written."""
    copy = unfinished(finished, tmp_path / "copy")
    for path in (copy / "checkpoints").iterdir():
        path.rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp"))
    train.main(["--resume", copy])
    assert_same_results(finished, copy)
    assert not list(copy.rglob("*tmp*"))


@pytest.mark.slow
def test_interval_0_writes_the_last_checkpoint_alone(tmp_path, monkeypatch):
    saved, save = [], loop.save
    monkeypatch.setattr(
        loop,
        "save",
        lambda manager, step, carry: (saved.append(step), save(manager, step, carry)),
    )
    train.main([*SMALL, "--checkpoint-interval=0", f"--run-dir={tmp_path / 'run'}"])
    assert saved == [NUM_UPDATES]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        str(NUM_UPDATES)
    ]


def unfinished(run_dir, copy, *left_out):
    """A copy of a run as it was before its results were written."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns(*left_out))
    record = {name: value for name, value in record_of(copy).items() if name != "finished"}
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def one_line(capfd, args, code=2) -> str:
    """What the tool says where it refuses."""
    with pytest.raises(SystemExit) as stop:
        train.main(args)
    message = capfd.readouterr().err
    assert stop.value.code == code
    assert message.endswith("\n") and message.startswith("onejit train: error: "), message
    assert code != 2 or message.count("\n") == 1, message
    return message


def cut_off(data: bytes) -> bytes:
    return data[: len(data) // 2]


def change_64_bytes(data: bytes) -> bytes:
    middle = len(data) // 2
    changed = bytes(byte ^ 0x40 for byte in data[middle : middle + 64])
    return data[:middle] + changed + data[middle + 64 :]


def damage(checkpoint: Path, change) -> None:
    """Change the largest file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(change(largest.read_bytes()))


@pytest.mark.parametrize("change", [cut_off, change_64_bytes])
def test_resume_from_the_checkpoint_before_a_damaged_one(change, finished, interrupted, capfd):
    """It ends bit for bit as if nothing had happened."""
    run_dir, done = interrupted
    before = min(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert before < done
    damage(run_dir / "checkpoints" / str(done), change)
    train.main(["--resume", run_dir])
    said = capfd.readouterr().err
    assert f"the checkpoint checkpoints/{done} is damaged: its file" in said
    assert f"it was deleted, and checkpoints/{before} is used" in said
    assert f"{before} of {NUM_UPDATES} updates are done" in said
    assert_same_results(finished, run_dir)


def test_resume_without_an_intact_checkpoint(finished, tmp_path, capfd):
    copy = unfinished(finished, tmp_path / "copy")
    for checkpoint in (copy / "checkpoints").iterdir():
        damage(checkpoint, cut_off)
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", copy])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit train: error: run_dir"), message
    assert "no checkpoint is intact; checkpoints/20 is damaged: its file" in message, message
    shutil.rmtree(copy / "checkpoints")
    train.main(["--resume", copy])
    assert_same_results(finished, copy)


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_resume_of_a_damaged_run(finished, tmp_path, capfd, name):
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / name).write_text((copy / name).read_text()[:60] + "\n{")
    assert name in one_line(capfd, ["--resume", copy])


def test_resume_of_what_cannot_be(finished, by_main, tmp_path, capfd):
    assert "RUN_DIR" in one_line(capfd, ["--resume"])
    assert "is not a run directory" in one_line(capfd, ["--resume", tmp_path])
    assert "was not started by onejit train" in one_line(capfd, ["--resume", by_main])
    # all else comes from the run
    assert "--lr" in one_line(capfd, ["--resume", finished, "--lr=1"])


def test_checkpoints_hold_no_pickled_code(finished):
    """Nothing in them is a pickle, which could run code where it is read: arrays and JSON alone."""
    files = [path for path in (finished / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert path.read_bytes()[:1] != b"\x80", path


def start_and_signal(folder, number, *flags):
    """Start a long run, send it a signal when it has trained for a while, and return its exit code
    and what it said.
    """
    command = [
        sys.executable,
        "-m",
        "onejit",
        "train",
        *without("--total-timesteps"),
        "--total-timesteps=3e6",
        *flags,
    ]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    process = subprocess.Popen(
        [*command, "--run-dir=run"], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGHUP, before)
    deadline = time.monotonic() + TIME_LIMIT
    # signals are caught by then
    while not (folder / "run" / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(number)
    _, said = process.communicate(timeout=TIME_LIMIT)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_training_at_a_checkpoint(number, code, tmp_path):
    """Also with --checkpoint-interval 0: the promise that --resume goes on is kept."""
    # a shell's background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    returned, said = start_and_signal(tmp_path, number, "--checkpoint-interval=0")
    assert returned == code, said
    last = said.splitlines()[-1]
    assert last == f"onejit train: stopped by {number.name}; onejit train --resume run continues", (
        said
    )
    (step,) = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    record = record_of(tmp_path / "run")
    assert 0 < step < 30_000 and record["steps_done"] == 400 * step and "finished" not in record
    assert not is_locked(tmp_path / "run")
    with contextlib.chdir(tmp_path):
        train.main(["--resume", "run"])
        whole = train.main([*SMALL, "--total-timesteps=3e6", "--run-dir=whole"])
        assert_same(metrics_of(Path("run")), metrics_of(whole))


# --- mistakes ---


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "SCRIPT"),
        (["--lr=1"], "SCRIPT"),
        (["no_such_script"], "script no_such_script"),
        (["q_learning_gridwold"], "did you mean q_learning_gridworld"),
        ([*SMALL, "--gama=0.9"], "--gama did you mean --gamma"),
        ([*SMALL, "--learning-rate=0.9"], "--learning-rate use --lr"),
        ([*SMALL, "--total-timesteps=1e18"], "total_timesteps = 1000000000000000000 2,147,483,647"),
        ([*SMALL, "--num-seeds=1e10"], "num_seeds = 10000000000 32 bits"),
        ([*SMALL, "stray"], "stray"),
        ([*SMALL, "--lr=fast"], "--lr fast"),
        ([*SMALL, "--lr", "0.1", "0.2"], "--lr 0.2"),
        ([*SMALL, "--lr"], "--lr"),
        ([*SMALL, "--random-starts=3"], "--random-starts 3 True False"),
        ([*SMALL, "--start=1"], "--start"),
        ([*SMALL, "--num-steps=3e9", "--total-timesteps=1e12"], "num_steps = 3000000000"),
        ([*SMALL, "--total-timesteps=10"], "total_timesteps"),
        ([*SMALL[:-1], "--num-seeds=0"], "num_seeds = 0"),
        ([*SMALL, "--seed=-1"], "seed = -1"),
        ([*SMALL, "--seed=4294967296"], "seed = 4294967296"),
        ([*SMALL, "--eval-episodes=-1"], "eval_episodes = -1"),
        ([*SMALL, "--eval-interval=1000"], "eval_interval = 1000: at most"),
        (["ppo", "--num-envs=0"], "num_envs = 0: must be at least 1"),
        (["dqn", "--num-steps=0"], "num_steps = 0: must be at least 1"),
        (["sac", "--env-name=CartPole-v1"], "env_name = CartPole-v1 bounded"),
        ([*SMALL, "--checkpoint-interval=-1"], "checkpoint_interval = -1"),
        ([SMALL[0], "--env-name=Nowhere"], "--env-name Nowhere"),
        (["ppo_continuous", "--env-name=Nowhere"], "env_name = Nowhere"),
        (
            ["ppo_continuous", "--env-name=halfchetah"],
            "env_name = halfchetah did you mean halfcheetah?",
        ),
        (["ppo", "--env-name=Cartpole-v1"], "env_name = Cartpole-v1 did you mean CartPole-v1?"),
        (
            ["ppo_continuous", "--env-name=toys:ToyContinuous", "--env-params", "noise", "loud"],
            "env_params noise loud",
        ),
        (
            ["ppo_continuous", "--env-name=toys:ToyContinuous", "--env-params", "wings", "2"],
            "env_params: wings",
        ),
        ([*SMALL, "--config"], "--config"),
        ([*SMALL, "--config=none.yaml"], "--config none.yaml"),
        ([*SMALL, "--memory=1e-9"], "memory GiB"),
        ([*SMALL, "--memory=much"], "memory much"),
        ([*SMALL, "--memory=-1"], "memory = -1"),
        ([*SMALL, "--track=paper"], "--track paper"),
        ([*SMALL, "--num-processes=2"], "coordinator"),
        (
            [*SMALL, "--coordinator=here", "--num-processes=2", "--process-id=0"],
            "coordinator = here HOST:PORT",
        ),
        ([*SMALL, "--coordinator=a:1", "--num-processes=2", "--process-id=2"], "process_id = 2"),
        ([*SMALL, "--distributed"], "distributed"),
    ],
)
def test_refuses(args, words, tmp_path, capfd):
    message = one_line(capfd, [*args, f"--run-dir={tmp_path / 'run'}"] if args else args)
    assert all(word in message for word in words.split()), message
    assert "did you mean CartPole-v1" not in message or "Cartpole-v1" in message, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, word",
    [
        ("gama: 0.9", "bad.yaml: gama: is not a field"),
        ("learning-rate: 1", "learning-rate: is not a field of q-learning-gridworld.py; use lr"),
        ("lr: [1, 2]", "--lr"),
        ("lr: {a: 1}", "--lr"),
        ("lr: true", "--lr"),
        ("lr:", "--lr"),
        ("height: 4.5", "--height"),
        ("- lr", "--config"),
        ("lr: [1", "--config"),
        ("", "--config"),
        ("lr: !!python/object:os.system {}", "--config"),
    ],
)
def test_refuses_yaml(text, word, tmp_path, capfd):
    (tmp_path / "bad.yaml").write_text(text)
    message = one_line(
        capfd, [*SMALL, f"--config={tmp_path / 'bad.yaml'}", f"--run-dir={tmp_path / 'run'}"]
    )
    assert word in message.replace("_", "-") and not (tmp_path / "run").exists()


def test_what_cannot_be_compiled_keeps_its_traceback(tmp_path):
    """It ends in a note with the fields that are not the defaults. Nothing is written."""
    words = ["ppo", "--env-name=Acrobot-v1", "--hidden-sizes", "8", "-8"]
    with pytest.raises(Exception, match=r".") as caught:
        train.main([*words, f"--run-dir={tmp_path / 'run'}"])
    assert "config: env_name = Acrobot-v1, hidden_sizes = (8, -8)" in caught.value.__notes__
    assert not list(tmp_path.iterdir())


def test_run_dir_that_holds_something(finished, tmp_path, capfd):
    assert f"--resume {finished} continues" in one_line(capfd, [*SMALL, f"--run-dir={finished}"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("lr: 0.1")
    assert "run_dir" in one_line(capfd, [*SMALL, f"--run-dir={tmp_path / 'mine'}"])
    assert "run_dir" in one_line(capfd, [*SMALL, f"--run-dir={tmp_path / 'mine' / 'config.yaml'}"])
    assert "run_dir" in one_line(
        capfd, [*SMALL, f"--run-dir={tmp_path / 'mine' / 'config.yaml' / 'run'}"]
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.yaml"]


def test_package_that_is_missing(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = one_line(capfd, [*SMALL, "--track=wandb", f"--run-dir={tmp_path / 'run'}"])
    assert "track = wandb: needs wandb; pip install wandb" in message


def test_tyro_without_its_private_hook(capfd, monkeypatch):
    """Then the message is tyro's own, a box, and nothing else changes."""
    monkeypatch.delattr(tyro, "_errors")
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, "--gama=0.9"])
    assert stop.value.code == 2 and "--gama" in capfd.readouterr().err


def test_a_field_of_the_script_named_like_a_flag_of_onejit(tmp_path, capsys):
    """The script's field keeps its flag, and the other one gets a prefix."""
    text = (ROOT / "q_learning_gridworld.py").read_text()
    own = "    height: int"
    assert text.count(own) == 1
    (tmp_path / "mine.py").write_text(
        text.replace(own, f'    memory: str = "gru"\n    samples: int = 3\n{own}')
    )
    script = load.load_script(tmp_path / "mine.py")
    words = ["--memory=lstm", "--samples=4", "--onejit-memory=2", "--num-seeds=3"]
    config, options, _ = command_line.parse_with(script, words, train.Options, "")
    assert (config.memory, config.samples, options.memory, options.num_seeds) == ("lstm", 4, 2.0, 3)
    config, options, _ = command_line.parse_with(
        script, [*words, "--onejit-samples=8"], sweep.Options, ""
    )
    assert (config.samples, options.samples, options.memory) == (4, 8, 2.0)
    run_dir = train.main(
        [str(tmp_path / "mine.py"), *SMALL[1:], "--memory=lstm", f"--run-dir={tmp_path / 'run'}"]
    )
    assert load_run(run_dir)[1].memory == "lstm"


def test_help(script, capsys):
    for args, words in (
        ([], ["onejit train ppo", "--resume"]),
        (SMALL[:1], ["usage: onejit train q_learning_gridworld ", "--cliff-reward", "--memory"]),
    ):
        with pytest.raises(SystemExit) as stop:
            __main__.main(["train", *args, "--help"])
        said = capsys.readouterr().out
        assert not stop.value.code and all(word in said for word in words)


# --- disks ---


@pytest.mark.parametrize(("kind", "size"), [slow("files", 36_000), slow("disk", 160_000)])
def test_disk_full_while_a_checkpoint_is_written(kind, size, full_disk, tmp_path, capfd):
    """Checkpoints grow as metrics, at first zeros, fill up.

    The last that was committed stays good.
    """
    args = [*without("--total-timesteps"), "--total-timesteps=400000", "--checkpoint-interval=1e-9"]
    with full_disk(kind, size) as (disk, cause), pytest.raises(SystemExit) as stop:
        train.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.endswith(f"cannot be written: {cause}"), message
    del stop
    # Else it meets Orbax's failed tasks while Python parses; their report parses too: a
    # SystemError in 3.11.
    gc.collect()
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    train.main(["--resume", copy])
    assert " of 4000 updates are done" in capfd.readouterr().err
    whole = train.main([*args, f"--run-dir={tmp_path / 'whole'}"])
    assert_same_results(whole, copy)


@pytest.mark.parametrize("size", [1000, slow(10_000)])
def test_results_that_cannot_be_written(finished, size, full_disk, tmp_path, capfd):
    """--resume writes them when there is room."""
    copy = unfinished(finished, tmp_path / "run", "*.npz", "*.npy", "*.png", "*.safetensors")
    with full_disk("files", size), pytest.raises(SystemExit) as stop:
        train.main(["--resume", copy])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit train: error: run_dir = "), message
    assert "File too large" in message and not (copy / "metrics.npz").exists(), message
    train.main(["--resume", copy])
    assert_same_results(finished, copy)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 4, 8])
def test_disk_full_while_results_are_written(finished, small_disk, capfd, room):
    """With so many pages left; --resume writes them when there is more."""
    copy = unfinished(
        finished, small_disk(1_000_000) / "run", "*.npz", "*.npy", "*.png", "*.safetensors"
    )
    free = os.statvfs(copy)
    (copy.parent / "ballast").write_bytes(bytes((free.f_bavail - room) * free.f_bsize))
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", copy])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit train: error: run_dir = "), message
    assert "No space left on device" in message, message
    assert not (copy / "metrics.npz").exists()
    (copy.parent / "ballast").unlink()
    train.main(["--resume", copy])
    assert_same_results(finished, copy)


def test_read_only_run_directory(small_disk, capfd):
    disk = small_disk(100_000, "ro")
    message = one_line(capfd, [*SMALL, f"--run-dir={disk / 'run'}"])
    assert "run_dir" in message and "Read-only" in message


# --- tracking ---


def test_tensorboard(script, tmp_path):
    run_dir = train.main(
        [*SMALL, "--track=tensorboard", "--track-seeds", f"--run-dir={tmp_path / 'run'}"]
    )
    found, metrics = events(run_dir / "tensorboard"), metrics_of(run_dir)
    tags = {tag for tag, _, _ in found}
    assert {f"episodic_return/seed_{seed:04d}" for seed in range(4)} | {
        "episodic_return/worst_seed"
    } <= tags
    assert {f"{name}/mean" for name in metrics if name != "episodic_return"} <= tags
    ends = sorted({step // 100 for _, step, _ in found})
    assert ends[-1] == NUM_UPDATES
    for tag, step, value in found:  # each point is of the updates since the one before
        last = step // 100
        first = max([end for end in ends if end < last], default=0)
        name, which = tag.split("/")
        part = {name: each[:, first:last] for name, each in metrics.items()}
        if tag == "episodic_return/mean":
            assert value == pytest.approx(np.nanmean(statistics.mean_return(part)), rel=1e-4)
        elif which == "mean":
            assert value == pytest.approx(np.nanmean(part[name]), rel=1e-4)
        elif which.startswith("seed"):
            seed = int(which.removeprefix("seed_"))
            assert value == pytest.approx(statistics.mean_return(part)[seed], rel=1e-4)


def test_points_are_on_disk_before_each_checkpoint(tmp_path, monkeypatch):
    """Everything before the last flush was lost when a run was killed."""
    found, save = [], loop.save

    def save_and_look(manager, step, carry):
        found.append(
            (
                step,
                max((step for _, step, _ in events(tmp_path / "run" / "tensorboard")), default=0),
            )
        )
        save(manager, step, carry)

    monkeypatch.setattr(loop, "save", save_and_look)
    train.main(
        [
            *SMALL,
            "--track=tensorboard",
            "--checkpoint-interval=1e-9",
            f"--run-dir={tmp_path / 'run'}",
        ]
    )
    assert len(found) > 1 and all(written == 100 * step for step, written in found)


def test_curves_by_hand(script):
    metrics = {
        "episodes": np.ones((3, 3), int),
        "episodic_return": np.array([[1.0, 2, 3], [0, 0, 1], [np.nan, 1, 1]]),
    }
    evaluation = np.array([[1.0, 3.0], [5.0, 5.0], [8.0, 8.0]])
    values = tracking.curves(metrics, range(3), evaluation)
    # the third seed has no number
    mean, low, high = statistics.student_interval(np.array([2.0, 1 / 3]))
    expected = dict(
        zip(("mean", "low", "high", "worst_seed"), (mean, low, high, 1 / 3), strict=True)
    )
    mean, low, high = statistics.student_interval(np.array([2.0, 5.0, 8.0]))
    greedy = dict(zip(("mean", "low", "high", "worst_seed"), (mean, low, high, 2.0), strict=True))
    expected = {f"episodic_return/{name}": value for name, value in expected.items()}
    expected |= {f"greedy_return/{name}": value for name, value in greedy.items()} | {
        "episodes/mean": 1.0
    }
    assert values == pytest.approx(expected)
    more = tracking.curves(metrics, range(4, 7), evaluation, of_seeds=True)
    assert more == pytest.approx(
        expected | {"episodic_return/seed_0004": 2.0, "episodic_return/seed_0005": 1 / 3}
    )


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    summaries, runs, init = [], [], wandb.init

    def init_and_keep(**settings):
        run = init(**settings)
        finish = run.finish
        run.finish = lambda: (summaries.append(dict(run.summary)), finish())
        runs.append(run)
        return run

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", init_and_keep)
    run_dir = train.main(
        [*SMALL, "--track=wandb", "--track-seeds", f"--run-dir={tmp_path / 'run'}"]
    )
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    (summary,), metrics = summaries, metrics_of(run_dir)
    assert summary["environment_steps"] == 2000 and runs[0].config["num_seeds"] == 4
    assert {f"episodic_return/seed_{seed:04d}" for seed in range(4)} | {"q_value/mean"} <= set(
        summary
    )
    assert metrics["q_value"].min() <= summary["q_value/mean"] <= metrics["q_value"].max()


def test_tags_of_wandb_are_short_enough(tmp_path, monkeypatch):
    """It takes no tag of more than 64 letters, and the run could not begin."""
    started = []

    def init(tags, **settings):
        assert all(1 <= len(tag) <= 64 for tag in tags)
        started.append(tags)
        return SimpleNamespace(define_metric=lambda *args, **settings: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    name = f"{'warehouse_' * 8}:Warehouse-v3"
    settings = {"script": "dqn" * 30, "env_name": name, "num_seeds": 4}
    tracking.open_tracker("wandb", tmp_path, Record(settings=settings, started=""), "", 0)
    assert started[0][1].endswith("Warehouse-v3")


def test_a_record_is_json(tmp_path):
    """It holds no Infinity."""
    record = Record(settings={"script": "ppo", "clip": math.inf, "sizes": (1, math.nan)})
    write_record(tmp_path, record)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    stored = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert stored["settings"]["clip"] == "inf" and stored["settings"]["sizes"] == [1, "nan"]


TRACKIO = """
runs = []


class Run:
    def __init__(self, **settings):
        self.settings, self.logged, self.finished = settings, [], 0
        runs.append(self)

    def log(self, values, step):
        assert not self.finished
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def init(project, name, group, resume, config, embed):
    return Run(project=project, name=name, group=group, resume=resume, config=config)
"""


def test_trackio(tmp_path, monkeypatch):
    """By a module with the calls of Trackio 0.43. A resumed run continues the run of its name."""
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    settings = {"script": "dqn", "env_name": "CartPole-v1", "num_seeds": 4}
    record = Record(settings=settings, started="2026-11-26 09:00:00")
    for step in (2000, 2400):
        tracker = tracking.open_tracker("trackio", tmp_path / "run", record, "trial-1", 0)
        tracker.log(step, {"episodic_return/mean": 1.0})
        tracker.flush()
        tracker.close()
    import trackio

    first, second = trackio.runs
    assert first.settings == second.settings
    name = first.settings.pop("name")
    assert first.settings == {
        "project": "mine",
        "group": "CartPole-v1",
        "resume": "allow",
        "config": settings,
    }
    assert re.fullmatch("run trial-1 [0-9a-f]{6}", name)
    assert first.logged == [(2000, {"episodic_return/mean": 1.0})] and second.logged[0][0] == 2400
    assert first.finished == second.finished == 1
    tracking.open_tracker("trackio", tmp_path / "other", record, "trial-1", 0)
    assert trackio.runs[2].settings["name"].partition(" ")[0] == "other"
    monkeypatch.delitem(sys.modules, "trackio")


# --- what is written ---


def test_the_band_of_the_learning_curve_is_the_interval(script, tmp_path, monkeypatch):
    bands = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.fill_between",
        lambda self, x, low, high, **how: bands.append((low, high)),
    )
    returns = np.random.default_rng(0).normal(size=(4, 10))
    metrics = {"episodes": np.ones((4, 10)), "episodic_return": returns}
    save_results(script, script.Config(), 0, {"q": np.zeros((4, 2))}, metrics, tmp_path)
    _, *band = statistics.bootstrap_interval(statistics.mean_over_seeds, returns)
    np.testing.assert_allclose(bands[0], band)


# --- many processes ---


def start(tool: str, args, count: int) -> list[subprocess.Popen]:
    """The same command in each of `count` processes, two fake CPU devices each."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "onejit", tool, *args, f"--coordinator=127.0.0.1:{port}"]
    return [
        subprocess.Popen(
            [*command, f"--num-processes={count}", f"--process-id={index}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def finish(processes) -> list[str]:
    """What they said. All are ended, whatever happens."""
    try:
        return [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(tool: str, args, count: int) -> list[str]:
    processes = start(tool, args, count)
    said = finish(processes)
    assert [process.returncode for process in processes] == [0] * count, said
    return said


@pytest.mark.slow
def test_two_processes(finished, tmp_path):
    """Two of the four seeds on each, one on a device."""
    first, second = run("train", [*SMALL, f"--run-dir={tmp_path / 'run'}"], 2)
    assert "1 slice on 4 devices" in first and "final return" in first
    assert "slice" not in second and "return" not in second and "step/s" not in second
    assert_agree(metrics_of(tmp_path / "run"), metrics_of(finished))
    assert all(len(leaf) == 4 for leaf in agents_of(tmp_path / "run").values())
    assert "steps_per_second" in record_of(tmp_path / "run")
    # it needs all agents here
    left = {path.name for path in finished.iterdir()} - {"q_values.png"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == left


@pytest.mark.slow
def test_four_processes(tmp_path):
    args = [*SMALL[:-1], "--num-seeds=8"]
    run("train", [*args, f"--run-dir={tmp_path / 'four'}"], 4)
    train.main([*args, f"--run-dir={tmp_path / 'one'}"])
    assert_agree(metrics_of(tmp_path / "four"), metrics_of(tmp_path / "one"))


@pytest.mark.slow
def test_seeds_that_do_not_divide(tmp_path):
    """The last seed fills up the slice, and no more than the five seeds are kept."""
    args = [*SMALL[:-1], "--num-seeds=5"]
    first, _ = run("train", [*args, f"--run-dir={tmp_path / 'two'}"], 2)
    assert "5 seeds in 1 slice on 4 devices" in first
    train.main([*args, f"--run-dir={tmp_path / 'one'}"])
    assert_agree(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"))
    assert all(len(leaf) == 5 for leaf in agents_of(tmp_path / "two").values())


@pytest.mark.slow
@pytest.mark.parametrize("tool, options", [("train", []), ("sweep", ["--lr", "0.1", "0.5", "1"])])
@pytest.mark.parametrize("count", [2, 4])
def test_one_of_many_is_killed(tool, options, count, tmp_path):
    """The others end soon and say why. Resumed, they come to the same as without the kill."""
    args = without(
        "--num-seeds", "--num-steps", "--total-timesteps", *(["--eval-episodes"] if options else [])
    )
    args += [
        "--num-seeds=8",
        *options,
        "--num-steps=10",
        "--total-timesteps=200000",
        "--checkpoint-interval=0.2",
    ]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    processes = start(tool, [*args, f"--run-dir={killed}"], count)
    deadline = time.monotonic() + TIME_LIMIT
    while not [path for path in killed.glob("checkpoints/*") if path.name.isdigit()]:
        if tool == "sweep" and [
            path for path in killed.glob("unfinished/*/*") if path.name.isdigit()
        ]:
            break
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[-1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    said = finish(processes)
    assert time.monotonic() - begun < 60
    for process, text in zip(processes[:-1], said, strict=False):
        assert process.returncode not in (0, -signal.SIGKILL)
        assert "another process may be gone" in text or "another task died" in text, text
    assert not (killed / "metrics.npz").exists()
    assert "updates" in run(tool, ["--resume", killed], count)[0]
    run(tool, [*args, f"--run-dir={whole}"], count)
    assert_same(metrics_of(whole), metrics_of(killed))
