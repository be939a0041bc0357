"""Environments outside JAX: one call per step and device, in order, with the ends and resets of the
library's own.
"""

import collections
import ctypes
import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from support.files import ROOT

import apex_dqn
import ppo
import rainbow
from onejit import train
from onejit.base import signals
from onejit.engine import compilation, evaluation, loop
from onejit.engine.carry import Carry
from onejit.engine.progress import progress_bar
from onejit.envs.adapter import register
from onejit.envs.host import batch as host
from onejit.envs.host import cuda
from onejit.run.record import Record
from onejit.watch import formats, render

LIMIT, KEY, TEXT = 5, jax.random.key(0), dict(capture_output=True, text=True)


class Echo(host.Batch):
    """Rewards are the actions; observations are (seed % 1000, episode, step).

    Episodes end by action 3 or LIMIT.
    """

    calls: ClassVar = []  # the number of rows of each step

    def __init__(self, seeds, limit, draw=False):
        self.seeds, self.limit = np.asarray(seeds), limit
        self.episode, self.time = np.zeros(len(seeds), int), np.zeros(len(seeds), int)
        self.first = self.obs()

    def obs(self):
        return np.stack([self.seeds % 1000, self.episode, self.time], 1).astype(np.float32)

    def step(self, actions):
        Echo.calls.append(len(actions))
        self.time += 1
        if (actions == 4).any():
            raise RuntimeError("the robot is on fire")
        terminated = actions == 3
        return (
            self.obs(),
            actions.astype(float),
            terminated,
            (self.time >= self.limit) & ~terminated,
        )

    def reset_rows(self, rows):
        self.episode[rows] += 1
        self.time[rows] = 0
        return self.obs()[rows]

    def frame(self):
        return np.full((40, 40, 3), 10 * self.time[0], np.uint8)

    def close(self):
        self.seeds = None


def echo_env(name="Echo", limit=LIMIT):
    return host.HostEnv(Echo, spaces.Box(-jnp.inf, jnp.inf, (3,)), spaces.Discrete(4), limit=limit)


@pytest.fixture(autouse=True)
def closed(registry):
    Echo.calls.clear()
    yield
    host.close_all()


def rollout(env, keys, actions):
    """Steps of `actions` [T, N] from `keys` [N]: obs, final observation, reward, terminated,
    truncated, each [T, N].
    """
    obs, state = jax.vmap(env.reset, (0, None))(keys, env.default_params)

    def step(state, action):
        step = jax.vmap(env.step, (None, 0, 0, None))
        obs, state, reward, terminated, truncated, info = step(
            keys[0], state, action, env.default_params
        )
        return state, (obs, info["final_observation"], reward, terminated, truncated)

    state, steps = jax.lax.scan(step, state, actions)
    return obs, steps, state


def in_a_loop(batch, actions):
    """The same by a plain loop over the batch."""
    steps = []
    for action in actions:
        final, reward, terminated, truncated = (np.array(each) for each in batch.step(action))
        obs, ended = final.copy(), np.flatnonzero(terminated | truncated)
        if ended.size:
            obs[ended] = batch.reset_rows(ended)
        steps.append((obs, final, reward.astype(np.float32), terminated, truncated))
    return [np.stack(each) for each in zip(*steps, strict=True)]


def seeds_of(keys):
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, np.iinfo(np.int32).max))(
        keys
    ).tolist()


def test_a_step_is_one_call_for_all_environments_of_all_seeds():
    env = echo_env()
    keys = jax.random.split(jax.random.key(0), (4, 8))
    actions = jax.random.randint(jax.random.key(1), (4, 20, 8), 0, 4)
    first, steps, _ = jax.jit(jax.vmap(functools.partial(rollout, env)))(keys, actions)
    assert Echo.calls == [32] * 20
    batch = Echo(seeds_of(keys.reshape(-1)), LIMIT)
    np.testing.assert_array_equal(first.reshape(32, 3), batch.first)
    expected = in_a_loop(batch, np.moveaxis(np.asarray(actions), 1, 0).reshape(20, 32))
    for found, wanted in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(
            np.moveaxis(np.asarray(found), 1, 0).reshape(wanted.shape), wanted
        )
    assert steps[3].any() and steps[4].any()


