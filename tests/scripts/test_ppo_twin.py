"""PPO for discrete actions, written plainly: the twin of ppo.py.

It is the twin of ppo_continuous.py with another policy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ppo_continuous_twin as continuous
from support import twin
from support.tiers import slow
from support.twin import RunningStatistics

import ppo as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=2,
    num_steps=6,
    update_epochs=2,
    num_minibatches=3,
    hidden_sizes=(8,),
    total_timesteps=2 * 6 * 3 + 1,  # three updates
    lr=3e-2,
    gamma=0.9,
    gae_lambda=0.8,
    clip_eps=0.1,
    vf_clip_eps=0.05,
    ent_coef=0.03,
    vf_coef=0.7,
    max_grad_norm=0.6,
)
CASES = {
    "all on": dataclasses.replace(SMALL, anneal_lr=True, normalize_obs=True, normalize_reward=True),
    "all off": dataclasses.replace(
        SMALL,
        anneal_lr=False,
        normalize_obs=False,
        normalize_reward=False,
        max_grad_norm=float("inf"),
        vf_clip_eps=float("inf"),
        activation="relu",
        buffer_dtype="bfloat16",
    ),
}


class Twin(continuous.Twin):
    script = script

    def log_probs(self, params, obs):
        """The log-probability of each action, [..., num_actions]."""
        logits = self.actor.apply(params["actor"], obs).logits
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def act(self, key, obs):
        log_probs = self.log_probs(self.params, obs)
        gumbel = jax.random.gumbel(key, log_probs.shape)
        action = jnp.argmax(log_probs + gumbel, axis=-1)  # a sample of the policy
        return action, log_probs[jnp.arange(len(action)), action]

    def log_prob_and_entropy(self, params, obs, action):
        log_probs = self.log_probs(params, obs)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
        action = action.astype(int)
        return log_probs[jnp.arange(len(action)), action], entropy.mean()


class MaskedStatistics(RunningStatistics):
    """Of observations without their action masks."""

    def add(self, rows) -> None:
        super().add(np.asarray(rows)[:, :3])

    def normalize(self, x):
        return np.concatenate([super().normalize(x[:, :3]), x[:, 3:]], axis=-1)


class MaskedTwin(Twin):
    """Observations are [N, 6]: three numbers, and the mask of three actions."""

    def __init__(self, config, rng):
        super().__init__(config, rng)
        self.obs_statistics = MaskedStatistics((3,))

    def init_networks(self, actor_key, critic_key, obs) -> None:
        super().init_networks(actor_key, critic_key, obs[:, :3])

    def log_probs(self, params, obs):
        """The policy under the condition that the action is valid."""
        logits = self.actor.apply(params["actor"], obs[:, :3]).logits
        logits = jnp.where(obs[:, 3:] > 0, logits, -1e9)
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def value(self, params, obs):
        return super().value(params, obs[:, :3])

    def check(self, state) -> None:
        super().check(state._replace(obs=np.concatenate(state.obs, axis=-1)))


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, seed=9)  # many episodes terminate


@pytest.mark.parametrize(
    "mask", [jnp.array([0.0, 0.0, -jnp.inf]), jnp.ones((1,), bool), jnp.array([1, 1, 0])]
)
def test_a_mask_of_another_form_is_refused(mask):
    """Numbers to add would allow the forbidden actions, and one entry would mask nothing."""
    actor, _ = script.make_networks(CASES["all on"], *script.make_env(CASES["all on"]))
    obs = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"^action_mask: .* convert numbers by mask > 0"):
        actor.init(jax.random.key(0), obs, mask)


def test_twin_with_action_masks():
    config = dataclasses.replace(CASES["all on"], env_name="WalkMasked")
    twin.check(script, config, MaskedTwin, seed=9)
