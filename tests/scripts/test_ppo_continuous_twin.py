"""PPO for continuous actions, written plainly: the twin of ppo_continuous.py.

The twins of ppo.py and dpo_continuous.py differ from it in the policy and in the objective.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments, RunningStatistics

import ppo_continuous as script

SMALL = script.Config(
    env_name="WalkContinuous",
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
    log_std_init=-0.5,
)
CASES = {
    "all on": dataclasses.replace(
        SMALL, anneal_lr=True, normalize_obs=True, normalize_reward=True, staggered_resets=True
    ),
    "all off": dataclasses.replace(
        SMALL,
        anneal_lr=False,
        normalize_obs=False,
        normalize_reward=False,
        max_grad_norm=float("inf"),
        vf_clip_eps=float("inf"),
        activation="relu",
    ),
}


def gaussian_log_prob(mean, log_std, action):
    """log N(a; mu, sigma), summed over the dimensions of the action."""
    standardized = (action - mean) / jnp.exp(log_std)
    return (-0.5 * standardized**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(axis=-1)


class Twin:
    script = script

    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(self.script, config)
        self.actor, self.critic = self.script.make_networks(
            config, self.environments.env, self.environments.env_params
        )

        actor_key, critic_key, env_key, self.key = jax.random.split(rng, 4)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        self.init_networks(actor_key, critic_key, jnp.array(self.environments.obs))
        self.obs_statistics = RunningStatistics((3,))
        self.return_statistics = RunningStatistics(())
        self.discounted_return = np.zeros(config.num_envs)
        self.update_count = 0

    def init_networks(self, actor_key, critic_key, obs) -> None:
        self.params = {
            "actor": jax.jit(self.actor.init)(actor_key, obs),
            "critic": jax.jit(self.critic.init)(critic_key, obs),
        }
        self.optimizer = Adam(self.params, eps=1e-5, max_norm=self.config.max_grad_norm)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))

    def mean_and_log_std(self, params, obs):
        """Of the Gaussian from which the policy draws actions."""
        distribution = self.actor.apply(params["actor"], obs)
        return distribution.loc, jnp.log(distribution.scale_diag)

    def act(self, key, obs):
        """An action for each environment, and the log-probability of each."""
        mean, log_std = self.mean_and_log_std(self.params, obs)
        action = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        return action, gaussian_log_prob(mean, log_std, action)

    def log_prob_and_entropy(self, params, obs, action):
        mean, log_std = self.mean_and_log_std(params, obs)
        entropy = (0.5 * jnp.log(2 * jnp.pi * jnp.e) + log_std).sum(axis=-1)
        return gaussian_log_prob(mean, log_std, action), entropy.mean()

    def value(self, params, obs):
        return self.critic.apply(params["critic"], jnp.asarray(obs, jnp.float32))

    def collect(self, key) -> list[dict]:
        """One dict for each step in each environment, in the order of time."""
        config = self.config
        steps = []
        raw_obs = []
        for step_key in jax.random.split(key, config.num_steps):
            action_key, env_key = jax.random.split(step_key)
            obs = np.array(self.environments.obs)
            raw_obs.append(obs)
            if config.normalize_obs:
                obs = self.obs_statistics.normalize(obs)

            obs = jnp.asarray(obs, jnp.float32)
            action, log_prob = self.act(action_key, obs)
            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, truncated, next_obs = self.environments.step(env_keys, action)
            if config.normalize_obs:
                next_obs = self.obs_statistics.normalize(next_obs)
            steps.append(
                {
                    "obs": obs,
                    "action": action,
                    "log_prob": log_prob,
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                    "next_obs": next_obs,
                }
            )
        if config.normalize_obs:
            self.obs_statistics.add(np.concatenate(raw_obs))
        return steps

    def normalize_rewards(self, steps) -> None:
        """Divide by the standard deviation of the discounted return, this rollout included."""
        config = self.config
        returns = []
        for step in steps:
            self.discounted_return = config.gamma * self.discounted_return + step["reward"]
            returns.extend(self.discounted_return)
            self.discounted_return[step["terminated"] | step["truncated"]] = 0.0
        if not config.normalize_reward:
            return
        self.return_statistics.add(returns)
        std = np.sqrt(self.return_statistics.var + 1e-8)
        for step in steps:
            step["reward"] = np.clip(step["reward"] / std, -10.0, 10.0)

    def estimate_advantages(self, steps) -> None:
        """Equation 16 of arXiv 1506.02438, environment by environment, from the end of time."""
        config = self.config
        for step in steps:
            step["value"] = np.asarray(self.value(self.params, step["obs"]))
            step["next_value"] = np.asarray(self.value(self.params, step["next_obs"]))
            step["advantage"] = np.zeros(config.num_envs)
        for i in range(config.num_envs):
            next_advantage = 0.0
            for step in reversed(steps):
                bootstrap = 0.0 if step["terminated"][i] else step["next_value"][i]
                delta = step["reward"][i] + config.gamma * bootstrap - step["value"][i]
                if step["terminated"][i] or step["truncated"][i]:
                    next_advantage = 0.0
                step["advantage"][i] = delta + config.gamma * config.gae_lambda * next_advantage
                next_advantage = step["advantage"][i]
        for step in steps:
            step["target"] = step["advantage"] + step["value"]

    def objective(self, ratio, advantage):
        """Equation 7 of arXiv 1707.06347, written by the sign of the advantage."""
        clip_eps = self.config.clip_eps
        gain = jnp.minimum(ratio, 1 + clip_eps) * advantage
        loss = jnp.maximum(ratio, 1 - clip_eps) * advantage
        clip_fraction = (jnp.abs(ratio - 1) > clip_eps).mean()
        return jnp.where(advantage > 0, gain, loss), {"clip_fraction": clip_fraction}

    def loss(self, params, batch):
        """Equation 9 of arXiv 1707.06347, negated."""
        config = self.config
        log_prob, entropy = self.log_prob_and_entropy(params, batch["obs"], batch["action"])
        log_ratio = log_prob - batch["log_prob"]
        ratio = jnp.exp(log_ratio)
        advantage = batch["advantage"] - jnp.mean(batch["advantage"])
        advantage = advantage / (jnp.std(batch["advantage"]) + 1e-8)
        objectives, metrics = self.objective(ratio, advantage)
        policy_loss = -objectives.mean()

        value = self.value(params, batch["obs"])
        change = jnp.clip(value - batch["value"], -config.vf_clip_eps, config.vf_clip_eps)
        errors = (value - batch["target"]) ** 2
        clipped_errors = (batch["value"] + change - batch["target"]) ** 2
        value_loss = 0.5 * jnp.maximum(errors, clipped_errors).mean()

        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        metrics |= {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),
        }
        return loss, metrics

    def learn(self, batch, key) -> dict:
        config = self.config
        rollout_size = config.num_envs * config.num_steps
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, rollout_size)
            for indices in np.split(order, config.num_minibatches):
                minibatch = {name: x[indices] for name, x in batch.items()}
                grads, metrics = self.gradient(self.params, minibatch)
                self.params = self.optimizer.step(self.params, grads, lr)
                all_metrics.append(metrics)
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        steps = self.collect(collect_key)
        self.normalize_rewards(steps)
        self.estimate_advantages(steps)
        batch = {
            name: np.concatenate([np.asarray(step[name], np.float32) for step in steps])
            for name in ("obs", "action", "log_prob", "value", "advantage", "target")
        }
        metrics = self.learn(batch, learn_key)
        self.update_count += 1
        metrics["value"] = batch["value"].mean()
        unexplained = np.var(batch["target"] - batch["value"]) / np.var(batch["target"])
        metrics["explained_variance"] = 1 - unexplained
        return metrics | self.environments.episode_metrics()

    def check(self, state) -> None:
        """Everything that the script carries to its next update."""
        self.check_learning(state)
        np.testing.assert_allclose(state.obs, self.environments.obs, rtol=1e-4)
        self.obs_statistics.check(state.obs_statistics)
        self.return_statistics.check(state.return_statistics)
        np.testing.assert_allclose(state.discounted_return, self.discounted_return, rtol=1e-5)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))

    def check_learning(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.optimizer.mean, "mu")
        twin.assert_trees(adam.nu, self.optimizer.square, "nu", atol=1e-8)
        assert adam.count == self.optimizer.steps


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, seed=9)  # many episodes terminate
