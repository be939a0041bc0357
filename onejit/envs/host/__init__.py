"""Environments that run outside JAX.

`batch` puts them behind gymnax's interface. `rows` and `spaces` import no JAX: the processes that
step environments import them.
"""

import importlib

PUBLIC = (
    "NO_LIMIT",
    "Batch",
    "HostEnv",
    "HostState",
    "Thread",
    "as_gymnax",
    "close_all",
    "say_once",
)


def __getattr__(name: str):
    """What a module of your own needs, such as `onejit.envs.host.close_all`."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'onejit.envs.host' has no attribute {name!r}")
    return getattr(importlib.import_module("onejit.envs.host.batch"), name)
