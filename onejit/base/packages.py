"""Installed packages: versions that a run records, and packages that an option needs."""

import contextlib
import importlib.metadata
import importlib.util
import sys

RECORDED = {
    *("brax", "craftax", "distrax", "envpool", "flax", "gymnasium", "gymnax", "jax", "jaxlib"),
    *("jaxmarl", "jumanji", "mctx", "mujoco", "navix", "numpy", "optax", "pgx", "playground"),
    "xminigrid",
}


def versions() -> dict:
    """The versions of Python and of the packages that a training may depend on."""
    installed = {}
    for name in sorted(RECORDED):  # to read what all packages say of themselves takes a while
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    from onejit import __version__

    return {"python": sys.version.split()[0], "onejit": __version__, **installed}


def check_packages(option: str, names) -> None:
    """Raise ValueError if packages that an option needs are not installed."""
    missing = [name.replace("_", "-") for name in names if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        command = " ".join(["pip install", *missing])
        raise ValueError(f"{option}: needs {needed}; {command}")
