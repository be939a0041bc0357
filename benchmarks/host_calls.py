"""Time of a step of EnvPool from inside a compiled program, for two ways to call the host.

    pip install -c constraints.txt envpool
    python benchmarks/host_calls.py Walker2d-v4 Ant-v4

It takes random actions in six environments, one for each of six seeds. A step calls the host once
for all of them. In one way NVIDIA's driver copies the arrays, as `call_host` of
onejit/envs/host/batch.py lets
it do with one NVIDIA GPU. In the other way `jax.pure_callback` copies them. Both ways must give the
same observations and rewards.
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from onejit.envs import envpool
from onejit.envs.host import cuda

SEEDS = 6
STEPS = 400


def make_run(name):
    """`run(key)` takes random actions. It returns what every step returned."""
    env = envpool.EnvPool(name)
    params = env.default_params
    shape = env.action_space(params).shape

    def step(state, key):
        action = jax.random.uniform(key, shape, minval=-1, maxval=1)
        obs, state, reward, terminated, *_ = env.step(key, state, action, params)
        return state, (obs, reward, terminated)

    def run(key):
        _, state = env.reset(key, params)
        return jax.lax.scan(step, state, jax.random.split(key, STEPS))[1]

    return jax.jit(jax.vmap(run))


def measure(name):
    """What the steps returned, and the microseconds that a step took."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    run = make_run(name)
    jax.block_until_ready(run(keys))
    start = time.perf_counter()
    steps = jax.block_until_ready(run(keys))
    return jax.device_get(steps), (time.perf_counter() - start) / STEPS * 1e6


def main():
    driver = cuda.driver()
    if driver is None:
        sys.exit("host_calls.py: needs one NVIDIA GPU")
    print(jax.devices()[0].device_kind)
    for name in sys.argv[1:] or ["Walker2d-v4", "Ant-v4"]:
        cuda.driver = lambda: driver
        copied, microseconds = measure(name)
        print(f"{name}: {microseconds:.0f} us a step with the driver's copies")
        cuda.driver = lambda: None
        called, microseconds = measure(name)
        print(f"{name}: {microseconds:.0f} us a step with jax.pure_callback")
        jax.tree.map(np.testing.assert_array_equal, copied, called)


if __name__ == "__main__":
    main()
