"""Play an episode of the best, the median and the worst agent of a run, and write it as pictures.

    onejit render runs/ppo_continuous/hopper
    onejit render runs/ppo/cartpole --agents best 3 --formats gif mp4
    onejit render agents/ppo_cartpole

The formats are GIF, MP4, HTML for brax and SVG for board games. The agents act by the copy of the
script in the run directory. They are ranked by their evaluation returns if `onejit train`
has measured them, otherwise by the returns of the last tenth of training. The episode is one of
those greedy episodes, by default the first.
"""

import ctypes.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

# Set before pygame and MuJoCo are imported: both draw without a screen, MuJoCo on the CPU if OSMesa
# is installed.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
    os.environ["MUJOCO_GL"] = ""
    if ctypes.util.find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"
    elif ctypes.util.find_library("EGL"):
        os.environ["MUJOCO_GL"] = "egl"

import jax
import numpy as np
import tyro
from flax.traverse_util import flatten_dict

from onejit.base.text import printable
from onejit.engine import evaluation
from onejit.run.directory import load_run, rank_agents_of_run
from onejit.run.record import read_record
from onejit.script.contract import Script
from onejit.script.environment import unwrap
from onejit.watch import formats as render_formats
from onejit.watch.boards import after_each_move
from onejit.watch.drawing import drawing_of
from onejit.watch.figures import Episode, state_at

# --- agents ---


def check_agents(script: Script, config, agents, path: Path) -> None:
    """Raise ValueError if arrays of `path` [num_seeds, ...] do not fit the script's networks."""
    init, _ = script.make_learner(config)
    expected: Any = flatten_dict(jax.eval_shape(init, jax.random.key(0)).agent, sep=".")
    arrays: Any = flatten_dict(agents, sep=".")
    expected = {name: leaf.shape for name, leaf in expected.items()}
    stored = {name: leaf.shape[1:] for name, leaf in arrays.items()}
    for name in sorted(expected.keys() | stored.keys()):
        here = stored.get(name, "missing")
        there = expected.get(name, "missing")
        if here != there:
            raise ValueError(
                f"{path}: does not fit {script.__file__}: "
                f"{name} is {here}, but {there} in its networks"
            )


def choose_agents(wanted, order) -> dict[str, int]:
    """File names and agents, each agent once: two agents have no median. Raises ValueError."""
    places = {"best": order[-1], "worst": order[0], "median": order[(len(order) - 1) // 2]}
    chosen = {}
    for name in sorted(wanted, key=lambda name: name == "median"):
        if name in places:
            agent = int(places[name])
            file_name = f"{name}_agent{agent}"
        elif name.isdecimal() and int(name) < len(order):
            agent = int(name)
            file_name = f"agent{agent}"
        else:
            raise ValueError(
                f"agents: {name} is neither best, median, worst "
                f"nor a number from 0 to {len(order) - 1}"
            )
        if agent not in chosen.values():
            chosen[file_name] = agent
    return chosen


# --- episodes ---


def play(script: Script, config, agents, keys):
    """A greedy episode of each of `agents` [n, ...], with its key of `keys` [n].

    Returns `[(states before each step, rewards), ...]`, both [T].
    """
    play_all = jax.jit(evaluation.make_player(script, config))
    _, lengths = play_all(agents, keys[:, None])
    record = evaluation.make_recorder(script, config, num_steps=int(lengths.max()))
    episodes = jax.device_get(jax.jit(jax.vmap(record))(agents, keys))
    played = []
    for i, length in enumerate(episodes.valid.sum(axis=1)):
        index = (i, slice(length))
        states = state_at(episodes.env_state, index)
        rewards = episodes.reward[index]
        if episodes.positions is not None:
            positions = state_at(episodes.positions, index)
            states, rewards = after_each_move(states[0], positions, rewards)
        played.append((states, rewards))
    return played


# --- the command line ---


def main(
    run_dir: tyro.conf.Positional[Path],
    agents: tuple[str, ...] = ("best", "median", "worst"),
    formats: tuple[Literal["gif", "html", "mp4", "svg"], ...] = (),
    episode: int = 0,
    max_steps: int = 0,
    out: Path | None = None,
    best: bool = False,
) -> list[Path]:
    """Play episodes and write files. Returns the paths of the files. Raises ValueError.

    Args:
        run_dir: a finished run of a script or of `onejit train`
        agents: best, median, worst, or numbers of agents, from 0
        formats: gif by default, for brax also html; svg for board games
        episode: number of the greedy episode, from 0
        max_steps: number of steps to draw; 0 draws all
        out: folder for the files; RUN_DIR/render by default, RUN_DIR/render_best with --best
        best: play each seed's best agent in the evaluations during training
    """
    if episode < 0 or max_steps < 0:
        raise ValueError(f"episode = {episode}, max_steps = {max_steps}: must not be negative")
    if episode >= 2**20:
        raise ValueError(f"episode = {episode}: must be below {2**20:,}")
    if not agents:
        raise ValueError("agents: must be best, median, worst, or numbers of agents")
    file = "best_agent.safetensors" if best else "agent.safetensors"
    if best and not (run_dir / file).is_file():
        raise ValueError(
            f"best: {run_dir} has no {file}; `onejit train --eval-interval N` writes it"
        )
    script, config, weights = load_run(run_dir, file)
    env, env_params = script.make_env(evaluation.whole_games(config))
    drawing = drawing_of(unwrap(env))
    chosen_formats = render_formats.check_formats(formats, drawing)
    check_agents(script, config, weights, run_dir / file)
    order, criterion = rank_agents_of_run(run_dir, weights, best)
    chosen = choose_agents(agents, order)
    seed = read_record(run_dir).settings["seed"]
    numbers = np.array(list(chosen.values()))
    keys = jax.vmap(partial(evaluation.evaluation_keys, seed, episode + 1))(numbers)[:, episode]
    played = play(script, config, state_at(weights, numbers), keys)

    if len(order) > 1:
        print(f"agents ranked by {criterion}")
    folder = out or run_dir / ("render_best" if best else "render")
    drawn_steps = slice(max_steps or None)
    name_of_script = Path(script.__file__ or "").stem
    written = []
    for name, (states, rewards) in zip(chosen, played, strict=True):
        title = f"{name_of_script} on {config.env_name}, {name.replace('_', ' ')}"
        print(f"{printable(title)}: return {rewards.sum():.4g} in {len(rewards)} steps")
        shown = Episode(
            config.env_name, env_params, state_at(states, drawn_steps), rewards[drawn_steps]
        )
        for form in chosen_formats:
            path = folder / f"{name}.{form}"
            render_formats.save_episode(form, path, title, drawing, shown)
            print(f"  {path}")
            written.append(path)
    return written
