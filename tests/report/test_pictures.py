"""Curves and axes that the package draws."""

import itertools
import types

import numpy as np
import pytest
from matplotlib.figure import Figure

from onejit.base import statistics
from onejit.sweep import pictures


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, none of which is written."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: drawn.append(figure))
    return drawn


def test_the_band_of_a_curve_stays_within_the_returns():
    """Student's interval of these seeds passes 500, the best return of CartPole-v1."""
    returns = np.array([[400.0, 500.0], [500.0, 500.0], [500.0, 500.0], [500.0, np.nan]])
    mean, low, high = statistics.bootstrap_interval(statistics.mean_over_seeds, returns)
    assert mean[0] == 475.0 and 400.0 <= low[0] < 475.0 < high[0] <= 500.0
    assert np.isnan([mean[1], low[1], high[1]]).all()
    assert statistics.student_interval(returns)[2][0] > 500.0
    one = statistics.bootstrap_interval(statistics.mean_over_seeds, returns[:1])
    assert one[0][0] == 400.0 and np.isnan(one[1:]).all()


@pytest.mark.parametrize("values", [[3e-4, 3e-3], [2e-4, 1e-3, 5e-3], [1e-3, 1e-2]])
def test_labels_of_a_logarithmic_axis_do_not_overlap(values):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes, _ = figure.subplots(1, 2)
    where = pictures.place(axes, "x", "lr", values)
    axes.plot(where, where, "o")
    figure.canvas.draw()
    left, right = axes.get_window_extent().intervalx
    boxes = []
    for label in axes.get_xticklabels(which="both"):
        box = label.get_window_extent()
        if label.get_text() and left - 1 <= box.x0 <= right:
            boxes.append((box.x0, box.x1))
    assert len(boxes) >= 2
    assert all(before[1] < after[0] for before, after in itertools.pairwise(sorted(boxes)))


def test_a_heat_map_has_a_cell_for_each_trial(figures):
    ranked = [
        types.SimpleNamespace(values={"lr": lr, "gamma": gamma}, interquartile_mean=mean)
        for lr, gamma, mean in [(0.1, 0.9, 2), (0.1, 0.99, 1), (1.0, 0.9, 3), (1.0, 0.99, -np.inf)]
    ]
    for trials in (ranked, ranked[:3]):  # a grid, and no grid
        pictures.draw_heat_map(trials, "title", "file")
    cells, points = (figure.axes[0] for figure in figures)
    assert [text.get_text() for text in cells.texts] == ["2", "1", "3", "not finite"]
    places = {text.get_text(): text.get_position() for text in cells.texts}
    assert places["2"] == (0.5, 0.5) and places["not finite"] == (1.5, 1.5)
    assert [label.get_text() for label in cells.get_xticklabels()] == ["0.1", "1"]
    assert not points.texts and len(points.collections[0].get_offsets()) == 3
