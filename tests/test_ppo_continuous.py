"""PPO's mathematics against NumPy, and what it learns on environments of known value."""

import dataclasses
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs as brax_envs
from brax.envs.base import Env, State
from flax import struct
from gymnax.environments import environment, spaces

import ppo_continuous as ppo

# --- mathematics ---


def random_rollout(steps=13, num_envs=6):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, steps, num_envs))
    terminated, truncated = rng.random((2, steps, num_envs)) < 0.2
    assert (terminated & truncated).any() and (~terminated & truncated).any()
    return rewards, values, next_values, terminated, truncated


def test_gae_against_its_definition():
    gamma, gae_lambda = 0.9, 0.8
    rewards, values, next_values, terminated, truncated = random_rollout()
    expected = np.zeros_like(rewards)
    for t, n in np.ndindex(rewards.shape):
        for k in range(t, len(rewards)):
            delta = rewards[k, n] + gamma * next_values[k, n] * (not terminated[k, n]) - values[k, n]
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if terminated[k, n] or truncated[k, n]:
                break
    advantages, targets = ppo.gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets, expected + values, rtol=1e-4, atol=1e-5)


def test_discounted_returns_against_a_loop():
    gamma = 0.9
    rewards, _, _, terminated, truncated = random_rollout()
    done = terminated | truncated
    running, expected = np.arange(rewards.shape[1], dtype=float), []
    start = running.copy()
    for reward, ended in zip(rewards, done, strict=True):
        running = gamma * running + reward
        expected.append(running)
        running = np.where(ended, 0.0, running)
    returns, last = ppo.discounted_returns(rewards, done, start, gamma)
    np.testing.assert_allclose(returns, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, running, rtol=1e-4, atol=1e-5)


def test_statistics_of_batches_are_those_of_all_samples():
    rng = np.random.default_rng(0)
    batches = [rng.normal(loc=50 * i, scale=1 + i, size=(size, 3)) for i, size in enumerate((7, 1, 300, 12))]
    statistics = ppo.init_statistics((3,))
    for batch in batches:
        statistics = ppo.merge_statistics(statistics, jnp.asarray(batch))
    samples = np.concatenate(batches)
    np.testing.assert_allclose(statistics.mean, samples.mean(0), rtol=1e-3)
    np.testing.assert_allclose(statistics.var, samples.var(0), rtol=1e-3)
    normalized = np.clip((samples - samples.mean(0)) / samples.std(0), -10, 10)
    np.testing.assert_allclose(ppo.normalize(statistics, jnp.asarray(samples)), normalized, rtol=1e-2, atol=1e-2)


def test_policy_loss_by_hand():
    log_prob = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantage = jnp.array([3.0, 1.0, 1.0, 3.0])  # normalized: 1, -1, -1, 1
    loss, metrics = ppo.policy_loss(log_prob, jnp.zeros(4), advantage, 0.2)
    np.testing.assert_allclose(loss, -np.mean([1.2, -0.8, -1.5, 0.5]), rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], np.mean([0.5, -0.5]) - np.log([1.5, 0.5]).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], 1.0)


def test_value_loss_by_hand():
    value, old_value, target = jnp.array([1.0, 1.0]), jnp.array([0.0, 0.9]), jnp.array([2.0, 2.0])
    np.testing.assert_allclose(ppo.value_loss(value, old_value, target), 0.5, rtol=1e-6)
    np.testing.assert_allclose(ppo.value_loss(value, old_value, target, 0.2), 0.5 * (1.8**2 + 1.0) / 2, rtol=1e-6)


# --- environments of known value: `Toy` tells of each what an episode is ---


@struct.dataclass
class ToyState(environment.EnvState):
    sign: jax.Array


@struct.dataclass
class ToyParams(environment.EnvParams):
    max_steps_in_episode: int = 1000


@dataclasses.dataclass(frozen=True)
class Toy(environment.Environment):
    length: int = 1_000_000  # steps until it terminates
    reward: str = "one"  # "one"; "sign", what is observed; "last", 1 in the last step; "action", highest at 4
    shows_time: bool = False

    @property
    def default_params(self):
        return ToyParams()

    def observe(self, key, state, action, params):
        return jnp.stack([state.sign, state.time * 1.0 if self.shows_time else jnp.ones(())])

    def reset_env(self, key, params):
        state = ToyState(time=jnp.zeros((), int), sign=jax.random.rademacher(key, (), float))
        return self.observe(key, state, None, params), state

    def step_env(self, key, state, action, params):
        terminated = state.time + 1 >= self.length
        reward = {
            "one": jnp.ones(()),
            "sign": state.sign,
            "last": terminated * 1.0,
            "action": -jnp.square(action[0] - 4.0),
        }[self.reward]
        state = state.replace(time=state.time + 1)
        return self.observe(key, state, action, params), state, reward, terminated, {}

    def observation_space(self, params):
        return spaces.Box(-1000.0, 1000.0, (2,))

    def action_space(self, params=None):
        return spaces.Box(-3.0, 5.0, (1,))


