"""Progress of a training: a bar on a terminal, lines in a log file."""

import sys

import numpy as np
from tqdm import tqdm

from onejit.base.text import duration
from onejit.engine.hosts import is_first

SECONDS_BETWEEN_LINES = 30.0


class Lines(tqdm):
    """Progress as lines of a log file, every 30 seconds and at the end, in place of a bar."""

    monitor_interval = 0  # no thread

    def __init__(self, total: int):
        # gui: this class draws no bar itself; disable: not by TQDM_DISABLE, whose bars lack fields
        super().__init__(total=total, disable=False, gui=True, mininterval=0, miniters=1)
        self.written = self.start_t

    def __exit__(self, *error):
        if self.n:
            self.show()
        super().__exit__(*error)

    def display(self, *_):
        pass

    def update(self, steps: int):
        super().update(steps)
        if self.last_print_t - self.written >= SECONDS_BETWEEN_LINES:
            self.show()

    @property
    def format_dict(self) -> dict:
        return {**super().format_dict, "elapsed": self.last_print_t - self.start_t}

    def show(self):
        self.written = self.last_print_t
        text = f"{self.n / self.total:.1%} of {self.total:,} steps"
        steps = self.n - self.initial
        if steps:
            text += f", {steps / max(self.format_dict['elapsed'], 1e-9):,.0f} steps/s"
        if steps and self.n < self.total:
            text += f", {duration(seconds_left(self))} left"
        self.write(f"{text} {self.postfix or ''}".rstrip())

    @classmethod
    def write(cls, text: str, file=None):
        print(text, file=file or sys.stderr, flush=True)


def progress_bar(total: int, disable: bool):
    """A progress bar on a terminal, otherwise lines."""
    if disable or sys.stderr.isatty():
        return tqdm(total=total, unit="step", unit_scale=True, disable=disable)
    return Lines(total)


def note_of_returns(progress, returns) -> str:
    """The range of the last `returns` [runs] and the best return so far. Empty if all are NaN."""
    if np.isnan(returns).all():
        return ""
    best = max(getattr(progress, "best_return", -np.inf), np.nanmax(returns))
    progress.best_return = best
    return f"return {np.nanmin(returns):.4g} to {np.nanmax(returns):.4g}, best {best:.4g}"


def seconds_left(progress) -> float:
    """At the speed so far; 0 before the first steps."""
    known = progress.format_dict
    steps = known["n"] - known["initial"]
    return known["elapsed"] / steps * (progress.total - known["n"]) if steps else 0.0


def count_restored(progress, steps: int) -> None:
    """Add steps of an earlier session. The printed speed leaves them out."""
    if not is_first():
        return  # the bar is disabled, and has none of these
    progress.n += steps
    progress.initial += steps
    progress.last_print_n += steps
