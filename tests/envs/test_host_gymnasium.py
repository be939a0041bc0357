"""What people's environments of Gymnasium need: threads, processes, spaces, bounds, resets."""

import functools
import os
import re
import subprocess
import sys
import warnings

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files import ROOT
from support.tiers import slow
from test_host import closed, rollout, seeds_of  # noqa: F401  a fixture

gymnasium = pytest.importorskip("gymnasium")

import toys_gymnasium as toys
from gymnasium import spaces

import ppo
import ppo_continuous
from onejit.envs.host import batch as host
from onejit.envs.host.spaces import Actions, Observations, axes_of
from onejit.script.environment import unwrap

MODES = ("sync", pytest.param("async", marks=pytest.mark.slow))


def register(entry_point, name="Toy-v0", limit=6, **kwargs):
    from onejit.envs.gymnasium import register_ids

    gymnasium.register(name, entry_point=entry_point, max_episode_steps=limit, kwargs=kwargs)
    register_ids(name)
    toys.Toy.made.clear()
    return name


@pytest.fixture(autouse=True)
def ids():
    known = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


def make_env(name, script=ppo, **env_params):
    return script.make_env(script.Config(env_name=name, env_params=env_params))


def roll(name, actions, **env_params):
    """Steps of `actions` [T, N] in the environment alone: see `rollout`."""
    env = unwrap(make_env(name, **env_params)[0])
    keys = jax.random.split(jax.random.key(0), actions.shape[1])
    return jax.jit(functools.partial(rollout, env))(keys, actions)


# --- resets and parameters ---


@pytest.mark.parametrize("mode", MODES)
def test_resets_have_no_options(mode):
    """Also those from the second episode on."""
    name = register(toys.ReadsOptions)
    _, steps, _ = roll(name, jnp.zeros((9, 3), int), vectorization_mode=mode)
    assert steps[3].sum() == 6
    if mode == "sync":
        assert [env.options for env in toys.Toy.made[-3:]] == [[None] * 3] * 3


def test_truth_values():
    name = register(toys.Switch)
    env, _ = make_env(name, slippery=False, speed=False)
    env.reset(jax.random.key(0))
    assert toys.Toy.made[-1].given == {"slippery": False, "mode": "off", "speed": False}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "on", "^env_params: mode = on: write True or False"),
        ("vectorization_mode", "foo", "^vectorization_mode = foo: must be sync or async"),
        ("num_processes", 2, "^num_processes = 2: is for vectorization_mode async"),
        ("num_processes", 0, "^num_processes = 0: must be a whole number, 1 or more"),
        ("num_processes", 2.5, "^num_processes = 2.5: must be a whole number, 1 or more"),
        ("image_axes", "CWH", "^env_params: image_axes = CWH: must be HWC or CHW"),
        ("image_axes", "CHW", "^env_params: image_axes = CHW: .* are not images"),
        ("unknown", 1, "unexpected keyword argument 'unknown'"),
    ],
)
def test_parameters_that_are_refused(name, value, message):
    register(toys.Switch)
    mode = {"vectorization_mode": "async"} if "1 or more" in message else {}
    with pytest.raises((ValueError, TypeError), match=message):
        make_env("Toy-v0", **mode, **{name: value})


def test_a_time_limit_as_long_as_that_of_no_limit_is_meant():
    """100,000 steps, in place of the 6 that the id has."""
    name = register(functools.partial(toys.Toy, length=10), limit=6)
    assert make_env(name)[1].max_steps_in_episode == 6
    env, params = make_env(name, max_steps_in_episode=host.NO_LIMIT)
    _, state = env.reset(jax.random.key(0), params)
    for _ in range(8):
        _, state, _, _, truncated, _ = env.step(jax.random.key(0), state, 0, params)
        assert not truncated


@pytest.mark.parametrize("env_params", [{}, {"max_steps_in_episode": 1}])
def test_a_time_limit_of_one_step_that_an_id_has_is_meant(env_params):
    """As for bandits. gymnax's parameters have this limit where nobody has set one."""
    name = register(toys.Toy, limit=1 if not env_params else 6)
    env, params = make_env(name, **env_params)
    _, state = env.reset(jax.random.key(0), params)
    _, _, _, terminated, truncated, _ = env.step(jax.random.key(0), state, 0, params)
    assert truncated and not terminated


