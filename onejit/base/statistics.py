"""Statistics over seeds: final returns, intervals, and comparisons of methods."""

from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.special

from onejit.base.text import plural

RESAMPLES = 2000
FEWEST_SEEDS = 5  # for a bootstrap interval of a mean: of fewer it is far too narrow

# --- one run ---


def mean_return(metrics, running=(0.0, 0)) -> np.ndarray:
    """Mean return of the episodes that ended, NaN where none did.

    metrics: {name: [num_seeds, updates]}; the result is [num_seeds]. `running` are the total return
    so far and the number, both [num_seeds], of running episodes that count as well.
    """
    episodes = metrics["episodes"]
    total_running, num_running = running
    with np.errstate(invalid="ignore"):
        totals = np.where(episodes > 0, episodes * metrics["episodic_return"], 0.0)
        total = totals.sum(axis=1) + total_running
        return total / (episodes.sum(axis=1) + num_running)


def last_return(metrics) -> np.ndarray:
    """The return of the last update in which an episode ended, NaN if none has: [num_seeds]."""
    has_ended = metrics["episodes"] > 0
    last = has_ended.shape[1] - 1 - has_ended[:, ::-1].argmax(axis=1)
    returns = np.take_along_axis(metrics["episodic_return"], last[:, None], axis=1)[:, 0]
    return np.where(has_ended.any(axis=1), returns, np.nan)


def at_the_end(metrics, num_updates: int | None = None) -> dict:
    """Episodes and returns of the last tenth of the updates.

    If the training was stopped early, `num_updates` is the number of updates it was meant to have:
    a tenth of them then counts.
    """
    num_updates = num_updates or metrics["episodes"].shape[1]
    width = num_updates - num_updates * 9 // 10
    return {name: metrics[name][:, -width:] for name in ("episodes", "episodic_return")}


def final_return(metrics, num_updates: int | None = None, running=(0.0, 0)) -> np.ndarray:
    """Mean return of the episodes of the last tenth of the updates: [num_seeds].

    These are the episodes that ended there and the `running` ones of `mean_return`. A seed without
    either has its last return. It is NaN for a seed that has no episode at all. See `at_the_end`
    for `num_updates`.
    """
    metrics_at_end = at_the_end(metrics, num_updates)
    _, num_running = running
    has_any = metrics_at_end["episodes"].sum(axis=1) + num_running > 0
    return np.where(has_any, mean_return(metrics_at_end, running), last_return(metrics))


def few_episodes(metrics, config, num_updates: int | None = None) -> np.ndarray:
    """Which seeds ended less than one episode per environment at the end of training.

    Their short episodes count more than their long ones. `config` is a script's or a dict.
    """
    settings = config if isinstance(config, dict) else vars(config)
    episodes = at_the_end(metrics, num_updates)["episodes"].sum(axis=1)
    return episodes < settings.get("num_envs", 1)


def warning_of_few(few, units: str = "seeds") -> list[str]:
    """A line about those that ended `few` episodes, or none if there are none."""
    if not few.any():
        return []
    which = f"{few.sum()} of {len(few)} {units}"
    return [
        f"warning: {which} ended less than one episode per environment in the last tenth of "
        "training; short episodes count more than long ones"
    ]


def broken_metrics(metrics) -> dict[str, np.ndarray]:
    """Where a metric is NaN although episodes ended: {name: [num_seeds, updates]}, if anywhere.

    Means over episodes are NaN where none ended, and no other value of a healthy training is.
    """
    broken = {}
    for name, values in metrics.items():
        is_broken = np.isnan(values) & (metrics["episodes"] > 0)
        if is_broken.any():
            broken[name] = is_broken
    return broken


def interquartile_mean(*samples):
    """The mean of the middle half of all returns, where one that is not finite is the worst."""
    return middle_mean(*[np.where(np.isfinite(sample), sample, -np.inf) for sample in samples])


def middle_mean(*samples):
    """The mean of the middle half of all scores (arXiv 2108.13264, section 4.3).

    It is scipy.stats.trim_mean(scores, 0.25), 20 times as fast: the bootstrap calls it often.
    """
    scores = np.sort(np.concatenate(samples), axis=0)
    cut = len(scores) // 4
    return scores[cut : len(scores) - cut].mean(axis=0)


def mean_over_seeds(sample):
    return sample.mean(axis=0)


def mean_over_environments(*samples):
    return np.mean([sample.mean(axis=0) for sample in samples], axis=0)


