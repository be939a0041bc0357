"""Progress of a training: a bar on a terminal, lines in a log file."""

import sys
import time

import numpy as np
from tqdm import tqdm

from onejit.hosts import is_first
from onejit.text import duration

DAY = 24 * 3600.0


class Lines:
    """Progress as lines of a log file, every 30 seconds and at the end.

    It has the methods of tqdm that are used here.
    """

    def __init__(self, total: int, every: float = 30.0):
        self.total = total
        self.every = every
        self.note = ""
        self.n = 0
        self.initial = 0
        self.last_print_n = 0
        self.begun = time.monotonic()
        self.updated = self.begun
        self.written = self.begun
        self.disable = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.n:
            self.show()

    def unpause(self):
        """Leave the time since the last update out of the speed."""
        now = time.monotonic()
        self.begun += now - self.updated
        self.updated = now

    def set_postfix_str(self, note: str, refresh=False):
        self.note = note

    def update(self, steps: int):
        self.n += steps
        self.updated = time.monotonic()
        if self.updated - self.written >= self.every:
            self.show()

    @property
    def format_dict(self) -> dict:
        return {"n": self.n, "initial": self.initial, "elapsed": self.updated - self.begun}

    def show(self):
        self.written = time.monotonic()
        text = f"{self.n / self.total:.1%} of {self.total:,} steps"
        steps = self.n - self.initial
        if steps:
            text += f", {steps / max(self.updated - self.begun, 1e-9):,.0f} steps/s"
        if steps and self.n < self.total:
            text += f", {duration(seconds_left(self))} left"
        self.write(f"{text} {self.note}".rstrip())

    @staticmethod
    def write(text: str, file=None):
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


def warn_of_days(progress) -> None:
    """Say once, after ten seconds, that a training will take longer than a day."""
    if progress.disable or getattr(progress, "was_checked", False):
        return
    if progress.format_dict["elapsed"] < 10.0:
        return
    progress.was_checked = True
    left = seconds_left(progress)
    if left > DAY:
        progress.write(
            f"onejit train: at this speed the training takes {duration(left)} more; "
            "Ctrl-C stops it, and --resume goes on",
            file=sys.stderr,
        )


def count_restored(progress, steps: int) -> None:
    """Add steps of an earlier session. The printed speed leaves them out."""
    if not is_first():
        return  # the bar is disabled, and has none of these
    progress.n += steps
    progress.initial += steps
    progress.last_print_n += steps
