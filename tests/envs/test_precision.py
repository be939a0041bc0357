"""The precision of matrix products: the highest in physics, the default in networks."""

import dataclasses
import sys
import types

import gymnax
import jax
import jax.numpy as jnp
from brax import envs as brax_envs
from gymnax.environments import spaces

import mappo
import ppo_continuous


def precisions(function, *args) -> set[str]:
    """The precisions of the matrix products in a lowered function."""
    text = jax.jit(function).lower(*args).as_text()
    found = set()
    for line in text.splitlines():
        if "dot_general" in line or "stablehlo.convolution" in line:
            found.add(line.partition("precision")[2].partition("[")[2].partition("]")[0])
    return found


HIGHEST = {"HIGHEST, HIGHEST"}


class BraxPhysics(brax_envs.Env):
    """An environment of brax that multiplies matrices."""

    observation_size, action_size, backend = 2, 2, "toy"

    def __init__(self, backend=""):
        pass

    def reset(self, rng):
        self.precision_of_reset = jax.config.jax_default_matmul_precision
        zero = jnp.zeros(())
        return brax_envs.State(None, jax.random.uniform(rng, (2,)), zero, zero)

    def step(self, state, action):
        return state.replace(obs=jnp.ones((2, 2)) @ (state.obs + action))


def test_brax_steps_with_the_highest_precision_and_networks_with_the_default(monkeypatch):
    monkeypatch.setitem(brax_envs._envs, "physics_of_a_test", BraxPhysics)
    config = ppo_continuous.Config(env_name="physics_of_a_test")
    env, env_params = ppo_continuous.make_env(config)
    key = jax.random.key(0)
    obs, state = jax.eval_shape(env.reset, key, env_params)
    assert precisions(env.step, key, state, jnp.zeros(2), env_params) == HIGHEST
    assert env.env.precision_of_reset == "highest"
    actor, _ = ppo_continuous.make_networks(config, env, env_params)
    params = jax.eval_shape(actor.init, key, obs)
    network = precisions(lambda params, obs: actor.apply(params, obs).mode(), params, obs)
    assert network and not network & HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PhysicsState:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array


class Physics:
    """An environment of Playground that multiplies matrices."""

    action_size = 2
    dt = 0.1

    def reset(self, key):
        zero = jnp.float32(0.0)
        return PhysicsState(jnp.eye(2) @ jax.random.normal(key, (2,)), zero, zero)

    def step(self, state, action):
        obs = jnp.ones((2, 2)) @ (state.obs + action)
        return PhysicsState(obs, obs.sum(), jnp.float32(0.0))


class Settings(dict):
    """As much of Playground's config as the adapter uses."""

    episode_length = 10

    def lock(self):
        return self

    def update_from_flattened_dict(self, changes):
        self.update(changes)


def test_playground_steps_with_the_highest_precision(monkeypatch):
    library = types.ModuleType("mujoco_playground")
    library.registry = types.SimpleNamespace(
        ALL_ENVS=("PhysicsOfATest",),
        get_default_config=lambda name: Settings(),
        load=lambda name, config: Physics(),
    )
    monkeypatch.setitem(sys.modules, "mujoco_playground", library)
    monkeypatch.delitem(sys.modules, "onejit.envs.playground", raising=False)
    from onejit.envs.playground import Playground

    env = Playground("PhysicsOfATest", start_states=0)
    key = jax.random.key(0)
    _, state = jax.eval_shape(env.reset_env, key, None)
    assert precisions(env.reset_env, key, None) == HIGHEST
    assert precisions(env.step_env, key, state, jnp.zeros(2), None) == HIGHEST
    monkeypatch.delitem(sys.modules, "onejit.envs.playground")
    gymnax.registered_envs.remove("onejit.envs.playground:PhysicsOfATest")


class TeamPhysics(Physics):
    """As much of an environment of JaxMARL as the adapter uses in a step."""

    agents = ("one", "two")
    max_steps = 10

    def action_space(self, agent):
        return spaces.Discrete(2)

    def get_avail_actions(self, state):
        return dict.fromkeys(self.agents, jnp.ones(2))

    def step_env(self, key, state, actions):
        state = self.step(state, jnp.stack([actions[agent] for agent in self.agents]))
        done = dict.fromkeys([*self.agents, "__all__"], jnp.zeros((), bool))
        obs = dict.fromkeys(self.agents, state.obs)
        return obs, state, dict.fromkeys(self.agents, state.reward), done, {}


def test_teams_step_with_the_highest_precision():
    team = mappo.Team(TeamPhysics(), centralized=False)
    key = jax.random.key(0)
    inner = jax.eval_shape(TeamPhysics().reset, key)
    flag = jax.ShapeDtypeStruct((), bool)
    state = mappo.TeamState(time=jax.ShapeDtypeStruct((), int), inner=inner, out_of_time=flag)
    action = jnp.zeros(2, jnp.int32)
    assert precisions(team.step_env, key, state, action, None) == HIGHEST
