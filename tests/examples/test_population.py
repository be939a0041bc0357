"""examples/population.py: with every kind of script, and one population looked at."""

import importlib
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.files import ROOT
from support.small import small_config

sys.path.insert(0, str(ROOT / "examples"))

import population

LR = ("log-uniform", 1e-5, 1e-1)
GAMMA = ("one-minus-log-uniform", 0.5, 0.99)


@pytest.mark.parametrize("name", ["dqn", "ppo_rnn", "sac", "q_learning_gridworld"])
def test_every_kind_of_script(name):
    """Traced alone: replay, memory, several optimizers, a table."""
    script = importlib.import_module(name)
    options = population.Options(samples=4, interval=2)
    train = population.make_train(script, small_config(script), options, {"gamma": GAMMA})
    _, metrics, history = jax.eval_shape(train, jax.random.key(0))
    assert metrics["episodes"].shape == (6, 4)
    assert history["parents"].shape == history["floats"]["gamma"].shape == (3, 4)


def test_a_population(tmp_path):
    """Quarters, floats and the files of two populations of eight."""
    words = ["q_learning_gridworld", "--num-steps=200", "--total-timesteps=2000"]
    words += ["--height=4", "--width=6", "--start", "3", "5", "--max-steps-in-episode=50"]
    words += ["--lr", *map(str, LR), "--gamma", *map(str, GAMMA)]
    options = ["--samples=8", "--num-seeds=2", "--interval=2", f"--run-dir={tmp_path / 'run'}"]
    script, config, given, ranges = population.read_words([*words, *options])
    keys = jax.random.split(jax.random.key(0), 2)
    train = jax.jit(jax.vmap(population.make_train(script, config, given, ranges)))
    state, metrics, history = train(keys)
    lr, gamma = (np.asarray(history["floats"][name]) for name in ("lr", "gamma"))
    returns, parents = np.asarray(history["returns"]), np.asarray(history["parents"])
    assert (parents[:, -1] == np.arange(8)).all()  # nothing is copied at the end
    for p in range(2):
        for stretch in range(4):
            order = np.argsort(-returns[p, stretch], kind="stable")
            for child, parent in enumerate(parents[p, stretch]):
                factor = lr[p, stretch + 1, child] / lr[p, stretch, parent]
                mirrored = (1 - gamma[p, stretch + 1, child]) / (1 - gamma[p, stretch, parent])
                if child in order[-2:]:
                    assert parent in order[:2]
                    is_at_an_end = np.isclose(lr[p, stretch + 1, child], LR[1:]).any()
                    assert is_at_an_end or np.isclose(factor, [0.8, 1.25], rtol=1e-3).any()
                    is_at_an_end = np.isclose(gamma[p, stretch + 1, child], [0.5, 0.99]).any()
                    assert is_at_an_end or np.isclose(mirrored, [0.8, 1.25], rtol=1e-3).any()
                else:
                    assert parent == child and factor == mirrored == 1
    keys_of_agents = jax.random.key_data(state.runner_state.key)
    assert len(np.unique(keys_of_agents.reshape(16, -1), axis=0)) == 16  # no copy explores alike

    kept = population.Trained(state.runner_state.agent)
    population.write_results(
        script, config, given, ranges, (kept, metrics, history), tmp_path / "run"
    )
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"agent.safetensors", "best.yaml", "table.txt", "population.png"}
    agents = load_file(tmp_path / "run" / "agent.safetensors")
    assert {len(leaf) for leaf in agents.values()} == {16}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppo", "give a field a range"),
        ("ppo --lr log-uniform 1e-5 1e-1 --samples 3", "samples = 3"),
        ("ppo --lr log-uniform 1e-5 1e-1 --interval 1000000", "interval = 1000000: must divide"),
        (
            "ppo --lr log-uniform 1e-5 1e-1 --env-name onejit.envs.gymnasium:CartPole-v1",
            "an environment outside of JAX",
        ),
    ],
)
def test_refuses(words, message):
    with pytest.raises(ValueError, match=message):
        population.read_words(words.split())
