"""Pictures of an episode: functions that yield frames [H, W, 3] of bytes, one per step."""

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
from gymnax.visualize import Visualizer
from matplotlib import colormaps, pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from onejit.base.labels import as_label
from onejit.watch.boards import stones

pyplot.switch_backend("agg")

WHITE = (255, 255, 255)
DARK = (77, 77, 77)
RED = (222, 120, 110)


class Episode(NamedTuple):
    """An episode to be drawn."""

    env_name: str
    env_params: Any
    states: Any  # before each step: [T, ...]
    rewards: np.ndarray  # [T]


def state_at(states, index):
    return jax.tree.map(lambda leaf: leaf[index], states)


# --- figures of Matplotlib ---


def figure_frames(figure, axes, title: str, rewards, steps, update):
    """Frames of a Matplotlib figure; `update(i)` shows step i."""
    canvas = FigureCanvasAgg(figure)
    returns = np.cumsum(rewards)
    for i in steps:
        update(i)
        axes.set_title(f"{as_label(title)}\nstep {i + 1}, return {returns[i]:.4g}", fontsize=10)
        canvas.draw()
        yield np.array(canvas.buffer_rgba())[..., :3]


def new_figure(width=4.0, height=4.0):
    figure = Figure(figsize=(width, height), dpi=80, layout="constrained")
    return figure, figure.subplots()


def draw_grid_lines(axes, height: int, width: int, **style) -> None:
    axes.set_xticks(np.arange(width + 1) - 0.5, [])
    axes.set_yticks(np.arange(height + 1) - 0.5, [])
    axes.grid(**style)


def gymnax_frames(env, episode: Episode, steps):
    """Frames from gymnax's visualizer."""
    rewards = episode.rewards
    try:
        states = [state_at(episode.states, i) for i in range(len(rewards))]
        drawn = Visualizer(env, episode.env_params, states)
        drawn.fig.set(figwidth=4.0, figheight=3.6, dpi=80)
        drawn.init()
        drawn.fig.set_layout_engine("constrained")
        yield from figure_frames(drawn.fig, drawn.ax, env.name, rewards, steps, drawn.update)
    finally:
        pyplot.close("all")


def grid_world_frames(env, episode: Episode, steps):
    """Walls are dark, the cliff is red, the goal is a star, the agent is a dot with its path."""
    figure, axes = new_figure(1.0 + 0.4 * min(env.width, 20), 1.4 + 0.4 * min(env.height, 20))
    kinds = np.where(env.walls, 1, np.where(env.cliff, 2, 0)).reshape(env.height, env.width)
    axes.imshow(np.array([WHITE, DARK, RED], np.uint8)[kinds])
    draw_grid_lines(axes, env.height, env.width, color="0.85")
    goal_row, goal_column = divmod(env.goal, env.width)
    axes.plot(goal_column, goal_row, "*", color="goldenrod", markersize=16)
    rows, columns = np.divmod(np.asarray(episode.states.cell), env.width)
    (path,) = axes.plot([], [], color="tab:blue", alpha=0.4, linewidth=3)
    (agent,) = axes.plot([], [], "o", color="tab:blue", markersize=12)

    def update(i):
        path.set_data(columns[: i + 1], rows[: i + 1])
        agent.set_data(columns[i : i + 1], rows[i : i + 1])

    return figure_frames(figure, axes, "GridWorld", episode.rewards, steps, update)


def board_frames(episode: Episode, steps):
    """The stones of a board game after each move, the first player's dark."""
    rewards = episode.rewards
    boards = np.stack([stones(state_at(episode.states, i)) for i in range(len(rewards))])
    _, height, width = boards.shape
    figure, axes = new_figure(1.0 + 0.35 * width, 1.4 + 0.35 * height)
    colors = ListedColormap(["#e8dcc0", "#222222", "#d9534f"])
    image = axes.imshow(boards[0], cmap=colors, vmin=0, vmax=2)
    draw_grid_lines(axes, height, width, color="white", linewidth=2)

    def update(i):
        image.set_data(boards[i])

    return figure_frames(figure, axes, episode.env_name, rewards, steps, update)


def observe_all(env, env_params, states) -> np.ndarray:
    """The observations of an episode, [T, ...], floats or bytes.

    Numbers of states become one-hot vectors.
    """

    def observe(state):
        return env.observe(jax.random.key(0), state, None, env_params)

    try:
        obs = jax.vmap(observe)(states)
    except NotImplementedError as error:  # gymnax's Environment raises it
        raise ValueError(
            "env_name: this environment cannot be drawn; it has neither `frame` nor `observe`"
        ) from error
    obs = obs.obs if hasattr(obs, "action_mask") else obs
    space = env.observation_space(env_params)
    if hasattr(space, "n"):
        obs = jax.nn.one_hot(obs, space.n)
    obs = np.asarray(obs)
    return obs if obs.dtype == np.uint8 else obs.astype(float)


def channel_colors(obs) -> np.ndarray:
    """Observations [T, H, W, C] with a colour for each channel, later channels on top."""
    channels = obs.shape[-1]
    turbo = colormaps["turbo"](np.linspace(0.1, 0.95, channels))[:, :3]
    colors = np.vstack([[0, 0, 0], turbo])
    topmost = ((obs > 0) * (1 + np.arange(channels))).max(axis=-1)
    return colors[topmost]


