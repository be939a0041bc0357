"""Pgx's games of one player: MinAtar with sticky actions, and 2048 (arXiv 2303.17503).

    python ppo.py --env-name onejit.envs.pgx:minatar-breakout
    python dqn.py --env-name onejit.envs.pgx:2048 --convolutions

alphazero.py plays the board games of two players. Episodes are truncated after 4000 steps.
"""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces
from matplotlib import colormaps

from onejit.envs.adapter import MaskedObservation, State, needs, register

with needs("pgx==2.6.0"):
    import pgx


class Pgx(environment.Environment):
    """`arguments` go to the constructor in Pgx, such as MinAtar's `sticky_action_prob`."""

    def __init__(self, name: str, action_mask: bool = False, **arguments):
        self.env = type(pgx.make(cast(Any, name)))(**arguments)
        self.action_mask = action_mask

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=4000)

    def reset_env(self, key, params):
        state = self.env.init(key)
        return self.observed(state), State(time=jnp.int32(0), inner=state)

    def step_env(self, key, state, action, params):
        inner = self.env.step(state.inner, action, key)
        state = State(time=state.time + 1, inner=inner)
        return self.observed(inner), state, inner.rewards[0], inner.terminated, {}

    def observed(self, inner):
        obs = inner.observation.astype(jnp.float32)
        if not self.action_mask:
            return obs
        return MaskedObservation(obs=obs, action_mask=inner.legal_action_mask)

    def observation_space(self, params):
        return spaces.Box(0, 1, self.env.observation_shape)

    def action_space(self, params=None):
        return spaces.Discrete(self.env.num_actions)

    def frame(self, state, params):
        """The color of a cell is its last channel that is set.

        It is the kind of an object, or the power of two.
        """
        obs = np.asarray(state.inner.observation)
        channels = obs.shape[-1]
        last = np.where(obs.any(-1), channels - obs[..., ::-1].argmax(-1), 0)
        colors = colormaps["turbo"](last / channels)[..., :3] * (last > 0)[..., None]
        return np.kron((255 * colors).astype(np.uint8), np.ones((16, 16, 1), np.uint8))


NAMES = [name for name in pgx.available_envs() if name.startswith("minatar-") or name == "2048"]
register(NAMES, Pgx, __name__)
