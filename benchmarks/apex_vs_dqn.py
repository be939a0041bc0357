"""Wall-clock time that apex_dqn.py and dqn.py take to the same return on MinAtar's Breakout, in one process.

    python benchmarks/apex_vs_dqn.py --seeds 10 --minutes 10

Each trains with its config in `configs/`, a chunk of steps at a time; the next chunk is of the script that has trained
for less time so far, so that both meet the same machine. After each chunk all agents play the same greedy episodes.
Neither these nor compilation are counted. Shown are the greedy returns with 95 % bootstrap intervals of their mean over
seeds, and the training time after which that mean had reached each level.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import apex_dqn  # noqa: E402
import dqn  # noqa: E402
from onejit import playing, runs  # noqa: E402


def compile_script(script, config_name, seeds, steps, episodes):
    """`start() -> state`, `advance(state) -> state`, the steps that it takes, `evaluate(state) -> returns [seeds]`."""
    config = runs.read_config(script, ROOT / "configs" / script.__name__ / f"{config_name}.yaml")
    init, update = script.make_learner(config)
    updates = max(1, steps // (config.num_envs * config.num_steps))
    play = playing.greedy_returns(
        script, config, SimpleNamespace(seed=1, eval_episodes=episodes, eval_interval=0)
    )

    def greedy(states):
        return play(states.agent).mean(axis=1)

    def scan(state):
        return jax.lax.scan(update, state, None, updates)[0]

    keys = jax.random.split(jax.random.key(0), seeds)
    start = jax.jit(jax.vmap(init)).lower(keys).compile()
    shapes = jax.eval_shape(jax.vmap(init), keys)
    advance = jax.jit(jax.vmap(scan), donate_argnums=0).lower(shapes).compile()
    evaluate = jax.jit(greedy).lower(shapes).compile()
    return lambda: start(keys), advance, updates * config.num_envs * config.num_steps, evaluate


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of training for each of the two"
    )
    parser.add_argument("--steps", type=int, default=50_000, help="in a chunk, per agent")
    parser.add_argument("--levels", type=float, nargs="+", default=[2, 4, 6, 8, 10, 15, 20])
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--config", default="breakout", help="of each script")
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}", flush=True
    )
    scripts, states, seconds, steps, reached = {}, {}, {}, {}, {}
    for script in (apex_dqn, dqn):
        name = script.__name__
        scripts[name] = start, *_ = compile_script(
            script, args.config, args.seeds, args.steps, args.episodes
        )
        begun = time.perf_counter()
        states[name] = jax.block_until_ready(start())
        seconds[name], steps[name], reached[name] = time.perf_counter() - begun, 0, {}
    while min(seconds.values()) < 60 * args.minutes:
        name = min(seconds, key=seconds.get)
        _, advance, chunk, evaluate = scripts[name]
        begun = time.perf_counter()
        states[name] = jax.block_until_ready(advance(states[name]))
        seconds[name] += time.perf_counter() - begun
        steps[name] += chunk
        returns = np.asarray(evaluate(states[name]))
        interval = stats.bootstrap((returns,), np.mean, method="percentile").confidence_interval
        print(
            f"{name:>8} {seconds[name]:6.0f} s {steps[name]:9,d} steps: greedy return {returns.mean():5.1f} "
            f"({interval.low:.1f} to {interval.high:.1f})",
            flush=True,
        )
        for level in args.levels:
            if returns.mean() >= level:
                reached[name].setdefault(level, seconds[name])
    for level in args.levels:
        times = (
            f"{name} {each[level]:.0f} s" if level in each else f"{name} not"
            for name, each in reached.items()
        )
        print(f"greedy return {level:g}: {', '.join(times)}")


if __name__ == "__main__":
    main()