SHARDED = """
import functools, sys
sys.path[:0] = ["tests", "tests/envs"]
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from test_host import Echo, echo_env, rollout
env, calls = echo_env(), []
mesh = Mesh(jax.devices(), ("seed",))
f = jax.vmap(functools.partial(rollout, env))
f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("seed"), out_specs=P("seed"), check_vma=False))
keys = jax.random.split(jax.random.key(0), (4, 8))
actions = jax.random.randint(jax.random.key(1), (4, 500, 8), 0, 4)
first, steps, state = f(keys, actions)
np.testing.assert_array_equal(steps[2], actions)
assert Echo.calls == [16] * 1000, (len(Echo.calls), set(Echo.calls))
assert len(set(np.asarray(state.batch).ravel().tolist())) == 2
print("one call per step and device")
"""


def test_each_device_has_a_batch_of_its_own():
    """The counts would differ if a call were elided, repeated or made for each seed; Echo's rewards
    are its actions.
    """
    command = [sys.executable, "-c", SHARDED]
    environment = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "one call per step and device" in done.stdout, done.stderr


class FakeCuda:
    """The driver's functions on memory of the CPU. They write down what they are asked to do."""

    def __init__(self, code=0):
        self.calls, self.code = [], code
        self.cuMemcpyDtoHAsync_v2 = functools.partial(self.copy, "read")
        self.cuMemcpyHtoDAsync_v2 = functools.partial(self.copy, "write")
        self.cuStreamSynchronize = functools.partial(self.wait)

    def copy(self, name, target, source, size, stream):
        ctypes.memmove(target, source, size)
        self.calls.append((name, stream))
        return self.code

    def wait(self, stream):
        self.calls.append(("wait", stream))
        return 0


def use_cuda(monkeypatch, library):
    """Call the host as with an NVIDIA GPU, whose driver is `library`."""
    of_jax = host.buffer_callback.buffer_callback

    def with_stream(fill_results, *args, **options):
        def on_stream_7(_, *buffers):
            fill_results(SimpleNamespace(stream=7), *buffers)

        return of_jax(on_stream_7, *args, **options)

    monkeypatch.setattr(host.buffer_callback, "buffer_callback", with_stream)
    monkeypatch.setattr(cuda, "address", lambda buffer: np.asarray(buffer).ctypes.data)
    monkeypatch.setattr(cuda, "driver", lambda: cuda.Driver(library))


@pytest.mark.parametrize("way", ["CUDA", "pure_callback"])
def test_without_buffers_of_the_cpu(way, monkeypatch):
    """A GPU's program calls the host in another way, and gets the same."""
    keys, actions = jax.random.split(jax.random.key(0), (2, 3)), jnp.arange(24).reshape(2, 4, 3) % 3
    here = jax.jit(jax.vmap(functools.partial(rollout, echo_env())))(keys, actions)[:2]
    library = FakeCuda()
    if way == "CUDA":
        use_cuda(monkeypatch, library)
    else:
        monkeypatch.setattr(cuda, "driver", lambda: None)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    there = jax.jit(jax.vmap(functools.partial(rollout, echo_env())))(keys, actions)[:2]
    jax.tree.map(np.testing.assert_array_equal, here, there)
    assert Echo.calls == [6] * 8
    if way == "CUDA":
        step = ["read"] * 4 + ["wait"] + ["write"] * 7 + ["wait"]
        assert library.calls[-len(step) :] == [(name, 7) for name in step]


def test_an_error_of_the_cuda_driver_ends_the_run(monkeypatch):
    use_cuda(monkeypatch, FakeCuda(code=700))
    with pytest.raises(jax.errors.JaxRuntimeError, match="DtoHAsync_v2: error 700 of the CUDA"):
        jax.block_until_ready(echo_env().reset(jax.random.key(0)))


