"""Ape-X DQN, written plainly: the twin of apex_dqn.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments

import apex_dqn as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=3,
    num_steps=2,
    n_step=3,
    gradient_steps=2,
    batch_size=5,
    buffer_size=18,  # three rollouts: it wraps around in the second update
    learning_starts=7,  # two rollouts of warm-up
    total_timesteps=12 + 6 + 6 * 4,
    actor_sync_interval=12,
    target_update_interval=9,
    priority_exponent=0.6,
    importance_exponent=0.7,
    tau=0.4,
    lr=1e-2,
    gamma=0.9,
    max_grad_norm=0.2,
    epsilon_base=0.7,
    epsilon_exponent=2.0,
    hidden_sizes=(8,),
)
CASES = {
    "all on": dataclasses.replace(SMALL, anneal_lr=True),
    "one step": dataclasses.replace(
        SMALL,
        n_step=1,
        anneal_lr=False,
        total_timesteps=12 + 6 * 4,
        max_grad_norm=float("inf"),
        tau=1.0,
        activation="tanh",
    ),
}


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env = self.environments.env
        self.network = script.make_network(config, env, self.environments.env_params)
        self.q = jax.jit(self.network.apply)

        params_key, env_key, tail_key, warmup_key, self.key = jax.random.split(rng, 5)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        self.params = jax.jit(self.network.init)(params_key, jnp.array(self.environments.obs))
        self.target_params = self.params
        self.actor_params = self.params
        self.optimizer = Adam(self.params, max_norm=config.max_grad_norm)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.history = [[] for _ in range(config.num_envs)]  # all steps of each actor
        self.rollout_size = config.num_envs * config.num_steps
        self.capacity = config.buffer_size // self.rollout_size * config.num_steps  # per actor
        self.replay = {}  # (time modulo the capacity, actor): transition with its priority
        self.stored = 0  # transitions of each actor so far
        self.update_count = 0

        if config.n_step > 1:
            self.collect(tail_key, config.n_step - 1)
        for key in jax.random.split(warmup_key, int(np.ceil(7 / self.rollout_size))):
            self.collect(key, config.num_steps)
            self.store()
        self.environments.episode_metrics()  # those of the warm-up are not reported

    def collect(self, key, num_steps) -> None:
        """Actor i explores with its own epsilon (arXiv 1803.00933, section 4.1)."""
        config = self.config
        num_envs = config.num_envs
        for step_key in jax.random.split(key, num_steps):
            explore, random_q, env_key = twin.draw_exploration(step_key, num_envs)
            obs = np.array(self.environments.obs)
            q = np.asarray(self.q(self.actor_params, obs))
            action = []
            for i in range(num_envs):
                exponent = 1 + config.epsilon_exponent * i / (num_envs - 1)
                epsilon = config.epsilon_base**exponent
                action.append(int(np.argmax(random_q[i] if explore[i] < epsilon else q[i])))
            env_keys = jax.random.split(env_key, num_envs)
            results = self.environments.step(env_keys, action)
            reward, terminated, truncated, next_obs = results
            for i in range(num_envs):
                self.history[i].append(
                    {
                        "obs": obs[i],
                        "action": action[i],
                        "q_taken": q[i, action[i]],
                        "reward": reward[i],
                        "next_obs": next_obs[i],
                        "terminated": terminated[i],
                        "done": terminated[i] or truncated[i],
                    }
                )

    def transition(self, steps) -> dict:
        """Up to `n_step` steps, fewer at the end of an episode (arXiv 1803.00933, section 3.1)."""
        rewards = np.zeros(self.config.n_step)
        for k, step in enumerate(steps):
            rewards[k] = step["reward"]
            if step["done"]:
                break
        discount = 0.0 if step["terminated"] else self.config.gamma ** (k + 1)
        return {
            "obs": steps[0]["obs"],
            "action": steps[0]["action"],
            "rewards": rewards,
            "length": k + 1,
            "next_obs": step["next_obs"],
            "terminated": step["terminated"],
            "n_step_return": sum(self.config.gamma**i * r for i, r in enumerate(rewards)),
            "discount": discount,
        }

    def target(self, transition, params, target_params) -> float:
        """Double Q-learning (arXiv 1509.06461, equation 4)."""
        if transition["discount"] == 0:
            return transition["n_step_return"]
        best = np.argmax(self.q(params, transition["next_obs"]))
        next_value = self.q(target_params, transition["next_obs"])[best]
        return transition["n_step_return"] + transition["discount"] * float(next_value)

    def priority(self, td_error) -> float:
        """p^alpha with p = |delta| + 1e-6 (arXiv 1511.05952, section 3.3)."""
        return (abs(td_error) + 1e-6) ** self.config.priority_exponent

    def store(self) -> None:
        """The actors compute the first priorities, with their own copy of the network."""
        config = self.config
        for time in range(self.stored, self.stored + config.num_steps):
            for i in range(config.num_envs):
                steps = self.history[i][time : time + config.n_step]
                transition = self.transition(steps)
                target = self.target(transition, self.actor_params, self.actor_params)
                transition["priority"] = self.priority(target - steps[0]["q_taken"])
                self.replay[time % self.capacity, i] = transition
        self.stored += config.num_steps

    def sample(self, key):
        """One point in each of B equal parts of the sum (arXiv 1511.05952, appendix B.2.1)."""
        config = self.config
        transitions = [self.replay[place] for place in sorted(self.replay)]
        priorities = np.array([transition["priority"] for transition in transitions])
        total = priorities.sum()
        points = np.arange(config.batch_size) + jax.random.uniform(key, (config.batch_size,))
        drawn = np.searchsorted(
            np.cumsum(priorities), points / config.batch_size * total, side="right"
        )
        weights = (len(priorities) * priorities[drawn] / total) ** -config.importance_exponent
        return [transitions[i] for i in drawn], weights / weights.max()

    def loss(self, params, batch):
        """Weighted half squared errors. The errors become priorities."""
        q = self.network.apply(params, batch["obs"])
        q_taken = jnp.array([q[i, batch["action"][i]] for i in range(len(q))])
        td_error = batch["target"] - q_taken
        loss = (batch["weight"] * 0.5 * td_error**2).mean()
        return loss, (td_error, {"td_loss": loss, "q_value": q_taken.mean()})

    def gradient_step(self, key, lr) -> dict:
        transitions, weights = self.sample(key)
        targets = [self.target(t, self.params, self.target_params) for t in transitions]
        batch = {
            "obs": np.array([transition["obs"] for transition in transitions]),
            "action": np.array([transition["action"] for transition in transitions]),
            "target": np.array(targets, np.float32),
            "weight": np.asarray(weights, np.float32),
        }
        grads, (td_errors, metrics) = self.gradient(self.params, batch)
        self.params = self.optimizer.step(self.params, grads, lr)
        for transition, td_error in zip(transitions, td_errors, strict=True):
            transition["priority"] = self.priority(float(td_error))
        return metrics

    def update(self) -> dict:
        config = self.config
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        self.collect(collect_key, config.num_steps)
        self.store()
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        keys = jax.random.split(learn_key, config.gradient_steps)
        all_metrics = [self.gradient_step(key, lr) for key in keys]

        before = self.update_count * self.rollout_size
        after = before + self.rollout_size
        if after // config.actor_sync_interval > before // config.actor_sync_interval:
            self.actor_params = self.params
        if after // config.target_update_interval > before // config.target_update_interval:
            self.target_params = jax.tree.map(
                lambda old, new: (1 - config.tau) * old + config.tau * new,
                self.target_params,
                self.params,
            )
        self.update_count += 1
        metrics = {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}
        return metrics | self.environments.episode_metrics()

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        twin.assert_trees(state.target_params, self.target_params, "target_params")
        twin.assert_trees(state.actor_params, self.actor_params, "actor_params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.optimizer.mean, "mu")
        twin.assert_trees(adam.nu, self.optimizer.square, "nu")
        self.check_replay(state)

    def check_replay(self, state) -> None:
        priorities = np.asarray(state.tree[0]).reshape(-1)
        for (place, i), transition in self.replay.items():
            rollout, step = divmod(place, self.config.num_steps)
            for name in ("obs", "action", "rewards", "length", "next_obs", "terminated"):
                actual = getattr(state.replay, name)[rollout, step, i]
                np.testing.assert_allclose(
                    actual, transition[name], rtol=1e-4, atol=1e-5, err_msg=name
                )
            priority = priorities[place * self.config.num_envs + i]
            np.testing.assert_allclose(priority, transition["priority"], rtol=1e-3)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", ["all on", slow("one step")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4, seed=9)  # many episodes terminate
