"""A fixture: gymnax's registry of environments as it was before."""

import sys

import gymnax
import pytest


@pytest.fixture
def registry():
    """Environments that a test registers, and adapters that it imports, are forgotten after it."""
    known = list(gymnax.registered_envs)
    factories = dict(gymnax.registration._registry)
    modules = {name for name in sys.modules if name.startswith("onejit.envs.")}
    yield
    gymnax.registered_envs[:] = known
    gymnax.registration._registry.clear()
    gymnax.registration._registry.update(factories)
    for name in {name for name in sys.modules if name.startswith("onejit.envs.")} - modules:
        del sys.modules[name]
