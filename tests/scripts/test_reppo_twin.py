"""REPPO, written plainly: the twin of reppo.py. It acts and normalizes as the PPO twin does."""

import dataclasses
from math import erf, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ppo_continuous_twin as ppo
from support import twin
from support.tiers import slow
from support.twin import Adam

import reppo as script

SMALL = script.Config(
    env_name="WalkContinuous",
    num_envs=2,
    num_steps=6,
    update_epochs=2,
    num_minibatches=3,
    total_timesteps=2 * 6 * 3 + 1,  # three updates
    lr=5e-3,
    gamma=0.9,
    q_lambda=0.7,
    ent_coef=0.2,
    target_entropy=-0.7,
    kl_coef=0.3,
    kl_bound=0.002,  # some states are within it, some are not
    v_min=-2.0,
    v_max=3.0,
    num_bins=7,
    max_grad_norm=0.4,
    hidden_sizes=(8,),
)
CASES = {
    "all on": dataclasses.replace(
        SMALL, normalize_obs=True, normalize_reward=True, staggered_resets=True
    ),
    "all off": dataclasses.replace(
        SMALL,
        normalize_obs=False,
        normalize_reward=False,
        max_grad_norm=float("inf"),
        q_lambda=0.0,
        activation="tanh",
    ),
}