def test_parameters_without_which_an_environment_cannot_be_made():
    register(toys.Sized)
    env, params = make_env("Toy-v0", size=8, image_axes="CHW")
    assert env.observation_space(params).shape == (3, 3, 8)
    with pytest.raises(ValueError, match=r"^env_params: image_axes must be given"):
        make_env("Toy-v0", size=8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'size'"):
        make_env("Toy-v0")


def lacks_a_library():
    raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_lacks_a_library(mode):
    with pytest.raises(ImportError, match="Box2D is not installed"):
        make_env(register(lacks_a_library), vectorization_mode=mode)


# --- actions ---


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [
        (np.inf, np.float32),
        (np.finfo(np.float16).max, np.float16),
        (np.finfo(np.float32).max, np.float32),
        (np.finfo(np.float32).max, np.float64),
        (np.finfo(np.float64).max, np.float64),
        (1e39, np.float64),
        (2e37, np.float64),
    ],
)
@pytest.mark.parametrize("low", [None, 0.0])
def test_bounds_near_the_largest_float_are_none(bound, dtype, low):
    with warnings.catch_warnings(action="ignore"):
        space = spaces.Box(-bound if low is None else low, bound, (2,), dtype)
    name = register(functools.partial(toys.Toy, action_space=space))
    with pytest.raises(ValueError, match="must have bounded actions"):
        make_env(name, ppo_continuous)


# --- threads and processes ---


@pytest.mark.parametrize("toy", [toys.Sqlite, toys.Asyncio, toys.OneThread, toys.Threads])
@pytest.mark.parametrize("mode", MODES)
def test_what_belongs_to_a_thread(toy, mode):
    """It is made, stepped, drawn and closed in one."""
    env = unwrap(make_env(register(toy), vectorization_mode=mode)[0])
    keys = jax.random.split(jax.random.key(0), 2)
    for _ in range(3):  # JAX calls the host from any thread
        _, steps, state = jax.jit(functools.partial(rollout, env))(keys, jnp.zeros((9, 2), int))
        assert steps[3].sum() == 4
    if toy not in (toys.Asyncio, toys.Threads):
        states = jax.tree.map(lambda leaf: np.repeat(leaf[:1], 3, axis=0), state)
        assert [picture.max() for picture in env.frames(states, range(3))] == [0, 1, 2]
    host.close_all()


def test_what_needs_the_main_thread_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"^env_params: vectorization_mode = sync: .*main thread.*; async makes"
    ):
        make_env(register(toys.MainThread))


def test_what_needs_the_main_thread_works_in_a_process():
    name = register(toys.MainThread)
    _, steps, _ = roll(name, jnp.zeros((9, 2), int), vectorization_mode="async", num_processes=1)
    assert steps[3].sum() == 4


def test_what_uses_jax_is_refused_with_the_way_out():
    """It could hang: JAX's threads may all wait for environments. Also what JAX has compiled."""
    toys.UsesJax().reset()
    rate = toys.UsesJax().rate
    rate(jnp.ones((256, 256)))
    for toy in (toys.UsesJax, functools.partial(toys.UsesJax, rate=rate)):
        with pytest.raises(ValueError, match=r"^env_params: vectorization_mode must be async"):
            make_env(register(toy, name=f"Jax{len(gymnasium.registry)}-v0"))


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_processes_as_one_thread(num_processes):
    """Bit for bit, with rows that are divided unevenly."""
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(4, start=2))
    name = register(functools.partial(toys.Toy, observation_space=space))
    actions = jax.random.randint(jax.random.key(1), (9, 5), 0, 3)
    expected = roll(name, actions)[:2]
    found = roll(name, actions, vectorization_mode="async", num_processes=num_processes)[:2]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


WARNS = """
import warnings
import gymnasium, jax, jax.numpy as jnp, numpy as np
from onejit.envs.gymnasium import register_ids
import ppo

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)
    def reset(self, seed=None, options=None):
        warnings.warn("the robot is old")
        print("printed by the environment")
        return np.zeros(2, np.float32), {}
    def step(self, action):
        reward = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((256, 256)))) / 256**3
        return np.ones(2, np.float32), reward, False, False, {}

gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=6)
register_ids("Mine-v0")
params = {"vectorization_mode": "async"}
config = ppo.Config(env_name="Mine-v0", env_params=params, num_envs=4, num_steps=8,
                    num_minibatches=2, total_timesteps=96)
out = jax.jit(jax.vmap(ppo.make_train(config)))(jax.random.split(jax.random.key(0), 3))
print("returns", out["metrics"]["episodic_return"][:, -1])
"""


@pytest.mark.slow
def test_an_environment_with_jax_in_processes(tmp_path):
    """It ends, although JAX has threads here and there, and warnings are shown."""
    (tmp_path / "mine.py").write_text(WARNS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, tmp_path / "mine.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, timeout=300, capture_output=True, text=True
    )
    assert "returns [6. 6. 6.]" in done.stdout, done.stderr
    assert "the robot is old" in done.stderr and "printed by the environment" in done.stderr
    assert "os.fork()" not in done.stderr


