"""Parallelized Q-networks, written plainly: the twin of pqn.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import twin
from support.compilation import jit_quickly
from support.tiers import slow
from support.twin import Environments

import pqn as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=2,
    num_steps=6,
    update_epochs=2,
    num_minibatches=3,
    total_timesteps=2 * 6 * 4 + 1,  # four updates
    lr=4e-3,  # LayerNorm of 8 units magnifies rounding errors
    gamma=0.9,
    q_lambda=0.7,
    max_grad_norm=0.4,
    epsilon_start=0.9,
    epsilon_finish=0.3,
    exploration_fraction=0.5,  # of four updates: epsilon is constant from the third on
    hidden_sizes=(8,),
)
CASES = {
    "all on": dataclasses.replace(SMALL, anneal_lr=True),
    "all off": dataclasses.replace(
        SMALL, anneal_lr=False, q_lambda=0.0, max_grad_norm=float("inf"), activation="tanh"
    ),
}


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env = self.environments.env
        self.network = script.make_network(config, env, self.environments.env_params)
        params_key, env_key, self.key = jax.random.split(rng, 3)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        obs = np.array(self.environments.obs)
        self.params = jax.device_get(jit_quickly(self.network.init)(params_key, obs))
        self.q = jit_quickly(self.network.apply)
        radam = optax.scale_by_radam()  # arXiv 1908.03265
        self.radam_state = jit_quickly(radam.init)(self.params)
        self.radam_step = jit_quickly(radam.update)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.update_count = 0

    def collect(self, key, epsilon) -> list[dict]:
        """One dict for each step in all environments, in the order of time."""
        config = self.config
        steps = []
        for step_key in jax.random.split(key, config.num_steps):
            explore, random_q, env_key = twin.draw_exploration(step_key, config.num_envs)
            obs = np.array(self.environments.obs)
            q = np.asarray(self.q(self.params, obs))
            action = [
                int(np.argmax(random_q[i] if explore[i] < epsilon else q[i]))
                for i in range(config.num_envs)
            ]
            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, truncated, next_obs = self.environments.step(env_keys, action)
            steps.append(
                {
                    "obs": obs,
                    "action": np.array(action),
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                    "next_value": np.asarray(self.q(self.params, next_obs)).max(axis=-1),
                }
            )
        return steps

    def compute_targets(self, steps) -> None:
        """Lambda-returns of Q(lambda) (arXiv 2407.04811, section 4), environment by environment.

        The return after the last step of a rollout, and after a truncated step, is the value of
        the observation that follows. After a terminated step it is 0.
        """
        config = self.config
        for step in steps:
            step["target"] = np.zeros(config.num_envs)
        for i in range(config.num_envs):
            next_return = steps[-1]["next_value"][i]
            for step in reversed(steps):
                if step["terminated"][i]:
                    bootstrap = 0.0
                elif step["truncated"][i]:
                    bootstrap = step["next_value"][i]
                else:
                    one_step = (1 - config.q_lambda) * step["next_value"][i]
                    bootstrap = config.q_lambda * next_return + one_step
                step["target"][i] = step["reward"][i] + config.gamma * bootstrap
                next_return = step["target"][i]

    def loss(self, params, batch):
        q = self.network.apply(params, batch["obs"])
        q_taken = jnp.array([q[i, batch["action"][i]] for i in range(len(q))])
        loss = 0.5 * jnp.mean((q_taken - batch["target"]) ** 2)
        return loss, {"td_loss": loss, "q_value": q_taken.mean()}

    def gradient_step(self, minibatch) -> dict:
        config = self.config
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        grads, metrics = jax.device_get(self.gradient(self.params, minibatch))
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
        scale = min(1, config.max_grad_norm / norm)
        grads = jax.tree.map(lambda g: scale * g, grads)
        steps, self.radam_state = self.radam_step(grads, self.radam_state)
        steps = jax.device_get(steps)
        self.params = jax.tree.map(lambda p, s: p - lr * s, self.params, steps)
        return metrics

    def learn(self, batch, key) -> dict:
        config = self.config
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, config.num_envs * config.num_steps)
            for indices in np.split(order, config.num_minibatches):
                minibatch = {name: x[indices] for name, x in batch.items()}
                all_metrics.append(self.gradient_step(minibatch))
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        config = self.config
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        share = min(1, self.update_count / (config.exploration_fraction * config.num_updates))
        epsilon = (1 - share) * config.epsilon_start + share * config.epsilon_finish
        steps = self.collect(collect_key, epsilon)
        self.compute_targets(steps)
        batch = {
            name: np.concatenate([step[name] for step in steps])
            for name in ("obs", "action", "target")
        }
        batch["target"] = batch["target"].astype(np.float32)
        metrics = self.learn(batch, learn_key)
        self.update_count += 1
        return metrics | {"epsilon": epsilon} | self.environments.episode_metrics()

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.radam_state.mu, "mu")
        twin.assert_trees(adam.nu, self.radam_state.nu, "nu")
        np.testing.assert_array_equal(state.obs, self.environments.obs)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4)
