"""One small training of a script, which many tests look at."""

import functools

import jax

from support.compilation import jit_quickly
from support.small import shifted_config


@functools.cache
def train(script):
    """The program that trains `shifted_config` for many seeds; `trained` is its result."""
    return jit_quickly(jax.vmap(script.make_train(shifted_config(script))))


@functools.cache
def trained(script):
    return train(script)(seed_keys())


def seed_keys():
    """As `main` makes them from its defaults, seed 0 and four agents."""
    return jax.random.split(jax.random.key(0), 4)
