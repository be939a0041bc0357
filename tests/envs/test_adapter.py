"""What the adapters of environments have in common."""

import sys
from types import ModuleType

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.bsuite.catch import Catch
from gymnax.environments.classic_control.cartpole import CartPole
from support.files import ROOT

import ppo
from onejit.envs import adapter
from onejit.script import load
from onejit.script.environment import unwrap


def test_start_states_are_looked_up():
    traced = []

    def reset(key):
        traced.append(key)
        return {"state": jax.random.uniform(key), "none": jnp.zeros(0)}

    start = adapter.start_from(reset, 6)
    assert not traced, "made before they are needed"
    keys = jax.random.split(jax.random.key(5), 200)
    started = np.asarray(jax.jit(jax.vmap(start))(keys)["state"])
    jax.jit(start)(keys[0])
    assert len(traced) == 1, "made more than once"
    expected = jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 6))
    np.testing.assert_array_equal(np.unique(started), np.sort(expected))
    assert adapter.start_from(reset, 0) is reset


def test_a_name_is_registered_once_and_means_the_newest():
    """gymnax makes an environment once for equal arguments."""
    name = "test_adapter:Twice"
    made = []

    def make(name, **arguments):
        made.append(arguments)
        return object()

    adapter.register([name], dict)
    adapter.register([name], make)
    assert gymnax.registered_envs.count(name) == 1
    try:
        factory = gymnax.registration._registry[name]
        assert factory(size=1) is factory(size=1) is not factory(size=2)
        assert made == [{"size": 1}, {"size": 2}]
    finally:
        gymnax.registered_envs.remove(name)
        del gymnax.registration._registry[name]


def test_names_of_a_module_change_no_other(tmp_path, monkeypatch):
    """Copies of older scripts, which look up the short name, get the module's environment."""
    monkeypatch.setitem(sys.modules, "library", ModuleType("library"))
    monkeypatch.setattr(gymnax, "registered_envs", list(gymnax.registered_envs))
    monkeypatch.setattr(gymnax.registration, "registered_envs", gymnax.registered_envs)
    monkeypatch.setattr(gymnax.registration, "_registry", dict(gymnax.registration._registry))
    adapter.register(["CartPole-v1", "Ours-v1"], lambda name: Catch(), "library")
    source = (ROOT / "ppo.py").read_text()
    line = "    if name not in gymnax.registered_envs:\n"
    assert source.count(line) == 1
    (tmp_path / "old.py").write_text(source.replace(line, "    if module:\n"))
    old = load.load_script(tmp_path / "old.py")
    for name in ("CartPole-v1", "library:CartPole-v1", "library:Ours-v1", "CartPole-v1"):
        for script in (old, ppo):
            env, _ = script.make_env(script.Config(env_name=name))
            assert isinstance(unwrap(env), Catch if "library" in name else CartPole)
    with pytest.raises(ValueError, match="Ours-v1 is not in registered"):
        old.make_env(old.Config(env_name="Ours-v1"))
