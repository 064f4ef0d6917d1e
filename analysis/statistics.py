"""Estimates with intervals, paired comparisons, correlations over samples; by scipy, seeded. Loads neither torch nor transformers."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9_999
CORRECTION = "Benjamini-Hochberg"
"""How p-values of several comparisons are adjusted: the share of false ones among those called real is at most what is asked for."""


class Estimate(NamedTuple):
    """A value and its interval at 95 %; a bootstrap interval is NaN where there is one sample or none."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """A mean difference of pairs with its interval, and the p-value of Wilcoxon's signed-rank test that differences lie around 0."""

    value: float
    low: float
    high: float
    p: float


def mean(values: ArrayLike, seed: int = 0) -> Estimate:
    """The mean over samples, and its bootstrap interval (BCa).

    Where all values are the same the bootstrap has nothing to draw from: the interval is that value.
    """
    return _bootstrap((_numbers(values),), lambda one, axis=-1: one.mean(axis), seed)


def student(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of a few values and Student's interval, whose width allows for how few they are; NaN ends where there is one.

    For values that are means themselves, such as those of whole contexts: of four, a bootstrap's interval is too narrow.
    """
    numbers = _numbers(values)
    if len(numbers) < 2:
        return Estimate(float(numbers[0]) if len(numbers) else float("nan"), float("nan"), float("nan"))
    centre, error = float(numbers.mean()), float(stats.sem(numbers))
    half = float(stats.t.ppf((1 + confidence) / 2, len(numbers) - 1)) * error
    return Estimate(centre, centre - half, centre + half)


def largest_mean(groups: Sequence[ArrayLike]) -> Estimate:
    """The largest of the means of several groups, and an interval for it; NaN ends where a group has one value.

    Student's intervals of k groups at 1 − 5 % / k hold all together with 95 % (Bonferroni), whatever the groups have to do with each other;
    then the largest mean lies between the largest of their lower and the largest of their upper ends.

    Raises:
        ValueError: there is no group.
    """
    if not groups:
        raise ValueError("there is no group to take the largest mean of")
    found = np.array([student(group, 1 - (1 - CONFIDENCE) / len(groups)) for group in groups])
    return Estimate(*map(float, found.max(axis=0)))  # a NaN end stays one


def mean_score(values: ArrayLike, seed: int = 0) -> Estimate:
    """The mean of scores in [0, 1]: with Wilson's interval where each is right or wrong (1 or 0), else as `mean`.

    Raises:
        ValueError: a score lies outside [0, 1].
    """
    numbers = _numbers(values)
    if ((numbers < 0) | (numbers > 1)).any():
        raise ValueError(f"scores lie in [0, 1], not in [{numbers.min():g}, {numbers.max():g}]")
    if len(numbers) and np.isin(numbers, (0, 1)).all():
        return proportion(int(numbers.sum()), len(numbers))
    return mean(numbers, seed)


def proportion(successes: int, trials: int) -> Estimate:
    """successes / trials, and Wilson's interval, which stays inside [0, 1] and is wide where trials are few.

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials are no proportion")
    found = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, "wilson")
    return Estimate(successes / trials, float(found.low), float(found.high))


def win_rate(candidate: ArrayLike, base: ArrayLike, *, lower: bool = False) -> Estimate:
    """In what share of the pairs that differ the candidate is higher (`lower`: lower) than the base, with Wilson's interval.

    NaN where none differs.
    """
    one, other = _pairs(candidate, base)
    difference = other - one if lower else one - other
    moved = int((difference != 0).sum())
    if not moved:
        return Estimate(float("nan"), float("nan"), float("nan"))
    return proportion(int((difference > 0).sum()), moved)


def ratio_of_means(above: ArrayLike, below: ArrayLike, seed: int = 0) -> Estimate:
    """Σ above / Σ below, samples drawn in pairs; large samples weigh more. NaN where the sum below is 0."""
    pairs = _pairs(above, below)
    return _bootstrap(pairs, lambda one, other, axis=-1: _over(one.sum(axis), other.sum(axis)), seed)


def mean_of_ratios(above: ArrayLike, below: ArrayLike, seed: int = 0) -> Estimate:
    """The mean of above / below over samples, each weighing the same; not the ratio of means.

    Raises:
        ValueError: a value below is 0.
    """
    one, other = _pairs(above, below)
    if (other == 0).any():
        raise ValueError(f"{int((other == 0).sum())} of {len(other)} values to divide by are 0; take the ratio of means")
    return mean(one / other, seed)


