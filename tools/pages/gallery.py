"""The picture of docs/environments.md: an environment of each family, played by a trained agent.

    pip install -c constraints.txt -e ".[tools,envs]"
    python tools/pages/gallery.py

Trains what is not in agents/ or runs/gallery/, one agent each, which takes a CPU about 10 minutes.
The walker comes from docs/figures/agents.gif. On a machine without a screen set MUJOCO_GL to egl or
osmesa.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from small_png import save

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from onejit import train
from onejit.run.directory import load_run
from onejit.script.environment import unwrap
from onejit.watch import figures, render
from onejit.watch.drawing import drawing_of
from onejit.watch.figures import Episode

FIGURES = ROOT / "docs" / "figures"
COLUMNS = 4
SIZE = 260  # pixels of a square picture


class Panel(NamedTuple):
    library: str
    title: str
    run: str  # a trained agent, or the config to train one with
    flags: tuple[str, ...] = ()  # of the training
    max_steps: int | None = None  # of an episode
    share: float = 0.6  # of the episode, until the frame that is drawn
    fit: str = "whole"  # "cut": may lose its left and right edge; "trim": its white edge


PANELS = [
    Panel("gymnax", "CartPole-v1", "agents/ppo_cartpole", fit="cut"),
    Panel("gymnax", "MinAtar Breakout", "agents/ppo_breakout", share=0.4),
    Panel("brax", "hopper", "agents/ppo_continuous_hopper", fit="cut"),
    Panel("Gymnasium", "Walker2d-v4", ""),
    Panel("XLand-MiniGrid", "DoorKey-5x5", "ppo/minigrid_doorkey5", ("--total-timesteps=2e5",)),
    Panel("Craftax", "Craftax-Classic", "ppo/craftax_classic", ("--total-timesteps=3e5",), 200),
    Panel("Jumanji", "Snake-v1", "ppo/snake", share=1.0, fit="trim"),
    Panel("JaxMARL", "Overcooked", "mappo/cramped_room", fit="cut"),
]
EPISODES = 16  # of which the best is drawn


def walker() -> Image.Image:
    """The walker of tools/pages/animation.py, which a trained agent moves."""
    from animation import STRIP

    with Image.open(FIGURES / "agents.gif") as film:
        film.seek(40)
        side = film.height - STRIP
        return film.convert("RGB").crop((0, STRIP, side, STRIP + side))


def axes_alone(figure, axes, title, rewards, steps, update):
    """In place of `figure_frames`: frames without title and ticks."""
    canvas = FigureCanvasAgg(figure)
    axes.set(xticks=[], yticks=[])
    for i in steps:
        update(i)
        axes.set_title("")
        canvas.draw()
        box = axes.get_window_extent()
        rows = slice(round(figure.bbox.height - box.y1), round(figure.bbox.height - box.y0))
        yield np.array(canvas.buffer_rgba())[rows, round(box.x0) : round(box.x1), :3]


def frame(panel: Panel) -> Image.Image:
    """A frame of the best of some greedy episodes."""
    run_dir = ROOT / panel.run
    if not panel.run.startswith("agents/"):
        run_dir = ROOT / "runs" / "gallery" / panel.run.replace("/", "-")
        if not run_dir.exists():
            script = panel.run.partition("/")[0]
            config = str(ROOT / "configs" / f"{panel.run}.yaml")
            flags = ["--num-seeds=1", *panel.flags, f"--run-dir={run_dir}"]
            train.main([script, "--config", config, *flags])
    script, config, agents = load_run(run_dir)
    if panel.max_steps:
        params = dict(config.env_params) | {"max_steps_in_episode": panel.max_steps}
        config = dataclasses.replace(config, env_params=params)
    env, env_params = script.make_env(config)
    keys = jax.random.split(jax.random.key(1), EPISODES)
    agents = jax.tree.map(lambda leaf: np.repeat(leaf[:1], EPISODES, axis=0), agents)
    episodes = render.play(script, config, agents, keys)
    states, rewards = max(episodes, key=lambda episode: episode[1].sum())
    print(f"{panel.title}: {len(rewards)} steps, return {rewards.sum():.4g}")
    with (
        mock.patch.object(figures, "figure_frames", axes_alone),
        mock.patch.object(figures, "captioned", lambda picture, *_: np.asarray(picture)),
    ):
        episode = Episode(config.env_name, env_params, states, rewards)
        frames, _ = drawing_of(unwrap(env)).film(episode)
        frames = list(frames)
    return Image.fromarray(frames[min(int(panel.share * len(frames)), len(frames) - 1)])


def square(picture: Image.Image, fit: str) -> Image.Image:
    """The picture in a square of SIZE, on grey where it does not fill it."""
    if fit == "trim":
        picture = picture.crop(ImageOps.invert(picture).getbbox())
    choose = min if fit == "cut" else max
    scale = SIZE / choose(picture.size)
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    scaled = picture.resize([round(scale * side) for side in picture.size], smooth)
    whole = Image.new("RGB", (SIZE, SIZE), (235, 235, 235))
    whole.paste(scaled, ((SIZE - scaled.width) // 2, (SIZE - scaled.height) // 2))
    return whole


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FIGURES / "gallery.png")
    options = parser.parse_args()
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    grid = figure.subplots(len(PANELS) // COLUMNS, COLUMNS).flatten()
    for axes, panel in zip(grid, PANELS, strict=True):
        axes.imshow(square(frame(panel) if panel.run else walker(), panel.fit))
        axes.set_title(f"{panel.library}:\n{panel.title}", fontsize=10)
        axes.set(xticks=[], yticks=[])
    save(figure, options.out, colors=256)


if __name__ == "__main__":
    main()
