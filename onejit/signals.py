"""Ctrl-C and SIGTERM end a training after its current chunk, with a checkpoint."""

import contextlib
import os
import signal
import sys

import jax


class Stopped(Exception):
    """A signal ended training; a checkpoint holds all updates so far."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextlib.contextmanager
def stopping(tool: str, go_on: str):
    """If a signal ends training, print one line that ends with `go_on`, and exit with its code."""
    try:
        yield
        return
    except Stopped as error:
        code = error.exit_code
        text = str(error)
    except KeyboardInterrupt:
        code = 130
        text = "stopped at once"
    print(f"{tool}: {text}; {go_on}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(code)  # a normal exit would wait for processes that may be gone
    raise SystemExit(code)


@contextlib.contextmanager
def catching_signals():
    """Yield a list that receives the first SIGINT or SIGTERM. A second one acts as usual."""
    caught = []
    before = {}

    def restore_handlers():
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number, frame):
        caught.append(number)
        restore_handlers()

    with contextlib.suppress(ValueError):  # signals are only handled in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        restore_handlers()