def test_an_old_state_or_a_part_of_a_batch_is_refused():
    env, key = echo_env(), jax.random.key(0)
    step = jax.vmap(env.step, (None, 0, 0, None))
    _, state = jax.vmap(env.reset)(jax.random.split(key, 4))
    actions = jnp.zeros(4, int)
    _, later, *_ = step(key, state, actions, None)
    with pytest.raises(Exception, match="can be stepped once"):
        jax.block_until_ready(step(key, state, actions, None))
    with pytest.raises(Exception, match="4 environments on the host got 2 actions"):
        jax.block_until_ready(
            step(key, jax.tree.map(lambda leaf: leaf[:2], later), actions[:2], None)
        )
    host.close_all()
    with pytest.raises(Exception, match="are closed"):
        jax.block_until_ready(step(key, later, actions, None))


def test_rows_may_change_places():
    env, key = echo_env(), jax.random.key(0)
    step = jax.vmap(env.step, (None, 0, 0, None))
    obs, state = jax.vmap(env.reset)(jax.random.split(key, 4))
    order = jnp.array([2, 0, 3, 1])
    state = jax.tree.map(lambda leaf: leaf[order], state)
    after, state, reward, *_ = step(key, state, jnp.array([0, 1, 2, 0]), None)
    np.testing.assert_array_equal(after[:, 0], obs[order, 0])
    np.testing.assert_array_equal(reward, [0, 1, 2, 0])
    np.testing.assert_array_equal(state.row, order)


def test_an_error_of_the_environment_ends_the_run():
    run = jax.jit(functools.partial(rollout, echo_env()))
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the robot is on fire"):
        jax.block_until_ready(run(keys, jnp.full((3, 2), 4)))


def test_an_environment_that_cannot_be_made_leaves_no_thread():
    def fail(*_):
        raise OSError("no model file")

    env = echo_env()
    env.make = fail
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no model file"):
        host.OpenBatch(env, np.arange(2), 6)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_step_that_is_not_finite_ends_the_episode(capfd):
    """As with brax: reward 0 and an observation of zeros."""

    class Broken(Echo):
        def step(self, actions):
            obs, reward, terminated, truncated = super().step(actions)
            obs[self.time == 2, 1] = np.nan
            reward[self.time == 3] = np.inf
            return obs, reward, terminated, truncated

    env = echo_env()
    env.make = Broken
    host.say_once.cache_clear()
    keys, actions = jax.random.split(KEY, 2), jnp.zeros((4, 2), int).at[:, 1].set(1)
    _, (obs, final, reward, terminated, truncated), _ = rollout(env, keys, actions)
    assert terminated[:, 0].tolist() == [False, True, False, True] and not truncated.any()
    assert final[1].tolist() == [[0.0] * 3] * 2 and (obs[1, :, 2] == 0).all()
    assert reward.tolist() == [[0, 1], [0, 0], [0, 1], [0, 0]]
    assert capfd.readouterr().err.count("not finite: its episode ends") == 1


def test_the_time_limit_may_be_changed():
    env = echo_env()
    params = env.default_params.replace(max_steps_in_episode=3)
    _, state = env.reset(jax.random.key(0), params)
    ends = []
    for _ in range(6):
        _, state, _, _, truncated, _ = env.step(jax.random.key(0), state, 0, params)
        ends.append(bool(truncated))
    assert ends == [False, False, True] * 2


def small(**changes):
    register(["Echo"], echo_env)
    sizes = {"total_timesteps": 96, "num_envs": 4, "num_steps": 8, "num_minibatches": 2}
    return ppo.Config(**{"env_name": "Echo", "hidden_sizes": (8,)} | sizes | changes)


