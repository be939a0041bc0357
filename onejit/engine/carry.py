"""What a slice of runs carries from update to update. All arrays are [size, ...]."""

from typing import Any, NamedTuple


class Evaluations(NamedTuple):
    """The evaluations during training so far."""

    returns: Any  # means over episodes [size, number of evaluations], NaN of those to come
    best_return: Any  # of each seed
    best_agent: Any


class Carry(NamedTuple):
    """The state of a training."""

    runner_state: Any
    metrics: dict[str, Any]  # {name: [size, num_updates]}
    evaluations: Evaluations | None = None  # None without evaluations during training
