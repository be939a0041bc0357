"""Values of swept fields: reading them from the command line, drawing and showing them."""

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping

import numpy as np

from onejit.script import command_line
from onejit.script.contract import Script

DISTRIBUTIONS = ("uniform", "log-uniform", "one-minus-log-uniform")


def holds_several(script: Script, name: str) -> bool:
    return isinstance(getattr(script.Config(), name), (tuple, Mapping))


def is_float_field(script: Script, name: str) -> bool:
    return isinstance(getattr(script.Config(), name), float)


def is_swept(script: Script, name: str, words: list[str]) -> bool:
    if holds_several(script, name):  # several words are one value: --hidden-sizes 64 64
        return len(words) > 1 and any("," in word for word in words)
    return len(words) > 1 or (len(words) == 1 and words[0] in DISTRIBUTIONS)


def read_values(script: Script, name: str, words: list[str]) -> list:
    """Read words of the command line as values of a field, as the script reads them.

    Raises ValueError.
    """
    kind = typing.get_type_hints(script.Config)[name]
    values = []
    for word in words:
        parts = word.split(",") if holds_several(script, name) else [word]
        value = command_line.read_flag(name, kind, parts)
        config = dataclasses.replace(script.Config(), **{name: value})
        command_line.check_config(config)
        values.append(getattr(config, name))
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: has the same value twice in {' '.join(words)}")
    return values


def read_distribution(script: Script, name: str, words: list[str]) -> tuple[str, float, float]:
    """`(kind, low, high)`. Raises ValueError."""
    kind, *bounds = words
    if not is_float_field(script, name):
        raise ValueError(
            f"{name}: is not a float field, and cannot be drawn; give a list of values"
        )
    if len(bounds) != 2:
        raise ValueError(f"{name}: {kind} takes LOW and HIGH")
    low, high = read_values(script, name, bounds)
    least = 0 if kind == "log-uniform" else -math.inf
    most = 1 if kind == "one-minus-log-uniform" else math.inf
    if not least < low < high < most:
        raise ValueError(f"{name}: {kind} {low:g} {high:g} needs {least:g} < LOW < HIGH < {most:g}")
    return kind, low, high


def from_uniform(kind: str, low: float, high: float, unit):
    """Values of a distribution from uniform numbers in [0, 1), arrays of NumPy or JAX."""
    if kind == "uniform":
        return low + (high - low) * unit
    if kind == "log-uniform":
        return low * (high / low) ** unit
    return 1.0 - (1.0 - high) * ((1.0 - low) / (1.0 - high)) ** unit


def make_trials(script: Script, swept: dict[str, list[str]], samples: int, seed: int) -> list[dict]:
    """All combinations of the listed values, each with all drawn points. Raises ValueError."""
    # its stream never changes: a resumed sweep draws the same values
    rng = np.random.RandomState(seed)
    listed = {}
    drawn = {}
    for name, words in swept.items():
        if words[0] in DISTRIBUTIONS:
            distribution = read_distribution(script, name, words)
            drawn[name] = from_uniform(*distribution, rng.random_sample(samples))
    for name, words in swept.items():
        if words[0] not in DISTRIBUTIONS:
            listed[name] = read_values(script, name, words)

    trials = []
    for grid_point in itertools.product(*listed.values()):
        for i in range(samples or 1):
            values = dict(zip(listed, grid_point, strict=True))
            for name, column in drawn.items():
                values[name] = float(column[i])
            trials.append({name: values[name] for name in swept})
    return trials


# --- text ---


def show_value(value) -> str:
    """A value as on the command line."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, np.ravel(value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_values(values: dict) -> str:
    """A trial's values with their fields."""
    return ", ".join(f"{name} = {show_value(value)}" for name, value in values.items())
