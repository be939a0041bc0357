"""Standard output and standard error, whose encoding may be ASCII and whose reader may go away."""

import io
import os
import sys


class LossyFile(io.FileIO):
    """A file descriptor. What is written after an error is lost; one of `ignored` is not raised."""

    def __init__(self, descriptor: int, ignored: type[OSError]):
        super().__init__(descriptor, "w", closefd=False)
        self.ignored = ignored

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, self.ignored):
                raise
            return len(data)


def print_plain_lines() -> None:
    """From now on, what the output's encoding lacks is printed as an escape, such as "\\xe9".

    Each line is written at once, so that a log file has the lines of both outputs in order.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def survive_closed_output(ignored: type[OSError] = BrokenPipeError) -> None:
    """From now on, printing raises no exception of the class `ignored`.

    BrokenPipeError is that the reader has gone away, as in `onejit list | head`. OSError is also
    that a terminal was closed, or that the disk of a log file is full.
    Standard output and error stay as they are if somebody has replaced them, as a notebook does.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        writer = io.BufferedWriter(LossyFile(stream.fileno(), ignored))
        lossy = io.TextIOWrapper(
            writer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lossy)
