"""What an update of dqn.py takes with replays of different sizes: one that copied the replay would take longer.

python benchmarks/replay_size.py --seeds 1 16
"""

import argparse
import dataclasses
import os
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dqn

CONFIG = dqn.Config(
    num_envs=10, num_steps=1, learning_starts=100, hidden_sizes=(120, 84), total_timesteps=10_000_000
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10**4, 10**5, 10**6])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for seeds in args.seeds:
        shown = []
        for size in args.sizes:
            init, update = dqn.make_learner(dataclasses.replace(CONFIG, buffer_size=size))
            run = jax.jit(
                partial(jax.lax.scan, jax.vmap(update), length=args.updates), donate_argnums=0
            )
            state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), seeds))
            taken = []
            for _ in range(args.repeats + 1):  # the first compiles
                begun = time.perf_counter()
                state, _ = jax.block_until_ready(run(state))
                taken.append((time.perf_counter() - begun) / args.updates)
            shown.append(f"{size} steps {1e6 * np.median(taken[1:]):.0f} us")
            del state
        machine = f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}"
        print(
            f"CartPole-v1, {seeds} seed(s), {machine}, an update with a replay of {', '.join(shown)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
