"""Environments of other libraries with gymnax's interface.

`--env-name onejit.envs.MODULE:NAME` imports one of these modules, which registers the library's
environments with gymnax under their own names. docs/environments.md describes their observations,
actions and rewards.
"""
