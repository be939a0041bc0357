"""Soft actor-critic, written plainly: the twin of sac.py.

The twin of td3.py acts, explores and replays in the same way.
"""

import dataclasses
from math import erf, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments, RunningStatistics

import sac as script

SMALL = script.Config(
    env_name="WalkContinuous",
    num_envs=2,
    num_steps=2,
    gradient_steps=2,
    batch_size=6,
    buffer_size=12,  # three rollouts: it wraps around in the second update
    learning_starts=7,  # two rollouts of warm-up
    total_timesteps=8 + 4 * 3,
    policy_lr=2e-2,
    q_lr=3e-2,
    gamma=0.9,
    tau=0.3,
    hidden_sizes=(8,),
)
CASES = {
    "all on": dataclasses.replace(
        SMALL,
        ent_coef=0.5,
        learn_ent_coef=True,
        target_entropy=-0.7,
        noise_correlation=0.6,
        reward_scale=3.0,
        normalize_obs=True,
    ),
    "all off": dataclasses.replace(
        SMALL, ent_coef=0.3, learn_ent_coef=False, num_steps=1, num_envs=3, activation="tanh"
    ),
}


def stack(critics):
    """A list of two trees as one tree, [2, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *critics)


class Twin:
    script = script
    b1 = 0.9  # of Adam

    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(self.script, config)
        self.actor, self.critic = self.script.make_networks(
            config, self.environments.env, self.environments.env_params
        )
        keys = jax.random.split(rng, 6)
        actor_key, critic_key, env_key, noise_key, warmup_key, self.key = keys
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        obs = jnp.array(self.environments.obs)
        self.noise = jax.random.normal(noise_key, (config.num_envs, 2))
        self.init_networks(actor_key, critic_key, obs)
        self.actor_optimizer = Adam(self.actor_params, b1=self.b1)
        self.critic_optimizer = Adam(self.critic_params, b1=self.b1)
        self.start_learning()
        self.obs_statistics = RunningStatistics((3,))
        self.replay = []  # rollouts, the oldest first; a rollout is a list of transitions
        self.rollout_count = 0

        rollout_size = config.num_envs * config.num_steps
        warmup_rollouts = int(np.ceil(config.learning_starts / rollout_size))
        for key in jax.random.split(warmup_key, warmup_rollouts):
            self.collect(key, self.act_randomly)
        self.environments.episode_metrics()  # those of the warm-up are not reported

    def init_networks(self, actor_key, critic_key, obs) -> None:
        self.actor_params = jax.jit(self.actor.init)(actor_key, obs)
        self.critic_params = [
            jax.jit(self.critic.init)(key, obs, self.noise)
            for key in jax.random.split(critic_key, 2)
        ]

    def start_learning(self) -> None:
        self.target_params = list(self.critic_params)
        self.log_ent_coef = np.float32(np.log(self.config.ent_coef))
        self.ent_coef_optimizer = Adam(self.log_ent_coef)
        self.critic_gradient = jax.jit(jax.grad(self.critic_loss, has_aux=True))
        self.actor_gradient = jax.jit(jax.grad(self.actor_loss, has_aux=True))

    def act_randomly(self, obs, noise):
        """Uniform in [-1, 1]: the distribution function of a normal number is uniform in [0, 1]."""
        return np.vectorize(lambda x: 2 * (0.5 * (1 + erf(x / sqrt(2)))) - 1)(np.asarray(noise))

    def act_with_noise(self, obs, noise):
        mean, log_std = self.mean_and_log_std(self.actor_params, obs)
        return jnp.tanh(mean + jnp.exp(log_std) * noise)

    def mean_and_log_std(self, params, obs):
        gaussian = self.actor.apply(params, jnp.asarray(obs, jnp.float32))
        return gaussian.loc, jnp.log(gaussian.scale_diag)

    def add_statistics(self, obs) -> None:
        if self.config.normalize_obs:
            self.obs_statistics.add(obs)

    def normalize(self, obs):
        return self.obs_statistics.normalize(obs) if self.config.normalize_obs else obs

    def collect(self, key, act) -> None:
        """Take `num_steps` steps in each environment, and put them into the replay."""
        config = self.config
        rollout = []
        for step_key in jax.random.split(key, config.num_steps):
            noise_key, env_key = jax.random.split(step_key)
            obs = np.array(self.environments.obs)
            white = jax.random.normal(noise_key, self.noise.shape)
            correlation = config.noise_correlation
            self.noise = correlation * self.noise + np.sqrt(1 - correlation**2) * white
            action = act(self.normalize(obs), self.noise)
            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, _, next_obs = self.environments.step(env_keys, action)
            for i in range(config.num_envs):
                rollout.append(
                    {
                        "obs": obs[i],
                        "action": np.asarray(action)[i],
                        "reward": reward[i],
                        "next_obs": next_obs[i],
                        "terminated": terminated[i],
                    }
                )
        self.add_statistics([transition["obs"] for transition in rollout])
        self.replay.append(rollout)
        self.rollout_count += 1
        capacity = config.buffer_size // (config.num_envs * config.num_steps)
        self.replay = self.replay[-capacity:]

    def ring(self) -> list:
        """The rollouts in the places of the script's ring, where the newest replace the oldest."""
        capacity = self.config.buffer_size // (self.config.num_envs * self.config.num_steps)
        places = {}
        first = self.rollout_count - len(self.replay)
        for number, rollout in enumerate(self.replay, start=first):
            places[number % capacity] = rollout
        return [places[place] for place in sorted(places)]

    def sample(self, key) -> dict:
        """A batch of transitions, drawn with replacement."""
        transitions = [transition for rollout in self.ring() for transition in rollout]
        indices = jax.random.randint(key, (self.config.batch_size,), 0, len(transitions))
        drawn = [transitions[i] for i in indices]
        batch = {name: np.array([transition[name] for transition in drawn]) for name in drawn[0]}
        batch["obs"] = self.normalize(batch["obs"]).astype(np.float32)
        batch["next_obs"] = self.normalize(batch["next_obs"]).astype(np.float32)
        scale = getattr(self.config, "reward_scale", 1.0)
        batch["reward"] = (scale * batch["reward"]).astype(np.float32)
        return batch

    def sample_action(self, params, obs, key):
        """tanh(u), u Gaussian, and its log-probability (arXiv 1801.01290, equation 21)."""
        mean, log_std = self.mean_and_log_std(params, obs)
        noise = jax.random.normal(key, mean.shape)
        u = mean + jnp.exp(log_std) * noise
        log_gaussian = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 - tanh(u)^2), also where tanh saturates
        log_derivative = 2 * (jnp.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), (log_gaussian - log_derivative).sum(axis=-1)

    def ent_coef(self):
        return np.exp(self.log_ent_coef) if self.config.learn_ent_coef else self.config.ent_coef

    def target(self, batch, key):
        """Equations 3 and 5 of arXiv 1812.05905."""
        next_action, next_log_prob = self.sample_action(self.actor_params, batch["next_obs"], key)
        qs = [self.critic.apply(p, batch["next_obs"], next_action) for p in self.target_params]
        next_value = jnp.minimum(*qs) - self.ent_coef() * next_log_prob
        not_terminated = 1 - batch["terminated"].astype(np.float32)
        return batch["reward"] + self.config.gamma * not_terminated * next_value

    def critic_loss(self, critic_params, batch, target):
        """Equation 5 of arXiv 1812.05905 for both critics, without its factor 1/2."""
        qs = [self.critic.apply(p, batch["obs"], batch["action"]) for p in critic_params]
        loss = sum(jnp.mean((q - target) ** 2) for q in qs)
        return loss, {"td_loss": loss, "q_value": jnp.mean(jnp.array(qs))}

    def actor_loss(self, actor_params, critic_params, batch, key, ent_coef):
        """Equation 9 of arXiv 1812.05905."""
        action, log_prob = self.sample_action(actor_params, batch["obs"], key)
        qs = [self.critic.apply(p, batch["obs"], action) for p in critic_params]
        loss = (ent_coef * log_prob - jnp.minimum(*qs)).mean()
        return loss, {"policy_loss": loss, "entropy": -log_prob.mean(), "ent_coef": ent_coef}

    def gradient_step(self, key) -> dict:
        config = self.config
        batch_key, next_action_key, action_key = jax.random.split(key, 3)
        batch = self.sample(batch_key)
        target = self.target(batch, next_action_key)
        grads, metrics = self.critic_gradient(self.critic_params, batch, target)
        self.critic_params = self.critic_optimizer.step(self.critic_params, grads, config.q_lr)

        grads, actor_metrics = self.actor_gradient(
            self.actor_params, self.critic_params, batch, action_key, self.ent_coef()
        )
        self.actor_params = self.actor_optimizer.step(self.actor_params, grads, config.policy_lr)

        if config.learn_ent_coef:  # equation 18: the gradient of alpha (H - target) by log alpha
            missing_entropy = actor_metrics["entropy"] - 2 * config.target_entropy
            grad = np.exp(self.log_ent_coef) * missing_entropy
            self.log_ent_coef = self.ent_coef_optimizer.step(
                self.log_ent_coef, grad, config.policy_lr
            )

        self.target_params = jax.tree.map(
            lambda old, new: (1 - config.tau) * old + config.tau * new,
            self.target_params,
            self.critic_params,
        )
        return metrics | actor_metrics

    def learn(self, key) -> list[dict]:
        """The metrics of each gradient step."""
        keys = jax.random.split(key, self.config.gradient_steps)
        return [self.gradient_step(key) for key in keys]

    def update(self) -> dict:
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        self.collect(collect_key, self.act_with_noise)
        steps = self.learn(learn_key)
        metrics = {name: np.mean([step[name] for step in steps]) for name in steps[0]}
        return metrics | self.environments.episode_metrics()

    def check(self, state) -> None:
        self.check_learning(state)
        self.check_statistics(state)
        assert state.rollout_count == self.rollout_count
        for i, rollout in enumerate(self.ring()):
            for name in rollout[0]:
                expected = np.array([transition[name] for transition in rollout])
                actual = np.asarray(getattr(state.replay, name)[i]).reshape(expected.shape)
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(state.noise, self.noise, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))

    def check_statistics(self, state) -> None:
        self.obs_statistics.check(state.obs_statistics)

    def check_learning(self, state) -> None:
        twin.assert_trees(state.params["actor"], self.actor_params, "actor")
        twin.assert_trees(state.params["critics"], stack(self.critic_params), "critics")
        twin.assert_trees(state.params["log_ent_coef"], self.log_ent_coef, "log_ent_coef")
        twin.assert_trees(
            state.target_params["critics"], stack(self.target_params), "target_params"
        )
        actor_adam = twin.adam_state(state.opt_state["actor"])
        critic_adam = twin.adam_state(state.opt_state["critics"])
        twin.assert_trees(actor_adam.mu, self.actor_optimizer.mean, "actor's mu")
        twin.assert_trees(critic_adam.nu, stack(self.critic_optimizer.square), "critics' nu")


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, seed=1)  # with seed 0 one gradient is all rounding
