"""The command line of a script: what it takes, what it refuses, and what it leaves behind."""

import contextlib
import dataclasses
import importlib
import io
import itertools
import os
import platform
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import toys
import yaml
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.flax import load_file
from support.commands import config_of_words, run_script
from support.files import ROOT
from support.small import field_names, flags, origin, shifted_config, small_config
from support.tiers import slow
from support.training import trained
from support.trees import arrays, assert_close

from onejit.base import statistics
from onejit.script import load


def toys_that_it_takes(script) -> list[str]:
    """Those of the two toy environments whose actions are of the script's kind.

    Few scripts take both kinds.
    """
    if origin(script) == "script":
        pytest.skip("knows only its own environment")
    taken = []
    for name in toys.TEAMS if origin(script) == "jaxmarl" else toys.NAMES:
        with contextlib.suppress(ValueError):
            script.make_env(small_config(script, env_name=name, env_params={}))
            taken.append(name)
    assert taken
    return taken


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Runs here take few steps: what `main` compiles takes longer than they do."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def start(script, tmp_path):
    """A function that runs `main` with small sizes and the given flags."""

    def start(args):
        small = [*flags(small_config(script)), "--num-seeds=2", f"--run-dir={tmp_path / 'run'}"]
        run_script(script, *small, *args)

    yield start
    assert not (tmp_path / "run").exists(), "something was written"


@pytest.fixture
def refuses(start):
    """A function that sees `main` end with an error, and looks for words in its last line.

    The traceback is right: whoever runs a script may be changing it.
    """

    def check(args, *words, error=ValueError):
        with pytest.raises(error) as caught:
            start(args)
        for word in words:
            assert str(word) in str(caught.value), f"{word} is not in: {caught.value}"

    return check


# --- values that cannot be ---


