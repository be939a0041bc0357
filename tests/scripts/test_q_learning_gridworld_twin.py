"""Tabular Q-learning, written plainly: the twin of q_learning_gridworld.py."""

import dataclasses

import jax
import numpy as np
import pytest
from support import twin
from support.twin import Environments

import q_learning_gridworld as script

# With these rates and rewards all values are exact in float32, and rounding breaks no tie.
SMALL = script.Config(
    height=3,
    width=4,
    start=(2, 0),
    goal=(2, 3),
    walls=((1, 1),),
    cliff=((2, 1), (2, 2)),
    step_reward=-0.25,
    goal_reward=2.0,
    cliff_reward=-1.0,
    max_steps_in_episode=7,
    num_steps=20,
    total_timesteps=60,
    lr=0.5,
    gamma=0.5,
    epsilon=0.5,
    q_init=0.5,
)
CASES = {
    "one start": SMALL,
    "random starts": dataclasses.replace(SMALL, random_starts=True, cliff_terminates=True),
    "almost greedy": dataclasses.replace(SMALL, epsilon=0.1, max_steps_in_episode=13),
}


class Twin:
    def __init__(self, config, rng):
        self.config = config
        env_key, self.key = jax.random.split(rng)
        self.environments = Environments(script, config)
        self.environments.reset([env_key])
        self.q = np.full((config.height * config.width, 4), config.q_init, np.float32)

    @property
    def cell(self) -> int:
        return int(self.environments.obs[0])

    def choose(self, uniform: float) -> int:
        """Epsilon-greedy: the actions divide the numbers from 0 to 1 among themselves."""
        epsilon = self.config.epsilon
        values = self.q[self.cell]
        best = [action for action in range(4) if values[action] == max(values)]
        limit = 0.0
        for action in range(4):
            limit += epsilon / 4
            if action in best:
                limit += (1 - epsilon) / len(best)
            if uniform < limit:
                return action
        return 3

    def update(self) -> dict:
        config = self.config
        self.key, action_key, env_key = jax.random.split(self.key, 3)
        uniforms = jax.random.uniform(action_key, (config.num_steps,))
        errors = []
        values = []
        for uniform, key in zip(uniforms, jax.random.split(env_key, config.num_steps), strict=True):
            cell = self.cell
            action = self.choose(float(uniform))
            (reward,), (terminated,), _, (next_cell,) = self.environments.step([key], [action])
            target = reward
            if not terminated:
                target = reward + config.gamma * max(self.q[next_cell])
            errors.append(target - self.q[cell, action])
            values.append(self.q[cell, action])
            self.q[cell, action] += config.lr * errors[-1]
        metrics = {"td_loss": np.mean(np.square(errors)), "q_value": np.mean(values)}
        return metrics | self.environments.episode_metrics()

    def check(self, state) -> None:
        """Everything that the script carries to its next update."""
        np.testing.assert_allclose(state.q, self.q, rtol=1e-5, atol=1e-6)
        assert state.obs == self.cell
        twin.assert_trees(state.env_state, self.environments.states[0], "env_state")
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", CASES)
def test_twin(case):
    twin.check(script, CASES[case], Twin)
