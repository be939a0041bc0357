"""How the environments of a library are drawn: an adapter for each library.

`adapter_of(env)` is the first of ADAPTERS that draws an environment.
"""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from onejit.watch import figures
from onejit.watch.boards import check_stones

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

    frames: Iterator
    seconds: float  # between two frames


class Adapter:
    """Draws the environments of a library."""

    default_formats = ("gif",)
    packages: tuple[str, ...] = ()  # that drawing needs
    seconds: float = 0.1  # that a step lasts

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

    def frames(self, episode: Episode, steps: range) -> Iterator:
        """The pictures of these steps."""
        raise NotImplementedError

    def film(self, episode: Episode) -> Film:
        every = max(1, round(1 / (FRAMES_PER_SECOND * self.seconds)))  # steps between two frames
        return Film(self.frames(episode, episode.steps[::every]), every * self.seconds)


class InRealTime(Adapter):
    """A step lasts `env.dt` seconds, if the environment has this attribute."""

    @property
    def seconds(self):
        return float(getattr(self.env, "dt", 0.1))


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
        super().check_formats(set(formats) - {"html"})

    @property
    def seconds(self):
        return float(self.bodies.dt)

    def frames(self, episode, steps):
        states = episode.states.brax.pipeline_state
        return figures.mujoco_frames(self.bodies, states, episode.rewards, steps)


class Team(InRealTime):
    """An environment of JaxMARL in mappo.py, drawn by JaxMARL's visualizers."""

    @staticmethod
    def draws(env):
        return hasattr(getattr(env, "env", None), "agents")

    def frames(self, episode, steps):
        drawn = importlib.import_module("onejit.watch.jaxmarl").Drawn(self.env)
        return figures.frames_of_all_steps(drawn, episode.states, episode.rewards, steps)


class Board(Adapter):
    """A board game of alphazero.py."""

    default_formats = ("svg",)
    seconds = 1.0

    @staticmethod
    def draws(env):
        return hasattr(env, "game")

    def check_formats(self, formats):
        super().check_formats(set(formats) - {"svg"})
        if set(formats) - {"svg"}:
            check_stones(self.env.game, "gif and mp4 draw")
        if "svg" in formats and not type(self.env.game).__module__.startswith("pgx."):
            raise ValueError("formats: svg draws the games of Pgx, and no others")

    def frames(self, episode, steps):
        return figures.board_frames(episode.env_name, episode.states, episode.rewards, steps)


class Host(InRealTime):
    """An environment outside JAX, which plays the episode again: see onejit.envs.host."""

    @staticmethod
    def draws(env):
        return hasattr(env, "frames")

    def frames(self, episode, steps):
        return figures.frames_of_all_steps(self.env, episode.states, episode.rewards, steps)


class OwnPictures(InRealTime):
    """An environment with a method `frame(state, params)`: see docs/environments.md."""

    @staticmethod
    def draws(env):
        return hasattr(env, "frame")

    def frames(self, episode, steps):
        return figures.own_frames(
            self.env, episode.env_params, episode.states, episode.rewards, steps
        )


class GridWorld(Adapter):
    """The environment of q_learning_gridworld.py."""

    @staticmethod
    def draws(env):
        return hasattr(env, "walls") and hasattr(env, "cliff")

    def frames(self, episode, steps):
        return figures.grid_world_frames(self.env, episode.states, episode.rewards, steps)


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

    @property
    def seconds(self):
        return 0.05 if self.is_drawn_by_pygame else 0.1

    def frames(self, episode, steps):
        return figures.gymnax_frames(
            self.env, episode.env_params, episode.states, episode.rewards, steps
        )


class Observations(Adapter):
    """Any other environment of gymnax: its observations, as grids or as bars."""

    @staticmethod
    def draws(env):
        return True

    def frames(self, episode, steps):
        obs = figures.observe_all(self.env, episode.env_params, episode.states)
        draw = figures.grid_frames if obs.ndim in (3, 4) else figures.bar_frames
        return draw(episode.env_name, obs, episode.rewards, steps)


ADAPTERS = (
    *(Brax, Team, Board, Host, OwnPictures, GridWorld, GymnaxVisualizer),
    Observations,
)


def adapter_of(env) -> Adapter:
    """The adapter of the library that an environment is of."""
    kind = next(kind for kind in ADAPTERS if kind.draws(env))
    return kind(env)
