"""`onejit train`: as `main`, in slices, tracked, resumed, and on several processes that are
joined.
"""

import json
import os
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
from flax.traverse_util import flatten_dict
from support.commands import refusal, run_script
from support.event_files import events
from support.files import ROOT
from support.sweeps import metrics_of, record_of
from support.trees import assert_same

from onejit import resume, train
from onejit.base import statistics
from onejit.engine import compilation, evaluation, hosts, loop
from onejit.engine.evaluation import evaluation_keys, policy_of
from onejit.engine.memory import GIB
from onejit.report import compare
from onejit.run import lock as run_lock
from onejit.run.agents import read_agents
from onejit.run.directory import load_results, load_run, script_of
from onejit.run.record import make_record, read_record
from onejit.run.resume import ResumeOptions
from onejit.run.write import begin_run, save_results
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
CHECKPOINTS = {"train": "checkpoints/*", "sweep": "unfinished/*/*"}
TIME_LIMIT = 180  # seconds; no run takes a tenth of it on an idle machine


def without(*names):
    """The words of SMALL without these flags, each of which has one word."""
    return [word for word in SMALL if word.split("=")[0] not in names]


def agents_of(run_dir) -> dict:
    return read_agents(run_dir / "agent.safetensors")[0]


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


def parse(script, words, options=train.Options):
    return command_line.parse_with(script, command_line.split_flags(words), options, "")


@pytest.fixture(scope="module")
def script():
    return load.load_script(SMALL[0])


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    """A run, the same run by the script itself, and what the report of the script got in each:
    `(agents, the metrics in its directory)`.
    """
    folder = tmp_path_factory.mktemp("train")
    report = script.report
    seen = []

    def look_and_report(config, agents, run_dir):
        seen.append((agents, metrics_of(run_dir)))
        report(config, agents, run_dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "report", look_and_report)
        run_dir = train.main([*SMALL, f"--run-dir={folder / 'run'}"])
        run_script(script, *without("--eval-episodes")[1:], f"--run-dir={folder / 'main'}")
    return run_dir, folder / "main", seen


@pytest.fixture(scope="module")
def finished(runs):
    return runs[0]


@pytest.fixture(scope="module")
def by_main(runs):
    return runs[1]


# --- one process ---


def test_as_main(script, finished, by_main):
    assert_agree(metrics_of(finished), metrics_of(by_main))
    added = {
        "run.json",
        "evaluation.npy",
        "final_return.npy",
        "checkpoints",
        "q_learning_gridworld.py",
        ".lock",
    }
    files = {path.name for path in by_main.iterdir()}
    assert {path.name for path in finished.iterdir()} == files | added
    assert (finished / "config.yaml").read_text() == (by_main / "config.yaml").read_text()
    agents, others = (read_agents(path / "agent.safetensors") for path in (finished, by_main))
    assert agents[1] == others[1] == {"script": "q_learning_gridworld", "seed": "0"}
    assert {name: leaf.shape for name, leaf in agents[0].items()} == {
        name: leaf.shape for name, leaf in others[0].items()
    }
    assert not list(finished.rglob("*.partial"))
    # others may read the agents; safetensors alone makes a file for its owner
    modes = {(finished / name).stat().st_mode for name in ("agent.safetensors", "metrics.npz")}
    assert len(modes) == 1


def test_report_sees_what_main_shows_it(runs):
    """The directory holds the metrics then: a picture of the script's own may be of them."""
    run_dir, _, ((agents, metrics), (others, _)) = runs
    assert_same(metrics, metrics_of(run_dir))
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(agents)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)
    ]