def compare(candidate: ArrayLike, base: ArrayLike, seed: int = 0) -> Comparison:
    """The mean of candidate − base over paired samples, its bootstrap interval, and Wilcoxon's p (1 where no pair differs).

    Pairs that do not differ say nothing of the sign and are left out of the test. Where all others differ by as much, as right and wrong
    answers do, it is the sign test, which is exact.
    """
    one, other = _pairs(candidate, base)
    difference = one - other
    found = _bootstrap((difference,), lambda part, axis=-1: part.mean(axis), seed)
    moved = difference[difference != 0]
    if not len(moved):
        p = 1.0
    elif np.ptp(np.abs(moved)) == 0:
        p = float(stats.binomtest(int((moved > 0).sum()), len(moved)).pvalue)
    else:
        p = float(stats.wilcoxon(moved).pvalue)
    return Comparison(*found, p)


def adjusted(p: ArrayLike) -> np.ndarray:
    """p-values of several comparisons adjusted together, by `CORRECTION`; NaN stay as they are and do not count."""
    found = np.asarray(p, float).copy()
    known = ~np.isnan(found)
    if known.any():
        found[known] = stats.false_discovery_control(found[known], method="bh")
    return found


def rank_correlation(
    one: ArrayLike, other: ArrayLike, samples: Sequence[object] | None = None, seed: int = 0, resamples: int = 1_999
) -> Estimate:
    """Spearman's ρ of two columns, and its bootstrap interval.

    Args:
        one: a column.
        other: another, of the same rows.
        samples: which rows belong together (those of one sample under all policies): they are drawn together. None: each row for itself.
        seed: of the draws.
        resamples: how many.

    NaN where a column does not vary.
    """
    left, right = _pairs(one, other)
    codes = np.arange(len(left)) if samples is None else pd.factorize(pd.Series(list(samples)))[0]
    if len(codes) != len(left):
        raise ValueError(f"{len(codes)} samples are named for {len(left)} rows")
    members = [np.flatnonzero(codes == code) for code in range(codes.max() + 1)] if len(codes) else []

    def rho(drawn: np.ndarray) -> float:
        rows = np.concatenate([members[code] for code in drawn])
        first, second = stats.rankdata(left[rows]), stats.rankdata(right[rows])
        if np.ptp(first) == 0 or np.ptp(second) == 0:
            return float("nan")
        return float(np.corrcoef(first, second)[0, 1])

    value = rho(np.arange(len(members))) if members else float("nan")
    if len(members) < 2 or np.isnan(value):
        return Estimate(value, float("nan"), float("nan"))
    draws = np.random.default_rng(seed).integers(len(members), size=(resamples, len(members)))
    found = [rho(drawn) for drawn in draws]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])  # draws in which a column does not vary say nothing
    return Estimate(value, float(low), float(high))


def recall(truth: ArrayLike, guess: ArrayLike, share: float = 0.2) -> float:
    """Of the `share` of entries that truly matter most, the share that the guess has among as many; of equals the earlier count."""
    orders = [np.argsort(-np.asarray(one, float), kind="stable") for one in (truth, guess)]
    count = max(round(share * len(orders[0])), 1)
    return len(np.intersect1d(orders[0][:count], orders[1][:count])) / count


def _over(above: ArrayLike, below: ArrayLike) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) != 0, np.divide(above, below), np.nan)


def _bootstrap(data: tuple[np.ndarray, ...], statistic: object, seed: int) -> Estimate:
    value = float(statistic(*data)) if len(data[0]) else float("nan")  # type: ignore[operator]
    if len(data[0]) < 2 or np.isnan(value):
        return Estimate(value, float("nan"), float("nan"))
    if all(np.ptp(part) == 0 for part in data):
        return Estimate(value, value, value)
    asked = {"paired": True, "vectorized": True, "n_resamples": RESAMPLES, "confidence_level": CONFIDENCE}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(data, statistic, method="BCa", rng=np.random.default_rng(seed), **asked).confidence_interval
        if not (np.isnan(found.low) or np.isnan(found.high)):
            return Estimate(value, float(found.low), float(found.high))
        # too few different draws for the correction
        drawn = stats.bootstrap(data, statistic, method="percentile", rng=np.random.default_rng(seed), **asked)
    tail = (1 - CONFIDENCE) / 2
    # draws in which a sum to divide by is 0 say nothing
    low, high = np.nanquantile(drawn.bootstrap_distribution, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _numbers(values: ArrayLike) -> np.ndarray:
    found = np.asarray(values, float)
    if found.ndim != 1:
        raise ValueError(f"one number for each sample is needed, not an array of shape {found.shape}")
    if np.isnan(found).any():
        raise ValueError(f"{int(np.isnan(found).sum())} of {len(found)} samples have no value; leave them out first")
    return found


def _pairs(one: ArrayLike, other: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first, second = _numbers(one), _numbers(other)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} samples are no pairs")
    return first, second