@pytest.mark.common
def test_seeds_that_cannot_be(refuses):
    for seed in (-1, 2**32, 10**20):
        refuses([f"--seed={seed}"], f"seed = {seed}")


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--total-timesteps=1"], ValueError, "total_timesteps = 1"),
        (["--steps=3"], SystemExit, "^2$"),
        (["--config", "no.yaml"], FileNotFoundError, "no.yaml"),
    ],
)
def test_errors_of_the_program_itself(words, error, match, tmp_path, monkeypatch):
    """What runs below `if __name__ == "__main__"`: errors get through, tyro's exit code is 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["q_learning_gridworld.py", *words])
    with pytest.raises(error, match=match):
        runpy.run_path(str(ROOT / "q_learning_gridworld.py"), run_name="__main__")


# --- environments ---


def test_environments_that_cannot_be(script, refuses):
    taken = toys_that_it_takes(script)
    refuses(["--env_name=Nowhere"], "Nowhere")
    refuses(
        ["--env_name=no_such_module:Nowhere"],
        "no_such_module",
        error=(ValueError, ModuleNotFoundError),
    )
    refuses(["--env-name", taken[0], "--env-params", "wings", 2], error=Exception)
    if len(taken) == 1:  # of an environment with the other kind of actions, or with one agent
        others = {"ToyContinuous": "CartPole-v1", "ToyDiscrete": "Pendulum-v1"}
        other = others.get(taken[0], "CartPole-v1")
        limit = ["--env-params", "max_steps_in_episode", 9]
        refuses(["--env_name", other, *limit], f"env_name = {other}")
    if origin(script) == "brax":
        hopper = ["--env-name=hopper", "--env-params"]
        refuses([*hopper, "wings", 2], "wings", error=TypeError)
        refuses([*hopper, "backend", "none"], "backend", error=Exception)


def test_environment_of_a_module_of_ones_own(script, tmp_path, monkeypatch):
    """Registered by the module that its name begins with."""
    kind = toys_that_it_takes(script)[0]
    if origin(script) == "jaxmarl":
        return  # where all names with a module mean a class of one's own
    name = f"mine_for_{script.__name__}"
    (tmp_path / f"{name}.py").write_text(
        f"import gymnax\nimport toys\nclass Mine(toys.{kind}):\n    pass\n"
        f"gymnax.register('{name}', Mine)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env, env_params = script.make_env(
        small_config(
            script, env_name=f"{name}:{name}", env_params={"max_steps_in_episode": 3, "noise": 0.5}
        )
    )
    assert (env_params.max_steps_in_episode, env_params.noise) == (3, 0.5)
    state = jax.eval_shape(env.reset, jax.random.key(0), env_params)[1]
    assert "action" in vars(state.env_state)  # the toy's


# --- flags and YAML ---


@pytest.mark.common
def test_numbers_as_people_write_them(script, tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 1e-3\ngamma: 1\ntotal_timesteps: 5e3\n")
    for words in (
        ["--config", tmp_path / "good.yaml"],
        ["--lr", "1e-3", "--gamma=1", "--total-timesteps", "5e3"],
    ):
        config = config_of_words(script, *words)
        assert (config.lr, config.gamma, config.total_timesteps) == (0.001, 1.0, 5000)
        assert [type(value) for value in (config.lr, config.gamma, config.total_timesteps)] == [
            float,
            float,
            int,
        ]


def test_flags_override_yaml_and_yaml_the_defaults(script, tmp_path):
    (tmp_path / "good.yaml").write_text("total_timesteps: 7000\ngamma: 0.5\n")
    file = ["--config", tmp_path / "good.yaml"]
    for words in ([*file, "--gamma", 0.25], ["--gamma", 0.25, *file]):
        config = config_of_words(script, *words)
        assert config == dataclasses.replace(script.Config(), total_timesteps=7000, gamma=0.25)
    assert config_of_words(script) == script.Config()


def test_every_config_survives_the_command_line(script):
    env_params = (
        {"a": 1, "b": "x y", "c": 0.5, "d": True} if "env_params" in field_names(script) else {}
    )
    config = shifted_config(script, **({"env_params": env_params} if env_params else {}))
    assert config_of_words(script, *flags(config)) == config


@pytest.mark.common
def test_misspelt_key_and_wrong_values_in_yaml(script, tmp_path, capfd):
    file = tmp_path / "bad.yaml"
    for text, *words in (("gama: 0.9", "gama", "gamma"), ("lr: [1, 2]", "2")):
        file.write_text(text)
        with pytest.raises(SystemExit) as stop:
            run_script(script, "--config", file)
        message = capfd.readouterr().err
        assert stop.value.code == 2 and all(word in message for word in words), message


def test_help_explains_every_field(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        run_script(script, "--help")
    assert stop.value.code == 0
    shown, source = capsys.readouterr().out, Path(script.__file__).read_text()
    words = re.sub(r"[\s\u2500-\u257f]", "", shown)  # tyro wraps lines and draws boxes
    for field in dataclasses.fields(script.Config):
        behind = rf"^    {field.name}: .*?  # (.+)$"
        above = rf"^    # (.+)\n    {field.name}: "
        comment = re.search(behind, source, re.MULTILINE) or re.search(above, source, re.MULTILINE)
        assert comment, f"{field.name} has no comment"
        stands_alone = not re.match(r"(and|of|or|the same|likewise|as above)\b", comment[1])
        assert stands_alone, f"{field.name}: {comment[1]}"
        assert f"--{field.name.replace('_', '-')}" in shown
        assert re.sub(r"\s", "", comment[1]) in words, field.name
    for name in ("num-seeds", "seed", "run-dir", "--config FILE.yaml"):
        assert name in shown


# --- a whole run ---


@pytest.fixture(scope="session")
def finished(script, tmp_path_factory):
    """A run in an empty directory that was there before, and what it said."""
    run_dir, said = tmp_path_factory.mktemp(script.__name__), io.StringIO()
    usual = os.umask(0o022)
    with contextlib.redirect_stdout(said):
        run_script(script, *flags(shifted_config(script)), "--num-seeds=4", f"--run-dir={run_dir}")
    os.umask(usual)
    return run_dir, said.getvalue()


@pytest.mark.common
def test_files_of_a_run(script, finished):
    """Anybody may read them. The script is the text that trained."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in finished[0].iterdir()}
    written = {"config.yaml", "metrics.npz", "learning_curve.png", "agent.safetensors"}
    copy = finished[0] / f"{script.__name__}.py"
    assert modes.keys() >= written | {copy.name} and set(modes.values()) == {0o644}
    assert copy.read_bytes() == Path(script.__file__).read_bytes()
    episodes = np.load(finished[0] / "metrics.npz")["episodes"]
    assert np.issubdtype(episodes.dtype, np.integer)  # floats would lose digits above 2^24
    assert finished[1].endswith(f"results in {finished[0]}\n")


