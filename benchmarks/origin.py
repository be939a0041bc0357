"""Where a measurement comes from."""

import platform
from pathlib import Path

import jax

from onejit.script.load import git


def processor() -> str:
    """The model of the CPU, if the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    """The commit of the repository, with -dirty if files have changed since.

    A copy without git has it in a file commit.txt. Otherwise it is an empty string.
    """
    words = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    file = Path(__file__).resolve().parent.parent / "commit.txt"
    copied = file.read_text() if file.exists() else ""
    return (git(file, *words).decode() or copied).strip()


def machine() -> str:
    """The accelerator, or the model of the CPU."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return processor().replace("(R)", "").replace("Processor", "").strip()


def origin() -> dict:
    """What is kept with a measurement: machine, commit and version of JAX."""
    return {
        "machine": machine(),
        "commit": commit(),
        "jax": jax.__version__,
    }
