"""MuJoCo Playground: the DeepMind Control Suite, and robots that walk and grasp (arXiv 2502.08844).

    python ppo_continuous.py --env-name onejit.envs.playground:CartpoleBalance

Robots download their models from GitHub the first time; the control suite (CheetahRun, ...)
includes its models.
"""

import subprocess
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from gymnax.environments import environment, spaces

from onejit.envs.adapter import State, needs, register, start_from

with needs("playground==0.2.0", "mujoco-mjx==3.17.0"):
    from mujoco_playground import registry  # pyright: ignore[reportMissingImports]


class Playground(environment.Environment):
    """`overrides` are entries of the environment's config, such as `ctrl_dt`."""

    def __init__(self, name: str, start_states: int = 1024, **overrides):
        config = registry.get_default_config(name).lock()
        try:
            # jax runs everywhere; warp needs NVIDIA GPUs
            config.update_from_flattened_dict({"impl": "jax"} | overrides)
            self.env = registry.load(name, config=config)
        except KeyError as error:
            raise ValueError(error.args[0]) from error
        except subprocess.CalledProcessError as error:
            raise OSError(f"{name}: its models cannot be downloaded ({error})") from error
        self.limit = config.episode_length
        self.dt = self.env.dt
        self.start = start_from(self.env.reset, start_states)

    @property
    def default_params(self):
        return environment.EnvParams(max_steps_in_episode=self.limit)

    def observed(self, inner):
        if isinstance(inner.obs, Mapping):
            return inner.obs["state"]  # what a robot's policy observes
        return inner.obs

    def reset_env(self, key, params):
        with jax.default_matmul_precision("highest"):
            inner = self.start(key)
        return self.observed(inner), State(time=jnp.int32(0), inner=inner)

    def step_env(self, key, state, action, params):
        """A step that is not finite terminates with reward 0 and a finite observation.

        The physics blew up.
        """
        with jax.default_matmul_precision("highest"):  # GPUs would round products in the physics
            inner = self.env.step(state.inner, action)
        obs = self.observed(inner)
        finite = jnp.isfinite(obs).all() & jnp.isfinite(inner.reward)
        obs = jnp.where(finite, obs, 0.0)
        reward = jnp.where(finite, inner.reward, 0.0)
        terminated = (inner.done > 0.5) | ~finite
        state = State(time=state.time + 1, inner=inner)
        return obs, state, reward, terminated, {}

    def observation_space(self, params):
        inner = jax.eval_shape(self.env.reset, jax.random.key(0))
        return spaces.Box(-jnp.inf, jnp.inf, self.observed(inner).shape)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (self.env.action_size,))

    def frame(self, state, params):
        camera = 0 if self.env.mj_model.ncam else -1  # the first camera, or a view from afar
        try:
            return self.env.render(state.inner, height=360, width=480, camera=camera)
        except Exception as error:  # each renderer raises its own kind
            raise ValueError(
                f"MuJoCo cannot draw here ({error}): install libosmesa6, or set MUJOCO_GL"
            ) from error


register(registry.ALL_ENVS, Playground, __name__)