def student_interval(*samples) -> list:
    """The mean over environments of the mean over seeds, and its 95 % interval by Student's t.

    samples: [seeds, ...], one for each environment. Mean, low and high are all [...]. The degrees
    of freedom for several environments are Welch's. If an environment has one seed, low and high
    are NaN.
    """
    samples = [np.asarray(sample, float) for sample in samples]
    with np.errstate(divide="ignore", invalid="ignore"):  # one seed, or an infinite value
        mean = mean_over_environments(*samples)
        degrees = np.array([len(sample) - 1 for sample in samples])
        # squared standard errors, [..., environments]
        variances = np.stack([sample.var(axis=0) for sample in samples], axis=-1)
        errors = variances / degrees
        error = errors.sum(axis=-1)
        all_degrees = error**2 / (errors**2 / degrees).sum(axis=-1)
        all_degrees = np.where(error > 0, all_degrees, 1.0)  # any, if all seeds are equal
        margin = scipy.special.stdtrit(all_degrees, 0.975) * np.sqrt(error) / len(samples)
        return [mean, mean - margin, mean + margin]


def mean_interval(*samples, lowest=-np.inf, highest=np.inf) -> tuple[list, str]:
    """The mean of `student_interval`, its interval inside of `lowest` to `highest`, and the kind.

    The bounds are the returns that are possible, or those that were seen. If Student's interval
    leaves them, returns are bounded and skewed: the kind is "bootstrap", a percentile bootstrap, or
    "cut" at the bounds with few seeds. Else it is "student".
    """
    mean, low, high = student_interval(*samples)
    if not (low < lowest or high > highest):  # NaN, too: one seed has no interval
        return [mean, low, high], "student"
    if min(len(sample) for sample in samples) < FEWEST_SEEDS:
        return [mean, max(low, lowest), min(high, highest)], "cut"
    return bootstrap_interval(mean_over_environments, *samples), "bootstrap"


def observed_range(metrics, *others) -> tuple[float, float]:
    """The lowest and the highest return of a training, and of `others`, arrays of returns."""
    values = np.concatenate([np.ravel(values) for values in (metrics["episodic_return"], *others)])
    values = values[np.isfinite(values)]
    return (values.min(), values.max()) if len(values) else (-np.inf, np.inf)


def bootstrap_interval(statistic, *samples) -> list:
    """A statistic and its 95 % interval by the stratified percentile bootstrap.

    samples: [seeds, ...], one for each environment. The statistic reduces their first axis: value,
    low and high are all [...]. Seeds are drawn within a sample, and jointly for its later axes. A
    value of -inf is never left out: with many of them, the result may be -inf. If a sample has one
    seed, low and high are NaN.
    """
    samples = [np.asarray(sample, float) for sample in samples]
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):  # a mean of -inf and inf
        value = statistic(*samples)
        if min(len(sample) for sample in samples) == 1:
            return [value, value * np.nan, value * np.nan]
        drawn = []
        for size in block_sizes(max(sample.size for sample in samples)):
            resampled = []
            for sample in samples:
                seeds = rng.integers(len(sample), size=(size, len(sample)))
                resampled.append(sample[seeds.T])  # [seeds, size, ...]
            drawn.append(statistic(*resampled))
        # "nearest", because -inf cannot be interpolated
        low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5], axis=0, method="nearest")
        return [value, low, high]


