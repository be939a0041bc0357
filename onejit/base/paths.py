"""Folders that a command line names."""

import os
from pathlib import Path
from typing import Annotated

import tyro


def as_folder(text: str) -> Path:
    """A path where `~` and variables are replaced. Raises ValueError for an address."""
    if "://" in text:
        raise ValueError("must be a folder of this machine, and not an address")
    return Path(os.path.expandvars(text)).expanduser()


OptionalFolder = Annotated[  # one type for both: tyro's message would name each
    Path | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: as_folder(words[0]),
        is_instance=lambda value: value is None or isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    ),
]
