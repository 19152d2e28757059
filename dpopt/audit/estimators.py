"""From an attack's scores to a lower bound on epsilon, at a stated confidence.

Every function takes the scores [n] of what was in the data and [k] of what was not; higher means "in". Two kinds of
experiment: many runs with one canary each (`clopper_pearson`: scores are independent), and one run with many canaries,
each in or out by its own fair coin (`one_run`: scores may depend on each other). `significance` is the probability with
which a bound may exceed the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_ndtr, ndtr, ndtri
from scipy.stats import beta, binom

from dpopt.errors import ConfigError

_Array: TypeAlias = NDArray[np.float64]
_Guesses: TypeAlias = int | Sequence[int] | Literal["public"]
"""The number of highest scores that are guessed to be in, chosen without looking at them.

Several numbers share the significance. "public" tries 1/2, 1/4, ... 1/128 of the canaries. (Published software tries
every vertex of the convex hull of the ROC curve and divides the significance by their number. The vertices are chosen
with knowledge of who was in, so its confidence is not guaranteed.)
"""


def clopper_pearson(
    in_scores: ArrayLike,
    out_scores: ArrayLike,
    *,
    delta: float,
    significance: float = 0.05,
    threshold: float | None = None,
) -> float:
    """Lower bound on epsilon from independent runs with and without one canary.

    A run is said to hold the canary if its score is at least a threshold. With the error rates' confidence limits of
    Clopper and Pearson (1934), as in Nasr et al., IEEE S&P 2021,

        epsilon >= max( log((TPR_low - delta) / FPR_high), log((TNR_low - delta) / FNR_high), 0 ).

    TNR_low = 1 - FPR_high and FNR_high = 1 - TPR_low, so two limits, each at half the significance, carry both terms.

    A `threshold` has to be chosen without looking at these scores; by default every second run of both kinds chooses
    it, and the bound is that of the others. ConfigError for a value out of range, a score that is not a number, or too
    few scores.
    """
    inside, outside = _checked(in_scores, out_scores, delta, significance)
    if threshold is not None:
        return float(_at_thresholds(inside, outside, np.array([threshold]), delta, significance)[0])
    if min(len(inside), len(outside)) < 2:
        raise ConfigError("scores", min(len(inside), len(outside)), "expected at least two of each kind, to split them")
    # One half chooses and the other proves: a threshold fitted to the scores it is used on proves nothing.
    candidates = np.union1d(inside[::2], outside[::2])
    chosen = _at_thresholds(inside[::2], outside[::2], candidates, delta, significance).argmax()
    return float(_at_thresholds(inside[1::2], outside[1::2], candidates[[chosen]], delta, significance)[0])


def one_run(
    in_scores: ArrayLike,
    out_scores: ArrayLike,
    *,
    delta: float,
    significance: float = 0.05,
    guesses: _Guesses = "public",
    is_gaussian: bool = False,
) -> float:
    """Lower bound on epsilon from one run with many canaries.

    For any mechanism, by Steinke, Nasr and Jagielski, NeurIPS 2023, Theorem 5.2: of r guesses about m canaries, v are
    right with probability at most f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, where f(v) = P[Binomial(r, e^epsilon /
    (1 + e^epsilon)) >= v]. The bound is the largest epsilon at which that is below the significance.

    For a Gaussian trade-off curve, by Mahloujifar, Melis and Chaudhuri 2024: the epsilon of the largest mu for which
    the guesses refute mu-Gaussian differential privacy. It is tighter, because it tests the whole curve; but it refutes
    no more than that the mechanism is mu-GDP. That of many subsampled Gaussians nearly is. Raises as `clopper_pearson`.
    """
    inside, outside = _checked(in_scores, out_scores, delta, significance)
    if is_gaussian and not delta:
        raise ConfigError("delta", delta, "expected a probability in (0, 1): no Gaussian keeps epsilon at delta 0")
    tries, canaries, best = _highest(inside, outside, guesses), len(inside) + len(outside), 0.0
    level = significance / len(tries)  # the tried numbers of guesses share it
    # The most promising first: the others need a look only where they could do better.
    for tried, correct in sorted(tries, key=lambda pair: -pair[1] / max(pair[0], 1)):

        def excess(parameter: float, tried: int = tried, correct: int = correct) -> float:
            if is_gaussian:
                return _refutes_gaussian(parameter, tried, correct, canaries, level)
            return level - _p_value(parameter, tried, correct, canaries, delta)

        # Guesses no better than coins refute nothing.
        if 2 * correct > tried and excess(best) > 0:
            best = _largest(excess, best)
    return gaussian_epsilon(best, delta) if is_gaussian else best


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at `delta` of mu-Gaussian differential privacy (Dong, Roth and Su 2022, Corollary 2.13)."""

    def excess(epsilon: float) -> float:
        high, low = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return high + math.log(-math.expm1(min(low - high, -1e-300))) - math.log(delta)

    return _largest(excess, 0.0) if mu else 0.0