@pytest.mark.common
def test_config_of_a_run_makes_the_same_again(script, finished):
    assert config_of_words(script, "--config", finished[0] / "config.yaml") == shifted_config(
        script
    )
    assert list(yaml.safe_load((finished[0] / "config.yaml").read_text())) == field_names(script)


@pytest.mark.common
def test_metrics_of_a_run_are_those_of_make_train(script, finished):
    metrics, out = dict(np.load(finished[0] / "metrics.npz")), trained(script)
    assert_close(out | {"metrics": metrics}, out)


@pytest.mark.common
def test_agents_of_a_run_are_those_of_make_train(script, finished):
    agents = unflatten_dict(load_file(finished[0] / "agent.safetensors"), sep=".")
    expected = trained(script)["runner_state"].agent
    assert jax.tree.structure(agents) == jax.tree.structure(expected)
    for leaf, other in zip(arrays(agents), arrays(expected), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-5)
    with safe_open(finished[0] / "agent.safetensors", "numpy") as file:
        # one entry: several would be in any order
        assert file.metadata() == {"run": f"script: {script.__name__}\nseed: 0\n"}


@pytest.mark.common
def test_final_return_of_a_run(finished):
    """Of the last update in which episodes ended: the last tenth is one update here."""
    returns = np.load(finished[0] / "metrics.npz")["episodic_return"]
    finite = np.array([row[np.isfinite(row)][-1] for row in returns if np.isfinite(row).any()])
    lines = finished[1].splitlines()
    said = (
        f"training return: mean {finite.mean():.4g}, worst agent {finite.min():.4g}"
        if len(finite)
        else ""
    )
    lost = f"{4 - len(finite)} of 4 seeds diverged, or ended no episode"
    assert (said in lines) == (len(finite) > 0)
    assert (lost in lines) == (len(finite) < 4)


@pytest.mark.common
def test_no_run_is_overwritten(script, finished, monkeypatch):
    before = {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}
    monkeypatch.setenv("HOME", str(finished[0].parent))
    with pytest.raises(FileExistsError, match=re.escape(f"run_dir = {finished[0]}")):
        run_script(script, *flags(small_config(script)), f"--run-dir=~/{finished[0].name}")
    assert before == {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}


# --- what is computed of a run ---


@pytest.mark.common
def test_mean_return_by_hand(script):
    metrics = {
        "episodes": np.array([[2, 0, 1], [0, 0, 0], [1, 1, 0], [1, 1, 0]]),
        "episodic_return": np.array(
            [[3.0, np.nan, 6.0], [np.nan] * 3, [1.0, np.inf, np.nan], [1.0, np.nan, np.nan]]
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(script.mean_return(metrics), [4.0, np.nan, np.inf, np.nan])


@pytest.mark.common
def test_results_where_a_seed_has_diverged(script, tmp_path):
    """Agents may be any tree."""
    returns = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, np.inf, np.nan]])
    metrics = {"episodes": np.ones((2, 4)), "episodic_return": returns}
    config = small_config(script)
    agent = {"layers": [np.zeros((2, 2)), np.ones((2, 3))], "w": {3: np.zeros((2, 1))}}
    script.save_results("", np.int64(7).item(), b"", agent, metrics, tmp_path)
    script.draw_learning_curve(config, metrics, tmp_path)
    assert matplotlib.image.imread(tmp_path / "learning_curve.png").std() > 0.01
    with safe_open(tmp_path / "agent.safetensors", "numpy") as file:
        assert set(file.keys()) == {"layers.0", "layers.1", "w.3"}
        assert "seed: 7" in file.metadata()["run"]