def grey_levels(obs) -> np.ndarray:
    """Observations [T, H, W] between 0 and 1."""
    return (obs - obs.min()) / max(np.ptp(obs), 1e-9)


def image_colors(obs) -> np.ndarray:
    """Images of bytes [T, H, W] or [T, H, W, C]: three channels are red, green and blue.

    Of any other number only the last channel is shown, in grey: the newest of stacked images.
    """
    pixels = obs / 255
    return pixels if obs.ndim == 3 or obs.shape[-1] == 3 else pixels[..., -1]


def grid_frames(title: str, obs, rewards, steps):
    """Images of bytes; other observations [T, H, W] in grey, or [T, H, W, C] in colors."""
    if obs.dtype == np.uint8 and obs.max() > 1:
        pictures = image_colors(obs)
    elif obs.ndim == 3:
        pictures = grey_levels(obs)
    else:
        pictures = channel_colors(obs)
    figure, axes = new_figure()
    image = axes.imshow(pictures[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])

    def update(i):
        image.set_data(pictures[i])

    return figure_frames(figure, axes, title, rewards, steps, update)


def observation_frames(env, episode: Episode, steps):
    """Pictures of observations that are images or grids, bars of all others."""
    obs = observe_all(env, episode.env_params, episode.states)
    draw = grid_frames if obs.ndim in (3, 4) else bar_frames
    return draw(episode.env_name, obs, episode.rewards, steps)


def bar_frames(title: str, obs, rewards, steps):
    """The entries of observations [T, ...] as bars."""
    obs = obs.reshape(len(obs), -1)
    figure, axes = new_figure()
    bars = axes.bar(range(obs.shape[1]), obs[0])
    margin = 0.05 * max(np.ptp(obs), 1e-9)
    low = min(obs.min(), 0.0) - margin
    high = max(obs.max(), 0.0) + margin
    axes.set(xlabel="entry of the observation", ylim=(low, high))

    def update(i):
        for bar, value in zip(bars, obs[i], strict=True):
            bar.set_height(value)

    return figure_frames(figure, axes, title, rewards, steps, update)


# --- pictures of libraries ---


def captioned(picture, i: int, episodic_return: float):
    frame = Image.fromarray(picture)
    scale = max(1, 300 // frame.width)
    frame = frame.resize([size * scale for size in frame.size], Image.Resampling.NEAREST)
    text = f"step {i + 1}, return {episodic_return:.4g}"
    ImageDraw.Draw(frame).text((8, 8), text, fill="white", stroke_width=1, stroke_fill="black")
    return np.asarray(frame)


def captioned_frames(pictures, episode: Episode, steps):
    returns = np.cumsum(episode.rewards)
    for i, picture in zip(steps, pictures, strict=True):
        yield captioned(picture, i, float(returns[i]))


def own_frames(env, episode: Episode, steps):
    """Frames from the environment's own `frame(state, params)`."""
    pictures = (env.frame(state_at(episode.states, i), episode.env_params) for i in steps)
    return captioned_frames(pictures, episode, steps)


def frames_of_all_steps(env, episode: Episode, steps):
    """Frames from `env.frames(states, steps)`.

    It draws a team, or plays an episode outside JAX again.
    """
    try:
        yield from captioned_frames(env.frames(episode.states, steps), episode, steps)
    except Exception as error:  # each library raises its own
        cause = str(error) or type(error).__name__
        raise ValueError(f"env_name: this environment cannot be drawn here ({cause})") from error


def make_renderer(model, width: int, height: int):
    """MuJoCo's renderer. Raises ValueError."""
    try:
        import mujoco  # fails where MUJOCO_GL names a library that is missing

        return mujoco.Renderer(model, height=height, width=width)
    except Exception as error:  # each renderer raises its own kind
        raise ValueError(
            f"MuJoCo cannot draw without a screen here ({type(error).__name__}: {error}): "
            "install libosmesa6, set MUJOCO_GL, or use --formats html"
        ) from error


def mujoco_frames(env, episode: Episode, steps):
    """Frames of a brax environment, drawn by MuJoCo from the `track` camera if there is one."""
    return captioned_frames(mujoco_pictures(env, episode.states, steps), episode, steps)


def mujoco_pictures(env, states, steps, width=480, height=360):
    physics = states.brax.pipeline_state
    model = env.sys.mj_model
    names = [model.cam(i).name for i in range(model.ncam)]
    camera = -1  # looks at the middle from afar
    if "track" in names:
        camera = "track"
    elif names:
        camera = 0
    renderer = make_renderer(model, width, height)
    import mujoco

    data = mujoco.MjData(model)  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.closing(renderer):
        for i in steps:
            data.qpos[:] = physics.q[i]
            data.qvel[:] = physics.qd[i]
            mujoco.mj_forward(model, data)  # pyright: ignore[reportAttributeAccessIssue]
            renderer.update_scene(data, camera=camera)
            yield renderer.render()
