"""PQN's network against NumPy; all else is compared with its twin."""

import jax
import numpy as np
import pytest
from support.compilation import jit_quickly
from support.tiers import slow

import pqn


@pytest.mark.parametrize("layer_norm", [True, slow(False)])
@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar"])
def test_network_against_numpy(name, layer_norm):
    config = pqn.Config(env_name=name, layer_norm=layer_norm, hidden_sizes=(7, 6))
    network = pqn.make_network(config, *pqn.make_env(config))
    rng = np.random.default_rng(0)
    x = rng.random((5, *network.obs_space.shape))
    params = jax.device_get(jit_quickly(network.init)(jax.random.key(0), x))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), params)
    dense = [
        params["params"][f"Dense_{i}"]
        for i in range(len([k for k in params["params"] if "Dense" in k]))
    ]
    q = jit_quickly(network.apply)(params, x)
    if x.ndim == 4:
        x = np.stack(
            [[x[:, i : i + 3, j : j + 3].reshape(5, -1) for j in range(8)] for i in range(8)]
        )
        x = x.transpose(2, 0, 1, 3)  # [5, 8, 8, 9 C]
    for i, layer in enumerate(dense[:-1]):
        x = x @ layer["kernel"] + layer["bias"]
        if layer_norm:
            norm = params["params"][f"LayerNorm_{i}"]
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * norm["scale"] + norm["bias"]
        x = np.maximum(x, 0.0)
        x = x.reshape(5, -1) if x.ndim == 4 else x
    np.testing.assert_allclose(q, x @ dense[-1]["kernel"] + dense[-1]["bias"], rtol=1e-3, atol=1e-4)
