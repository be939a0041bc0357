"""docs/figures/curves.png: learning curves of six tasks, from benchmarks/results/.

python tools/pages/curves.py
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import returns_page

PANELS = {  # title: {row: label}
    "CartPole-v1": {
        "ppo/cartpole": "ppo",
        "pqn/cartpole": "pqn",
        "dqn/cartpole": "dqn",
        "rainbow/cartpole": "rainbow",
    },
    "MinAtar Breakout": {
        "ppo/breakout": "ppo",
        "pqn/breakout": "pqn",
        "dqn/breakout": "dqn",
        "apex_dqn/breakout": "apex_dqn",
        "rainbow/breakout": "rainbow",
    },
    "CartPole-v1 without velocities": {
        "ppo_rnn/cartpole_masked": "ppo_rnn",
        "ppo_rnn/cartpole_masked+no_memory": "no memory",
    },
    "Pendulum-v1": {
        "sac/pendulum": "sac",
        "td3/pendulum": "td3",
        "crossq/pendulum": "crossq",
        "reppo/pendulum": "reppo",
        "ppo_continuous/pendulum@3e5": "ppo_continuous",
    },
    "brax hopper": {
        "ppo_continuous/hopper": "ppo_continuous",
        "dpo_continuous/hopper": "dpo_continuous",
        "reppo/hopper": "reppo",
        "sac/hopper": "sac",
        "td3/hopper": "td3",
    },
    "MuJoCo HalfCheetah-v4": {
        "sac/mujoco_halfcheetah": "sac",
        "crossq/mujoco_halfcheetah": "crossq",
        "reppo/mujoco_halfcheetah": "reppo",
        "ppo_continuous/mujoco_halfcheetah": "ppo_continuous",
    },
}


def draw_panel(axes, title: str, rows: dict) -> None:
    for name, label in rows.items():
        row = json.loads(returns_page.file_of(name).read_text())
        color = returns_page.SCRIPTS[row["script"]]["color"]
        color = "0.6" if label == "no memory" else color
        curve = row["curve"]
        axes.plot(curve["steps"], curve["return"], color=color, label=label, linewidth=1.5)
        axes.fill_between(
            curve["steps"], curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0
        )
    axes.set_xscale("log")
    axes.set_xlim(left=axes.get_xlim()[0] / 20)  # room for the legend
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, handlelength=1.2, loc="upper left")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "curves.png")
    options = parser.parse_args()
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        draw_panel(axes, title, rows)
    figure.supxlabel("environment steps of an agent", fontsize=10)
    figure.supylabel("training return", fontsize=10)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
