"""Sweeps without pictures, and what they leave in their directories."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from onejit.sweep import pictures


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Most of a small sweep's time goes into its pictures."""
    for name in ("draw_curves", "draw_returns", "draw_heat_map"):
        patch.setattr(pictures, name, lambda *args: args[-1].write(b"picture"))


def metrics_of(run_dir: Path) -> dict:
    return dict(np.load(run_dir / "metrics.npz"))


def record_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def rows_of(run_dir: Path, name: str = "results.csv") -> list[dict]:
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))
