"""PPO with a memory, written plainly: the twin of ppo_rnn.py.

It is the twin of ppo.py with a memory, which is carried from step to step, also in the loss.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ppo_twin as ppo
from support import twin
from support.twin import Environments, RunningStatistics

import ppo_rnn as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=4,
    num_steps=5,
    update_epochs=2,
    num_minibatches=2,
    cell_size=6,
    hidden_sizes=(8,),
    total_timesteps=4 * 5 * 3 + 1,  # three updates
    lr=1e-2,
    gamma=0.9,
    gae_lambda=0.8,
    clip_eps=0.1,
    vf_clip_eps=0.05,
    ent_coef=0.03,
    vf_coef=0.7,
    max_grad_norm=0.6,
)
CASES = {
    "gru": dataclasses.replace(
        SMALL, cell="gru", anneal_lr=True, normalize_obs=True, normalize_reward=True
    ),
    "mingru": dataclasses.replace(
        SMALL,
        cell="mingru",
        observe=(0,),
        observe_previous=True,
        anneal_lr=False,
        normalize_obs=False,
        normalize_reward=False,
        max_grad_norm=float("inf"),
        vf_clip_eps=float("inf"),
    ),
}


class Twin(ppo.Twin):
    script = script

    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env, env_params = self.environments.env, self.environments.env_params
        self.body, self.actor, self.critic = script.make_networks(config, env, env_params)
        self.remember = jax.jit(self.remember)
        self.log_probs = jax.jit(self.log_probs)
        self.value = jax.jit(self.value)

        body_key, actor_key, critic_key, env_key, self.key = jax.random.split(rng, 5)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        obs = np.array(self.environments.obs)
        self.first = np.ones(config.num_envs, bool)
        self.memory = np.zeros((config.num_envs, config.cell_size), np.float32)
        params = {
            "body": jax.jit(self.body.init)(body_key, self.memory, obs[None], self.first[None]),
            "actor": jax.jit(self.actor.init)(actor_key, self.memory),
            "critic": jax.jit(self.critic.init)(critic_key, self.memory),
        }
        self.params = jax.device_get(params)
        self.optimizer = twin.Adam(self.params, eps=1e-5, max_norm=config.max_grad_norm)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.obs_statistics = RunningStatistics(obs.shape[1:])
        self.return_statistics = RunningStatistics(())
        self.discounted_return = np.zeros(config.num_envs)
        self.update_count = 0

    def remember(self, params, memory, obs, first):
        """The memory after one observation. It is empty before the first one of an episode."""
        memory = jnp.where(first[:, None], 0.0, memory)
        never = jnp.zeros((1, len(first)), bool)
        return self.body.apply(params["body"], memory, obs[None], never)[0]

    def collect(self, key) -> list[dict]:
        config = self.config
        steps = []
        raw_obs = []
        for step_key in jax.random.split(key, config.num_steps):
            action_key, env_key = jax.random.split(step_key)
            obs = np.array(self.environments.obs)
            raw_obs.append(obs)
            if config.normalize_obs:
                obs = self.obs_statistics.normalize(obs)
            obs = np.asarray(obs, np.float32)
            first = self.first
            self.memory = self.remember(self.params, self.memory, obs, first)
            action, log_prob = self.act(action_key, self.memory)

            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, truncated, next_obs = self.environments.step(env_keys, action)
            if config.normalize_obs:
                next_obs = self.obs_statistics.normalize(next_obs)
            # The final observation is remembered by the memory of its own episode.
            next_obs = np.asarray(next_obs, np.float32)
            never = np.zeros(config.num_envs, bool)
            next_memory = self.remember(self.params, self.memory, next_obs, never)
            steps.append(
                {
                    "obs": self.memory,  # what the twin of ppo.py takes values of
                    "next_obs": next_memory,
                    "seen": obs,
                    "first": first,
                    "action": action,
                    "log_prob": log_prob,
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                }
            )
            self.first = terminated | truncated
        if config.normalize_obs:
            self.obs_statistics.add(np.concatenate(raw_obs))
        return steps

    def loss(self, params, batch):
        """The memory is computed again, step by step, from the one before the rollout."""

        def step(memory, seen_and_first):
            memory = self.remember(params, memory, *seen_and_first)
            return memory, memory

        _, memories = jax.lax.scan(step, batch["memory"], (batch["seen"], batch["first"]))
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items() if name != "memory"}
        return super().loss(params, flat | {"obs": memories.reshape(-1, memories.shape[-1])})

    def learn(self, batch, key) -> dict:
        """A minibatch holds the whole sequences of some environments."""
        config = self.config
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, config.num_envs)
            for indices in np.split(order, config.num_minibatches):
                minibatch = {
                    name: x[indices] if name == "memory" else x[:, indices]
                    for name, x in batch.items()
                }
                grads, metrics = self.gradient(self.params, minibatch)
                self.params = self.optimizer.step(self.params, grads, lr)
                all_metrics.append(metrics)
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        memory = np.asarray(self.memory)  # before the rollout
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        steps = self.collect(collect_key)
        self.normalize_rewards(steps)
        self.estimate_advantages(steps)
        names = ("seen", "action", "log_prob", "value", "advantage", "target")
        batch = {
            name: np.array([np.asarray(step[name], np.float32) for step in steps]) for name in names
        }
        batch["first"] = np.array([step["first"] for step in steps])
        metrics = self.learn(batch | {"memory": memory}, learn_key)
        self.update_count += 1
        metrics["value"] = batch["value"].mean()
        unexplained = np.var(batch["target"] - batch["value"]) / np.var(batch["target"])
        metrics["explained_variance"] = 1 - unexplained
        return metrics | self.environments.episode_metrics()

    def check(self, state) -> None:
        super().check(state)
        np.testing.assert_allclose(state.memory, self.memory, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(state.first, self.first)


@pytest.mark.parametrize("case", CASES)
def test_twin(case):
    twin.check(script, CASES[case], Twin)
