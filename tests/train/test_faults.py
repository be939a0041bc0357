"""Faults that cost work or execute what they should not: damaged checkpoints, modules that change,
foreign run directories, signals, and an output that nobody reads. dev/faults.md lists them.
"""

import dataclasses
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
import yaml
from brax import envs as brax_envs
from gymnax.environments import spaces
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from support.files import ROOT
from support.tiers import slow

import mappo
import ppo_continuous
from onejit import __main__, resume, train
from onejit.base import signals
from onejit.engine import checkpoints
from onejit.engine.carry import Carry
from onejit.engine.checkpoints import open_checkpoints, restore, save
from onejit.run.directory import load_results, load_run
from onejit.run.lock import holding
from onejit.run.record import Record, read_record
from onejit.run.resume import ResumeOptions
from onejit.run.write import begin_run, write_inputs
from onejit.script import load, local_modules
from onejit.script.configs import write_config
from onejit.script.environment import check_observations
from onejit.script.local_modules import installed_in

# --- damaged checkpoints ---


ARRAYS = "default/d/arrays"


def make_checkpoint(directory: Path, step: int, with_checksums: bool = True) -> Path:
    """Files in the places where Orbax writes them."""
    folder = directory / str(step)
    (folder / ARRAYS).parent.mkdir(parents=True)
    (folder / "_METADATA").write_text("{}")
    (folder / ARRAYS).write_bytes(bytes(range(256)))
    if with_checksums:
        checkpoints.write_checksums(folder)
    return folder


