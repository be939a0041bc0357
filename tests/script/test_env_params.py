"""Parameters of environments as people write them: words for truth values, bounds that are none."""

import dataclasses
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import struct
from gymnax.environments import environment, spaces
from gymnax.wrappers.purerl import GymnaxWrapper
from support.commands import config_of_words

import ppo
import ppo_continuous
import ppo_rnn
from onejit.script.environment import check_env_params, check_final_observation, unwrap


class Switch(toys.ToyContinuous):
    """Takes whatever it is given, and keeps it."""

    def __init__(self, ramping=False, mode="off", speed=None, **others):
        self.given = {"ramping": ramping, "mode": mode, "speed": speed} | others


class SwitchDiscrete(Switch, toys.ToyDiscrete):
    pass


@pytest.fixture(autouse=True)
def switches(registry):
    gymnax.register("Switch", Switch)
    gymnax.register("SwitchDiscrete", SwitchDiscrete)


@pytest.mark.parametrize("word", ["false", "no", "Off", "True"])
@pytest.mark.parametrize(
    ("script", "name", "field"),
    [(ppo, "SwitchDiscrete", "other"), (ppo_continuous, "PointRobot-misc", "dense_reward")],
    ids=["ppo", "ppo_continuous"],
)
def test_text_that_spells_a_truth_value_is_refused(script, name, field, word):
    """It would count as true, whatever it says."""
    config = script.Config(env_name=name, env_params={field: word})
    with pytest.raises(ValueError, match=f"^env_params: {field} = {word}: write True or False"):
        script.make_env(config)


def test_truth_values_of_the_command_line_and_of_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env_name: Switch\nenv_params: {ramping: off, speed: no, mode: b}\n")
    words = ["--env-params", "ramping", "False", "speed", "False", "mode", "b"]
    for flags in (["--env-name", "Switch", *words], ["--config", str(file)]):
        env, _ = ppo_continuous.make_env(config_of_words(ppo_continuous, *flags))
        assert unwrap(env).given == {"ramping": False, "speed": False, "mode": "b"}


def test_fields_and_arguments_of_brax():
    params = {"terminate_when_unhealthy": False, "max_steps_in_episode": 7}
    config = ppo_continuous.Config(env_name="hopper", env_params=params)
    env, env_params = ppo_continuous.make_env(config)
    assert unwrap(env).env._terminate_when_unhealthy is False
    assert env_params.max_steps_in_episode == 7


class Inner:
    def __init__(self, mode="off", size=3):
        pass


class Adapter:
    def __init__(self, env, mode=False):
        self.env = env


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    env_params: dict
    env_name: str = "Adapted"


def test_an_argument_of_an_adapter_hides_that_of_its_environment():
    script = SimpleNamespace(make_env=lambda config: (Adapter(Inner()), SimpleNamespace()))
    check_env_params(script, AdapterConfig({"mode": True, "size": 4}))
    for name, value, expected in [("mode", "on", "true or false"), ("size", 0.5, "a whole number")]:
        with pytest.raises(ValueError, match=f"{name} = {value}: must be {expected}"):
            check_env_params(script, AdapterConfig({name: value}))


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
        check_env_params(ppo_continuous, config)


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
        ("max_steps_in_episode", 7, 7),
        ("speed", 2, 2.0),
        ("speed", 0.5, 0.5),
        ("goal", 0.5, 0.5),
        ("mode", "12:30:45", "12:30:45"),
    ],
)
def test_fields_keep_the_kind_of_their_default(field, given, value):
    """Whole numbers may be written for floats, such as a probability of 1."""
    gymnax.register("ManyKinds", ManyKinds)
    _, env_params = ppo.make_env(ppo.Config(env_name="ManyKinds", env_params={field: given}))
    found = getattr(env_params, field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("max_steps_in_episode", 2.5, "a whole number"),
        ("count", 2.5, "a whole number"),
        ("count", "no", "a whole number"),
        ("count", "many", "a whole number"),
        ("count", np.inf, "a whole number"),
        ("speed", "off", "a number"),
        ("speed", "fast", "a number"),
        ("wind", "fast", "a number"),
        ("mode", False, "text, in quotes in YAML"),
    ],
)
def test_what_a_field_cannot_be_is_refused(field, given, expected):
    """None of it is rounded, or read as another kind, without a word."""
    gymnax.register("ManyKinds", ManyKinds)
    config = ppo.Config(env_name="ManyKinds", env_params={field: given})
    with pytest.raises(ValueError, match=f"^env_params: {field} = .*: must be {expected}$"):
        check_env_params(ppo, config)