def test_record(script, finished):
    record = record_of(finished)
    config, *_ = parse(script, SMALL[1:])
    settings = {"script": "q_learning_gridworld", "num_seeds": 4, "seed": 0}
    assert record["settings"] == json.loads(json.dumps(settings | configs.plain(config)))
    assert record["command"].startswith("onejit train q_learning_gridworld")
    assert record["slice"] == 4
    assert {"python", "jax", "jaxlib", "flax", "gymnax", "numpy"} <= set(record["versions"])
    assert record["random_keys"] == "threefry2x32"
    assert record["path"] == script.__file__ and len(record["sha256"]) == 64
    assert set(record["seconds"]) == {"compile", "train", "evaluate"}
    assert record["steps_per_second"] == pytest.approx(4 * 2000 / record["seconds"]["train"])
    returns = {"final return": np.load(finished / "final_return.npy")}
    read = compare.read_run(str(finished), "final").returns
    assert list(read.values()) == returns["final return"].tolist()
    returns["greedy return"] = np.load(finished / "evaluation.npy")  # [seeds, episodes]
    for name, values in returns.items():
        lowest, highest = statistics.observed_range(load_results(finished).metrics, values)
        values = values.reshape(4, -1).mean(axis=1)
        middle = statistics.bootstrap_interval(statistics.interquartile_mean, values)
        mean, kind = statistics.mean_interval(values, lowest=lowest, highest=highest)
        numbers = dict(zip(("interquartile_mean", "low", "high"), middle, strict=True))
        numbers |= dict(zip(("mean", "mean_low", "mean_high"), mean, strict=True))
        numbers |= {"worst": values.min(), "seeds": 4}
        numbers |= {"not_finite": 0, "diverged": 0, "no_episode": 0}
        assert record[name].pop("mean_interval") == kind
        assert record[name] == pytest.approx(numbers)


def test_record_of_the_commit(tmp_path):
    """By its hash, a tag or not, and whether files had changed."""

    def git(*words):
        who = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false -c tag.gpgsign=false"
        command = ["git", "-C", tmp_path, *who.split(), *words]
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


def test_evaluation_by_hand(finished):
    """Episodes played step by step, each with a key of its own."""
    script, config, agents = load_run(finished)
    (env, env_params), (start, act) = script.make_env(config), policy_of(script, config)
    evaluation = np.load(finished / "evaluation.npy")
    assert evaluation.shape == (4, 2) and len(np.unique(evaluation)) > 1
    step, act = jax.jit(env.step), jax.jit(act)
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


def test_load_run(script, finished, by_main, tmp_path):
    """Also of a run that the script itself made, and from files alone: no checkpoint is read."""
    copy = shutil.copytree(
        finished, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")
    )
    for run_dir in (copy, by_main):
        loaded, config, agents = load_run(run_dir)
        assert Path(loaded.__file__).read_bytes() == Path(script.__file__).read_bytes()
        expected, *_ = parse(script, SMALL[1:])
        assert configs.plain(config) == configs.plain(expected)
        assert_same(flatten_dict(agents, sep="."), agents_of(run_dir))
        for leaf in jax.tree.leaves(agents):
            assert isinstance(leaf, np.ndarray) and len(leaf) == 4
        settings = read_record(run_dir).settings
        assert settings["script"] == "q_learning_gridworld"
        assert (settings["num_seeds"], settings["seed"]) == (4, 0)
    (copy / "agent.safetensors").unlink()
    with pytest.raises(ValueError, match=r"agent.safetensors: does not exist; it is written when"):
        load_run(copy)
    with pytest.raises(ValueError, match="is not a run directory"):
        load_run(tmp_path)


OF_MY_OWN = """
import gymnax
from gymnax.environments.classic_control.cartpole import CartPole

gymnax.register("CartPoleOfMyOwn", CartPole)
"""


