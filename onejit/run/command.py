"""What `onejit train`, `onejit sweep` and `onejit resume` have around a training."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onejit.base.signals import catching_signals, stopping
from onejit.base.text import resume_command
from onejit.engine.hosts import is_first
from onejit.engine.progress import progress_bar
from onejit.script.errors import errors_in_one_line, exit_as_diverged


def run(
    tool: str,
    read: Callable[[contextlib.ExitStack], Any],
    begin: Callable[[Any, contextlib.ExitStack], Any],
    train: Callable[[Any, Any, Any, list[int]], Any],
    finish: Callable[[Any, Any], bool],
    look: Callable[[Any, Any], None] | None = None,
) -> Path | None:
    """Train what `read(until_the_end)` returns. Returns the run directory, None if it is complete.

    `read` and `begin(job, until_the_end)` may lock the run until the end, which `until_the_end` is.
    `train(job, plan, progress, caught)` gets what `begin` returns. `finish(job, trained)` writes
    results, and says whether a seed is left that has not diverged. `look(job, trained)` may follow.
    """
    with (
        stopping(tool, "nothing was started"),
        errors_in_one_line(tool),
        contextlib.ExitStack() as until_the_end,
    ):
        job = read(until_the_end)
        if job is None:
            return None
        plan = begin(job, until_the_end)
        # keeps the lock of the run beyond this block, until the results are written
        until_the_end = until_the_end.pop_all()
    run_dir = job.run_dir
    go_on = f"{resume_command(run_dir)} continues"
    with (
        until_the_end,
        errors_in_one_line(tool, 1, (OSError,), about=f"run_dir = {run_dir}: "),
    ):
        with (
            stopping(tool, go_on),
            catching_signals(f"{tool}: stopped at once; {go_on}") as caught,
        ):
            bar = progress_bar(job.record.steps_total, disable=not is_first())
            with errors_in_one_line(tool, kinds=(ValueError,)), bar:
                trained = train(job, plan, bar, caught)
            is_any_left = finish(job, trained)
        if look is not None:
            look(job, trained)
    if not is_any_left:
        exit_as_diverged(tool, run_dir)
    return run_dir