@pytest.mark.parametrize("limit", [7.5, "long", True])
def test_time_limits_of_brax_are_whole_numbers(limit):
    config = ppo_continuous.Config(env_name="hopper", env_params={"max_steps_in_episode": limit})
    with pytest.raises(ValueError, match=f"^env_params: max_steps_in_episode = {limit}: must be a"):
        check_env_params(ppo_continuous, config)


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
    with pytest.raises(ValueError, match=r"^env_name = Wide: must have .*bounded"):
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
    with pytest.raises(
        ValueError, match=r"^env_params: max_steps_in_episode = 1: .*default_params"
    ):
        script.make_env(script.Config(env_name="Plain"))
    for limit in (1, 9):  # who writes it, means it
        params = {"max_steps_in_episode": limit}
        _, env_params = script.make_env(script.Config(env_name="Plain", env_params=params))
        assert env_params.max_steps_in_episode == limit
    for limit in (0, -2):
        params = {"max_steps_in_episode": limit}
        with pytest.raises(
            ValueError, match=f"^env_params: max_steps_in_episode = {limit}: must be"
        ):
            script.make_env(script.Config(env_name="Plain", env_params=params))


def test_a_time_limit_of_one_step_that_the_environment_means():
    @struct.dataclass
    class OneStep(environment.EnvParams):
        max_steps_in_episode: int = 1

    class Bandit(toys.ToyDiscrete):
        @property
        def default_params(self):
            return OneStep()

    gymnax.register("Bandit", Bandit)
    assert ppo.make_env(ppo.Config(env_name="Bandit"))[1].max_steps_in_episode == 1


def test_actions_that_are_whole_numbers_are_refused():
    class Whole(toys.ToyContinuous):
        def action_space(self, params=None):
            return spaces.Box(0, 3, (2,), jnp.int32)

    gymnax.register("Whole", Whole)
    for script in (ppo_continuous, ppo_rnn):
        with pytest.raises(ValueError, match=r"^env_name = Whole: must have"):
            script.make_env(script.Config(env_name="Whole"))


def test_state_indices_are_refused_with_continuous_actions():
    class States(toys.ToyContinuous):
        def observation_space(self, params):
            return spaces.Discrete(3)

    gymnax.register("States", States)
    with pytest.raises(ValueError, match=r"^env_name = States: must observe one array"):
        ppo_continuous.make_env(ppo_continuous.Config(env_name="States"))


