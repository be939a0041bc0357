"""Write the greedy policy of an agent as one file of StableHLO, without onejit and the script.

    pip install -c constraints.txt -e . flatbuffers
    python examples/export_policy.py agents/ppo_cartpole 0 cartpole.stablehlo

The file holds the networks and the statistics that normalize observations. Arrays have a leading
batch axis of any size. A policy with memory takes it after the observation, and returns the next
one after the action. examples/play_jax.py plays such a file.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import onejit
from onejit.engine.evaluation import policy_of


def batched_policy(script, config, agent):
    """`act(*arrays)` for a batch of observations and memories, and the shapes of the arrays."""
    env, env_params = script.make_env(config)
    start, act = policy_of(script, config)  # `start` gives no arrays for a policy without memory
    agent = jax.tree.map(jnp.asarray, agent)

    def first_inputs():
        obs, _ = env.reset(jax.random.key(0), env_params)
        return obs, start()

    arrays, tree = jax.tree.flatten(jax.eval_shape(first_inputs))
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for x in arrays]

    def act_on_one(*arrays):
        obs, memory = jax.tree.unflatten(tree, arrays)
        return jax.tree.leaves(act(agent, memory, obs))  # [action, *memory]

    return jax.jit(jax.vmap(act_on_one)), shapes


def to_stablehlo(script, config, agent) -> bytes:
    act, shapes = batched_policy(script, config, agent)
    return bytes(jax.export.export(act, platforms=("cpu", "cuda"))(*shapes).serialize())


if __name__ == "__main__":
    run_dir, number, file = sys.argv[1:]
    script, config, agents = onejit.load_run(run_dir)
    agent = jax.tree.map(lambda leaf: leaf[int(number)], agents)
    Path(file).write_bytes(to_stablehlo(script, config, agent))
