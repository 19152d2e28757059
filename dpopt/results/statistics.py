"""Statistics of a comparison: intervals, which rows may be the best, ranks over workloads.

A higher score is better, rank 1 is the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # `stats` is imported when it is first used, by ranks: it takes a second
from numpy.typing import NDArray

_Array = NDArray[np.float64]
_Ends = tuple[float, float]
_ANY = -math.inf, math.inf

CONFIDENCE = 0.95
"""The confidence of every interval; tests are at the level 1 - CONFIDENCE."""
_RESAMPLES, SAMPLES = 9_999, 4_000  # permutations of a test, samples of a bootstrap
LEAST_P = 1 / (1 + _RESAMPLES)
"""The smallest p that permutations can show."""
EQUAL, DIGITS = 1e-9, 12
"""Differences that vary by no more are equal but for rounding, and so are means that agree to so many digits."""
FEWEST = 3
"""Seeds from which there are intervals and tests: the spread of two has one degree of freedom and shows nothing."""
ENOUGH = 6
"""Workloads from which ranks are tested: a method that wins on all of 5 still has p = 2 / 2^5 > 0.05 by signs."""


def expected_score(scores: _Array, tested: float = math.nan, ends: _Ends = _ANY) -> tuple[float, float]:
    """The two ends of the interval of mu, the score to be expected of a new seed on a new test record.

    All S seeds share the n test records: the score of seed s on record i is mu + a_s + b_i + e_si, and the mean over
    both has the variance A/S + B/n + E/(nS). Student's interval over seeds allows for the first and the last term. B/n
    does not shrink with seeds; where scores are 0 or 1 it is at most mu (1 - mu)/n, which Wilson's interval allows for.
    The two are independent to first order, so their distances from the mean add as squares.

    Sources: Wilson, JASA 1927; Zou and Donner, "Construction of confidence limits about effect measures", Statistics in
    Medicine 2008, for the sum.

    Args:
        scores: on the test split, shape [seeds].
        tested: number n of test records, where the score is a mean of zeros and ones; NaN leaves the test split out.
        ends: the least and the largest score that there can be, where the interval ends too.

    Returns:
        Without `tested`, Student's interval; of fewer than `FEWEST` seeds, NaN.
    """
    mean = float(scores.mean())
    if not math.isfinite(mean) or len(scores) < FEWEST:
        return math.nan, math.nan
    low, high = _student(scores)
    if not math.isnan(tested):
        least, largest = _wilson(mean, tested)
        low, high = mean - math.hypot(low - mean, least - mean), mean + math.hypot(high - mean, largest - mean)
        ends = (0.0, 1.0)
    return max(ends[0], low), min(ends[1], high)


def _tail(t: Any, degrees: Any) -> Any:
    """P(T > t) of Student's T with so many degrees of freedom."""
    return scipy.special.stdtr(degrees, -t)


def _beyond(p: Any, degrees: Any) -> Any:
    """The t with P(T > t) = p."""
    return -scipy.special.stdtrit(degrees, p)


def _student(values: _Array, comparisons: int = 1, largest: float = math.inf) -> tuple[float, float]:
    quantile = _beyond((1 - CONFIDENCE) / 2 / comparisons, len(values) - 1)
    half = quantile * values.std(ddof=1) / math.sqrt(len(values))
    return max(-largest, float(values.mean() - half)), min(largest, float(values.mean() + half))


def _wilson(share: float, count: float) -> tuple[float, float]:
    square = scipy.special.ndtri((1 + CONFIDENCE) / 2) ** 2 / count
    half = math.sqrt(square * (share * (1 - share) + square / 4))
    return (share + square / 2 - half) / (1 + square), (share + square / 2 + half) / (1 + square)


class _Difference(NamedTuple):
    """The mean difference over pairs, with Student's interval and two-sided test.

    `p` is NaN for fewer than `FEWEST` pairs; so are the ends of the interval, also where all differences are equal.
    """

    mean: float
    low: float
    high: float
    p: float