class Twin(ppo.Twin):
    script = script

    def init_networks(self, actor_key, critic_key, obs) -> None:
        config = self.config
        action = np.zeros((config.num_envs, 2))
        critic_params = jax.jit(self.critic.init)(critic_key, obs, action)
        self.critic_params = jax.device_get(critic_params)
        self.policy_params = {
            "actor": jax.device_get(jax.jit(self.actor.init)(actor_key, obs)),
            "log_ent_coef": np.float32(np.log(config.ent_coef)),
            "log_kl_coef": np.float32(np.log(config.kl_coef)),
        }
        self.critic_optimizer = Adam(self.critic_params, max_norm=config.max_grad_norm)
        self.policy_optimizer = Adam(self.policy_params, max_norm=config.max_grad_norm)
        self.params = None  # of the PPO twin
        self.mean_and_log_std = jax.jit(self.mean_and_log_std)
        self.sample_action = jax.jit(self.sample_action)
        self.q = jax.jit(self.q)
        self.critic_gradient = jax.jit(jax.grad(self.critic_loss, has_aux=True))
        self.policy_gradient = jax.jit(jax.grad(self.policy_loss, has_aux=True))

    def mean_and_log_std(self, actor_params, obs):
        gaussian = self.actor.apply(actor_params, jnp.asarray(obs, jnp.float32))
        return gaussian.loc, jnp.log(gaussian.scale_diag)

    def sample_action(self, actor_params, obs, key):
        """tanh(u), u Gaussian, and its log-probability (arXiv 1801.01290, equation 21)."""
        mean, log_std = self.mean_and_log_std(actor_params, obs)
        u = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        log_derivative = jnp.log(1 - jnp.tanh(u) ** 2).sum(axis=-1)
        return jnp.tanh(u), ppo.gaussian_log_prob(mean, log_std, u) - log_derivative

    def act(self, key, obs):
        return self.sample_action(self.policy_params["actor"], obs, key)

    def q(self, critic_params, obs, action):
        """Log-probabilities of the bins, and Q, their mean."""
        logits, _ = self.critic.apply(critic_params, jnp.asarray(obs, jnp.float32), action)
        log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        config = self.config
        centers = np.linspace(config.v_min, config.v_max, config.num_bins)
        return log_probs, jnp.exp(log_probs) @ jnp.asarray(centers, jnp.float32)

    def compute_targets(self, steps, key) -> None:
        """Soft Q(lambda) returns (arXiv 2507.11019), environment by environment.

        G_t = r_t + gamma (B_t - alpha log pi(a'|s')), and r_t alone where the episode terminated.
        """
        config = self.config
        ent_coef = float(np.exp(self.policy_params["log_ent_coef"]))
        actor_params = self.policy_params["actor"]
        next_obs = np.array([step["next_obs"] for step in steps])
        next_action, next_log_prob = self.sample_action(actor_params, next_obs, key)
        _, next_q = self.q(self.critic_params, next_obs, next_action)
        next_log_prob, next_q = np.asarray(next_log_prob), np.asarray(next_q)
        for step in steps:
            step["target"] = np.zeros(config.num_envs)
        for i in range(config.num_envs):
            next_return = next_q[-1, i]
            for t in reversed(range(config.num_steps)):
                step = steps[t]
                bootstrap = next_q[t, i]
                if not step["truncated"][i]:
                    one_step = (1 - config.q_lambda) * next_q[t, i]
                    bootstrap = config.q_lambda * next_return + one_step
                target = step["reward"][i]
                if not step["terminated"][i]:
                    target += config.gamma * (bootstrap - ent_coef * next_log_prob[t, i])
                step["target"][i] = target
                next_return = target

    def bin_probabilities(self, target) -> np.ndarray:
        """HL-Gauss (arXiv 2403.03950): a Gaussian around the target, cut at the outer bins."""
        config = self.config
        width = (config.v_max - config.v_min) / (config.num_bins - 1)
        center = min(max(target, config.v_min), config.v_max)
        edges = config.v_min + width * (np.arange(config.num_bins + 1) - 0.5)
        below = np.array([0.5 * (1 + erf((e - center) / (0.75 * width * sqrt(2)))) for e in edges])
        return np.diff(below) / (below[-1] - below[0])

    def critic_loss(self, critic_params, batch):
        log_probs, q = self.q(critic_params, batch["obs"], batch["action"])
        loss = -(batch["bins"] * log_probs).sum(axis=-1).mean()
        target = batch["target"]
        outside = (target < self.config.v_min) | (target > self.config.v_max)
        metrics = {"critic_loss": loss, "q_value": q.mean(), "outside_support": outside.mean()}
        return loss, metrics

    def policy_loss(self, policy_params, critic_params, batch, key):
        config = self.config
        actor_params = policy_params["actor"]
        mean, log_std = self.mean_and_log_std(actor_params, batch["obs"])
        action, log_prob = self.sample_action(actor_params, batch["obs"], key)
        _, q = self.q(critic_params, batch["obs"], action)
        variance_ratio = jnp.exp(2 * (batch["log_std"] - log_std))
        distance = ((batch["mean"] - mean) / jnp.exp(log_std)) ** 2
        kl = 0.5 * (variance_ratio + distance - 1 - jnp.log(variance_ratio)).sum(axis=-1)

        ent_coef = constant(jnp.exp(policy_params["log_ent_coef"]))
        kl_coef = constant(jnp.exp(policy_params["log_kl_coef"]))
        inside = kl < config.kl_bound
        policy_loss = jnp.where(inside, ent_coef * log_prob - q, kl_coef * kl).mean()
        entropy = constant(-log_prob.mean())
        ent_slack = entropy - 2 * config.target_entropy
        kl_slack = config.kl_bound - constant(kl.mean())
        loss = policy_loss + jnp.exp(policy_params["log_ent_coef"]) * ent_slack
        loss += jnp.exp(policy_params["log_kl_coef"]) * kl_slack
        metrics = {
            "policy_loss": policy_loss,
            "entropy": entropy,
            "ent_coef": ent_coef,
            "kl": kl.mean(),
            "kl_coef": kl_coef,
            "outside_kl_bound": 1 - inside.mean(),
        }
        return loss, metrics

    def learn(self, batch, key) -> dict:
        config = self.config
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order_key, action_key = jax.random.split(epoch_key)
            order = twin.order_of_bits(order_key, config.num_envs * config.num_steps)
            action_keys = jax.random.split(action_key, config.num_minibatches)
            groups = np.split(order, config.num_minibatches)
            for indices, minibatch_key in zip(groups, action_keys, strict=True):
                minibatch = {name: x[indices] for name, x in batch.items()}
                grads, metrics = self.critic_gradient(self.critic_params, minibatch)
                self.critic_params = self.critic_optimizer.step(
                    self.critic_params, grads, config.lr
                )
                grads, policy_metrics = self.policy_gradient(
                    self.policy_params, self.critic_params, minibatch, minibatch_key
                )
                self.policy_params = self.policy_optimizer.step(
                    self.policy_params, grads, config.lr
                )
                all_metrics.append(metrics | policy_metrics)
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        self.key, collect_key, batch_key, learn_key = jax.random.split(self.key, 4)
        steps = self.collect(collect_key)
        self.normalize_rewards(steps)
        self.compute_targets(steps, batch_key)
        for step in steps:
            mean, log_std = self.mean_and_log_std(self.policy_params["actor"], step["obs"])
            step["mean"] = mean
            step["log_std"] = log_std
            step["bins"] = np.array([self.bin_probabilities(t) for t in step["target"]])
        batch = {
            name: np.concatenate([np.asarray(step[name], np.float32) for step in steps])
            for name in ("obs", "mean", "log_std", "action", "target", "bins")
        }
        return self.learn(batch, learn_key) | self.environments.episode_metrics()

    def check_learning(self, state) -> None:
        twin.assert_trees(state.params["critic"], self.critic_params, "critic")
        twin.assert_trees(state.params["policy"], self.policy_params, "policy")
        critic_adam = twin.adam_state(state.opt_state["critic"])
        policy_adam = twin.adam_state(state.opt_state["policy"])
        # The gradient of the critic's offset has a factor of 40, and so have its rounding errors.
        twin.assert_trees(critic_adam.mu, self.critic_optimizer.mean, "critic's mu", atol=1e-4)
        twin.assert_trees(critic_adam.nu, self.critic_optimizer.square, "critic's nu", atol=1e-4)
        twin.assert_trees(policy_adam.mu, self.policy_optimizer.mean, "policy's mu")
        twin.assert_trees(policy_adam.nu, self.policy_optimizer.square, "policy's nu")


def constant(x):
    return jax.lax.stop_gradient(x)


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, seed=2)  # many episodes terminate
