"""Small configs of the scripts, and the flags that make a config."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

SMALL = {
    "max_steps_in_episode": 13,  # of the GridWorld; all others have it in env_params
    "goal": (7, 10),  # of the GridWorld: near enough to be reached
    "cliff": ((6, 11),),
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 2,
    "hidden_sizes": (8,),
    "hidden_size": 8,
    "critic_hidden_size": 8,
    "buffer_size": 256,
    "batch_size": 8,
    "learning_starts": 32,
    "target_update_interval": 8,
    "exploration_fraction": 0.5,
    "anneal_lr": True,
    "inner_envs": 4,  # evolve_objective: an update is a generation of small trainings
    "inner_steps": 8,
    "population_size": 4,
    "inner_seeds": 1,
    "drift_size": 4,
    "simulations": 4,  # alphazero: trees of few nodes, and games that end in every update
    "opponent_simulations": 2,
    "eval_games": 2,
    "eval_steps": 5,
}


def field_names(script, *types) -> list[str]:
    """The names of the fields of Config, or of those with these types."""
    fields = dataclasses.fields(script.Config)
    return [field.name for field in fields if not types or field.type in types]


@functools.cache
def origin(script) -> str:
    """Where the script's default environment comes from: gymnax, brax, jaxmarl or the script."""
    import gymnax

    if "env_params" not in field_names(script):
        return "script"
    if "centralized_critic" in field_names(script):
        return "jaxmarl"
    if script.Config().env_name in gymnax.registered_envs:
        return "gymnax"
    return "brax"


def small_config(script, num_updates=6, **overrides):
    """The default config with its sizes cut down, and brax's trivial environment for brax's."""
    names = field_names(script)
    small = {name: value for name, value in SMALL.items() if name in names}
    evolves = "num_generations" in names
    if "env_params" in names:
        small["env_params"] = {"max_steps_in_episode": 13}
    if "num_envs" not in names and not evolves:  # one environment per agent
        small["num_steps"] *= SMALL["num_envs"]
    if origin(script) == "brax":
        small["env_name"] = "fast"
    config = dataclasses.replace(script.Config(), **small | overrides)
    if evolves:
        # total_timesteps is of one training: four updates, enough for the drifts to differ.
        steps = 4 * config.inner_envs * config.inner_steps
        config = dataclasses.replace(config, num_generations=num_updates, lr=0.1)
    else:
        steps = num_updates * config.num_envs * config.num_steps
        steps += getattr(config, "warmup_timesteps", 0)
    return dataclasses.replace(config, total_timesteps=steps + 5)  # num_updates is rounded down


def shifted_config(script, **overrides):
    """A small config with no float field at its default, so that one which goes astray is seen."""
    config = small_config(script, **overrides)
    values = {}
    for name in field_names(script, float):
        default = min(getattr(config, name), 1e3)  # one is infinite
        values[name] = default * 0.9 or 0.05
    return dataclasses.replace(config, **values)


def flags(config) -> list[str]:
    """The command line that makes `config`."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = [*value.items()] if isinstance(value, Mapping) else value
        if isinstance(values, (tuple, list)) and not values:
            continue  # an empty one is left at its default
        words += [f"--{field.name}", *map(str, np.ravel(np.asarray(values, dtype=object)))]
    return words
