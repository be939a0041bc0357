"""Rainbow, written plainly: the twin of rainbow.py. It replays as the twin of apex_dqn.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_apex_dqn_twin as apex
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments

import rainbow as script

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
    target_update_interval=9,
    priority_exponent=0.6,
    importance_exponent=0.3,
    tau=0.4,
    lr=1e-2,
    gamma=0.9,
    max_grad_norm=0.3,
    epsilon_start=0.9,
    epsilon_finish=0.3,
    exploration_fraction=0.5,
    num_atoms=5,
    v_min=-2.0,
    v_max=3.0,
    hidden_sizes=(8,),
)
CASES = {
    "categorical": dataclasses.replace(
        SMALL, distribution="categorical", noisy=True, dueling=True, double=True, anneal_lr=True
    ),
    "quantile": dataclasses.replace(
        SMALL, distribution="quantile", noisy=False, dueling=False, double=True, tau=1.0
    ),
    "none": dataclasses.replace(
        SMALL,
        distribution="none",
        noisy=True,
        dueling=True,
        double=False,
        n_step=1,
        total_timesteps=12 + 6 * 4,
        max_grad_norm=float("inf"),
    ),
}


class Twin(apex.Twin):
    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env = self.environments.env
        self.network = script.make_network(config, env, self.environments.env_params)
        self.outputs = jax.jit(self.noisy_outputs)
        self.values = jax.jit(self.values)
        params_key, env_key, tail_key, warmup_key, self.key = jax.random.split(rng, 5)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        params = jax.jit(self.network.init)(params_key, np.array(self.environments.obs))
        self.params = jax.device_get(params)
        self.target_params = self.params
        self.optimizer = Adam(self.params, eps=1.5e-4, max_norm=config.max_grad_norm)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.history = [[] for _ in range(config.num_envs)]  # all steps of each environment
        self.rollout_size = config.num_envs * config.num_steps
        self.capacity = config.buffer_size // self.rollout_size * config.num_steps
        self.replay = {}  # (time modulo the capacity, environment): transition with its priority
        self.max_priority = 1.0
        self.stored = 0
        self.update_count = 0
        self.atoms = np.linspace(config.v_min, config.v_max, config.num_atoms)

        if config.n_step > 1:
            self.collect(tail_key, config.n_step - 1, epsilon=1.0)
        for key in jax.random.split(warmup_key, int(np.ceil(7 / self.rollout_size))):
            self.collect(key, config.num_steps, epsilon=1.0)
            self.store()
        self.environments.episode_metrics()  # those of the warm-up are not reported

    def draw_noise(self, key, params, num_samples):
        """Factorized noise of all layers, arXiv 1706.10295, section 3, from one key."""
        sizes = {
            name: sum(layer["kernel_std"].shape)
            for name, layer in sorted(params["params"].items())
            if "kernel_std" in layer
        }
        normal = np.asarray(jax.random.normal(key, (num_samples, sum(sizes.values()))))
        noise = np.where(normal < 0, -1, 1) * np.sqrt(np.abs(normal))
        ends = np.cumsum(list(sizes.values()), dtype=int)
        return [
            {
                name: {"sample": row[end - size : end]}
                for (name, size), end in zip(sizes.items(), ends, strict=True)
            }
            for row in noise
        ]

    def noisy_outputs(self, params, obs, noise):
        return self.network.apply({**params, "noise": noise}, obs)

    def values(self, outputs):
        """The mean of each action's distribution. [..., num_actions, K] -> [..., num_actions]."""
        if self.config.distribution == "categorical":
            exp = jnp.exp(outputs - outputs.max(axis=-1, keepdims=True))
            probability = exp / exp.sum(axis=-1, keepdims=True)
            return (probability * self.atoms).sum(axis=-1)
        return outputs.mean(axis=-1)

    def collect(self, key, num_steps, epsilon) -> None:
        num_envs = self.config.num_envs
        steps_key, noise_key = jax.random.split(key)
        samples = self.draw_noise(noise_key, self.params, num_steps)
        keys = jax.random.split(steps_key, num_steps)
        for step_key, noise in zip(keys, samples, strict=True):
            explore, random_q, env_key = twin.draw_exploration(step_key, num_envs)
            obs = np.array(self.environments.obs)
            q = np.asarray(self.values(self.outputs(self.params, obs, noise)))
            action = [
                int(np.argmax(random_q[i] if explore[i] < epsilon else q[i]))
                for i in range(num_envs)
            ]
            env_keys = jax.random.split(env_key, num_envs)
            results = self.environments.step(env_keys, action)
            reward, terminated, truncated, next_obs = results
            for i in range(num_envs):
                self.history[i].append(
                    {
                        "obs": obs[i],
                        "action": action[i],
                        "reward": reward[i],
                        "next_obs": next_obs[i],
                        "terminated": terminated[i],
                        "done": terminated[i] or truncated[i],
                    }
                )

    def store(self) -> None:
        """New transitions have the highest priority so far (arXiv 1511.05952, algorithm 1)."""
        config = self.config
        for time in range(self.stored, self.stored + config.num_steps):
            for i in range(config.num_envs):
                transition = self.transition(self.history[i][time : time + config.n_step])
                transition["priority"] = self.max_priority
                self.replay[time % self.capacity, i] = transition
        self.stored += config.num_steps

    def project(self, values, probabilities) -> np.ndarray:
        """Algorithm 1 of arXiv 1707.06887: each value goes to its two neighbouring atoms."""
        config = self.config
        target = np.zeros(config.num_atoms)
        width = (config.v_max - config.v_min) / (config.num_atoms - 1)
        for value, probability in zip(values, probabilities, strict=True):
            place = (min(max(value, config.v_min), config.v_max) - config.v_min) / width
            lower = int(np.floor(place))
            upper = int(np.ceil(place))
            if lower == upper:
                target[lower] += probability
            else:
                target[lower] += probability * (upper - place)
                target[upper] += probability * (place - lower)
        return target

    def targets(self, transitions, choice_noise, target_noise) -> np.ndarray:
        """The distribution of R + discount Z(s', a*), [B, K]."""
        config = self.config
        next_obs = np.array([transition["next_obs"] for transition in transitions])
        outputs = self.outputs(self.target_params, next_obs, target_noise)
        choosing = outputs
        if config.double:
            choosing = self.outputs(self.params, next_obs, choice_noise)
        best = np.argmax(np.asarray(self.values(choosing)), axis=-1)
        outputs = np.asarray(outputs, np.float64)
        targets = []
        for i, transition in enumerate(transitions):
            next_outputs = outputs[i, best[i]]
            atoms = self.atoms if config.distribution == "categorical" else next_outputs
            values = transition["n_step_return"] + transition["discount"] * atoms
            if config.distribution == "categorical":
                probabilities = np.exp(next_outputs - next_outputs.max())
                values = self.project(values, probabilities / probabilities.sum())
            targets.append(values)
        return np.array(targets, np.float32)

    def losses(self, outputs, target):
        """The loss of each transition, and the error that becomes its priority."""
        if self.config.distribution == "none":
            td_error = target[:, 0] - outputs[:, 0]
            return 0.5 * td_error**2, jnp.abs(td_error)
        if self.config.distribution == "categorical":  # KL(target || outputs)
            log_probs = outputs - jax.nn.logsumexp(outputs, axis=-1, keepdims=True)
            log_target = jnp.log(jnp.where(target > 0, target, 1.0))
            loss = (target * (log_target - log_probs)).sum(axis=-1)
            return loss, loss
        num = outputs.shape[-1]
        loss = 0.0
        for i in range(num):  # equation 10 of arXiv 1710.10044
            error = target - outputs[:, i : i + 1]
            huber = jnp.where(jnp.abs(error) <= 1, 0.5 * error**2, jnp.abs(error) - 0.5)
            weight = jnp.where(error < 0, 1 - (i + 0.5) / num, (i + 0.5) / num)
            loss += (weight * huber).mean(axis=-1)
        return loss, loss

    def loss(self, params, batch, noise):
        outputs = self.noisy_outputs(params, batch["obs"], noise)
        outputs = jnp.array([outputs[i, batch["action"][i]] for i in range(len(outputs))])
        losses, error = self.losses(outputs, batch["target"])
        loss = (batch["weight"] * losses).mean()
        return loss, (error, {"td_loss": loss, "q_value": self.values(outputs).mean()})

    def sample_with(self, key, importance_exponent):
        transitions, _ = self.sample(key)
        all_priorities = [transition["priority"] for transition in self.replay.values()]
        share = np.array([t["priority"] for t in transitions]) / sum(all_priorities)
        weights = (len(all_priorities) * share) ** -importance_exponent
        return transitions, weights / weights.max()

    def gradient_step(self, sample_key, loss_noise, target_noise, choice_noise, lr) -> dict:
        config = self.config
        progress = self.update_count / config.num_updates
        exponent = config.importance_exponent + progress * (1 - config.importance_exponent)
        transitions, weights = self.sample_with(sample_key, exponent)
        batch = {
            "obs": np.array([transition["obs"] for transition in transitions]),
            "action": np.array([transition["action"] for transition in transitions]),
            "target": self.targets(transitions, choice_noise, target_noise),
            "weight": np.asarray(weights, np.float32),
        }
        grads, (errors, metrics) = jax.device_get(self.gradient(self.params, batch, loss_noise))
        self.params = self.optimizer.step(self.params, grads, lr)
        for transition, error in zip(transitions, errors, strict=True):
            transition["priority"] = self.priority(float(error))
            self.max_priority = max(self.max_priority, transition["priority"])
        if config.distribution == "categorical":
            metrics["support_edge"] = (batch["target"][:, 0] + batch["target"][:, -1]).mean()
        return metrics

    def update(self) -> dict:
        config = self.config
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        share = min(1, self.update_count / (config.exploration_fraction * config.num_updates))
        epsilon = (1 - share) * config.epsilon_start + share * config.epsilon_finish
        self.collect(collect_key, config.num_steps, epsilon)
        self.store()
        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        sample_key, *noise_keys = jax.random.split(learn_key, 4)
        sample_keys = jax.random.split(sample_key, config.gradient_steps)
        samples = [self.draw_noise(key, self.params, config.gradient_steps) for key in noise_keys]
        all_metrics = [
            self.gradient_step(*drawn, lr) for drawn in zip(sample_keys, *samples, strict=True)
        ]

        before = self.update_count * self.rollout_size
        after = before + self.rollout_size
        if after // config.target_update_interval > before // config.target_update_interval:
            self.target_params = jax.tree.map(
                lambda old, new: (1 - config.tau) * old + config.tau * new,
                self.target_params,
                self.params,
            )
        self.update_count += 1
        metrics = {name: np.mean([m[name] for m in all_metrics]) for name in all_metrics[0]}
        return metrics | {"epsilon": epsilon} | self.environments.episode_metrics()

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        twin.assert_trees(state.target_params, self.target_params, "target_params")
        adam = twin.adam_state(state.opt_state)
        twin.assert_trees(adam.mu, self.optimizer.mean, "mu")
        twin.assert_trees(adam.nu, self.optimizer.square, "nu")
        np.testing.assert_allclose(state.max_priority, self.max_priority, rtol=1e-3)
        self.check_replay(state)


@pytest.mark.parametrize("case", ["categorical", slow("quantile"), slow("none")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4)
