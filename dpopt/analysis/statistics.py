"""Statistics of a comparison: paired differences, Holm's correction, ranks over workloads, performance profiles.

A higher score is better, rank 1 is the best.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy.stats
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
"""Of every interval; tests are at the level 1 - CONFIDENCE."""
RESAMPLES = 9_999
"""Bootstrap samples and permutations; sign flips are all tried where there are no more than that (13 pairs)."""
BCA_FROM = 10
"""Pairs from which intervals are bias-corrected and accelerated: with fewer, the skewness is not worth estimating."""
ENOUGH = 6
"""Workloads from which ranks are tested: a method that wins on all of 5 still has p = 2 / 2^5 > 0.05 by signs."""


class Difference(NamedTuple):
    """Of two methods, over pairs.

    Attributes:
        mean: of the differences.
        low, high: ends of the interval around it; NaN for a single pair.
        p: two-sided, of a difference whose sign is a coin's; NaN for a single pair.
    """

    mean: float
    low: float
    high: float
    p: float


def difference(values: Array) -> Difference:
    """The mean of paired differences with a bootstrap interval, and the p-value of the sign-flip permutation test.

    The interval is the bootstrap's at the confidence 1 - 2 Φ(-sqrt(n / (n-1)) t), t being Student's quantile for n - 1
    degrees of freedom: plain percentiles are as narrow as if the variance were known, and divided by n in place of
    n - 1 (Hesterberg, "What teachers should know about the bootstrap", The American Statistician 2015). No bootstrap
    interval leaves the range of the differences, so that of n pairs covers their median with probability 1 - 2^(1-n)
    at most (75 % for 3, 94 % for 5), and no p-value is below 2^(1-n).

    Args:
        values: shape [pairs], at least one.
    """
    pairs, mean = len(values), float(values.mean())
    if pairs == 1:
        return Difference(mean, math.nan, math.nan, math.nan)
    if np.ptp(values) == 0:  # resampling has nothing to vary
        low = high = mean
    else:
        method = "BCa" if pairs >= BCA_FROM else "percentile"
        level = 1 - 2 * _expanded_tail(pairs)
        found = scipy.stats.bootstrap(
            (values,),
            np.mean,
            confidence_level=level,
            n_resamples=RESAMPLES,
            method=method,
            rng=np.random.default_rng(0),
        )
        low, high = map(float, found.confidence_interval)
    return Difference(mean, low, high, _sign_flip(values))


def _expanded_tail(pairs: int) -> float:
    """What a bootstrap interval has to leave out at each side for its width to be that of Student's."""
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)
    return float(scipy.stats.norm.cdf(-math.sqrt(pairs / (pairs - 1)) * quantile))


def _sign_flip(values: Array) -> float:
    test = scipy.stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=np.random.default_rng(0)
    )
    return float(test.pvalue)


def holm(p: Array) -> Array:
    """p-values of one family, adjusted by Holm's step-down method; NaN stays and is not counted.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    adjusted = np.full(len(p), math.nan)
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN sorts last
    stepped = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1)
    return adjusted


class Friedman(NamedTuple):
    """Friedman's test: do the methods' ranks differ by more than chance?"""

    statistic: float
    p: float


def friedman(ranks: Array) -> Friedman:
    """Friedman's statistic, corrected for ties, and its p-value by permuting methods within blocks.

    No approximation for many blocks is made, and rows may also be means of several rankings of the same methods.

    Args:
        ranks: shape [blocks, methods]; every row has the mean (methods + 1) / 2.

    Source: Conover, "Practical Nonparametric Statistics" 1999, section 5.8.
    """
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    spread = (centred**2).sum()
    if spread == 0:
        return Friedman(0.0, 1.0)

    def statistic(of: Array) -> Array:
        return (ranks.shape[1] - 1) * (of.sum(axis=-2) ** 2).sum(axis=-1) / spread

    generator, observed = np.random.default_rng(0), float(statistic(centred))
    extreme = sum(statistic(generator.permuted(centred, axis=1)) >= observed * (1 - 1e-9) for _ in range(RESAMPLES))
    return Friedman(observed, float(1 + extreme) / (1 + RESAMPLES))


def critical_difference(methods: int, blocks: int) -> float:
    """How far apart two average ranks must be to differ, all pairs considered (Nemenyi's test).

    Source: Demšar, "Statistical comparisons of classifiers over multiple data sets", JMLR 2006, section 3.2.2.
    """
    quantile = scipy.stats.studentized_range.ppf(CONFIDENCE, methods, np.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(methods * (methods + 1) / (6 * blocks)))


def cliques(averages: Array, critical: float) -> list[tuple[int, int]]:
    """First and last of each largest group of methods whose average ranks are closer than `critical`.

    Args:
        averages: shape [methods], ascending.
        critical: see `critical_difference`.
    """
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(averages):
        last = int(np.searchsorted(averages, rank + critical)) - 1
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def profile(gaps: Array) -> tuple[Array, Array]:
    """A performance profile: the share of blocks in which a method is within each distance of the best.

    Dolan and Moré ("Benchmarking optimization software with performance profiles", Mathematical Programming 2002)
    compare running times by their ratio. Scores have no common zero, so here it is the difference, in the score's unit.

    Args:
        gaps: shape [blocks], from the best down to the method; infinite where it has no result.

    Returns:
        Ascending distances, the first 0, and the share from each on: shape [jumps] both.
    """
    distances = np.unique(np.append(gaps[np.isfinite(gaps)], 0.0))
    return distances, (gaps <= distances[:, None]).mean(axis=1)
