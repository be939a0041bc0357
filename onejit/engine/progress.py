"""Progress of a training: a bar on a terminal, lines in a log file."""

import io
import sys

import numpy as np
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Lines(tqdm):
    """A progress bar whose text is a line, as soon as there are any steps."""

    def display(self, *_, **__):
        if self.n:
            print(self, file=sys.stderr, flush=True)


def progress_bar(total: int, disable: bool):
    """A progress bar on a terminal, otherwise lines. TQDM_DISABLE has no effect."""
    settings = {"total": total, "unit": "step", "unit_scale": True, "disable": disable}
    if sys.stderr.isatty():
        return tqdm(**settings)
    nowhere = io.StringIO()
    return Lines(**settings, file=nowhere, mininterval=SECONDS_BETWEEN_LINES, miniters=1)


def note_of_returns(progress, returns) -> str:
    """The range of the last `returns` [runs] and the best return so far. Empty if all are NaN."""
    if np.isnan(returns).all():
        return ""
    best = max(getattr(progress, "best_return", -np.inf), np.nanmax(returns))
    progress.best_return = best
    return f"return {np.nanmin(returns):.4g} to {np.nanmax(returns):.4g}, best {best:.4g}"


def count_restored(progress, steps: int) -> None:
    """Add steps of an earlier session. The printed speed leaves them out."""
    if progress.disable:  # it has none of these
        return
    progress.n += steps
    progress.initial += steps
    progress.last_print_n += steps