def test_script_of_ones_own(tmp_path, monkeypatch):
    """By its path, with an environment of a module beside it; it is loaded again from anywhere."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "my_algorithm.py").write_text((ROOT / "dqn.py").read_text())
    (own / "poles_of_my_own.py").write_text(OF_MY_OWN)
    args = ["--env-name=poles_of_my_own:CartPoleOfMyOwn", "--num-envs=4", "--num-steps=2"]
    args += ["--env-params", "max_steps_in_episode", "3", "--hidden-sizes", "8", "--num-seeds=2"]
    args += ["--buffer-size=64", "--batch-size=8", "--learning-starts=16", "--total-timesteps=64"]
    run_dir = train.main([own / "my_algorithm.py", *args, f"--run-dir={tmp_path / 'run'}"])
    assert (np.load(run_dir / "evaluation.npy") == 3).all()
    monkeypatch.chdir(tmp_path)
    script, config, agents = load_run("run")
    assert script.__file__ == str(run_dir / "my_algorithm.py")
    assert dict(config.env_params) == {"max_steps_in_episode": 3}
    assert config.hidden_sizes == (8,)
    assert all(len(leaf) == 2 for leaf in jax.tree.leaves(agents))


def test_file_that_is_no_script(tmp_path):
    text = (ROOT / "ppo_continuous.py").read_text()
    (tmp_path / "older.py").write_text(text.replace("def make_policy(", "def policy("))
    with pytest.raises(ValueError, match="is not a training script, it has no make_policy"):
        load.load_script(str(tmp_path / "older.py"))
    names = [f"def {name}(): pass" for name in contract.NAMES if name != "Config"]
    (tmp_path / "plain.py").write_text("\n".join(["class Config: pass", *names]))
    with pytest.raises(ValueError, match="its Config must be a dataclass"):
        load.load_script(str(tmp_path / "plain.py"))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        load.load_script(str(tmp_path / "broken.py"))


@pytest.mark.slow
def test_slices_that_fit(script, tmp_path, capsys):
    """Seven seeds by threes."""
    args = [*SMALL[:-1], "--num-seeds=7"]
    config, options, _ = parse(script, args[1:])
    memory = compilation.compile_slice(script, config, [], 3, options).bytes * 1.01 / GIB
    run_dir = tmp_path / "run"
    train.main([*args, f"--memory={memory}", f"--run-dir={run_dir}"])
    assert "7 seeds in 3 slices of at most 3" in capsys.readouterr().out
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert checkpoints == ["00000-00003", "00003-00006", "00006-00007"]
    metrics, agents = metrics_of(run_dir), agents_of(run_dir)
    assert len(np.unique(metrics["q_value"][:, -1])) == 7
    seven = compilation.compile_slice(script, config, [], 7, options)
    carry = seven.start({}, jax.device_put(loop.seed_keys(options), seven.sharding))
    carry = seven.advance(carry._replace(evaluations=None), {}, 0, config.num_updates)
    assert_agree(metrics, hosts.fetch(carry.metrics))
    whole = flatten_dict(hosts.fetch(carry.runner_state.agent), sep=".")
    assert {name: leaf.shape for name, leaf in whole.items()} == {
        name: leaf.shape for name, leaf in agents.items()
    }
    # a run that was killed before its results were written keeps its slices
    unfinish(run_dir)
    (run_dir / "agent.safetensors").unlink()
    capsys.readouterr()
    resume.main(run_dir)
    assert "7 seeds in 3 slices of at most 3" in capsys.readouterr().out
    assert_same(metrics, metrics_of(run_dir))
    assert_same(agents, agents_of(run_dir))


# --- resumed ---


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that ended at its second checkpoint, and how many updates it had done."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    saved, save = [], loop.save

    def save_and_stop(manager, step, carry):
        save(manager, step, carry)
        saved.append(step)
        if len(saved) == 2:
            raise StopError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopError):
        patch.setattr(loop, "save", save_and_stop)
        train.main([*SMALL, "--checkpoint-interval=1e-9", f"--run-dir={run_dir}"])
    assert 0 < saved[-1] < NUM_UPDATES and not (run_dir / "metrics.npz").exists()
    return run_dir, saved[-1]


@pytest.fixture
def interrupted(stopped, tmp_path):
    """A copy of it."""
    run_dir, done = stopped
    return shutil.copytree(run_dir, tmp_path / "run"), done


def test_resume(finished, interrupted, tmp_path, monkeypatch, capsys):
    """With the copy of the script: the original is gone, another script of its name lies in the
    working directory. Seconds add up over all processes.
    """
    run_dir, done = interrupted
    record = record_of(run_dir)
    record |= {"path": str(tmp_path / "gone.py")}
    record["seconds"] = {"compile": 1000.0, "train": 2000.0, "evaluate": 3000.0}
    (run_dir / "run.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q_learning_gridworld.py").write_text("raise AssertionError('another script')")
    resume.main(run_dir)
    assert f"{done} of {NUM_UPDATES} updates are done" in capsys.readouterr().err
    assert_same_results(finished, run_dir)
    resumed = record_of(run_dir)
    assert resumed["steps_done"] == 4 * 100 * NUM_UPDATES
    for name, seconds in record["seconds"].items():
        assert seconds < resumed["seconds"][name] < seconds + 100
    speed = 4 * 2000 / resumed["seconds"]["train"]
    assert resumed["steps_per_second"] == pytest.approx(speed)


def test_a_script_that_is_edited_while_its_run_starts(tmp_path):
    """The run directory gets the text that trains, and the record its hash: resuming takes both."""
    mine = Path(shutil.copy(ROOT / "q_learning_gridworld.py", tmp_path / "edited_early.py"))
    text = mine.read_text()
    script = load.load_script(mine)
    mine.write_text(f"{text}# edited\n")
    record = make_record("train", script, script.Config(), train.Options(), [])
    (tmp_path / "run").mkdir()
    begin_run(tmp_path / "run", script.Config(), record, script, {})
    assert (tmp_path / "run" / mine.name).read_text() == text
    assert script_of(tmp_path / "run", read_record(tmp_path / "run"))


def test_resume_refuses_a_script_that_was_edited(interrupted, capfd):
    copy = interrupted[0] / "q_learning_gridworld.py"
    copy.write_text(copy.read_text() + "\n# edited\n")
    message = refusal(["resume", interrupted[0]], capfd)
    assert f"{copy}: is not as it was when the run began; --force" in message
    resume.main(interrupted[0], ResumeOptions(force=True))
    assert "finished" in record_of(interrupted[0])


@pytest.mark.parametrize("meanwhile", [False, True])
def test_resume_of_a_finished_run_changes_nothing(
    meanwhile, finished, tmp_path, monkeypatch, capsys
):
    """Also of one that another process finishes between the first look and the lock."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    record = (copy / "run.json").read_text()
    if meanwhile:
        unfinish(copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    lock = run_lock.lock

    def finish_and_lock(run_dir):
        if meanwhile:
            (copy / "run.json").write_text(record)
            before[copy / "run.json"] = (copy / "run.json").stat().st_mtime_ns
        return lock(run_dir)

    monkeypatch.setattr(run_lock, "lock", finish_and_lock)
    resume.main(copy)
    assert "has finished: there is nothing left to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_agents_of_a_finished_run_that_were_deleted_are_written_again(finished, tmp_path):
    """Bit for bit, from the last checkpoint."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "agent.safetensors").unlink()
    resume.main(copy)
    written = (copy / "agent.safetensors").read_bytes()
    assert written == (finished / "agent.safetensors").read_bytes()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The same run, which is evaluated during training."""
    folder = tmp_path_factory.mktemp("evaluated")
    return train.main([*SMALL, "--eval-interval=3", f"--run-dir={folder / 'run'}"])


def test_a_finished_run_is_extended(evaluated, tmp_path, monkeypatch):
    """Bit for bit as if it had been as long from the start, evaluations included. Also if the
    extension is killed before its first checkpoint, and then resumed.
    """

    def kill(*args, **more):
        raise KeyboardInterrupt

    words = [*SMALL, "--eval-interval=3", "--total-timesteps=3000"]
    whole = train.main([*words, f"--run-dir={tmp_path / 'whole'}"])
    extended, *killed = [shutil.copytree(evaluated, tmp_path / name) for name in "abc"]
    resume.main(extended, ResumeOptions(total_timesteps=3000))
    for copy, again in zip(killed, (None, 3000), strict=True):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(train, "train", kill)
            resume.main(copy, ResumeOptions(total_timesteps=3000))
        assert "finished" not in record_of(copy)
        assert record_of(copy)["settings"]["total_timesteps"] == 3000
        assert load_run(copy)[1].total_timesteps == 2000, "not the config of these agents"
        resume.main(copy, ResumeOptions(total_timesteps=again))
        assert "finished" in record_of(copy)
    evaluations = dict(np.load(whole / "evaluations.npz"))
    for copy in (extended, *killed):
        assert metrics_of(copy)["episodes"].shape == (4, 30)
        assert_same_results(whole, copy)
        assert_same(evaluations, dict(np.load(copy / "evaluations.npz")))


def test_a_run_without_checkpoints_is_not_extended(finished, tmp_path, capfd):
    """It would begin anew."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    message = refusal(["resume", run_dir, "--total-timesteps=3000"], capfd)
    assert "total_timesteps = 3000: the checkpoints of" in message
    assert "finished" in record_of(run_dir)


@pytest.mark.slow
def test_extension_that_would_change_the_updates(tmp_path, capfd):
    args = ["ppo", "--total-timesteps=1024", "--num-seeds=1", "--eval-episodes=0"]
    args += ["--hidden-sizes", "4", "--anneal-lr=True", f"--run-dir={tmp_path / 'run'}"]
    run_dir = train.main(args)
    capfd.readouterr()
    message = refusal(["resume", run_dir, "--total-timesteps=2048"], capfd)
    assert "total_timesteps = 2048: cannot be changed" in message
    assert message.rstrip().endswith("start a new run with --anneal-lr False")


def test_evaluation_during_training_changes_no_bit(finished, evaluated):
    """The curve, and each seed's best agent."""
    assert_same(metrics_of(evaluated), metrics_of(finished))
    assert_same(agents_of(evaluated), agents_of(finished))
    evaluations = dict(np.load(evaluated / "evaluations.npz"))
    np.testing.assert_array_equal(evaluations["timesteps"], 300 * np.arange(1, 7))
    returns = evaluations["returns"]
    assert returns.shape == (4, 6) and np.isfinite(returns).all() and len(np.unique(returns)) > 1
    best = load_run(evaluated, file="best_agent.safetensors")
    options = SimpleNamespace(seed=0, eval_episodes=2)
    again = jax.jit(evaluation.make_evaluation(*best[:2], options))(best[2], np.arange(4))
    np.testing.assert_array_equal(np.asarray(again).mean(axis=1), returns.max(axis=1))


def unfinish(run_dir) -> None:
    """Make the record of a run as it was before the results were written."""
    record = {name: value for name, value in record_of(run_dir).items() if name != "finished"}
    (run_dir / "run.json").write_text(json.dumps(record))


def unfinished(run_dir, copy):
    """A copy of a run as it was before its results were written."""
    shutil.copytree(run_dir, copy)
    for path in copy.iterdir():
        if path.suffix in (".npz", ".npy", ".png", ".safetensors"):
            path.unlink()
    unfinish(copy)
    return copy


def damage(checkpoint: Path) -> None:
    """Cut off the largest file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def test_resume_from_the_checkpoint_before_a_damaged_one(finished, interrupted, capfd):
    """It ends bit for bit as if nothing had happened."""
    run_dir, done = interrupted
    before = min(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert before < done
    damage(run_dir / "checkpoints" / str(done))
    resume.main(run_dir)
    said = capfd.readouterr().err
    assert f"the checkpoint checkpoints/{done} is damaged: " in said
    assert f"it is now {done}.damaged, and checkpoints/{before} is used" in said
    assert f"{before} of {NUM_UPDATES} updates are done" in said
    assert_same_results(finished, run_dir)


def test_resume_without_an_intact_checkpoint(finished, tmp_path, capfd):
    copy = unfinished(finished, tmp_path / "copy")
    (checkpoint,) = (copy / "checkpoints").iterdir()
    damage(checkpoint)
    with pytest.raises(SystemExit) as stop:
        resume.main(copy)
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit resume: error: run_dir"), message
    assert "no checkpoint is intact; checkpoints/20 is damaged: " in message, message
    # without one it starts anew, as after a kill while the first was written
    (part,) = checkpoint.iterdir()
    part.rename(part.with_name(f"{part.name}.partial"))
    resume.main(copy)
    assert_same_results(finished, copy)
    assert not list(copy.rglob("*.partial"))


def test_resume_of_what_cannot_be(finished, by_main, tmp_path, capfd):
    assert "is not a run directory" in refusal(["resume", tmp_path], capfd)
    assert "was not started by onejit train" in refusal(["resume", by_main], capfd)
    # all else comes from the run, as the size of its slices
    assert "--lr" in refusal(["resume", finished, "--lr=1"], capfd)
    assert "memory" in refusal(["resume", finished, "--memory=1"], capfd)
    steps = {"1000": "already has 2000", "1e30": "2,147,483,647"}
    for value in ("inf", "nan", "1024.5"):
        steps[value] = f"--total-timesteps {value}: takes a whole number"
    for value, words in steps.items():
        assert words in refusal(["resume", finished, f"--total-timesteps={value}"], capfd)
    copy = shutil.copytree(finished, tmp_path / "copy")
    holder = run_lock.lock(copy)
    message = refusal(["resume", copy], capfd)
    assert "another process is writing into this run" in message
    holder.release()
    for name in ("config.yaml", "run.json"):
        (copy / name).write_text((copy / name).read_text()[:60] + "\n{")
        assert name in refusal(["resume", copy], capfd)


def test_checkpoints_hold_no_pickled_code(finished):
    """Nothing in them is a pickle, which could run code where it is read."""
    (path,) = [path for path in (finished / "checkpoints").rglob("*") if path.is_file()]
    with np.load(path, allow_pickle=False) as stored:
        assert all(stored[name].dtype != object for name in stored.files)


# --- mistakes ---


def test_what_cannot_be_compiled_keeps_its_traceback(tmp_path):
    """It ends in a note with the fields that are not the defaults. Nothing is written."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from ppo import *\n\n\ndef make_learner(config):\n    return jnp.ones(2) + jnp.ones(3)\n"
    )
    words = [script, "--env-name=Acrobot-v1", "--hidden-sizes", "8"]
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        train.main([*map(str, words), f"--run-dir={tmp_path / 'run'}"])
    assert "config: env_name = Acrobot-v1, hidden_sizes = (8,)" in caught.value.__notes__
    assert not (tmp_path / "run").exists()