def test_a_process_that_hangs_at_its_end_is_ended(monkeypatch):
    from onejit.envs.host import rows as gymnasium_rows

    monkeypatch.setattr(gymnasium_rows, "SECONDS_TO_CLOSE", 0.1)
    name = register(toys.Toy)
    rows = gymnasium_rows.Processes(gymnasium.spec(name), {}, "", number=1, num_processes=1)
    rows.processes[0].send(("reset_rows", (range(10**7),)))  # fails, after a long time or at once
    rows.close()
    assert rows.processes[0].process.poll() is not None


# --- spaces of observations ---


IMAGE = spaces.Box(0, 255, (6, 6, 3), np.uint8)
SHAPES = [
    ((4, 84, 84), "CHW"),
    ((1, 84, 84), "CHW"),
    ((84, 84, 3), "HWC"),
    ((210, 160, 3), "HWC"),
    ((4, 4, 31), "HWC"),
    ((8, 8, 12), "HWC"),
    ((8, 3, 3), ""),
    ((3, 40, 48), ""),
    ((8, 8, 8), ""),
]


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_axes_of_images(shape, axes, dtype):
    assert axes_of(shape) == axes
    space = spaces.Box(0, 255, shape, dtype)
    image = space.sample()
    for given in (axes, "HWC", "CHW"):
        if not given:
            with pytest.raises(ValueError, match=r"^env_params: image_axes must be given"):
                Observations(space)
            continue
        observations = Observations(space, "" if given == axes else given)
        expected = image.transpose(1, 2, 0) if given == "CHW" else image
        found = observations.read(image[None], 1)
        np.testing.assert_array_equal(found[0], expected)
        assert found.dtype == dtype and observations.shape == expected.shape
        assert ("brought to" in observations.note) == (given == "CHW")


def test_what_is_done_to_images_is_said_once(capsys):
    host.say_once.cache_clear()
    name = register(functools.partial(toys.Toy, spaces.Box(0, 255, (1, 40, 40), np.uint8)))
    for length in (3, 4):
        make_env(name, length=length)
    said = capsys.readouterr().err
    assert said.count("[C, H, W] = [1, 40, 40] are brought to [H, W, C] = [40, 40, 1]") == 1


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(0, 255, (6, 5), np.uint8), lambda x: x[..., None]),
        slow(spaces.MultiDiscrete([3, 4], start=[2, 5]), lambda x: np.float32(x - [2, 5])),
        (spaces.Discrete(4, start=-2), lambda x: np.int32(x + 2)),
        (spaces.Dict(view=spaces.Dict(image=IMAGE)), lambda x: x["view"]["image"]),
        (
            spaces.Dict(image=IMAGE, room=spaces.Discrete(3, start=5), task=spaces.Text(9)),
            lambda x: np.float32(
                [*(np.float32(x["image"]).ravel() / np.float32(255)), x["room"] - 5]
            ),
        ),
        (
            spaces.Dict(a=spaces.Box(-1, 1, ()), b=spaces.Dict(c=spaces.MultiBinary(2))),
            lambda x: np.float32([x["a"], *x["b"]["c"]]),
        ),
        (spaces.Box(-1, 1, ()), lambda x: np.float32([x])),
    ],
    ids=range(7),
)
def test_observations_as_arrays(space, expected):
    name = register(functools.partial(toys.Toy, space))
    obs, steps, _ = roll(name, jnp.zeros((5, 2), int))
    env = unwrap(make_env(name)[0])
    assert obs.shape[1:] == env.observation_space(None).shape and obs.dtype == steps[0].dtype
    for row, toy in enumerate(toys.Toy.made[-2:]):
        wanted = [np.asarray(expected(given)) for given in toy.observations]
        np.testing.assert_array_equal(obs[row], wanted[0])
        np.testing.assert_array_equal(steps[1][:4, row], wanted[1:5])
        np.testing.assert_array_equal(steps[0][3, row], wanted[5])
        assert obs.dtype == wanted[0].dtype


