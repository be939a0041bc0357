"""PPO for teams (IPPO and MAPPO, arXiv 2103.01955), written plainly: the twin of mappo.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys_team  # noqa: F401  the team that learns here
from support import twin
from support.tiers import slow
from support.twin import Adam

import mappo as script

SMALL = script.Config(
    env_name="toys_team:ToyTeam",
    env_params={
        "num_agents": 3,
        "length": 4,
        "max_steps": 3,
        "dies": 2,
        "masks": True,
        "noise": 1.0,
        "pays": "action",
    },
    num_envs=4,
    num_steps=5,
    update_epochs=2,
    num_minibatches=2,
    total_timesteps=4 * 5 * 3 + 1,  # three updates
    lr=1e-2,
    gamma=0.9,
    gae_lambda=0.8,
    clip_eps=0.1,
    vf_clip_eps=0.05,
    ent_coef=0.03,
    vf_coef=0.7,
    max_grad_norm=0.6,
    cell_size=6,
    hidden_sizes=(8,),
)
CASES = {
    "gru": dataclasses.replace(
        SMALL, cell="gru", centralized_critic=True, shaping_fraction=0.0, anneal_lr=True
    ),
    "no memory": dataclasses.replace(
        SMALL,
        cell="none",
        centralized_critic=False,
        agent_ids=False,
        shared_reward=True,
        shaping_fraction=0.9,
        anneal_lr=False,
        max_grad_norm=float("inf"),
        vf_clip_eps=float("inf"),
        env_params={"num_agents": 2, "length": 2, "max_steps": 9, "noise": 1.0},
    ),
}


def stack(trees):
    return jax.tree.map(lambda *leaves: np.array(leaves), *trees)


def masked_mean(x, alive):
    return (x * alive).sum() / alive.sum()


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.env, self.env_params = script.make_env(config)
        self.actor, self.critic = script.make_networks(config, self.env, self.env_params)
        self.step_one = jax.jit(lambda *args: self.env.step(*args, self.env_params))
        self.log_probs = jax.jit(self.log_probs)
        self.value = jax.jit(self.value)
        reset_one = jax.jit(lambda key: self.env.reset(key, self.env_params))

        actor_key, critic_key, env_key, self.key = jax.random.split(rng, 4)
        env_keys = jax.random.split(env_key, config.num_envs)
        starts = jax.device_get([reset_one(key) for key in env_keys])
        self.obs = [obs for obs, _ in starts]
        self.states = [state for _, state in starts]
        self.num_agents = len(self.obs[0].alive)
        self.first = np.ones(config.num_envs, bool)
        self.memory = {"actor": self.no_memory(), "critic": self.no_memory()}

        obs = stack(self.obs)
        sequence = (self.no_memory(), jax.tree.map(lambda x: x[None], obs), self.first[None])
        params = {
            "actor": jax.jit(self.actor.init)(actor_key, *sequence),
            "critic": jax.jit(self.critic.init)(critic_key, *sequence),
        }
        self.params = jax.device_get(params)
        self.optimizer = Adam(self.params, eps=1e-5, max_norm=config.max_grad_norm)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.update_count = 0
        self.episodes = []

    def no_memory(self):
        if self.config.cell == "none":
            return ()
        shape = (self.config.num_envs, self.num_agents, self.config.cell_size)
        return np.zeros(shape, np.float32)

    def step_network(self, network, params, memory, obs, first):
        """The output for one observation, and the memory after it; empty before a first one."""
        if self.config.cell != "none":
            memory = jnp.where(first[:, None, None], 0.0, memory)
        never = jnp.zeros((1, len(first)), bool)
        obs = jax.tree.map(lambda x: x[None], obs)
        output, memories = network.apply(params, memory, obs, never)
        return output, jax.tree.map(lambda x: x[0], memories)

    def log_probs(self, actor_params, memory, obs, first):
        """Log-probabilities [N, A, actions]; those of masked actions are very low."""
        policy, memory = self.step_network(self.actor, actor_params, memory, obs, first)
        logits = policy.logits[0]
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), memory

    def value(self, critic_params, memory, obs, first):
        value, memory = self.step_network(self.critic, critic_params, memory, obs, first)
        return value[0], memory

    def collect(self, key) -> list[dict]:
        config = self.config
        steps = []
        for step_key in jax.random.split(key, config.num_steps):
            action_key, env_key = jax.random.split(step_key)
            obs = stack(self.obs)
            first = self.first
            log_probs, self.memory["actor"] = jax.device_get(
                self.log_probs(self.params["actor"], self.memory["actor"], obs, first)
            )
            gumbel = np.asarray(jax.random.gumbel(action_key, log_probs.shape))
            action = np.argmax(log_probs + gumbel, -1)
            log_prob = np.take_along_axis(log_probs, action[..., None], -1)[..., 0]
            step = {"obs": obs, "first": first, "action": action, "log_prob": log_prob}

            results = []
            for i, one_key in enumerate(jax.random.split(env_key, config.num_envs)):
                results.append(jax.device_get(self.step_one(one_key, self.states[i], action[i])))
                self.obs[i], self.states[i], _, terminated, truncated, info = results[-1]
                if terminated or truncated:
                    self.episodes.append(
                        (
                            float(info["returned_episode_returns"]),
                            int(info["returned_episode_lengths"]),
                        )
                    )
            step["terminated"] = np.array([result[3] for result in results])
            step["truncated"] = np.array([result[4] for result in results])
            step["reward"] = np.array([result[5]["reward"] for result in results])
            step["shaped_reward"] = np.array([result[5]["shaped_reward"] for result in results])
            step["next_obs"] = stack([result[5]["final_observation"] for result in results])
            self.first = step["terminated"] | step["truncated"]
            steps.append(step)
        return steps

    def reward(self, step) -> np.ndarray:
        """Shaped rewards fade out; a shared reward is the team's mean."""
        config = self.config
        reward = step["reward"]
        if config.shaping_fraction > 0:
            progress = self.update_count / config.num_updates
            weight = max(0, 1 - progress / config.shaping_fraction)
            reward = reward + weight * step["shaped_reward"]
        if config.shared_reward:
            reward = np.repeat(reward.mean(axis=1, keepdims=True), self.num_agents, axis=1)
        return reward

    def estimate_advantages(self, steps) -> None:
        """Equation 16 of arXiv 1506.02438 for each agent; the ends are those of the team."""
        config = self.config
        never = np.zeros(config.num_envs, bool)
        for step in steps:
            params = self.params["critic"]
            step["value"], self.memory["critic"] = jax.device_get(
                self.value(params, self.memory["critic"], step["obs"], step["first"])
            )
            step["next_value"], _ = jax.device_get(
                self.value(params, self.memory["critic"], step["next_obs"], never)
            )
            step["advantage"] = np.zeros((config.num_envs, self.num_agents))
        for i in range(config.num_envs):
            for agent in range(self.num_agents):
                next_advantage = 0.0
                for step in reversed(steps):
                    next_value = float(step["next_value"][i, agent])
                    if step["terminated"][i]:
                        next_value = 0.0
                    if step["terminated"][i] or step["truncated"][i]:
                        next_advantage = 0.0
                    delta = self.reward(step)[i, agent] + config.gamma * next_value
                    delta -= float(step["value"][i, agent])
                    next_advantage = delta + config.gamma * config.gae_lambda * next_advantage
                    step["advantage"][i, agent] = next_advantage
        for step in steps:
            step["target"] = step["advantage"] + step["value"]

    def loss(self, params, batch, memory):
        """Equation 9 of arXiv 1707.06347, negated. `batch` is a list of steps in time."""
        config = self.config
        actor_memory = memory["actor"]
        critic_memory = memory["critic"]
        parts = []
        for step in batch:
            obs, first = step["obs"], step["first"]
            log_probs, actor_memory = self.log_probs(params["actor"], actor_memory, obs, first)
            value, critic_memory = self.value(params["critic"], critic_memory, obs, first)
            parts.append((log_probs, value))
        log_probs = jnp.array([part[0] for part in parts])
        value = jnp.array([part[1] for part in parts])
        old = {
            name: jnp.array([step[name] for step in batch])
            for name in ("action", "log_prob", "value", "advantage", "target")
        }
        alive = jnp.array([step["obs"].alive for step in batch])  # the dead learn nothing

        log_prob = jnp.take_along_axis(log_probs, old["action"][..., None], -1)[..., 0]
        log_ratio = log_prob - old["log_prob"]
        ratio = jnp.exp(log_ratio)
        advantage = old["advantage"] - masked_mean(old["advantage"], alive)
        advantage = advantage / (jnp.sqrt(masked_mean(advantage**2, alive)) + 1e-8)
        clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
        objective = jnp.minimum(ratio * advantage, clipped * advantage)
        policy_loss = -masked_mean(objective, alive)

        change = jnp.clip(value - old["value"], -config.vf_clip_eps, config.vf_clip_eps)
        errors = (value - old["target"]) ** 2
        clipped_errors = (old["value"] + change - old["target"]) ** 2
        value_loss = 0.5 * jnp.maximum(errors, clipped_errors).mean()

        entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
        entropy = masked_mean(entropies, alive)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": masked_mean(ratio - 1 - log_ratio, alive),
            "clip_fraction": masked_mean(jnp.abs(ratio - 1) > config.clip_eps, alive),
        }
        return loss, metrics

    def learn(self, steps, memory, key) -> dict:
        """With a memory a minibatch has whole sequences, without one it has single steps."""
        config = self.config
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        if config.cell == "none":  # one step with the transitions of all steps
            names = steps[0].keys()
            steps = [
                {
                    name: jax.tree.map(lambda *x: np.concatenate(x), *[s[name] for s in steps])
                    for name in names
                }
            ]
        num_sequences = len(steps[0]["first"])
        all_metrics = []
        for epoch_key in jax.random.split(key, config.update_epochs):
            order = twin.order_of_bits(epoch_key, num_sequences)
            for indices in np.split(order, config.num_minibatches):
                minibatch = jax.tree.map(lambda x, indices=indices: x[indices], steps)
                start = jax.tree.map(lambda x, indices=indices: x[indices], memory)
                grads, metrics = self.gradient(self.params, minibatch, start)
                self.params = self.optimizer.step(self.params, grads, lr)
                all_metrics.append(metrics)
        return {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}

    def update(self) -> dict:
        memory = dict(self.memory)  # before the rollout
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        steps = self.collect(collect_key)
        self.estimate_advantages(steps)
        names = ("obs", "first", "action", "log_prob", "value", "advantage", "target")
        batch = [{name: step[name] for name in names} for step in steps]
        metrics = self.learn(batch, memory, learn_key)
        self.update_count += 1
        value = np.array([step["value"] for step in steps])
        target = np.array([step["target"] for step in steps])
        metrics["value"] = value.mean()
        metrics["explained_variance"] = 1 - np.var(target - value) / np.var(target)
        returns, lengths = zip(*self.episodes, strict=True)
        metrics["episodic_return"] = np.mean(returns)
        metrics["episodic_length"] = np.mean(lengths)
        metrics["episodes"] = len(returns)
        self.episodes = []
        return metrics

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.optimizer.mean, "mu")
        twin.assert_trees(adam.nu, self.optimizer.square, "nu")
        twin.assert_trees(state.memory, self.memory, "memory")
        np.testing.assert_array_equal(state.first, self.first)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", ["no memory", slow("gru")])
def test_twin(case):
    twin.check(script, CASES[case], Twin)
