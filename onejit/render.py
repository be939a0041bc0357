"""Play an episode of the best, the median and the worst agent of a run, and write it as GIF, MP4, HTML or SVG.

    onejit render runs/ppo_continuous/hopper                   best, median and worst agent as GIF and HTML
    onejit render runs/ppo/cartpole --agents best 3 --formats gif mp4
    onejit render agents/ppo_cartpole

The agents act by the copy of the script in the run directory. They are ranked by the mean of their greedy returns if
`onejit train` has measured them, otherwise by the returns of the last tenth of training. The episode is one of those
greedy episodes, by default the first.
"""

import base64
import contextlib
import ctypes.util
import html
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Literal

# Set before pygame and MuJoCo are imported: both draw without a screen, MuJoCo on the CPU if OSMesa is installed.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
    libraries = {"osmesa": "OSMesa", "egl": "EGL"}
    os.environ["MUJOCO_GL"] = next(
        (name for name in libraries if ctypes.util.find_library(libraries[name])), ""
    )

import jax
import mujoco
import numpy as np
import tyro
from flax.traverse_util import flatten_dict
from gymnax.visualize import Visualizer
from matplotlib import colormaps, pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from onejit import boards, command_line, playing, runs, statistics
from onejit.play import unwrap

with contextlib.redirect_stdout(io.StringIO()):  # brax prints which optional packages it lacks
    import brax.envs
    import brax.io.json