def test_agents_are_evaluated_in_environments_of_their_own():
    """They are closed at the end, and training goes on with its own."""
    config = small()
    init, update = (jax.jit(jax.vmap(each)) for each in ppo.make_learner(config))
    state = init(jax.random.split(jax.random.key(0), 3))
    state, _ = update(state)
    assert Echo.calls == [12] * 8
    before = set(host._open)
    options = SimpleNamespace(seed=0, eval_episodes=2)
    returns = jax.jit(evaluation.make_evaluation(ppo, config, options))(state.agent, np.arange(3))
    assert returns.shape == (3, 2) and set(host._open) == before
    assert Echo.calls[-1] == 6
    state, metrics = update(state)
    assert np.isfinite(metrics["value"]).all()


def test_evaluations_play_whole_games_with_their_own_score(monkeypatch):
    """EnvPool's options for learning Atari do not reach the evaluation."""

    def make(name, episodic_life=False, reward_clip=False):
        env = echo_env(limit=2 if episodic_life else LIMIT)
        env.make = (lambda *given: Clipped(*given)) if reward_clip else env.make
        return env

    class Clipped(Echo):
        def step(self, actions):
            return super().step(np.sign(actions))

    monkeypatch.setitem(sys.modules, "onejit.envs.envpool", ModuleType("envpool"))
    register(["Lives"], make)
    script = SimpleNamespace(
        make_env=ppo.make_env, make_policy=lambda _: (tuple, lambda *_: (jnp.int32(2), ()))
    )
    params = {"episodic_life": True, "reward_clip": True}
    config = small(env_name="onejit.envs.envpool:Lives", env_params=params)
    assert ppo.make_env(config)[1].max_steps_in_episode == 2
    options = SimpleNamespace(seed=0, eval_episodes=3)
    evaluate = jax.jit(evaluation.make_evaluation(script, config, options))
    returns = evaluate(jnp.zeros(2), np.arange(2))
    np.testing.assert_array_equal(returns, np.full((2, 3), 2.0 * LIMIT))
    assert evaluation.whole_games(config) == dataclasses.replace(config, env_params={})
    other = dataclasses.replace(config, env_name="my_module:Lives")
    assert evaluation.whole_games(other) == other  # its parameters may mean anything


@pytest.mark.slow
def test_pictures_are_of_the_same_whole_game(tmp_path, monkeypatch):
    """The environment that plays the actions again for pictures has no option of the training
    either.
    """
    drawn = []
    monkeypatch.setitem(sys.modules, "onejit.envs.envpool", ModuleType("envpool"))

    class Short(host.HostEnv):
        def __init__(self, name, episodic_life=False):
            env = echo_env(limit=2 if episodic_life else LIMIT)
            super().__init__(env.make, *env.spaces, env.limit)

    register(["Short"], Short)

    def remember(form, path, title, drawing, episode):
        drawn.append(len(episode.rewards))

    drawing_of_env = render.drawing_of

    def drawing_of(env):
        drawn.append(env.limit)
        return drawing_of_env(env)

    monkeypatch.setattr(formats, "save_episode", remember)
    monkeypatch.setattr(render, "drawing_of", drawing_of)
    monkeypatch.setattr(evaluation, "make_episode", as_if_action_2(evaluation.make_episode))
    words = "--num-envs 2 --num-steps 8 --num-minibatches 1 --total-timesteps 16"
    words += " --num-seeds 1 --eval-episodes 0"
    words += " --env-name onejit.envs.envpool:Short --env-params episodic_life True"
    words += f" --run-dir {tmp_path / 'run'}"
    render.main(train.main(["ppo", *words.split()]), formats=("gif",))
    assert drawn == [LIMIT, LIMIT]


def as_if_action_2(make_episode):
    """A policy that never chooses the action that ends an episode of Echo."""

    def make(script, config):
        policy = SimpleNamespace(
            make_env=script.make_env, make_policy=lambda _: (tuple, lambda *_: (jnp.int32(2), ()))
        )
        return make_episode(policy, config)

    return make


