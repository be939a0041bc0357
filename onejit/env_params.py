"""Values of `env_params` that no environment can mean, such as text where a number stands."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import yaml

from onejit.evaluation import unwrap
from onejit.other_names import suggest


def expected_kind(value, default) -> str | None:
    """What a value must be, in words, or None if it may stand in place of `default`."""
    if isinstance(default, bool):
        is_truth_value = isinstance(yaml.safe_load(str(value)), bool)
        return None if is_truth_value else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else "text, in quotes in YAML"
    if not isinstance(default, int | float | jax.Array):
        return None
    is_whole = jnp.issubdtype(jnp.result_type(default), jnp.integer)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not (is_whole and not float(value).is_integer()):
        return None
    return "a whole number" if is_whole else "a number"


def check_env_params(script, config) -> None:
    """Raise ValueError if `env_params` has an unknown name, or a value unlike the default."""
    if not getattr(config, "env_params", None):
        return
    env, env_params = script.make_env(dataclasses.replace(config, env_params={}))
    defaults = {}
    takes_others = False
    parts = [unwrap(env)]
    if hasattr(parts[0], "env"):  # an adapter, with the environment that it adapts
        parts.insert(0, parts[0].env)
    for part in parts:
        constructor = inspect.signature(type(part)).parameters.values()
        defaults |= {argument.name: argument.default for argument in constructor}
        takes_others |= any(argument.kind is argument.VAR_KEYWORD for argument in constructor)
    defaults |= vars(env_params)
    for key, value in config.env_params.items():
        if key not in defaults and not takes_others:
            similar = suggest(key, defaults)
            raise ValueError(f"env_params: {key}: is no parameter of {config.env_name}{similar}")
        expected = expected_kind(value, defaults.get(key))
        if expected is not None:
            raise ValueError(f"env_params: {key} = {value}: must be {expected}")
