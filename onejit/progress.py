"""Progress of a training: a bar on a terminal, lines in a log file."""

import sys
import time

from tqdm import tqdm

from onejit.hosts import is_first


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

    def show(self):
        self.written = time.monotonic()
        speed = (self.n - self.initial) / max(self.updated - self.begun, 1e-9)
        share = f"{self.n / self.total:.1%} of {self.total:,} steps"
        self.write(f"{share}, {speed:,.0f} steps/s {self.note}".rstrip())

    @staticmethod
    def write(text: str, file=None):
        print(text, file=file or sys.stderr, flush=True)


def progress_bar(total: int, disable: bool):
    """A progress bar on a terminal, otherwise lines."""
    if disable or sys.stderr.isatty():
        return tqdm(total=total, unit="step", unit_scale=True, disable=disable)
    return Lines(total)


def count_restored(progress, steps: int) -> None:
    """Add steps of an earlier session. The printed speed leaves them out."""
    if not is_first():
        return  # the bar is disabled, and has none of these
    progress.n += steps
    progress.initial += steps
    progress.last_print_n += steps