def test_seeds_are_kept_although_their_memory_is_used_again():
    env, obs, number = echo_env(), np.zeros((2, 3), np.float32), np.zeros(2, np.int32)
    seeds, row = np.array([7, 8]), np.zeros(2, np.int32)
    env._reset((obs, number, row), seeds, np.array([LIMIT, LIMIT]))
    np.testing.assert_array_equal(obs[:, 0], [7, 8])
    seeds[:] = 0  # XLA does so after the call
    out = [np.zeros((2, 3)), np.zeros((2, 3)), *(np.zeros(2) for _ in range(5))]
    env._step(out, number, row, np.zeros(2), np.ones(2))
    np.testing.assert_array_equal(out[0][:, 0], [7, 8])


@pytest.mark.slow
def test_new_episodes_use_no_key_of_the_training():
    """`init` splits the agent's key, and the keys of a split are folded from small numbers."""
    key = jax.random.key(3)
    used = jax.random.key_data(jax.random.split(key, 64)).tolist()
    state = collections.namedtuple("State", ["obs", "env_state"])(jnp.zeros(1), jnp.zeros(1))
    given = []

    def start(floats, key_data):
        given.extend(key_data.tolist())
        return Carry(state, {})

    program = SimpleNamespace(sharding=None, start=start)
    for done in range(1, 64):
        loop.with_new_episodes(program, state, {}, jax.random.key_data(key)[None], done)
    assert len(given) == 63 and not [data for data in given if data in used]


def slice_of(config, key_data, folder) -> loop.Slice:
    numbers = np.arange(len(key_data))
    return loop.Slice(
        config=config,
        runs=range(len(numbers)),
        numbers=numbers,
        key_data=key_data,
        folder=folder,
        last_update=config.num_updates,
    )


def session_of(ends: list, caught=()) -> loop.Session:
    """A session that notes where chunks end."""
    return loop.Session(
        record=Record(settings={}),
        write_record=lambda: None,
        progress=progress_bar(1, disable=False),
        caught=caught,
        watch=lambda piece, first, last, *_: ends.append(last) or "",
    )


class Alike(Echo):
    """Observations are (0, last action, step), and all episodes begin alike."""

    def obs(self):
        action = np.where(self.time == 0, 0, getattr(self, "actions", 0))
        return np.stack([0 * self.time, action, self.time], 1).astype(np.float32)

    def step(self, actions):
        self.actions = actions
        return super().step(actions)


def test_resume_begins_new_episodes(tmp_path, capsys):
    """A resumed training ends with the agents of one that was never stopped, as all episodes of
    this environment are alike.
    """
    space = spaces.Box(-jnp.inf, jnp.inf, (3,))
    register(["Alike"], lambda name: host.HostEnv(Alike, space, spaces.Discrete(3), limit=4))
    config = small(env_name="Alike", anneal_lr=False)  # two episodes in an update
    program = compilation.compile_slice(ppo, config, [], 3)
    key_data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 3)))
    expected, _ = loop.run(program, slice_of(config, key_data, tmp_path / "whole"), session_of([]))
    capsys.readouterr()

    piece = slice_of(config, key_data, tmp_path / "checkpoints")
    ends = []
    with pytest.raises(signals.Stopped):
        loop.run(program, piece, session_of(ends, caught=[15]))
    assert 0 < ends[-1] < config.num_updates
    host.close_all()  # as in another process
    trained, _ = loop.run(program, piece, session_of(ends))
    assert ends[-1] == config.num_updates
    assert "new episodes begin" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, trained, expected)
    assert len(np.unique(trained.metrics["value_loss"])) == trained.metrics["value_loss"].size


