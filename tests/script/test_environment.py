"""What the package knows and checks of an environment and its wrappers."""

import dataclasses
import sys
import types
from typing import NamedTuple

import gymnax
import jax
import pytest
import toys
from flax import struct
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import EnvState
from gymnax.wrappers import LogWrapper
from gymnax.wrappers.purerl import GymnaxWrapper, StickyActionWrapper

from onejit.script import load
from onejit.script.environment import check_observations, inner_state


class Counted(NamedTuple):
    count: int
    inside: struct.dataclass


class Counts(GymnaxWrapper):
    def reset(self, key, params=None):
        obs, state = self._env.reset(key, params)
        return obs, Counted(count=0, inside=state)


def test_the_state_inside_of_wrappers_with_a_state_of_their_own():
    env, params = gymnax.make("CartPole-v1")
    for wrap in (lambda env: env, LogWrapper, lambda env: StickyActionWrapper(env, 0.2), Counts):
        env = wrap(env)
        _, state = env.reset(jax.random.key(0), params)
        assert type(inner_state(env, params, state)) is EnvState


# --- what it observes ---


OBSERVES = """
from collections import namedtuple

import gymnax
import jax.numpy as jnp
from gymnax.environments.classic_control import cartpole


Masked = namedtuple("Masked", "obs action_mask")


class Mine(cartpole.CartPole):
    def get_obs(self, *args, **kwargs):
        return {code}


gymnax.register("{name}", Mine)
"""


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Larger", "jnp.zeros(5)", r"have shape \(5,\) and dtype float32, but its .* float32"),
        ("Bytes", "jnp.zeros(4, jnp.uint8)", r"have shape \(4,\) and dtype uint8, but its"),
        ("MaskedLarger", "Masked(jnp.zeros(5), jnp.ones(2, bool))", r"have shape \(5,\)"),
        ("ForbidsAll", "Masked(jnp.zeros(4), jnp.zeros(2, bool))", "mask forbids every action"),
        ("AsDeclared", "jnp.zeros(4)", ""),
        ("WholeNumbers", "jnp.zeros(4, int)", ""),
    ],
)
def test_observations_are_as_their_space_declares(name, code, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"observes_{name}.py").write_text(OBSERVES.format(code=code, name=name))
    script = load.load_script("ppo")
    config = dataclasses.replace(script.Config(), env_name=f"observes_{name}:{name}")
    if not message:
        check_observations(script, config)
        return
    with pytest.raises(ValueError, match=message):
        check_observations(script, config)


class Odd(toys.ToyDiscrete):
    """The time limit is within `terminated`, or the first states are 3 and 4."""

    def __init__(self, limit=100, length=5, states=False):
        self.limit = limit
        self.length = length
        self.states = states

    @property
    def default_params(self):
        return toys.EnvParams(max_steps_in_episode=self.limit)

    def step_env(self, key, state, action, params):
        obs, state, reward, _, info = super().step_env(key, state, action, params)
        return obs, state, reward, state.time >= self.length, info

    def observe(self, key, state, action, params):
        return 3 + state.time if self.states else super().observe(key, state, action, params)

    def observation_space(self, params):
        return spaces.Discrete(4) if self.states else super().observation_space(params)


gymnax.register("of_a_user:Odd", Odd)


def test_one_step_shows_what_a_users_environment_does_wrong(monkeypatch, capsys):
    """Only where the toy terminates at its limit is there a warning."""
    monkeypatch.setitem(sys.modules, "of_a_user", types.ModuleType("of_a_user"))
    script = load.load_script("ppo")
    default = dataclasses.replace(script.Config(), env_name="of_a_user:Odd")

    def check(**env_params):
        config = dataclasses.replace(default, env_params=env_params)
        check_observations(script, config)
        return capsys.readouterr().err

    assert not check()
    said = check(length=100)
    assert "`terminated` is true at the time limit, max_steps_in_episode = 100" in said
    with pytest.raises(ValueError, match=r"observes states 3 to 4, but its .* has 0 to 3"):
        check(states=True)
