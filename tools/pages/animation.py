"""The picture at the top of docs/index.md: three agents, side by side as a GIF.

    pip install -c constraints.txt -e ".[tools]" envpool "gymnasium[mujoco]"
    python tools/pages/animation.py --out docs/figures/agents.gif

Walker2d-v4 after configs/ppo_continuous/mujoco_walker2d.yaml, MinAtar's Breakout played by
agents/ppo_breakout, and the values of the GridWorld of configs/q_learning_gridworld/walls.yaml
while they are learned. For the walker, four agents are trained and the best one plays. The longest
of 16 greedy episodes is drawn. EnvPool trains the walker and Gymnasium draws it, which needs
libosmesa6 on a machine without a screen.
"""

import argparse
import dataclasses
import itertools
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from onejit import train
from onejit.base import files
from onejit.run.directory import load_results, load_run, read_config
from onejit.script import load
from onejit.script.environment import unwrap
from onejit.watch import figures, render

CONFIGS = ROOT / "configs"
SIZE = 300  # pixels of a square picture
STRIP = 68  # pixels of the caption above it, which is read at half of the size on a telephone
GAP = 12


def longest_episode(run_dir: Path, best: int, max_steps: int, drawn_in: str = ""):
    """The longest of 16 greedy episodes of the agent `best`, perhaps in another environment."""
    script, config, agents = load_run(run_dir)
    agent = jax.tree.map(lambda leaf: np.repeat(leaf[best][None], 16, axis=0), agents)
    config = dataclasses.replace(config, env_name=drawn_in or config.env_name)
    episodes = render.play(script, config, agent, jax.random.split(jax.random.key(0), 16))
    states, rewards = max(episodes, key=lambda episode: len(episode[1]))
    print(f"{run_dir.name}: an episode of {len(rewards)} steps, return {rewards.sum():.4g}")
    return script, config, *jax.tree.map(lambda leaf: leaf[:max_steps], (states, rewards))


def walker_frames(count: int):
    """`(caption, picture)` of the walker, 25 in a second of its life."""
    every = 5  # steps of 8 ms
    run_dir = ROOT / "runs" / "animation" / "mujoco_walker2d"
    if not run_dir.exists():
        config = str(CONFIGS / "ppo_continuous" / "mujoco_walker2d.yaml")
        words = ["--config", config, "--num-seeds=4", f"--run-dir={run_dir}"]
        train.main(["ppo_continuous", *words])
    best = load_results(run_dir).training_return().argmax()
    script, config, states, rewards = longest_episode(
        run_dir, best, count * every, "onejit.envs.gymnasium:Walker2d-v4"
    )
    env, steps = unwrap(script.make_env(config)[0]), range(0, len(rewards), every)
    for step, picture in zip(steps, env.frames(states, steps), strict=True):
        yield f"return {rewards[: step + 1].sum():.0f}", picture


def breakout_frames(count: int):
    """`(caption, picture)` of the grid: a colour for each channel, as onejit render has them."""
    every = 3  # so that most of an episode fits
    run_dir = ROOT / "agents" / "ppo_breakout"
    script, config, states, rewards = longest_episode(run_dir, 0, count * every)
    env, env_params = script.make_env(config)
    obs = figures.observe_all(unwrap(env), env_params, states)
    for step, picture in list(enumerate(figures.channel_colors(obs)))[::every]:
        yield f"return {rewards[: step + 1].sum():.0f}", np.uint8(255 * picture)


def grid_world_frames(count: int):
    """`(caption, picture)` of the largest value of each cell, at logarithmically spaced steps."""
    script = load.load_script("q_learning_gridworld")
    config = read_config(script, CONFIGS / "q_learning_gridworld" / "walls.yaml")
    config = dataclasses.replace(config, num_steps=100)
    env, _ = script.make_env(config)
    init, update = map(jax.jit, script.make_learner(config))
    state, values = init(jax.random.key(0)), []
    for _ in range(config.num_updates):
        state, _ = update(state)
        values.append(np.asarray(state.q).max(axis=1).reshape(env.height, env.width))
    norm = Normalize(min(value.min() for value in values), values[-1].max())
    walls = env.walls.reshape(env.height, env.width)
    chosen = np.unique(np.geomspace(1, config.num_updates, 3 * count).astype(int))
    for i in chosen[np.linspace(0, len(chosen) - 1, count).astype(int)]:
        colors = np.uint8(255 * colormaps["viridis"](norm(values[i - 1]))[..., :3])
        colors[walls] = 60
        colors[divmod(env.goal, env.width)] = 220, 40, 40
        yield f"red goal; {i * config.num_steps:,} steps", colors


def panel(title: str, caption: str, picture) -> Image.Image:
    """A picture of SIZE, enlarged without smoothing, and two lines above it."""
    image = Image.new("RGB", (SIZE, SIZE + STRIP), "white")
    height, width = picture.shape[:2]
    scale = min(SIZE / width, SIZE / height)
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    drawn = Image.fromarray(np.asarray(picture)).resize(
        (round(width * scale), round(height * scale)), smooth
    )
    image.paste(drawn, ((SIZE - drawn.width) // 2, STRIP + (SIZE - drawn.height) // 2))
    draw = ImageDraw.Draw(image)
    draw.text((2, 2), title, fill="black", font=ImageFont.load_default(27))
    draw.text((2, 35), caption, fill=(90, 90, 90), font=ImageFont.load_default(25))
    return image


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("agents.gif"))
    parser.add_argument("--frames", type=int, default=150)
    options = parser.parse_args()
    count = options.frames
    parts = {
        "PPO: Walker2d-v4": list(itertools.islice(itertools.cycle(walker_frames(count)), count)),
        "PPO: MinAtar Breakout": list(
            itertools.islice(itertools.cycle(breakout_frames(count)), count)
        ),
        "Q-learning: values": list(grid_world_frames(count)),
    }
    frames = []
    for row in zip(*parts.values(), strict=True):
        frame = Image.new(
            "RGB", (len(parts) * SIZE + (len(parts) - 1) * GAP, SIZE + STRIP), "white"
        )
        for place, (title, (caption, picture)) in enumerate(zip(parts, row, strict=True)):
            frame.paste(panel(title, caption, picture), (place * (SIZE + GAP), 0))
        frames.append(frame)
    # One palette for all frames and no dithering: what does not move takes no room.
    sample = Image.new("RGB", (frames[0].width, 5 * frames[0].height))
    for place, frame in enumerate(frames[:: max(1, count // 5)][:5]):
        sample.paste(frame, (0, place * frame.height))
    palette = sample.quantize(128)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    save = partial(
        frames[0].save, format="GIF", save_all=True, append_images=frames[1:], duration=60, loop=0
    )
    files.write(options.out, lambda file: save(file, optimize=True))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB, {len(frames)} frames")


if __name__ == "__main__":
    main()
