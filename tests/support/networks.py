"""What a network computes on the way to its output, and agents of random numbers."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict


def random_agent(script, config) -> dict:
    """An agent {dotted name: array} whose biases and statistics are not trivial."""
    init, _ = script.make_learner(config)
    shapes = flatten_dict(jax.eval_shape(init, jax.random.key(0)).agent, sep=".")
    rng = np.random.default_rng(0)
    arrays = {}
    for name, leaf in shapes.items():
        low = 0.5 if "var" in name else -1.0
        arrays[name] = rng.uniform(low, 1.0, leaf.shape).astype(leaf.dtype)
    return arrays


def actor_input(script, config):
    """`inputs(obs [B, ...]) -> [B, features]`: what the first dense layer of the actor takes.

    Images are flattened, without a convolution.
    """
    if hasattr(config, "convolutions"):
        config = dataclasses.replace(config, convolutions=())
    actor, _ = script.make_networks(config, *script.make_env(config))

    def inputs(obs):
        seen = []

        def record(call, args, kwargs, context):
            if isinstance(context.module, nn.Dense):
                seen.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            actor.init(jax.random.key(0), obs)
        return seen[0]

    return inputs
