"""Standard output and standard error, whose encoding may be ASCII and whose reader may go away."""

import io
import os
import sys


class LossyFile(io.FileIO):
    """A file descriptor. What is written after the reader has gone away is lost."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:  # EPIPE of a pipe, EIO of a terminal, or the disk of a log file is full
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def print_plain_lines() -> None:
    """From now on, what the output's encoding lacks is printed as an escape, such as "\\xe9".

    Each line is written at once, so that a log file has the lines of both outputs in order.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def survive_closed_output() -> None:
    """From now on, printing raises no exception if nobody can read it.

    Standard output and error stay as they are if somebody has replaced them, as a notebook does.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        writer = io.BufferedWriter(LossyFile(stream.fileno(), "w", closefd=False))
        lossy = io.TextIOWrapper(
            writer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lossy)
