"""Evolution of PPO's objective, written plainly: the twin of evolve_objective.py.

An agent learns as the twin of ppo.py does, with a drift in place of the clip. evosax's evolution
strategy is called as it is.
"""

import copy
import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_ppo_twin as ppo
from evosax.algorithms import Open_ES
from support import twin
from support.tiers import slow
from support.twin import Adam, Environments, RunningStatistics

import evolve_objective as script

SMALL = script.Config(
    env_name="WalkDiscrete",
    num_generations=2,
    population_size=2,
    inner_seeds=2,
    fitness_episodes=2,
    es_lr=0.1,
    es_sigma=0.5,
    drift_size=3,
    inner_envs=2,
    inner_steps=4,
    total_timesteps=2 * 2 * 4 + 1,  # two updates of an agent
    update_epochs=2,
    num_minibatches=2,
    hidden_sizes=(8,),
    lr=1e-2,
    gamma=0.9,
    gae_lambda=0.8,
    clip_eps=0.02,
    vf_clip_eps=0.05,
    ent_coef=0.03,
    vf_coef=0.7,
    max_grad_norm=0.6,
)
CASES = {
    "all on": dataclasses.replace(SMALL, anneal_lr=True, normalize_obs=True, normalize_reward=True),
    "all off": dataclasses.replace(
        SMALL,
        anneal_lr=False,
        num_slices=2,
        max_grad_norm=float("inf"),
        vf_clip_eps=float("inf"),
        activation="relu",
    ),
}


def drift(weights, ratio, advantage, clip_eps):
    """LPO's drift (arXiv 2210.05639): a network on eight features, added to the drift of PPO."""
    log_ratio = jnp.log(ratio)
    features = [log_ratio, log_ratio**2, 1 - ratio, (1 - ratio) ** 2]
    features = jnp.stack(features + [feature * advantage for feature in features])  # [8, B]
    hidden = jnp.tanh(weights["hidden"].T @ features)
    network = weights["output"] @ hidden
    clipped = jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps)
    ppo_drift = jnp.maximum(ratio * advantage - clipped * advantage, 0)
    return jnp.maximum(ppo_drift + network - 1e-4, 0)


class Agent(ppo.Twin):
    """An agent that trains with a drift. Those that `start` makes share its compiled programs."""

    script = script

    def __init__(self, config):
        self.config = types.SimpleNamespace(
            **vars(config),
            num_envs=config.inner_envs,
            num_steps=config.inner_steps,
            num_updates=config.inner_updates,
        )
        self.environments = Environments(script, config)
        env, env_params = self.environments.env, self.environments.env_params
        self.actor, self.critic = script.make_networks(config, env, env_params)
        self.init = jax.jit(self.init_params)
        self.log_probs = jax.jit(self.log_probs)
        self.value = jax.jit(self.value)
        self.gradient_with = jax.jit(self.gradient_with)

    def init_params(self, actor_key, critic_key, obs):
        return {
            "actor": self.actor.init(actor_key, obs),
            "critic": self.critic.init(critic_key, obs),
        }

    def gradient_with(self, weights, params, batch):
        agent = copy.copy(self)
        agent.weights = weights
        return jax.grad(agent.loss, has_aux=True)(params, batch)

    def start(self, rng, weights):
        """A new agent with the drift of these weights."""
        agent = copy.copy(self)
        agent.weights = weights
        agent.gradient = partial(self.gradient_with, weights)
        actor_key, critic_key, env_key, agent.key = jax.random.split(rng, 4)
        agent.environments = self.reset(env_key, self.config.num_envs)
        obs = np.array(agent.environments.obs)
        agent.params = jax.device_get(self.init(actor_key, critic_key, obs))
        agent.optimizer = Adam(agent.params, eps=1e-5, max_norm=self.config.max_grad_norm)
        agent.obs_statistics = RunningStatistics((3,))
        agent.return_statistics = RunningStatistics(())
        agent.discounted_return = np.zeros(self.config.num_envs)
        agent.update_count = 0
        return agent

    def reset(self, rng, number):
        """New environments."""
        environments = copy.copy(self.environments)
        environments.states, environments.obs, environments.ended = [], [], []
        environments.reset(jax.random.split(rng, number))
        return environments

    def objective(self, ratio, advantage):
        penalty = drift(self.weights, ratio, advantage, self.config.clip_eps)
        return ratio * advantage - penalty, {}

    def play(self, rng):
        """Mean return and length of new episodes, in which the agent explores as in training."""
        config = self.config
        reset_key, key = jax.random.split(rng)
        environments = self.reset(reset_key, config.fitness_episodes)
        going_on = np.ones(config.fitness_episodes, bool)
        returns = np.zeros(config.fitness_episodes)
        lengths = np.zeros(config.fitness_episodes)
        while going_on.any():
            key, action_key, env_key = jax.random.split(key, 3)
            obs = np.array(environments.obs)
            if config.normalize_obs:
                obs = self.obs_statistics.normalize(obs)
            action, _ = self.act(action_key, np.asarray(obs, np.float32))
            env_keys = jax.random.split(env_key, config.fitness_episodes)
            reward, terminated, truncated, _ = environments.step(env_keys, action)
            returns += going_on * reward
            lengths += going_on
            going_on &= ~(terminated | truncated)
        return returns.mean(), lengths.mean()


