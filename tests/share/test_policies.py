"""Policies as files: they act as `act` does, in Gymnasium, by the programs of docs/agents.md.

The programs run in processes that cannot import onejit.
"""

import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.files import ROOT, SCRIPTS
from support.small import small_config

from onejit import __main__
from onejit.engine.evaluation import policy_of
from onejit.run.agents import save_agents
from onejit.run.directory import load_run
from onejit.script.configs import write_config
from onejit.script.load import load_script
from onejit.share import export as export_command
from onejit.share import policy as policies

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: it is in the extra export")
gymnasium = pytest.importorskip("gymnasium")
CARTPOLE = ROOT / "agents" / "ppo_cartpole"
PAGE = (ROOT / "docs" / "agents.md").read_text()


def run_program(name, folder, *words):
    """What a program of the page prints, as numbers."""
    (code,) = re.findall(rf'(?s)```python\n("""{name}:.*?)```', PAGE)
    (folder / name).write_text(f"import sys\n\nsys.modules['onejit'] = None\n{code}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if "PYTHONPATH" in os.environ:  # where packages may be, but not the repository
        parts = os.environ["PYTHONPATH"].split(os.pathsep)
        kept = [part for part in parts if part and not os.path.samefile(part, ROOT)]
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    done = subprocess.run(
        [sys.executable, str(folder / name), *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def returns_of_act(run_dir, env_name, episodes=3):
    """The returns of `act` in Gymnasium. Continuous actions are rescaled as the manual says."""
    script, config, agents = load_run(run_dir)
    agent = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), agents)
    start, act = policy_of(script, config)
    act = jax.jit(act)
    env = gymnasium.make(env_name)
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        memory = start()
        total = 0.0
        ended = False
        while not ended:
            action, memory = act(agent, memory, obs)
            action = np.asarray(action)
            if action.ndim:
                space = env.action_space
                unit = (np.clip(action, -1, 1) + 1) / 2
                action = (space.low + unit * (space.high - space.low)).astype(space.dtype)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += reward
            ended = terminated or truncated
        returns.append(total)
    return returns


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        __main__.main(["export", *map(str, words)])
    said = capsys.readouterr().err.removesuffix("\n").split("\n")
    errors = [line for line in said if line.startswith("onejit export: error: ")]
    assert stop.value.code == 2 and errors == said[-1:]
    return said[-1]


def untrained(script_name, num_seeds, **overrides):
    """`(script, config, agents)` of agents that have learned nothing."""
    script = load_script(script_name)
    config = small_config(script, **overrides)
    init, _ = script.make_learner(config)
    keys = jax.random.split(jax.random.key(1), num_seeds)
    agents = jit_quickly(jax.vmap(lambda key: init(key).agent))(keys)
    return script, config, jax.device_get(agents)


def save_run(folder, script, config, agents, evaluation=None):
    """A run directory of these agents, with their greedy returns [num_seeds, episodes]."""
    folder.mkdir()
    write_config(folder / "config.yaml", config)
    save_agents(agents, script, 0, folder / "agent.safetensors")
    if evaluation is not None:
        np.savez(folder / "metrics.npz", episodes=np.ones((len(evaluation), 1)))
        np.save(folder / "evaluation.npy", evaluation)
    return folder


# --- in Gymnasium ---


def test_stablehlo_plays_cartpole(tmp_path, capsys):
    path = tmp_path / "cartpole.stablehlo"
    assert export_command.main(CARTPOLE, format="stablehlo", out=path) == [path]
    said = f"agent 0: {path}\nobs [batch, 4] float32 -> action [batch] int32\n"
    assert said in capsys.readouterr().out
    returns = run_program("play_jax.py", tmp_path, path, "CartPole-v1")
    assert returns == returns_of_act(CARTPOLE, "CartPole-v1") == [500.0] * 3


def test_numpy_plays_cartpole(tmp_path):
    (tmp_path / "agents").symlink_to(ROOT / "agents")
    assert run_program("play_numpy.py", tmp_path) == [500.0]


def needs_onnx(form):
    if form == "onnx":
        pytest.importorskip("jax2onnx", reason="pip install --no-deps jax2onnx")
        pytest.importorskip("onnxruntime")


PROGRAMS = {"stablehlo": "play_jax.py", "onnx": "play_onnx.py"}


@pytest.mark.slow
@pytest.mark.parametrize("form", PROGRAMS)
def test_actions_are_in_the_range_of_the_environment(form, tmp_path):
    """Pendulum's are in [-2, 2], and the file gives those."""
    needs_onnx(form)
    run_dir = ROOT / "agents" / "td3_pendulum"
    (path,) = export_command.main(run_dir, format=form, out=tmp_path / f"policy.{form}")
    returns = run_program(PROGRAMS[form], tmp_path, path, "Pendulum-v1")
    np.testing.assert_allclose(returns, returns_of_act(run_dir, "Pendulum-v1"), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", PROGRAMS)
def test_a_policy_with_memory_plays_in_gymnasium(form, tmp_path):
    """And statistics of observations are in the file."""
    needs_onnx(form)
    sizes = {"cell": "gru", "cell_size": 8, "normalize_obs": True, "env_params": {}}
    run_dir = save_run(tmp_path / "run", *untrained("ppo_rnn", 1, **sizes))
    (path,) = export_command.main(run_dir, format=form)
    returns = run_program(PROGRAMS[form], tmp_path, path, "CartPole-v1")
    assert returns == returns_of_act(run_dir, "CartPole-v1") and len(returns) == 3


@pytest.mark.slow
def test_javascript_acts(tmp_path):
    """In Node: the page's example, and with the pole's velocity reversed."""
    needs_onnx("onnx")
    npm = shutil.which("npm") or pytest.skip("npm is missing")
    install = [npm, "install", "--silent", "--ignore-scripts", "onnxruntime-web"]
    if subprocess.run(install, cwd=tmp_path, timeout=300).returncode:
        pytest.skip("onnxruntime-web cannot be installed")
    export_command.main(CARTPOLE, format="onnx", out=tmp_path / "cartpole.onnx")
    (code,) = re.findall(r"(?s)```js\n(.*?)```", PAGE)
    actions = []
    for velocity in ("0.1", "-0.1"):
        (tmp_path / "play.mjs").write_text(code.replace("0.1", velocity))
        done = subprocess.run(
            ["node", "play.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        actions.append(int(done.stdout))
    obs = jnp.array([[0.0, 0.0, velocity, 0.0] for velocity in (0.1, -0.1)])
    np.testing.assert_array_equal(actions, actions_of_cartpole(obs))


def actions_of_cartpole(obs):
    """What the agent of CartPole does for observations [n, 4]."""
    script, config, agents = load_run(CARTPOLE)
    _, act = policy_of(script, config)
    agent = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), agents)
    actions, _ = jax.vmap(act, in_axes=(None, None, 0))(agent, (), obs)
    return actions


def check_cpp_acts(number, libraries, words, folder):
    """The page's program of this number, for 20 observations."""
    code = re.findall(r"(?s)```cpp\n(.*?)```", PAGE)[number]
    (folder / "policy.cpp").write_text(code)
    build = ["g++", "-O2", "-std=c++17", "-Wall", "-Werror", "-o", "policy", "policy.cpp"]
    subprocess.run([*build, *libraries], cwd=folder, check=True, timeout=100)
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    done = subprocess.run(
        ["./policy", *words],
        cwd=folder,
        input=" ".join(map(str, obs.ravel())),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    actions = [int(line) for line in done.stdout.split()]
    np.testing.assert_array_equal(actions, actions_of_cartpole(obs))


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is missing")
def test_cpp_acts(tmp_path):
    """Without a library."""
    check_cpp_acts(1, [], [CARTPOLE / "agent.safetensors"], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("ONNXRUNTIME" not in os.environ, reason="ONNXRUNTIME names no C++ release")
def test_cpp_acts_with_onnx_runtime(tmp_path):
    """With the unpacked release of ONNX Runtime that the variable names."""
    needs_onnx("onnx")
    release = os.environ["ONNXRUNTIME"]
    export_command.main(CARTPOLE, format="onnx", out=tmp_path / "cartpole.onnx")
    libraries = [f"-I{release}/include", f"-L{release}/lib", "-lonnxruntime"]
    libraries += [f"-Wl,-rpath,{release}/lib"]
    check_cpp_acts(0, libraries, ["cartpole.onnx"], tmp_path)


# --- all scripts ---


def exported_policy(script_name, **overrides):
    """The policy of the second of two agents."""
    script, config, agents = untrained(script_name, 2, **overrides)
    return policies.make_policy(script, config, agents, 1)


CASES = [(name, {}) for name in SCRIPTS]
CASES += [
    ("ppo_rnn", {"cell": "mingru"}),
    ("ppo_rnn", {"env_name": "Breakout-MinAtar", "cell_size": 8}),
    ("mappo", {"cell": "gru"}),
    ("alphazero", {"eval_simulations": 4}),
    ("ppo", {"env_name": "Breakout-MinAtar"}),
    ("dqn", {"env_name": "toys:Brightness"}),  # images of bytes
]
WITHOUT_ONNX = [("alphazero", {"eval_simulations": 4})]  # its search draws random numbers


@pytest.mark.slow
@pytest.mark.parametrize("name, overrides", CASES)
def test_stablehlo_acts_as_the_script(name, overrides):
    policy = exported_policy(name, **overrides)
    data, batch = policies.to_stablehlo(policy)
    assert batch == "batch"
    exported = jax.export.deserialize(bytearray(data))
    assert exported.platforms == ("cpu", "cuda")
    for size in (1, 5):
        inputs = policies.random_inputs(policy, size).values()
        expected = [policy.act(*[x[i] for x in inputs]) for i in range(size)]
        for ours, theirs in zip(exported.call(*inputs), zip(*expected, strict=True), strict=True):
            np.testing.assert_allclose(ours, np.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name, overrides", CASES)
def test_onnx_acts_as_the_script(name, overrides):
    """`to_onnx` compares the outputs itself, for random inputs.

    jax2onnx mistakes the axes of a batch of any size in a GRU, so these take one observation.
    """
    needs_onnx("onnx")
    policy = exported_policy(name, **overrides)
    if (name, overrides) in WITHOUT_ONNX:
        with pytest.raises(NotImplementedError, match="random_"):
            policies.to_onnx(policy)
    else:
        defaults = vars(load_script(name).Config())
        has_gru = (defaults | overrides).get("cell") == "gru"
        assert policies.to_onnx(policy)[1] == ("1" if has_gru else "batch")


# --- which seed, and what is refused ---


@pytest.fixture(scope="module")
def gridworld(tmp_path_factory):
    """Three agents. The second one has the best greedy returns."""
    folder = tmp_path_factory.mktemp("policies") / "run"
    evaluation = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    return save_run(folder, *untrained("q_learning_gridworld", 3), evaluation)


def export_files(run_dir, *words):
    __main__.main(["export", str(run_dir), "--format=stablehlo", *words])


def test_the_best_agent_is_biased(gridworld, tmp_path, capsys):
    export_files(gridworld, f"--out={tmp_path / 'best'}")
    said = capsys.readouterr().out
    assert "agent 1 is the best of 3 by the mean of their greedy episodes" in said
    assert "so they are biased" in said and f"agent 1: {tmp_path / 'best'}\n" in said
    export_files(gridworld, f"--out={tmp_path / 'third'}", "--seed-index=2")
    said = capsys.readouterr().out
    assert "so they are" not in said and f"agent 2: {tmp_path / 'third'}\n" in said


def test_all_agents(gridworld, tmp_path, capsys):
    """A file for each, which holds its own weights. A diverged agent is left out."""
    script, config, agents = load_run(gridworld)
    rng = np.random.default_rng(0)
    agents["q"] = rng.normal(size=agents["q"].shape).astype(np.float32)
    agents["q"][1] = np.nan
    run_dir = save_run(tmp_path / "run", script, config, agents)
    capsys.readouterr()
    export_files(run_dir, "--seed-index=all")
    assert "agent 1 has diverged and is left out" in capsys.readouterr().out
    files = {path.name for path in run_dir.glob("*.stablehlo")}
    assert files == {"agent0.stablehlo", "agent2.stablehlo"}
    cells = np.arange(agents["q"].shape[1], dtype=np.int32)
    for seed in (0, 2):
        data = (run_dir / f"agent{seed}.stablehlo").read_bytes()
        (actions,) = jax.export.deserialize(bytearray(data)).call(cells)
        np.testing.assert_array_equal(actions, agents["q"][seed].argmax(axis=-1))
    agents["q"][:] = np.nan
    run_dir = save_run(tmp_path / "lost", script, config, agents)
    said = refused(capsys, run_dir, "--format=stablehlo", "--seed-index=all")
    assert "every agent has diverged" in said
    said = refused(capsys, run_dir, "--format=stablehlo", "--seed-index=1")
    assert "seed_index = 1: agent 1 has diverged" in said


def test_bad_input(gridworld, tmp_path, capsys, monkeypatch):
    words = [gridworld, "--format=stablehlo"]
    assert "seed_index = 3: must be best, all or a number from 0 to 2" in refused(
        capsys, *words, "--seed-index=3"
    )
    (tmp_path / "there").touch()
    assert "there: already exists" in refused(capsys, *words, f"--out={tmp_path / 'there'}")
    assert "push = me/mine: uploads a folder" in refused(capsys, *words, "--push=me/mine")
    said = refused(capsys, gridworld, "--format=onnxx")
    assert "--format onnxx" in said
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    assert "needs flatbuffers; pip install flatbuffers" in refused(capsys, *words)
    monkeypatch.setattr(policies, "PACKAGES", {"onnx": []})
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    said = refused(capsys, gridworld, "--format=onnx")
    assert "needs jax2onnx; pip install --no-deps jax2onnx" in said
    assert not [*gridworld.glob("agent?.*")]


def test_what_cannot_be_converted_is_named(tmp_path, capsys):
    """A policy that leaves JAX, and one whose memory does not start with zeros."""
    source = (ROOT / "q_learning_gridworld.py").read_text()
    act = 'return agent["q"][obs].argmax(axis=-1)'
    start = "    return act\n"
    assert act in source and start in source
    calls = "jax.pure_callback(lambda x: x, obs, obs, vmap_method='sequential')"
    (tmp_path / "calls_python.py").write_text(source.replace(act, f"return {calls}"))
    with_memory = (
        "    return lambda: jnp.ones(2), lambda agent, memory, obs: (act(agent, obs), memory)\n"
    )
    (tmp_path / "starts_at_one.py").write_text(source.replace(start, with_memory))
    causes = {
        "calls_python": "the policy of calls_python.py cannot be converted",
        "starts_at_one": "the memory of starts_at_one.py does not start with zeros",
    }
    for name, cause in causes.items():
        run = untrained(str(tmp_path / f"{name}.py"), 1)
        run_dir = save_run(tmp_path / name, *run)
        words = [run_dir, "--format=stablehlo", "--trust"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert cause in refused(capsys, *words)
        assert not [*run_dir.glob("agent0.*")]
