"""One small training of a script, which many tests look at."""

import functools

import jax

from support.compilation import jit_quickly
from support.small import shifted_config


@functools.cache
def traced(script):
    """One program that trains many seeds for every value of the floats.

    And the list that grows by one with each trace of it.
    """
    traces = []

    def run(config, key):
        traces.append(config)
        return script.make_train(config)(key)

    return jit_quickly(jax.vmap(run, (None, 0))), traces


@functools.cache
def trained(script):
    run, _ = traced(script)
    return run(shifted_config(script), seed_keys())


def seed_keys():
    """As `main` makes them from its defaults, seed 0 and four agents."""
    return jax.random.split(jax.random.key(0), 4)
