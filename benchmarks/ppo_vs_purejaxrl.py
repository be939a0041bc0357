"""Speed of ppo.py beside PureJaxRL's ppo.py at the same hyperparameters, in one process.

    git clone https://github.com/luchris429/purejaxrl
    python benchmarks/ppo_vs_purejaxrl.py purejaxrl
    python benchmarks/ppo_vs_purejaxrl.py purejaxrl --env Breakout-MinAtar --seeds 1 8

For each number of seeds both are compiled and trained in turn, several times; compilation is not counted. PureJaxRL
runs from its own file; gymnax's wrapper for the five-value `step` stands between it and gymnax 1.0. On MinAtar it
flattens the observation, and so does ppo.py here.
"""

import argparse
import os
import sys
import time
import types
from pathlib import Path

os.environ.setdefault("NPROC", "16")  # PureJaxRL's initialization could hang: see docs/hangs.md

import gymnax
import jax
import numpy as np
from gymnax.wrappers import LegacyStepAPIWrapper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo

SAME = dict(anneal_lr=True, gamma=0.99, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5)
SETTINGS = {  # of PureJaxRL
    "CartPole-v1": dict(lr=2.5e-4, num_envs=4, num_steps=128, update_epochs=4, num_minibatches=4, activation="tanh"),
    "Breakout-MinAtar": dict(
        lr=5e-3, num_envs=64, num_steps=128, update_epochs=4, num_minibatches=8, activation="relu"
    ),
}


def make_onejit(env_name, steps):
    settings = SAME | SETTINGS[env_name]
    train = ppo.make_train(ppo.Config(env_name=env_name, total_timesteps=steps, conv_features=0, **settings))
    return lambda key: train(key)["metrics"]["episodic_return"]


def make_purejaxrl(path, env_name, steps):
    sys.path.insert(0, str(Path(path, "purejaxrl")))
    sys.modules.setdefault("navix", types.ModuleType("navix"))  # imported by its wrappers, not used here
    own = sys.modules.pop("ppo", None)
    import ppo as purejaxrl_ppo

    sys.modules["purejaxrl_ppo"] = sys.modules.pop("ppo")
    sys.modules["ppo"] = own

    def make(name):
        env, params = gymnax.make(name)
        return LegacyStepAPIWrapper(env), params

    purejaxrl_ppo.gymnax = types.SimpleNamespace(make=make)
    settings = {name.upper(): value for name, value in (SAME | SETTINGS[env_name]).items()}
    train = purejaxrl_ppo.make_train(settings | dict(ENV_NAME=env_name, TOTAL_TIMESTEPS=steps, DEBUG=False))
    return lambda key: train(key)["metrics"]["returned_episode_returns"].mean((1, 2))


def measure(args, seeds, steps):
    runs = {"onejit": make_onejit(args.env, steps), "PureJaxRL": make_purejaxrl(args.purejaxrl, args.env, steps)}
    compiled, taken = {}, {name: [] for name in runs}
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)
    keys = keys if seeds > 1 else keys[0]
    for name, run in runs.items():
        begun = time.perf_counter()
        compiled[name] = jax.jit(jax.vmap(run) if seeds > 1 else run).lower(keys).compile()
        print(f"{name}, {seeds} seeds: compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    for repeat in range(args.repeats):
        for name in list(compiled)[:: 1 if repeat % 2 else -1]:
            begun = time.perf_counter()
            jax.block_until_ready(compiled[name](keys))
            taken[name].append(time.perf_counter() - begun)
    median = {name: seeds * steps / np.median(seconds) for name, seconds in taken.items()}
    rates = ", ".join(f"{name} {value:,.0f} steps/s" for name, value in median.items())
    device = f"{os.cpu_count()} cores of {jax.devices()[0].platform}"
    print(f"{args.env}, {device}, {seeds} seeds, median of {args.repeats} x {steps} steps: {rates}; ", end="")
    print(f"ratio {median['onejit'] / median['PureJaxRL']:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purejaxrl", help="a clone of the repository")
    parser.add_argument("--env", default="CartPole-v1", choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=0, help="per seed; about ten seconds where not given")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for seeds in args.seeds:
        update = SETTINGS[args.env]["num_envs"] * SETTINGS[args.env]["num_steps"]
        rate = 100_000 if args.env == "CartPole-v1" else 40_000
        steps = args.steps or max(2, 10 * rate // seeds // update) * update
        measure(args, seeds, steps)


if __name__ == "__main__":
    main()