class Twin:
    def __init__(self, config, rng):
        self.config = config
        self.agent = Agent(config)

        keys = jax.random.split(rng, 6)
        actor_key, critic_key, weights_key, es_key, _, self.key = keys
        self.params = self.agent.init(actor_key, critic_key, np.zeros((config.inner_envs, 3)))
        hidden = jax.random.normal(weights_key, (8, config.drift_size)) / np.sqrt(8)
        self.drift = {"hidden": hidden, "output": jnp.zeros(config.drift_size)}
        self.strategy = Open_ES(
            config.population_size,
            self.drift,
            optimizer=optax.adam(config.es_lr),
            std_schedule=lambda generation: jnp.float32(config.es_sigma),
        )
        default_params = self.strategy.default_params
        self.es_state = self.strategy.init(es_key, self.drift, default_params)

    def update(self) -> dict:
        """One generation: every network trains agents from the same keys."""
        config = self.config
        strategy = self.strategy
        keys = jax.random.split(self.key, 5)
        self.key, ask_key, tell_key, train_key, play_key = keys
        train_keys = jax.random.split(train_key, config.inner_seeds)
        play_keys = jax.random.split(play_key, config.inner_seeds)
        population, es_state = strategy.ask(ask_key, self.es_state, strategy.default_params)
        networks = jax.device_get(population)

        agents = {}
        returns = np.zeros((config.population_size, config.inner_seeds))
        lengths = np.zeros((config.population_size, config.inner_seeds))
        for member in range(config.population_size):
            weights = {name: x[member] for name, x in networks.items()}
            for seed in range(config.inner_seeds):
                agent = self.agent.start(train_keys[seed], weights)
                for _ in range(config.inner_updates):
                    agent.update()
                agents[member, seed] = agent
                returns[member, seed], lengths[member, seed] = agent.play(play_keys[seed])

        fitness = returns.mean(axis=1)
        self.es_state, _ = strategy.tell(
            tell_key,
            population,
            jnp.asarray(-fitness, jnp.float32),  # evosax minimizes
            es_state,
            strategy.default_params,
        )
        self.drift = strategy.get_mean(self.es_state)
        member = int(np.argmax(fitness))
        best = agents[member, int(np.argmax(returns[member]))]
        self.params = best.params
        self.obs_statistics = best.obs_statistics
        return {
            "episodic_return": returns.mean(),
            "episodic_length": lengths.mean(),
            "episodes": returns.size * config.fitness_episodes,
            "fitness_best": fitness.max(),
            "fitness_spread": fitness.std(),
            "diverged": 0,
        }

    def check(self, state) -> None:
        twin.assert_trees(state.params, self.params, "params")
        twin.assert_trees(state.drift, self.drift, "drift")
        if hasattr(self, "obs_statistics"):
            self.obs_statistics.check(state.obs_statistics)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, self.key)))


@pytest.mark.parametrize("case", ["all on", slow("all off")])
def test_twin(case):
    twin.check(script, CASES[case], Twin, num_updates=2)
