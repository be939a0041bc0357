"""Return over seconds of ppo.py, PureJaxRL and CleanRL: the picture in docs/performance.md.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/vwxyzjn/cleanrl
    python -m venv torch && torch/bin/pip install torch gymnasium==0.29.1 tensorboard tyro
    taskset -c 0 python benchmarks/wall_clock.py --purejaxrl purejaxrl --cleanrl cleanrl \\
        --cleanrl-python torch/bin/python
    python benchmarks/wall_clock.py --render    # only draw what was measured

Agents train one after the other on one core, with the peers' hyperparameters: CartPole-v1 for 3e5
steps, and MinAtar's Breakout for 5e5 steps without CleanRL, which has no file for it. The seconds
include the compilation, which is not read from a cache, but no imports. The picture has the least
time of a contestant's agents, because other programs on the machine only add to it, and updates are
taken to be equally long. CleanRL reports its speed itself. The results are in
benchmarks/results/seconds.json, and what is there is not measured again.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers
from origin import origin

from onejit.base import files, statistics
from onejit.run.learning_curve import learning_curve

RESULTS = ROOT / "benchmarks" / "results" / "seconds.json"
PICTURE = ROOT / "docs" / "figures" / "wall_clock.png"
POINTS = 50  # of a curve


class Task(NamedTuple):
    make: Callable  # of benchmarks/peers.py
    steps: int
    contestants: tuple[str, ...]
    top: float  # highest return that is drawn
    legend: str  # its place


TASKS = {
    "CartPole-v1": Task(peers.ppo, 300_000, ("ppo.py", "PureJaxRL", "CleanRL"), 520, "lower right"),
    "MinAtar Breakout": Task(peers.ppo_minatar, 500_000, ("ppo.py", "PureJaxRL"), 26, "upper left"),
}
COLORS = {"ppo.py": "tab:blue", "PureJaxRL": "tab:orange", "CleanRL": "tab:green"}


# --- measuring ---


def script_metrics(train):
    def run(key):
        metrics = train(key)["metrics"]
        return {name: metrics[name] for name in ("episodes", "episodic_return")}

    return run


def peer_metrics(train):
    """The same two metrics of PureJaxRL."""

    def run(key):
        info = train(key)["metrics"]  # [updates, steps, environments]
        ended = info["returned_episode"]
        returns = jnp.where(ended, info["returned_episode_returns"], 0.0)
        episodes = ended.sum((1, 2))
        return {"episodes": episodes, "episodic_return": returns.sum((1, 2)) / episodes}

    return run


def train_jax(train, num_seeds: int) -> tuple[float, list[float], list[dict]]:
    """The seconds of the compilation, the seconds of each training, and its metrics."""
    begun = time.perf_counter()
    compiled = jax.jit(train).lower(jax.random.PRNGKey(0)).compile()
    compilation = time.perf_counter() - begun
    seconds = []
    metrics = []
    for seed in range(num_seeds):
        begun = time.perf_counter()
        metrics.append(jax.block_until_ready(compiled(jax.random.PRNGKey(seed))))
        seconds.append(time.perf_counter() - begun)
    return compilation, seconds, metrics


def train_cleanrl(options, config, num_seeds: int) -> tuple[float, list[float], list[dict]]:
    """The same of CleanRL's ppo.py, which compiles nothing."""
    steps = config.total_timesteps
    seconds = []
    metrics = []
    for seed in range(num_seeds):
        printed = peers.run_cleanrl(options, "ppo.py", steps, "--seed", str(seed))
        seconds.append(peers.cleanrl_seconds(printed, steps))
        episodes = re.findall(r"global_step=(\d+), episodic_return=\[?([\d.]+)", printed)
        if not episodes:
            raise ValueError("CleanRL printed no returns: it needs gymnasium 0.29.1")
        ended, returns = np.array(episodes, float).T
        update = ((ended - 1) // config.rollout_size).astype(int)
        count = np.bincount(update, minlength=config.num_updates)
        total = np.bincount(update, returns, minlength=config.num_updates)
        with np.errstate(invalid="ignore"):
            mean = total / count
        metrics.append({"episodes": count, "episodic_return": mean})
    return 0.0, seconds, metrics


def measure(task: str, name: str, options) -> dict:
    """The times and the curves of a contestant."""
    ours, theirs = TASKS[task].make(options, TASKS[task].steps)
    if name == "ppo.py":
        trained = train_jax(script_metrics(ours), options.seeds)
    elif name == "PureJaxRL":
        trained = train_jax(peer_metrics(theirs), options.seeds)
    else:
        trained = train_cleanrl(options, ours.config, options.seeds)
    compilation, seconds, metrics = trained
    metrics = jax.tree.map(lambda *x: np.stack(x)[:, : ours.config.num_updates], *metrics)
    _, returns = learning_curve(ours.config, metrics, POINTS)
    print(f"{task}, {name}: compiled in {compilation:.1f} s, trained in {seconds}", flush=True)
    return {
        "steps": TASKS[task].steps,
        "origin": origin(),
        "compilation": round(compilation, 2),
        "seconds": [round(of_seed, 2) for of_seed in seconds],
        "returns": [[round(float(x), 1) for x in of_seed] for of_seed in returns],
    }


# --- the picture ---


def draw_contestant(axes, name: str, result: dict) -> None:
    """The interquartile mean over the agents and its interval. The compilation is dotted."""
    returns = np.array(result["returns"])
    middle, low, high = statistics.bootstrap_interval(statistics.interquartile_mean, returns)
    done = (np.arange(returns.shape[1]) + 1) / returns.shape[1]
    seconds = result["compilation"] + done * min(result["seconds"])
    axes.plot(seconds, middle, color=COLORS[name], label=name)
    axes.fill_between(seconds, low, high, color=COLORS[name], alpha=0.2, linewidth=0)
    axes.plot([0, seconds[0]], [middle[0]] * 2, ":", color=COLORS[name])


def draw(results: dict, file) -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for axes, (name, task) in zip(figure.subplots(1, len(TASKS)), TASKS.items(), strict=True):
        for contestant in task.contestants:
            draw_contestant(axes, contestant, results[name][contestant])
        axes.set(title=f"{name}, {task.steps:,} steps", xlabel="seconds", xlim=(0, None))
        axes.set_ylim(0, task.top)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
        axes.legend(frameon=False, loc=task.legend)
    figure.axes[0].set_ylabel("return")
    figure.savefig(file, format="png", dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_flags(parser)
    parser.add_argument("--seeds", type=int, default=8, help="agents of each contestant")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the results")
    parser.add_argument("--render", action="store_true", help="only draw the picture")
    options = parser.parse_args()
    peers.check_flags(parser, options)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, task in TASKS.items():
        for contestant in task.contestants:
            of_task = results.setdefault(name, {})
            if contestant in of_task or options.render:
                continue
            if not options.purejaxrl or not options.cleanrl or not options.cleanrl_python:
                parser.error("needs --purejaxrl, --cleanrl and --cleanrl-python")
            of_task[contestant] = measure(name, contestant, options)
            files.write(options.out, json.dumps(results) + "\n")
    draw(results, PICTURE if options.out == RESULTS else options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
