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


# --- in a checkpoint, where older versions of onejit find the same names ---


def as_stored(carry: Carry) -> dict:
    stored = {"runner_state": carry.runner_state, "metrics": carry.metrics}
    if carry.evaluations is not None:
        returns, best_return, best_agent = carry.evaluations
        best = {"return": best_return, "agent": best_agent}
        stored["evaluation"] = {"returns": returns, "best": best}
    return stored


def of_stored(stored: dict) -> Carry:
    evaluations = None
    if "evaluation" in stored:
        best = stored["evaluation"]["best"]
        returns = stored["evaluation"]["returns"]
        evaluations = Evaluations(returns, best["return"], best["agent"])
    return Carry(stored["runner_state"], stored["metrics"], evaluations)
