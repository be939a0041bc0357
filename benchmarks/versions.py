"""Compare the speed of two versions of a script, trained in turn: what a change costs or brings.

    python benchmarks/versions.py old/ppo.py ppo.py --num-seeds 8 --total-timesteps 100000
    python benchmarks/versions.py old/dqn.py dqn.py --config configs/dqn/breakout.yaml
    python benchmarks/versions.py old/rainbow.py rainbow.py \\
        --old-flags="--target-update-interval 250" --new-flags="--target-update-interval 4000"
    python benchmarks/versions.py old/ppo.py ppo.py --processes

Both versions get the same flags, and those of --config FILE, which flags override. A field that one
version lacks is left out with a message.
--old-flags and --new-flags are for one version alone and override all others. They may hold
--config FILE too.

By default both are compiled in this process as `jit(vmap(make_train(config)))`, one seed without
`vmap`, for one device. On Linux the process keeps to one core, because XLA would split operations
of one device over all of them. They are trained in turn, and the compilation is not counted. With
--processes each is run as a user runs it, from its start to its end, in an empty directory and
without a compilation cache.

Prints the median time of each version and the ratio of their speeds: above 1 the second version is
the faster one. The ratio is the median over pairs of neighbours, with the least and the largest.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault(  # each core is a device; read when JAX is imported
    "JAX_NUM_CPU_DEVICES",
    str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
)

import jax
import tyro
import yaml


def load(path: Path, name: str):
    """A script as a module, whatever its file is called."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read_flags(words: list[str]) -> dict[str, list[str]]:
    """`--name VALUE ...` as {name: values}; `--config FILE` stands for the file's fields."""
    given = {}
    in_file = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [value] if equals else []
        elif name is None:
            raise SystemExit(f"{word}: stands before the first flag")
        else:
            given[name].append(word)
    if "config" in given:
        (file,) = given.pop("config")
        for name, value in yaml.safe_load(Path(file).read_text()).items():
            if isinstance(value, dict):
                value = list(value.items())
            in_file[name] = [str(x) for x in jax.tree.leaves(value)]
    return in_file | given


def split_flags(flags: dict[str, list[str]], config_class) -> tuple[dict, list[str]]:
    """The flags that this version has, {field: words}, and the names that it lacks."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    known = {}
    lacking = []
    for name, values in flags.items():
        field = fields.get(name)
        if field is None:
            lacking.append(name)
            continue
        if field.type in (int, "int"):
            with contextlib.suppress(ValueError):  # 5e5 may stand for a whole number
                values = [f"{float(value):.16g}" for value in values]
        known[field.name] = values
    return known, lacking


def as_words(flags: dict[str, list[str]]) -> list[str]:
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]


def own_flags(config_classes: dict, shared: list[str], own: dict[str, list[str]]):
    """The flags of both versions, {version: words}. A flag that neither version has is an error."""
    words = {}
    lacking_in = {}
    for version, config_class in config_classes.items():
        flags, lacking_in[version] = split_flags(read_flags(shared), config_class)
        more, lacking = split_flags(read_flags(own[version]), config_class)
        if lacking:
            raise SystemExit(f"--{version}-flags: {config_class.__module__} has no {lacking[0]}")
        words[version] = as_words(flags | more)
    unknown = set.intersection(*map(set, lacking_in.values()))
    if unknown:
        raise SystemExit(f"--{min(unknown)}: neither version has such a field")
    for version, names in lacking_in.items():
        for name in names:
            print(f"{version}: has no {name}, which is left out", flush=True)
    return words


def make_config(script, words: list[str]):
    return tyro.cli(tyro.conf.FlagConversionOff[script.Config], args=words)


def compile_training(script, words: list[str], num_seeds: int):
    """A function that trains once, and the seconds that its compilation took."""
    train = script.make_train(make_config(script, words))
    keys = jax.random.key(0)
    if num_seeds > 1:
        keys = jax.random.split(keys, num_seeds)
        train = jax.vmap(train)
    begun = time.perf_counter()
    compiled = jax.jit(train).lower(keys).compile()
    seconds = time.perf_counter() - begun

    def run():
        jax.block_until_ready(compiled(keys)["metrics"])

    return run, seconds


def process_training(path: Path, words: list[str], num_seeds: int):
    """A function that runs the script as a process of its own."""
    command = [sys.executable, path.absolute(), *words, "--num-seeds", str(num_seeds)]

    def run():
        with tempfile.TemporaryDirectory() as directory:
            env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{directory}/cache"}  # empty
            subprocess.run(command, cwd=directory, env=env, check=True, capture_output=True)

    return run


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("old", type=Path, help="the script of the old version")
    parser.add_argument("new", type=Path, help="the script of the new version")
    parser.add_argument("--processes", action="store_true", help="run both as a user does")
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--old-flags", type=shlex.split, default=[], metavar='"FLAGS"')
    parser.add_argument("--new-flags", type=shlex.split, default=[], metavar='"FLAGS"')
    options, shared = parser.parse_known_args()

    if not options.processes and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA starts its threads

    paths = {"old": options.old, "new": options.new}
    scripts = {version: load(path, f"{version}_{path.stem}") for version, path in paths.items()}
    words = own_flags(
        {version: script.Config for version, script in scripts.items()},
        shared,
        {"old": options.old_flags, "new": options.new_flags},
    )
    trainings = {}
    for version, path in paths.items():
        if options.processes:
            trainings[version] = process_training(path, words[version], options.num_seeds)
            continue
        trainings[version], seconds = compile_training(
            scripts[version], words[version], options.num_seeds
        )
        print(f"{version}: {path}, compiled in {seconds:.1f} s", flush=True)
        trainings[version]()  # the first one warms up

    times = {"old": [], "new": []}
    for _ in range(options.repeats):
        for version, run in trainings.items():
            begun = time.perf_counter()
            run()
            times[version].append(time.perf_counter() - begun)
    for version, seconds in times.items():
        middle = statistics.median(seconds)
        span = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} repeats"
        print(f"{version}: {middle:.3f} s ({span})")
    ratios = sorted(old / new for old, new in zip(times["old"], times["new"], strict=True))
    middle = statistics.median(ratios)
    print(f"speed of new / old: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
