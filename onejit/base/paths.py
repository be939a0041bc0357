"""Folders that a command line names."""

import os
import re
from pathlib import Path


def expanded(text: str) -> str:
    """A path where `~` and variables are replaced. Raises ValueError if one is not known."""
    for match in re.finditer(r"\$(\w+|\{\w+\})", text):
        if match[1].strip("{}") not in os.environ:
            raise ValueError(f"{text}: the variable {match[0]} is not set")
    path = os.path.expanduser(os.path.expandvars(text))
    if path.startswith("~"):
        raise ValueError(f"{text}: this user is not known")
    return path


def as_folder(text: str) -> Path:
    """A path where `~` and variables are replaced, unless it exists as it is.

    Raises ValueError, also for an address and for nothing, as from an empty variable.
    """
    if not text.strip():
        raise ValueError("must be a folder")
    path = text if os.path.lexists(text) else expanded(text)
    if "://" in path:
        raise ValueError("must be a folder of this machine, and not an address")
    return Path(path)
