"""Parallelized Q-networks with a memory, written plainly: the twin of pqn_rnn.py.

It is the twin of pqn.py with a memory, which is carried from step to step, also in the loss.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_pqn_twin as pqn
from support import twin
from support.compilation import jit_quickly
from support.tiers import slow
from support.twin import Environments

import pqn_rnn as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=4,
    num_steps=5,
    update_epochs=2,
    num_minibatches=2,
    cell_size=6,
    hidden_sizes=(8,),
    total_timesteps=4 * 5 * 4 + 1,  # four updates
    lr=4e-3,
    gamma=0.9,
    q_lambda=0.7,
    max_grad_norm=0.4,
    epsilon_start=0.9,
    epsilon_finish=0.3,
    exploration_fraction=0.5,
)
CASES = {
    "all on": dataclasses.replace(SMALL, observe=(2, 0), anneal_lr=True),
    "all off": dataclasses.replace(
        SMALL,
        anneal_lr=False,
        q_lambda=0.0,
        max_grad_norm=float("inf"),
        layer_norm=False,
        hidden_sizes=(),
    ),
}


class Twin(pqn.Twin):
    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env = self.environments.env
        self.network = script.make_network(config, env, self.environments.env_params)
        params_key, env_key, self.key = jax.random.split(rng, 3)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        obs = np.array(self.environments.obs)
        self.first = np.ones(config.num_envs, bool)
        self.memory = np.zeros((config.num_envs, config.cell_size), np.float32)
        init = jit_quickly(self.network.init)
        self.params = jax.device_get(init(params_key, self.memory, obs[None], self.first[None]))
        self.quick_one_step = jit_quickly(self.one_step)
        radam = optax.scale_by_radam()
        self.radam_state = jit_quickly(radam.init)(self.params)
        self.radam_step = jit_quickly(radam.update)
        self.gradient = jit_quickly(jax.grad(self.loss, has_aux=True))
        self.update_count = 0

    def one_step(self, params, memory, obs, first):
        """The memory after one observation, and the values. It is empty before a first one."""
        memory = jnp.where(first[:, None], 0.0, memory)
        never = jnp.zeros((1, len(first)), bool)
        memories, q = self.network.apply(params, memory, obs[None], never)
        return memories[0], q[0]

    def collect(self, key, epsilon) -> list[dict]:
        config = self.config
        steps = []
        for step_key in jax.random.split(key, config.num_steps):
            explore, random_q, env_key = twin.draw_exploration(step_key, config.num_envs)
            obs = np.array(self.environments.obs)
            first = self.first
            self.memory, q = self.quick_one_step(self.params, self.memory, obs, first)
            q = np.asarray(q)
            action = [
                int(np.argmax(random_q[i] if explore[i] < epsilon else q[i]))
                for i in range(config.num_envs)
            ]
            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, truncated, next_obs = self.environments.step(env_keys, action)
            # The final observation is remembered by the memory of its own episode.
            never = np.zeros(config.num_envs, bool)
            next_obs = np.asarray(next_obs, np.float32)
            _, next_q = self.quick_one_step(self.params, self.memory, next_obs, never)
            steps.append(
                {
                    "obs": obs,
                    "first": first,
                    "action": np.array(action),
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                    "next_value": np.asarray(next_q).max(axis=-1),
                }
            )
            self.first = terminated | truncated
        return steps

    def loss(self, params, batch):
        """The memory is computed again, step by step, from the one before the rollout."""
        memory = batch["memory"]
        q_taken = []
        for obs, first, action in zip(batch["obs"], batch["first"], batch["action"], strict=True):
            memory, q = self.one_step(params, memory, obs, first)
            q_taken.append(jnp.array([q[i, action[i]] for i in range(len(q))]))
        q_taken = jnp.array(q_taken)
        loss = 0.5 * jnp.mean((q_taken - batch["target"]) ** 2)
        return loss, {"td_loss": loss, "q_value": q_taken.mean()}

    def learn(self, batch, key) -> dict:
        """A minibatch holds the whole sequences of some environments."""
        config = self.config
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, config.num_envs)
            for indices in np.split(order, config.num_minibatches):
                minibatch = {
                    name: x[indices] if name == "memory" else x[:, indices]
                    for name, x in batch.items()
                }
                all_metrics.append(self.gradient_step(minibatch))
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        config = self.config
        memory = np.asarray(self.memory)  # before the rollout
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        share = min(1, self.update_count / (config.exploration_fraction * config.num_updates))
        epsilon = (1 - share) * config.epsilon_start + share * config.epsilon_finish
        steps = self.collect(collect_key, epsilon)
        self.compute_targets(steps)
        names = ("obs", "first", "action", "target")
        batch = {name: np.array([step[name] for step in steps]) for name in names}
        batch["target"] = batch["target"].astype(np.float32)
        metrics = self.learn(batch | {"memory": memory}, learn_key)
        self.update_count += 1
        return metrics | {"epsilon": epsilon} | self.environments.episode_metrics()

    def check(self, state) -> None:
        super().check(state)
        np.testing.assert_allclose(state.memory, self.memory, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(state.first, self.first)


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4)
