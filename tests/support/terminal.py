"""A terminal for processes, whose progress bars need one."""

import contextlib
import os
import pty
import termios
import threading


class Terminal:
    """What a process writes to a terminal, as far as it has come."""

    def __init__(self):
        self.end, self.stderr = pty.openpty()
        termios.tcsetwinsize(self.stderr, (24, 100))  # else it has no columns for a bar
        self.said = ""
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        with contextlib.suppress(OSError):  # the process has ended
            while True:
                self.said += os.read(self.end, 4096).decode(errors="replace")