pyplot.switch_backend("agg")
VIEWER = Path(__file__).parent / "viewer"  # page.html and package.json
PACKAGES = VIEWER / "node_modules"  # after `npm ci`
DRAWN_BY_GYMNAX = (
    *("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("Catch-bsuite", "PointRobot-misc", "MetaMaze-misc", "FourRooms-misc"),
)


# --- agents and episodes ---


def check_agents(script, config, agents, path: Path) -> None:
    """Raise ValueError if arrays of `path` [num_seeds, ...] do not fit the script's networks."""
    init, _ = script.make_learner(config)
    expected = flatten_dict(jax.eval_shape(init, jax.random.key(0)).agent, sep=".")
    expected = {name: leaf.shape for name, leaf in expected.items()}
    held = {name: leaf.shape[1:] for name, leaf in flatten_dict(agents, sep=".").items()}
    for name in sorted(expected.keys() | held.keys()):
        if held.get(name) != expected.get(name):
            here, there = (each.get(name, "missing") for each in (held, expected))
            raise ValueError(
                f"{path}: does not fit {script.__file__}: {name} is {here}, but {there} in its networks"
            )


def rank(run_dir: Path, agents, best: bool) -> tuple[np.ndarray, str]:
    """Agents from worst to best, and the criterion. Raises ValueError."""
    lost = statistics.diverged(agents)
    if len(lost) == 1:
        return np.zeros(1, int), ""
    if not best:
        return statistics.rank_agents(runs.load_metrics(run_dir), lost)
    with runs.reading(run_dir / "evaluations.npz"), np.load(run_dir / "evaluations.npz") as stored:
        returns = np.where(np.isfinite(stored["returns"]), stored["returns"], -np.inf).max(axis=1)
    return statistics.rank_agents({"evaluation": returns[:, None]}, lost)


def choose_agents(wanted, order) -> dict[str, int]:
    """File names and agents, each agent once: two agents have no median. Raises ValueError."""
    places = {"best": order[-1], "worst": order[0], "median": order[(len(order) - 1) // 2]}
    chosen = {}
    for name in sorted(wanted, key=lambda name: name == "median"):
        if name not in places and not (name.isdecimal() and int(name) < len(order)):
            raise ValueError(
                f"agents: {name} is neither best, median, worst nor a number from 0 to {len(order) - 1}"
            )
        agent = int(places.get(name, name))
        if agent not in chosen.values():
            chosen[f"{name}_agent{agent}" if name in places else f"agent{agent}"] = agent
    return chosen


def play(script, config, agents, key):
    """A greedy episode of each of `agents` [n, ...]: `[(states before each step, rewards), ...]`, both [T]."""
    episodes = jax.device_get(
        jax.jit(jax.vmap(playing.make_player(script, config), (0, None)))(agents, key)
    )
    parts = episodes.env_state, episodes.positions, episodes.reward
    played = [state_at(parts, (i, slice(n))) for i, n in enumerate(episodes.valid.sum(axis=1))]
    if episodes.positions is None:
        return [(states, rewards) for states, _, rewards in played]
    return [
        boards.after_each_move(states[0], positions, rewards)
        for states, positions, rewards in played
    ]


def state_at(states, index):
    return jax.tree.map(lambda leaf: leaf[index], states)


def is_brax(env) -> bool:
    """Whether it is the scripts' adapter of a brax environment. Its states are (brax state, time)."""
    return isinstance(getattr(env, "env", None), brax.envs.Env)


# --- pictures: each function yields frames [H, W, 3] of bytes, one for each of `steps` ---


def figure_frames(figure, axes, title: str, rewards, steps, update):
    """Frames of a Matplotlib figure; `update(i)` shows step i."""
    canvas, returns = FigureCanvasAgg(figure), np.cumsum(rewards)
    for i in steps:
        update(i)
        axes.set_title(f"{title}\nstep {i + 1}, return {returns[i]:.4g}", fontsize=10)
        canvas.draw()
        yield np.array(canvas.buffer_rgba())[..., :3]


def new_figure(width=4.0, height=4.0):
    figure = Figure(figsize=(width, height), dpi=80, layout="constrained")
    return figure, figure.subplots()


def gymnax_frames(env, env_params, states, rewards, steps):
    """Frames from gymnax's visualizer."""
    try:
        states = [state_at(states, i) for i in range(len(rewards))]
        drawn = Visualizer(env, env_params, states)
        drawn.fig.set(figwidth=4.0, figheight=3.6, dpi=80)
        drawn.init()
        drawn.fig.set_layout_engine("constrained")
        yield from figure_frames(drawn.fig, drawn.ax, env.name, rewards, steps, drawn.update)
    finally:
        pyplot.close("all")


def grid_world_frames(env, states, rewards, steps):
    """Walls are dark, the cliff is red, the goal is a star, and the agent is a dot with its path."""
    figure, axes = new_figure(1.0 + 0.4 * min(env.width, 20), 1.4 + 0.4 * min(env.height, 20))
    shown = np.where(env.walls, 1, np.where(env.cliff, 2, 0)).reshape(env.height, env.width)
    axes.imshow(np.array([[255, 255, 255], [77, 77, 77], [222, 120, 110]], np.uint8)[shown])
    axes.set_xticks(np.arange(env.width + 1) - 0.5, [])
    axes.set_yticks(np.arange(env.height + 1) - 0.5, [])
    axes.grid(color="0.85")
    axes.plot(*divmod(env.goal, env.width)[::-1], "*", color="goldenrod", markersize=16)
    rows, columns = np.divmod(np.asarray(states.cell), env.width)
    (path,) = axes.plot([], [], color="tab:blue", alpha=0.4, linewidth=3)
    (agent,) = axes.plot([], [], "o", color="tab:blue", markersize=12)

    def update(i):
        path.set_data(columns[: i + 1], rows[: i + 1])
        agent.set_data(columns[i : i + 1], rows[i : i + 1])

    return figure_frames(figure, axes, "GridWorld", rewards, steps, update)


def board_frames(title: str, states, rewards, steps):
    """The stones of a board game after each move, the first player's dark."""
    cells = np.stack([boards.stones(state_at(states, i)) for i in range(len(rewards))])
    figure, axes = new_figure(1.0 + 0.35 * cells.shape[2], 1.4 + 0.35 * cells.shape[1])
    image = axes.imshow(
        cells[0], cmap=ListedColormap(["#e8dcc0", "#222222", "#d9534f"]), vmin=0, vmax=2
    )
    axes.set_xticks(np.arange(cells.shape[2] + 1) - 0.5, [])
    axes.set_yticks(np.arange(cells.shape[1] + 1) - 0.5, [])
    axes.grid(color="white", linewidth=2)
    return figure_frames(figure, axes, title, rewards, steps, lambda i: image.set_data(cells[i]))


def save_board_svg(states, length: int, file) -> None:
    """An animation by Pgx's own visualizer."""
    import pgx  # it is needed for board games alone

    pgx.save_svg_animation(
        [state_at(states, i) for i in range(length)], file.name, frame_duration_seconds=1.0
    )


def observe_all(env, env_params, states) -> np.ndarray:
    """The observations of an episode, [T, ...]. Numbers of states become one-hot vectors."""
    if not hasattr(env, "observe"):
        raise ValueError(
            "env_name: this environment cannot be drawn; it has neither `frame` nor `observe`"
        )
    obs = jax.vmap(lambda state: env.observe(jax.random.key(0), state, None, env_params))(states)
    space = env.observation_space(env_params)
    return np.asarray(jax.nn.one_hot(obs, space.n) if hasattr(space, "n") else obs, float)


def grid_frames(title: str, obs, rewards, steps):
    """Observations [T, H, W] in grey, or [T, H, W, C] with a colour for each channel, later channels on top."""
    if obs.ndim == 4:
        colors = np.vstack(
            [[0, 0, 0], colormaps["turbo"](np.linspace(0.1, 0.95, obs.shape[-1]))[:, :3]]
        )
        pictures = colors[((obs > 0) * (1 + np.arange(obs.shape[-1]))).max(axis=-1)]
    else:
        pictures = (obs - obs.min()) / max(np.ptp(obs), 1e-9)
    figure, axes = new_figure()
    image = axes.imshow(pictures[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    return figure_frames(figure, axes, title, rewards, steps, lambda i: image.set_data(pictures[i]))


def bar_frames(title: str, obs, rewards, steps):
    """The entries of observations [T, ...] as bars."""
    obs = obs.reshape(len(obs), -1)
    figure, axes = new_figure()
    bars = axes.bar(range(obs.shape[1]), obs[0])
    margin = 0.05 * max(np.ptp(obs), 1e-9)
    axes.set(
        xlabel="entry of the observation",
        ylim=(min(obs.min(), 0.0) - margin, max(obs.max(), 0.0) + margin),
    )

    def update(i):
        for bar, value in zip(bars, obs[i], strict=True):
            bar.set_height(value)

    return figure_frames(figure, axes, title, rewards, steps, update)


def captioned(picture, i: int, episodic_return: float):
    frame = Image.fromarray(picture)
    frame = frame.resize(
        [size * max(1, 300 // frame.width) for size in frame.size], Image.Resampling.NEAREST
    )
    text = f"step {i + 1}, return {episodic_return:.4g}"
    ImageDraw.Draw(frame).text((8, 8), text, fill="white", stroke_width=1, stroke_fill="black")
    return np.asarray(frame)


def own_frames(env, env_params, states, rewards, steps):
    """Frames from the environment's own `frame(state, params)`."""
    for i, episodic_return in zip(steps, np.cumsum(rewards)[steps], strict=True):
        yield captioned(env.frame(state_at(states, i), env_params), i, episodic_return)


def host_frames(env, states, rewards, steps):
    """Frames from `env.frames`: of a team, or of an environment outside JAX, which plays the episode again."""
    try:
        for i, picture in zip(steps, env.frames(states, steps), strict=True):
            yield captioned(picture, i, np.cumsum(rewards)[i])
    except Exception as error:  # each library raises its own
        raise ValueError(f"env_name: this environment cannot be drawn here ({error})") from error


def mujoco_frames(env, states, rewards, steps, width=480, height=360):
    """Frames of a brax environment, drawn by MuJoCo from the `track` camera if there is one."""
    model, returns = env.sys.mj_model, np.cumsum(rewards)
    names = [model.cam(i).name for i in range(model.ncam)]
    camera = "track" if "track" in names else 0 if names else -1  # -1 looks at the middle from afar
    try:
        renderer = mujoco.Renderer(model, height=height, width=width)
    except Exception as error:  # each renderer raises its own kind
        raise ValueError(
            f"MuJoCo cannot draw without a screen here ({type(error).__name__}: {error}): install libosmesa6, set "
            "MUJOCO_GL, or use --formats html"
        ) from error
    data = mujoco.MjData(model)
    with contextlib.closing(renderer):
        for i in steps:
            data.qpos[:], data.qvel[:] = states.q[i], states.qd[i]
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=camera)
            yield captioned(renderer.render(), i, returns[i])


def frames_of(config, env, env_params, states, rewards):
    """`(frames, seconds)`: a function that yields the frames at each call, and the time between two frames."""
    steps = range(len(rewards))
    dt = float(getattr(env.env if is_brax(env) else env, "dt", 0.1))
    every = max(1, round(1 / (30 * dt)))  # about 30 frames per second, in real time
    if is_brax(env):
        return partial(
            mujoco_frames, env.env, states[0].pipeline_state, rewards, steps[::every]
        ), every * dt
    if hasattr(getattr(env, "env", None), "agents"):  # a team of mappo.py
        env = importlib.import_module("onejit.envs.jaxmarl").Drawn(env)
    if hasattr(env, "game"):
        return partial(board_frames, config.env_name, states, rewards, steps), 1.0
    if hasattr(env, "frames"):
        return partial(host_frames, env, states, rewards, steps[::every]), every * dt
    if hasattr(env, "frame"):
        return partial(own_frames, env, env_params, states, rewards, steps[::every]), every * dt
    if hasattr(states, "cell"):
        return partial(grid_world_frames, env, states, rewards, steps), 0.1
    if getattr(env, "name", "") in DRAWN_BY_GYMNAX:
        seconds = 0.05 if env.name.endswith(("-v0", "-v1")) else 0.1
        return partial(gymnax_frames, env, env_params, states, rewards, steps), seconds
    obs = observe_all(env, env_params, states)
    return partial(
        grid_frames if obs.ndim in (3, 4) else bar_frames, config.env_name, obs, rewards, steps
    ), 0.1


# --- files ---


def save_gif(frames, seconds: float, file) -> None:
    pictures = (Image.fromarray(frame).quantize() for frame in frames())
    duration = 10 * max(
        2, round(100 * seconds)
    )  # in ms; GIF counts 1/100 s, and browsers slow down below 2/100 s
    next(pictures).save(
        file, "GIF", save_all=True, append_images=pictures, duration=duration, loop=0
    )


def save_mp4(frames, seconds: float, file) -> None:
    import imageio_ffmpeg  # its `write_frames` forks a process with threads, and misses failures of ffmpeg

    frames = frames()
    first = next(frames)
    size = f"{first.shape[1]}x{first.shape[0]}"
    source = [
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        size,
        "-r",
        f"{1 / seconds:.3f}",
        "-i",
        "-",
    ]
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # H.264 needs even sizes
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-y",
        "-loglevel",
        "error",
        *source,
        *even,
        "-f",
        "mp4",
        file.name,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        with contextlib.suppress(BrokenPipeError):
            for frame in itertools.chain([first], frames):
                process.stdin.write(frame.tobytes())
        _, said = process.communicate()
    if process.returncode:
        raise ValueError(
            f"formats: mp4 cannot be written ({said.decode(errors='replace').strip()})"
        )


def viewer_modules() -> dict[str, str]:
    """The modules of brax's viewer and its dependencies, by the names of their imports. Raises ValueError."""
    packages, own = PACKAGES, Path(brax.__file__).parent / "visualizer" / "js"
    files = {
        "three": packages / "three/build/three.module.js",
        "three/addons/controls/OrbitControls.js": packages
        / "three/examples/jsm/controls/OrbitControls.js",
        "lilgui": packages / "lil-gui/dist/lil-gui.esm.min.js",
    } | {name: own / f"{name}.js" for name in ("viewer", "animator", "selector", "system")}
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except FileNotFoundError as error:
        command = f"npm ci --prefix {os.path.relpath(VIEWER)}"
        raise ValueError(
            f"formats: html needs {error.filename}; run `{command}` once, or use --formats gif"
        ) from None
    # Inlined modules have no address: relative imports become imports by name.
    return {
        name: re.sub(r"from '\./(\w+)\.js'", r"from '\1'", source)
        for name, source in sources.items()
    }


def make_page(title: str, env, states) -> str:
    """A self-contained page that plays brax states [T, ...] in brax's viewer. Raises ValueError."""
    modules = viewer_modules()
    x = jax.tree.map(lambda leaf: np.round(np.asarray(leaf, np.float64), 5), states.x)
    each = [SimpleNamespace(x=state_at(x, i)) for i in range(len(x.pos))]
    system = brax.io.json.dumps(env.sys.tree_replace({"opt.timestep": float(env.dt)}), each)
    coded = {name: base64.b64encode(source.encode()).decode() for name, source in modules.items()}
    imports = {name: f"data:text/javascript;base64,{code}" for name, code in coded.items()}
    system = system.replace("</", "<\\/")  # must not end the script
    page = Template((VIEWER / "page.html").read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(title), imports=json.dumps(imports), system=system)


def save_episode(
    form: str, path: Path, title: str, config, env, env_params, states, rewards
) -> None:
    if form == "html":
        runs.write(path, make_page(title, env.env, states[0].pipeline_state))
        return
    if form == "svg":
        runs.write(path, partial(save_board_svg, states, len(rewards)))
        return
    frames, seconds = frames_of(config, env, env_params, states, rewards)
    runs.write(path, partial(save_gif if form == "gif" else save_mp4, frames, seconds))


# --- the command line ---


def check_formats(formats, env):
    """Check the formats before anything is played, or choose them. Raises ValueError."""
    bodies = is_brax(env) and hasattr(env.env, "sys")
    if is_brax(env) and not bodies:
        raise ValueError("env_name: this brax environment has no bodies to draw")
    if "html" in formats and not bodies:
        raise ValueError("formats: html is for brax environments; use gif or mp4")
    game = getattr(env, "game", None)
    if game is not None and set(formats) - {"svg"}:
        boards.check_stones(game, "gif and mp4 draw")
    formats = formats or (
        ("gif", "html") if bodies and PACKAGES.exists() else ("gif",) if game is None else ("svg",)
    )
    if "svg" in formats and not type(game).__module__.startswith("pgx."):
        raise ValueError("formats: svg draws the games of Pgx, and no others")
    needed = (
        ["pygame"]
        if getattr(env, "name", "") in DRAWN_BY_GYMNAX and env.name.endswith(("-v0", "-v1"))
        else []
    )
    command_line.check_packages(
        f"formats = {' '.join(formats)}", needed + ["imageio_ffmpeg"] * ("mp4" in formats)
    )
    if "html" in formats:
        viewer_modules()
    return formats


def main(
    run_dir: tyro.conf.Positional[Path],
    agents: tuple[str, ...] = ("best", "median", "worst"),
    formats: tuple[Literal["gif", "html", "mp4", "svg"], ...] = (),
    episode: int = 0,
    max_steps: int = 0,
    out: Path | None = None,
    best: tyro.conf.FlagCreatePairsOff[bool] = False,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> list[Path]:
    """Play episodes and write files. Returns the paths of the files. Raises ValueError.

    Args:
        run_dir: a finished run of a script or of `onejit train`
        agents: best, median, worst, or numbers of agents, from 0
        formats: file formats; gif by default, with html for brax if its viewer is installed; svg for board games
        episode: number of the greedy episode, from 0
        max_steps: number of steps to draw; 0 draws all
        out: folder for the files; RUN_DIR/render by default, RUN_DIR/render_best with --best
        best: play each seed's best agent in the evaluations during training, not its agent after training
        force: use the run's copy of the script although it was edited
    """
    if episode < 0 or max_steps < 0:
        raise ValueError(f"episode = {episode}, max_steps = {max_steps}: must not be negative")
    file = "best_agent.safetensors" if best else "agent.safetensors"
    if best and not (run_dir / file).is_file():
        raise ValueError(
            f"best: {run_dir} has no {file}; `onejit train --eval-interval N` writes it"
        )
    script, config, weights = runs.load_run(run_dir, force, file)
    env, env_params = script.make_env(playing.whole_games(config))
    env = unwrap(env)
    formats = check_formats(formats, env)
    check_agents(script, config, weights, run_dir / file)
    order, by = rank(run_dir, weights, best)
    chosen = choose_agents(agents, order)
    key = playing.evaluation_keys(runs.read_record(run_dir)["settings"]["seed"], episode + 1)[
        episode
    ]
    played = play(script, config, state_at(weights, np.array(list(chosen.values()))), key)
    if len(order) > 1:
        print(f"agents ranked by {by}")
    written = []
    for name, (states, rewards) in zip(chosen, played, strict=True):
        title = f"{Path(script.__file__).stem} on {config.env_name}, {name.replace('_', ' ')}"
        print(f"{title}: return {rewards.sum():.4g} in {len(rewards)} steps")
        shown = slice(max_steps or None)
        for form in formats:
            path = (out or run_dir / ("render_best" if best else "render")) / f"{name}.{form}"
            save_episode(
                form, path, title, config, env, env_params, state_at(states, shown), rewards[shown]
            )
            print(f"  {path}")
            written.append(path)
    return written
