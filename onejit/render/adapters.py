"""How the environments of a library are drawn: an adapter for each library.

`adapter_of(env)` is the first of ADAPTERS that draws an environment.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from onejit.play import check_stones
from onejit.render import figures

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

    @property
    def steps(self) -> range:
        return range(len(self.rewards))


class Film(NamedTuple):
    """Pictures of an episode."""

    frames: Callable  # a function that yields the frames at each call
    seconds: float  # between two frames


class Adapter:
    """Draws the environments of a library."""

    default_formats = ("gif",)
    packages: tuple[str, ...] = ()  # that drawing needs

    def __init__(self, env):
        self.env = env

    @staticmethod
    def draws(env) -> bool:
        """Whether this is the adapter of an environment."""
        raise NotImplementedError

    def check_formats(self, formats) -> None:
        """Raise ValueError if the environment cannot be written in one of the formats."""
        if "html" in formats:
            raise ValueError("formats: html is for brax environments; use gif or mp4")
        if "svg" in formats:
            raise ValueError("formats: svg draws the games of Pgx, and no others")

    def film(self, episode: Episode) -> Film:
        raise NotImplementedError

    def every(self, dt: float) -> int:
        """Steps from a frame to the next, if a step takes `dt` seconds."""
        return max(1, round(1 / (FRAMES_PER_SECOND * dt)))


class Brax(Adapter):
    """The scripts' adapter of a brax environment."""

    default_formats = ("gif", "html")

    @staticmethod
    def draws(env):
        kinds = type(getattr(env, "env", None)).__mro__  # importing brax would import MuJoCo
        return any(kind.__module__ == "brax.envs.base" for kind in kinds)

    @property
    def bodies(self):
        """The brax environment."""
        return self.env.env

    def check_formats(self, formats):
        if not hasattr(self.bodies, "sys"):
            raise ValueError("env_name: this brax environment has no bodies to draw")
        if "svg" in formats:
            raise ValueError("formats: svg draws the games of Pgx, and no others")

    def film(self, episode):
        dt = float(self.bodies.dt)
        every = self.every(dt)
        frames = partial(
            figures.mujoco_frames,
            self.bodies,
            episode.states.brax.pipeline_state,
            episode.rewards,
            episode.steps[::every],
        )
        return Film(frames, every * dt)


class Team(Adapter):
    """An environment of JaxMARL in mappo.py, drawn by JaxMARL's visualizers."""

    @staticmethod
    def draws(env):
        return hasattr(getattr(env, "env", None), "agents")

    def film(self, episode):
        drawn = importlib.import_module("onejit.envs.jaxmarl").Drawn(self.env)
        dt = float(getattr(self.env, "dt", 0.1))
        every = self.every(dt)
        steps = episode.steps[::every]
        frames = partial(figures.frames_of_all_steps, drawn, episode.states, episode.rewards, steps)
        return Film(frames, every * dt)


class Board(Adapter):
    """A board game of alphazero.py."""

    default_formats = ("svg",)

    @staticmethod
    def draws(env):
        return hasattr(env, "game")

    def check_formats(self, formats):
        if "html" in formats:
            raise ValueError("formats: html is for brax environments; use gif or mp4")
        if set(formats) - {"svg"}:
            check_stones(self.env.game, "gif and mp4 draw")
        if "svg" in formats and not type(self.env.game).__module__.startswith("pgx."):
            raise ValueError("formats: svg draws the games of Pgx, and no others")

    def film(self, episode):
        frames = partial(
            figures.board_frames,
            episode.env_name,
            episode.states,
            episode.rewards,
            episode.steps,
        )
        return Film(frames, seconds=1.0)


class Host(Adapter):
    """An environment outside JAX, which plays the episode again: see onejit.envs.host."""

    @staticmethod
    def draws(env):
        return hasattr(env, "frames")

    def film(self, episode):
        dt = float(getattr(self.env, "dt", 0.1))
        every = self.every(dt)
        steps = episode.steps[::every]
        frames = partial(
            figures.frames_of_all_steps, self.env, episode.states, episode.rewards, steps
        )
        return Film(frames, every * dt)


class OwnPictures(Adapter):
    """An environment with a method `frame(state, params)`: see docs/environments.md."""

    @staticmethod
    def draws(env):
        return hasattr(env, "frame")

    def film(self, episode):
        dt = float(getattr(self.env, "dt", 0.1))
        every = self.every(dt)
        frames = partial(
            figures.own_frames,
            self.env,
            episode.env_params,
            episode.states,
            episode.rewards,
            episode.steps[::every],
        )
        return Film(frames, every * dt)


class GridWorld(Adapter):
    """The environment of q_learning_gridworld.py."""

    @staticmethod
    def draws(env):
        return hasattr(env, "walls") and hasattr(env, "cliff")

    def film(self, episode):
        frames = partial(
            figures.grid_world_frames, self.env, episode.states, episode.rewards, episode.steps
        )
        return Film(frames, seconds=0.1)


class GymnaxVisualizer(Adapter):
    """An environment that gymnax draws, some of them by Gymnasium's code with pygame."""

    @staticmethod
    def draws(env):
        return getattr(env, "name", "") in DRAWN_BY_GYMNAX

    @property
    def is_drawn_by_pygame(self) -> bool:
        return self.env.name.endswith(("-v0", "-v1"))

    @property
    def packages(self):
        return ("pygame",) if self.is_drawn_by_pygame else ()

    def film(self, episode):
        frames = partial(
            figures.gymnax_frames,
            self.env,
            episode.env_params,
            episode.states,
            episode.rewards,
            episode.steps,
        )
        return Film(frames, seconds=0.05 if self.is_drawn_by_pygame else 0.1)


class Observations(Adapter):
    """Any other environment of gymnax: its observations, as grids or as bars."""

    @staticmethod
    def draws(env):
        return True

    def film(self, episode):
        obs = figures.observe_all(self.env, episode.env_params, episode.states)
        draw = figures.grid_frames if obs.ndim in (3, 4) else figures.bar_frames
        frames = partial(draw, episode.env_name, obs, episode.rewards, episode.steps)
        return Film(frames, seconds=0.1)


ADAPTERS = (
    *(Brax, Team, Board, Host, OwnPictures, GridWorld, GymnaxVisualizer),
    Observations,
)


def adapter_of(env) -> Adapter:
    """The adapter of the library that an environment is of."""
    kind = next(kind for kind in ADAPTERS if kind.draws(env))
    return kind(env)
