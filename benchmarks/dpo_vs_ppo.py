"""Compare DPO with PPO over paired seeds: the same keys, environments and hyperparameters, another policy loss.

    python benchmarks/dpo_vs_ppo.py
    python benchmarks/dpo_vs_ppo.py pendulum --seeds 32 --out runs/dpo_vs_ppo

For each name the two scripts train with configs/dpo_continuous/NAME.yaml. Seed i has the key of seed i of
`main --num-seeds SEEDS`, in both. The table, in Markdown, gives interquartile means with 95 % bootstrap intervals over
seeds, and of the differences between paired seeds the mean, its 95 % bootstrap interval, and in how many DPO is ahead.
Returns are kept in OUT, one file for each name, and a second call trains only what is not there.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import scipy.stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dpo_continuous  # noqa: E402
import ppo_continuous  # noqa: E402
from onejit import running, runs, statistics  # noqa: E402

NAMES = ["pendulum", "reacher", "pointrobot", "inverted_pendulum"]
SCRIPTS = {"PPO": ppo_continuous, "DPO": dpo_continuous}


def returns(script, name, seeds):
    """`{"final": [seeds], "greedy": [seeds]}` of one script with one config."""
    file = ROOT / "configs" / "dpo_continuous" / f"{name}.yaml"
    discovered = runs.read_config(dpo_continuous, file)
    values = {key: value for key, value in vars(discovered).items() if not key.startswith("dpo_")}
    config = discovered if script is dpo_continuous else script.Config(**values)
    options = SimpleNamespace(num_seeds=seeds, seed=0, eval_episodes=16, eval_interval=0)
    program = running.compile_slice(script, config, [], seeds, options)
    carry = program.start({}, jax.device_put(running.seed_keys(options), program.spread))
    carry = program.advance(carry, {}, 0, config.num_updates)
    greedy = program.evaluate(carry["runner_state"].agent)
    final = statistics.final_return(jax.device_get(carry["metrics"]))
    return {"final": final, "greedy": np.asarray(greedy).mean(axis=1)}


def measure(name, args) -> dict:
    """`{"PPO final": [seeds], ...}` from OUT, or trained and written there."""
    file = Path(args.out, f"{name}-{args.seeds}.npz")
    if not file.exists():
        found = {}
        for label, script in SCRIPTS.items():
            begun = time.perf_counter()
            found |= {
                f"{label} {kind}": values
                for kind, values in returns(script, name, args.seeds).items()
            }
            print(f"{name}, {label}: {time.perf_counter() - begun:.0f} s", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **found)
    return dict(np.load(file))


def spread(values) -> str:
    return "{:.4g} ({:.4g} to {:.4g})".format(*statistics.interval(values))


def row(name, kind, found) -> str:
    theirs, ours = found[f"PPO {kind}"], found[f"DPO {kind}"]
    difference = ours - theirs
    interval = scipy.stats.bootstrap(
        (difference,), np.mean, n_resamples=10_000, method="percentile", rng=0
    )
    paired = "{:.3g} ({:.3g} to {:.3g})".format(difference.mean(), *interval.confidence_interval)
    ahead = f"{(difference > 0).sum()} of {len(difference)}"
    return f"| {name} | {kind} | {spread(theirs)} | {spread(ours)} | {paired} | {ahead} |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=NAMES, help=f"of configs/dpo_continuous; by default {NAMES}"
    )
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--out", default="runs/dpo_vs_ppo")
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}", flush=True
    )
    found = {name: measure(name, args) for name in args.names}
    print(
        "| config | return | PPO | DPO | DPO less PPO, paired seeds | DPO ahead |\n|---|---|---|---|---|---|"
    )
    for kind in ("final", "greedy"):
        print(*[row(name, kind, found[name]) for name in args.names], sep="\n")


if __name__ == "__main__":
    main()
