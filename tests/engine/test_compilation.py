"""Programs for slices of runs: their functions, their memory, and slices that fit."""

import collections
import dataclasses
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState

from onejit.engine import compilation, devices
from onejit.engine.axis import Axis
from onejit.engine.memory import GIB, cgroup_memory, program_bytes
from onejit.script import load


class Logged(NamedTuple):
    """A runner state."""

    weights: jax.Array
    env_state: Any

    @property
    def agent(self):
        return {"weights": self.weights}


@dataclasses.dataclass(frozen=True)
class Frozen:
    num_updates: int
    env_name: str = "of_no_library"


def test_metrics_of_few_bits_are_written_as_float32(tmp_path):
    """NumPy would write bfloat16 as bytes without a type."""
    script = ModuleType("script_of_few_bits")

    def update(state, _=None):
        metrics = {"episodes": jnp.int32(1), "loss": jnp.bfloat16(0.5), "half": jnp.float16(2)}
        return state, metrics

    script.make_learner = lambda config: (lambda key: Logged(jnp.zeros(2), ()), update)
    config = Frozen(num_updates=3)
    start, advance = compilation.training_functions(script, config, [])
    metrics = advance(start({}, jax.random.key_data(jax.random.key(0))), {}, 0, 3).metrics
    np.savez(tmp_path / "metrics.npz", **metrics)
    kinds = {name: values.dtype.name for name, values in np.load(tmp_path / "metrics.npz").items()}
    assert kinds == {"episodes": "int32", "loss": "float32", "half": "float32"}
    assert metrics["loss"].tolist() == [0.5] * 3 and metrics["half"].tolist() == [2.0] * 3


CRITICS = collections.namedtuple("CRITICS", "first second")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"params": [1.0, 2.0]}, r"agent\['params'\]: must be a dict .* is a list"),
        ({"params": {"dense": (1.0, 2.0)}}, r"\['params'\]\['dense'\]: .* is a tuple"),
        ({"params": {"fc.0": 1.0}}, r"agent\['params'\]: has the name 'fc.0'"),
        ({"params": {3: 0}}, "has the name 3"),
        (CRITICS(1.0, 2.0), "runner_state.agent: must be a dict .* is a CRITICS"),
        ({"no_episodes": 1.0}, "update: its metrics lack episodes"),
    ],
)
def test_agents_and_metrics_that_no_file_can_hold(agent, said, monkeypatch):
    """Refused before anything is compiled: they were lost when the training had ended."""

    def update(state, _=None):
        return state, {"loss": 0.0} if "no_episodes" in agent else {"episodes": 1}

    class State(NamedTuple):
        agent: Any

    script = ModuleType("script_of_odd_agents")
    script.make_learner = lambda config: (lambda key: State(agent), update)
    monkeypatch.setattr(compilation.local_modules, "read_sources", lambda *args: {})
    with pytest.raises(ValueError, match=said):
        compilation.compile_slice(script, Frozen(num_updates=3), [], 1)


def test_a_runner_state_of_a_sweep_holds_no_function():
    """As flax's TrainState with its optimizer; an environment may hold functions."""
    state = TrainState.create(apply_fn=None, params={}, tx=optax.sgd(0.1))
    compilation.check_arrays(Logged(jnp.zeros(2), env_state=state))
    with pytest.raises(ValueError, match=r"runner_state.weights.tx.init: is a function"):
        compilation.check_arrays(Logged(state, env_state=()))


def test_an_agent_that_a_file_can_hold():
    array = jax.ShapeDtypeStruct((3,), jnp.float32)
    compilation.check_agent(FrozenDict(params={"dense": {"kernel": array}}))


# --- memory ---


def cgroup(folder, version, limits, used, cached):
    """Files of control groups as Linux has them: the group of this process, `/a/b`, and those above
    it.
    """
    root, own = folder / "cgroup", folder / "own"
    top, prefix = (root, "") if version == 2 else (root / "memory", "total_")
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    own.write_text("1:cpu:/x\n0::/a/b\n" if version == 2 else "3:cpu:/x\n2:memory:/a/b\n")
    for path, limit in zip(("", "a", "a/b"), limits, strict=True):
        (top / path).mkdir(parents=True, exist_ok=True)
        (top / path / names[0]).write_text(f"{limit}\n")
        (top / path / names[1]).write_text(f"{used}\n")
        stat = f"anon 5\n{prefix}active_file {cached}\n{prefix}inactive_file {cached}\n"
        (top / path / "memory.stat").write_text(stat)
    return cgroup_memory(root, own)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_the_own_control_group(version, tmp_path):
    """The tightest limit of the process's group and of those above it.

    What the kernel holds of files is free.
    """
    assert cgroup(tmp_path, version, ("max", 1000, 2000), used=900, cached=100) == 1000 - 900 + 200
    assert cgroup(tmp_path, version, ("max", 3000, 2000), used=900, cached=100) == 2000 - 900 + 200
    assert cgroup(tmp_path, version, ("max", "max", "max"), used=900, cached=100) == float("inf")


def test_memory_without_control_groups(tmp_path):
    assert cgroup_memory(tmp_path, tmp_path / "none") == float("inf")


