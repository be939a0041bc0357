"""What a training is beside its program: the runs, and what is done around their updates."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from onejit.base.clock import Clock


@dataclasses.dataclass(kw_only=True)
class Job:
    """A slice of runs, which `loop.run(program, job)` trains.

    All processes call `open`, `start`, `on_begin`, `evaluate`, `close` and `finish`. Process 0
    alone calls `on_chunk`, `before_save` and `after_save`.
    """

    folder: Path  # of its checkpoints
    key_data: np.ndarray  # of the runs' random keys: [size, words]
    floats: dict[str, Any] = dataclasses.field(default_factory=dict)  # {field: [size]} of a sweep
    last_update: int | None = None  # the update after which it ends; None for the program's last
    checkpoint_interval: float = 60.0  # seconds between checkpoints; 0 for none
    save_last: bool = False  # write a checkpoint at the end, too
    eval_interval: int = 0  # updates between evaluations; 0 for none
    caught: Sequence[int] = ()  # receives the signals that end the training
    # receives the names of the agent's leaves that are not finite after `init`
    not_finite: list[str] = dataclasses.field(default_factory=list)
    clock: Clock = dataclasses.field(default_factory=Clock)

    def open(self, done: int) -> None:
        """Before anything else; `done` updates are in a checkpoint."""

    def start(self, program, floats: dict) -> tuple[Any, int]:
        """`(carry, number of its updates)` to start from where there is no checkpoint."""
        return program.start(floats, jax.device_put(self.key_data, program.sharding)), 0

    def on_begin(self) -> None:
        """Before the first update of this session."""

    def on_chunk(self, first: int, last: int, metrics: dict, returns: np.ndarray | None) -> None:
        """After the updates [first, last), about once in a second.

        `metrics` {name: [size, last - first]} are theirs. `returns` [size, episodes] are of an
        evaluation after them, if there was one.
        """

    def evaluate(self, program, carry: dict):
        """Returns [size, episodes] of greedy episodes."""
        raise NotImplementedError

    def before_save(self) -> None:
        """Before a checkpoint is written."""

    def after_save(self) -> None:
        """After a checkpoint was written."""

    def close(self) -> None:
        """When the training has ended, also by an exception."""

    def finish(self, program, carry: dict) -> Any:
        """What `loop.run` returns of the last carry."""
        return carry
