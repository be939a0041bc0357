"""IPPO and MAPPO: what a team adds to PPO, against NumPy and where the value is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys_team
from support.compilation import jit_quickly

import mappo
from onejit.engine.evaluation import policy_of
from onejit.script.environment import unwrap

TEAM = "toys_team:ToyTeam"


def make_config(num_updates=6, **overrides):
    small = dict(
        env_name=TEAM,
        num_envs=4,
        num_steps=8,
        num_minibatches=1,
        update_epochs=1,
        hidden_sizes=(8,),
    )
    config = mappo.Config(**(small | {"cell_size": 8} | overrides))
    return dataclasses.replace(
        config, total_timesteps=num_updates * config.num_envs * config.num_steps
    )


def tiny(num_updates=6, **overrides):
    """A config, the state at its start, and `update`."""
    config = make_config(num_updates, **overrides)
    init, update = mappo.make_learner(config)
    return config, jit_quickly(init)(jax.random.key(0)), update


def awake(state):
    """Biases and heads begin at zeros or near them; here they tell observations apart."""
    rng = np.random.default_rng(9)

    def draw(leaf):
        return rng.normal(scale=0.7, size=leaf.shape).astype(np.float32)

    return state._replace(params=jax.tree.map(draw, state.params))


def observe(obs, available=None):
    """What agents see that are alive and, if not told otherwise, free to act. obs: [..., A, 2]."""
    if available is None:
        available = np.ones((*obs.shape[:-1], 3), bool)
    state = obs.reshape(*obs.shape[:-2], -1)
    alive = np.ones(obs.shape[:-1], bool)
    return mappo.Observation(obs=obs, available=available, alive=alive, state=state)


# --- mathematics ---


def test_the_dead_see_no_state():
    # two environments' states [2, 3] at four steps, or images
    state = np.arange(24.0).reshape(4, 2, 3) + 1.0
    obs = mappo.Observation(None, None, np.array([[True, False]] * 4), state)
    seen = np.asarray(jit_quickly(lambda obs: mappo.critic_input(obs, True))(obs))
    assert seen.shape == (4, 2, 2, 3)
    np.testing.assert_array_equal(seen[:, 0], state)
    np.testing.assert_array_equal(seen[:, 1], 0)


@pytest.mark.parametrize("agent_ids", [True, False])
def test_agents_are_told_apart_by_their_number(agent_ids):
    config = make_config(agent_ids=agent_ids)
    init, _ = mappo.make_learner(config)
    params = awake(jax.eval_shape(init, jax.random.key(0))).params
    kernels = [params[name]["params"]["Dense_0"]["kernel"].shape[0] for name in ("actor", "critic")]
    # the critic sees the observations of both
    assert kernels == [2 + 2 * agent_ids, 4 + 2 * agent_ids]
    actor, _ = mappo.make_networks(config, *mappo.make_env(config))
    see = jit_quickly(
        lambda obs: actor.apply(params["actor"], (), obs, jnp.zeros(1, bool))[0].logits
    )
    logits = np.asarray(see(observe(np.ones((1, 2, 2)))))
    assert np.allclose(logits[0, 0], logits[0, 1]) != agent_ids
    if agent_ids:  # the last rows of the kernel belong to the agents' numbers
        layers = params["actor"]["params"]
        for agent in range(2):
            x = np.concatenate([np.ones(2), np.eye(2)[agent]])
            hidden = np.tanh(x @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"])
            expected = hidden @ layers["Dense_1"]["kernel"] + layers["Dense_1"]["bias"]
            expected -= np.log(np.exp(expected).sum())  # a distribution's logits are normalized
            np.testing.assert_allclose(logits[0, agent], expected, rtol=1e-4, atol=1e-5)


# --- the environment ---


def episode(env, env_params, steps):
    """Observations before each step and what the step returned, of one environment."""
    action = jnp.zeros(env.action_space(env_params).shape, int)

    def step(carry, key):
        before, state = carry
        obs, state, *rest = env.step(key, state, action, env_params)
        return (obs, state), (before, obs, *rest)

    @jit_quickly
    def play(reset_key, key):
        start = env.reset(reset_key, env_params)
        return jax.lax.scan(step, start, jax.random.split(key, steps))[1]

    found = jax.device_get(play(jax.random.key(0), jax.random.key(1)))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(steps)]


@pytest.mark.parametrize("settings, last, truncated", [
    ({"length": 5, "max_steps": 12}, 5, False),
    ({"length": 99, "max_steps": 4}, 4, True),  # by its own clock
    ({"length": 99, "max_steps": 99, "max_steps_in_episode": 3}, 3, True),  # by gymnax's limit
    ({"length": 4, "max_steps": 4}, 4, False),  # both at once: it is decided
])  # fmt: skip
def test_ends_of_episodes(settings, last, truncated):
    env, env_params = mappo.make_env(make_config(env_params=settings))
    steps = episode(env, env_params, last + 1)
    for time, (before, after, reward, over, out_of_time, info) in enumerate(steps[:last], 1):
        assert (bool(over), bool(out_of_time)) == (
            (not truncated, truncated) if time == last else (False, False)
        )
        # the mean over the agents, and each one's own
        assert reward == 1.5 and info["reward"].tolist() == [1.0, 2.0]
        final = info["final_observation"]
        np.testing.assert_allclose(final.obs[:, 1], time / 5)  # not of the next episode
        np.testing.assert_allclose(final.obs[:, 0], before.obs[0, 0])
        np.testing.assert_allclose(after.obs[:, 1], time % last / 5)
        # what a centralized critic sees
        np.testing.assert_allclose(final.state, final.obs.reshape(-1))
        assert bool(info["returned_episode"]) == (time == last)
    assert steps[last - 1][-1]["returned_episode_returns"] == 1.5 * last
    assert not steps[last][3] and not steps[last][4]


def test_own_death_ends_no_episode():
    env, env_params = mappo.make_env(
        make_config(env_params={"dies": 2, "length": 4}, centralized_critic=False)
    )
    steps = episode(env, env_params, 4)
    assert [bool(step[3]) for step in steps] == [False, False, False, True]
    finals = [step[-1]["final_observation"] for step in steps]
    assert [final.alive.tolist() for final in finals] == [[True, True], *[[True, False]] * 3]
    assert finals[2].available.tolist() == [[True, True, True], [True, False, False]]
    assert all(step[1].alive.all() for step in steps[3:])  # the next episode
    assert finals[0].state.size == 0


@pytest.mark.parametrize("word", ["off", "False", "no", False])
def test_words_for_truth_values(word):
    env, _ = mappo.make_env(make_config(env_params={"masks": word}))
    assert unwrap(env).env.masks is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("masks", "flase"), ("masks", 0), ("max_steps_in_episode", 2.5), ("max_steps_in_episode", 0)],
)
def test_parameters_that_mean_something_else_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^env_name = .*{name} = {value}: must be"):
        mappo.make_env(make_config(env_params={name: value}))


def test_ends_that_set_all_flags_are_no_deaths():
    """As in the particle environments: all agents are done when the time is over."""
    config = make_config(env_params={"dies": 3, "length": 9, "max_steps": 3, "num_agents": 1})
    *_, (_, _, _, terminated, truncated, info) = episode(*mappo.make_env(config), 3)
    assert truncated and not terminated and info["final_observation"].alive.all()


def test_agents_of_unlike_sizes():
    """Observations are padded, and actions that an agent does not have are not available."""
    env, env_params = mappo.make_env(mappo.Config(env_name="MPE_simple_speaker_listener_v4"))
    obs, _ = jax.device_get(jit_quickly(env.reset)(jax.random.key(0), env_params))
    assert obs.obs.shape == (2, 11) and obs.state.shape == (14,)
    np.testing.assert_array_equal(obs.obs[0, 3:], 0)
    assert obs.available.sum(axis=1).tolist() == [3, 5] and obs.available[0, :3].all()
    assert env.action_space(env_params).shape == (2,)


@pytest.mark.parametrize("env_name, env_params, words", [
    ("MPE_simple_facmac_v1", {}, "discrete"),
    ("Nowhere", {}, "Nowhere"),
    ("toys_team:Nobody", {}, "Nobody"),
    ("overcooked", {"layout": "kitchen"}, "kitchen"),
    ("HeuristicEnemySMAX", {"scenario": "4m"}, "4m"),
    (TEAM, {"wings": 2}, "wings"),
    ("MPE_simple_spread_v3", {"num_agent": 5}, "num_agent is no parameter of SimpleSpreadMPE"),
    (TEAM, {"noise": "loud"}, "loud"),
    ("CartPole-v1", {}, "CartPole"),
    (TEAM, {"max_steps_in_episode": "many"}, "many"),
])  # fmt: skip
def test_environments_that_cannot_be(env_name, env_params, words):
    with pytest.raises(ValueError, match=f"env_name = {env_name}.*{words}"):
        mappo.make_env(make_config(env_name=env_name, env_params=env_params))


def test_parameters_of_the_particle_environments():
    params = {"num_agents": 2, "max_steps": 7, "damping": 0.5}
    env, env_params = mappo.make_env(
        mappo.Config(env_name="MPE_simple_spread_v3", env_params=params)
    )
    assert env.action_space(env_params).shape == (2,)
    assert env_params.max_steps_in_episode == 8


# --- the learner ---


def test_memory_is_of_the_episode_alone():
    """After each rollout it is what acting from the start of the episode gives.

    A death on the way changes nothing.
    """
    settings = {"dies": 2}
    config, state, update = tiny(cell="gru", lr=0.0, env_params=settings, centralized_critic=False)
    state, update = awake(state), jit_quickly(update)
    start, act = policy_of(mappo, config)
    _, critic = mappo.make_networks(config, *mappo.make_env(config))
    team = toys_team.ToyTeam(**settings)

    @jit_quickly
    def remembered(state):
        """The memories after each step of the episode of the first environment."""
        inner = jax.tree.map(lambda leaf: leaf[0], state.env_state.env_state.inner)

        def step(memory, age):
            inner_then = inner.replace(age=age)
            seen = (team.get_obs(inner_then), team.get_avail_actions(inner_then))
            seen = [jnp.stack([*each.values()]) for each in seen]
            obs = mappo.Observation(*seen, team.alive(inner_then), jnp.zeros(4))
            _, actor_memory = act(state.agent, memory["actor"], obs)
            _, critic_memory = critic.apply(
                state.params["critic"], memory["critic"], mappo.add_time(obs), jnp.zeros(1, bool)
            )
            memory = {"actor": actor_memory, "critic": critic_memory[0]}
            return memory, memory

        return jax.lax.scan(step, {"actor": start(), "critic": start()}, jnp.arange(4))[1]

    for count in range(1, 6):
        state, _ = update(state)
        steps = 8 * count % 5
        assert (np.asarray(state.first) == (steps == 0)).all()
        for name, memories in jax.device_get(remembered(state)).items():
            if steps:
                memory = memories[steps - 1]
                found = np.asarray(state.memory[name])[0]
                np.testing.assert_allclose(found, memory, rtol=1e-4, atol=1e-5)
                assert np.abs(memory).max() > 0.1


def test_actions_that_are_not_available_are_never_taken():
    """Neither in training, here by agent 1 in the second step, nor by the greedy policy."""
    settings = dict(env_params={"masks": True}, num_envs=16, num_steps=2)
    config, state, update = tiny(**settings)
    state = jax.device_get(jit_quickly(update)(awake(state))[0]._replace(key=None))
    action = state.env_state.env_state.inner.action
    assert (action[:, 1] == 2).all() and len(np.unique(action[:, 0])) == 3
    start, act = policy_of(mappo, config)
    obs, act = jax.tree.map(lambda leaf: leaf[0], state.obs), jit_quickly(act)
    for first, second in ((0, 2), (1, 1), (2, 0)):
        available = np.arange(3) == np.array([[first], [second]])
        action, _ = act(state.agent, start(), obs._replace(available=available))
        assert action.tolist() == [first, second]


# --- JaxMARL's environments ---


@pytest.mark.slow
@pytest.mark.parametrize("name, env_params, length", [
    ("MPE_simple_spread_v3", {}, 26), ("overcooked", {"max_steps": 7}, 7),
    ("HeuristicEnemySMAX", {"scenario": "3m", "max_steps": 4}, 5),
])  # fmt: skip
def test_clocks_of_jaxmarl_truncate(name, env_params, length):
    env, env_params = mappo.make_env(mappo.Config(env_name=name, env_params=env_params))
    steps = episode(env, env_params, length)
    assert [bool(step[4]) for step in steps] == [False] * (length - 1) + [True]
    assert not any(step[3] for step in steps)


@pytest.mark.slow
def test_battles_that_are_decided_terminate():
    """All units of one side are dead at the end, and a battle is won if these are the enemies."""
    config = mappo.Config(env_name="HeuristicEnemySMAX", env_params={"scenario": "3m"})
    env, env_params = mappo.make_env(config)
    reset = jit_quickly(jax.vmap(env.reset, (0, None)))
    step = jit_quickly(jax.vmap(env.step, (0, 0, 0, None)))
    obs, state = reset(jax.random.split(jax.random.key(0), 16), env_params)
    ends = 0
    for key in jax.random.split(jax.random.key(1), 60):
        # shoot where that is possible, else stop
        action = jnp.argmax(obs.available * jnp.arange(1, 9), axis=-1)
        obs, state, _, terminated, truncated, info = step(
            jax.random.split(key, 16), state, action, env_params
        )
        final = info["final_observation"]
        # health of allies and of enemies
        dead = np.asarray(final.state)[:, :60].reshape(16, 2, 3, 10)[..., 0] == 0
        lost, beaten = dead.all(axis=2).T
        np.testing.assert_array_equal(terminated, lost | beaten)
        np.testing.assert_array_equal(np.asarray(info["won"])[beaten], ~lost[beaten])
        assert not truncated.any() and not np.asarray(info["won"])[~beaten].any()
        assert (np.asarray(final.obs)[~np.asarray(final.alive)] == 0).all()
        np.testing.assert_array_equal(final.alive, ~dead[:, 0] | lost[:, None])
        ends += int(terminated.sum())
    assert ends > 10


@pytest.mark.slow
def test_all_of_jaxmarl_can_be_made_or_is_refused():
    made = []
    for name in mappo.jaxmarl.registered_envs:
        try:
            config = mappo.Config(env_name=name)
            env, env_params = mappo.make_env(config)
        except (ValueError, ImportError) as error:
            assert name in str(error)
            continue
        obs, state = jax.eval_shape(env.reset, jax.random.key(0), env_params)
        action = jnp.zeros(env.action_space(env_params).shape, jnp.int32)
        after, *_ = jax.eval_shape(env.step, jax.random.key(0), state, action, env_params)
        assert after == obs
        made.append(name)
    some = "MPE_simple_spread_v3 MPE_simple_tag_v3 SMAX HeuristicEnemySMAX overcooked hanabi"
    assert set(some.split()) <= set(made)