class SizeAndBytes(NamedTuple):
    """A program of runs that need 10 bytes each, and 300 together."""

    size: int

    @property
    def bytes(self):
        return 300 + 10 * self.size

    @property
    def axis(self):
        return SimpleNamespace(num_devices=1)


@pytest.mark.parametrize(
    "total, memory, size",
    [(11, 1e9, 16), (1003, 1e9, 1008), (1003, 6300, 504), (3, 1e9, 3)],
)
def test_seeds_that_the_devices_do_not_divide_keep_them_busy(total, memory, size, monkeypatch):
    """11 seeds on 8 devices took one device, and 1003 seeds took 144 slices of 7."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    step = devices.smallest_slice(total)
    assert compilation.largest_slice(SizeAndBytes, total, step, memory).size == size


@pytest.mark.parametrize(
    "fixed, each, total, step, memory, size",
    [
        (0, 10, 100, 1, 1000, 100),
        (0, 10, 100, 1, 999, 50),  # two slices of 50 rather than one of 99 and one of 1
        (300, 10, 100, 1, 700, 34),  # 40 fit: three slices
        (300, 10, 100, 8, 700, 40),
        (0, 10, 100, 8, 1039, 56),  # 104 do not fit; even slices, not one of 96 and one of 4
        (0, 10, 3, 8, 80, 8),
        (0, 10, 7, 1, 15, 1),
        (900, 1, 1000, 1, 1000, 100),  # two guesses in proportion would be far off
    ],
)
def test_largest_slice(fixed, each, total, step, memory, size):
    compiled = []

    def compile_size(size):
        compiled.append(size)
        axis = Axis(size, num_devices=1, sharding=None, replicated=None)
        return compilation.Program(axis, 1, fixed + each * size, 0, *[None] * 4)

    assert compilation.largest_slice(compile_size, total, step, memory).size == size
    assert len(compiled) <= 4


@pytest.mark.parametrize("step, words", [(1, "1 run needs"), (2, "2 runs at once need")])
def test_one_slice_that_does_not_fit(step, words):
    with pytest.raises(ValueError, match=f"^memory: {words} .* GiB .* 2.79e-07 GiB are free"):
        compilation.largest_slice(SizeAndBytes, 8, step, memory=300.0)


def test_slices_are_described_and_timed():
    clock = defaultdict(float)
    program, text = compilation.compile_slices(SizeAndBytes, 8, None, 1.0, clock)
    assert program.size == 8
    begins = f"1 slice on 1 device, {380 / GIB:.3g} GiB of 1 free on each; compiled in "
    assert text.startswith(begins)
    assert 0.0 < clock["compile"] < 1.0

    program, text = compilation.compile_slices(SizeAndBytes, 8, 3, 3e-7, clock)
    assert program.size == 3  # also where it does not fit, if it was asked for
    assert text.startswith("3 slices of at most 3 on 1 device, ") and "MORE THAN IS FREE" in text

    _, text = compilation.compile_slices(SizeAndBytes, 8, None, 3.4e-7, clock)
    assert text.startswith("2 slices of at most 4 on ")
    assert "FREE" not in compilation.compile_slices(SizeAndBytes, 7, 7, 370 / GIB, clock)[1]


def test_memory_of_a_program():
    size = 1_000_000  # bytes of the argument

    def needs(function, held=0, **how):
        argument = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
        return program_bytes(jax.jit(function, **how).lower(argument).compile(), held) / size

    assert 2.0 <= needs(lambda x: x + 1.0) < 2.2  # the argument and the output
    # the output takes the argument's place
    assert 1.0 <= needs(lambda x: x + 1.0, donate_argnums=0) < 1.2
    assert 2.0 <= needs(lambda x: jnp.sort(x)[7]) < 4.2  # the argument, and what is sorted
    assert needs(lambda x: x + 1.0, held=5 * size, donate_argnums=0) >= 5.0


def test_memory_grows_with_runs():
    """XLA's figures: more runs need more, by about the same for each."""
    script = load.load_script("q_learning_gridworld")
    config = script.Config(total_timesteps=2000, num_steps=200)
    few, many = (compilation.compile_slice(script, config, ["lr"], size).bytes for size in (5, 24))
    agents = (config.num_updates * 6 + 70 * 4) * 4  # bytes of metrics and Q table alone, of each
    assert 19 * agents < many - few < 19 * 20 * agents


def test_what_evaluation_needs_is_counted_beside_what_training_holds():
    """While agents are played, their whole runner state stays where it is."""
    script = load.load_script("q_learning_gridworld")
    config = script.Config(num_steps=1, total_timesteps=1, max_steps_in_episode=50)
    few = SimpleNamespace(seed=0, eval_episodes=0, eval_interval=0)
    many = SimpleNamespace(seed=0, eval_episodes=20_000, eval_interval=0)
    without = compilation.compile_slice(script, config, [], 4, few)
    large = compilation.compile_slice(script, config, [], 4, many)
    alone = program_bytes(large.evaluate)
    held = without.start.memory_analysis().output_size_in_bytes
    agent = large.evaluate.memory_analysis().argument_size_in_bytes
    assert agent < held and alone > without.bytes
    assert large.bytes == alone - agent + 2 * held  # on a CPU a checkpoint's copy too
    assert large.bytes - without.bytes > 4 * 20_000 * 4