def block_sizes(largest: int) -> list[int]:
    """How many resamples are drawn at once: at most 100, and fewer of a large sample."""
    size = max(1, min(100, 10**7 // max(1, largest)))
    return [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]


def finite(sample) -> np.ndarray:
    """The values [seeds] that are finite, or one -inf if none is."""
    kept = sample[np.isfinite(sample)]
    return kept if len(kept) else np.array([-np.inf])


def count_finite(sample) -> str:
    """`10`, or `9 of 10 finite`."""
    number = int(np.isfinite(sample).sum())
    return str(number) if number == len(sample) else f"{number} of {len(sample)} finite"


def named_leaves(agent) -> dict:
    """The leaves of an agent by dotted names."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(agent):
        leaves[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return leaves


def diverged(agent, left_out=()) -> np.ndarray:
    """Which seeds have parameters that are not finite: leaves [num_seeds, ...] -> [num_seeds].

    `left_out` are the dotted names of leaves that were not finite from the start, such as a mask.

    The returns of these seeds are meaningless, because the greedy action of NaN values is always
    the first action.
    """
    leaves = named_leaves(agent)
    is_lost: Any = False
    for name in sorted(leaves.keys() - set(left_out)) or leaves:  # all, if none is left
        leaf = leaves[name]
        numpy = leaf.__array_namespace__()  # or jax.numpy
        is_lost |= ~numpy.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
    return is_lost


def rank_agents(returns, diverged: np.ndarray | bool = False) -> np.ndarray:
    """Agents from worst to best by returns [agents]; first those that have none or diverged."""
    good = np.isfinite(returns) & ~np.array(diverged)
    return np.argsort(np.where(good, returns, -np.inf), kind="stable")


def show_number(value) -> str:
    """Four digits, but never an exponent: `10306`, not `1.031e+04`."""
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def show(value, low, high, kind: str = "student") -> str:
    """`484 (429.8 to 500, bootstrap)`, or the value alone without an interval."""
    if np.isnan(low):
        return show_number(value)
    note = "" if kind == "student" else f", {kind}"
    return f"{show_number(value)} ({show_number(low)} to {show_number(high)}{note})"


class Summary(NamedTuple):
    """Statistics of a return over seeds. Intervals are [value, low, high]."""

    mean: list  # over the seeds that count
    kind: str  # of the mean's interval, as `mean_interval` has them
    worst: float  # of these seeds
    interquartile_mean: list  # in which all other seeds are -inf
    seeds: int
    diverged: int
    no_episode: int  # and not diverged

    @property
    def not_finite(self) -> int:
        return self.diverged + self.no_episode

    def lines(self, name: str) -> list[str]:
        """The summary of a return of this name in words."""
        count = plural(self.seeds, "seed")
        if self.not_finite:
            count = f"{self.seeds - self.not_finite} of {count}"
        mean = show(*self.mean, kind=self.kind)
        numbers = f"mean {mean}, worst agent {show_number(self.worst)}, {count}"
        lines = [f"{name}: {numbers}; interquartile mean {show(*self.interquartile_mean)}"]
        if self.not_finite:
            diverged = plural(self.diverged, "seed")
            reasons = f"{diverged} diverged, {self.no_episode} ended no episode"
            lines.append(f"{name}: {reasons}; they count as -inf in the interquartile mean")
        return lines

    def to_store(self) -> dict:
        """The summary for run.json. JSON has no -inf."""
        names = ("mean", "mean_low", "mean_high", "worst", "interquartile_mean", "low", "high")
        values = [*self.mean, self.worst, *self.interquartile_mean]
        stored = {}
        for name, value in zip(names, values, strict=True):
            stored[name] = float(value) if np.isfinite(value) else None
        stored["mean_interval"] = self.kind
        for name in ("seeds", "not_finite", "diverged", "no_episode"):
            stored[name] = getattr(self, name)
        return stored


def summarize(returns, lost, observed=(-np.inf, np.inf)) -> Summary:
    """Statistics over seeds of `returns`, and `lost` if diverged: [num_seeds].

    `observed` are the lowest and the highest return that were seen, for the mean's interval.

    Seeds that diverged or have no return count as -inf in the interquartile mean. The mean and the
    worst agent leave them out.
    """
    silent = ~np.isfinite(returns) & ~lost
    good = ~lost & ~silent
    mean = [np.nan, np.nan, np.nan]
    kind = "student"
    worst = np.nan
    if good.any():
        lowest, highest = observed
        mean, kind = mean_interval(returns[good], lowest=lowest, highest=highest)
        worst = returns[good].min()
    return Summary(
        mean=mean,
        kind=kind,
        worst=worst,
        interquartile_mean=bootstrap_interval(interquartile_mean, np.where(good, returns, -np.inf)),
        seeds=len(returns),
        diverged=int(lost.sum()),
        no_episode=int(silent.sum()),
    )


# --- several methods: `samples` are arrays [seeds, ...], one for each environment ---


def finite_mean(sample):
    """The mean over finite scores, -inf if none is finite. The tables give their number."""
    is_finite = np.isfinite(sample)
    total = np.where(is_finite, sample, 0.0).sum(axis=0)
    count = is_finite.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), -np.inf)


def median(*samples):
    """The median over environments of the mean over seeds.

    For one environment, the median over seeds.
    """
    if len(samples) == 1:
        return np.median(samples[0], axis=0)
    return np.median([finite_mean(sample) for sample in samples], axis=0)


def optimality_gap(*samples):
    """The gap from the mean to 1, where higher scores count as 1, averaged over environments.

    arXiv 2108.13264, section 4.3.
    """
    return np.mean([1.0 - finite_mean(np.minimum(sample, 1.0)) for sample in samples], axis=0)


def probability_of_improvement(*samples):
    """P(X > Y), equal scores counted half, averaged over environments.

    arXiv 2108.13264, section 4.3. The first half of `samples` is X in each environment, the second
    half is Y. The Mann-Whitney U of an environment is the number of pairs that X wins, and is
    computed from ranks.
    """
    from scipy.stats import rankdata  # takes a second to import, and only `compare` needs it

    half = len(samples) // 2
    won = []
    for x, y in zip(samples[:half], samples[half:], strict=True):
        n = len(x)
        m = len(y)
        ranks = rankdata(np.concatenate([x, y]), axis=0)[:n]
        won.append((ranks.sum(axis=0) - n * (n + 1) / 2) / (n * m))
    return np.mean(won, axis=0)