class BraxToy(Env):
    """A reward of 1 in each step; done after `length` steps. Observes a number drawn at the start, and the step."""

    def __init__(self, length=1_000_000, backend=""):
        self.length = length

    def reset(self, rng):
        obs = jnp.stack([jax.random.uniform(rng), jnp.zeros(())])
        return State(None, obs, jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        obs = state.obs.at[1].add(1.0)
        return state.replace(obs=obs, reward=jnp.ones(()), done=(obs[1] >= self.length) * 1.0)

    observation_size, action_size, backend = 2, 1, "toy"


gymnax.register("ToyValue", Toy)
brax_envs.register_environment("toy_value", BraxToy)


def learn(env_name, num_updates=150, env_params=(), **overrides):
    """Train one agent: its config, final state and metrics, and a function from raw observations to values."""
    config = ppo.Config(
        env_name=env_name,
        env_params=dict(env_params),
        num_envs=8,
        num_steps=16,
        num_minibatches=4,
        update_epochs=4,
        total_timesteps=num_updates * 8 * 16,
        lr=1e-2,
        gamma=0.9,
        hidden_sizes=(16,),
        clip_value=False,
        normalize_reward=False,
        normalize_obs=False,
    )
    config = dataclasses.replace(config, **overrides)
    out = jax.jit(ppo.make_train(config))(jax.random.key(0))
    state = out["runner_state"]

    def value(*obs):
        obs = jnp.asarray(obs, float)
        obs = ppo.normalize(state.obs_statistics, obs) if config.normalize_obs else obs
        return ppo.Critic(config.hidden_sizes, config.activation).apply(state.params["critic"], obs)

    return config, state, out["metrics"], value


def test_value_of_a_constant_reward():
    *_, value = learn("ToyValue", env_params={"length": 1})
    np.testing.assert_allclose(value([1, 1], [-1, 1]), 1.0, atol=0.05)


def test_value_depends_on_the_observation():
    *_, value = learn("ToyValue", env_params={"length": 1, "reward": "sign"})
    np.testing.assert_allclose(value([1, 1], [-1, 1]), [1.0, -1.0], atol=0.05)


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_value_is_discounted(normalize_obs):
    arguments = {"length": 2, "reward": "last", "shows_time": True}
    *_, value = learn("ToyValue", env_params=arguments, normalize_obs=normalize_obs)
    np.testing.assert_allclose(value([1, 0], [-1, 0], [1, 1], [-1, 1]), [0.9, 0.9, 1.0, 1.0], atol=0.05)


def test_action_is_learned_between_the_environments_bounds():
    config, state, _, _ = learn("ToyValue", env_params={"length": 1, "reward": "action"}, num_updates=300)
    episode = jax.jit(ppo.make_rollout(config))(state, jax.random.key(1))  # 4 is 0.75 of the way from -3 to 5
    assert episode.reward[0] > -0.05 and episode.valid.sum() == 1


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@pytest.mark.parametrize("name", ["ToyValue", "toy_value"])
def test_truncation_is_bootstrapped(name):
    *_, metrics, _ = learn(name, max_episode_steps=LIMIT, num_updates=300)
    np.testing.assert_allclose(metrics["value"][-20:].mean(), ENDLESS, rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()


def test_truncation_is_bootstrapped_from_the_last_observation():
    """Not from the first one of the next episode, whose sign, and with it the return, may be the other."""
    *_, value = learn("ToyValue", env_params={"reward": "sign"}, max_episode_steps=LIMIT, num_updates=300)
    np.testing.assert_allclose(value([1, 1], [-1, 1]), [ENDLESS, -ENDLESS], rtol=0.05)


@pytest.mark.parametrize("name", ["ToyValue", "toy_value"])
def test_termination_is_not_bootstrapped(name):
    arguments = {"length": LIMIT} | ({"shows_time": True} if name == "ToyValue" else {})
    *_, value = learn(name, env_params=arguments, num_updates=300)
    starts = (1, -1) if name == "ToyValue" else (0.2, 0.8)
    learned = value(*[[start, time] for start in starts for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, 2), atol=0.3)


@pytest.mark.slow
def test_pendulum_is_learned_with_its_config():
    """Four seeds of configs/ppo_continuous/pendulum.yaml; 32 reached -159."""
    path = Path(ppo.__file__).parent / "configs" / "ppo_continuous" / "pendulum.yaml"
    config, _ = ppo.parse(["--config", str(path)], ppo.Config)
    out = jax.jit(jax.vmap(ppo.make_train(config)))(jax.random.split(jax.random.key(0), 4))
    metrics = jax.device_get(out["metrics"])
    assert ppo.mean_return(metrics, config.num_updates * 9 // 10, config.num_updates).mean() > -200


# --- the rollout and its statistics ---


def test_ratio_is_one_in_the_first_minibatch():
    """Statistics that changed between acting and the loss would show as a ratio that is not 1."""
    settings = dict(update_epochs=1, num_minibatches=1, normalize_obs=True, normalize_reward=True, clip_eps=1e-6)
    *_, metrics, _ = learn("Pendulum-v1", num_updates=10, lr=1e-3, **settings)
    assert (np.asarray(metrics["clip_fraction"]) == 0).all()
    np.testing.assert_allclose(metrics["approx_kl"], 0, atol=1e-7)


def test_normalization_is_of_all_that_one_agent_saw():
    config = ppo.Config(env_name="Pendulum-v1", num_envs=4, num_steps=8, num_minibatches=1, total_timesteps=10_000)
    init, update = ppo.make_learner(config)
    state = jax.jit(init)(jax.random.key(0))
    for _ in range(3):
        state, _ = jax.jit(update)(state)
    assert state.obs_statistics.mean.shape == (3,)
    assert state.return_statistics.var.shape == ()
    np.testing.assert_allclose(state.obs_statistics.count, 3 * 4 * 8, rtol=1e-4)
    np.testing.assert_allclose(state.return_statistics.count, 3 * 4 * 8, rtol=1e-4)


def brax_envs_and_params(num_envs=6, **settings):
    config = ppo.Config(env_name="toy_value", **settings)
    env, env_params = ppo.make_env(config)
    _, env_state, env_params = ppo.reset_envs(jax.random.key(0), env, env_params, num_envs)
    return env, env_params, env_state


def test_brax_reports_truncation_and_the_last_observation():
    env, env_params, env_state = brax_envs_and_params(max_episode_steps=LIMIT)
    clocks = np.asarray(env_state.env_state.time)
    assert len(set(clocks.tolist())) > 1, "clocks are staggered"
    starts, obs = set(), None
    for _ in range(20):
        keys = jax.random.split(jax.random.key(int(clocks.sum())), 6)
        clocks = clocks + 1
        before = obs
        obs, env_state, _, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, jnp.zeros((6, 1)), env_params
        )
        assert not terminated.any()
        np.testing.assert_array_equal(truncated, clocks % LIMIT == 0)
        if before is not None:  # the last observation is of the same episode as the one before it
            np.testing.assert_array_equal(info["final_observation"][:, 0], before[:, 0])
            np.testing.assert_array_equal(info["final_observation"][:, 1], before[:, 1] + 1)
        assert (obs[truncated, 1] == 0).all()
        starts |= set(np.asarray(obs[truncated, 0]).tolist())
    pool = np.asarray(env_params.start_states.obs[:, 0])
    assert starts <= set(pool.tolist()) and len(starts) > 10, "a reset draws from the pool, each time anew"


def test_brax_termination_is_not_truncation():
    env, env_params, env_state = brax_envs_and_params(env_params={"length": 3})
    for step in range(1, 7):
        keys = jax.random.split(jax.random.key(step), 6)
        _, env_state, _, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, jnp.zeros((6, 1)), env_params
        )
        np.testing.assert_array_equal(terminated, step % 3 == 0)
        assert not truncated.any()


def test_pools_differ_between_agents():
    config = ppo.Config(env_name="toy_value", num_envs=2)
    init, _ = ppo.make_learner(config)
    state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), 2))
    pools = np.asarray(state.env_params.start_states.obs[..., 0])
    assert pools.shape == (2, 256) and not np.isin(pools[0], pools[1]).any()


@pytest.mark.parametrize("low, high", [(-0.1, 0.1), (-2.0, 2.0), (-3.0, 5.0)])
def test_actions_are_rescaled_to_the_bounds(low, high):
    class Echo:
        def step(self, key, state, action, params):
            return action

    env = ppo.RescaleAction(Echo(), spaces.Box(low, high, (3,)))
    out = env.step(None, None, jnp.array([-1.0, 0.0, 1.0]), None)
    np.testing.assert_allclose(out, [low, (low + high) / 2, high], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        env.step(None, None, jnp.array([-9.0, 0.5, 9.0]), None), [low, low + 0.75 * (high - low), high], rtol=1e-5
    )
