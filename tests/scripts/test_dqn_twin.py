"""Deep Q-learning, written plainly: the twin of dqn.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments

import dqn as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_envs=2,
    num_steps=2,
    gradient_steps=2,
    batch_size=6,
    buffer_size=12,  # three rollouts: it wraps around in the second update
    learning_starts=7,  # two rollouts of warm-up
    total_timesteps=8 + 4 * 4,
    target_update_interval=6,  # passed by 8 and 12 of the steps 4, 8, 12, 16
    lr=2e-2,
    gamma=0.9,
    epsilon_start=0.9,
    epsilon_finish=0.3,
    exploration_fraction=0.5,  # of four updates: epsilon is constant from the third on
    hidden_sizes=(8,),
)
CASES = {
    # at a time limit without any valid action, the target is that of an end
    "all on": dataclasses.replace(
        SMALL,
        env_name="WalkMasked",
        double=True,
        anneal_lr=True,
        tau=0.4,
        activation="tanh",
    ),
    "all off": dataclasses.replace(
        SMALL, double=False, anneal_lr=False, tau=1.0, buffer_dtype="bfloat16"
    ),
}


def split_masks(obs):
    """Observations, and the masks of valid actions, which stand behind three numbers."""
    masks = np.ones((len(obs), 3), bool)
    masks[:, : obs.shape[1] - 3] = obs[:, 3:] > 0
    return obs[:, :3], masks


def best_action(values, mask) -> int:
    """The valid action of the highest value."""
    valid = np.flatnonzero(mask)
    return int(valid[np.argmax(np.asarray(values)[valid])])


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.environments = Environments(script, config)
        env = self.environments.env
        self.network = script.make_network(config, env, self.environments.env_params)

        params_key, env_key, warmup_key, self.key = jax.random.split(rng, 4)
        self.environments.reset(jax.random.split(env_key, config.num_envs))
        obs, _ = split_masks(np.array(self.environments.obs))
        self.params = jax.jit(self.network.init)(params_key, obs)
        self.target_params = self.params
        self.optimizer = Adam(self.params)
        self.gradient = jax.jit(jax.grad(self.loss, has_aux=True))
        self.rollouts = []  # the oldest first; a rollout is a list of transitions
        self.update_count = 0

        self.rollout_size = config.num_envs * config.num_steps
        for key in jax.random.split(warmup_key, int(np.ceil(7 / self.rollout_size))):
            self.collect(key, epsilon=1.0)
        self.environments.episode_metrics()  # those of the warm-up are not reported

    def collect(self, key, epsilon) -> None:
        """Algorithm 1 of Mnih et al. 2015: act epsilon-greedily, and store the transitions."""
        config = self.config
        rollout = []
        for step_key in jax.random.split(key, config.num_steps):
            explore, random_q, env_key = twin.draw_exploration(step_key, config.num_envs)
            obs, masks = split_masks(np.array(self.environments.obs))
            q = self.network.apply(self.params, obs)
            action = [
                best_action(random_q[i] if explore[i] < epsilon else q[i], masks[i])
                for i in range(config.num_envs)
            ]
            env_keys = jax.random.split(env_key, config.num_envs)
            reward, terminated, _, next_obs = self.environments.step(env_keys, action)
            next_obs, next_masks = split_masks(next_obs)
            for i in range(config.num_envs):
                rollout.append(
                    {
                        "obs": obs[i],
                        "action": action[i],
                        "reward": np.float32(reward[i]),
                        "next_obs": next_obs[i],
                        "next_action_mask": next_masks[i],
                        "terminated": terminated[i],
                    }
                )
        self.rollouts.append(rollout)

    def ring(self) -> list:
        """The rollouts in the places of the script's ring, where the newest replace the oldest."""
        capacity = self.config.buffer_size // self.rollout_size
        places = {}
        for number, rollout in enumerate(self.rollouts):
            places[number % capacity] = rollout
        return [places[place] for place in sorted(places)]

    def sample(self, key) -> dict:
        """A batch of transitions, drawn with replacement."""
        transitions = [transition for rollout in self.ring() for transition in rollout]
        indices = jax.random.randint(key, (self.config.batch_size,), 0, len(transitions))
        drawn = [transitions[i] for i in indices]
        return {name: np.array([transition[name] for transition in drawn]) for name in drawn[0]}

    def target(self, batch):
        """y = r + gamma Q'(s', a*), only r at the end (arXiv 1509.06461, equations 2 and 4)."""
        q_of_target_network = self.network.apply(self.target_params, batch["next_obs"])
        chooser = self.params if self.config.double else self.target_params
        q_of_chooser = self.network.apply(chooser, batch["next_obs"])
        target = []
        for i, mask in enumerate(batch["next_action_mask"]):
            next_value = 0.0
            if mask.any() and not batch["terminated"][i]:
                next_value = q_of_target_network[i, best_action(q_of_chooser[i], mask)]
            target.append(batch["reward"][i] + self.config.gamma * next_value)
        return jnp.array(target, jnp.float32)

    def loss(self, params, batch, target):
        q = self.network.apply(params, batch["obs"])
        q_taken = jnp.array([q[i, batch["action"][i]] for i in range(len(target))])
        loss = 0.5 * ((q_taken - target) ** 2).mean()
        return loss, {"td_loss": loss, "q_value": q_taken.mean()}

    def update(self) -> dict:
        config = self.config
        self.key, collect_key, learn_key = jax.random.split(self.key, 3)
        share = min(1, self.update_count / (config.exploration_fraction * config.num_updates))
        epsilon = (1 - share) * config.epsilon_start + share * config.epsilon_finish
        self.collect(collect_key, epsilon)

        lr = config.lr
        if config.anneal_lr:
            lr = config.lr * (1 - self.update_count / config.num_updates)
        all_metrics = []
        for key in jax.random.split(learn_key, config.gradient_steps):
            batch = self.sample(key)
            grads, metrics = self.gradient(self.params, batch, self.target(batch))
            self.params = self.optimizer.step(self.params, grads, lr)
            all_metrics.append(metrics)

        steps_before = self.update_count * self.rollout_size
        steps_after = steps_before + self.rollout_size
        interval = config.target_update_interval
        if steps_after // interval > steps_before // interval:
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
        has_masks = state.replay.next_action_mask is not None
        for i, rollout in enumerate(self.ring()):
            for name in rollout[0].keys() - ({"next_action_mask"} if not has_masks else set()):
                expected = np.array([transition[name] for transition in rollout])
                actual = np.asarray(getattr(state.replay, name)[i]).reshape(expected.shape)
                expected = expected.astype(actual.dtype)  # of `buffer_dtype`
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert state.rollout_count == len(self.rollouts)
        obs = np.concatenate(state.obs, axis=-1) if has_masks else state.obs
        np.testing.assert_array_equal(obs, self.environments.obs)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize(
    "mask", [jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.ones((1, 1), bool), jnp.array([[1, 1, 0]])]
)
def test_a_mask_of_another_form_is_refused(mask):
    """Numbers to add would allow the forbidden actions, and one entry would mask nothing."""
    with pytest.raises(ValueError, match=r"^action_mask: .* convert numbers by mask > 0"):
        script.epsilon_greedy(jax.random.key(0), jnp.zeros((1, 3)), 0.5, mask)


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=4)
