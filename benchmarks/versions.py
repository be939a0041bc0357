"""Compare the speed of two versions of a script, trained in turn: what a change costs or brings.

    python benchmarks/versions.py old/ppo.py ppo.py --num-seeds 8 --total-timesteps 100000
    python benchmarks/versions.py old/ppo.py ppo.py --processes

By default both are compiled in this process as `jit(vmap(make_train(config)))`, one seed without `vmap`, for one
device, which on a CPU is a core, and trained in turn, the compilation apart; both take the flags. With `--processes`
each is run as a user runs it, from its start to its end, in an empty directory: the first may then be of any age, as
long as it takes the flags.

Prints the median time of each, and the ratio of their speeds: above 1 the second version is the faster one. The ratio
is the median over pairs of neighbours, with the least and the largest.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault(  # as in the scripts; read when JAX is imported
    "JAX_NUM_CPU_DEVICES",
    str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
)

import jax
import tyro


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_training(path: Path, name: str, flags: list[str], num_seeds: int):
    """A function that trains once, and the seconds that its compilation took."""
    script = load(path, name)
    config = tyro.cli(tyro.conf.FlagConversionOff[script.Config], args=script.read_flags(flags))
    key, train = jax.random.key(0), script.make_train(config)
    keys, train = (
        (key, train) if num_seeds == 1 else (jax.random.split(key, num_seeds), jax.vmap(train))
    )
    begun = time.perf_counter()
    train = jax.jit(train).lower(keys).compile()
    return lambda: jax.block_until_ready(train(keys)["metrics"]), time.perf_counter() - begun


def run_process(path: Path, flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": f"{directory}/cache"
        }  # empty: a first start
        command = [sys.executable, path.absolute(), *flags]
        subprocess.run(command, cwd=directory, env=env, check=True, capture_output=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("one", type=Path)
    parser.add_argument("two", type=Path)
    parser.add_argument("--processes", action="store_true", help="run both as a user does")
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options, flags = parser.parse_known_args()
    paths = {"one": options.one, "two": options.two}
    if options.processes:
        flags = [*flags, "--num-seeds", str(options.num_seeds)]
        contestants = {
            name: (lambda path=path: run_process(path, flags)) for name, path in paths.items()
        }
    else:
        contestants = {}
        for name, path in paths.items():
            contestants[name], seconds = compile_training(path, name, flags, options.num_seeds)
            print(f"{name}: {path}, compiled in {seconds:.1f} s", flush=True)
            contestants[name]()
    times = {name: [] for name in contestants}
    for _ in range(options.repeats):
        for name, contestant in contestants.items():
            begun = time.perf_counter()
            contestant()
            times[name].append(time.perf_counter() - begun)
    for name, each in times.items():
        print(
            f"{name}: {statistics.median(each):.3f} s ({min(each):.3f} to {max(each):.3f}, {len(each)} repeats)"
        )
    ratios = sorted(one / two for one, two in zip(times["one"], times["two"], strict=True))
    print(
        f"speed of two / one: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
