"""`onejit export`: what the folder holds, that its card is true, and that it needs no onejit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.files import ROOT
from support.hub import TOKEN, local_hub

import onejit
from onejit import __main__, train
from onejit.base import statistics
from onejit.engine import evaluation
from onejit.run.directory import load_metrics, load_run
from onejit.run.record import read_stored
from onejit.share import export
from onejit.watch import render


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    args = "q_learning_gridworld --total-timesteps=3000 --num-steps=300 --lr=0.5"
    args += " --num-seeds=5 --seed=3 --max-steps-in-episode=60 --eval-episodes=2"
    path = tmp_path_factory.mktemp("export") / "run"
    return train.main([*args.split(), f"--run-dir={path}"])


@pytest.fixture
def copied(run_dir, tmp_path):
    """A copy that may be harmed."""
    return shutil.copytree(run_dir, tmp_path / "copy")


@pytest.fixture(scope="module")
def folder(run_dir):
    return export.main(run_dir)


def run_card(folder):
    """What the card's Python code prints, in a process that cannot import onejit."""
    code = re.findall(r"(?s)```python\n(.*?)```", (folder / "README.md").read_text())[-1]
    (folder / "from_the_card.py").write_text(f"import sys\nsys.modules['onejit'] = None\n{code}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "from_the_card.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_folder_holds(run_dir, folder):
    assert folder == run_dir.with_name("run-export")
    copies = {"agent.safetensors", "config.yaml", "metrics.npz", "evaluation.npy"}
    copies |= {"learning_curve.png", "q_learning_gridworld.py"}
    names = {path.name for path in folder.iterdir()} - {"from_the_card.py"}
    assert names == copies | {"README.md", "replay.gif", "run.json"}
    for name in copies:
        assert (folder / name).read_bytes() == (run_dir / name).read_bytes()
    for name in ("README.md", "run.json"):  # no command line, which may hold passwords
        text = (folder / name).read_text()
        assert str(ROOT) not in text and str(run_dir.parent) not in text
    with Image.open(folder / "replay.gif") as picture:
        assert picture.n_frames > 3


def test_the_card(run_dir, folder):
    """Intervals, the worst agent, the number of the best one, commands, and what hubs read."""
    text = (folder / "README.md").read_text()
    values = {"final return": statistics.final_return(load_metrics(run_dir))}
    values["greedy return"] = np.load(run_dir / "evaluation.npy").mean(axis=1)
    for name, each in values.items():
        interval = statistics.show(*statistics.student_interval(each))
        assert f"| {name} | {interval} | {each.min():.4g} | 5 of 5 |" in text
    best = int(statistics.rank_agents(load_metrics(run_dir))[0][-1])
    assert f"leaf[{best}]" in text and f"an episode of agent {best}]" in text
    assert "python q_learning_gridworld.py --config config.yaml --num-seeds 5 --seed 3" in text
    assert f"agent {best}, the best of 5 by the mean of their greedy episodes." in text
    assert "mean over 5 seeds" in text and "Student's t over seeds" in text
    returns = evaluation.evaluate(*load_run(run_dir), best, 16)
    assert returns.shape == (16,)
    value = f"{returns.mean():.2f} +/- {returns.std():.2f}"
    assert f"in 16 new greedy episodes, {value}: the mean and the standard deviation" in text
    assert "Licence: apache-2.0" in text


def test_the_card_of_agents_that_a_sweep_has_chosen(copied, tmp_path):
    """Another training returns less, and the config alone does not repeat it."""
    record = read_stored(copied)
    chosen = {"kind": "trial", "population": "the best agents"}
    (copied / "run.json").write_text(json.dumps(record | chosen))
    short = {"video": False, "eval_episodes": 0}
    text = (export.main(copied, tmp_path / "out", **short) / "README.md").read_text()
    assert "chosen by a sweep" in text and "A sweep has chosen the agents by returns" in text
    assert "another training. " not in text and "To train them again" not in text
    replay = {"kind": "trial", "population": "a replay of the schedule {}"}
    (copied / "run.json").write_text(json.dumps(record | replay))
    text = (export.main(copied, tmp_path / "replay", **short) / "README.md").read_text()
    assert "with a schedule that a sweep has found" in text and "another training. " in text


def test_the_hub_reads_the_card(run_dir, folder):
    """By its own library, as the page of a model does."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    card = huggingface_hub.ModelCard((folder / "README.md").read_text()).data
    assert card.license == "apache-2.0" and card.library_name == "onejit"
    assert card.pipeline_tag == "reinforcement-learning"
    assert {"reinforcement-learning", "GridWorld"} <= set(card.tags)
    (result,) = card.eval_results
    assert (result.task_type, result.dataset_type) == ("reinforcement-learning", "GridWorld")
    assert result.metric_type == "mean_reward"
    mean, deviation = map(float, result.metric_value.split(" +/- "))
    assert 0 <= mean <= 1 and 0 <= deviation <= 0.5


def test_another_agent_without_episodes_and_video(run_dir, tmp_path):
    words = ["--seed-index=2", "--eval-episodes=0", "--no-video", "--license=mit"]
    out = tmp_path / "deep" / "out"
    __main__.main(["export", str(run_dir), f"--out={out}", *words])
    text = (out / "README.md").read_text()
    assert not (out / "replay.gif").exists() and "replay.gif" not in text
    assert "leaf[2]" in text and "This card plays agent 2, as --seed-index says." in text
    assert "mean_reward" not in text and "license: mit\n" in text


def test_the_cards_code_gives_an_action(folder):
    assert run_card(folder).strip() in ("0", "1", "2", "3")


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        __main__.main(["export", *map(str, words)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    return said


# --- the hub ---


def test_no_login(copied, tmp_path, capsys, monkeypatch):
    """One line before anything is written, and likewise for a name that the hub refuses."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "push = me/mine: needs a login: `hf auth login` or HF_TOKEN" in refused(
        capsys, copied, "--push=me/mine"
    )
    for name in ("mine", "me/mi ne", "a/b/c"):
        assert f"push = {name}: " in refused(capsys, copied, f"--push={name}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "needs huggingface-hub; pip install" in refused(capsys, copied, "--push=me/mine")
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


@pytest.fixture
def server(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    with local_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        address = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def test_a_wrong_token(copied, tmp_path, server, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "push = me/mine: " in refused(capsys, copied, "--push=me/mine")
    assert {path.name for path in tmp_path.iterdir()} == {"copy"} and not server.files


def test_a_failed_upload_leaves_the_folder(copied, tmp_path, server, capsys):
    """The message says where it is, and how to upload it."""
    server.fails = ["/repos/create"]
    said = refused(capsys, copied, "--push=me/mine", "--no-video", "--eval-episodes=0")
    out = copied.with_name("copy-export")
    assert f"{out} is complete; `hf upload me/mine {out}` uploads it" in said
    assert (out / "README.md").is_file()


def test_upload_and_download(copied, server, tmp_path, capsys, monkeypatch):
    """Code that was downloaded runs only with --trust."""
    monkeypatch.chdir(tmp_path)
    __main__.main(["export", str(copied), "--push=me/mine", "--no-video", "--private"])
    out = copied.with_name("copy-export")
    assert f"uploaded to {server.url}/me/mine\n" in capsys.readouterr().out
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*")}
    assert server.files == {"me/mine": files} and server.visibility == {"me/mine": "private"}

    def render_it(*words):
        __main__.main(["render", "hf:me/mine", "--agents=best", "--max-steps=1", *words])

    with pytest.raises(SystemExit) as stop:
        render_it()
    said = capsys.readouterr().err.splitlines()[-1]
    script = "runs/hf/me/mine/q_learning_gridworld.py"
    assert stop.value.code == 2 and f"contains code of its sender: {script}; --trust" in said
    assert not (tmp_path / "runs/hf/me/mine/render").exists()
    render_it("--trust")
    assert "hf:me/mine is in runs/hf/me/mine" in capsys.readouterr().out
    assert [*(tmp_path / "runs/hf/me/mine/render").glob("best_agent*.gif")]
    with pytest.raises(SystemExit):
        __main__.main(["render", "hf:me/none"])
    assert "hf:me/none: 404" in capsys.readouterr().err


def test_the_functions_of_the_package(copied, server, tmp_path, monkeypatch, capsys):
    """Four lines of the card download the run, play the agent and get the card's mean_reward."""
    monkeypatch.chdir(tmp_path)
    text = (export.main(copied, push="me/mine", video=False) / "README.md").read_text()
    code = re.findall(r"(?s)```python\n(.*?)```", text)[0]
    assert len([line for line in code.splitlines() if line]) == 4
    exec(code, {})
    (value,) = re.findall(r"value: (.*)", text)
    assert capsys.readouterr().out.splitlines()[-1] == value

    folder = onejit.download("me/mine")
    assert folder == Path("runs/hf/me/mine")
    script, config, agents = onejit.load_run(folder)
    returns = onejit.evaluate(script, config, agents, episodes=3)
    assert returns.shape == (5, 3)
    last = onejit.evaluate(script, config, agents, agent=4, episodes=3)
    np.testing.assert_allclose(last, returns[4])
    with pytest.raises(IndexError):
        onejit.evaluate(script, config, agents, agent=5)

    rows = onejit.compare_runs([folder, f"again={copied}"], returns="greedy")
    means = {row["method"]: row["value"] for row in rows if row["statistic"] == "mean"}
    mean = np.load(copied / "evaluation.npy").mean()
    assert means == pytest.approx({"q_learning_gridworld": mean, "again": mean})


# --- mistakes ---


def test_bad_input(copied, tmp_path, capsys):
    record = json.loads((copied / "run.json").read_text())
    (tmp_path / "there").mkdir()
    assert "none: is not a run directory" in refused(capsys, tmp_path / "none")
    assert "there: already exists" in refused(capsys, copied, "--out", tmp_path / "there")
    assert "eval_episodes = -1: must be from 0" in refused(capsys, copied, "--eval-episodes=-1")
    assert "must be from 0" in refused(capsys, copied, "--eval-episodes=99999999999")
    assert "--viedo: is not a flag; did you mean --video?" in refused(capsys, copied, "--viedo")
    script = copied / "q_learning_gridworld.py"
    source = script.read_text()
    script.write_text(source + "\n# edited\n")
    assert "has been edited since the run began" in refused(capsys, copied, "--no-video")
    assert export.main(copied, tmp_path / "forced", video=False, force=True)
    script.unlink()
    assert "has no copy of its script" in refused(capsys, copied)
    script.write_text(source)
    for lost in ("finished", "final return"):  # the second is one of a sweep
        rest = {key: value for key, value in record.items() if key != lost}
        (copied / "run.json").write_text(json.dumps(rest))
        assert "is not a finished run of onejit train" in refused(capsys, copied)
    (copied / "run.json").write_text(json.dumps(record))
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(config.replace("height: ", "height: 1"))
    said = refused(capsys, copied, "--no-video")
    assert "agent.safetensors: does not fit" in said and "in its networks" in said
    (copied / "config.yaml").write_text(config)
    (copied / "agent.safetensors").write_bytes(b"")
    assert "agent.safetensors: cannot be read" in refused(capsys, copied)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "there", "forced"}


def test_all_or_nothing(copied, tmp_path, monkeypatch, capsys):
    """A picture that cannot be drawn leaves no folder, and the message says how to do without."""

    def fail(*_, **__):
        raise ValueError("there is no pygame")

    monkeypatch.setattr(render, "main", fail)
    assert "video: there is no pygame; --no-video exports without it" in refused(capsys, copied)
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


ENVIRONMENT = """
import gymnax
from gymnax.environments.bsuite.catch import Catch

gymnax.register("Mine-v0", Catch)
"""


@pytest.mark.slow
def test_networks_and_an_environment_of_ones_own(tmp_path, monkeypatch):
    """Its module goes into the folder, so that the card's code finds it."""
    (tmp_path / "env_to_export.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    small = "--total-timesteps 64 --num-steps 16 --num-envs 2 --num-minibatches 1"
    small += " --update-epochs 1 --hidden-sizes 8 4"
    small += " --num-seeds=2 --run-dir=run"
    run_dir = train.main(["ppo", "--env-name=env_to_export:Mine-v0", *small.split()])
    out = export.main(run_dir)
    assert (out / "modules" / "env_to_export.py").read_text() == ENVIRONMENT
    text = (out / "README.md").read_text()
    assert "PYTHONPATH=modules python ppo.py" in text and "\n- Mine-v0\n" in text
    (tmp_path / "env_to_export.py").unlink()
    elsewhere = shutil.move(out, tmp_path.parent / "elsewhere_of_export")
    assert run_card(elsewhere).strip() in ("0", "1", "2")
    shutil.rmtree(elsewhere)
