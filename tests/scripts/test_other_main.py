"""The package relies on the contract of a script alone: not on `main` and what only it uses."""

import re

import numpy as np
import pytest
import yaml
from support.files import ROOT

from onejit import resume, sweep, train
from onejit.run.agents import read_agents
from onejit.run.resume import ResumeOptions
from onejit.script import load
from onejit.watch import render

OTHER_MAIN = """
# --- main ---


def main() -> None:
    print("this main trains nothing")


if __name__ == "__main__":
    main()
"""
ENVIRONMENT = ["--env-name=Catch-bsuite", "--num-envs=2", "--num-steps=16", "--hidden-sizes=8"]
SMALL = [*ENVIRONMENT, "--num-minibatches=2", "--update-epochs=1", "--total-timesteps=128"]
SMALL += ["--anneal-lr=False", "--num-seeds=2"]


def with_another_main(text: str) -> str:
    """The text of a script up to its block `main`, and another main."""
    before, banner, _ = re.split(r"(?m)^(# --- main.*)$", text, maxsplit=1)
    assert banner
    return before.rstrip() + "\n\n" + OTHER_MAIN


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A copy of ppo.py with another main."""
    path = tmp_path_factory.mktemp("copy") / "my_ppo.py"
    path.write_text(with_another_main((ROOT / "ppo.py").read_text()))
    return path


@pytest.fixture(scope="module")
def run_dir(script):
    return train.main([script, *SMALL, "--eval-episodes=2", f"--run-dir={script.parent / 'run'}"])


def test_the_copy_has_nothing_of_main(script):
    loaded = load.load_script(str(script))
    for name in ("read_flags", "save_results", "mean_return"):
        assert not hasattr(loaded, name)


def test_train_and_resume(run_dir):
    for name in ("config.yaml", "metrics.npz", "agent.safetensors", "learning_curve.png"):
        assert (run_dir / name).is_file()
    _, metadata = read_agents(run_dir / "agent.safetensors")
    assert metadata == {"script": "my_ppo", "seed": "0"}
    before = dict(np.load(run_dir / "metrics.npz"))
    resume.main(run_dir, ResumeOptions(total_timesteps=256))
    after = dict(np.load(run_dir / "metrics.npz"))
    for name, values in before.items():
        np.testing.assert_array_equal(after[name][:, : values.shape[1]], values)


def test_sweep(script):
    run_dir = sweep.main(
        [script, *SMALL, "--lr", "1e-3", "1e-2", f"--run-dir={script.parent / 'sweep'}"]
    )
    assert len((run_dir / "results.csv").read_text().splitlines()) == 1 + 2 * 2
    assert yaml.safe_load((run_dir / "best.yaml").read_text())["lr"] in (1e-3, 1e-2)


def test_render(run_dir):
    pictures = render.main(run_dir, agents=("best",), formats=("gif",), max_steps=3)
    assert pictures[0].read_bytes().startswith(b"GIF")