def test_run_dir_that_holds_something(finished, tmp_path, capfd):
    assert f"onejit resume {finished} continues" in refusal(
        ["train", *SMALL, f"--run-dir={finished}"], capfd
    )
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.yaml").write_text("lr: 0.1")
    for run_dir in (folder, folder / "config.yaml", folder / "config.yaml" / "run"):
        assert "run_dir" in refusal(["train", *SMALL, f"--run-dir={run_dir}"], capfd)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


# --- disks ---


@pytest.mark.slow
def test_disk_full_while_a_checkpoint_is_written(full_disk, tmp_path, capfd):
    """There is room for two and a half. The last that was committed stays good."""
    args = [*without("--total-timesteps"), "--total-timesteps=400000", "--checkpoint-interval=1e-9"]
    whole = train.main([*args, f"--run-dir={tmp_path / 'whole'}"])
    (file,) = whole.glob("checkpoints/4000/*.npz")
    room = int(2.5 * file.stat().st_size) + 50_000
    with full_disk("disk", room) as (disk, cause), pytest.raises(SystemExit) as stop:
        train.main([*args, f"--run-dir={disk / 'run'}"])
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.endswith(f"cannot be written ({cause})"), message
    copy = shutil.copytree(disk / "run", tmp_path / "larger")
    resume.main(copy)
    assert " of 4000 updates are done" in capfd.readouterr().err
    assert_same_results(whole, copy)


