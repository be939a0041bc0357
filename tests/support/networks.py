"""What a network computes on the way to its output."""

import dataclasses

import flax.linen as nn
import jax


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
