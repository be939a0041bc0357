"""The picture at the top of docs/sweep.md: what `--halving` and
population-based training do with many agents.

    python tools/pages/sweeps.py

Nothing is trained. An agent counts as better the closer its learning rate is to 0.01.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from small_png import save

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
COLORS = matplotlib.colormaps["viridis"]
NORM = LogNorm(1e-3, 1e-1)
LANES = 9
BEST_RATE = 1e-2


def sort_by_return(rates: np.ndarray) -> np.ndarray:
    """Lanes, best first."""
    return np.argsort(np.abs(np.log(rates / BEST_RATE)), kind="stable")


def draw_lane(axes, lane: int, begin: float, end: float, rate: float) -> None:
    color = COLORS(NORM(rate))
    axes.plot([begin, end], [lane, lane], color=color, linewidth=5, solid_capstyle="butt")


def draw_halving(axes, rates: np.ndarray) -> None:
    """Draw nine trials. At each rung the best third goes on."""
    ends = [0, 1, 2, 3]
    left = np.arange(LANES)
    texts = ["9 trials\ntrain", "the best 3\ngo on", "the best 1\nhas all steps"]
    for rung, text in enumerate(texts):
        order = sort_by_return(rates[left])
        going_on = left[order[: len(left) // 3]]
        for lane in left:
            draw_lane(axes, lane, ends[rung], ends[rung + 1], rates[lane])
            if rung < 2 and lane not in going_on:
                axes.plot(ends[rung + 1] + 0.05, lane, "x", color="0.4", markersize=8)
        axes.text(rung + 0.5, LANES - 0.3, text, ha="center", fontsize="small")
        if rung < 2:
            axes.axvline(ends[rung + 1], color="0.5", linestyle=":")
            left = going_on
    axes.set_xticks([1, 2, 3], ["first rung:\n1/9 of the steps", "second rung:\n1/3", "all\nsteps"])
    axes.set_title("--halving 3: bad trials stop", pad=12)


def draw_exchanges(axes, rates: np.ndarray) -> None:
    """Draw nine agents. At each exchange the worst two copy the best two."""
    rates = rates.copy()
    rng = np.random.default_rng(1)
    for stretch in range(4):
        for lane in range(LANES):
            draw_lane(axes, lane, stretch, stretch + 1, rates[lane])
        if stretch == 3:
            break
        order = sort_by_return(rates)
        axes.axvline(stretch + 1, color="0.5", linestyle=":")
        for child, parent in zip(order[-2:], rng.permutation(order[:2]), strict=True):
            rates[child] = rates[parent] * rng.choice([0.8, 1.25])
            bend = 0.25 if child > parent else -0.25
            style = {
                "arrowstyle": "-|>",
                "connectionstyle": f"arc3,rad={bend}",
                "color": "black",
                "linewidth": 1.5,
                "mutation_scale": 14,
            }
            begin = (stretch + 1, parent)
            axes.annotate("", xytext=begin, xy=(stretch + 1.02, child), arrowprops=style)
    text = "the worst copy the best,\nand change their rate"
    axes.text(2, LANES - 0.3, text, ha="center", fontsize="small", backgroundcolor="white")
    labels = ["first\nexchange", "second", "third", "all\nsteps"]
    axes.set_xticks([1, 2, 3, 4], labels)
    axes.set_title("populations: bad agents copy good ones", pad=12)


def main():
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    rates = np.geomspace(1e-3, 1e-1, LANES)
    rates = rates[np.random.default_rng(0).permutation(LANES)]
    draw_halving(panels[0], rates)
    draw_exchanges(panels[1], rates)
    for axes in panels:
        axes.set(ylim=(-0.7, LANES + 1.0), yticks=[])
        axes.spines[["left", "top", "right"]].set_visible(False)
    panels[0].set_ylabel("agents, each with its learning rate")
    scale = matplotlib.cm.ScalarMappable(NORM, COLORS)
    figure.colorbar(scale, ax=list(panels), label="learning rate", aspect=30, pad=0.02)
    save(figure, FIGURES / "sweep_halving_pbt.png", colors=128)


if __name__ == "__main__":
    main()
