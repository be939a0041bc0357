"""Statistics over seeds: final returns, intervals, and comparisons of methods."""

import numpy as np
import scipy.special
import scipy.stats
from flax.traverse_util import flatten_dict

RESAMPLES = 2000

# --- one run ---


def final_return(metrics) -> np.ndarray:
    """Mean return of the episodes that ended in the last tenth of the updates, NaN where none did: [num_seeds]."""
    first = metrics["episodes"].shape[1] * 9 // 10
    episodes, returns = metrics["episodes"][:, first:], metrics["episodic_return"][:, first:]
    with np.errstate(invalid="ignore"):
        return np.where(episodes > 0, episodes * returns, 0.0).sum(axis=1) / episodes.sum(axis=1)


def interquartile_mean(values, axis=0):
    """The mean of the middle half (arXiv 2108.13264, section 4.3). A value that is not finite counts as the worst."""
    return middle_mean(np.where(np.isfinite(values), values, -np.inf), axis)


def middle_mean(values, axis):
    """scipy.stats.trim_mean(values, 0.25, axis), 20 times as fast, because the bootstrap calls it often."""
    cut = values.shape[axis] // 4
    return (
        np.sort(values, axis=axis)
        .take(range(cut, values.shape[axis] - cut), axis=axis)
        .mean(axis=axis)
    )


def mean_interval(values) -> list:
    """The mean over seeds and its 95 % interval by Student's t: [seeds, ...] -> mean, low, high, each [...].

    One seed has no interval: low and high are NaN.
    """
    values, degrees = np.asarray(values, float), len(values) - 1
    with np.errstate(divide="ignore", invalid="ignore"):  # for one seed
        margin = scipy.special.stdtrit(degrees, 0.975) * values.std(axis=0) / np.sqrt(degrees)
    mean = values.mean(axis=0)
    return [mean, mean - margin, mean + margin]


def interval(values, statistic=interquartile_mean, level=95) -> list:
    """A statistic over seeds and its bootstrap interval of `level` %: [seeds, ...] -> value, low, high, each [...].

    Seeds are drawn jointly for all later axes. A seed that diverged counts as -inf and is never left out: with many of
    them, value or low may be -inf. One seed has no interval: low and high are NaN.
    """
    values, rng = np.where(np.isfinite(values), values, -np.inf), np.random.default_rng(0)
    if len(values) == 1:
        value = statistic(values)
        return [value, value * np.nan, value * np.nan]
    indices = rng.integers(
        len(values), size=(RESAMPLES, len(values))
    )  # arrays may be large: one by one
    drawn = (
        [statistic(values[each]) for each in indices]
        if values.ndim > 1
        else statistic(values[indices], axis=1)
    )
    return [
        statistic(values),
        *np.percentile(drawn, [50 - level / 2, 50 + level / 2], axis=0, method="nearest"),
    ]  # "nearest", because -inf cannot be interpolated


def diverged(agent) -> np.ndarray:
    """Which seeds have parameters that are not finite: leaves [num_seeds, ...] -> [num_seeds].

    The returns of these seeds are meaningless, because the greedy action of NaN values is always the first action.
    """
    leaves = [np.asarray(leaf) for leaf in flatten_dict(agent).values()]
    return ~np.all(
        [np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in leaves], axis=0
    )


def rank_agents(metrics, diverged=False) -> tuple[np.ndarray, str]:
    """Agents from worst to best, and the criterion. First come agents without an episode, or `diverged` [agents]."""
    if "evaluation" in metrics:
        returns, by = metrics["evaluation"].mean(axis=1), "the mean of their greedy episodes"
    else:
        returns, by = final_return(metrics), "the return at the end of training"
    return np.argsort(
        np.where(np.isfinite(returns) & ~np.array(diverged), returns, -np.inf), kind="stable"
    ), by


def show(value, low, high) -> str:
    """`500 (429.8 to 504)`, or the value alone without an interval. No exponents: `10306`, not `1.031e+04`."""
    value, *interval = (
        f"{each:.0f}" if abs(each) >= 1e4 else f"{each:.4g}" for each in (value, low, high)
    )
    return value + ("" if np.isnan(low) else f" ({' to '.join(interval)})")


