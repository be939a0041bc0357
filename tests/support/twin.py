"""What the twins share: an environment of many events, environments stepped one by one, Adam.

A twin is a plain and slow implementation of a script's whole `init` and `update`: loops over steps,
environments, epochs and minibatches. It takes nothing from the script but its networks, its
environment and its `Config`. Random numbers come from the same keys by the twin's own calls.
"""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

from onejit.envs.adapter import MaskedObservation


@struct.dataclass
class WalkState(environment.EnvState):
    place: jax.Array  # [2]


@struct.dataclass
class WalkParams(environment.EnvParams):
    max_steps_in_episode: int = 3


class WalkContinuous(environment.Environment):
    """A random walk that the action pushes. It terminates where the first coordinate exceeds 1.2.

    Episodes are short, and end by termination and by the time limit. Each observation, reward and
    final observation differs from all others, so that a mistake in any of them shows.
    """

    @property
    def default_params(self):
        return WalkParams()

    def push(self, action):
        return 0.3 * jnp.reshape(action, (-1,))[:1]

    def reset_env(self, key, params):
        place = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
        state = WalkState(time=jnp.int32(0), place=place)
        return self.observe(key, state, None, params), state

    def step_env(self, key, state, action, params):
        noise = 0.5 * jax.random.normal(key, (2,))
        place = 0.9 * state.place + noise + self.push(action)
        reward = place[0] - 0.1 * jnp.square(place[1]) + 0.5
        terminated = place[0] > 1.2
        state = WalkState(time=state.time + 1, place=place)
        return self.observe(key, state, action, params), state, reward, terminated, {}

    def observe(self, key, state, action, params):
        return jnp.array([state.place[0], 2.0 + 3.0 * state.place[1], 0.5 * state.time])

    def observation_space(self, params):
        return spaces.Box(-100.0, 100.0, (3,))

    def action_space(self, params=None):
        return spaces.Box(-2.0, 2.0, (2,))


class WalkDiscrete(WalkContinuous):
    """The same with three actions."""

    def push(self, action):
        return 0.5 * (jnp.asarray(action, jnp.float32) - 1.0)

    @property
    def num_actions(self):
        return 3

    def action_space(self, params=None):
        return spaces.Discrete(3)


class WalkMasked(WalkDiscrete):
    """Actions 0 and 1 are valid only above 0, each along an axis of its own.

    Action 2 is valid except at the time limit.
    """

    def observe(self, key, state, action, params):
        obs = super().observe(key, state, action, params)
        goes_on = state.time < params.max_steps_in_episode
        mask = jnp.array([state.place[0] > 0.0, state.place[1] > 0.0, goes_on])
        return MaskedObservation(obs=obs, action_mask=mask)


gymnax.register("WalkContinuous", WalkContinuous)
gymnax.register("WalkDiscrete", WalkDiscrete)
gymnax.register("WalkMasked", WalkMasked)


def to_array(obs) -> np.ndarray:
    """An observation as one array. Its action mask, if it has one, comes last."""
    return np.concatenate(obs) if isinstance(obs, tuple) else np.asarray(obs)


class Environments:
    """The environments of one agent, reset and stepped one by one."""

    def __init__(self, script, config):
        self.staggered = getattr(config, "staggered_resets", False)
        self.env, self.env_params = script.make_env(config)
        self.reset_one = jax.jit(lambda key: self.env.reset(key, self.env_params))
        self.step_one = jax.jit(
            lambda key, state, action: self.env.step(key, state, action, self.env_params)
        )
        self.states = []
        self.obs = []
        self.shortened = []  # whether the running episode began with a later time
        self.ended = []  # (return, length) of the episodes that ended since the last `clear`

    def reset(self, keys) -> None:
        for key in keys:
            obs, state = self.reset_one(key)
            self.obs.append(to_array(obs))
            self.states.append(state)
            self.shortened.append(False)
        if self.staggered:
            for i, state in enumerate(self.states):
                time = i * self.env_params.max_steps_in_episode // len(keys)
                inner = state.env_state.replace(time=jnp.int32(time))
                self.states[i] = state.replace(env_state=inner)
                self.shortened[i] = time > 0

    def step(self, keys, actions):
        """Reward, terminated, truncated [N] and the observations after the step, before a reset."""
        rewards = []
        terminateds = []
        truncateds = []
        next_obs = []
        for i, (key, action) in enumerate(zip(keys, actions, strict=True)):
            obs, state, reward, terminated, truncated, info = self.step_one(
                key, self.states[i], jnp.asarray(action)
            )
            self.obs[i] = to_array(obs)
            self.states[i] = state
            rewards.append(float(reward))
            terminateds.append(bool(terminated))
            truncateds.append(bool(truncated))
            next_obs.append(to_array(info["final_observation"]))
            if (terminated or truncated) and not self.shortened[i]:
                self.ended.append(
                    (
                        float(info["returned_episode_returns"]),
                        int(info["returned_episode_lengths"]),
                    )
                )
            self.shortened[i] &= not (terminated or truncated)
        return np.array(rewards), np.array(terminateds), np.array(truncateds), np.array(next_obs)

    def episode_metrics(self) -> dict:
        """Means over the episodes that ended since the last call."""
        ended = self.ended
        self.ended = []
        if not ended:
            return {"episodic_return": np.nan, "episodic_length": np.nan, "episodes": 0}
        returns, lengths = zip(*ended, strict=True)
        return {
            "episodic_return": np.mean(returns),
            "episodic_length": np.mean(lengths),
            "episodes": len(ended),
        }


