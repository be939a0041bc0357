"""Every test with an argument `script` runs for each script of the repository, small: see `small_config`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = (
    f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # for `python -m onejit`
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache")
)  # for the subprocesses of the tests too
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU
os.environ["JAX_NUM_CPU_DEVICES"] = "1"  # read when JAX is imported; subprocesses choose their own

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import struct  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Mapping  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a shell starts `make test &` so, and subprocesses inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def tracked() -> frozenset[str] | None:
    """The paths that git tracks, or None where there is no git or this is not its checkout, as in an archive."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }  # as of a hook
    command = ["git", "ls-files", "-z"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    is_checkout = (ROOT / ".git").exists() and done.returncode == 0
    return frozenset(done.stdout.split("\0")) if is_checkout else None


def repository_files(pattern: str) -> list[Path]:
    """The files of the repository that match, without those that a user has added and git does not track."""
    known = tracked()
    paths = (path for path in sorted(ROOT.glob(pattern)) if path.is_file())
    return [path for path in paths if known is None or path.relative_to(ROOT).as_posix() in known]


SCRIPTS = [path.stem for path in repository_files("*.py")]
MOST_LINES = {  # of each script, and of the package without its adapters; limits may only become smaller
    "q_learning_gridworld": 575, "dqn": 600, "apex_dqn": 694, "rainbow": 791, "pqn": 546, "ppo": 648,
    "ppo_continuous": 705, "dpo_continuous": 719, "ppo_rnn": 806, "reppo": 726, "sac": 736, "td3": 720,
    "evolve_objective": 824, "alphazero": 718, "mappo": 720, "onejit": 4030,
}  # fmt: skip
DERIVED = ("dpo_continuous",)  # seen by its own tests to be another script but for a function
COSTLY = (
    "alphazero",
    "evolve_objective",
    "mappo",
)  # compile for long: the slow tier tests their contract
COMMON_QUICKLY = (
    "ppo_continuous",
    "q_learning_gridworld",
)  # the fast tier tests the common blocks with these
PROCESSES_QUICKLY = ("ppo",)  # and how they run as processes of their own with this one
QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"  # to compile in half the time
QUICKLY += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SMALL = {
    "max_steps_in_episode": 13,  # of the GridWorld; all others have it in env_params
    "goal": (7, 10),  # of the GridWorld: near enough to be found
    "cliff": ((6, 11),),
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 2,
    "hidden_sizes": (8,),
    "buffer_size": 256,
    "batch_size": 8,
    "learning_starts": 32,
    "target_update_interval": 8,
    "exploration_fraction": 0.5,
    "anneal_lr": True,
    "inner_envs": 4,  # evolve_objective: an update is a generation of small trainings
    "inner_steps": 8,
    "population_size": 4,
    "inner_seeds": 1,
    "drift_size": 4,
    "simulations": 4,  # alphazero: trees of few nodes, and games that end in each update
    "opponent_simulations": 2,
    "eval_games": 2,
    "eval_steps": 5,
}


def pytest_configure(config):
    """The fast tier compiles in half the time: XLA's older emitter, no optimization. The slow one does as users do."""
    if config.option.markexpr == "not slow" and jax.__version_info__[:2] == (
        0,
        10,
    ):  # XLA dies of flags it has lost
        os.environ["XLA_FLAGS"] = (
            f"{QUICKLY} {os.environ.get('XLA_FLAGS', '')}"  # read when the backend starts
        )


def pytest_collection_finish(session):
    """Python looks for garbage less often, and not among what has been imported: it took a tenth of all time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_itemcollected(item):
    """Of the two processes that run the tests (pyproject.toml), one gets all of a script or file, and compiles once."""
    script = item.callspec.params.get("script") if hasattr(item, "callspec") else None
    item.add_marker(pytest.mark.xdist_group(script if isinstance(script, str) else item.path.stem))
    common = item.get_closest_marker(
        "common"
    )  # with the scripts for the fast tier as arguments, if they are others
    quickly = PROCESSES_QUICKLY if item.path.stem == "test_processes" else COMMON_QUICKLY
    quickly = common.args if common and common.args else quickly
    is_common = common or script in DERIVED + COSTLY
    if is_common and isinstance(script, str) and script in SCRIPTS and script not in quickly:
        item.add_marker(pytest.mark.slow)  # the blocks are the same in all; what is carried differs


def slow(*values):
    """Parameters of a test for the slow tier alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="session", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


def field_names(script, *types) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(script.Config)
        if not types or field.type in types
    ]


