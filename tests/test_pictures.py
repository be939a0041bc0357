"""Curves and axes that the package draws."""

import itertools
import types

import numpy as np
import pytest
from matplotlib.figure import Figure

from onejit import learning_curve, statistics
from onejit.sweep import pictures


def band_of(returns) -> list:
    return statistics.bootstrap_interval(statistics.mean_over_seeds, returns)


def test_the_band_of_a_curve_stays_within_the_returns():
    """Student's interval of these seeds passes 500, the best return of CartPole-v1."""
    returns = np.array([[400.0, 500.0], [500.0, 500.0], [500.0, 500.0], [500.0, np.nan]])
    mean, low, high = band_of(returns)
    assert mean[0] == 475.0 and 400.0 <= low[0] < 475.0 < high[0] <= 500.0
    assert np.isnan([mean[1], low[1], high[1]]).all()
    assert statistics.student_interval(returns)[2][0] > 500.0
    one = band_of(returns[:1])
    assert one[0][0] == 400.0 and np.isnan(one[1:]).all()


def test_bootstrap_of_the_mean_against_a_plain_one():
    values = np.random.default_rng(1).normal(size=20)
    _, low, high = band_of(values)
    rng = np.random.default_rng(2)
    means = [rng.choice(values, 20).mean() for _ in range(5000)]
    np.testing.assert_allclose([low, high], np.percentile(means, [2.5, 97.5]), atol=0.03)


def test_points_of_few_episodes_are_marked(monkeypatch):
    """Two seeds, four updates, four environments: less than four episodes in the first two."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: figures.append(figure))
    config = types.SimpleNamespace(num_envs=4, num_steps=10)
    episodes = np.array([[1, 3, 4, 8], [0, 4, 5, 8]])
    metrics = {"episodes": episodes, "episodic_return": np.where(episodes, 1.0, np.nan)}
    few = learning_curve.has_few_episodes(config, metrics)
    assert few.tolist() == [True, True, False, False]
    for episodes_more in (0, 10):
        shown = metrics | {"episodes": episodes + episodes_more}
        learning_curve.draw_learning_curve(config, shown, "title", "file")
    labels = [
        [text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in figures
    ]
    assert labels[0][:2] == labels[1] == ["mean over seeds", "95 % bootstrap interval"]
    assert "less than one episode per environment" in labels[0][2]


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
