"""Return over seconds of ppo.py, PureJaxRL and CleanRL: the picture in docs/performance.md.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/vwxyzjn/cleanrl
    python -m venv torch && torch/bin/pip install torch gymnasium==0.29.1 tensorboard tyro
    taskset -c 0 python benchmarks/wall_clock.py --purejaxrl purejaxrl --cleanrl cleanrl \\
        --cleanrl-python torch/bin/python
    python benchmarks/wall_clock.py --render    # only draw what was measured

Agents train one after the other on one core, with the peers' hyperparameters: CartPole-v1 for 1e5
steps, and MinAtar's Breakout for 5e5 steps without CleanRL, which has no file for it. The seconds
include the compilation, which is not read from a cache, but no imports. Updates of a training are
taken to be equally long. CleanRL reports its speed itself. The results are in
benchmarks/results/wall_clock.json, and a task that is there is not measured again.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

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

from onejit import files, statistics
from onejit.learning_curve import learning_curve

RESULTS = ROOT / "benchmarks" / "results" / "wall_clock.json"
PICTURE = ROOT / "docs" / "figures" / "wall_clock.png"
TASKS = {  # environment: row of peers.py, steps, highest return that is drawn
    "CartPole-v1": (peers.ppo, 100_000, 520),
    "MinAtar Breakout": (peers.ppo_minatar, 500_000, None),
}
POINTS = 50
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


def measure(task: str, options) -> dict:
    make_row, steps, _ = TASKS[task]
    ours, theirs = make_row(options, steps)
    trained = {
        "ppo.py": train_jax(script_metrics(ours), options.seeds),
        "PureJaxRL": train_jax(peer_metrics(theirs), options.seeds),
    }
    if task == "CartPole-v1":
        trained["CleanRL"] = train_cleanrl(options, ours.config, options.seeds)
    results = {}
    for name, (compilation, seconds, metrics) in trained.items():
        metrics = jax.tree.map(lambda *x: np.stack(x)[:, : ours.config.num_updates], *metrics)
        _, returns = learning_curve(ours.config, metrics, POINTS)
        results[name] = {
            "compilation": round(compilation, 2),
            "seconds": [round(of_seed, 2) for of_seed in seconds],
            "returns": [[round(float(x), 1) for x in of_seed] for of_seed in returns],
        }
        print(f"{task}, {name}: compiled in {compilation:.1f} s, trained in {seconds}", flush=True)
    return {"steps": steps, "origin": origin(), "contestants": results}


# --- the picture ---


def draw_contestant(axes, name: str, result: dict) -> None:
    """The interquartile mean over the agents and its interval, after the compilation."""
    returns = np.array(result["returns"])
    interval = statistics.bootstrap_interval(statistics.interquartile_mean, returns)
    middle, low, high = interval
    done = (np.arange(returns.shape[1]) + 1) / returns.shape[1]
    seconds = result["compilation"] + done * np.mean(result["seconds"])
    axes.plot(seconds, middle, color=COLORS[name], label=name)
    axes.fill_between(seconds, low, high, color=COLORS[name], alpha=0.2, linewidth=0)


def draw(results: dict, file) -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for axes, (task, result) in zip(figure.subplots(1, len(TASKS)), results.items(), strict=True):
        for name, contestant in result["contestants"].items():
            draw_contestant(axes, name, contestant)
        axes.set(title=f"{task}, {result['steps']:,} steps", xlabel="seconds", xlim=(0, None))
        axes.set_ylim(0, TASKS[task][2])
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
        axes.legend(frameon=False, loc="lower right")
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
    for task in TASKS:
        if task not in results and not options.render:
            if not options.purejaxrl or not options.cleanrl or not options.cleanrl_python:
                parser.error("needs --purejaxrl, --cleanrl and --cleanrl-python")
            results[task] = measure(task, options)
            files.write(options.out, json.dumps(results) + "\n")
    draw(results, PICTURE if options.out == RESULTS else options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
