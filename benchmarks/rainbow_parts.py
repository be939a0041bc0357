"""What the parts of rainbow.py are worth: Rainbow, Rainbow without one part, and without all.

    python benchmarks/rainbow_parts.py cartpole@2e5 breakout@3e5 asterix@3e5

An argument is the name of a config in configs/rainbow/, with a number of steps behind the @ if it
is not the config's own. All variants train with the same seeds. Printed is the final return: the
mean, its 95 % interval by Student's t and the worst agent. benchmarks/results/parts.json keeps the
final returns of all seeds, and variants in it are not trained again.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # read when JAX is imported

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from origin import origin

import rainbow
from onejit.base import files, statistics
from onejit.run.directory import read_config

KEPT = ROOT / "benchmarks" / "results" / "parts.json"
OFF = {
    "double Q-learning": {"double": False},
    "dueling network": {"dueling": False},
    "several rewards in a target": {"n_step": 1},
    "prioritized replay": {"priority_exponent": 0.0},
    "noisy networks": {"noisy": False},
    "distribution of the return": {"distribution": "none"},
}


def make_variants() -> dict[str, dict]:
    """The fields that a variant changes."""
    variants = {"Rainbow": {}}
    all_off = {}
    for part, off in OFF.items():
        variants[f"without {part}"] = off
        all_off |= off
    return variants | {"without all of them": all_off}


def train(task: str, changes: dict, num_seeds: int, seed: int) -> np.ndarray:
    """The final returns of the agents of a variant: [num_seeds]."""
    name, _, steps = task.partition("@")
    config = read_config(rainbow, ROOT / "configs" / "rainbow" / f"{name}.yaml")
    config = dataclasses.replace(config, **changes)
    if steps:
        config = dataclasses.replace(config, total_timesteps=int(float(steps)))

    def metrics_of(key):
        return rainbow.make_train(config)(key)["metrics"]

    keys = jax.random.split(jax.random.key(seed), num_seeds)
    metrics = jax.jit(jax.vmap(metrics_of))(keys)
    return statistics.final_return(jax.tree.map(np.asarray, metrics))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--num-seeds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for task in args.tasks:
        for name, changes in make_variants().items():
            key = f"{task}, {args.num_seeds} seeds of {args.seed}: {name}"
            if key not in kept:
                begun = time.perf_counter()
                returns = train(task, changes, args.num_seeds, args.seed)
                kept[key] = {
                    "final_return": returns.tolist(),
                    "seconds": round(time.perf_counter() - begun),
                } | origin()
                files.write(KEPT, json.dumps(kept, indent=1) + "\n")
            returns = np.array(kept[key]["final_return"])
            mean = statistics.show(*statistics.student_interval(returns))
            print(f"{task} | {name} | {mean} | {returns.min():.4g}")


if __name__ == "__main__":
    main()
