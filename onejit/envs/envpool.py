"""EnvPool: MuJoCo, Atari, DeepMind Control, Box2D, MiniGrid and more, in C++ (arXiv 2206.10558).

    python sac.py --env-name onejit.envs.envpool:HalfCheetah-v4
    python pqn.py --env-name onejit.envs.envpool:Pong-v5 --torso nature

The environments step on the CPU. docs/host_environments.md says what is lost compared with
environments in JAX.
"""

import functools
import os
import warnings

import numpy as np

from onejit.envs import needs, register
from onejit.envs.host import NO_LIMIT, Batch, HostEnv, as_gymnax, in_float32

with needs("envpool"), warnings.catch_warnings(action="ignore"):
    import envpool


def number_of_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


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
            self.envs = envpool.make_gymnasium(
                name, num_envs=len(seeds), seed=seeds, num_threads=threads, **arguments
            )
        self.space = self.envs.observation_space
        self.start = getattr(self.envs.action_space, "start", 0)
        self.kind = self.envs.action_space.dtype
        self.first = in_float32(self.space, self.envs.reset()[0])

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.envs.step(
            (actions + self.start).astype(self.kind)
        )
        return in_float32(self.space, obs), reward, terminated, truncated

    def reset_rows(self, rows):
        return in_float32(self.space, self.envs.reset(rows.astype(np.int32))[0])

    def frame(self):
        return np.asarray(self.envs.render())[0]

    def close(self):
        self.envs.close()
        del self.envs  # its threads end with it


class EnvPool(HostEnv):
    """`arguments` are EnvPool's own for this environment, such as `frame_skip`."""

    def __init__(self, name: str, **arguments):
        ours = {"batch_size", "num_envs", "num_threads", "seed"} & set(arguments)
        if ours:
            raise ValueError(f"{', '.join(sorted(ours))}: set by the training, not by env_params")
        with warnings.catch_warnings(action="ignore"):
            spec = envpool.make_spec(name, **arguments)
            obs_space, action_space = as_gymnax(
                spec.gymnasium_observation_space, spec.gymnasium_action_space
            )
        limit = int(spec.config.max_episode_steps)
        if not 0 < limit < 2**31 - 1:  # 0 and 2**31 - 1 both say that there is none
            limit = NO_LIMIT
        make = functools.partial(Pool, self, name, arguments)
        super().__init__(make, obs_space, action_space, limit=limit)


register(envpool.list_all_envs(), EnvPool)
