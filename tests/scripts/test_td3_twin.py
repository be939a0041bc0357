"""TD3, written plainly: the twin of td3.py. It acts, explores and replays as the twin of sac.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac_twin as sac
from support import twin
from support.tiers import slow

import td3 as script

SMALL = script.Config(
    env_name="WalkContinuous",
    num_envs=2,
    num_steps=2,
    gradient_steps=4,
    policy_delay=2,
    batch_size=6,
    buffer_size=12,  # three rollouts: it wraps around in the second update
    learning_starts=7,  # two rollouts of warm-up
    total_timesteps=8 + 4 * 3,
    policy_lr=2e-2,
    q_lr=3e-2,
    gamma=0.9,
    tau=0.3,
    target_noise=0.4,
    noise_clip=0.3,
    exploration_noise=0.8,
    hidden_sizes=(8,),
)
CASES = {
    "all on": dataclasses.replace(SMALL, noise_correlation=0.6, normalize_obs=True),
    "all off": dataclasses.replace(
        SMALL, policy_delay=1, gradient_steps=2, num_steps=1, num_envs=3, activation="tanh"
    ),
}


class Twin(sac.Twin):
    script = script

    def start_learning(self) -> None:
        self.target_actor = self.actor_params
        self.target_critics = list(self.critic_params)
        self.critic_gradient = jax.jit(jax.grad(self.critic_loss, has_aux=True))
        self.actor_gradient = jax.jit(jax.grad(self.actor_loss, has_aux=True))

    def act_with_noise(self, obs, noise):
        action = self.actor.apply(self.actor_params, jnp.asarray(obs, jnp.float32))
        return np.clip(action + self.config.exploration_noise * noise, -1, 1)

    def target(self, batch, key):
        """Equations 10 and 14 of arXiv 1802.09477."""
        config = self.config
        action = self.actor.apply(self.target_actor, batch["next_obs"])
        noise = config.target_noise * jax.random.normal(key, action.shape)
        noise = np.clip(noise, -config.noise_clip, config.noise_clip)
        action = np.clip(action + noise, -1, 1)
        qs = [self.critic.apply(p, batch["next_obs"], action) for p in self.target_critics]
        not_terminated = 1 - batch["terminated"].astype(np.float32)
        return batch["reward"] + config.gamma * not_terminated * jnp.minimum(*qs)

    def actor_loss(self, actor_params, critic_params, batch):
        """-Q_1(s, mu(s)), algorithm 1 of arXiv 1802.09477."""
        action = self.actor.apply(actor_params, batch["obs"])
        loss = -self.critic.apply(critic_params[0], batch["obs"], action).mean()
        return loss, {"policy_loss": loss}

    def learn(self, key) -> list[dict]:
        config = self.config
        num_groups = config.gradient_steps // config.policy_delay
        steps = []
        for group_key in jax.random.split(key, num_groups):
            for critic_key in jax.random.split(group_key, config.policy_delay):
                batch_key, noise_key = jax.random.split(critic_key)
                batch = self.sample(batch_key)
                target = self.target(batch, noise_key)
                grads, metrics = self.critic_gradient(self.critic_params, batch, target)
                self.critic_params = self.critic_optimizer.step(
                    self.critic_params, grads, config.q_lr
                )
                steps.append(metrics)

            grads, actor_metrics = self.actor_gradient(self.actor_params, self.critic_params, batch)
            self.actor_params = self.actor_optimizer.step(
                self.actor_params, grads, config.policy_lr
            )
            for metrics in steps[-config.policy_delay :]:
                metrics |= actor_metrics

            def towards(old, new):
                return (1 - config.tau) * old + config.tau * new

            self.target_actor = jax.tree.map(towards, self.target_actor, self.actor_params)
            self.target_critics = jax.tree.map(towards, self.target_critics, self.critic_params)
        return steps

    def check_learning(self, state) -> None:
        twin.assert_trees(state.params["actor"], self.actor_params, "actor")
        twin.assert_trees(state.params["critics"], sac.stack(self.critic_params), "critics")
        twin.assert_trees(state.target_params["actor"], self.target_actor, "target actor")
        target_critics = sac.stack(self.target_critics)
        twin.assert_trees(state.target_params["critics"], target_critics, "target critics")
        actor_adam = twin.adam_state(state.opt_state["actor"])
        critic_adam = twin.adam_state(state.opt_state["critics"])
        twin.assert_trees(actor_adam.mu, self.actor_optimizer.mean, "actor's mu")
        twin.assert_trees(critic_adam.nu, sac.stack(self.critic_optimizer.square), "critics' nu")


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin)
