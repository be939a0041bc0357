"""Environments of other libraries with gymnax's interface.

`--env-name onejit.envs.MODULE:NAME` imports one of these modules, which registers the library's
environments with gymnax as `onejit.envs.MODULE:NAME`. docs/environments.md describes their
observations, actions and rewards. Importing this package starts no JAX.
"""


def __getattr__(name: str):
    """What a module of your own needs: `onejit.envs.register`."""
    if name != "register":
        raise AttributeError(f"module 'onejit.envs' has no attribute {name!r}")
    from onejit.envs.adapter import register

    return register
