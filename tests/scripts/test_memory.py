"""What an agent needs at its peak, in the program that XLA makes for a CPU."""

import dataclasses

import jax
import pytest
from support.tiers import slow

from onejit.script.load import load_script


def peak_bytes(config, script, num_seeds: int) -> float:
    """Per agent, of the whole training of `num_seeds` at once."""
    keys = jax.random.split(jax.random.key(0), num_seeds)
    stats = jax.jit(jax.vmap(script.make_train(config))).lower(keys).compile().memory_analysis()
    parts = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    return sum(parts) / num_seeds


@pytest.mark.parametrize("name", ["dqn", slow("apex_dqn"), slow("rainbow")])
def test_a_warm_up_needs_little_beside_the_replay(name):
    """It goes through pictures a few steps at a time: all of them at once took more than the replay
    itself.
    """
    script = load_script(name)
    config = dataclasses.replace(script.Config(), env_name="Breakout-MinAtar", buffer_dtype="bool")
    config = dataclasses.replace(
        config, buffer_size=8192, learning_starts=8192, total_timesteps=10_000
    )
    pictures = 2 * 8192 * 10 * 10 * 4  # bytes of a step's observation and of the one after it
    assert peak_bytes(config, script, 2) < 3 * pictures