@pytest.mark.slow
@pytest.mark.parametrize("script", [rainbow, apex_dqn], ids=lambda script: script.__name__)
def test_no_transition_of_several_steps_spans_a_resume(script, tmp_path):
    """It would join the episode before with one of another seed."""
    small()  # registers the environment
    sizes = {"num_envs": 2, "num_steps": 4, "batch_size": 8, "hidden_sizes": (8,), "n_step": 3}
    config = script.Config(env_name="Echo", learning_starts=16, total_timesteps=180, **sizes)
    program = compilation.compile_slice(script, config, [], 1)
    key_data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 1)))

    piece = slice_of(config, key_data, tmp_path / "checkpoints")
    with pytest.raises(signals.Stopped):
        loop.run(program, piece, session_of([], caught=[15]))
    host.close_all()  # as in another process
    _, state = loop.run(program, piece, session_of([]))
    count = int(state.rollout_count[0])
    obs = np.asarray(state.replay.obs[0, :count]).reshape(-1, 3)
    next_obs = np.asarray(state.replay.next_obs[0, :count]).reshape(-1, 3)
    assert len(set(obs[:, 0])) == 4  # two environments before and two after
    np.testing.assert_array_equal(obs[:, :2], next_obs[:, :2])  # the seed and the episode
    assert (next_obs[:, 2] - obs[:, 2]).max() == 3


def test_a_picture_of_each_step_of_an_episode():
    env = echo_env()
    _, state = env.reset(jax.random.key(0))
    states = [state]
    for _ in range(3):
        _, state, *_ = env.step(jax.random.key(0), state, 0)
        states.append(state)
    states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    assert [picture[0, 0, 0] for picture in env.frames(states, range(4))] == [0, 10, 20, 30]
    assert [picture[0, 0, 0] for picture in env.frames(states, range(0, 4, 2))] == [0, 20]


def test_pictures_of_an_episode_beyond_the_usual_limit():
    env, limits = echo_env(), []
    make = env.make
    env.make = lambda seeds, limit, draw=False: limits.append(limit) or make(seeds, limit, draw)
    states = jax.tree.map(
        lambda leaf: np.repeat(leaf, LIMIT + 3), jax.vmap(env.reset)(jax.random.split(KEY, 1))[1]
    )
    assert len(list(env.frames(states, range(LIMIT + 3)))) == LIMIT + 3 == limits[-1]


# --- the libraries ---


def make(module, name, **arguments):
    """The environment of an adapter, or a skipped test."""
    pytest.importorskip(module, reason=f"{module} is not installed: pip install -e '.[envs]'")
    importlib.import_module(f"onejit.envs.{module}")
    return gymnax.make(f"onejit.envs.{module}:{name}", **arguments)[0]


def test_the_seed_of_a_row_is_that_of_envpool():
    env, keys = make("envpool", "Hopper-v4"), jax.random.split(jax.random.key(0), 3)
    first, *_ = rollout(env, keys, jnp.zeros((1, 3, *env.action_space().shape), int))
    library = importlib.import_module("envpool")
    for seed, obs in zip(seeds_of(keys), first, strict=True):
        own = library.make_gymnasium("Hopper-v4", num_envs=1, seed=seed).reset()[0][0]
        np.testing.assert_array_equal(obs, np.float32(own))


@pytest.mark.parametrize(
    "module, name, arguments",
    [
        ("envpool", "Hopper-v4", {"max_episode_steps": 40}),
        ("envpool", "CheetahRun-v1", {"max_episode_steps": 30}),
        ("envpool", "LunarLander-v3", {}),
        ("envpool", "CartPole-v1", {"max_episode_steps": 12}),
        ("gymnasium", "CartPole-v1", {"max_episode_steps": 12}),
        ("gymnasium", "Pendulum-v1", {"max_episode_steps": 12}),
    ],
)
def test_ends_and_observations_are_the_library_s_own(module, name, arguments):
    """Against a plain loop over the same environments with the same actions, bit for bit."""
    env, keys = make(module, name, **arguments), jax.random.split(jax.random.key(0), 3)
    space = env.action_space()
    actions = jax.vmap(jax.vmap(space.sample))(jax.random.split(jax.random.key(1), (100, 3)))
    first, steps, _ = jax.jit(functools.partial(rollout, env))(keys, actions)
    batch = env.make(seeds_of(keys), env.limit)
    np.testing.assert_array_equal(first, batch.first)
    expected = in_a_loop(batch, np.asarray(actions))
    batch.close()
    for found, wanted in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    terminated, truncated = steps[3], steps[4]
    assert (terminated | truncated).any()
    ended = np.asarray(terminated | truncated)
    assert not np.array_equal(np.asarray(steps[0])[ended], np.asarray(steps[1])[ended])
    assert np.array_equal(np.asarray(steps[0])[~ended], np.asarray(steps[1])[~ended])