def summarize(name: str, returns, lost=None) -> dict:
    """Print statistics over seeds, and return them for run.json. `returns`, and `lost` if diverged: [num_seeds].

    Seeds that diverged or have no return count as -inf in the interquartile mean. The mean and the worst agent leave
    them out, and the number of the remaining seeds is printed.
    """
    seeds = len(returns)
    lost = np.zeros(seeds, bool) if lost is None else lost
    good, silent = np.isfinite(returns) & ~lost, ~np.isfinite(returns) & ~lost
    mean = mean_interval(returns[good]) if good.any() else [np.nan] * 3
    middle = interval(np.where(good, returns, -np.inf))
    worst = returns[good].min() if good.any() else np.nan
    numbers = [*zip(("mean", "mean_low", "mean_high"), mean, strict=True), ("worst", worst)]
    numbers += zip(("interquartile_mean", "low", "high"), middle, strict=True)
    found = {
        key: float(value) if np.isfinite(value) else None for key, value in numbers
    }  # JSON has no -inf
    found |= {"seeds": seeds, "not_finite": int((~good).sum()), "diverged": int(lost.sum())}
    count = f"{seeds} seeds" if good.all() else f"{good.sum()} of {seeds} seeds"
    print(
        f"{name}: mean {show(*mean)}, worst agent {worst:.4g}, {count}; interquartile mean {show(*middle)}"
    )
    if not good.all():
        said = f"{lost.sum()} seeds diverged, {silent.sum()} ended no episode in the last tenth of training"
        print(f"{name}: {said}; they count as -inf in the interquartile mean")
    return {name: found | {"no_episode": int(silent.sum())}}


# --- several methods: samples are arrays [..., seeds], one for each environment, each with its own number of seeds ---


def pooled_interquartile_mean(*samples):
    """The mean of the middle half of all scores (arXiv 2108.13264, section 4.3)."""
    return middle_mean(np.concatenate(samples, axis=-1), -1)


def finite_mean(sample):
    """The mean over finite scores, -inf if none is finite. The tables give their number."""
    finite = np.isfinite(sample)
    total, count = np.where(finite, sample, 0.0).sum(axis=-1), finite.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), -np.inf)


def median(*samples):
    """The median over environments of the mean over seeds. For one environment, the median over seeds."""
    if len(samples) == 1:
        return np.median(samples[0], axis=-1)
    return np.median([finite_mean(sample) for sample in samples], axis=0)


def optimality_gap(*samples):
    """The gap from the mean to 1, where scores above 1 count as 1 (arXiv 2108.13264, section 4.3)."""
    return 1.0 - finite_mean(np.minimum(np.concatenate(samples, axis=-1), 1.0))


def probability_of_improvement(*samples):
    """P(X > Y), equal scores counted half, averaged over environments (arXiv 2108.13264, section 4.3).

    The first half of `samples` is X in each environment, the second half is Y. The Mann-Whitney U of an environment is
    the number of pairs that X wins, and is computed from ranks.
    """
    won = []
    for x, y in zip(samples[: len(samples) // 2], samples[len(samples) // 2 :], strict=True):
        n, m = x.shape[-1], y.shape[-1]
        ranks = scipy.stats.rankdata(np.concatenate([x, y], axis=-1), axis=-1)[..., :n]
        won.append((ranks.sum(axis=-1) - n * (n + 1) / 2) / (n * m))
    return np.mean(won, axis=0)


def estimate_mean(samples) -> dict:
    """The mean over environments of the mean over seeds, and its interval by Student's t. Only finite scores count.

    For several environments the degrees of freedom are Welch's. With one seed in an environment the interval is NaN.
    """
    samples = [each[np.isfinite(each)] for each in map(np.asarray, samples)]
    if not all(map(len, samples)):
        return {"value": -np.inf, "low": np.nan, "high": np.nan}
    value = float(np.mean([each.mean() for each in samples]))
    if min(map(len, samples)) == 1:
        return {"value": value, "low": np.nan, "high": np.nan}
    errors = np.array([each.var(ddof=1) / len(each) for each in samples])  # squared standard errors
    weights = np.array([1 / (len(each) - 1) for each in samples])
    degrees = errors.sum() ** 2 / (weights @ errors**2) if errors.any() else 1.0
    margin = float(scipy.special.stdtrit(degrees, 0.975) * np.sqrt(errors.sum()) / len(samples))
    return {"value": value, "low": value - margin, "high": value + margin}


def difference(a: float, b: float) -> float:
    """The difference of paired scores: two scores that are not finite are equally bad."""
    return 0.0 if a == b else a - b


def estimate(statistic, samples) -> dict:
    """A statistic of `samples` [seeds] and its stratified bootstrap interval, NaN if a sample has one seed."""
    rng, found, low, high = np.random.default_rng(0), [], np.nan, np.nan
    with np.errstate(invalid="ignore"):  # a paired difference may be inf - inf
        for _ in range(RESAMPLES // 100 if min(map(len, samples)) > 1 else 0):
            found.append(
                statistic(
                    *(each[rng.integers(len(each), size=(100, len(each)))] for each in samples)
                )
            )
        if found:  # "nearest", because -inf cannot be interpolated
            low, high = np.percentile(np.concatenate(found), [2.5, 97.5], method="nearest")
        return {"value": float(statistic(*samples)), "low": float(low), "high": float(high)}
