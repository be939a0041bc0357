"""Play a policy of examples/export_policy.py in Gymnasium with JAX alone: no onejit.

    pip install jax flatbuffers gymnasium
    python examples/play_jax.py cartpole.stablehlo CartPole-v1

An episode begins with a memory of zeros. Continuous policies act in [-1, 1], and the program
rescales their actions to the bounds of the environment.
"""

import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
from jax import export

file, env_name = sys.argv[1:]
policy = export.deserialize(bytearray(Path(file).read_bytes()))
act = jax.jit(policy.call)
env = gymnasium.make(env_name)
space = env.action_space
for episode in range(3):
    obs, _ = env.reset(seed=episode)
    memory = [np.zeros((1, *x.shape[1:]), x.dtype) for x in policy.in_avals[1:]]
    total = 0.0
    ended = False
    while not ended:
        action, *memory = act(obs[None].astype(policy.in_avals[0].dtype), *memory)
        action = np.asarray(action)[0]
        if action.ndim:
            action = space.low + (space.high - space.low) * (np.clip(action, -1, 1) + 1) / 2
        obs, reward, terminated, truncated, _ = env.step(action)
        total += reward
        ended = terminated or truncated
    print(total)
