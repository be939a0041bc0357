"""What the scripts learn where values and best actions are known (`toys.ProbeContinuous`), and on
a pendulum.
"""

import importlib
import types

import jax
import numpy as np
import pytest
import toys
from support.files import ROOT
from support.probe import DISCRETE, ENDLESS, FINITE, LIMIT, learn
from support.tiers import slow

from onejit.engine.evaluation import make_evaluation
from onejit.run.directory import read_config

REPLAY, ROLLOUTS = 500, 300  # updates


@pytest.mark.parametrize("name, num_updates, settings", [
    ("dqn", REPLAY, {}),
    slow("apex_dqn", REPLAY, {"n_step": 3, "tau": 0.3}),
    slow("rainbow", REPLAY, {"distribution": "none"}),
    slow("rainbow", REPLAY, {"distribution": "categorical"}),
    slow("rainbow", REPLAY, {"distribution": "quantile"}),
    ("pqn", ROLLOUTS, {"q_lambda": 0.9}),
    slow("pqn_rnn", ROLLOUTS, {"q_lambda": 0.9}),
    ("ppo", ROLLOUTS, {}),
    ("ppo_continuous", ROLLOUTS, {}),
    slow("ppo_rnn", ROLLOUTS, {}),
    slow("reppo", ROLLOUTS, {}),
    ("sac", REPLAY, {}),
    slow("td3", REPLAY, {}),
    slow("crossq", 3 * REPLAY, {}),
    slow("flashsac", 2 * REPLAY, {}),
])  # fmt: skip
def test_values_and_best_actions(name, num_updates, settings):
    """What terminates is not bootstrapped. What is cut is, from its own last observation."""
    learned = learn(name, num_updates, **settings)
    scale = getattr(learned.config, "reward_scale", 1.0)
    for sign in (1.0, -1.0):
        ends = learned.values([[1, 0, 0, sign, step] for step in range(len(FINITE))])
        cut = learned.values([[0, 1, 0, sign, 0]] * LIMIT)
        expected = np.broadcast_to(sign * scale * FINITE[:, None], ends.shape)
        np.testing.assert_allclose(ends, expected, atol=0.3 * scale)
        np.testing.assert_allclose(cut, sign * scale * ENDLESS, rtol=0.1)
    assert (learned.first_rewards(toys.BEST) > (0.95 if name in DISCRETE else -0.1)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, least", [("sac", -180), ("td3", -180), ("ppo_continuous", -200), ("reppo", -200)]
)
def test_pendulum_is_learned_with_its_config(name, least):
    """Four seeds of configs/NAME/pendulum.yaml."""
    script = importlib.import_module(name)
    config = read_config(script, ROOT / "configs" / name / "pendulum.yaml")
    out = jax.jit(jax.vmap(script.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    options = types.SimpleNamespace(seed=0, eval_episodes=64, eval_interval=0)
    returns = make_evaluation(script, config, options)(out["runner_state"].agent, np.arange(4))
    assert returns.mean() > least