@functools.cache
def origin(script) -> str:
    """Where the script's default environment comes from: gymnax, brax, jaxmarl or the script."""
    import gymnax

    if "env_params" not in field_names(script):
        return "script"
    if "centralized_critic" in field_names(script):
        return "jaxmarl"
    return "gymnax" if script.Config().env_name in gymnax.registered_envs else "brax"


def small_config(script, num_updates=6, **overrides):
    """The script's default config, its sizes cut down; brax is stood in for by its own trivial environment."""
    small = {name: value for name, value in SMALL.items() if name in field_names(script)}
    evolves = "num_generations" in field_names(script)
    if "env_params" in field_names(script):
        small["env_params"] = {"max_steps_in_episode": 13}
    if "num_envs" not in field_names(script) and not evolves:  # one environment per agent
        small["num_steps"] *= SMALL["num_envs"]
    brax = {"env_name": "fast"} if origin(script) == "brax" else {}
    config = dataclasses.replace(script.Config(), **small | brax | overrides)
    if evolves:  # `total_timesteps` is of one training, here of four updates, large enough for drifts to differ
        steps = 4 * config.inner_envs * config.inner_steps + 5
        return dataclasses.replace(
            config, num_generations=num_updates, total_timesteps=steps, lr=0.1
        )
    steps = num_updates * config.num_envs * config.num_steps + getattr(
        config, "warmup_timesteps", 0
    )
    return dataclasses.replace(config, total_timesteps=steps + 5)  # num_updates is rounded down


def shifted_config(script, **overrides):
    """A small config with no float field at its default, so that one which goes astray is seen."""
    config = small_config(script, **overrides)
    defaults = {
        name: min(getattr(config, name), 1e3) for name in field_names(script, float)
    }  # one is infinite
    values = {name: default * 0.9 or 0.05 for name, default in defaults.items()}
    return dataclasses.replace(config, **values)


def flags(config) -> list[str]:
    """The command line that makes `config`."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = [*value.items()] if isinstance(value, Mapping) else value
        if not isinstance(values, (tuple, list)) or len(
            values
        ):  # an empty one is left at its default
            words += [f"--{field.name}", *map(str, np.ravel(np.asarray(values, dtype=object)))]
    return words


# Compiles in half the time. For programs that are compared with others up to rounding, or that take few steps.
jit_quickly = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@functools.cache
def train(script):
    """The program that trains `shifted_config` for many seeds. What it gives for `seed_keys` is `trained`."""
    return jit_quickly(jax.vmap(script.make_train(shifted_config(script))))


@functools.cache
def trained(script):
    return train(script)(seed_keys())


def seed_keys():
    """As `main` makes them from its defaults, seed 0 and four agents."""
    return jax.random.split(jax.random.key(0), 4)


def arrays(tree) -> list[np.ndarray]:
    """The leaves as arrays, random keys as their data."""

    def array(leaf):
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        )
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(tree, other):
    """Bit for bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(arrays(tree), arrays(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_close(out, other):
    """Metrics and agents that training gave, up to what two compilations of one program may differ by."""
    trees = [(tree["metrics"], tree["runner_state"].agent) for tree in (out, other)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    for a, b in zip(*map(arrays, trees), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def events(directory) -> list[tuple[str, int, float]]:
    """`(tag, step, value)` of TensorBoard's files: length (8 bytes), checksum (4), event, checksum (4)."""
    from tensorboardX.proto import event_pb2

    found = []
    for file in sorted(directory.glob("events*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of so many bytes, which only root can, and otherwise skips the test."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int, options: str = "rw"):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "tmpfs", place]
        if (
            os.name != "posix"
            or os.geteuid()
            or not shutil.which("mount")
            or subprocess.run(command).returncode
        ):
            pytest.skip("only root can mount a file system")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", place])


@pytest.fixture
def full_disk(small_disk, tmp_path):
    """`with full_disk(kind, size) as (folder, message)`: writing more into the folder fails with this message.

    "disk" is a file system of so many bytes, for which the test must run as root. "files" limits the size of each file.
    """

    @contextlib.contextmanager
    def fill(kind: str, size: int):
        if kind == "disk":
            yield small_disk(size), "No space left on device"
            return
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        least = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update(
            "jax_persistent_cache_min_compile_time_secs", 1e9
        )  # its files would be cut off, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield tmp_path, "File too large"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", least)

    return fill