def test_brax_environments_of_ones_own(tmp_path, monkeypatch):
    """One is registered with brax by the module that its name begins with; dicts are refused."""
    (tmp_path / "own_physics.py").write_text(
        "import brax.envs, toys\n"
        "class Own(toys.ValueBrax):\n    pass\n"
        "class Dict(toys.ValueBrax):\n"
        "    def reset(self, key):\n"
        "        state = super().reset(key)\n"
        "        return state.replace(obs={'state': state.obs})\n"
        "brax.envs.register_environment('own', Own)\n"
        "brax.envs.register_environment('dict', Dict)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = ppo_continuous.Config(env_name="own_physics:own")
    env, env_params = ppo_continuous.make_env(config)
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    assert obs.shape == env.observation_space(env_params).shape
    with pytest.raises(ValueError, match=r"^env_name = own_physics:dict: must observe one array"):
        ppo_continuous.make_env(ppo_continuous.Config(env_name="own_physics:dict"))


# --- what an environment's step returns ---


class Shift(GymnaxWrapper):
    """An observation wrapper that leaves `final_observation` as it was."""

    def reset(self, key, params):
        obs, state = self._env.reset(key, params)
        return obs + 100.0, state

    def step(self, key, state, action, params):
        obs, *rest = self._env.step(key, state, action, params)
        return obs + 100.0, *rest


class OddStep(toys.ToyDiscrete):
    """Rewards of shape [1], and ends as floats."""

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, jnp.asarray(reward)[None], terminated.astype(float), info


WRAPPED = [  # a wrapper is registered with its environment, or stands in a copy's `make_env`
    (ppo, lambda env: env),
    (ppo, lambda env: ppo.LogEpisodes(Shift(env._env))),
    (ppo_continuous, lambda env: ppo_continuous.LogEpisodes(Shift(env._env))),
    (ppo_rnn, lambda env: ppo_rnn.LogEpisodes(Shift(env._env))),
]


@pytest.mark.parametrize(("script", "wrap"), WRAPPED)
def test_observation_wrappers_that_leave_the_final_observation(script, wrap):
    """The next observation of a step that ends nothing is the one that the step returns."""
    toy = toys.ToyContinuous if script is ppo_continuous else toys.ToyDiscrete
    gymnax.register("Shifted", lambda: Shift(toy()))
    config = script.Config(env_name="Shifted", env_params={"max_steps_in_episode": 3})
    env, env_params = script.make_env(config)
    env = wrap(env)
    _, state = env.reset(jax.random.key(0), env_params)
    for i in range(6):
        action = env.action_space(env_params).sample(jax.random.key(i))
        obs, state, *_, info = env.step(jax.random.key(i), state, action, env_params)
        if not info["returned_episode"]:
            np.testing.assert_array_equal(info["final_observation"], obs)
            assert (obs >= 50.0).all()


def test_a_wrapper_that_forgets_the_final_observation_is_named(capsys):
    gymnax.register("Shifted", lambda: Shift(toys.ToyDiscrete()))
    inside = ppo.make_env(ppo.Config(env_name="Shifted"))[0]
    right, env_params = ppo.make_env(ppo.Config(env_name="ToyDiscrete"))
    for env, warned in ((inside, True), (right, False), (Shift(right), True)):
        check_final_observation(env, env_params, "Mine")
        said = capsys.readouterr().err
        assert ("warning: env_name = Mine: final_observation is not obs" in said) == warned


class Twice(Shift):
    """Observes everything twice, but not in `final_observation`."""

    def reset(self, key, params=None):
        obs, state = self._env.reset(key, params)
        return jnp.stack([obs, obs]), state

    def step(self, key, state, action, params=None):
        obs, *others = self._env.step(key, state, action, params)
        return jnp.stack([obs, obs]), *others


def test_a_final_observation_of_another_shape_is_refused():
    gymnax.register("Twice", lambda: Twice(toys.ToyDiscrete()))
    env, env_params = ppo.make_env(ppo.Config(env_name="Twice"))
    with pytest.raises(ValueError, match=r"env_name = Twice: final_observation has shape \(\d+,\)"):
        check_final_observation(env, env_params, "Twice")


@pytest.mark.parametrize("script", [ppo, ppo_rnn], ids=["ppo", "ppo_rnn"])
def test_rewards_and_ends_of_other_shapes_and_dtypes(script):
    gymnax.register("Odd", OddStep)
    env, env_params = script.make_env(script.Config(env_name="Odd"))
    _, state = env.reset(jax.random.key(0), env_params)
    _, _, reward, terminated, truncated, _ = env.step(jax.random.key(0), state, 0, env_params)
    assert (reward.shape, reward.dtype) == ((), jnp.float32)
    for end in (terminated, truncated):
        assert (end.shape, end.dtype) == ((), jnp.bool_)
