"""DPO for continuous actions, written plainly: the twin of dpo_continuous.py.

It is the twin of ppo_continuous.py with another objective.
"""

import dataclasses

import jax.numpy as jnp
import pytest
import test_ppo_continuous_twin as ppo
from support import twin
from support.tiers import slow

import dpo_continuous as script

FIELDS = {name: value for name, value in vars(ppo.SMALL).items() if name != "clip_eps"}
SMALL = script.Config(**FIELDS | {"dpo_alpha": 0.05, "dpo_beta": 0.02})
CASES = {
    "all on": dataclasses.replace(SMALL, anneal_lr=True, staggered_resets=True),
    "all off": dataclasses.replace(
        SMALL, anneal_lr=False, normalize_obs=False, normalize_reward=False
    ),
}


class Twin(ppo.Twin):
    script = script

    def objective(self, ratio, advantage):
        """r A minus the drift f of arXiv 2210.05639, in its two cases.

        A >= 0: f = relu((r - 1) A - alpha tanh((r - 1) A / alpha))
        A < 0:  f = relu(A log r - beta tanh(A log r / beta))
        """
        alpha = self.config.dpo_alpha
        beta = self.config.dpo_beta
        gain = (ratio - 1) * advantage
        log_gain = jnp.log(ratio) * advantage
        drift = jnp.where(
            advantage >= 0,
            jnp.maximum(gain - alpha * jnp.tanh(gain / alpha), 0),
            jnp.maximum(log_gain - beta * jnp.tanh(log_gain / beta), 0),
        )
        return ratio * advantage - drift, {"drift": drift.mean()}


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, seed=9)  # many episodes terminate