def likely_threshold(
    in_scores: ArrayLike, out_scores: ArrayLike, *, trials: int, delta: float, significance: float = 0.05
) -> float:
    """The threshold at which `clopper_pearson` is likely to prove most from `trials` runs of each kind.

    Chosen before the audit, on scores of a simulation: the audit's own may not be among them.
    """
    inside, outside = _checked(in_scores, out_scores, delta, significance)
    candidates = np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 1001))
    missed, false_alarms = _errors(inside, outside, candidates)
    shares = missed / len(inside), false_alarms / len(outside)
    bounds = _from_errors(trials * shares[0], trials * shares[1], (trials, trials), delta, significance)
    return float(candidates[bounds.argmax()])


def _at_thresholds(inside: _Array, outside: _Array, thresholds: _Array, delta: float, significance: float) -> _Array:
    counts = _errors(inside, outside, thresholds)
    return _from_errors(*counts, (len(inside), len(outside)), delta, significance)


def _errors(inside: _Array, outside: _Array, thresholds: _Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    missed, rejected = (np.searchsorted(np.sort(scores), thresholds) for scores in (inside, outside))
    return missed, len(outside) - rejected


def _from_errors(
    missed: ArrayLike, false_alarms: ArrayLike, trials: tuple[int, int], delta: float, significance: float
) -> _Array:
    # Two limits share the significance, and with their complements carry both terms.
    fnr = _upper_limit(missed, trials[0], significance / 2)
    fpr = _upper_limit(false_alarms, trials[1], significance / 2)
    # Either error can prove epsilon; a test that is sure of the one is tried for the other at no cost.
    ratios = np.maximum((1 - fnr - delta) / fpr, (1 - fpr - delta) / fnr)
    return np.log(np.maximum(ratios, 1.0))


def _upper_limit(count: ArrayLike, trials: int, significance: float) -> _Array:
    count = np.asarray(count, dtype=np.float64)
    # Where every run is counted no rate is too large, and the beta distribution has no such parameter.
    return np.where(count < trials, beta.ppf(1 - significance, count + 1, np.maximum(trials - count, 1)), 1.0)


def _p_value(epsilon: float, guesses: int, correct: int, canaries: int, delta: float) -> float:
    shifts = np.arange(correct + 1)
    tail = binom.sf(correct - shifts - 1, guesses, expit(epsilon))
    # Delta may turn some wrong guesses right: the worst number of them counts.
    slope = ((tail[1:] - tail[0]) / shifts[1:]).max(initial=0.0)
    return tail[0] + 2 * canaries * delta * slope


def _refutes_gaussian(mu: float, guesses: int, correct: int, canaries: int, significance: float) -> float:
    """Positive where mu-GDP makes `correct` or more of `guesses` less likely than `significance`.

    With p_i the probability of i correct guesses, f-DP bounds the mass of right ones by that of wrong ones:
    sum_{i >= k} i/m p_i <= fbar(sum_{i >= k} (r - i + 1)/m p_{i-1}), fbar(x) = Phi(Phi^-1(x) + mu) here. If the tail
    from `correct` had the probability `significance`, each smaller count would need at least the mass computed below;
    more than there is refutes mu.
    """
    right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        needed = ndtr(ndtri(right) - mu)
        if needed <= wrong:
            break
        right, wrong = min(1.0, right + count / (guesses - count) * (needed - wrong)), needed
    return right + wrong - guesses / canaries


def _highest(inside: _Array, outside: _Array, guesses: _Guesses) -> list[tuple[int, int]]:
    canaries = len(inside) + len(outside)
    numbers = [guesses] if isinstance(guesses, int) else guesses
    if numbers == "public":
        numbers = sorted({max(1, canaries >> k) for k in range(1, 8)})
    if isinstance(numbers, str) or not all(1 <= number <= canaries for number in numbers) or not len(numbers):
        raise ConfigError("guesses", guesses, f"expected numbers from 1 to {canaries}, or 'public'")
    ranked = np.append(np.sort(np.concatenate([inside, outside]))[::-1], -np.inf)
    # Of equal scores at the border none is guessed: fewer guesses than stated only lower the bound, whereas an order
    # among equals might know who is in.
    return [(number, int((inside > ranked[number]).sum())) for number in numbers]


def _largest(excess: Callable[[float], float], low: float) -> float:
    """The number above `low` at which the decreasing `excess` crosses zero; `low` if it is not positive there."""
    if excess(low) <= 0:
        return low
    high = max(1.0, 2 * low)
    while excess(high) > 0:
        low, high = high, 2 * high
    return scipy.optimize.root_scalar(excess, bracket=(low, high), method="brentq", xtol=1e-7).root


def _checked(in_scores: ArrayLike, out_scores: ArrayLike, delta: float, significance: float) -> tuple[_Array, _Array]:
    if not 0 <= delta < 1:
        raise ConfigError("delta", delta, "expected a probability in [0, 1)")
    if not 0 < significance < 0.5:
        raise ConfigError("significance", significance, "expected a probability in (0, 0.5)")
    arrays = []
    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        array = np.asarray(scores, dtype=np.float64)
        if array.ndim != 1 or not len(array):
            raise ConfigError(name, f"shape {array.shape}", "expected a list of at least one number")
        if np.isnan(array).any():
            raise ConfigError(name, math.nan, "expected numbers")
        arrays.append(array)
    return arrays[0], arrays[1]
