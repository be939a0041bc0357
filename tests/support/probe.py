"""Short trainings on `toys.ProbeContinuous` and `toys.ProbeDiscrete`, whose values are known."""

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toys  # registers the environments

from onejit.engine.evaluation import policy_of
from support.compilation import jit_quickly

GAMMA = 0.9
LIMIT = 5  # steps after which an episode is cut
ENDLESS = 1 / (1 - GAMMA)  # the value of an episode that is cut, of sign 1
FINITE = ENDLESS * (1 - GAMMA ** np.array([3, 2, 1]))  # of the steps of one that ends

SMALL = {"hidden_sizes": (16, 16), "num_envs": 8}
ROLLOUTS = SMALL | {"num_steps": 16, "num_minibatches": 4, "lr": 1e-2}
REPLAY = SMALL | {
    "num_steps": 2,
    "gradient_steps": 4,
    "batch_size": 64,
    "buffer_size": 2000,
    "learning_starts": 200,
}
PPO = ROLLOUTS | {"vf_clip_eps": np.inf, "normalize_reward": False, "normalize_obs": False}
DQN = REPLAY | {"target_update_interval": 64, "lr": 1e-2}
SAC = REPLAY | {"policy_lr": 3e-3, "q_lr": 3e-3}
NO_ENTROPY = {"ent_coef": 0.0, "learn_ent_coef": False}
SUPPORT = {"v_min": -12.0, "v_max": 12.0}
DISCRETE = {
    "dqn": DQN | {"epsilon_finish": 0.5},
    "apex_dqn": DQN | {"actor_sync_interval": 64},
    "rainbow": DQN | SUPPORT | {"num_atoms": 25, "noisy": False, "epsilon_finish": 1.0},
    "pqn": ROLLOUTS | {"epsilon_finish": 0.5, "layer_norm": False},
    "pqn_rnn": ROLLOUTS | {"epsilon_finish": 0.5, "layer_norm": False, "cell_size": 16},
    "ppo": PPO,
    "ppo_rnn": PPO | {"cell_size": 16},
}
CONTINUOUS = {
    "ppo_continuous": PPO,
    "reppo": ROLLOUTS
    | SUPPORT
    | {"lr": 3e-3, "target_entropy": -2.0}
    | {"normalize_reward": False, "normalize_obs": False},
    "sac": SAC | NO_ENTROPY | {"tau": 0.1, "reward_scale": 0.5},
    "td3": SAC | {"tau": 0.1},
    "crossq": SAC
    | NO_ENTROPY
    | {"policy_delay": 2, "critic_hidden_sizes": (64, 64), "batch_size": 256, "q_lr": 5e-4},
    "flashsac": {name: value for name, value in REPLAY.items() if name != "hidden_sizes"}
    | {"policy_delay": 2, "lr": 3e-3, "tau": 0.05, "ent_coef": 1e-4, "normalize_reward": False}
    | {"value_limit": 1.5 * ENDLESS, "num_atoms": 51, "hidden_size": 16, "critic_hidden_size": 16},
}


class Learned(NamedTuple):
    """What a training has left."""

    script: Any
    config: Any
    state: Any
    metrics: dict

    @property
    def networks(self):
        make = getattr(self.script, "make_networks", None) or self.script.make_network
        return make(self.config, *self.script.make_env(self.config))

    def values(self, obs) -> np.ndarray:
        """The values of the steps of an episode: [T, 5] -> [T, n].

        They are of n actions, of n critics for the greedy action, or of the state alone.
        """
        obs = jnp.asarray(obs, float)
        return np.asarray(VALUES[self.script.__name__](self, obs))

    def first_rewards(self, kind: int) -> np.ndarray:
        """The rewards of the greedy policy in the first steps of episodes of a kind."""
        env, env_params = self.script.make_env(self.config)
        keys = jax.random.split(jax.random.key(1), 64)
        obs, env_state = jax.vmap(env.reset, (0, None))(keys, env_params)
        start, act = policy_of(self.script, self.config)
        action, _ = jax.vmap(act, (None, None, 0))(self.state.agent, start(), obs)
        _, _, reward, *_ = jax.vmap(env.step, (0, 0, 0, None))(keys, env_state, action, env_params)
        return np.asarray(reward[obs[:, kind] == 1])


