"""FlashSAC, written plainly: the twin of flashsac.py.

It replays as the twin of sac.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac_twin as sac
from support import twin
from support.compilation import jit_quickly
from support.tiers import slow
from support.twin import RunningStatistics

import flashsac as script

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
    lr=3e-3,
    lr_end_fraction=0.3,
    gamma=0.9,
    tau=0.3,
    ent_coef=0.5,
    target_std=0.4,
    max_noise_steps=3,
    warmup_noise_steps=2,
    noise_exponent=0.5,
    value_limit=2.0,  # some values lie outside
    num_atoms=5,
    hidden_size=4,
    critic_hidden_size=5,
    num_blocks=2,
)
CASES = {
    "all on": SMALL,
    "all off": dataclasses.replace(
        SMALL,
        normalize_reward=False,
        max_noise_steps=1,
        warmup_noise_steps=4,
        policy_delay=1,
        num_steps=1,
        num_envs=3,
        gradient_steps=1,
        num_blocks=1,
        num_atoms=4,
    ),
    "small returns": dataclasses.replace(SMALL, value_limit=50.0, num_blocks=1),
}


def projected(params):
    """Unit columns of kernels; gains, with their biases if they have any, of norm sqrt(features).

    Biases next to a kernel stay as they are.
    """
    new = {}
    for name, value in params.items():
        if isinstance(value, dict):
            new[name] = projected(value)
        elif name == "kernel":
            kernel = np.array(value)
            for unit in range(kernel.shape[1]):
                kernel[:, unit] /= np.sqrt(np.sum(kernel[:, unit] ** 2))
            new[name] = kernel
        elif "kernel" in params:
            new[name] = np.array(value)
        else:
            squares = sum(np.sum(np.square(x)) for x in params.values())
            new[name] = np.array(value) * np.sqrt(len(value) / squares)
    return new


class Twin(sac.Twin):
    script = script

    def init_networks(self, actor_key, critic_key, obs) -> None:
        init_actor = jit_quickly(partial(self.actor.init, training=True))
        init_critic = jit_quickly(partial(self.critic.init, training=True))
        actor = init_actor(actor_key, obs)
        critics = [init_critic(key, obs, self.noise) for key in jax.random.split(critic_key, 2)]
        self.action = jit_quickly(self.action)
        self.draw = jit_quickly(self.draw)
        self.bootstrap = jit_quickly(self.bootstrap)
        self.split = jit_quickly(self.split)
        self.actor_params = projected(actor["params"])
        self.actor_stats = actor["batch_stats"]
        self.critic_params = [projected(critic["params"]) for critic in critics]
        self.critic_stats = [critic["batch_stats"] for critic in critics]
        self.noise_steps_left = 0
        self.discounted_return = np.zeros(self.config.num_envs)
        self.return_statistics = RunningStatistics(())
        self.largest_return = 0.0

    def act(self, obs, noise):
        variables = {"params": self.actor_params, "batch_stats": self.actor_stats}
        return self.action(variables, obs.astype(np.float32), noise)

    def action(self, variables, obs, noise):
        """In evaluation."""
        gaussian = self.actor.apply(variables, obs, training=False)
        return jnp.tanh(gaussian.loc + gaussian.scale_diag * noise)

    def draw(self, key, log_probability):
        """Noise for a step, how many steps it is held, and a key for each environment."""
        noise_key, noise_steps_key, env_key = jax.random.split(key, 3)
        index = jax.random.categorical(noise_steps_key, log_probability)
        noise = jax.random.normal(noise_key, (self.config.num_envs, 2))
        return noise, index + 1, list(jax.random.split(env_key, self.config.num_envs))

    def collect(self, key, act) -> None:
        config = self.config
        is_warmup = self.rollout_count < config.warmup_rollouts
        longest = config.warmup_noise_steps if is_warmup else config.max_noise_steps
        weights = np.arange(1.0, longest + 1) ** -config.noise_exponent
        log_probability = np.log(weights / weights.sum()).astype(np.float32)
        rollout = []
        for step_key in jax.random.split(key, config.num_steps):
            noise, noise_steps, env_keys = self.draw(step_key, log_probability)
            if self.noise_steps_left == 0:
                self.noise = noise
                self.noise_steps_left = int(noise_steps)
            self.noise_steps_left -= 1
            obs = np.array(self.environments.obs)
            action = np.asarray(act(obs, self.noise))
            reward, terminated, truncated, next_obs = self.environments.step(env_keys, action)
            for i in range(config.num_envs):
                rollout.append(
                    {
                        "obs": obs[i],
                        "action": action[i],
                        "reward": reward[i],
                        "next_obs": next_obs[i],
                        "terminated": terminated[i],
                    }
                )
                self.discounted_return[i] = config.gamma * self.discounted_return[i] + reward[i]
                self.return_statistics.add([self.discounted_return[i]])
                self.largest_return = max(self.largest_return, abs(self.discounted_return[i]))
                if terminated[i] or truncated[i]:
                    self.discounted_return[i] = 0.0
        self.replay.append(rollout)
        self.rollout_count += 1
        capacity = config.buffer_size // (config.num_envs * config.num_steps)
        self.replay = self.replay[-capacity:]

    def reward_divisor(self):
        if not self.config.normalize_reward:
            return 1.0
        std = np.sqrt(self.return_statistics.var + 1e-8)
        return max(std, self.largest_return / self.config.value_limit)

    def sample(self, key) -> dict:
        transitions = [transition for rollout in self.ring() for transition in rollout]
        indices = jax.random.randint(key, (self.config.batch_size,), 0, len(transitions))
        drawn = [transitions[i] for i in indices]
        batch = {name: np.array([transition[name] for transition in drawn]) for name in drawn[0]}
        for name in ("obs", "next_obs", "action"):
            batch[name] = batch[name].astype(np.float32)
        batch["reward"] = (batch["reward"] / self.reward_divisor()).astype(np.float32)
        return batch

    def sample_action(self, gaussian, key):
        """tanh(u), u Gaussian, and its log-probability (arXiv 1801.01290, equation 21)."""
        mean, log_std = gaussian.loc, jnp.log(gaussian.scale_diag)
        noise = jax.random.normal(key, mean.shape)
        u = mean + jnp.exp(log_std) * noise
        log_gaussian = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 - tanh(u)^2), also where tanh saturates
        log_derivative = 2 * (jnp.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), (log_gaussian - log_derivative).sum(axis=-1)

    def actor_loss(self, actor_params, actor_stats, critics, batch, key, alpha):
        """The actor in training on s and s', the critics in evaluation."""
        size = self.config.batch_size
        variables = {"params": actor_params, "batch_stats": actor_stats}
        obs = jnp.concatenate([batch["obs"], batch["next_obs"]])
        gaussian, changed = self.actor.apply(variables, obs, training=True, mutable=["batch_stats"])
        action, log_prob = self.sample_action(gaussian[:size], key)
        qs = []
        for params, stats in zip(*critics, strict=True):
            variables = {"params": params, "batch_stats": stats}
            logits = self.critic.apply(variables, batch["obs"], action, training=False)
            qs.append((jax.nn.softmax(logits) * self.atoms()).sum(axis=-1))
        loss = (alpha * log_prob - jnp.minimum(*qs)).mean()
        metrics = {"policy_loss": loss, "entropy": -log_prob.mean(), "ent_coef": alpha}
        return loss, (changed["batch_stats"], metrics)

    def atoms(self):
        limit = self.config.value_limit
        return np.linspace(-limit, limit, self.config.num_atoms, dtype=np.float32)

    def joint_pass(self, params, stats, batch, next_action):
        """Logits of (s, a) and (s', a') and the running statistics, of one critic in training."""
        obs = jnp.concatenate([batch["obs"], batch["next_obs"]])
        action = jnp.concatenate([batch["action"], next_action])
        variables = {"params": params, "batch_stats": stats}
        logits, changed = self.critic.apply(
            variables, obs, action, training=True, mutable=["batch_stats"]
        )
        size = self.config.batch_size
        return logits[:size], logits[size:], changed["batch_stats"]

    def bootstrap(self, actor, target_critics, batch, key):
        """a', its log-probability, and the probabilities of the atoms by each target critic."""
        gaussian = self.actor.apply(actor, batch["next_obs"], training=False)
        next_action, next_log_prob = self.sample_action(gaussian, key)
        next_probabilities = []
        for params, stats in zip(*target_critics, strict=True):
            _, next_logits, _ = self.joint_pass(params, stats, batch, next_action)
            next_probabilities.append(jax.nn.softmax(next_logits))
        return next_action, next_log_prob, next_probabilities

    def target(self, batch, key):
        """Probabilities of the atoms, [B, K], and the share of values that none can represent."""
        config = self.config
        limit, num_atoms = config.value_limit, config.num_atoms
        atoms = self.atoms()
        actor = {"params": self.actor_params, "batch_stats": self.actor_stats}
        target_critics = (self.target_params, self.critic_stats)
        next_action, next_log_prob, next_probabilities = jax.device_get(
            self.bootstrap(actor, target_critics, batch, key)
        )
        alpha = np.exp(self.log_ent_coef)
        target = np.zeros((config.batch_size, num_atoms), np.float32)
        outside = 0.0
        for i in range(config.batch_size):
            means = [np.sum(probability[i] * atoms) for probability in next_probabilities]
            probability = next_probabilities[0 if means[0] <= means[1] else 1][i]
            for j in range(num_atoms):
                value = batch["reward"][i]
                if not batch["terminated"][i]:
                    value += config.gamma * (atoms[j] - alpha * next_log_prob[i])
                if abs(value) > limit:
                    outside += probability[j] / config.batch_size
                place = (np.clip(value, -limit, limit) + limit) / (2 * limit) * (num_atoms - 1)
                low = int(np.floor(place))
                high = min(low + 1, num_atoms - 1)
                target[i, low] += (1 - (place - low)) * probability[j]
                target[i, high] += (place - low) * probability[j]
        return next_action, target, outside

    def critic_loss(self, critic_params, critic_stats, batch, next_action, target):
        """Cross-entropy, the mean over the batch and both critics."""
        losses = []
        qs = []
        new_stats = []
        for params, stats in zip(critic_params, critic_stats, strict=True):
            logits, _, changed = self.joint_pass(params, stats, batch, next_action)
            log_probability = jax.nn.log_softmax(logits)
            losses.append(-(target * log_probability).sum(axis=-1).mean())
            qs.append((jnp.exp(log_probability) * self.atoms()).sum(axis=-1).mean())
            new_stats.append(changed)
        loss = sum(losses) / 2
        return loss, (new_stats, {"critic_loss": loss, "q_value": sum(qs) / 2})

    def rate(self, optimizer):
        """Half a cosine over all gradient steps, by the steps that this optimizer has taken."""
        config = self.config
        rollout_size = config.num_envs * config.num_steps
        warmup_rollouts = int(np.ceil(config.learning_starts / rollout_size))
        num_updates = config.total_timesteps // rollout_size - warmup_rollouts
        progress = optimizer.steps / (num_updates * config.gradient_steps)
        end = config.lr_end_fraction * config.lr
        return end + (config.lr - end) * 0.5 * (1 + np.cos(np.pi * min(progress, 1)))

    def actor_step(self, key, batch) -> dict:
        config = self.config
        grads, (self.actor_stats, metrics) = self.actor_gradient(
            self.actor_params,
            self.actor_stats,
            (self.critic_params, self.critic_stats),
            batch,
            key,
            np.exp(self.log_ent_coef),
        )
        lr = self.rate(self.actor_optimizer)
        self.actor_params = projected(self.actor_optimizer.step(self.actor_params, grads, lr))

        target_entropy = 2 * 0.5 * np.log(2 * np.pi * np.e * config.target_std**2)
        grad = np.exp(self.log_ent_coef) * (metrics["entropy"] - target_entropy)
        lr = self.rate(self.ent_coef_optimizer)
        self.log_ent_coef = self.ent_coef_optimizer.step(self.log_ent_coef, grad, lr)
        return metrics

    def critic_step(self, key, batch) -> dict:
        next_action, target, outside = self.target(batch, key)
        grads, (new_stats, metrics) = self.critic_gradient(
            self.critic_params, self.critic_stats, batch, next_action, target
        )
        lr = self.rate(self.critic_optimizer)
        new_params = self.critic_optimizer.step(self.critic_params, grads, lr)
        self.critic_params = [projected(params) for params in new_params]
        self.critic_stats = new_stats
        self.target_params = jax.tree.map(
            lambda old, new: (1 - self.config.tau) * old + self.config.tau * new,
            self.target_params,
            self.critic_params,
        )
        return metrics | {"outside_support": outside}

    def split(self, key):
        """The next key, the key of the rollout, and each group's keys: batches, actor, critics."""
        delay = self.config.policy_delay
        key, collect_key, learn_key = jax.random.split(key, 3)
        groups = []
        for group_key in jax.random.split(learn_key, self.config.gradient_steps // delay):
            batch_key, actor_key, critic_key = jax.random.split(group_key, 3)
            batch_keys = list(jax.random.split(batch_key, delay))
            groups.append((batch_keys, actor_key, list(jax.random.split(critic_key, delay))))
        return key, collect_key, groups

    def update(self) -> dict:
        self.key, collect_key, groups = self.split(self.key)
        self.collect(collect_key, self.act)
        actor_metrics = []
        critic_metrics = []
        for batch_keys, actor_key, critic_keys in groups:
            for i, critic_key in enumerate(critic_keys):
                batch = self.sample(batch_keys[i])
                if i == 0:
                    actor_metrics.append(self.actor_step(actor_key, batch))
                critic_metrics.append(self.critic_step(critic_key, batch))
        mean = {"reward_divisor": self.reward_divisor()}
        for steps in (critic_metrics, actor_metrics):
            mean |= {name: np.mean([step[name] for step in steps]) for name in steps[0]}
        return mean | self.environments.episode_metrics()

    def check_statistics(self, state) -> None:
        self.return_statistics.check(state.return_statistics)
        np.testing.assert_allclose(state.largest_return, self.largest_return, rtol=1e-4)
        returns = self.discounted_return
        np.testing.assert_allclose(state.discounted_return, returns, rtol=1e-4, atol=1e-5)
        assert int(state.noise_steps_left) == self.noise_steps_left

    def check_learning(self, state) -> None:
        super().check_learning(state)
        twin.assert_trees(state.batch_stats["actor"], self.actor_stats, "actor's statistics")
        critic_stats = sac.stack(self.critic_stats)
        twin.assert_trees(state.batch_stats["critics"], critic_stats, "critics' statistics")
        ent_coef_adam = twin.adam_state(state.opt_state["log_ent_coef"])
        twin.assert_trees(ent_coef_adam.mu, self.ent_coef_optimizer.mean, "log_ent_coef's mu")


@pytest.mark.parametrize("case", ["all on", slow("all off"), slow("small returns")])
def test_twin(case):
    twin.check(script, CASES[case], Twin)