def difference(values: _Array, comparisons: int = 1, largest: float = math.inf) -> _Difference:
    """Of paired differences, shape [pairs], none beyond `largest`; corrected for some `comparisons` (Bonferroni)."""
    pairs, mean = len(values), float(values.mean())
    if pairs < FEWEST:
        return _Difference(mean, math.nan, math.nan, math.nan)
    if np.ptp(values) <= EQUAL:  # equal differences tell nothing of their variance: the sign test needs none
        p = 2.0 ** (1 - pairs) if abs(mean) > EQUAL else 1.0
        return _Difference(mean, math.nan, math.nan, min(1.0, comparisons * p))
    variance = np.square(values - mean).mean() * (pairs / (pairs - 1))
    p = 2 * float(_tail(abs(mean) / math.sqrt(variance / pairs), pairs - 1))
    return _Difference(mean, *_student(values, comparisons, largest), min(1.0, comparisons * p))


def crossed(values: _Array, comparisons: int = 1, largest: float = math.inf) -> _Difference:
    """Of differences on each test record, shape [seeds, records], to be expected of new seeds and new records.

    All seeds share the records: the difference of seed s on record i is mu + a_s + b_i + e_si, and its mean has the
    variance A/S + B/n + E/(nS), estimated by (E + (MS_seeds - E)+ + (MS_records - E)+)/(nS) with E = MS_rest: no
    variance is below 0. Degrees of freedom by Satterthwaite. Corrected for a number of `comparisons` (Bonferroni); the
    interval ends at `largest`, as no difference is beyond it.

    Source: Scheffé, "The analysis of variance" 1959, sections 7.4 (two random effects) and 7.5.
    """
    (seeds, records), mean = values.shape, float(values.mean())
    of_seed, of_record = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    if seeds == 1 or records == 1:
        return _Difference(mean, math.nan, math.nan, math.nan)
    free = np.array([seeds - 1, records - 1, (seeds - 1) * (records - 1)])
    sums = [((part - mean) ** 2).sum() for part in (of_seed, of_record)]
    rest = ((values - of_seed - of_record + mean) ** 2).sum()
    squares = np.array([records * sums[0], seeds * sums[1], rest]) / free
    total = squares[2] + np.maximum(squares[:2] - squares[2], 0).sum()
    if total <= EQUAL**2:  # equal on all records and seeds but for the mean
        return _Difference(mean, mean, mean, 1.0 if abs(mean) <= EQUAL else 0.0)
    degrees, half = total**2 / (squares**2 / free).sum(), math.sqrt(total / values.size)
    p = 2 * float(_tail(abs(mean) / half, degrees))
    width = half * float(_beyond((1 - CONFIDENCE) / 2 / comparisons, degrees))
    return _Difference(mean, max(-largest, mean - width), min(largest, mean + width), min(1.0, comparisons * p))


class _Standing(NamedTuple):
    """The methods of a block that may be its best."""

    p: _Array  # that no other method is better, shape [methods]; NaN without another that shares `FEWEST` seeds
    visible: float  # the difference below which two methods are not told apart: the median over pairs; NaN without any

    @property
    def may_be_best(self) -> NDArray[np.bool_]:
        """The methods among which the best is with the confidence `CONFIDENCE`."""
        return self.p > 1 - CONFIDENCE


