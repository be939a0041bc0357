"""Jumanji: games, packing and routing (arXiv 2306.09884).

    python ppo.py --env-name onejit.envs.jumanji:Snake-v1

Observations and action masks become one vector. Actions of several whole numbers become one number.
With `--env-params action_mask True`, ppo.py and dqn.py take valid actions only.
"""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces
from matplotlib import pyplot

from onejit.envs.adapter import MaskedObservation, State, needs, register, start_from

with needs("jumanji==1.1.2"):
    from jumanji import registration

NO_LIMIT = 4000  # time limit for a game without one
# the reward falls to 0 at the time limit, which is part of the task
COUNTS_DOWN = ("SearchAndRescue-v0",)


class Jumanji(environment.Environment):
    """`arguments` go to the environment's constructor, such as `time_limit`."""

    def __init__(self, name: str, start_states: int = 0, action_mask: bool = False, **arguments):
        self.env: Any = registration.make(name, **arguments)
        self.action_mask = action_mask
        self.limit = getattr(self.env, "time_limit", NO_LIMIT)
        if hasattr(self.env, "time_limit") and name not in COUNTS_DOWN:
            self.env.time_limit = np.iinfo(np.int32).max  # its `last` is now `terminated`
        self.start = start_from(self.env.reset, start_states)

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.limit)

    def reset_env(self, key, params):
        inner, timestep = self.start(key)
        return self.observed(timestep.observation), State(time=jnp.int32(0), inner=inner)

    def step_env(self, key, state, action, params):
        spec = self.env.action_spec
        if isinstance(self.action_space(), spaces.Discrete):
            numbers = jnp.stack(jnp.unravel_index(action, self.choices)).reshape(spec.shape)
            action = (numbers + spec.minimum).astype(spec.dtype)
        inner, timestep = self.env.step(state.inner, action)
        obs = self.observed(timestep.observation)
        state = State(time=state.time + 1, inner=inner)
        reward = timestep.reward.sum().astype(jnp.float32)  # over all agents
        return obs, state, reward, timestep.last(), {}

    def observed(self, observation):
        if not self.action_mask:
            return self.flat(observation)
        mask = observation.action_mask.reshape(math.prod(self.choices))
        return MaskedObservation(obs=self.flat(observation), action_mask=mask)

    def flat(self, observation):
        leaves = jax.tree.leaves(observation)
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves])

    def observation_space(self, params):
        timestep = jax.eval_shape(self.env.reset, jax.random.key(0))[1]
        return spaces.Box(-jnp.inf, jnp.inf, jax.eval_shape(self.flat, timestep.observation).shape)

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of values of each whole number in an action."""
        spec = self.env.action_spec
        sizes = np.asarray(spec.maximum) - np.asarray(spec.minimum) + 1
        return tuple(np.ravel(np.broadcast_to(sizes, spec.shape)).tolist())

    def action_space(self, params=None):
        spec = self.env.action_spec
        if jnp.issubdtype(spec.dtype, jnp.floating):
            return spaces.Box(spec.minimum, spec.maximum, spec.shape)
        number = math.prod(self.choices)
        if number > 10_000:
            raise ValueError(
                f"env_name: {number} actions are too many for a policy over all of them"
            )
        return spaces.Discrete(number)

    def frame(self, state, params):
        with warnings.catch_warnings(action="ignore"):  # a warning that there is no screen
            self.env.render(state.inner)
        figure = pyplot.gcf()
        figure.set_dpi(40)  # it is 10 by 10 inches
        canvas: Any = figure.canvas
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]


register(sorted(registration.registered_environments()), Jumanji, __name__)
