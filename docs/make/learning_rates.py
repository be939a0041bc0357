"""The picture of docs/sweep.md with 256 curves: return over steps, coloured by the learning rate.

    onejit sweep ppo --lr log-uniform 1e-5 1e-1 --samples 256 --num-seeds 1 \
        --total-timesteps 1e5 --run-dir runs/rates
    python docs/make/learning_rates.py runs/rates
"""

import argparse
import csv
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from small_png import save

ROOT = Path(__file__).resolve().parents[2]
POINTS = 16  # of a curve


def read_rates(run_dir: Path) -> np.ndarray:
    """The learning rate of each trial."""
    with open(run_dir / "results.csv") as file:
        rates = {int(row["trial"]): float(row["lr"]) for row in csv.DictReader(file)}
    return np.array([rates[trial] for trial in sorted(rates)])


def read_curves(run_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps [points] and returns [trials, points] of the first seed of each trial."""
    with np.load(run_dir / "metrics.npz") as metrics:
        episodes = metrics["episodes"][:, 0]
        total = episodes * np.nan_to_num(metrics["episodic_return"][:, 0])
        steps_per_update = int(metrics["steps_per_update"][0])
    ends = np.linspace(0, episodes.shape[1], POINTS + 1).astype(int)[1:]
    begins = [0, *ends[:-1]]
    with np.errstate(invalid="ignore"):  # where no episode has ended
        returns = np.add.reduceat(total, begins, 1) / np.add.reduceat(episodes, begins, 1)
    return ends * steps_per_update, returns


def draw(rates: np.ndarray, steps: np.ndarray, returns: np.ndarray) -> Figure:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    order = np.random.default_rng(0).permutation(len(rates))  # no rate lies on top of all others
    points = np.stack(np.broadcast_arrays(steps, returns[order]), axis=-1)
    lines = LineCollection(points, cmap="turbo", norm=LogNorm(1e-5, 1e-1), linewidth=0.8, alpha=0.7)
    lines.set_array(rates[order])
    axes.add_collection(lines)
    axes.set(xlim=(0, steps[-1]), ylim=(0, 510), xlabel="environment steps", ylabel="return")
    axes.set_title(f"{len(rates)} agents of ppo.py on CartPole-v1", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    scale = matplotlib.cm.ScalarMappable(lines.norm, lines.cmap)
    figure.colorbar(scale, ax=axes, label="learning rate")
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "figures" / "sweep_learning_rates.png"
    )
    options = parser.parse_args()
    figure = draw(read_rates(options.run_dir), *read_curves(options.run_dir))
    save(figure, options.out, colors=255, dpi=130)


if __name__ == "__main__":
    main()
