"""Policies elsewhere: the programs of examples/.

Those that play run in processes that cannot import onejit.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.files import ROOT, SCRIPTS
from support.small import small_config

from onejit.engine.evaluation import policy_of
from onejit.run.agents import save_agents
from onejit.run.directory import load_run
from onejit.script.configs import write_config
from onejit.script.load import load_script

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: it is in the extra export")
CARTPOLE = ROOT / "agents" / "ppo_cartpole"


def code_of(name):
    return (ROOT / "examples" / name).read_text()


@pytest.fixture(scope="module")
def to_stablehlo():
    names = {"__name__": "export_policy"}
    exec(code_of("export_policy.py"), names)
    return names["to_stablehlo"]


def run_program(code, folder, *words, with_onejit=False):
    """What a program prints, as numbers."""
    path = folder / "program.py"
    path.write_text(code if with_onejit else f"import sys\n\nsys.modules['onejit'] = None\n{code}")
    done = subprocess.run(
        [sys.executable, str(path), *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [] if with_onejit else [float(line) for line in done.stdout.split()]


def returns_of_act(run_dir, env_name, episodes=3):
    """The returns of `act` in Gymnasium. Continuous actions are rescaled as the manual says."""
    gymnasium = pytest.importorskip("gymnasium")
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


def untrained(script_name, **overrides):
    """`(script, config, agents)` of two agents that have learned nothing."""
    script = load_script(script_name)
    config = small_config(script, **overrides)
    init, _ = script.make_learner(config)
    keys = jax.random.split(jax.random.key(1), 2)
    agents = jit_quickly(jax.vmap(lambda key: init(key).agent))(keys)
    return script, config, jax.device_get(agents)


def random_inputs(shapes, number):
    """Inputs of all dtypes: images over all their values, other whole numbers small."""
    rng = np.random.default_rng(0)
    inputs = []
    for x in shapes:
        shape = (number, *x.shape[1:])
        if jnp.issubdtype(x.dtype, jnp.floating):
            values = rng.normal(size=shape)
        else:
            values = rng.integers(256 if x.dtype == np.uint8 else 2, size=shape)
        inputs.append(values.astype(x.dtype))
    return inputs


CASES = [(name, {}) for name in SCRIPTS]
CASES += [("ppo_rnn", {"cell": "lru"}), ("mappo", {"cell": "gru"})]
CASES += [("alphazero", {"eval_simulations": 4}), ("dqn", {"env_name": "toys:Brightness"})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_the_policy_of_every_script_in_stablehlo(name, overrides, to_stablehlo):
    script, config, agents = untrained(name, **overrides)
    agent = jax.tree.map(lambda leaf: leaf[1], agents)
    exported = jax.export.deserialize(bytearray(to_stablehlo(script, config, agent)))
    assert exported.platforms == ("cpu", "cuda")

    env, env_params = script.make_env(config)
    start, act = policy_of(script, config)
    obs = jax.eval_shape(lambda key: env.reset(key, env_params)[0], jax.random.key(0))
    tree = jax.tree.structure((obs, start()))
    inputs = random_inputs(exported.in_avals, 3)
    for i in range(3):
        obs, memory = jax.tree.unflatten(tree, [x[i] for x in inputs])
        expected = jax.tree.leaves(act(agent, memory, obs))
        for ours, theirs in zip(exported.call(*inputs), expected, strict=True):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("agent", "env_name"),
    [
        ("ppo_cartpole", "CartPole-v1"),
        pytest.param("td3_pendulum", "Pendulum-v1", marks=pytest.mark.slow),
    ],
)
def test_stablehlo_plays_in_gymnasium(agent, env_name, tmp_path):
    pytest.importorskip("gymnasium")
    words = [ROOT / "agents" / agent, 0, tmp_path / "policy.stablehlo"]
    run_program(code_of("export_policy.py"), tmp_path, *words, with_onejit=True)
    returns = run_program(code_of("play_jax.py"), tmp_path, words[-1], env_name)
    expected = returns_of_act(ROOT / "agents" / agent, env_name)
    np.testing.assert_allclose(returns, expected, rtol=1e-3)


@pytest.mark.slow
def test_a_policy_with_memory_plays_in_gymnasium(tmp_path):
    """And statistics of observations are in the file."""
    pytest.importorskip("gymnasium")
    sizes = {"cell": "gru", "cell_size": 8, "normalize_obs": True, "env_params": {}}
    script, config, agents = untrained("ppo_rnn", **sizes)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(run_dir / "config.yaml", config)
    save_agents(agents, script, 0, run_dir / "agent.safetensors")
    file = tmp_path / "policy.stablehlo"
    run_program(code_of("export_policy.py"), tmp_path, run_dir, 0, file, with_onejit=True)
    returns = run_program(code_of("play_jax.py"), tmp_path, file, "CartPole-v1")
    assert returns == returns_of_act(run_dir, "CartPole-v1") and len(returns) == 3


def test_numpy_plays_cartpole(tmp_path):
    pytest.importorskip("gymnasium")
    (tmp_path / "agents").symlink_to(ROOT / "agents")
    assert run_program(code_of("policy_numpy.py"), tmp_path) == [500.0]


def actions_of_cartpole(obs):
    """What the agent of CartPole does for observations [n, 4]."""
    script, config, agents = load_run(CARTPOLE)
    _, act = policy_of(script, config)
    agent = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), agents)
    actions, _ = jax.vmap(act, in_axes=(None, None, 0))(agent, (), obs)
    return actions


def check_cpp_acts(name, libraries, words, folder):
    """For 20 observations."""
    source = ROOT / "examples" / name
    build = ["g++", "-O2", "-std=c++17", "-Wall", "-Werror", "-o", "policy", source]
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
    check_cpp_acts("policy.cpp", [], [CARTPOLE / "agent.safetensors"], tmp_path)


# --- ONNX ---


@pytest.fixture
def onnx_file(tmp_path) -> Path:
    pytest.importorskip("jax2onnx", reason="pip install --no-deps jax2onnx")
    pytest.importorskip("onnxruntime")
    (tmp_path / "export_policy.py").write_text(code_of("export_policy.py"))
    file = tmp_path / "policy.onnx"
    run_program(code_of("export_onnx.py"), tmp_path, CARTPOLE, 0, file, with_onejit=True)
    return file


@pytest.mark.slow
def test_onnx_acts(onnx_file):
    import onnxruntime

    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    policy = onnxruntime.InferenceSession(onnx_file)
    (actions,) = policy.run(None, {policy.get_inputs()[0].name: obs})
    np.testing.assert_array_equal(actions, actions_of_cartpole(obs))


@pytest.mark.slow
def test_javascript_acts(onnx_file, tmp_path):
    """In Node: the example, and with the pole's velocity reversed."""
    npm = shutil.which("npm") or pytest.skip("npm is missing")
    install = [npm, "install", "--silent", "--ignore-scripts", "onnxruntime-web"]
    if subprocess.run(install, cwd=tmp_path, timeout=300).returncode:
        pytest.skip("onnxruntime-web cannot be installed")
    code = code_of("policy.mjs")
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


@pytest.mark.slow
@pytest.mark.skipif("ONNXRUNTIME" not in os.environ, reason="ONNXRUNTIME names no C++ release")
def test_cpp_acts_with_onnx_runtime(onnx_file, tmp_path):
    """With the unpacked release of ONNX Runtime that the variable names."""
    release = os.environ["ONNXRUNTIME"]
    libraries = [f"-I{release}/include", f"-L{release}/lib", "-lonnxruntime"]
    libraries += [f"-Wl,-rpath,{release}/lib"]
    check_cpp_acts("policy_onnx.cpp", libraries, [onnx_file], tmp_path)
