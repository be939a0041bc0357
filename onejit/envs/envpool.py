"""EnvPool: MuJoCo, Atari, DeepMind Control, Box2D, MiniGrid and more, in C++ (arXiv 2206.10558).

    python sac.py --env-name onejit.envs.envpool:HalfCheetah-v4
    python pqn.py --env-name onejit.envs.envpool:Pong-v5 --convolutions 32 8 4 64 4 2 64 3 1

The environments step on the CPU. docs/host_environments.md says what is lost compared with
environments in JAX.
"""

import functools
import warnings

import numpy as np

from onejit.base.cores import number_of_cores
from onejit.envs.adapter import needs, register
from onejit.envs.host.batch import NO_LIMIT, Batch, HostEnv, as_gymnax, say_once

with needs("envpool==1.2.5"), warnings.catch_warnings(action="ignore"):
    import envpool

    from onejit.envs.host.spaces import Actions, Observations


class Pool(Batch):
    """One EnvPool, in which row i has seed i."""

    def __init__(self, env, name, arguments, seeds, limit, draw=False):
        if limit != env.limit:
            arguments = arguments | {"max_episode_steps": limit}
        if draw:
            arguments = arguments | {"render_mode": "rgb_array"}
        # all threads, although devices share them: EnvPool waits with the GIL held
        threads = min(number_of_cores(), len(seeds))
        with warnings.catch_warnings(action="ignore"):  # that bounds are rounded to float32
            self.envs = envpool.make_gymnasium(  # pyright: ignore[reportAttributeAccessIssue]
                name, num_envs=len(seeds), seed=seeds, num_threads=threads, **arguments
            )
        self.observations = env.observations
        self.actions = env.actions
        self.first = self.observations.read(self.envs.reset()[0], len(seeds))
        if len(set(seeds)) > 1 and (self.first == self.first[:1]).all():
            say_once(f"{name}: all environments start with the same observation, whatever the seed")

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.envs.step(self.actions(actions))
        return self.observations.read(obs, len(actions)), reward, terminated, truncated

    def reset_rows(self, rows):
        obs, _ = self.envs.reset(rows.astype(np.int32))
        return self.observations.read(obs, len(rows))

    def frame(self):
        return np.asarray(self.envs.render())[0]

    def close(self):
        self.envs.close()
        del self.envs  # its threads end with it


class EnvPool(HostEnv):
    """`arguments` are EnvPool's own for this environment, such as `frame_skip`.

    `image_axes` is "HWC" or "CHW" for images whose axes cannot be told apart.
    """

    own_thread = False  # EnvPool has threads of its own

    def __init__(self, name: str, **parameters):
        try:
            self.prepare(name, **parameters)
        except Exception as error:
            if parameters:
                raise
            self.failure = error

    def prepare(self, name: str, image_axes: str = "", **arguments):
        make = functools.partial(Pool, self, name, arguments)
        super().__init__(make, None, None, limit=NO_LIMIT)
        ours = {"batch_size", "num_envs", "num_threads", "seed"} & set(arguments)
        if ours:
            raise ValueError(f"{', '.join(sorted(ours))}: set by the training, not by env_params")
        with warnings.catch_warnings(action="ignore"):
            spec = envpool.make_spec(name, **arguments)  # pyright: ignore[reportAttributeAccessIssue]
            self.observations = Observations(spec.gymnasium_observation_space, image_axes)
            self.actions = Actions(spec.gymnasium_action_space)
        if self.observations.note:
            say_once(f"{name}: {self.observations.note}")
        self.spaces = as_gymnax(self.observations, self.actions)
        limit = int(spec.config.max_episode_steps)
        if 0 < limit < 2**31 - 1:  # 0 and 2**31 - 1 both say that there is none
            self.limit = limit


register(envpool.list_all_envs(), EnvPool, __name__)  # pyright: ignore[reportAttributeAccessIssue]