@pytest.mark.common
def test_final_return_by_hand(script):
    """Where no episode ended in the last tenth, the last return before it; NaN for lost seeds."""
    episodes = np.zeros((4, 20))
    episodes[0, [3, 18, 19]] = 1, 2, 1
    episodes[1, [3, 7]] = 1, 3
    episodes[2, [5, 19]] = 1, 1
    returns = np.where(episodes > 0, np.arange(20.0), np.nan)
    agent = {"w": np.array([[0.0], [0.0], [np.nan], [0.0]])}
    metrics = {"episodes": episodes, "episodic_return": returns}
    final = script.final_return(agent, metrics, num_updates=20)
    np.testing.assert_allclose(final, [(2 * 18 + 19) / 3, 7, np.nan, np.nan])
    # stopped before 200 updates: a tenth of these counts, as in the package
    final = script.final_return(agent, metrics, num_updates=200)
    expected = statistics.final_return(metrics, num_updates=200)
    np.testing.assert_allclose(final[[0, 1]], expected[[0, 1]])
    np.testing.assert_allclose(final[0], (3 + 2 * 18 + 19) / 4)
    # an infinity, as in a buffer that begins with -inf, is no divergence
    infinite = {"w": np.full((4, 1), -np.inf)}
    assert np.isfinite(script.final_return(infinite, metrics, num_updates=20)[:3]).all()


@pytest.mark.common
def test_values_of_numpy_become_those_of_python(script, tmp_path):
    """A loop over `np.arange(3)` or `np.logspace` works."""
    hints = get_type_hints(script.Config)
    field = next(name for name in hints if hints[name] is float)
    for number in (np.float32(0.5), jnp.float32(0.5)):
        config = dataclasses.replace(script.Config(), **{field: number})
        assert yaml.safe_load(script.as_yaml(config))[field] == 0.5
    with pytest.raises(yaml.YAMLError):
        script.as_yaml(dataclasses.replace(config, **{field: object()}))
    with pytest.raises(TypeError, match="integer"):
        script.main(small_config(script), seed=1.5, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"^num_seeds = 0"):
        script.main(script.Config(), num_seeds=0)
    whole = dataclasses.replace(script.Config(), total_timesteps=2e4).total_timesteps
    assert (whole, type(whole)) == (20_000, int)


@pytest.mark.common
def test_metrics_without_episodes_are_named(script):
    learner = (jax.random.key_data, lambda state: (state, {"loss": state.sum()}))
    with pytest.raises(ValueError, match="metrics lack `episodes`"):
        next(script.train_in_chunks(small_config(script), learner, num_seeds=1, seed=0))


@pytest.mark.common
def test_an_error_in_the_algorithm_keeps_its_traceback(script, tmp_path, monkeypatch):
    make_learner = script.make_learner

    def broken(config):
        init, _ = make_learner(config)

        def update(state, _=None):
            raise TypeError("a mistake of mine")

        return init, update

    monkeypatch.setattr(script, "make_learner", broken)
    with pytest.raises(TypeError, match="a mistake of mine"):
        run_script(
            script, *flags(small_config(script)), "--num-seeds=1", f"--run-dir={tmp_path / 'run'}"
        )
    assert not [*tmp_path.glob("run/*")], "what has made no update is no run"


# --- as processes ---


