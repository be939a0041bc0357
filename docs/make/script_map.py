"""The map of a script in docs/your_own_objective.md: which lines of ppo.py are what.

    python docs/make/script_map.py

A line of code is a thin bar, as long and as far from the left as its text. Run it again when ppo.py
has changed.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from small_png import save

ROOT = Path(__file__).resolve().parents[2]
PARTS = [  # the text that a part begins with, its name, what it holds, its color
    ("# /// script", "header", "packages, the paper, a command, imports", "tab:brown"),
    ("# --- config as a pytree", "Config", "hyperparameters: each field is a flag", "tab:blue"),
    ("# --- networks", "networks", "actor and critic", "tab:green"),
    ("# --- mathematics", "mathematics", "gae, policy_loss, value_loss", "tab:red"),
    ("# --- training", "learner", "init and update: a rollout, then epochs", "tab:purple"),
    ("def make_train", "train, policy", "all updates; the greedy action", "tab:orange"),
    ("# --- environments of gymnax", "environment", "the same in other scripts", "0.55"),
    ("# --- main", "main", "flags, seeds, results: the same in all scripts", "0.75"),
]
LONGEST = 100  # characters of a line
ROW = 1 / len(PARTS)  # height of a part in the text; the whole script has height 1


def split(lines: list[str]) -> list[tuple[int, int]]:
    """The first line of each part, and the line after its last."""
    starts = []
    for text, *_ in PARTS:
        starts.append(next(i for i, line in enumerate(lines) if line.startswith(text)))
    return list(zip(starts, [*starts[1:], len(lines)], strict=True))


def draw_code(axes, lines: list[str], first: int, end: int, color: str) -> None:
    for number in range(first, end):
        line = lines[number]
        if line.strip():
            left = (len(line) - len(line.lstrip())) / LONGEST
            height = (number + 0.5) / len(lines)
            axes.hlines(height, left, len(line) / LONGEST, color=color, linewidth=0.55)


def draw(lines: list[str], name: str) -> Figure:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (first, end) in enumerate(split(lines)):
        _, part, holds, color = PARTS[i]
        draw_code(axes, lines, first, end, color)
        left = ((1.03, end / len(lines)), (1.03, first / len(lines)))
        right = ((1.35, i * ROW), (1.35, (i + 0.86) * ROW))
        axes.add_patch(Polygon([*left, *right], color=color, alpha=0.25, linewidth=0))
        axes.text(1.42, (i + 0.25) * ROW, part, weight="bold", va="center", fontsize=11)
        axes.text(1.42, (i + 0.65) * ROW, holds, va="center")
        numbers = f"lines {first + 1} to {end}"
        axes.text(3.42, (i + 0.25) * ROW, numbers, va="center", ha="right", color="0.35")
    axes.set(xlim=(-0.02, 3.45), ylim=(1.0, -0.01))
    axes.axis("off")
    axes.set_title(name, loc="left", fontsize=11, family="monospace")
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "script_map.png")
    options = parser.parse_args()
    script = ROOT / "ppo.py"
    save(draw(script.read_text().splitlines(), script.name), options.out)


if __name__ == "__main__":
    main()