class Adam:
    """Adam (arXiv 1412.6980, algorithm 1) after a clip of the gradient's global norm."""

    def __init__(self, params, eps=1e-8, b1=0.9, b2=0.999, max_norm=np.inf):
        self.mean = jax.tree.map(np.zeros_like, params)
        self.square = jax.tree.map(np.zeros_like, params)
        self.steps = 0
        self.eps = eps
        self.b1 = b1
        self.b2 = b2
        self.max_norm = max_norm

    def step(self, params, grads, lr):
        """The parameters after one step with this gradient and learning rate."""
        grads = jax.tree.map(np.asarray, grads)
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
        if norm > self.max_norm:
            grads = jax.tree.map(lambda g: g * (self.max_norm / norm), grads)
        self.steps += 1
        self.mean = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, self.mean, grads)
        self.square = jax.tree.map(
            lambda v, g: self.b2 * v + (1 - self.b2) * np.square(g), self.square, grads
        )
        mean_scale = 1 / (1 - self.b1**self.steps)
        square_scale = 1 / (1 - self.b2**self.steps)

        def stepped(param, m, v):
            return param - lr * mean_scale * m / (np.sqrt(square_scale * v) + self.eps)

        return jax.tree.map(stepped, params, self.mean, self.square)


class RunningStatistics:
    """Mean and variance of all rows added so far, to which a 1e-4th row (0, variance 1) belongs."""

    def __init__(self, shape):
        self.count = 1e-4
        self.sum = np.zeros(shape)
        self.sum_of_squares = 1e-4 * np.ones(shape)

    def add(self, rows) -> None:
        for row in np.asarray(rows, np.float64):
            self.count += 1
            self.sum = self.sum + row
            self.sum_of_squares = self.sum_of_squares + np.square(row)

    @property
    def mean(self):
        return self.sum / self.count

    @property
    def var(self):
        return self.sum_of_squares / self.count - np.square(self.mean)

    def normalize(self, x):
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10.0, 10.0)

    def check(self, statistics, rtol=1e-4) -> None:
        """Assert that the script's statistics are the same."""
        np.testing.assert_allclose(statistics.mean, self.mean, rtol=rtol, atol=1e-6)
        np.testing.assert_allclose(statistics.var, self.var, rtol=rtol, atol=1e-6)
        np.testing.assert_allclose(statistics.count, self.count, rtol=rtol)


def draw_exploration(key, num_envs: int):
    """Numbers that are compared with epsilon, [N], values of random actions, [N, 3], and a key."""
    action_key, env_key = jax.random.split(key)
    explore_key, value_key = jax.random.split(action_key)
    explore = jax.random.uniform(explore_key, (num_envs,))
    random_q = jax.random.uniform(value_key, (num_envs, 3))
    return np.asarray(explore), np.asarray(random_q), env_key


def order_of_bits(key, size: int) -> np.ndarray:
    """Indices below `size` in the order of random numbers of 32 bits, by index where they agree."""
    return np.argsort(np.asarray(jax.random.bits(key, (size,))), kind="stable")


def adam_state(opt_state):
    """The state of Adam somewhere in an optimizer state of optax."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    (state,) = [x for x in states if hasattr(x, "mu")]
    return state


def assert_trees(actual, expected, name: str, rtol=1e-4, atol=1e-5) -> None:
    """Equal up to rounding, leaf by leaf, with the path of a leaf that is not."""
    actual_leaves, structure = jax.tree.flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree.flatten_with_path(expected)
    assert structure == expected_structure, f"{name}: {structure}, not {expected_structure}"
    for (path, x), (_, y) in zip(actual_leaves, expected_leaves, strict=True):
        place = name + jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=place)


def assert_metrics(actual: dict, expected: dict, rtol=1e-4, atol=1e-5) -> None:
    """The same names, and values equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=atol, err_msg=name)


def check(script, config, twin_class, num_updates: int = 3, seed: int = 0) -> None:
    """The script and its twin, from the same key, after `init` and after each of some updates."""
    rng = jax.random.key(seed)
    init, update = script.make_learner(config)
    update = jax.jit(update)
    state = jax.jit(init)(rng)
    twin = twin_class(config, rng)
    twin.check(state)
    for _ in range(num_updates):
        state, metrics = update(state)
        assert_metrics(metrics, twin.update())
        twin.check(state)
