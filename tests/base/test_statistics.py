"""What `onejit.base.statistics` computes over seeds, by hand and by SciPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from onejit.base import statistics


def middle_interval(values) -> list:
    return statistics.bootstrap_interval(statistics.interquartile_mean, values)


def test_interval_by_hand():
    values = np.array([4.0, 1.0, 3.0, 100.0])
    mean, low, high = middle_interval(values)
    assert mean == 3.5 and 1.0 <= low < mean < high <= 100.0  # the middle half of 1, 3, 4, 100
    # one seed has none
    np.testing.assert_array_equal(middle_interval(np.array([7.0])), [7.0, np.nan, np.nan])
    both = np.stack([values, 2 * values], axis=1)
    np.testing.assert_array_equal(middle_interval(both), np.outer([mean, low, high], [1, 2]))


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 5, 8, 31])
def test_interquartile_mean_is_that_of_scipy(seeds):
    values = np.random.default_rng(seeds).normal(size=(seeds, 7))
    np.testing.assert_allclose(
        statistics.interquartile_mean(values), scipy.stats.trim_mean(values, 0.25, axis=0)
    )
    pooled = statistics.middle_mean(values, 2 * values)
    both = np.concatenate([values, 2 * values])
    np.testing.assert_allclose(pooled, scipy.stats.trim_mean(both, 0.25, axis=0))


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(32, 400))  # whose interquartile mean is 0
    _, low, high = middle_interval(samples)
    assert 0.88 < ((low < 0) & (high > 0)).mean() < 0.98


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_seeds_that_diverged_are_not_left_out(bad):
    """They count as the worst there is: one of eight lies outside the middle half, half of all do
    not.
    """
    mean, low, high = middle_interval(np.array([bad, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))
    assert mean == (2.0 + 3 + 4 + 5) / 4 and low <= mean <= high
    lost = np.array([False, True, False, False])
    summary = statistics.summarize(np.array([bad, 9.0, 1.0, 2.0]), lost)
    record = summary.to_store()
    assert (
        record["interquartile_mean"] is None and record["low"] is None and record["not_finite"] == 2
    )
    assert (record["diverged"], record["no_episode"], record["seeds"]) == (1, 1, 4)
    assert (record["mean"], record["worst"]) == (1.5, 1.0)
    said = "\n".join(summary.lines("final return"))
    assert "worst agent 1, 2 of 4 seeds" in said and "interquartile mean -inf" in said
    assert "1 seed diverged, 1 ended no episode;" in said


def test_diverged_by_hand():
    agent = {
        "params": {"a": np.ones((3, 2)), "b": np.array([1, 2, 3])},
        "mean": np.array([0.0, np.inf, 0.0]),
    }
    agent["params"]["a"][2, 1] = np.nan
    np.testing.assert_array_equal(statistics.diverged(agent), [False, True, True])
    np.testing.assert_array_equal(statistics.diverged(agent, ["mean"]), [False, False, True])


@pytest.mark.parametrize("seeds", [2, 4, 8, 16])
def test_intervals_of_the_mean_hold_it_as_often_as_they_say(seeds):
    """Of 20,000 experiments whose true mean is 3.

    With 1.96 in place of Student's t it is 69 % for two seeds.
    """
    samples = np.random.default_rng(0).normal(3.0, 2.0, size=(seeds, 20_000))
    mean, low, high = statistics.student_interval(samples)
    np.testing.assert_allclose(mean, samples.mean(axis=0))
    assert 0.93 <= ((low <= 3) & (high >= 3)).mean() <= 0.97


def test_one_seed_has_no_interval():
    interval, _ = statistics.mean_interval(np.array([7.0]), lowest=0.0, highest=8.0)
    np.testing.assert_array_equal(interval, [7.0, np.nan, np.nan])
    summary = statistics.summarize(np.array([7.0]), lost=np.array([False]))
    stored = summary.to_store()
    assert stored["mean"] == stored["interquartile_mean"] == stored["worst"] == 7.0
    assert [stored[name] for name in ("low", "high", "mean_low", "mean_high")] == [None] * 4
    assert " to " not in " ".join(summary.lines("final return"))


def test_an_interval_of_a_mean_stays_inside_of_the_range_of_returns():
    """CartPole's best return is 500. A bootstrap of two seeds would be far too narrow."""
    values = np.array([*[500.0] * 7, 189.0])
    interval, kind = statistics.mean_interval(values, lowest=9.0, highest=500.0)
    assert kind == "bootstrap" and interval[0] == values.mean() and interval[2] == 500.0
    assert statistics.show(*interval, kind).endswith("to 500, bootstrap)")
    interval, kind = statistics.mean_interval(values, lowest=9.0, highest=1000.0)
    assert kind == "student" and interval == statistics.student_interval(values)
    few = np.array([0.77, 0.91])
    (_, low, high), kind = statistics.mean_interval(few, lowest=-1.0, highest=1.0)
    assert kind == "cut" and low == statistics.student_interval(few)[1] and high == 1.0
    metrics = {"episodic_return": np.array([[np.nan, 9.0, 480.0]])}
    observed = statistics.observed_range(metrics, np.array([500.0, -np.inf]))
    assert statistics.summarize(values, np.zeros(8, bool), observed).kind == "bootstrap"


def test_final_return_by_hand():
    """The last return is carried forward. Long running episodes count, if they are known."""
    metrics = {
        "episodes": np.ones((3, 20), int),
        "episodic_return": np.tile(np.arange(20.0), (3, 1)),
    }
    metrics["episodes"][0, 18] = 3
    metrics["episodes"][1, 15:] = 0
    metrics["episodic_return"][1, 15:] = np.nan
    metrics["episodes"][2] = 0
    of_first = (3 * 18 + 19) / 4
    np.testing.assert_array_equal(statistics.final_return(metrics), [of_first, 14, np.nan])
    running = np.array([0.0, 600.0, 0.0]), np.array([0, 2, 0])
    returns = statistics.final_return(metrics, running=running)
    np.testing.assert_array_equal(returns, [of_first, 300, np.nan])


def test_seeds_with_few_episodes_are_said():
    metrics = {"episodes": np.ones((2, 20), int), "episodic_return": np.ones((2, 20))}
    metrics["episodes"][1, 19] = 0
    few = statistics.few_episodes(metrics, SimpleNamespace(num_envs=2))
    (line,) = statistics.warning_of_few(few)
    assert few.tolist() == [False, True] and "1 of 2 seeds ended less than one episode" in line
    assert not statistics.warning_of_few(statistics.few_episodes(metrics, {"num_envs": 1}))


def test_metrics_are_broken_where_episodes_ended():
    episodes = np.array([[0, 1, 1]])
    metrics = {
        "episodes": episodes,
        "loss": np.array([[np.nan, np.nan, 1.0]]),
        "episodic_return": np.array([[np.nan, 1.0, 2.0]]),
    }
    broken = statistics.broken_metrics(metrics)
    assert list(broken) == ["loss"] and broken["loss"].tolist() == [[False, True, False]]


@pytest.mark.parametrize("largest, most", [(1, 100), (10**6, 10), (10**9, 1)])
def test_resamples_are_drawn_in_blocks(largest, most):
    sizes = statistics.block_sizes(largest)
    assert sum(sizes) == statistics.RESAMPLES and max(sizes) == most