def truncate(folder):
    (folder / ARRAYS).write_bytes(bytes(range(50)))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (ARRAYS, bytes(range(50)), "default/d/arrays has another checksum"),
        (ARRAYS, bytes([1, *range(1, 256)]), "default/d/arrays has another checksum"),  # one bit
        ("_METADATA", None, "_METADATA is missing"),
        (checkpoints.CHECKSUMS, None, "was not written completely"),
        (checkpoints.CHECKSUMS, b'{"_METADATA"', "checksums.json cannot be read"),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(file, content, words, tmp_path, capsys):
    directory = tmp_path / "checkpoints"
    for step in (9, 10, 20):
        make_checkpoint(directory, step)
    (directory / "20" / file).unlink()
    if content is not None:
        (directory / "20" / file).write_bytes(content)
    checkpoints.delete_damaged(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["10", "9"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "checkpoints/20 is damaged: " in said and words in said
    assert said.endswith("deleted, and checkpoints/10 is used\n")


def test_without_an_intact_checkpoint_nothing_is_deleted(tmp_path):
    directory = tmp_path / "checkpoints"
    for step in (10, 20):
        truncate(make_checkpoint(directory, step))
    with pytest.raises(OSError, match="no checkpoint is intact; checkpoints/20 is damaged: its f"):
        checkpoints.delete_damaged(directory)
    assert len(list(directory.iterdir())) == 2


@pytest.mark.parametrize("steps", [(), (10,), (10, 20)])
def test_the_first_checkpoints_may_lack_checksums(steps, tmp_path, capsys):
    for step in steps:
        make_checkpoint(tmp_path, step, with_checksums=False)
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()  # of a kill; Orbax deletes it
    checkpoints.delete_damaged(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(steps) + 1 and not capsys.readouterr().err


def test_an_older_checkpoint_without_checksums_stands_in(tmp_path, capsys):
    make_checkpoint(tmp_path, 10, with_checksums=False)
    truncate(make_checkpoint(tmp_path, 20))
    checkpoints.delete_damaged(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


# --- modules of the user's own ---

SCRIPT = """
from rules_of_mine.reward import scale

_step = GridWorld.step


def scaled_step(self, *args):
    obs, state, reward, *rest = _step(self, *args)
    return obs, state, scale(reward), *rest


GridWorld.step = scaled_step
"""
FILES = {
    "rules_of_mine/__init__.py": "",
    "rules_of_mine/reward.py": "from . import numbers\n\n\ndef scale(reward):\n"
    "    return reward * numbers.SCALE\n",
    "rules_of_mine/numbers.py": "import unused_by_mine\n\nSCALE = 2.0\n",
    "unused_by_mine.py": "import json\n\nimport numpy\n",
    "not_imported_by_mine.py": "",
}
SMALL = ["--total-timesteps=200", "--num-steps=100", "--num-seeds=1", "--eval-episodes=0"]


def forget_modules():
    """As in a new process."""
    for name in list(sys.modules):
        if name.startswith(("rules_of_mine", "unused_by_mine", "script_mine")):
            del sys.modules[name]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A script that imports modules of its own, in the working directory."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    gridworld = (ROOT / "q_learning_gridworld.py").read_text()
    banner = "# --- main (shared) ---"
    assert banner in gridworld
    (folder / "mine.py").write_text(gridworld.replace(banner, f"{SCRIPT}\n\n{banner}"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within a second
    forget_modules()
    yield folder
    forget_modules()


def test_the_modules_of_a_run_are_copied_and_its_copies_are_used(project, capsys):
    run_dir = train.main(["mine.py", *SMALL, "--run-dir=run"]).absolute()
    record = read_record(run_dir)
    copied = {name for name in FILES if name != "not_imported_by_mine.py"}
    assert set(record.modules) == copied
    for name in copied:
        assert (run_dir / "modules" / name).read_text() == FILES[name]

    (project / "rules_of_mine" / "numbers.py").write_text("SCALE = 5.0\n")
    forget_modules()
    load.load_script("mine.py")
    with pytest.raises(ValueError, match=r"another module rules_of_mine.numbers, .* a new process"):
        load_run(run_dir)
    forget_modules()
    script, config, _ = load_run(run_dir)
    numbers = sys.modules["rules_of_mine.numbers"]
    assert numbers.SCALE == 2.0 and Path(numbers.__file__).is_relative_to(run_dir)
    env, env_params = script.make_env(config)
    _, state = env.reset(jax.random.key(0), env_params)
    reward = env.step(jax.random.key(0), state, jnp.int32(0), env_params)[2]
    assert reward == 2.0 * config.step_reward

    resume.main(run_dir, ResumeOptions(total_timesteps=300))
    assert sys.modules["rules_of_mine.numbers"].SCALE == 2.0
    assert load_results(run_dir).metrics["episodes"].shape == (1, 3)

    copy = run_dir / "modules" / "rules_of_mine" / "numbers.py"
    copy.write_text("SCALE = 7.0\n")
    forget_modules()
    warning = f"{copy}: is not as it was when the run began"
    load_run(run_dir)
    assert sys.modules["rules_of_mine.numbers"].SCALE == 7.0
    assert warning in capsys.readouterr().err
    copy.unlink()
    forget_modules()
    with pytest.raises(ImportError, match="numbers"):
        load_run(run_dir)
    assert warning in capsys.readouterr().err


def test_a_module_that_is_edited_while_its_run_compiles(project):
    """The run directory gets the text that trains."""
    script = load.load_script("mine.py")
    local_modules.read_sources(script, [])
    (project / "rules_of_mine" / "numbers.py").write_text("SCALE = 5.0\n")
    sources = local_modules.read_sources(script, [])
    assert b"SCALE = 2.0" in sources["rules_of_mine/numbers.py"]


def test_the_name_of_a_copy_of_compiled_code():
    assert local_modules.name_of("fast.cpython-311-x86_64-linux-gnu.so") == "fast"


def test_the_modules_of_onejit_and_of_packages_are_not_copied():
    names = ["onejit.envs.gymnasium:CartPole-v1", "gymnax.environments:CartPole-v1", "CartPole-v1"]
    assert local_modules.read_sources(load.load_script("ppo"), names) == {}


def test_packages_that_pip_has_put_into_another_folder_are_not_copied(project):
    """`pip install --target` leaves no site-packages in the path. Packages may need their data."""
    record = project / "rules_of_mine-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("rules_of_mine/__init__.py,,\nrules_of_mine/numbers.py,,\n../bin/rules,,\n")
    assert local_modules.read_sources(load.load_script("mine.py"), []) == {}
    record.write_text("unused_by_mine.py,,\n")
    installed_in.cache_clear()
    sources = local_modules.read_sources(load.load_script("mine.py"), [])
    assert set(sources) == {name for name in FILES if name.startswith("rules_of_mine")}


# --- run directories of others ---


def write_run(run_dir: Path, script: str, env_name: str = "GridWorld", record=None) -> Path:
    """A run directory that holds arrays, YAML and JSON alone."""
    run_dir.mkdir(exist_ok=True)
    table = np.zeros((1, 4, 12, 4), np.float32)
    metadata = {"script": script, "seed": "0"}
    save_file({"q": table}, run_dir / "agent.safetensors", metadata)
    counts = np.ones((1, 20))
    np.savez(run_dir / "metrics.npz", episodes=counts, episodic_return=counts)
    if script == "ppo":
        config = dataclasses.replace(load.load_script("ppo").Config(), env_name=env_name)
        write_config(run_dir / "config.yaml", config)
    else:
        (run_dir / "config.yaml").write_text(yaml.safe_dump({"env_name": env_name}))
    if record is not None:
        settings = {"script": script, "num_seeds": 1, "seed": 0, "env_name": env_name}
        defaults = {"kind": "train", "settings": settings, "versions": {}, "options": {}}
        (run_dir / "run.json").write_text(json.dumps(defaults | record))
    return run_dir


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A file elsewhere, which leaves a trace if it is executed, and the working directory."""
    (tmp_path / "evil").mkdir()
    path = tmp_path / "evil" / "pwn.py"
    path.write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path / "evil")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop("pwn", None)


@pytest.mark.parametrize("script", ["{evil}/pwn", "../evil/pwn", "pwn"])
def test_a_directory_without_a_script_executes_no_file_elsewhere(script, evil, tmp_path):
    run_dir = write_run(tmp_path / "run", script.replace("{evil}", str(evil.parent)))
    with pytest.raises(ValueError, match=r"pwn.py: does not exist, and onejit has no script of"):
        load_run(run_dir)
    assert not (tmp_path / "trace").exists()


def test_list_and_compare_execute_nothing(evil, tmp_path, monkeypatch):
    """Neither scripts nor modules, of this directory or another."""
    executed = []

    def execute(*arguments):
        executed.append(arguments)
        raise AssertionError("executed")  # which `list` would show in its table

    run_dir = write_run(tmp_path / "run", "pwn", env_name="pwn:Mine")
    record = {"modules": {"pwn.py": "{hash}"}, "finished": "now"}
    other = write_run(tmp_path / "other", "pwn", env_name="pwn:Mine", record=record)
    for folder in (run_dir, other, other / "modules"):
        folder.mkdir(exist_ok=True)
        (folder / "pwn.py").write_text(evil.read_text())
    monkeypatch.setattr(load, "execute", execute)
    monkeypatch.setattr(local_modules, "import_copies", execute)
    __main__.main(["list", str(tmp_path)])
    out = tmp_path / "compared"
    __main__.main(["compare", f"a={run_dir}", f"b={other}", "--out", str(out)])
    assert out.is_dir() and "pwn" not in sys.modules and not (tmp_path / "trace").exists()
    assert not executed


def test_a_script_in_the_working_directory_does_not_stand_in(tmp_path, monkeypatch, capsys):
    """Onejit's script of this name does, and a warning names it if the hash is another version's.

    The copy that a script's own `main` leaves is used first. It leaves no hash.
    """
    run_dir = write_run(tmp_path / "run", "q_learning_gridworld")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q_learning_gridworld.py").write_text("raise RuntimeError('not this one')")
    own = ROOT / "q_learning_gridworld.py"
    script, _, _ = load_run(run_dir)
    said = capsys.readouterr()
    assert script.__file__ == str(own) and not said.err
    assert f"has no copy of its script; {own} is used instead" in said.out

    copy = run_dir / own.name
    copy.write_text(own.read_text())
    assert load_run(run_dir)[0].__file__ == str(copy)
    copy.unlink()

    write_run(run_dir, "q_learning_gridworld", record={"sha256": "of another version"})
    assert load_run(run_dir)[0] is script
    assert f"{own}: is not as it was when the run began" in capsys.readouterr().err
    of_this_version = {"sha256": local_modules.hash_of(own.read_bytes())}
    write_run(run_dir, "q_learning_gridworld", record=of_this_version)
    assert load_run(run_dir)[0] is script and not capsys.readouterr().err


def test_a_run_directory_is_claimed_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    """The second of two processes is refused, and a start that fails leaves no directory."""
    run_dir = tmp_path / "run"
    words = ["q_learning_gridworld", "--total-timesteps=2000", f"--run-dir={run_dir}"]

    def compile_slices(*args, **options):
        assert [path.name for path in run_dir.iterdir()] == [".lock"]
        with pytest.raises(SystemExit):
            train.main(words)
        assert "another process is writing into this run" in capsys.readouterr().err
        raise ValueError("this config cannot be compiled")

    monkeypatch.setattr(train.compilation, "compile_slices", compile_slices)
    with pytest.raises((ValueError, SystemExit)):
        train.main(words)
    assert not run_dir.exists()


def test_a_run_directory_that_is_a_volume_or_a_link(small_disk, tmp_path):
    """The results are written into it; when a start fails it stays, empty."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    script = load.load_script("q_learning_gridworld")
    for run_dir in (link, small_disk(1_000_000)):
        with pytest.raises(StopIteration), holding(run_dir, is_new=True):
            write_inputs(run_dir, script.Config(), script, {})
            raise StopIteration
        assert not any(run_dir.iterdir())
        with holding(run_dir, is_new=True):
            begin_run(run_dir, script.Config(), Record(settings={}), script, {})
        assert (run_dir / "run.json").is_file()
        with pytest.raises(ValueError, match="already exists"), holding(run_dir, True):
            pass


@pytest.mark.parametrize("name", ["lr=0.001,hidden_sizes=[64,64]", b"r\xe9sum\xe9"])
def test_checkpoints_in_a_folder_of_any_name(name, tmp_path):
    """Orbax takes the path for a pattern, and needs names that are UTF-8."""
    folder = tmp_path / os.fsdecode(name) / "checkpoints"
    carry = Carry({}, {"loss": jnp.arange(6.0).reshape(2, 3)})
    program = SimpleNamespace(abstract=jax.eval_shape(lambda: carry))
    with open_checkpoints(folder) as manager:
        save(manager, 1, carry)
    assert not checkpoints.damage_of(folder / "1")
    with open_checkpoints(folder) as manager:
        loss = restore(manager, 1, program).metrics["loss"]
    np.testing.assert_array_equal(loss, [[0, 1, 2], [3, 4, 5]])


def test_imports_that_are_relative_without_a_package():
    """As in a script that is a module of a package, too."""
    source = b"try:\n    from .helper import f\nexcept ImportError:\n    from helper import f\n"
    assert local_modules.imported_names(source, package="") == ["helper", "helper", "helper.f"]
    assert "a.helper" in local_modules.imported_names(source, package="a")


# --- signals ---


@pytest.fixture
def handlers():
    """The handlers of signals are as before after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    original = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not ignored, as under nohup
    before = {number: signal.getsignal(number) for number in numbers}
    yield before
    for number, handler in original.items():
        signal.signal(number, handler)


def test_a_closed_terminal_is_like_sigterm(handlers):
    """It may send SIGHUP several times, and SIGTERM later."""
    with signals.catching_signals() as caught:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP]
        # a second one acts as usual
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]
    assert signal.getsignal(signal.SIGHUP) == handlers[signal.SIGHUP]


def test_nohup_stays_in_force(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.catching_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
    assert caught == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


BLOCKED = """
import hashlib
from onejit.base import signals
with signals.catching_signals(){opened}:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)  # minutes, without Python's handlers
"""


@pytest.mark.parametrize(
    ("opened", "numbers", "said"),
    [
        ("", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], "stopped at once"),
        (", signals.ending_at_once('saved')", [signal.SIGTERM], "saved"),
    ],
)
def test_signals_end_a_process_whose_main_thread_is_blocked(opened, numbers, said):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(opened=opened)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.01)
        process.send_signal(number)  # a wrapper that passes it on; both count as one
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, f"{said}\n")


@pytest.mark.parametrize("environment", ["gymnasium", slow("envpool")])
def test_a_signal_keeps_the_results_with_environments_on_the_host(environment, tmp_path):
    """It lands while Python steps the environments; tests/stress/interrupts.py has more moments."""
    pytest.importorskip(environment)
    stress = runpy.run_path(str(ROOT / "tests" / "stress" / "interrupts.py"))
    env_name = stress["ENVIRONMENTS"][environment]
    assert stress["interrupt"](env_name, signal.SIGINT, [0.2], tmp_path) == []


def test_a_stress_test_that_killed_nothing_fails(monkeypatch, tmp_path):
    stress = runpy.run_path(str(ROOT / "tests" / "stress" / "kill_and_resume.py"))
    functions = stress["main"].__globals__
    monkeypatch.setitem(functions, "run_whole", lambda *_: 0.0)
    monkeypatch.setitem(functions, "kill_again_and_again", lambda *_: {"killed after a commit": 0})
    monkeypatch.setattr(sys, "argv", ["kill_and_resume.py", "module"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match="no kill came after a checkpoint"):
        stress["main"]()


def test_a_script_that_fails_leaves_no_directory(tmp_path):
    script = load.load_script("q_learning_gridworld")
    with pytest.raises(ValueError, match="total_timesteps"):
        script.main(script.Config(total_timesteps=1), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


SWALLOWS = """
import os
import signal

try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
open("imported", "w").close()
"""


def test_ctrl_c_that_an_import_swallows_is_raised_after_it(handlers, tmp_path, monkeypatch):
    """Python's own import system swallows it in a callback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    with pytest.raises(KeyboardInterrupt):
        load.load_script("swallows.py")
    assert (tmp_path / "imported").exists()
    assert not any(name.startswith("script_swallows") for name in sys.modules)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- an output that nobody reads ---

PRINTS = """
import sys
from onejit.base.output import survive_closed_output

survive_closed_output()
for i in range(100):
    print("x" * 10_000, flush=i % 2)
    print("y" * 10_000, file={file})
print("done", file=open("done", "w"))
"""


@pytest.mark.parametrize("file", ["sys.stdout", "sys.stderr"])
def test_printing_goes_on_without_a_reader(file, tmp_path):
    command = [sys.executable, "-c", PRINTS.format(file=file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdout.close()
        if file == "sys.stderr":
            process.stderr.close()
            process.stderr = None
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").read_text() == "done\n"


def test_what_is_printed_arrives():
    code = "from onejit.base.output import survive_closed_output as f; f(); print('\u00e9'); 1 / 0"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=60, encoding="utf-8")
    assert done.stdout == "\u00e9\n" and "ZeroDivisionError" in done.stderr


def test_output_in_ascii_shows_all_names(tmp_path, monkeypatch):
    """Also names of files that are not UTF-8."""
    write_run(tmp_path / os.fsdecode(b"r\xe9sum\xe9"), "mine", env_name="\u03c0")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    __main__.main(["list", tmp_path])
    said = output.buffer.getvalue().decode("ascii")
    assert "sum" in said and r"\u03c0" in said


@pytest.mark.slow
def test_a_training_goes_on_without_a_reader(tmp_path):
    command = [sys.executable, "-m", "onejit", "train", "q_learning_gridworld", *SMALL]
    command.append("--run-dir=run")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert read_record(tmp_path / "run").finished


# --- mistakes ---


OBSERVES = """
import gymnax
import jax.numpy as jnp
from gymnax.environments.classic_control import cartpole


class Mine(cartpole.CartPole):
    def get_obs(self, *args, **kwargs):
        return {code}


gymnax.register("{name}", Mine)
"""


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("Larger", "jnp.zeros(5)", r"shape \(5,\) and dtype float32"),
        ("Bytes", "jnp.zeros(4, jnp.uint8)", r"shape \(4,\) and dtype uint8"),
        ("AsDeclared", "jnp.zeros(4)", ""),
        ("WholeNumbers", "jnp.zeros(4, int)", ""),
    ],
)
def test_observations_are_as_their_space_declares(name, code, found, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"observes_{name}.py").write_text(OBSERVES.format(code=code, name=name))
    script = load.load_script("ppo")
    config = dataclasses.replace(script.Config(), env_name=f"observes_{name}:{name}")
    if not found:
        check_observations(script, config)
        return
    with pytest.raises(ValueError, match=f"its observations have {found}, but its .* float32"):
        check_observations(script, config)


class Odd(toys.ToyDiscrete):
    """The time limit is within `terminated`, or the first states are 3 and 4."""

    def __init__(self, limit=10, states=False):
        self.limit = limit
        self.states = states

    @property
    def default_params(self):
        return toys.EnvParams(max_steps_in_episode=self.limit)

    def observe(self, key, state, action, params):
        return 3 + state.time if self.states else super().observe(key, state, action, params)

    def observation_space(self, params):
        return spaces.Discrete(4) if self.states else super().observation_space(params)


gymnax.register("of_a_user:Odd", Odd)


def test_one_step_shows_what_a_users_environment_does_wrong(monkeypatch, capsys):
    """The toy terminates after 5 steps. Only where this is its limit is there a warning."""
    monkeypatch.setitem(sys.modules, "of_a_user", types.ModuleType("of_a_user"))
    script = load.load_script("ppo")
    default = dataclasses.replace(script.Config(), env_name="of_a_user:Odd")

    def check(**env_params):
        config = dataclasses.replace(default, env_params=env_params)
        check_observations(script, config)
        return capsys.readouterr().err

    assert not check()
    assert "`terminated` is true at the time limit, max_steps_in_episode = 5" in check(limit=5)
    with pytest.raises(ValueError, match=r"observes states 3 to 4, but its .* has 0 to 3"):
        check(states=True)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("ForbidsAll", "jnp.zeros(4), jnp.zeros(2, bool)", "its action_mask forbids every action"),
        ("MaskedLarger", "jnp.zeros(5), jnp.ones(2, bool)", r"its observations have shape \(5,\)"),
    ],
)
def test_observations_with_a_mask(name, code, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    text = OBSERVES.format(code=f"Masked({code})", name=name)
    text += (
        "\nfrom collections import namedtuple\nMasked = namedtuple('Masked', 'obs action_mask')\n"
    )
    (tmp_path / f"observes_{name}.py").write_text(text)
    script = load.load_script("ppo")
    config = dataclasses.replace(script.Config(), env_name=f"observes_{name}:{name}")
    with pytest.raises(ValueError, match=message):
        check_observations(script, config)


# --- the precision of physics ---


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
