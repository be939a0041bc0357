"""How the environments of each library are drawn: their pictures, speed and formats."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from onejit.watch import figures
from onejit.watch.boards import STONES
from onejit.watch.figures import Episode

FRAMES_PER_SECOND = 30  # of physics and games, in real time
DRAWN_BY_GYMNAX = (
    *("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("Catch-bsuite", "PointRobot-misc", "MetaMaze-misc", "FourRooms-misc"),
)


class Drawing(NamedTuple):
    """How an environment is drawn."""

    frames: Callable[[Episode, range], Iterator]  # the pictures of some steps
    seconds: float = 0.1  # that a step lasts
    formats: tuple[str, ...] = ("gif", "mp4")
    default_formats: tuple[str, ...] = ("gif",)
    packages: tuple[str, ...] = ()  # that drawing needs
    bodies: Any = None  # the brax environment, which html needs

    def film(self, episode: Episode) -> tuple[Iterator, float]:
        """The pictures of an episode, and the seconds between two of them."""
        every = max(1, round(1 / (FRAMES_PER_SECOND * self.seconds)))  # steps between two frames
        steps = range(len(episode.rewards))[::every]
        return self.frames(episode, steps), every * self.seconds


def drawing_of(env) -> Drawing:
    """How an environment without wrappers is drawn. Raises ValueError if it cannot be drawn."""
    seconds = float(getattr(env, "dt", 0.1))
    inner = getattr(env, "env", None)
    kinds = type(inner).__mro__  # importing brax would import MuJoCo
    if any(kind.__module__ == "brax.envs.base" for kind in kinds):
        return of_brax(inner)
    if hasattr(inner, "agents"):  # JaxMARL, in mappo.py
        drawn = importlib.import_module("onejit.watch.jaxmarl").Drawn(env)
        return Drawing(partial(figures.frames_of_all_steps, drawn), seconds)
    if hasattr(env, "game"):
        return of_board(env.game)
    if hasattr(env, "frames"):  # outside JAX, where it plays the episode again: onejit.envs.host
        return Drawing(partial(figures.frames_of_all_steps, env), seconds)
    if hasattr(env, "frame"):  # its own `frame(state, params)`: docs/environments.md
        return Drawing(partial(figures.own_frames, env), seconds)
    if hasattr(env, "walls") and hasattr(env, "cliff"):  # of q_learning_gridworld.py
        return Drawing(partial(figures.grid_world_frames, env))
    name = getattr(env, "name", "")
    if name in DRAWN_BY_GYMNAX:
        frames = partial(figures.gymnax_frames, env)
        if name.endswith(("-v0", "-v1")):  # by Gymnasium's code
            return Drawing(frames, 0.05, packages=("pygame",))
        return Drawing(frames)
    return Drawing(partial(figures.observation_frames, env))


def of_brax(env) -> Drawing:
    if not hasattr(env, "sys"):
        raise ValueError("env_name: this brax environment has no bodies to draw")
    return Drawing(
        partial(figures.mujoco_frames, env),
        seconds=float(env.dt),
        formats=("gif", "html", "mp4"),
        default_formats=("gif", "html"),
        bodies=env,
    )


def of_board(game) -> Drawing:
    """A board game of alphazero.py: Pgx draws SVG, and stones are drawn here."""
    formats = ("svg",) if type(game).__module__.startswith("pgx.") else ()
    if game.id in STONES:
        formats += ("gif", "mp4")
    return Drawing(figures.board_frames, 1.0, formats, default_formats=formats[:1])
