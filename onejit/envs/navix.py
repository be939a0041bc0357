"""Navix, MiniGrid in JAX (arXiv 2407.19396).

    python ppo.py --env-name onejit.envs.navix:Navix-Empty-8x8-v0
    python ppo.py --env-name onejit.envs.navix:Navix-DoorKey-5x5-v0 --env-params observation rgb

An episode has 100 steps in all rooms, the default of `navix.make`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces

from onejit.envs.adapter import State, needs, register, start_from

with needs("navix==0.7.4"):
    import navix

KINDS = ("categorical", "symbolic", "rgb")
OBSERVATIONS = [f"{kind}{view}" for kind in KINDS for view in ("", "_first_person")]


class Navix(environment.Environment):
    """`arguments` go to `navix.make`, such as `max_steps`.

    `observation` names a function of `navix.observations`.
    """

    def __init__(
        self, name: str, observation: str = "symbolic", start_states: int = 0, **arguments
    ):
        if observation not in OBSERVATIONS:
            raise ValueError(
                f"observation = {observation}: must be one of {', '.join(OBSERVATIONS)}"
            )
        observe = getattr(navix.observations, observation)
        self.env = navix.make(name, observation_fn=observe, **arguments)
        # uint8 is brightness: scripts divide it
        self.dtype = jnp.uint8 if observation.startswith("rgb") else jnp.int32
        self.start = start_from(self.env.reset, start_states)

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.env.max_steps)

    def reset_env(self, key, params):
        timestep = self.start(key)
        return timestep.observation.astype(self.dtype), State(time=jnp.int32(0), inner=timestep)

    def step_env(self, key, state, action, params):
        # as if it ran, or it resets after its own limit
        running = state.inner.replace(step_type=navix.StepType.TRANSITION)
        timestep = self.env.step(running, action)
        obs = timestep.observation.astype(self.dtype)
        state = State(time=state.time + 1, inner=timestep)
        return obs, state, timestep.reward, timestep.is_termination(), {}

    def observation_space(self, params):
        space = self.env.observation_space
        bounds = jnp.iinfo(space.dtype)  # some observations exceed the bounds of the library
        return spaces.Box(bounds.min, bounds.max, space.shape, self.dtype)

    def action_space(self, params=None):
        return spaces.Discrete(len(self.env.action_set))

    def frame(self, state, params):
        return np.asarray(jax.jit(navix.observations.rgb)(state.inner.state))


register(navix.registry(), Navix, __name__)
