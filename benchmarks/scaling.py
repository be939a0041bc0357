"""How speed and memory grow with seeds, environments and devices: one process for a size.

    python benchmarks/scaling.py seeds --script q_learning_gridworld --sizes 1 4 16 64 256 1024 4096
    python benchmarks/scaling.py envs --script ppo --sizes 4 16 64 256
    python benchmarks/scaling.py devices --script ppo --sizes 1 2     # on a CPU, a device is a core

Steps per second are over all seeds, compilation left out: a training grows until it takes at least
half of `--seconds`, and one of twice as many updates is timed. Memory is XLA's figure for one
device.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# read when JAX is imported
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def measure(script_name: str, seeds: int, fields: dict, seconds: float) -> dict:
    """Time twice as many updates as take at least half of `seconds`, in this process."""
    import jax
    import versions

    from onejit.engine import compilation
    from onejit.script import load

    script = load.load_script(script_name)
    config = versions.make_config(script, versions.as_words(fields))
    steps_per_update = config.num_envs * config.num_steps
    steps = getattr(config, "warmup_timesteps", 0) + 1000 * steps_per_update
    config = dataclasses.replace(config, total_timesteps=steps)

    begun = time.perf_counter()
    program = compilation.compile_slice(script, config, [], seeds)
    compilation_seconds = time.perf_counter() - begun
    key_data = jax.random.key_data(jax.random.split(jax.random.key(0), seeds))
    carry = program.start({}, jax.device_put(key_data, program.sharding))

    def advance(carry, updates):
        begun = time.perf_counter()
        carry = jax.block_until_ready(program.advance(carry, {}, 0, updates))
        return carry, time.perf_counter() - begun

    carry, _ = advance(carry, 1)
    updates = 1
    while True:
        carry, taken = advance(carry, updates)
        if taken >= seconds / 2:
            break
        updates = max(updates + 1, int(updates * min(8, seconds / taken)))
    _, taken = advance(carry, 2 * updates)
    return {
        "steps_per_second": 2 * updates * seeds * steps_per_update / taken,
        "bytes": program.bytes,
        "compilation": compilation_seconds,
        "devices": program.axis.num_devices,
    }


def measure_in_process(args, size: int) -> dict:
    env = dict(os.environ)
    if args.what == "devices":
        env["JAX_NUM_CPU_DEVICES"] = str(size)
    command = [sys.executable, __file__, args.what, "--one", "--sizes", str(size)]
    command += ["--script", args.script, "--seeds", str(args.seeds)]
    command += ["--seconds", str(args.seconds), "--set", *args.set]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_one(args) -> dict:
    (size,) = args.sizes
    fields = {}
    for setting in args.set:
        name, _, value = setting.partition("=")
        fields[name] = [value]
    if args.what == "envs":
        fields["num_envs"] = [str(size)]
    seeds = size if args.what == "seeds" else args.seeds
    return measure(args.script, seeds, fields, args.seconds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seeds", "envs", "devices"))
    parser.add_argument("--script", default="q_learning_gridworld")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seeds", type=int, default=4, help="where the sizes are not of seeds")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other hyperparameters"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="approximate time for each size, in seconds"
    )
    # A size in a process of its own.
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_one(args)))
        return
    print(f"| {args.what} | steps/s | of the first | MiB on a device | compilation |")
    print("|---|---|---|---|---|")
    first = None
    for size in args.sizes:
        result = measure_in_process(args, size)
        speed = result["steps_per_second"]
        if first is None:
            first = speed
        mib = result["bytes"] / 2**20
        seconds = result["compilation"]
        print(
            f"| {size} | {speed:,.0f} | {speed / first:.2f} | {mib:,.1f} | {seconds:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
