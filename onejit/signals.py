"""Ctrl-C, SIGTERM and SIGHUP end a training after its current chunk, with a checkpoint."""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time


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
        cause = error
        code = error.exit_code
        text = str(error)
    except KeyboardInterrupt as error:
        cause = error
        code = 130
        text = "stopped at once"
    print(f"{tool}: {text}; {go_on}", file=sys.stderr, flush=True)
    import jax  # not at the top: `raising_interrupts` is for the imports, too

    if jax.distributed.is_initialized():
        os._exit(code)  # a normal exit would wait for processes that may be gone
    raise SystemExit(code) from cause


def numbers_to_catch() -> list[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # a terminal or a connection has been closed
    return numbers


@contextlib.contextmanager
def exiting_at_once(numbers, after: int, grace: float, text: str):
    """The signal number `after` of these `numbers` ends the process with `text`.

    Python's own handlers wait while the main thread is in compiled code, or in an environment that
    hangs. Here another thread acts, unless the block has ended within `grace` seconds. Signals
    within 0.1 s count as one.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    has_ended = threading.Event()

    def wait():
        received = []
        last = -math.inf
        while len(received) < after:
            data = reader.recv(1)
            if not data:
                return
            is_repeated = time.monotonic() - last < 0.1  # by a wrapper that passes it on
            if data[0] in numbers and not is_repeated:
                received.append(data[0])
                last = time.monotonic()
        if not has_ended.wait(grace):
            print(text, file=sys.stderr, flush=True)
            os._exit(128 + received[-1])

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        has_ended.set()
        writer.close()
        thread.join()
        reader.close()


@contextlib.contextmanager
def catching_signals(go_on: str = "stopped at once"):
    """Yield a list that receives the signals.

    A second SIGINT or SIGTERM acts as it did before this block. If the block has not ended a second
    later, the process ends with the text `go_on`. A second SIGHUP does nothing: a terminal that
    closes may send several.
    """
    caught = []
    before = {}

    def note(number, frame):
        caught.append(number)
        if number in (signal.SIGINT, signal.SIGTERM):
            for other in (signal.SIGINT, signal.SIGTERM):
                signal.signal(other, before[other])

    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield caught
        return
    for number in numbers_to_catch():
        before[number] = signal.signal(number, note)
    ending = (signal.SIGINT, signal.SIGTERM)
    try:
        with exiting_at_once(ending, after=2, grace=1.0, text=go_on):
            yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ending_at_once(text: str):
    """Within `catching_signals`, where everything is saved: the next signal ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with exiting_at_once(numbers_to_catch(), after=1, grace=0.0, text=text):
        yield


@contextlib.contextmanager
def raising_interrupts():
    """Ctrl-C during imports ends the program, also if something there swallows the exception.

    Python itself does so in a callback of its import system.
    """
    caught = []

    def note(number, frame):
        caught.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_IGN, None):  # as in a shell's background job
        with contextlib.suppress(ValueError):  # signals are only handled in the main thread
            signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)
        if caught:
            raise KeyboardInterrupt
