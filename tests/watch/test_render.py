"""`onejit render`: which agents play what, the pictures, and the page in a browser."""

import base64
import ctypes.util
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from gymnax.environments import environment
from PIL import Image
from safetensors.numpy import save_file
from support.commands import refusal
from support.files import ROOT

import q_learning_gridworld
from onejit import train
from onejit.base import statistics
from onejit.run.agents import read_agents
from onejit.run.directory import Results
from onejit.script import command_line
from onejit.watch import figures, formats, render
from onejit.watch.drawing import drawing_of
from onejit.watch.figures import Episode
from onejit.watch.formats import check_formats

rng = np.random.default_rng(0)


def frames_of_gif(path) -> list[np.ndarray]:
    with Image.open(path) as picture:
        frames = []
        for i in range(picture.n_frames):
            picture.seek(i)
            frames.append(np.asarray(picture.convert("RGB")))
        return frames


def forget_scripts():
    """As in a new process: no script of a run has been imported yet."""
    for name in [name for name in sys.modules if name.startswith("script_")]:
        del sys.modules[name]


def run(*args):
    forget_scripts()
    return command_line.parse(render.main, list(map(str, args)))


def harm_agents(path, change):
    """Rewrites a file of agents as `change(arrays)`."""
    arrays, metadata = read_agents(path)
    save_file(
        {name: np.ascontiguousarray(each) for name, each in change(arrays).items()}, path, metadata
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Five agents that have learned little, so that they differ; each step costs 1."""
    cliff = " ".join(f"3 {column}" for column in range(1, 9))
    args = "q_learning_gridworld --total-timesteps=1500 --num-steps=300 --lr=0.5 --seed=1"
    args += f" --height=4 --width=10 --start 3 0 --goal 3 9 --cliff {cliff} --random-starts=True"
    args += " --cliff-terminates=True --step-reward=-1 --goal-reward=-1 --max-steps-in-episode=40"
    args += " --num-seeds=5 --eval-episodes=3"
    path = tmp_path_factory.mktemp("render") / "run"
    return train.main([*args.split(), f"--run-dir={path}"])


@pytest.fixture
def copied(run_dir, tmp_path):
    """A copy that may be harmed."""
    return shutil.copytree(run_dir, tmp_path / "copy")


@pytest.fixture
def refuses(capfd):
    def check(args, *words):
        forget_scripts()
        said = refusal(["render", *args], capfd)
        for word in words:
            assert word in said, said

    return check


# --- who plays, and what ---


def test_agents_are_ranked_and_named():
    """By greedy returns where there are any; an agent without a finite return is the worst."""
    evaluation = np.array([[6, 7], [0, 9], [5, np.nan], [4, 1], [9, 7]])
    metrics = {
        "episodes": np.ones((5, 10)),
        "episodic_return": np.repeat([[3.0], [2.0], [1.0], [4.0], [np.inf]], 10, 1),
    }
    results = Results(metrics, final_return=None, evaluation=None)
    returns, by = results.best_known_return()
    assert statistics.rank_agents(returns).tolist() == [4, 2, 1, 0, 3] and "end of training" in by
    returns, by = results._replace(evaluation=evaluation).best_known_return()
    found = statistics.rank_agents(returns)
    assert found.tolist() == [2, 3, 1, 0, 4] and "greedy" in by
    lost = np.arange(5) == 4  # the best, of parameters that are not finite
    assert statistics.rank_agents(returns, lost).tolist()[:2] == [2, 4]
    three = ["best", "median", "worst"]
    of_five = {"best_agent4": 4, "worst_agent2": 2, "agent3": 3, "median_agent1": 1}
    assert render.choose_agents([*three, "3", "4"], found) == of_five
    assert render.choose_agents(three, found[:2]) == {"best_agent3": 3, "worst_agent2": 2}
    assert render.choose_agents(three, np.array([0])) == {"best_agent0": 0}


def test_episodes_are_those_of_the_evaluation(run_dir, tmp_path, capsys):
    episode = 2
    written = run(run_dir, "--out", tmp_path, "--episode", episode)
    evaluation = np.load(run_dir / "evaluation.npy")
    order = np.argsort(evaluation.mean(axis=1), kind="stable")
    assert len(set(evaluation.mean(axis=1))) > 2, "agents that are alike show nothing"
    assert [path.name for path in written] == [
        f"best_agent{order[4]}.gif",
        f"worst_agent{order[0]}.gif",
        f"median_agent{order[2]}.gif",
    ]
    said = re.findall(r"agent ?(\d): return (\S+) in (\d+) steps", capsys.readouterr().out)
    assert len(said) == 3
    for (agent, total, steps), path in zip(said, written, strict=True):
        assert float(total) == pytest.approx(evaluation[int(agent), episode], rel=1e-3)
        frames = frames_of_gif(path)
        assert len(frames) == int(steps)  # each shows its own step in the title
        assert frames[0].std() > 5
    assert len({total for _, total, _ in said}) > 1


def test_a_run_of_a_script_itself(copied, capsys):
    """It has no run.json, checkpoints or evaluation, and of older versions no script.

    The agents play the episodes of an evaluation, by onejit's script.
    """
    shutil.rmtree(copied / "checkpoints")
    for name in ("run.json", "evaluation.npy", "q_learning_gridworld.py"):
        (copied / name).unlink()
    (path,) = run(copied, "--agents", "worst", "--max-steps", 3, "--formats", "gif")
    final = statistics.final_return(np.load(copied / "metrics.npz"))
    assert path == copied / "render" / f"worst_agent{final.argmin()}.gif"
    assert len(frames_of_gif(path)) == 3
    said = capsys.readouterr().out
    assert "the return at the end of training" in said
    script = ROOT / "q_learning_gridworld.py"
    assert f"{copied} has no copy of its script; {script} is used instead" in said


def test_best_agents_of_the_training(copied, capfd, refuses):
    """Each seed's best agent, ranked by what it reached then, plays what was measured then."""
    missing = f"best: {copied} has no best_agent.safetensors"
    refuses([copied, "--best"], missing, "--eval-interval N")
    shutil.copy(copied / "agent.safetensors", copied / "best_agent.safetensors")
    harm_agents(
        copied / "agent.safetensors",  # not those that play
        lambda arrays: {name: each[::-1] for name, each in arrays.items()},
    )
    returns = np.array([[1.0, np.nan], [4.0, 0.0], [3.0, 2.0], [0.0, 5.0], [np.nan, np.nan]])
    np.savez(copied / "evaluations.npz", timesteps=np.arange(2), returns=returns)
    written = run(copied, "--best", "--max-steps", 1)
    names = ["best_agent3.gif", "worst_agent4.gif", "median_agent2.gif"]
    assert [path.name for path in written] == names and written[0].parent == copied / "render_best"
    out = capfd.readouterr().out
    assert "agents ranked by their best evaluation in training\n" in out
    said = re.findall(r"agent(\d): return (\S+) in", out)
    evaluation = np.load(copied / "evaluation.npy")[:, 0]
    assert [agent for agent, _ in said] == ["3", "4", "2"] and len(set(evaluation)) > 1
    for agent, total in said:
        assert float(total) == pytest.approx(evaluation[int(agent)], rel=1e-3)


def test_what_a_run_may_lack(copied):
    """Of one agent the metrics, as in agents/ of the repository; checkpoints are not read.

    A field that is not in config.yaml, as of an older script, is at its default.
    """
    for name in ("metrics.npz", "evaluation.npy"):
        (copied / name).unlink()
    shutil.rmtree(copied / "checkpoints")
    settings = yaml.safe_load((copied / "config.yaml").read_text())
    del settings["q_init"]
    (copied / "config.yaml").write_text(yaml.safe_dump(settings))
    harm_agents(
        copied / "agent.safetensors",
        lambda arrays: {name: each[:1] for name, each in arrays.items()},
    )
    (path,) = run(copied, "--max-steps", 1)
    assert path.name == "best_agent0.gif"


def test_agents_that_do_not_fit_the_script(copied, refuses):
    """As after a change of the networks: without a check, an index into a smaller table is silently
    the last one.
    """
    path = copied / "agent.safetensors"
    ((name, table),) = read_agents(path)[0].items()
    harm_agents(path, lambda arrays: {name: table[:, :-1]})
    words = f"does not fit {copied / 'q_learning_gridworld.py'}: {name} is (39, 4), but (40, 4)"
    refuses([copied], f"{path}: {words}")
    harm_agents(path, lambda arrays: {"another": table})
    refuses([copied], f"{path}: does not fit", "another is (40, 4), but missing")


# --- pictures ---


def test_grid_world_by_pixels():
    config = q_learning_gridworld.Config(
        height=3, width=4, start=(2, 0), goal=(0, 3), walls=((1, 1),), cliff=((2, 2),)
    )
    env = q_learning_gridworld.GridWorld(config)
    states = q_learning_gridworld.GridState(cell=np.array([8, 4]), time=np.arange(2))
    first, second = figures.grid_world_frames(env, Episode("", None, states, np.zeros(2)), range(2))
    blue, dark, red = (31, 119, 180), (77, 77, 77), (222, 120, 110)

    # of a part of the picture, by eighths of the width and of the height
    def share(frame, color, rows, columns):
        height, width = frame.shape[:2]
        of_rows = slice(int(rows[0] * height), int(rows[1] * height))
        of_columns = slice(int(columns[0] * width), int(columns[1] * width))
        part = frame[of_rows, of_columns]
        return (np.abs(part.astype(int) - color).max(axis=-1) < 3).mean()

    assert share(first, blue, (0.7, 1), (0, 0.25)) > 0.02
    assert share(second, blue, (0.75, 1), (0, 0.25)) < 0.01
    assert share(second, blue, (0.4, 0.7), (0, 0.25)) > 0.02
    assert share(first, dark, (0.4, 0.7), (0.25, 0.5)) > 0.5
    assert share(first, red, (0.7, 1), (0.5, 0.75)) > 0.5


def test_channels_of_a_grid_have_colors():
    obs = np.zeros((2, 4, 4, 3))
    obs[0, 0, 0, 0] = obs[0, 1, 1, 1] = obs[1, 2, 2, 2] = obs[1, 2, 2, 0] = 1
    first, second = figures.grid_frames("title", obs, np.zeros(2), range(2))
    cell = (first == 0).all(axis=-1).sum() / 14  # pixels of one; 14 of the 16 are black

    def colors(frame):
        values, counts = np.unique(frame.reshape(-1, 3), axis=0, return_counts=True)
        return set(map(tuple, values[counts > cell / 2].tolist()))

    white, black = (255, 255, 255), (0, 0, 0)
    assert len(colors(first) - {white, black}) == 2 and len(colors(second) - {white, black}) == 1
    assert not colors(first) & colors(second) - {white, black}, (
        "the last channel has a color of its own, and is on top"
    )


def test_images_are_shown_as_they_are():
    """Three channels are colors. Of stacked images the newest is shown."""

    def color_of(obs):
        (frame,) = figures.grid_frames("title", obs, np.zeros(1), range(1))
        return tuple(frame[len(frame) // 2, len(frame) // 2].tolist())

    image = np.broadcast_to(np.array([200, 100, 50], np.uint8), (1, 4, 4, 3))
    assert color_of(image) == (200, 100, 50)
    stack = np.broadcast_to(np.array([200, 100, 50, 150], np.uint8), (1, 4, 4, 4))
    assert color_of(stack) == (150, 150, 150)
    assert color_of(np.full((1, 4, 4), 150, np.uint8)) == (150, 150, 150)
    marks = np.zeros((1, 4, 4, 3))
    marks[..., 1] = 1
    assert color_of(marks.astype(np.uint8)) == color_of(marks)  # a grid of zeros and ones


def test_bytes_stay_bytes():
    env = SimpleNamespace(
        observe=lambda key, state, action, params: jnp.full((4, 4, 3), state, jnp.uint8),
        observation_space=lambda params: None,
    )
    obs = figures.observe_all(env, None, jnp.arange(3))
    assert obs.dtype == np.uint8 and obs.shape == (3, 4, 4, 3)


def test_an_environment_that_cannot_be_drawn():
    with pytest.raises(ValueError, match="neither `frame` nor `observe`"):
        figures.observe_all(environment.Environment(), None, jnp.arange(3))


def test_bars_show_the_observation():
    obs = np.array([[0.0, 1.0], [1.0, 0.0]])
    first, second = figures.bar_frames("title", obs, np.zeros(2), range(2))
    middles = []
    for frame in (first, second):
        is_blue = np.abs(frame.astype(int) - (31, 119, 180)).max(axis=-1) < 3
        middles.append(np.flatnonzero(is_blue.any(axis=0)).mean())
    assert middles[0] > middles[1] + first.shape[1] / 4


def test_an_error_without_words_is_named_by_its_type():
    def frames(states, steps):
        raise NotImplementedError

    env = SimpleNamespace(frames=frames)
    with pytest.raises(ValueError, match=r"cannot be drawn here \(NotImplementedError\)"):
        list(figures.frames_of_all_steps(env, Episode("", None, None, np.zeros(1)), range(1)))


@pytest.mark.parametrize(
    "name", ["Pendulum-v1", "Catch-bsuite", "FrozenLake-misc", "DeepSea-bsuite"]
)
def test_gymnax_environments(name, monkeypatch):
    for variable in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.setenv(variable, "dummy")
    if name == "Pendulum-v1":
        pytest.importorskip("pygame")
    env, params = gymnax.make(name)

    def step(carry, key):
        _, state, reward, *_ = env.step(key, carry, env.action_space(params).sample(key), params)
        return state, (carry, reward)

    @jax.jit
    def play(key):
        keys = jax.random.split(jax.random.key(2), 6)
        return jax.lax.scan(step, env.reset(key, params)[1], keys)[1]

    states, rewards = play(jax.random.key(1))
    rewards = np.asarray(rewards)
    episode = Episode(name, params, jax.device_get(states), rewards)
    frames, seconds = drawing_of(env).film(episode)
    frames = list(frames)
    assert len(frames) == 6 and 0.01 < seconds < 0.2
    assert len({frame.shape for frame in frames}) == 1 and frames[0].dtype == np.uint8
    below_title = frames[0].shape[0] // 6
    assert any((frame[below_title:] != frames[0][below_title:]).sum() > 100 for frame in frames), (
        "nothing moves"
    )


def test_nothing_but_bodies_needs_mujoco():
    """MUJOCO_GL may name a library that is missing; then MuJoCo cannot be imported."""
    code = """
import sys
sys.modules["mujoco"] = None
import gymnax
from onejit.script import errors
from onejit.watch import render
from onejit.watch import drawing
from onejit.watch import formats
shown = drawing.drawing_of(gymnax.make("Catch-bsuite")[0])
formats.check_formats((), shown)
assert errors.similar_environment("CartPol-v1") == "; did you mean CartPole-v1?"
assert "brax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_mp4(tmp_path, monkeypatch):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    # odd sizes, which H.264 does not have
    frames = [np.full((31, 45, 3), 20 * i, np.uint8) for i in range(10)]
    monkeypatch.chdir(tmp_path)
    with open("lr:0.1.mp4", "wb") as file:  # no protocol of ffmpeg's
        formats.save_mp4(iter(frames), 0.1, file)
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "lr:0.1.mp4"))
    about = next(reader)
    assert (about["size"], about["fps"], about["codec"]) == ((46, 32), 10, "h264")
    means = [np.frombuffer(frame, np.uint8).reshape(32, 46, 3)[:30, :44].mean() for frame in reader]
    np.testing.assert_allclose(means, 20 * np.arange(10), atol=4)


@pytest.mark.parametrize(
    ("package", "form", "env_name"),
    [("pygame", "gif", "CartPole-v1"), ("imageio_ffmpeg", "mp4", "Catch-bsuite")],
)
def test_packages_for_pictures_that_are_not_there(package, form, env_name, monkeypatch):
    """Said before anything is played."""
    env, _ = gymnax.make(env_name)
    assert check_formats((form,), drawing_of(env)) == (form,)
    monkeypatch.setitem(sys.modules, package, None)
    name = package.replace("_", "-")
    with pytest.raises(ValueError, match=f"needs {name}; pip install {name}"):
        check_formats((form,), drawing_of(env))
    assert check_formats(("gif",), drawing_of(gymnax.make("Breakout-MinAtar")[0]))


# --- the page ---


def test_page(tmp_path):
    """It names the episode, says that it needs the network, and holds the states in real time."""
    from brax import envs
    from brax.base import Transform

    env = envs.get_environment("inverted_pendulum", backend="spring")
    links = len(env.sys.link_names)
    rot = np.tile([1.0, 0.0, 0.0, 0.0], (3, links, 1))
    # three states without the compilation of a reset
    states = SimpleNamespace(x=Transform(rng.normal(size=(3, links, 3)), rot))
    drawing = drawing_of(SimpleNamespace(env=env))
    assert check_formats((), drawing) == ("gif", "html")
    brax_state = SimpleNamespace(pipeline_state=states)
    episode = Episode("inverted_pendulum", None, SimpleNamespace(brax=brax_state), np.zeros(3))
    formats.save_episode("html", tmp_path / "page", "a <title> & </script>", drawing, episode)
    page = (tmp_path / "page").read_text()
    heading = "a &lt;title&gt; &amp; &lt;/script&gt; (the viewer needs the network)"
    assert f"<title>{heading}</title>" in page and f"{heading}</p>" in page
    system = json.loads(zlib.decompress(base64.b64decode(re.search(r'system = "(.+?)"', page)[1])))
    assert system["opt"]["timestep"] == pytest.approx(float(env.dt))
    positions = [state["pos"] for state in system["states"]["x"]]
    np.testing.assert_allclose(positions, states.x.pos, atol=1e-5)


# --- what it refuses ---


def test_bad_input(run_dir, tmp_path, refuses):
    refuses([tmp_path / "none"], "none: is not a run directory")
    refuses([run_dir, "--agents", "best", "5"], "agents: 5 is neither", "0 to 4")
    refuses([run_dir, "--agents", "good"], "agents: good")
    refuses([run_dir, "--agents"], "agents: must be best, median, worst")
    refuses([run_dir, "--episode=4294967296"], "episode = 4294967296: must be below")
    refuses([run_dir, "--formats", "html"], "formats: this environment can be drawn as gif, mp4")
    refuses([run_dir, "--formats", "bmp"], "--formats")
    refuses([run_dir, "--episode=-1"], "episode = -1")
    refuses([run_dir, "--max-steps=-1"], "max_steps = -1")
    assert not (run_dir / "render").exists()


def test_runs_that_are_damaged(copied, refuses):
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(config + "\nnum_envs: 4\n")
    refuses([copied], "config.yaml: is not a config of")
    (copied / "config.yaml").write_text(config)
    (copied / "metrics.npz").write_bytes((copied / "metrics.npz").read_bytes()[:100])
    refuses([copied], "metrics.npz: cannot be read")
    agent = copied / "agent.safetensors"
    agent.write_bytes(agent.read_bytes()[:100])
    refuses([copied], "agent.safetensors: cannot be read")
    agent.unlink()
    refuses([copied], "agent.safetensors: does not exist")
    (copied / "run.json").write_text("{")
    refuses([copied], "run.json: cannot be read")


def test_output_that_cannot_be_written(run_dir, refuses):
    args = [run_dir, "--agents", 0, "--max-steps", 1]
    refuses([*args, "--out", run_dir / "config.yaml"], "config.yaml", "cannot be written")


# --- brax, as people run it ---


@pytest.mark.slow
def test_brax_pictures(tmp_path):
    """GIF, MP4 and HTML of an inverted pendulum."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    config = "--env-name=inverted_pendulum --total-timesteps=16384 --num-seeds=2 --run-dir=run"
    for command in (
        [str(ROOT / "ppo_continuous.py"), *config.split()],
        ["-m", "onejit", "render", "run", "--formats", "gif", "html", "mp4"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | {"MUJOCO_GL": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if "cannot draw without a screen" in done.stderr and not ctypes.util.find_library("OSMesa"):
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "render"
    names = sorted(path.name.split("_")[0] + path.suffix for path in folder.iterdir())
    assert names == ["best.gif", "best.html", "best.mp4", "worst.gif", "worst.html", "worst.mp4"]
    for path in folder.glob("*.gif"):
        frames = frames_of_gif(path)
        assert len(frames) > 3 and frames[0].shape == (360, 480, 3)
        for frame in (frames[0], frames[-1]):
            is_body = (frame[40:] > 60).any(axis=-1)  # on the black background
            assert is_body.mean() > 0.005
        has_moved = (frames[0][40:] != frames[-1][40:]).any(axis=-1)
        assert has_moved.sum() > 200
        about, *film = imageio_ffmpeg.read_frames(str(path.with_suffix(".mp4")))
        assert about["size"] == (480, 360) and len(film) == len(frames)


def test_a_sweep_is_not_rendered(tmp_path):
    """The message says where the runs of its trials are."""
    settings = {"script": "ppo", "num_seeds": 1, "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings, "kind": "sweep"}))
    with pytest.raises(ValueError, match="is a sweep") as refused:
        render.main(tmp_path)
    assert str(tmp_path / "agents") in str(refused.value)
