"""How speed and memory grow with seeds, environments and devices: one process for each size, one table.

    python benchmarks/scaling.py seeds --script q_learning_gridworld --sizes 1 4 16 64 256 1024 4096
    python benchmarks/scaling.py envs --script ppo --sizes 4 16 64 256
    python benchmarks/scaling.py devices --script ppo --sizes 1 2     # on a CPU, each a core

Steps per second are over all seeds, of the last two thirds of the run, compilation left out. Memory is XLA's figure for
one device. Each size trains for about `--seconds`.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onejit import command_line, running, runs  # noqa: E402


def measure(script_name: str, seeds: int, changes: dict, seconds: float) -> dict:
    """Train in this process for about `seconds`, then as long again twice, timed."""
    import time

    import jax

    from onejit import train

    script = runs.load_script(script_name)
    flags = [f"--{name}={value}" for name, value in changes.items()]
    flags += [f"--num-seeds={seeds}", "--total-timesteps=1e9"]
    config, options, _ = command_line.parse_with(script, flags, train.Options, __doc__)
    steps = getattr(config, "warmup_timesteps", 0) + 1000 * config.num_envs * config.num_steps
    config = dataclasses.replace(config, total_timesteps=steps)
    begun = time.perf_counter()
    program = running.compile_slice(script, config, [], seeds)
    compiled = time.perf_counter() - begun
    carry = program.start({}, jax.device_put(running.seed_keys(options), program.spread))

    def advance(carry, updates):
        begun = time.perf_counter()
        carry = jax.block_until_ready(program.advance(carry, {}, 0, updates))
        return carry, time.perf_counter() - begun

    carry, _ = advance(carry, 1)
    updates, took = 1, 0.0
    while took < seconds / 2:
        carry, took = advance(carry, updates)
        updates = (
            updates
            if took >= seconds / 2
            else max(updates + 1, int(updates * min(8, seconds / took)))
        )
    _, took = advance(carry, 2 * updates)
    steps = 2 * updates * seeds * config.num_envs * config.num_steps
    return {"steps_per_second": steps / took, "bytes": program.bytes, "compile": compiled,
            "devices": program.num_devices}  # fmt: skip


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
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument(
        "--one", action="store_true", help=argparse.SUPPRESS
    )  # a size in a process of its own
    args = parser.parse_args()
    if args.one:
        (size,), changes = args.sizes, dict(each.split("=") for each in args.set)
        seeds = size if args.what == "seeds" else args.seeds
        changes |= {"num-envs": size} if args.what == "envs" else {}
        print(json.dumps(measure(args.script, seeds, changes, args.seconds)))
        return
    print(
        f"| {args.what} | steps/s | of the first | MiB on a device | compile |\n|---|---|---|---|---|"
    )
    first = None
    for size in args.sizes:
        environment = os.environ | (
            {"JAX_NUM_CPU_DEVICES": str(size)} if args.what == "devices" else {}
        )
        command = [sys.executable, __file__, args.what, "--one", "--script", args.script, "--sizes", str(size),
                   "--seeds", str(args.seeds), "--seconds", str(args.seconds), "--set", *args.set]  # fmt: skip
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
        )
        result = json.loads(done.stdout.splitlines()[-1])
        speed, first = result["steps_per_second"], first or result["steps_per_second"]
        mib = result["bytes"] / 2**20
        print(
            f"| {size} | {speed:,.0f} | {speed / first:.2f} | {mib:,.1f} | {result['compile']:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
