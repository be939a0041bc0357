"""Speed of dqn.py on CartPole-v1 beside PureJaxRL's dqn.py at the same settings, in one process.

    git clone https://github.com/luchris429/purejaxrl
    pip install --target deps --no-deps flashbax
    PYTHONPATH=deps python benchmarks/dqn_vs_purejaxrl.py speed purejaxrl --seeds 1 16
    python benchmarks/dqn_vs_purejaxrl.py buffer --seeds 1 16

`speed` trains with each in turn, several times; compilation is not counted. PureJaxRL runs from its own file with its
own hyperparameters; what is put in its place is only what newer packages took away: gymnax's five-value step,
`jax.tree_map`, and W&B, which it imports but does not use. `buffer` shows what an update of dqn.py takes with replays
of different sizes: one that copied the replay would take longer with a larger one.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
import types
from functools import partial
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dqn

CONFIG = dqn.Config(  # PureJaxRL's own settings
    num_envs=10, num_steps=1, gradient_steps=1, batch_size=128, buffer_size=10_000, learning_starts=10_000, lr=2.5e-4,
    anneal_lr=False, gamma=0.99, double=False, dueling=False, epsilon_start=1.0, epsilon_finish=0.05,
    exploration_fraction=0.5, target_update_interval=500, tau=1.0, loss="squared",
    hidden_sizes=(120, 84), activation="relu",
)  # fmt: skip


def make_onejit(steps):
    train = dqn.make_train(dataclasses.replace(CONFIG, total_timesteps=steps))
    return lambda key: train(key)["metrics"]["episodic_return"]


def patch_packages():
    """Give PureJaxRL's file what it imports, as it was when that was written."""
    from gymnax import wrappers
    from gymnax.wrappers import purerl

    purerl.LogWrapper = lambda env: wrappers.LegacyStepAPIWrapper(wrappers.LogWrapper(env))
    sys.modules["wandb"] = types.ModuleType("wandb")
    jax.tree_map = jax.tree.map


def make_purejaxrl(path, steps):
    patch_packages()
    spec = importlib.util.spec_from_file_location("purejaxrl_dqn", Path(path, "purejaxrl", "dqn.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = "num_envs buffer_size epsilon_start epsilon_finish target_update_interval lr learning_starts gamma tau"
    settings = {name.upper(): getattr(CONFIG, name) for name in names.split()}
    train = module.make_train(
        settings
        | dict(ENV_NAME="CartPole-v1", TOTAL_TIMESTEPS=steps, EPSILON_ANNEAL_TIME=steps / 2, TRAINING_INTERVAL=10)
        | dict(BUFFER_BATCH_SIZE=CONFIG.batch_size, LR_LINEAR_DECAY=False)
    )
    return lambda key: train(key)["metrics"]["returns"]


def compile_for(run, seeds):
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    begun = time.perf_counter()
    compiled = jax.jit(jax.vmap(run)).lower(keys).compile()
    return compiled, time.perf_counter() - begun


def seconds(compiled, seeds, repeat):
    keys = jax.block_until_ready(jax.random.split(jax.random.PRNGKey(repeat), seeds))
    begun = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    return time.perf_counter() - begun


def machine():
    return f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}"


def speed(args):
    for seeds in args.seeds:
        steps = args.steps or {1: 200_000}.get(seeds, 50_000)
        programs = {}
        for name, run in {"onejit": make_onejit(steps), "PureJaxRL": make_purejaxrl(args.purejaxrl, steps)}.items():
            programs[name], compilation = compile_for(run, seeds)
            print(f"{name}: compiled in {compilation:.1f} s", flush=True)
        rates = {name: [] for name in programs}
        for repeat in range(args.repeats):
            for name in list(programs)[:: 1 if repeat % 2 else -1]:
                rates[name].append(seeds * steps / seconds(programs[name], seeds, repeat))
                print(f"{name}: {rates[name][-1]:,.0f} steps/s", flush=True)
        median = {name: np.median(values) for name, values in rates.items()}
        shown = ", ".join(f"{name} {value:,.0f} steps/s" for name, value in median.items())
        ratio = median["onejit"] / median["PureJaxRL"]
        each = f"median of {args.repeats} x {steps} steps"
        print(f"CartPole-v1, {seeds} seed(s), {machine()}, {each}: {shown}; ratio {ratio:.2f}", flush=True)


def buffer(args):
    for seeds in args.seeds:
        shown = []
        for size in args.sizes:
            config = dataclasses.replace(CONFIG, buffer_size=size, learning_starts=100, total_timesteps=10_000_000)
            init, update = dqn.make_learner(config)
            run = jax.jit(partial(jax.lax.scan, jax.vmap(update), length=args.updates), donate_argnums=0)
            state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), seeds))
            taken = []
            for _ in range(args.repeats + 1):  # the first compiles
                begun = time.perf_counter()
                state, _ = jax.block_until_ready(run(state))
                taken.append((time.perf_counter() - begun) / args.updates)
            shown.append(f"{size} steps {1e6 * np.median(taken[1:]):.0f} us")
            del state
        print(f"CartPole-v1, {seeds} seed(s), {machine()}, an update with a replay of {', '.join(shown)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="what", required=True)
    modes.add_parser("speed").add_argument("purejaxrl", help="a clone of the repository")
    modes.choices["speed"].add_argument("--steps", type=int, default=0)
    modes.add_parser("buffer").add_argument("--sizes", type=int, nargs="+", default=[1000, 10**4, 10**5, 10**6])
    modes.choices["buffer"].add_argument("--updates", type=int, default=1000)
    for mode in modes.choices.values():
        mode.add_argument("--seeds", type=int, nargs="+", default=[1, 16])
        mode.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    {"speed": speed, "buffer": buffer}[args.what](args)


if __name__ == "__main__":
    main()
