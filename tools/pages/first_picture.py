"""docs/figures/first.png: time over agents, and the learning curves of 16 seeds.

    python tools/pages/first_picture.py
    python tools/pages/first_picture.py --run RUN_DIR  # of `python ppo.py --num-seeds 16`

The times are those of benchmarks/many_agents.py, the curves are in benchmarks/results/seeds.json,
which --run writes.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import many_agents

from onejit.base import statistics

CURVES = ROOT / "benchmarks" / "results" / "seeds.json"
POINTS = 100


def read_run(run_dir: Path) -> dict:
    """The return of each seed in each hundredth of the training."""
    metrics = dict(np.load(run_dir / "metrics.npz"))
    num_updates = metrics["episodes"].shape[1]
    parts = np.array_split(np.arange(num_updates), POINTS)
    names = ("episodes", "episodic_return")
    curves = [
        statistics.mean_return({name: metrics[name][:, part] for name in names}) for part in parts
    ]
    steps = [many_agents.STEPS * (int(part[-1]) + 1) // num_updates for part in parts]
    return {"steps": steps, "returns": np.round(np.transpose(curves), 1).tolist()}


def draw_seeds(axes, curves: dict) -> None:
    """Each seed as a thin line, their mean, and its 95 % bootstrap interval."""
    returns = np.array(curves["returns"])
    mean, low, high = statistics.bootstrap_interval(statistics.mean_over_seeds, returns)
    axes.plot(curves["steps"], returns.T, color="gray", linewidth=0.5, alpha=0.5)
    axes.fill_between(curves["steps"], low, high, color="C0", alpha=0.3)
    axes.plot(curves["steps"], mean, color="C0", linewidth=2)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="environment steps of an agent", ylabel="training return")
    title = f"PPO on CartPole-v1, {len(returns)} seeds: mean and 95 % interval"
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "first.png")
    parser.add_argument("--run", type=Path, help="read the curves of this run first")
    options = parser.parse_args()
    if options.run:
        CURVES.write_text(json.dumps(read_run(options.run)) + "\n")
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    many_agents.draw_times(left, json.loads(many_agents.RESULTS.read_text()))
    draw_seeds(right, json.loads(CURVES.read_text()))
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