def process(script, folder: Path, words, stderr=subprocess.PIPE, **env):
    """The script copied alone into an empty folder, as it is run there."""
    shutil.copy(script.__file__, folder)
    bare = {"PYTHONPATH": "", "PATH": "", **env}  # no sibling to import
    return subprocess.Popen(
        [sys.executable, f"{script.__name__}.py", *map(str, words)],
        cwd=folder,
        env=os.environ | bare,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@pytest.mark.common("q_learning_gridworld")
def test_alone_in_an_empty_folder_on_four_devices(script, tmp_path):
    """And nothing crosses the devices: their program has no collective operation."""
    words, dump = [*flags(shifted_config(script)), "--num-seeds=4"], tmp_path / "dump"
    usual = os.environ.get("XLA_FLAGS", "")
    dumps = f"{usual} --xla_dump_to={dump} --xla_dump_hlo_module_re=.*on_all_devices.*"
    env = {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": dumps, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    running = process(script, tmp_path, words, **env)
    said, complaints = running.communicate(timeout=300)
    assert running.returncode == 0, complaints
    # no progress bar, as stderr is no terminal
    assert "Traceback" not in complaints and "step" not in complaints
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {f"{script.__name__}.py", "__pycache__", "runs", "dump"}
    (run_dir,) = (tmp_path / "runs" / script.__name__).iterdir()
    assert f"results in {run_dir.relative_to(tmp_path)}" in said
    assert_close(
        trained(script) | {"metrics": dict(np.load(run_dir / "metrics.npz"))}, trained(script)
    )
    program = "".join(path.read_text() for path in dump.glob("*after_optimizations.txt"))
    assert "num_partitions=4" in program
    assert not re.findall(
        r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", program
    )


class Terminal:
    """What a process writes to a terminal, as far as it has come."""

    def __init__(self):
        self.end, self.stderr = pty.openpty()
        termios.tcsetwinsize(self.stderr, (24, 100))  # else it has no columns for a bar
        self.said = ""
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        with contextlib.suppress(OSError):  # the process has ended
            while True:
                self.said += os.read(self.end, 4096).decode(errors="replace")


@pytest.mark.common("q_learning_gridworld")
@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_ends_training_and_keeps_what_there_is(script, number, tmp_path):
    config = small_config(script, num_updates=300_000)
    words = [*flags(config), "--num-seeds=2", "--run-dir=run"]
    terminal = Terminal()
    running = process(script, tmp_path, words, stderr=terminal.stderr)
    os.close(terminal.stderr)
    deadline = time.monotonic() + 120
    while "episodic_return" not in terminal.said and time.monotonic() < deadline:
        time.sleep(0.05)  # until the first update is done
    time.sleep(1)
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, terminal.said
    curve = "learning curve: run/learning_curve.png"
    assert re.search(rf"stopped after \d+ of 300000 updates\n{curve}\nresults in run\n$", said)
    assert "Traceback" not in terminal.said
    assert "step/s" in terminal.said  # the progress bar
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = {"config.yaml", "metrics.npz", "learning_curve.png", "agent.safetensors"}
    assert names >= files | {f"{script.__name__}.py"}
    metrics = np.load(tmp_path / "run" / "metrics.npz")
    assert 0 < metrics["episodes"].shape[1] < config.num_updates
    assert f"stopped after {metrics['episodes'].shape[1]} " in said
    agents = load_file(tmp_path / "run" / "agent.safetensors")
    assert all(np.isfinite(leaf).all() and len(leaf) == 2 for leaf in agents.values())


@pytest.mark.common
def test_signals_are_caught_once_and_handlers_are_put_back(script):
    """A second signal meets the system's default, which ends the program at once."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyError), script.catch_signals() as signals:
        assert signals == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        assert signals == [signal.SIGTERM, signal.SIGINT]
        raise KeyError
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.common
def test_main_in_another_thread(script, tmp_path):
    """Where Python allows no handlers of signals."""
    failed = []

    def work():
        try:
            script.main(small_config(script), num_seeds=1, run_dir=str(tmp_path / "run"))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and (tmp_path / "run" / "agent.safetensors").is_file()


def test_the_most_devices_that_divide_the_seeds(monkeypatch):
    """Of four, six seeds use three, two on each; five seeds use one."""
    script = importlib.import_module("ppo_continuous")
    devices = []

    def remember(used, names):
        devices.append(len(used))
        return mesh(one_device, names)

    mesh = jax.sharding.Mesh
    one_device = jax.devices()[:1]
    monkeypatch.setattr(script.jax, "device_count", lambda: 4)
    monkeypatch.setattr(script.jax, "devices", lambda: 4 * one_device)
    monkeypatch.setattr(script.jax.sharding, "Mesh", remember)
    for num_seeds in (6, 5, 4, 1):
        script.spread_over_devices(lambda x: x, num_seeds)
    assert devices == [3, 1, 4, 1]


@pytest.mark.common
def test_diverged_agents_are_counted(script, tmp_path, capsys, monkeypatch):
    """argmax over logits that are no numbers is action 0, whose return is finite.

    The parameters tell. A minute passes in each chunk: without a terminal, each has a line.
    """
    monkeypatch.setattr(time, "monotonic", itertools.count(step=61).__next__)
    rates = [name for name in ("lr", "policy_lr", "q_lr") if name in field_names(script)]
    config = small_config(script, **dict.fromkeys(rates, 1e38))
    script.main(config, num_seeds=3, run_dir=tmp_path / "run")
    said = capsys.readouterr().out
    assert "3 of 3 seeds diverged" in said and "training return" not in said
    assert len(re.findall("step/s.*\n", said)) == config.num_updates


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system does not tell which cores may be used"
)
def test_devices_are_the_cores_that_may_be_used_and_programs_are_kept(tmp_path):
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "import q_learning_gridworld, jax\n"
    code += "print(jax.device_count(), jax.config.jax_compilation_cache_dir)"
    usual = tmp_path / ".cache" / "onejit" / f"jax-{platform.node()}"
    mine = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
    }
    for chosen, expected in (({}, f"1 {usual}"), (mine, f"3 {tmp_path}")):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))
        }
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)} | chosen
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize("environment", ["gymnasium", slow("envpool")])
def test_a_signal_keeps_the_results_with_environments_on_the_host(environment, tmp_path):
    """It lands while Python steps the environments; tests/stress/interrupts.py has more moments."""
    pytest.importorskip(environment)
    stress = runpy.run_path(str(ROOT / "tests" / "stress" / "interrupts.py"))
    env_name = stress["ENVIRONMENTS"][environment]
    assert stress["interrupt"](env_name, signal.SIGINT, [0.2], tmp_path) == []


@pytest.mark.parametrize(
    ("num_updates", "num_states", "missing"),
    [
        (20_000, 10, {"metrics.npz"}),
        (10, 20_000, {"agent.safetensors"}),
        (20_000, 20_000, {"metrics.npz", "agent.safetensors"}),
    ],
)
def test_a_script_on_a_full_disk_writes_what_fits(
    num_updates, num_states, missing, full_disk, tmp_path
):
    """The lines of the traceback name what does not fit, and nothing else is lost but a picture."""
    script = load.load_script("q_learning_gridworld")
    returns = np.random.default_rng(0).normal(size=(2, num_updates))
    metrics = {"episodes": np.ones((2, num_updates)), "episodic_return": returns}
    agent = {"q": np.zeros((2, num_states))}
    with full_disk("files", 20_000), pytest.raises(OSError, match="File too large") as caught:
        script.save_results("", 0, b"", agent, metrics, tmp_path)
    said = "".join(traceback.format_exception(caught.value))
    assert set(re.findall(r'run_dir / "(.*?)"', said)) == missing
    if "metrics.npz" in missing:  # without the arrays that do not fit
        assert "episodic_return" not in load_arrays(tmp_path / "metrics.npz")
    else:
        assert load_arrays(tmp_path / "metrics.npz").keys() == metrics.keys()
    if "agent.safetensors" in missing:  # cut off
        with pytest.raises(SafetensorError, match="incomplete"):
            load_file(tmp_path / "agent.safetensors")
    else:
        assert load_file(tmp_path / "agent.safetensors")["q"].shape == (2, num_states)


def load_arrays(path: Path) -> dict:
    with np.load(path) as stored:
        return dict(stored)
