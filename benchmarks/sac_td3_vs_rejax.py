"""Speed of sac.py and td3.py on Pendulum-v1 beside rejax's SAC and TD3 at the same settings, in one process.

    pip install --target deps --no-deps rejax
    PYTHONPATH=deps python benchmarks/sac_td3_vs_rejax.py --seeds 1 8

Each trains in turn, several times; compilation is not counted. One environment per agent, a gradient step on a batch of
256 per environment step, two hidden layers of 64, replay of 20,000 steps, learning from step 256 on, no evaluation.
Several seeds train twice, on one device, and spread over the CPU's cores, each a device, as `main` does it; rejax's are
spread in the same way. TD3's policy takes one step for two of the critics in both; td3.py takes two environment steps
and two of the critics per update, in rejax they alternate. rejax gets gymnax's older five-value step from gymnax's own
wrapper.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))

import gymnax.wrappers
import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sac
import td3

WARMUP, BATCH, BUFFER, LR = 256, 256, 20_000, 1e-3


def make_onejit(name, steps):
    script, each = {"SAC": (sac, 1), "TD3": (td3, 2)}[name]
    config = script.Config(
        env_name="Pendulum-v1", total_timesteps=steps, num_envs=1, num_steps=each, gradient_steps=each,
        batch_size=BATCH, buffer_size=BUFFER, learning_starts=WARMUP, lr=LR, hidden_sizes=(64, 64), activation="relu",
    )  # fmt: skip
    train = script.make_train(config)
    return lambda key: train(key)["runner_state"].params


def make_rejax(name, steps):
    import rejax

    env, env_params = gymnax.make("Pendulum-v1")
    gymnax.wrappers.LegacyStepAPIWrapper.__deepcopy__ = lambda self, memo: self  # it would not end
    networks = {
        "SAC": {"hidden_layer_sizes": (64, 64), "agent_kwargs": {"activation": "relu"}},
        "TD3": {"actor_kwargs": {"activation": "relu"}, "critic_kwargs": {"activation": "relu"}, "policy_delay": 2},
    }[name]
    algorithm = getattr(rejax, name).create(
        env=gymnax.wrappers.LegacyStepAPIWrapper(env), env_params=env_params, total_timesteps=steps, num_envs=1,
        num_epochs=1, batch_size=BATCH, buffer_size=BUFFER, fill_buffer=WARMUP, learning_rate=LR, eval_freq=steps,
        skip_initial_evaluation=True, **networks,
    )  # fmt: skip
    algorithm = algorithm.replace(eval_callback=lambda *_: ())

    def run(key):
        state, _ = algorithm.train(key)
        return state.actor_ts.params, state.critic_ts.params

    return run


def make_keys(seeds, devices, repeat):
    keys = jax.random.split(jax.random.PRNGKey(repeat), seeds)
    mesh = jax.make_mesh((devices,), ("seed",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("seed"))
    return jax.block_until_ready(jax.device_put(keys, sharding))


def compile_for(run, seeds, devices):
    keys = make_keys(seeds, devices, 0)
    begun = time.perf_counter()
    compiled = jax.jit(jax.vmap(run) if seeds > 1 else lambda keys: run(keys[0])).lower(keys).compile()
    return compiled, time.perf_counter() - begun


def seconds(compiled, keys):
    begun = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    return time.perf_counter() - begun


def compare(name, seeds, devices, steps, repeats):
    programs = {}
    for library, make in {"onejit": make_onejit, "rejax": make_rejax}.items():
        programs[library], compilation = compile_for(make(name, steps), seeds, devices)
        print(f"{name}, {library}: compiled in {compilation:.1f} s", flush=True)
    rates = {library: [] for library in programs}
    for repeat in range(repeats):
        for library in list(programs)[:: 1 if repeat % 2 else -1]:
            rates[library].append(seeds * steps / seconds(programs[library], make_keys(seeds, devices, repeat)))
    median = {library: np.median(values) for library, values in rates.items()}
    shown = ", ".join(f"{library} {value:,.0f} steps/s" for library, value in median.items())
    where = f"{devices} device(s), {os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}"
    each, ratio = f"median of {repeats} x {steps} steps", median["onejit"] / median["rejax"]
    print(f"{name}, {seeds} seed(s) on {where}, {each}: {shown}; ratio {ratio:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=("SAC", "TD3"), default=["SAC", "TD3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for name in args.algorithms:
        for seeds in args.seeds:
            for devices in sorted({1, math.gcd(seeds, jax.device_count())}):
                compare(name, seeds, devices, args.steps, args.repeats)


if __name__ == "__main__":
    main()