def test_images_have_their_channels_last_and_stay_bytes():
    env = make("envpool", "Pong-v5")
    obs, _ = env.reset(jax.random.key(0))
    assert obs.shape == (84, 84, 4) == env.observation_space(None).shape and obs.dtype == np.uint8
    assert obs.max() > 100


def test_dictionaries_become_vectors():
    env = make("envpool", "MiniGrid-Empty-5x5-v0")
    obs, _ = env.reset(jax.random.key(0))
    assert obs.shape == env.observation_space(None).shape == (1 + 7 * 7 * 3,)
    assert obs.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "is_said"), [("CliffWalking-v0", True), ("PacMan-v1", True), ("CartPole-v1", False)]
)
def test_starts_that_do_not_depend_on_the_seed_are_said(name, is_said, capsys):
    host.say_once.cache_clear()
    env = make("envpool", name)
    for _ in range(2):
        jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    said = f"{name}: all environments start with the same observation"
    assert capsys.readouterr().err.count(said) == is_said


# EnvPool says 0 and 2**31 - 1
@pytest.mark.parametrize("name", ["BabyAI-GoToRedBall-v0", "CliffWalking-v0"])
def test_an_environment_without_a_time_limit(name):
    assert make("envpool", name).default_params.max_steps_in_episode == host.NO_LIMIT


def test_arguments_of_envpool_that_are_refused():
    with pytest.raises(ValueError, match=r"^num_threads, seed: set by the training"):
        make("envpool", "CartPole-v1", num_threads=1, seed=2)


PROCESSES = """
import os, signal, subprocess
import gymnasium, gymnax, jax, numpy as np
from onejit.envs.gymnasium import register_ids

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        if action == 1:
            raise ValueError("the robot lost 50 % of its legs")
        if action == 2:
            os._exit(1)
        ignored = signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGINT}
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        assert child.wait(10) == -signal.SIGTERM
        return np.ones(2, np.float32), float(ignored), False, False, {}

gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=6)
register_ids("Mine-v0")
env, params = gymnax.make("Mine-v0", vectorization_mode="async")
for action in range(3):
    _, state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    try:
        step = jax.vmap(env.step, (None, 0, 0))
        print(step(jax.random.key(0), state, np.array([0, action, 0]))[2])
    except Exception as error:
        print(error)
"""


def test_processes_report_errors_and_end(tmp_path):
    """An error, also with a "%" in it, and a process that dies.

    Signals that end the training do not end the processes, but those that an environment starts.
    """
    pytest.importorskip("gymnasium")
    (tmp_path / "processes.py").write_text(PROCESSES)
    command = [sys.executable, tmp_path / "processes.py"]
    environment = {**os.environ, "PYTHONPATH": "."}
    found = subprocess.run(command, cwd=ROOT, env=environment, timeout=120, **TEXT)
    assert found.returncode == 0 and "Traceback" not in found.stderr, found.stderr
    assert found.stdout.startswith("[1. 1. 1.]"), found.stdout
    assert "the robot lost 50 % of its legs" in found.stdout
    assert "a process of the environment has ended" in found.stdout


def test_actions_that_no_script_has():
    with pytest.raises(ValueError, match=r"^env_name: actions of"):
        make("envpool", "Sudoku-v0").action_space()
