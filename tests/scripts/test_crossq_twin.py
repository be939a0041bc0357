"""CrossQ, written plainly: the twin of crossq.py.

It acts, explores and replays as the twin of sac.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac_twin as sac
from support import twin
from support.tiers import slow
from support.twin import Adam

import crossq as script

SMALL = script.Config(
    env_name="WalkContinuous",
    num_envs=2,
    num_steps=2,
    gradient_steps=6,
    policy_delay=3,
    batch_size=6,
    buffer_size=12,  # three rollouts: it wraps around in the second update
    learning_starts=7,  # two rollouts of warm-up
    total_timesteps=8 + 4 * 3,
    policy_lr=2e-3,
    q_lr=3e-3,
    gamma=0.9,
    renorm_warmup=3,  # the critics' renormalization begins in the first update, the actor's later
    hidden_sizes=(8,),
    critic_hidden_sizes=(6, 7),
)
CASES = {
    "all on": dataclasses.replace(
        SMALL,
        ent_coef=0.5,
        learn_ent_coef=True,
        target_entropy=-0.7,
        noise_correlation=0.6,
    ),
    "all off": dataclasses.replace(
        SMALL,
        ent_coef=0.3,
        learn_ent_coef=False,
        policy_delay=1,
        num_steps=1,
        num_envs=3,
        gradient_steps=1,
        activation="tanh",
    ),
}


class Twin(sac.Twin):
    script = script
    b1 = 0.5  # of Adam for the networks, but not for the entropy coefficient

    def init_networks(self, actor_key, critic_key, obs) -> None:
        init_actor = jax.jit(partial(self.actor.init, training=True))
        init_critic = jax.jit(partial(self.critic.init, training=True))
        actor = jax.device_get(init_actor(actor_key, obs))
        critic_keys = jax.random.split(critic_key, 2)
        critics = jax.device_get([init_critic(key, obs, self.noise) for key in critic_keys])
        self.actor_params = actor["params"]
        self.actor_stats = actor["batch_stats"]
        self.critic_params = [critic["params"] for critic in critics]
        self.critic_stats = [critic["batch_stats"] for critic in critics]
        self.mean_and_log_std = jax.jit(self.mean_and_log_std)
        self.sample_action = jax.jit(self.sample_action)

    def start_learning(self) -> None:
        self.log_ent_coef = np.float32(np.log(self.config.ent_coef))
        self.ent_coef_optimizer = Adam(self.log_ent_coef)
        self.critic_gradient = jax.jit(jax.grad(self.critic_loss, has_aux=True))
        self.actor_gradient = jax.jit(jax.grad(self.actor_loss, has_aux=True))

    def add_statistics(self, obs) -> None:
        """None: the networks have them."""

    def normalize(self, obs):
        return obs  # the networks' first layer does

    def mean_and_log_std(self, params, obs):
        """In evaluation: `params` are parameters and running statistics."""
        params, stats = params
        variables = {"params": params, "batch_stats": stats}
        gaussian = self.actor.apply(variables, jnp.asarray(obs, jnp.float32), training=False)
        return gaussian.loc, jnp.log(gaussian.scale_diag)

    def act_with_noise(self, obs, noise):
        mean, log_std = self.mean_and_log_std((self.actor_params, self.actor_stats), obs)
        return np.tanh(mean + np.exp(log_std) * noise)

    def critic_loss(self, critic_params, critic_stats, batch, next_action, next_log_prob, ent_coef):
        """Q(s, a) and Q(s', a') in one pass of each critic, arXiv 1902.05605, figure 3."""
        obs = jnp.concatenate([batch["obs"], batch["next_obs"]])
        action = jnp.concatenate([batch["action"], next_action])
        values = []
        new_stats = []
        for params, stats in zip(critic_params, critic_stats, strict=True):
            variables = {"params": params, "batch_stats": stats}
            value, changed = self.critic.apply(
                variables, obs, action, training=True, mutable=["batch_stats"]
            )
            values.append(value)
            new_stats.append(changed["batch_stats"])

        size = len(batch["reward"])
        next_value = jnp.minimum(values[0][size:], values[1][size:]) - ent_coef * next_log_prob
        not_terminated = 1 - batch["terminated"].astype(jnp.float32)
        target = batch["reward"] + self.config.gamma * not_terminated * next_value
        target = jax.lax.stop_gradient(target)
        loss = sum(jnp.mean((value[:size] - target) ** 2) for value in values)
        q_value = jnp.mean(jnp.array([value[:size] for value in values]))
        return loss, (new_stats, {"td_loss": loss, "q_value": q_value})

    def actor_loss(self, actor_params, actor_stats, critics, batch, key, ent_coef):
        """Equation 9 of arXiv 1812.05905: the actor in training, the critics in evaluation."""
        variables = {"params": actor_params, "batch_stats": actor_stats}
        gaussian, changed = self.actor.apply(
            variables, batch["obs"], training=True, mutable=["batch_stats"]
        )
        mean, log_std = gaussian.loc, jnp.log(gaussian.scale_diag)
        noise = jax.random.normal(key, mean.shape)
        u = mean + jnp.exp(log_std) * noise
        log_gaussian = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 - tanh(u)^2), also where tanh saturates
        log_derivative = 2 * (jnp.log(2) - u - jax.nn.softplus(-2 * u))
        log_prob = (log_gaussian - log_derivative).sum(axis=-1)
        qs = []
        for params, stats in zip(*critics, strict=True):
            variables = {"params": params, "batch_stats": stats}
            qs.append(self.critic.apply(variables, batch["obs"], jnp.tanh(u), training=False))
        loss = (ent_coef * log_prob - jnp.minimum(*qs)).mean()
        metrics = {"policy_loss": loss, "entropy": -log_prob.mean(), "ent_coef": ent_coef}
        return loss, (changed["batch_stats"], metrics)

    def critic_step(self, key):
        batch_key, next_action_key = jax.random.split(key)
        batch = self.sample(batch_key)
        next_action, next_log_prob = self.sample_action(
            (self.actor_params, self.actor_stats), batch["next_obs"], next_action_key
        )
        grads, (self.critic_stats, metrics) = self.critic_gradient(
            self.critic_params,
            self.critic_stats,
            batch,
            next_action,
            next_log_prob,
            self.ent_coef(),
        )
        lr = self.config.q_lr
        self.critic_params = self.critic_optimizer.step(self.critic_params, grads, lr)
        return batch, metrics

    def actor_step(self, key, batch) -> dict:
        config = self.config
        grads, (self.actor_stats, metrics) = self.actor_gradient(
            self.actor_params,
            self.actor_stats,
            (self.critic_params, self.critic_stats),
            batch,
            key,
            self.ent_coef(),
        )
        self.actor_params = self.actor_optimizer.step(self.actor_params, grads, config.policy_lr)
        if config.learn_ent_coef:  # equation 18
            missing_entropy = metrics["entropy"] - 2 * config.target_entropy
            grad = np.exp(self.log_ent_coef) * missing_entropy
            self.log_ent_coef = self.ent_coef_optimizer.step(
                self.log_ent_coef, grad, config.policy_lr
            )
        return metrics

    def update(self) -> dict:
        config = self.config
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        self.collect(collect_key, self.act_with_noise)
        num_groups = config.gradient_steps // config.policy_delay
        critic_metrics = []
        actor_metrics = []
        for group_key in jax.random.split(learn_key, num_groups):
            critic_key, actor_key = jax.random.split(group_key)
            for key in jax.random.split(critic_key, config.policy_delay):
                batch, metrics = self.critic_step(key)
                critic_metrics.append(metrics)
            actor_metrics.append(self.actor_step(actor_key, batch))
        mean = {}
        for steps in (critic_metrics, actor_metrics):
            mean |= {name: np.mean([step[name] for step in steps]) for name in steps[0]}
        return mean | self.environments.episode_metrics()

    def check_statistics(self, state) -> None:
        """None of observations: they are those of the networks."""

    def check_learning(self, state) -> None:
        twin.assert_trees(state.params["actor"], self.actor_params, "actor")
        twin.assert_trees(state.params["critics"], sac.stack(self.critic_params), "critics")
        twin.assert_trees(state.params["log_ent_coef"], self.log_ent_coef, "log_ent_coef")
        twin.assert_trees(state.batch_stats["actor"], self.actor_stats, "actor's statistics")
        critic_stats = sac.stack(self.critic_stats)
        twin.assert_trees(state.batch_stats["critics"], critic_stats, "critics' statistics")
        actor_adam = twin.adam_state(state.opt_state["actor"])
        critic_adam = twin.adam_state(state.opt_state["critics"])
        twin.assert_trees(actor_adam.mu, self.actor_optimizer.mean, "actor's mu")
        twin.assert_trees(critic_adam.nu, sac.stack(self.critic_optimizer.square), "critics' nu")


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin)
