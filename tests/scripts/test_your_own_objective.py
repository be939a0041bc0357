"""docs/your_own_objective.md: its diff applies to ppo.py, is short, is the objective that it says,
and trains.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.files import ROOT
from support.small import flags, small_config

import ppo
from onejit.script import load

PAGE = (ROOT / "docs" / "your_own_objective.md").read_text()
DIFF = re.search(r"(?s)```diff\n(.*?)```", PAGE)[1]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The copy of ppo.py that the page makes: `cp`, then its diff by `git apply`."""
    folder = tmp_path_factory.mktemp("spo")
    (folder / "spo.py").write_text((ROOT / "ppo.py").read_text())
    (folder / "spo.diff").write_text(DIFF)
    done = subprocess.run(
        ["git", "apply", "spo.diff"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return folder / "spo.py"


@pytest.fixture(scope="module")
def spo(file):
    return load.load_script(file)


def plain_loss(log_prob, old_log_prob, advantage, clip_eps):
    """The negated objective of SPO, one sample after the other."""
    total, mean, std = 0.0, np.mean(advantage), np.std(advantage)
    for new, old, raw in zip(log_prob, old_log_prob, advantage, strict=True):
        ratio, a = np.exp(new - old), (raw - mean) / std
        total += ratio * a - abs(a) / (2 * clip_eps) * (ratio - 1) ** 2
    return -total / len(advantage)


@pytest.mark.parametrize("clip_eps", [0.1, 0.2, 0.7])
def test_objective_and_its_gradient_against_numpy(spo, clip_eps):
    rng = np.random.default_rng(0)
    log_prob, old_log_prob = rng.normal(-1, 0.3, size=(2, 32))
    advantage = rng.normal(1, 2, size=32)
    loss, metrics = spo.policy_loss(
        *map(jnp.asarray, (log_prob, old_log_prob, advantage)), clip_eps
    )
    np.testing.assert_allclose(
        loss, plain_loss(log_prob, old_log_prob, advantage, clip_eps), rtol=1e-4
    )
    assert metrics.keys() == {"policy_loss", "approx_kl", "clip_fraction"}
    gradient = jax.grad(
        lambda x: spo.policy_loss(x, jnp.asarray(old_log_prob), jnp.asarray(advantage), clip_eps)[0]
    )
    for i, each in enumerate(gradient(jnp.asarray(log_prob))):
        up, down = (
            plain_loss(log_prob + h * np.eye(32)[i], old_log_prob, advantage, clip_eps)
            for h in (1e-5, -1e-5)
        )
        np.testing.assert_allclose(each, (up - down) / 2e-5, rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # compiles two whole trainings
def test_a_coefficient_falls_with_the_updates(tmp_path):
    """With the schedule, the first update equals PPO's, and the second one has a smaller bonus."""
    diff = re.search(r"(?s)## A coefficient with a schedule.*?```diff\n(.*?)```", PAGE)[1]
    text = (ROOT / "ppo.py").read_text()
    for old, new in re.findall(r"(?m)^-(.*)\n((?:^\+.*\n)+)", diff):
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", re.sub(r"(?m)^\+", "", new))
    (tmp_path / "ppo_schedule.py").write_text(text)
    script = load.load_script(tmp_path / "ppo_schedule.py")
    settings = {"ent_coef": 0.5, "lr": 0.01, "anneal_lr": False}
    config = small_config(script, **settings)
    assert config.num_updates >= 2
    out, other = (
        jit_quickly(module.make_train(small_config(module, **settings)))(jax.random.key(0))
        for module in (script, ppo)
    )
    loss, others = (run["metrics"]["policy_loss"] for run in (out, other))
    np.testing.assert_allclose(loss[0], others[0], rtol=1e-5)
    params, other_params = (jax.tree.leaves(run["runner_state"].params) for run in (out, other))
    assert any((a != b).any() for a, b in zip(params, other_params, strict=True))


def test_lines_in_the_loop_of_main(tmp_path):
    """They log to W&B, and save the agents after every 20th of the chunks."""
    section = re.search(r"(?s)## A line in the training loop\n(.*?)\n## ", PAGE)[1]
    text = (ROOT / "ppo.py").read_text()
    for old, new in re.findall(r"(?m)^ (.*)\n((?:^\+.*\n)+)", section):
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{old}\n" + re.sub(r"(?m)^\+", "", new))
    (tmp_path / "my_algorithm.py").write_text(text)
    words = flags(small_config(ppo, num_updates=21))
    done = subprocess.run(
        [sys.executable, "my_algorithm.py", *words, "--num-seeds=2", "--run-dir=run"],
        cwd=tmp_path,
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (logged,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"policy_loss" in logged.read_bytes()
    assert [path.name for path in (tmp_path / "run").glob("chunk_*")] == ["chunk_20.npz"]
    with np.load(tmp_path / "run" / "chunk_20.npz") as saved:
        assert all(len(leaf) == 2 for leaf in saved.values())


def test_it_trains(spo):
    metrics = jit_quickly(spo.make_train(small_config(spo)))(jax.random.key(0))["metrics"]
    for name in ("policy_loss", "value_loss", "entropy"):
        assert np.isfinite(metrics[name]).all()
