"""How the environments of each library are drawn: their pictures, speed and formats."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from onejit.watch import figures
from onejit.watch.boards import STONES

FRAMES_PER_SECOND = 30  # of physics and games, in real time
DRAWN_BY_GYMNAX = (
    *("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("Catch-bsuite", "PointRobot-misc", "MetaMaze-misc", "FourRooms-misc"),
)


class Episode(NamedTuple):
    """An episode to be drawn."""

    env_name: str
    env_params: Any
    states: Any  # before each step: [T, ...]
    rewards: np.ndarray  # [T]


class Film(NamedTuple):
    """Pictures of an episode."""

    frames: Iterator
    seconds: float  # between two frames


class Drawing(NamedTuple):
    """How an environment is drawn."""

    frames: Callable[[Episode, range], Iterator]  # the pictures of some steps
    seconds: float = 0.1  # that a step lasts
    formats: tuple[str, ...] = ("gif", "mp4")
    default_formats: tuple[str, ...] = ("gif",)
    packages: tuple[str, ...] = ()  # that drawing needs
    bodies: Any = None  # the brax environment, which html needs

    def film(self, episode: Episode) -> Film:
        every = max(1, round(1 / (FRAMES_PER_SECOND * self.seconds)))  # steps between two frames
        steps = range(len(episode.rewards))[::every]
        return Film(self.frames(episode, steps), every * self.seconds)


def drawing_of(env) -> Drawing:
    """How an environment without wrappers is drawn. Raises ValueError if it cannot be drawn."""
    seconds = float(getattr(env, "dt", 0.1))
    inner = getattr(env, "env", None)
    kinds = type(inner).__mro__  # importing brax would import MuJoCo
    if any(kind.__module__ == "brax.envs.base" for kind in kinds):
        return of_brax(inner)
    if hasattr(inner, "agents"):  # JaxMARL, in mappo.py
        drawn = importlib.import_module("onejit.watch.jaxmarl").Drawn(env)
        return Drawing(of_all_steps(drawn), seconds)
    if hasattr(env, "game"):
        return of_board(env.game)
    if hasattr(env, "frames"):  # outside JAX, where it plays the episode again: onejit.envs.host
        return Drawing(of_all_steps(env), seconds)
    if hasattr(env, "frame"):  # its own `frame(state, params)`: docs/environments.md

        def own(episode, steps):
            return figures.own_frames(
                env, episode.env_params, episode.states, episode.rewards, steps
            )

        return Drawing(own, seconds)
    if hasattr(env, "walls") and hasattr(env, "cliff"):  # of q_learning_gridworld.py

        def grid_world(episode, steps):
            return figures.grid_world_frames(env, episode.states, episode.rewards, steps)

        return Drawing(grid_world)
    if getattr(env, "name", "") in DRAWN_BY_GYMNAX:
        return of_gymnax(env)

    def observations(episode, steps):
        obs = figures.observe_all(env, episode.env_params, episode.states)
        draw = figures.grid_frames if obs.ndim in (3, 4) else figures.bar_frames
        return draw(episode.env_name, obs, episode.rewards, steps)

    return Drawing(observations)


def of_brax(env) -> Drawing:
    if not hasattr(env, "sys"):
        raise ValueError("env_name: this brax environment has no bodies to draw")

    def frames(episode, steps):
        states = episode.states.brax.pipeline_state
        return figures.mujoco_frames(env, states, episode.rewards, steps)

    formats = ("gif", "html", "mp4")
    return Drawing(frames, float(env.dt), formats, default_formats=("gif", "html"), bodies=env)


def of_board(game) -> Drawing:
    """A board game of alphazero.py: Pgx draws SVG, and stones are drawn here."""

    def frames(episode, steps):
        return figures.board_frames(episode.env_name, episode.states, episode.rewards, steps)

    formats = ("svg",) if type(game).__module__.startswith("pgx.") else ()
    if game.id in STONES:
        formats += ("gif", "mp4")
    return Drawing(frames, 1.0, formats, default_formats=formats[:1])


def of_gymnax(env) -> Drawing:
    """An environment that gymnax draws, some of them by Gymnasium's code with pygame."""

    def frames(episode, steps):
        return figures.gymnax_frames(
            env, episode.env_params, episode.states, episode.rewards, steps
        )

    if env.name.endswith(("-v0", "-v1")):
        return Drawing(frames, 0.05, packages=("pygame",))
    return Drawing(frames)


def of_all_steps(drawn):
    """The pictures of a team, or of an environment that plays the episode again."""

    def frames(episode, steps):
        return figures.frames_of_all_steps(drawn, episode.states, episode.rewards, steps)

    return frames
