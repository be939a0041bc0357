"""Write benchmarks/published_curves.json: learning curves that others have published.

    python benchmarks/published_curves.py SimbaV2/results/baseline

The argument is a folder of a clone of https://github.com/DAVIAN-Robotics/SimbaV2. Its files hold
the greedy returns of ten agents of each algorithm. A point of a curve is the mean over the agents
with its 95 % interval by Student's t.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onejit.base import statistics

FILES = {"CrossQ, critics of 2048 units": "crossq.csv", "SAC": "sac.csv"}
ENVIRONMENTS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4"]
FARTHEST = 300_000  # steps
NEAREST = 10_000  # steps between two points of a curve, at least, and before the first one


def read(file: Path) -> dict:
    """`{environment: {step: returns of the agents}}` of a file."""
    curves = {}
    with file.open() as lines:
        for entry in csv.DictReader(lines):
            if entry["metric"] == "avg_return":
                of_environment = curves.setdefault(entry["env_name"], {})
                step = int(float(entry["env_step"]))
                of_environment.setdefault(step, []).append(float(entry["value"]))
    return curves


def thinned(returns_at: dict) -> dict:
    """A curve in the form of returns.py's rows, `returns_at` is `{step: returns}`."""
    curve = {"steps": [], "return": [], "low": [], "high": []}
    seeds = max(map(len, returns_at.values()))
    last = 0
    for step in sorted(returns_at):
        if not last + NEAREST <= step <= FARTHEST or len(returns_at[step]) < seeds:
            continue
        last = step
        curve["steps"].append(step)
        point = np.round(statistics.student_interval(np.array(returns_at[step])), 1).tolist()
        for key, value in zip(("return", "low", "high"), point, strict=True):
            curve[key].append(value)
    return curve


def main():
    (folder,) = map(Path, sys.argv[1:])
    result = {}
    for algorithm, file in FILES.items():
        curves = read(folder / file)
        for environment in ENVIRONMENTS:
            result.setdefault(environment, {})[algorithm] = thinned(curves[environment])
    lines = []
    for environment, curves in result.items():
        inner = [f"  {json.dumps(name)}: {json.dumps(curve)}" for name, curve in curves.items()]
        lines.append(f" {json.dumps(environment)}: {{\n" + ",\n".join(inner) + "\n }")
    file = ROOT / "benchmarks" / "published_curves.json"
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
