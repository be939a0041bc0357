"""The mathematics of the PPO scripts against NumPy, and what they learn on environments of known
value.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys  # registers the environments
from brax import envs as brax_envs

import ppo as ppo_discrete
import ppo_continuous
import pqn
from onejit.engine.evaluation import policy_of

VALUE = {ppo_discrete: "ValueDiscrete", ppo_continuous: "ValueContinuous"}


class TimelessBrax(toys.ValueBrax):
    """Never done, and shows no clock: at the limit one would show a time at which no action is ever
    taken.
    """

    def step(self, state, action):
        return state.replace(reward=jnp.ones(()))


brax_envs.register_environment("TimelessBrax", TimelessBrax)


@pytest.mark.parametrize("script", [ppo_discrete, pqn], ids=lambda script: script.__name__)
@pytest.mark.parametrize("size", [1, 5, 512, 2**17])
def test_random_order(script, size):
    key = jax.random.key(0)
    order = script.random_order(key, size)
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size <= 512:  # no random bits are equal
        np.testing.assert_array_equal(order, jax.random.bits(key, (size,)).argsort())


def with_brax(name):
    """For each script and its environment of known value, and for this one of brax."""
    pairs = [*VALUE.items(), (ppo_continuous, name)]
    return pytest.mark.parametrize(
        ("ppo", "name"), pairs, ids=lambda value: getattr(value, "__name__", value)
    )


@pytest.fixture(params=VALUE, ids=lambda script: script.__name__)
def ppo(request):
    return request.param


# --- mathematics ---


def random_rollout(steps=13, num_envs=6):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, steps, num_envs))
    terminated, truncated = rng.random((2, steps, num_envs)) < 0.2
    assert (terminated & truncated).any() and (~terminated & truncated).any()
    return rewards, values, next_values, terminated, truncated


def test_gae_against_its_definition(ppo):
    gamma, gae_lambda = 0.9, 0.8
    rewards, values, next_values, terminated, truncated = random_rollout()
    expected = np.zeros_like(rewards)
    for t, n in np.ndindex(rewards.shape):
        for k in range(t, len(rewards)):
            delta = (
                rewards[k, n] + gamma * next_values[k, n] * (not terminated[k, n]) - values[k, n]
            )
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if terminated[k, n] or truncated[k, n]:
                break
    advantages, targets = ppo.gae(
        rewards, values, next_values, terminated, truncated, gamma, gae_lambda
    )
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets, expected + values, rtol=1e-4, atol=1e-5)


def test_statistics_of_batches_are_those_of_all_samples(ppo):
    rng = np.random.default_rng(0)
    batches = [
        rng.normal(loc=50 * i, scale=1 + i, size=(size, 3))
        for i, size in enumerate((7, 1, 300, 12))
    ]
    statistics = ppo.init_mean_std((3,))
    for batch in batches:
        statistics = ppo.update_mean_std(statistics, jnp.asarray(batch))
    samples = np.concatenate(batches)
    np.testing.assert_allclose(statistics.mean, samples.mean(0), rtol=1e-3)
    np.testing.assert_allclose(statistics.var, samples.var(0), rtol=1e-3)
    normalized = np.clip((samples - samples.mean(0)) / samples.std(0), -10, 10)
    np.testing.assert_allclose(
        ppo.normalize(statistics, jnp.asarray(samples)), normalized, rtol=1e-2, atol=1e-2
    )


def test_policy_loss_by_hand(ppo):
    log_prob = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantage = jnp.array([3.0, 1.0, 1.0, 3.0])  # normalized: 1, -1, -1, 1
    loss, metrics = ppo.policy_loss(log_prob, jnp.zeros(4), advantage, 0.2)
    np.testing.assert_allclose(loss, -np.mean([1.2, -0.8, -1.5, 0.5]), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["approx_kl"], np.mean([0.5, -0.5]) - np.log([1.5, 0.5]).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(metrics["clip_fraction"], 1.0)


def test_value_loss_by_hand(ppo):
    value, old_value, target = jnp.array([1.0, 1.0]), jnp.array([0.0, 0.9]), jnp.array([2.0, 2.0])
    np.testing.assert_allclose(ppo.value_loss(value, old_value, target, jnp.inf), 0.5, rtol=1e-6)
    np.testing.assert_allclose(
        ppo.value_loss(value, old_value, target, 0.2), 0.5 * (1.8**2 + 1.0) / 2, rtol=1e-6
    )


# --- environments of known value ---


def learn(ppo, env_name, num_updates=150, env_params=(), **overrides):
    """Train one agent: its config, final state and metrics, and a function from raw observations to
    values.
    """
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
        vf_clip_eps=jnp.inf,
        normalize_reward=False,
        normalize_obs=False,
    )
    config = dataclasses.replace(config, **overrides)
    out = jax.jit(ppo.make_train(config))(jax.random.key(0))
    state = out["runner_state"]
    _, critic = ppo.make_networks(config, *ppo.make_env(config))

    def value(*obs):
        obs = jnp.asarray(obs, float)
        obs = ppo.normalize(state.obs_statistics, obs) if config.normalize_obs else obs
        return critic.apply(state.params["critic"], obs)

    return config, state, out["metrics"], value


@pytest.mark.slow
def test_value_of_a_constant_reward(ppo):
    *_, value = learn(ppo, VALUE[ppo], env_params={"length": 1})
    np.testing.assert_allclose(value([1, 1], [-1, 1]), 1.0, atol=0.05)


@pytest.mark.slow
def test_value_depends_on_the_observation(ppo):
    *_, value = learn(ppo, VALUE[ppo], env_params={"length": 1, "reward": "sign"})
    np.testing.assert_allclose(value([1, 1], [-1, 1]), [1.0, -1.0], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_value_is_discounted(ppo, normalize_obs):
    arguments = {"length": 2, "reward": "last", "shows_time": True}
    *_, value = learn(ppo, VALUE[ppo], env_params=arguments, normalize_obs=normalize_obs)
    np.testing.assert_allclose(
        value([1, 0], [-1, 0], [1, 1], [-1, 1]), [0.9, 0.9, 1.0, 1.0], atol=0.05
    )


def test_action_is_learned(ppo):
    config, state, _, _ = learn(
        ppo, VALUE[ppo], env_params={"length": 1, "reward": "action"}, num_updates=300
    )
    env, env_params = ppo.make_env(config)
    start, act = policy_of(ppo, config)
    obs, env_state = env.reset(jax.random.key(1), env_params)
    action, _ = jax.jit(act)(state.agent, start(), obs)  # 4 is 0.75 of the way from -3 to 5
    _, _, reward, terminated, _, _ = env.step(jax.random.key(2), env_state, action, env_params)
    assert reward > (-0.05 if ppo is ppo_continuous else 0.95) and terminated


GAMMA, LIMIT = 0.9, 5
ENDLESS = 1 / (1 - GAMMA)
FINITE = (1 - GAMMA ** (LIMIT - np.arange(LIMIT))) / (1 - GAMMA)  # at each step of the episode


@with_brax("TimelessBrax")
def test_truncation_is_bootstrapped(ppo, name):
    *_, metrics, _ = learn(ppo, name, env_params={"max_steps_in_episode": LIMIT}, num_updates=300)
    np.testing.assert_allclose(metrics["value"][-20:].mean(), ENDLESS, rtol=0.05)
    assert (metrics["episodic_length"][np.asarray(metrics["episodes"]) > 0] == LIMIT).all()


def test_truncation_is_bootstrapped_from_the_last_observation(ppo):
    """Not from the first one of the next episode, whose sign, and with it the return, may be the
    other.
    """
    arguments = {"reward": "sign", "max_steps_in_episode": LIMIT}
    *_, value = learn(ppo, VALUE[ppo], env_params=arguments, num_updates=300)
    np.testing.assert_allclose(value([1, 1], [-1, 1]), [ENDLESS, -ENDLESS], rtol=0.05)


@with_brax("ValueBrax")
def test_termination_is_not_bootstrapped(ppo, name):
    arguments = {"length": LIMIT} | ({"shows_time": True} if name != "ValueBrax" else {})
    *_, value = learn(ppo, name, env_params=arguments, num_updates=300)
    starts = (1, -1) if name != "ValueBrax" else (0.2, 0.8)
    learned = value(*[[start, time] for start in starts for time in range(LIMIT)])
    np.testing.assert_allclose(learned, np.tile(FINITE, 2), atol=0.3)


# --- the rollout and its statistics ---


@pytest.mark.parametrize("name", ["CartPole-v1", "FourRooms-misc", "MetaMaze-misc"])
def test_environments_are_made_inside_a_jit(name):
    """As a sweep does it, where floats of the config are traced: two of them look at numbers of
    their own when made.
    """
    config = ppo_discrete.Config(env_name=name, total_timesteps=512)
    shapes = jax.eval_shape(
        lambda lr: ppo_discrete.make_train(dataclasses.replace(config, lr=lr))(jax.random.key(0)),
        1e-3,
    )
    assert shapes["metrics"]["value_loss"].shape == (1,)
