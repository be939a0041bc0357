"""Parameters of environments as people write them: words for truth values, bounds that are none."""

import dataclasses
import sys

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
import tyro
from flax import struct
from gymnax.environments import environment, spaces

import ppo
import ppo_continuous
import ppo_rnn

FALSE = ("false", "FALSE", "no", "Off", False)
TRUE = ("True", "yes", "on", True)
WORDS = [(word, False) for word in FALSE] + [(word, True) for word in TRUE]


class Switch(toys.ToyContinuous):
    """Takes whatever it is given, and keeps it."""

    def __init__(self, ramping=False, mode="off", speed=None, **others):
        self.given = {"ramping": ramping, "mode": mode, "speed": speed} | others


class SwitchDiscrete(Switch, toys.ToyDiscrete):
    pass


@pytest.fixture(autouse=True)
def registry():
    known, factories = list(gymnax.registered_envs), dict(gymnax.registration._registry)
    modules = {name for name in sys.modules if name.startswith("onejit.envs.")}
    gymnax.register("Switch", Switch)
    gymnax.register("SwitchDiscrete", SwitchDiscrete)
    yield
    gymnax.registered_envs[:] = known
    gymnax.registration._registry.clear()
    gymnax.registration._registry.update(factories)
    for name in {name for name in sys.modules if name.startswith("onejit.envs.")} - modules:
        del sys.modules[name]


def unwrap(env):
    while hasattr(env, "_env"):
        env = env._env
    return env


@pytest.mark.parametrize(("word", "value"), WORDS)
@pytest.mark.parametrize(
    ("script", "name"),
    [(ppo, "SwitchDiscrete"), (ppo_continuous, "Switch")],
    ids=["ppo", "ppo_continuous"],
)
def test_words_for_truth_values(script, name, word, value):
    """Arguments of a constructor, with and without a default; fields of the parameters."""
    params = {"ramping": word, "speed": word, "other": word, "mode": "on"}
    env, _ = script.make_env(script.Config(env_name=name, env_params=params))
    assert unwrap(env).given == {"ramping": value, "mode": "on", "speed": value, "other": value}
    if script is ppo_continuous:
        config = script.Config(env_name="PointRobot-misc", env_params={"dense_reward": word})
        assert script.make_env(config)[1].dense_reward is value


def test_words_of_the_command_line_and_of_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "env_name: Switch\nenv_params: {ramping: off, speed: no, other: 'no', mode: b}\n"
    )
    words = ["--env-params", "ramping", "no", "speed", "False", "other", "off", "mode", "b"]
    for flags in (["--env-name", "Switch", *words], ["--config", str(file)]):
        words = ppo_continuous.read_flags(flags)
        markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
        config = tyro.cli(ppo_continuous.Config, args=words, config=markers)
        env, _ = ppo_continuous.make_env(config)
        assert unwrap(env).given == {"ramping": False, "speed": False, "other": False, "mode": "b"}


@pytest.mark.parametrize(("word", "value"), [("no", False), ("true", True)])
def test_words_for_truth_values_of_brax(word, value):
    params = {"terminate_when_unhealthy": word, "max_steps_in_episode": 7}
    config = ppo_continuous.Config(env_name="hopper", env_params=params)
    env, env_params = ppo_continuous.make_env(config)
    assert unwrap(env).env._terminate_when_unhealthy is value
    assert env_params.max_steps_in_episode == 7


@pytest.mark.parametrize("word", ["flase", "", 0, 1, 0.0, "0"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Switch", "ramping"),
        ("PointRobot-misc", "dense_reward"),
        ("hopper", "terminate_when_unhealthy"),
    ],
)
def test_all_else_is_refused_for_a_truth_value(name, field, word):
    config = ppo_continuous.Config(env_name=name, env_params={field: word})
    with pytest.raises(ValueError, match=f"^env_params: {field} = {word}: must be true or false"):
        ppo_continuous.make_env(config)


@struct.dataclass
class Kinds(environment.EnvParams):
    max_steps_in_episode: int = 5
    count: int = 3
    speed: float = 0.0
    wind: jax.Array = struct.field(default_factory=lambda: jnp.float32(0.1))
    place: jax.Array = struct.field(default_factory=lambda: jnp.zeros(2))
    goal: float | None = None
    mode: str = "off"


class ManyKinds(toys.ToyDiscrete):
    @property
    def default_params(self):
        return Kinds()


