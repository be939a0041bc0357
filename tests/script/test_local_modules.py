"""Modules of the user's own in a run directory, and run directories of others."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from support.files import ROOT

from onejit import __main__, resume, train
from onejit.run.directory import load_results, load_run
from onejit.run.record import read_record
from onejit.run.resume import ResumeOptions
from onejit.script import load, local_modules
from onejit.script.local_modules import installed_in

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


def test_imports_that_are_relative_without_a_package():
    """As in a script that is a module of a package, too."""
    source = b"try:\n    from .helper import f\nexcept ImportError:\n    from helper import f\n"
    assert local_modules.imported_names(source, package="") == ["helper", "helper", "helper.f"]
    assert "a.helper" in local_modules.imported_names(source, package="a")


# --- run directories of others ---


def write_run(run_dir: Path, script: str, env_name: str = "GridWorld", record=None) -> Path:
    """A run directory that holds arrays, YAML and JSON alone."""
    run_dir.mkdir(exist_ok=True)
    table = np.zeros((1, 4, 12, 4), np.float32)
    metadata = {"script": script, "seed": "0"}
    save_file({"q": table}, run_dir / "agent.safetensors", metadata)
    counts = np.ones((1, 20))
    np.savez(run_dir / "metrics.npz", episodes=counts, episodic_return=counts)
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