def standing(scores: _Array) -> _Standing:
    """Compare every method with every other, over the seeds that both have, on this test split.

    A method is left out of the best where some other one is better by a one-sided paired t test at 5 %, divided by the
    number of the others (Bonferroni). So the truly best method is left out with probability 5 % at most: the set that
    is left is a confidence set of the best (Gupta 1965; Hsu, "Simultaneous confidence intervals for all distances from
    the best", Annals of Statistics 1981). All pairs are compared, so that choosing the highest mean by the same seeds
    needs no correction.

    Args:
        scores: shape [seeds, methods]; NaN where a method has no such seed.
    """
    # Sign flips have no p below 2^-n, which no correction leaves at 5 % before there are 9 seeds for 19 methods.
    # No pooled variance: in published blocks variances differ by a factor of 100, and the best would be left out.
    pairs = scores[:, None, :] - scores[:, :, None]  # [seeds, method, rival]
    count = np.isfinite(pairs).sum(axis=0)
    np.fill_diagonal(count, 0)
    with np.errstate(all="ignore"):
        mean = np.nansum(pairs, axis=0) / count
        spread = np.sqrt(np.nansum((pairs - mean) ** 2, axis=0) / (count - 1))
        p = _tail(mean / (spread / np.sqrt(count)), count - 1)
    # Equal differences tell nothing of their variance: theirs is the sign test.
    p = np.where(spread > EQUAL, p, np.where(mean > EQUAL, 2.0**-count, 1.0))
    p = np.where(count >= FEWEST, p, np.inf)
    rivals = np.isfinite(p).sum(axis=1)
    least = np.minimum(rivals * p.min(axis=1, initial=1.0), 1.0)
    compared, visible = np.triu(count >= FEWEST), math.nan
    if compared.any():
        row, column = compared.nonzero()
        # Either of two may be left out because of the other: sooner the one with fewer rivals.
        comparisons = np.minimum(rivals[row], rivals[column])
        quantile = _beyond((1 - CONFIDENCE) / comparisons, count[compared] - 1)
        visible = float(np.median(quantile * spread[compared] / np.sqrt(count[compared])))
    return _Standing(np.where(rivals > 0, least, math.nan), visible)


def rank_samples(workloads: Sequence[Sequence[_Array]]) -> _Array:
    """Bootstrap samples of average ranks: workloads are drawn with replacement, and in each of them seeds.

    A method's ranks are averaged over the blocks of a workload, whose seeds are drawn together, and then over
    workloads. With few workloads or seeds the samples vary too little: they are divided by n in place of n - 1.

    Args:
        workloads: of each its blocks, of each the scores, shape [seeds, methods]; NaN is not allowed.

    Returns:
        Average ranks, shape [SAMPLES, methods].
    """
    generator, methods = np.random.default_rng(0), workloads[0][0].shape[1]
    total, drawn = np.zeros((SAMPLES, methods)), generator.integers(len(workloads), size=(len(workloads), SAMPLES))
    for place in drawn:  # each draw of a workload has seeds of its own
        for number, blocks in enumerate(workloads):
            chosen = place == number
            total[chosen] += _ranks_of_seeds(blocks, int(chosen.sum()), generator)
    return total / len(workloads)


def _ranks_of_seeds(blocks: Sequence[_Array], samples: int, generator: np.random.Generator) -> _Array:
    # The seeds of all blocks are drawn together, as they share the split and the draws.
    places = generator.random((samples, max(map(len, blocks))))
    means = [block[(places[:, : len(block)] * len(block)).astype(int)].mean(axis=1) for block in blocks]
    return np.mean([scipy.stats.rankdata(-mean.round(DIGITS), axis=1) for mean in means], axis=0)


def friedman(ranks: _Array) -> float:
    """The p-value of Friedman's test that methods' ranks differ by chance, by permuting methods within blocks.

    It is `LEAST_P` or more.

    Args:
        ranks: shape [blocks, methods]; every row has the mean (methods + 1) / 2.

    Source: Conover, "Practical Nonparametric Statistics" 1999, section 5.8; what only scales the statistic is left out.
    """

    def statistic(of: _Array) -> _Array:
        return (of.sum(axis=-2) ** 2).sum(axis=-1)

    # Permuted, as the chi-squared approximation needs many blocks, and rows may be means of several rankings.
    generator, centred = np.random.default_rng(0), ranks - ranks.mean(axis=1, keepdims=True)
    observed = float(statistic(centred)) * (1 - 1e-9)
    extreme = sum(statistic(generator.permuted(centred, axis=1)) >= observed for _ in range(_RESAMPLES))
    return float(1 + extreme) / (1 + _RESAMPLES)


def critical_difference(methods: int, blocks: int) -> float:
    """The distance from which two average ranks differ, all pairs considered (Nemenyi's test).

    Source: Demšar, "Statistical comparisons of classifiers over multiple data sets", JMLR 2006, section 3.2.2.
    """
    quantile = scipy.stats.studentized_range.ppf(CONFIDENCE, methods, np.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(methods * (methods + 1) / (6 * blocks)))