def of_actions(learned: Learned, obs):
    return learned.networks.apply(learned.state.params, obs)


def of_distributions(learned: Learned, obs):
    script, config = learned.script, learned.config
    outputs = of_actions(learned, obs)
    return script.action_values(outputs, script.make_support(config), config.distribution)


def of_state(learned: Learned, obs):
    _, critic = learned.networks
    return critic.apply(learned.state.params["critic"], obs)[:, None]


def of_memory(learned: Learned, obs):
    body, _, critic = learned.networks
    params = learned.state.params
    start = jnp.zeros(learned.config.cell_size)
    memory = body.apply(params["body"], start, obs, jnp.zeros(len(obs), bool))
    return critic.apply(params["critic"], memory)[:, None]


def of_actions_with_memory(learned: Learned, obs):
    start = jnp.zeros(learned.config.cell_size)
    _, q = learned.networks.apply(learned.state.params, start, obs, jnp.zeros(len(obs), bool))
    return q


def of_bins(learned: Learned, obs):
    actor, critic = learned.networks
    params = learned.state.params
    action = jnp.tanh(actor.apply(params["policy"]["actor"], obs).mode())
    return critic.apply(params["critic"], obs, action)[1][:, None]


def of_critics(learned: Learned, obs):
    actor, critic = learned.networks
    params = learned.state.params
    policy = actor.apply(params["actor"], obs)
    action = policy if learned.script.__name__ == "td3" else jnp.tanh(policy.mode())
    apply = jax.vmap(critic.apply, (0, None, None))
    return apply(params["critics"], obs, action).T


def of_normalized_critics(learned: Learned, obs):
    actor, critic = learned.networks

    def variables(name):
        state = learned.state
        return {"params": state.params[name], "batch_stats": state.batch_stats[name]}

    action = jnp.tanh(actor.apply(variables("actor"), obs, training=False).mode())
    apply = jax.vmap(lambda critics: critic.apply(critics, obs, action, training=False))
    q = apply(variables("critics"))
    if learned.script.__name__ == "flashsac":
        limit = learned.config.value_limit
        q = learned.script.mean_value(q, jnp.linspace(-limit, limit, learned.config.num_atoms))
    return q.T


VALUES = {
    "dqn": of_actions,
    "apex_dqn": of_actions,
    "rainbow": of_distributions,
    "pqn": of_actions,
    "pqn_rnn": of_actions_with_memory,
    "ppo": of_state,
    "ppo_continuous": of_state,
    "ppo_rnn": of_memory,
    "reppo": of_bins,
    "sac": of_critics,
    "td3": of_critics,
    "crossq": of_normalized_critics,
    "flashsac": of_normalized_critics,
}


@functools.cache
def train(script):
    """One program for all configs that differ in floats alone."""
    return jit_quickly(lambda config, key: script.make_train(config)(key))


def learn(name: str, num_updates: int, kinds: str = "ends cut best", **settings) -> Learned:
    """Train one agent of a script on a probe with episodes of these kinds."""
    script = importlib.import_module(name)
    probe = toys.ProbeDiscrete if name in DISCRETE else toys.ProbeContinuous
    config = script.Config(
        env_name=probe.__name__,
        env_params={"kinds": kinds, "max_steps_in_episode": LIMIT},
        gamma=GAMMA,
        **(DISCRETE | CONTINUOUS)[name] | settings,
    )
    steps = num_updates * config.num_envs * config.num_steps
    steps += getattr(config, "warmup_timesteps", 0)
    config = dataclasses.replace(config, total_timesteps=steps)
    out = train(script)(config, jax.random.key(0))
    return Learned(script, config, out["runner_state"], out["metrics"])
