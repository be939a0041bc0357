"""Compare evolved drifts with PPO's and DPO's: new agents, also on other environments.

    python evolve_objective.py --num-seeds 2 --run-dir runs/evolution
    python benchmarks/drift_vs_ppo.py runs/evolution
    python benchmarks/drift_vs_ppo.py runs/evolution --environments Catch-bsuite --agents 64 \\
        --timesteps 65536
    python benchmarks/drift_vs_ppo.py runs/evolution --clips 0.4 0.8 inf

For each environment PPO, DPO and the drift of each evolution in RUN_DIR train AGENTS agents, with
the hyperparameters of the run. `--clips` adds PPO with other clip ranges. The table, in Markdown,
gives the interquartile means of the returns and of the differences from PPO over pairs of agents,
with 95 % bootstrap intervals. Two files are written into the run's directory:
fitness.png, the population's mean and best in each generation, and comparison.csv, a line for each
agent.
"""

import argparse
import csv
import dataclasses
import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # one program, which uses all cores by itself

import jax
import numpy as np
import scipy.stats
from flax.traverse_util import unflatten_dict
from matplotlib.figure import Figure
from safetensors.flax import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import evolve_objective as evolve
from onejit.run.directory import read_config


def measure(config, weights, num_agents: int, clips=()) -> dict:
    """Returns of agents with the same keys, {"PPO", "DPO", "evolved 0", ...: [num_agents]}.

    Weights are [n, ...]. `clips` are further clip ranges of PPO: "PPO, clip 0.4".
    """
    train, play = evolve.make_inner(config)
    train_keys, play_keys = jax.random.split(jax.random.key(2**31), (2, num_agents))

    @functools.partial(jax.jit, static_argnums=0)
    def returns(drift, parameters):
        def one(train_key, play_key):
            return play(train(functools.partial(drift, parameters), train_key), play_key)[0]

        return jax.vmap(one)(train_keys, play_keys)

    def ppo(clip_eps, *args):
        return evolve.ppo_drift(*args, clip_eps)

    def dpo(no_parameters, *args):
        return evolve.dpo_drift(*args)

    def network(weights, *args):
        return evolve.network_drift(weights, *args, config.clip_eps)

    results = {"PPO": returns(ppo, config.clip_eps), "DPO": returns(dpo, None)}
    for clip_eps in clips:
        results[f"PPO, clip {clip_eps:g}"] = returns(ppo, clip_eps)
    for i in range(len(weights["output"])):
        of_one = jax.tree.map(lambda leaf, i=i: leaf[i], weights)
        results[f"evolved {i}"] = returns(network, of_one)
    return {name: np.asarray(values) for name, values in results.items()}


def spread(values) -> str:
    """Interquartile mean and 95 % bootstrap interval."""
    middle = functools.partial(scipy.stats.trim_mean, proportiontocut=0.25)
    resampled = scipy.stats.bootstrap(
        (values,), middle, n_resamples=2000, method="percentile", rng=0
    )
    return "{:.4g} ({:.4g} to {:.4g})".format(middle(values), *resampled.confidence_interval)


def show(results) -> None:
    print("| environment | objective | return | less PPO, paired |\n|---|---|---|---|")
    for name, objectives in results.items():
        for objective, returns in objectives.items():
            difference = "" if objective == "PPO" else spread(returns - objectives["PPO"])
            print(f"| {name} | {objective} | {spread(returns)} | {difference} |")


def draw_fitness(metrics, file: Path) -> None:
    """Mean and best of each generation, one line per evolution: arrays [num_seeds, generations]."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, color in (
        ("episodic_return", "mean", "tab:blue"),
        ("fitness_best", "best", "tab:orange"),
    ):
        lines = axes.plot(metrics[name].T, color=color, linewidth=0.6, alpha=0.5)
        lines[0].set_label(f"{label} of the population, one line per evolution")
        axes.plot(metrics[name].mean(axis=0), color=color, linewidth=2)
    axes.set(xlabel="generation", ylabel="fitness: return of the agents that a network trained")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="of evolve_objective.py")
    others = ["CartPole-v1", "Acrobot-v1"]
    parser.add_argument(
        "--environments", nargs="*", help=f"by default the environment of the run and {others}"
    )
    parser.add_argument(
        "--clips", type=float, nargs="*", default=[], help="more clip ranges of PPO; inf: none"
    )
    parser.add_argument("--agents", type=int, default=16, help="per objective and environment")
    parser.add_argument(
        "--timesteps", type=int, help="environment steps of an agent; by default as in the run"
    )
    options = parser.parse_args()

    config = read_config(evolve, options.run_dir / "config.yaml")
    config = dataclasses.replace(
        config, total_timesteps=options.timesteps or config.total_timesteps
    )
    weights = unflatten_dict(load_file(options.run_dir / "agent.safetensors"), sep=".")["drift"]
    print(
        f"{os.cpu_count()} cores of {jax.devices()[0].platform}, jax {jax.__version__}", flush=True
    )
    results = {}
    for name in options.environments or dict.fromkeys([config.env_name, *others]):
        changes = {} if name == config.env_name else {"env_name": name, "env_params": {}}
        config_here = dataclasses.replace(config, **changes)
        results[name] = measure(config_here, weights, options.agents, clips=options.clips)
    show(results)
    with (options.run_dir / "comparison.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["environment", "objective", "seed", "return"])
        for name, objectives in results.items():
            for objective, returns in objectives.items():
                rows.writerows([name, objective, seed, value] for seed, value in enumerate(returns))
    draw_fitness(np.load(options.run_dir / "metrics.npz"), options.run_dir / "fitness.png")


if __name__ == "__main__":
    main()
