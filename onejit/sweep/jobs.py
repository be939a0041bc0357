"""Slices of a sweep: what their trainings have in common."""

import dataclasses
import sys
from typing import Any

from onejit.base import statistics
from onejit.engine.hosts import is_first
from onejit.engine.job import Job
from onejit.engine.progress import count_restored, note_of_returns
from onejit.run.record import write_record
from onejit.script.steps import steps_of
from onejit.sweep.request import Request


def count(request: Request, progress, steps: int, restored: bool = False) -> None:
    """Count environment steps, also those of an earlier session."""
    request.record.steps_done += steps
    if restored:
        count_restored(progress, steps)
    else:
        progress.update(steps)


@dataclasses.dataclass(kw_only=True)
class Slice(Job):
    """The runs [first, last) of a group, or of populations."""

    request: Request
    config: Any
    first: int
    last: int
    progress: Any
    first_update: int = 0  # where it starts without a checkpoint

    @property
    def steps(self) -> int:
        """Environment steps of all runs in an update."""
        return (self.last - self.first) * steps_of(self.config)

    def notes(self, last_update: int) -> list[str]:
        """What the progress bar says after an update, beside the returns."""
        raise NotImplementedError

    def open(self, done):
        if not done:
            return
        count(self.request, self.progress, (done - self.first_update) * self.steps, restored=True)
        if is_first():
            end = self.last_update or self.config.num_updates
            updates = f"{done} of {end} updates of the next slice"
            self.progress.write(f"resume: {updates} are done", file=sys.stdout)

    def on_begin(self):
        self.progress.unpause()

    def on_chunk(self, first, last, metrics, returns):
        ended = statistics.mean_return(metrics)[: self.last - self.first]
        notes = [*self.notes(last), note_of_returns(self.progress, ended)]
        self.progress.set_postfix_str(", ".join(filter(None, notes)), refresh=False)
        count(self.request, self.progress, (last - first) * self.steps)

    def before_save(self):
        write_record(self.request.run_dir, self.request.record)