TWO = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Tuple([TWO, TWO]), r"observations of Tuple.*gymnasium.wrappers.FlattenObservation"),
        (spaces.Dict(a=spaces.Tuple([TWO])), r"Tuple.*\(entry a\).*wrappers.FlattenObservation"),
        (spaces.Sequence(TWO), r"observations of Sequence.*TransformObservation"),
        (spaces.Dict(b=spaces.Dict(a=spaces.Sequence(TWO))), r"Sequence.*\(entry b.a\)"),
        (spaces.Graph(TWO, None), r"observations of Graph.*TransformObservation"),
        (spaces.OneOf([TWO, TWO]), r"observations of OneOf.*TransformObservation"),
        (spaces.Text(5), r"observations of Text.*TransformObservation"),
        (spaces.Dict(a=spaces.Text(5)), r"observations of Dict.* have no numbers"),
        (spaces.Box(0, 255, (2, 6, 6, 3), np.uint8), r"more axes than .*GrayscaleObservation"),
    ],
    ids=range(9),
)
def test_spaces_that_are_refused(space, message):
    name = register(functools.partial(toys.Toy, space))
    with pytest.raises(ValueError, match=f"^env_name: .*{message}") as info:
        make_env(name)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(2),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.Tuple([TWO]),
        spaces.Dict(a=TWO),
    ],
    ids=range(5),
)
def test_actions_that_are_refused(space):
    with pytest.raises(ValueError, match=r"^env_name: actions of .*wrappers.TransformAction"):
        make_env(register(functools.partial(toys.Toy, action_space=space)))
    with pytest.raises(ValueError, match=r"^env_name: actions of"):
        Actions(space)


def test_an_id_that_exists_only_as_a_vector():
    from onejit.envs.gymnasium import register_ids

    gymnasium.register("Vector-v0", vector_entry_point=toys.Toy)
    register_ids("Vector-v0")
    with pytest.raises(ValueError, match=r"^env_name: Vector-v0 exists only as a vector"):
        make_env("Vector-v0")


# --- observations that are not of their space ---


ONES = np.ones(3, np.float32)
BYTES = spaces.Box(0, 255, (6, 6, 3), np.uint8)


@pytest.mark.parametrize("when", ["reset", "step"])
@pytest.mark.parametrize(
    ("space", "observed", "message"),
    [
        (toys.VECTOR, np.ones(5, np.float32), r"has shape \(5,\) .*, and its .* \(3,\)"),
        (toys.VECTOR, np.ones(1, np.float32), r"has shape \(1,\) .*, and its .* \(3,\)"),
        (toys.VECTOR, np.ones((1, 3), np.float32), r"has shape \(1, 3\)"),
        (toys.VECTOR, np.ones(3, np.uint8), "dtype uint8, and its .* float32"),
        (toys.VECTOR, {"a": ONES}, "dtype object, and its"),
        (BYTES, np.ones(BYTES.shape), "dtype float64, and its .* uint8"),
        (BYTES, np.ones(BYTES.shape, int), "dtype int64, and its .* uint8"),
        (spaces.Box(0, 9, (3,), np.int64), ONES, "dtype float32, and its .* int64"),
        (spaces.Discrete(3), 1.5, "dtype float64, and its .* int64"),
        (spaces.Dict(a=toys.VECTOR, b=TWO), {"a": ONES}, r"lacks what .* has \(entry b\)"),
        (spaces.Dict(a=toys.VECTOR, b=TWO), {"a": ONES, "b": ONES}, r"\(3,\).*\(entry b\)"),
    ],
    ids=range(11),
)
def test_observations_of_another_space_are_refused(space, observed, message, when):
    if isinstance(observed, dict) and not isinstance(space, spaces.Dict):
        message = "has shape"
    make = functools.partial(toys.OtherObservations, space, observed, when)
    name = register(make)
    gymnasium.registry[name].disable_env_checker = True  # it has messages of its own
    with pytest.raises(ValueError, match=f"^env_name: .*({message})"):
        make_env(name)


@pytest.mark.parametrize("reward", [np.ones(1), None, "1"])
def test_rewards_that_are_not_one_number_are_refused(reward):
    class Other(toys.Toy):
        def step(self, action):
            obs, _, *ends = super().step(action)
            return obs, reward, *ends

    gymnasium.registry[register(Other)].disable_env_checker = True
    with pytest.raises(ValueError, match=r"^env_name: a reward is .*, and must be one number"):
        make_env("Toy-v0")


@pytest.mark.parametrize("dtype", [np.float64, np.int64, None])
def test_numbers_of_another_precision_are_taken(dtype):
    observed = [1, 0, 1] if dtype is None else np.array([1, 0, 1], dtype)
    name = register(functools.partial(toys.OtherObservations, toys.VECTOR, observed))
    gymnasium.registry[name].disable_env_checker = True
    obs, _ = make_env(name)[0].reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, [1, 0, 1])


def test_a_batch_of_your_own_with_other_observations():
    from test_host import LIMIT, Echo

    space = gymnax.environments.spaces.Box(-1, 1, (2,))
    env = host.HostEnv(Echo, space, gymnax.environments.spaces.Discrete(4), limit=LIMIT)
    with pytest.raises(Exception, match=re.escape("env_name: 1 observations of the space (2,)")):
        jax.block_until_ready(env.reset(jax.random.key(0)))
