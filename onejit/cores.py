"""The cores of this machine. Importing `onejit.devices` instead would set up JAX."""

import os


def number_of_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
