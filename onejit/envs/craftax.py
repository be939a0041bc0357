"""Craftax and Craftax-Classic, symbolic and in pixels (arXiv 2402.16801).

    python pqn.py --env-name onejit.envs.craftax:Craftax-Classic-Symbolic-v1

Making a world takes 14 times as long as a step on a CPU. Episodes therefore begin in one of
`start_states` worlds.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces

from onejit.envs.adapter import State, needs, register, start_from

with needs("craftax==1.6.1"):
    from craftax.craftax_env import (  # pyright: ignore[reportMissingImports]
        make_craftax_env_from_name,
    )

NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)


class Craftax(environment.Environment):
    """`parameters` are Craftax's own, such as `day_length`, fixed when the environment is made."""

    def __init__(self, name: str, start_states: int = 0, **parameters):
        self.env = make_craftax_env_from_name(name, auto_reset=False)
        parameters = self.env.default_params.replace(**parameters)
        self.limit = parameters.max_timesteps
        # without its time limit, its `done` is `terminated`
        self.parameters = parameters.replace(max_timesteps=np.iinfo(np.int32).max)
        if not start_states:
            start_states = 1024 if "Classic" in name else 128  # of 26 kB, or of 290 kB
        self.start = start_from(lambda key: self.env.reset(key, self.parameters), start_states)

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.limit)

    def reset_env(self, key, params):
        obs, inner = self.start(key)
        return obs, State(time=jnp.int32(0), inner=inner)

    def step_env(self, key, state, action, params):
        obs, inner, reward, terminated, _ = self.env.step(key, state.inner, action, self.parameters)
        return obs, State(time=state.time + 1, inner=inner), reward, terminated, {}

    def observation_space(self, params):
        space = self.env.observation_space(self.parameters)
        return spaces.Box(space.low, space.high, space.shape, space.dtype)

    def action_space(self, params=None):
        return spaces.Discrete(self.env.num_actions)

    @functools.cached_property
    def draw(self):
        library = type(self.env).__module__.split(".envs.")[0]
        renderer = importlib.import_module(f"{library}.renderer")
        size = importlib.import_module(f"{library}.constants").BLOCK_PIXEL_SIZE_IMG
        # reads textures, the first time for a minute
        return jax.jit(renderer.make_craftax_pixel_renderer(size))

    def frame(self, state, params):
        return np.asarray(self.draw(state.inner)).astype(np.uint8)


register(NAMES, Craftax, __name__)