@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("max_steps_in_episode", "1e3", 1000),  # as YAML reads it
        ("max_steps_in_episode", 7.0, 7),
        ("count", "-2", -2),
        ("speed", 2, 2.0),
        ("speed", "nan", np.nan),
        ("wind", 0.5, np.float32(0.5)),
        ("wind", "0.5", np.float32(0.5)),
        ("place", (1, 2), np.array([1, 2], np.float32)),
        ("goal", 0.5, 0.5),
        ("mode", "no", "no"),
    ],
)
def test_fields_keep_the_kind_of_their_default(field, given, value):
    gymnax.register("ManyKinds", ManyKinds)
    _, env_params = ppo.make_env(ppo.Config(env_name="ManyKinds", env_params={field: given}))
    found = getattr(env_params, field)
    assert jnp.result_type(found) == jnp.result_type(value) if field != "mode" else True
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("max_steps_in_episode", 0, "at least 1"),
        ("max_steps_in_episode", -3, "at least 1"),
        ("max_steps_in_episode", 2.5, "a whole number"),
        ("count", 2.5, "a whole number"),
        ("count", "no", "a whole number"),
        ("count", "many", "a whole number"),
        ("count", np.inf, "a whole number"),
        ("speed", "off", "a number"),
        ("speed", "fast", "a number"),
        ("wind", "fast", "a number"),
        ("place", 1.0, "a number"),
        ("mode", False, "text, in quotes in YAML"),
    ],
)
def test_what_a_field_cannot_be_is_refused(field, given, expected):
    """None of it is rounded, or read as another kind, without a word."""
    gymnax.register("ManyKinds", ManyKinds)
    with pytest.raises(ValueError, match=f"^env_params: {field} = .*: must be {expected}$"):
        ppo.make_env(ppo.Config(env_name="ManyKinds", env_params={field: given}))


@pytest.mark.parametrize("limit", ["7.5", "long", True, 0, -2])
def test_time_limits_of_brax_are_whole_numbers(limit):
    config = ppo_continuous.Config(env_name="hopper", env_params={"max_steps_in_episode": limit})
    with pytest.raises(ValueError, match=f"^env_params: max_steps_in_episode = {limit}: must be a"):
        ppo_continuous.make_env(config)


@pytest.mark.parametrize(
    "bound", [np.inf, np.finfo(np.float32).max, np.finfo(np.float32).max / 2, 1e38, np.nan]
)
@pytest.mark.parametrize("script", [ppo_continuous, ppo_rnn], ids=["ppo_continuous", "ppo_rnn"])
@pytest.mark.parametrize("side", ["low", "high", "both"])
def test_bounds_near_the_largest_float_are_none(script, bound, side):
    low = jnp.array([-1.0, -bound if side in ("low", "both") else -1.0])
    high = jnp.array([1.0, bound if side in ("high", "both") else 1.0])

    class Wide(toys.ToyContinuous):
        def action_space(self, params=None):
            return spaces.Box(low, high, (2,))

    gymnax.register("Wide", Wide)
    with pytest.raises(ValueError, match=r"^env_name = Wide: must have .*bounded continuous"):
        script.make_env(dataclasses.replace(script.Config(), env_name="Wide"))


class PlainContinuous(toys.ToyContinuous):
    """Leaves gymnax's parameters as they are, of which a time limit of 1 is the default."""

    @property
    def default_params(self):
        return environment.EnvParams()


class PlainDiscrete(PlainContinuous, toys.ToyDiscrete):
    pass


@pytest.mark.parametrize(
    ("script", "env"),
    [(ppo, PlainDiscrete), (ppo_continuous, PlainContinuous), (ppo_rnn, PlainDiscrete)],
    ids=["ppo", "ppo_continuous", "ppo_rnn"],
)
def test_a_time_limit_that_nobody_has_set_is_refused(script, env):
    """gymnax's default is 1, with which each episode would be truncated after its first step."""
    gymnax.register("Plain", env)
    with pytest.raises(ValueError, match=r"^env_name = Plain: .*default_params.*env_params"):
        script.make_env(script.Config(env_name="Plain"))
    for limit in (1, 9):  # who writes it, means it
        params = {"max_steps_in_episode": limit}
        _, env_params = script.make_env(script.Config(env_name="Plain", env_params=params))
        assert env_params.max_steps_in_episode == limit


def test_what_brax_cannot_start_is_refused():
    with pytest.raises(ValueError, match=r"^env_name = swimmer: "):
        ppo_continuous.make_env(ppo_continuous.Config(env_name="swimmer"))


def test_state_indices_are_refused_with_continuous_actions():
    class States(toys.ToyContinuous):
        def observation_space(self, params):
            return spaces.Discrete(3)

    gymnax.register("States", States)
    with pytest.raises(ValueError, match=r"^env_name = States: must observe arrays, not state"):
        ppo_continuous.make_env(ppo_continuous.Config(env_name="States"))