def test_results_that_cannot_be_written(finished, full_disk, tmp_path, capfd):
    """None are. Resuming writes them when there is room, also after a kill in between."""
    copy = unfinished(finished, tmp_path / "run")
    with full_disk("files", 10_000), pytest.raises(SystemExit) as stop:
        resume.main(copy)
    message = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and message.startswith("onejit resume: error: run_dir = "), message
    assert "File too large" in message and not (copy / "metrics.npz").exists(), message
    assert (copy / "results.partial" / "metrics.npz").exists()
    (copy / "results.partial" / "metrics.npz").write_text("half of it")
    resume.main(copy)
    assert_same_results(finished, copy)


def test_read_only_run_directory(small_disk, capfd):
    disk = small_disk(100_000, "ro")
    message = refusal(["train", *SMALL, f"--run-dir={disk / 'run'}"], capfd)
    assert "run_dir" in message and "Read-only" in message


# --- tracking ---


def test_tensorboard(tmp_path, monkeypatch):
    """Points are on disk before each checkpoint: what was not flushed was lost by a kill."""
    saved, save = [], loop.save

    def save_and_look(manager, step, carry):
        written = [step for _, step, _ in events(tmp_path / "run" / "tensorboard")]
        saved.append((step, max(written, default=0)))
        save(manager, step, carry)

    monkeypatch.setattr(loop, "save", save_and_look)
    words = ["--track=tensorboard", "--track-seeds", "--checkpoint-interval=1e-9"]
    run_dir = train.main([*SMALL, *words, f"--run-dir={tmp_path / 'run'}"])
    assert len(saved) > 1 and all(written == 100 * step for step, written in saved)
    found, metrics = events(run_dir / "tensorboard"), metrics_of(run_dir)
    tags = {tag for tag, _, _ in found}
    assert {f"episodic_return/seed_{seed:04d}" for seed in range(4)} <= tags
    assert "episodic_return/worst_agent" in tags
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
    words = [*SMALL, "--track=wandb", "--track-seeds"]
    run_dir = train.main([*words, f"--run-dir={tmp_path / 'run'}"])
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    (summary,), metrics = summaries, metrics_of(run_dir)
    assert summary["environment_steps"] == 2000 and runs[0].config["num_seeds"] == 4
    names = {f"episodic_return/seed_{seed:04d}" for seed in range(4)}
    assert names | {"q_value/mean"} <= set(summary)
    assert metrics["q_value"].min() <= summary["q_value/mean"] <= metrics["q_value"].max()


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
    devices = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "onejit", tool, *args, f"--coordinator=127.0.0.1:{port}"]
    return [
        subprocess.Popen(
            [*command, f"--num-processes={count}", f"--process-id={index}"],
            env=os.environ | devices,
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
@pytest.mark.parametrize(
    "count, num_seeds, said",
    [
        (2, 5, "5 seeds in 1 slice on 4 devices"),  # the last seed fills up the slice
        (4, 8, "8 seeds in 1 slice on 8 devices"),
    ],
)
def test_as_one_process(count, num_seeds, said, tmp_path):
    args = [*SMALL[:-1], f"--num-seeds={num_seeds}"]
    joined, alone = tmp_path / "joined", tmp_path / "alone"
    first, *others = run("train", [*args, f"--run-dir={joined}"], count)
    assert said in first and "training return" in first
    for other in others:
        assert "slice" not in other and "return" not in other and "step/s" not in other
    train.main([*args, f"--run-dir={alone}"])
    assert_agree(metrics_of(joined), metrics_of(alone))
    assert all(len(leaf) == num_seeds for leaf in agents_of(joined).values())
    assert "steps_per_second" in record_of(joined)
    # it needs all agents here
    left = {path.name for path in alone.iterdir()} - {"q_values.png"}
    assert {path.name for path in joined.iterdir()} == left


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool, count, options", [("train", 4, []), ("sweep", 2, ["--lr", "0.1", "0.5", "1"])]
)
def test_one_of_many_is_killed(tool, count, options, tmp_path):
    """The others end soon and say why. Resumed, they come to the same as without the kill."""
    left_out = ["--num-seeds", "--num-steps", "--total-timesteps"]
    left_out += ["--eval-episodes"] if options else []
    args = [*without(*left_out), *options, "--num-seeds=8", "--num-steps=10"]
    args += ["--total-timesteps=200000", "--checkpoint-interval=0.2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    processes = start(tool, [*args, f"--run-dir={killed}"], count)
    deadline = time.monotonic() + TIME_LIMIT
    while not any(path.name.isdigit() for path in killed.glob(CHECKPOINTS[tool])):
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
    assert "updates" in run("resume", [killed], count)[0]
    run(tool, [*args, f"--run-dir={whole}"], count)
    assert_same(metrics_of(whole), metrics_of(killed))
