"""agents/: each agent plays as its card says."""

import json
import shlex
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image
from support.files import ROOT, repository_files
from support.tiers import slow

from onejit import __main__
from onejit.engine import evaluation
from onejit.run.directory import load_run, read_config
from onejit.run.record import read_record
from onejit.script import command_line, load
from onejit.train.options import Options
from onejit.watch import render

AGENTS = [path.parent for path in repository_files("agents/*/card.json")]
QUICKLY = ("q_learning_gridworld_8x12", "ppo_catch")


@pytest.mark.parametrize(
    "name", [each.name if each.name in QUICKLY else slow(each.name) for each in AGENTS]
)
def test_an_agent_plays_as_its_card_says(name):
    folder = ROOT / "agents" / name
    card, record = json.loads((folder / "card.json").read_text()), read_record(folder)
    assert card["script"] == record.settings["script"] and record.settings["num_seeds"] == 1
    script, config, agents = load_run(folder)
    render.check_agents(script, config, agents, folder)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(agents))
    options = SimpleNamespace(seed=card["episodes_seed"], eval_episodes=card["episodes"])
    (returns,) = jax.jit(evaluation.make_evaluation(script, config, options))(agents, np.arange(1))
    expected = [card["greedy_return"], card["worst_episode"]]
    # other machines round otherwise
    np.testing.assert_allclose([returns.mean(), returns.min()], expected, rtol=0.03)


@pytest.mark.parametrize("folder", AGENTS, ids=lambda folder: folder.name)
def test_the_command_of_a_card_trains_with_its_config(folder, monkeypatch):
    monkeypatch.chdir(ROOT)  # the command names a config of the repository
    card = json.loads((folder / "card.json").read_text())
    script = load.load_script(card["script"])
    _, _, _, *words = shlex.split(card["command"])
    assert words[-4] == "--num-seeds" and words[-2:] == ["--seed", "100"]
    flags = command_line.split_flags(words)
    of_command, _, _ = command_line.parse_with(script, flags, Options, None)
    assert of_command == read_config(script, folder / "config.yaml")


def test_agents_are_small_and_in_the_table():
    assert len(AGENTS) >= 14
    assert sum(path.stat().st_size for path in repository_files("agents/**/*")) < 900_000
    table = (ROOT / "agents" / "README.md").read_text()
    for folder in AGENTS:
        card = json.loads((folder / "card.json").read_text())
        assert f"| [{folder.name}]({folder.name}) | " in table
        assert (ROOT / card["config"]).is_file()


def test_as_the_page_says(tmp_path, monkeypatch, capsys):
    """`onejit render agents/NAME`, whatever the working directory is."""
    monkeypatch.chdir(tmp_path)
    __main__.main(["render", ROOT / "agents" / "ppo_catch", "--out", "out"])
    said = capsys.readouterr().out
    assert f"{ROOT / 'ppo.py'} is used instead" in said and "return 1 in" in said
    with Image.open(tmp_path / "out" / "best_agent0.gif") as picture:
        assert picture.n_frames > 3
