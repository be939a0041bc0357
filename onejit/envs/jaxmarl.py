"""Pictures of JaxMARL's environments for `onejit render`: MPE, SMAX and Overcooked.

JaxMARL's own visualizers draw them. mappo.py adapts the environments themselves, because it runs
alone.
"""

import contextlib
import io
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot

from onejit.envs import needs

with needs("jaxmarl"), contextlib.redirect_stdout(io.StringIO()):
    from jaxmarl.environments import SMAX
    from jaxmarl.environments.mpe import SimpleMPE
    from jaxmarl.environments.mpe.mpe_visualizer import MPEVisualizer
    from jaxmarl.environments.overcooked import Overcooked
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer


def canvas_of(figure):
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def mpe_picture(env, states, i):
    """Agents and landmarks as circles."""
    with contextlib.redirect_stdout(io.StringIO()):
        drawn = MPEVisualizer(env, [jax.tree.map(lambda leaf: leaf[i], states)])
    drawn.update(0)
    return canvas_of(drawn.fig)


def smax_picture(env, states, i):
    """Allies are blue and enemies green, with the letter of their kind; who is shot at is pale."""
    state = jax.tree.map(lambda leaf: leaf[i], states)
    # the next state tells what was done in `state`
    later = jax.tree.map(lambda leaf: leaf[min(i + 1, len(leaf) - 1)], states)
    figure, axes = pyplot.subplots(figsize=(4, 4), dpi=100)
    actions = dict(zip(env.agents, np.asarray(later.prev_attack_actions), strict=True))
    picture = env.init_render(axes, (None, state, actions), 0, i)
    picture.remove()  # it would lie over the circles
    axes.set(xlim=(0, env.map_width), ylim=(0, env.map_height), aspect="equal")
    return canvas_of(figure)


def overcooked_picture(env, states, i):
    state = jax.tree.map(lambda leaf: leaf[i], states)
    rim = env.agent_view_size - 2
    grid = np.asarray(state.maze_map)[rim:-rim, rim:-rim]
    hands: dict[str, Any] = {
        "agent_dir_idx": np.asarray(state.agent_dir_idx),
        "agent_inv": np.asarray(state.agent_inv),
    }
    return np.asarray(OvercookedVisualizer._render_grid(grid, **hands), np.uint8)


PICTURES = {SimpleMPE: mpe_picture, SMAX: smax_picture, Overcooked: overcooked_picture}


class Drawn:
    """The environment of a team, as mappo.py makes it, for `onejit render`."""

    def __init__(self, team):
        self.base = team.base
        drawing = [draw for kind, draw in PICTURES.items() if isinstance(self.base, kind)]
        if not drawing:
            raise ValueError(
                f"env_name: {team.env.name} cannot be drawn; MPE, SMAX and Overcooked can"
            )
        self.draw = drawing[0]

    def frames(self, states, steps):
        """Pictures [H, W, 3] of bytes. `states` [T, ...] are the team's."""
        inner = jax.tree.map(np.asarray, getattr(states.inner, "state", states.inner))
        for i in steps:
            try:
                yield self.draw(self.base, inner, i)
            finally:
                pyplot.close("all")
