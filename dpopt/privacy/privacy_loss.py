"""Epsilon by the privacy loss distribution of a run, on a grid that follows the run.

One record more turns P = N(0, s^2) into Q = (1 - q) N(0, s^2) + q N(1, s^2). The loss of a draw is log Q/P under Q if
the record is taken away, and log P/Q under P where it is added. It is rounded to a grid by connecting the dots, which
bounds every divergence from above (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022, Algorithm 1), and composed by
a Fourier transform. Probabilities are multiplied by e^{tilt loss} before, as in a saddle-point approximation: the tail
that decides a small delta is then the middle of the distribution, and rounding errors are relative to it.

Each approximation errs upwards: the grid, what is cut off at its ends (counted as an infinite loss), and what a
transform wraps around. Rounding errors are allowed for by their usual size, which is not a proven bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its modules are imported when they are first used: they take half a second

Event = tuple[float, float, int]
"""(rate, effective noise multiplier, number of draws)"""

COARSEST = 1e-4
"""The largest distance between points of a grid, unless they would be more than `_MOST_POINTS`."""
_MOST_POINTS = 2**20
_MOST_DRAWS = 2**30
"""Rounding errors of more draws are not small against any share of delta."""
_MOST_SPREAD = 1e3
"""The largest standard deviation of a run's loss; its epsilon is some hundred thousand."""
_MOST_NOISE = 1e8
"""More noise is counted as this much: the divergences would be too close to zero for double precision."""
_LEFT_OUT = 1e-6
"""Share of delta that the tails of single draws cover, and as much again the tail of their sum."""
_PRECISE = 1e4
"""Rounding errors are to be this many times smaller than the part of the tilted losses that decides delta."""


def epsilon(events: Sequence[Event], delta: float) -> float:
    """Upper bound on the epsilon of `events`, within what it `reaches`, at `delta`, under add/remove adjacency."""
    return max(_one_way(merged(events), delta, is_removed) for is_removed in (True, False))


def reaches(events: Sequence[Event]) -> bool:
    """True if `epsilon` can be computed for `events`."""
    return sum(count for *_, count in merged(events)) <= _MOST_DRAWS and spread(events) <= _MOST_SPREAD


def interval(events: Sequence[Event]) -> float:
    """Distance between the points: a quarter of the standard deviation of a draw's loss, at most `COARSEST`."""
    # The dots add a sixth of the squared distance to a draw's variance, here a hundredth of it.
    return min(COARSEST, spread(events) / math.sqrt(sum(count for *_, count in merged(events))) / 4)


def spread(events: Sequence[Event]) -> float:
    """Standard deviation of the loss of all draws together, from above."""
    # At most 1/s, the Gaussian's; to leading order the root of the chi-squared divergence of Q from P.
    each = (min(q * math.sqrt(math.expm1(min(s**-2, 700))), 1 / s) * math.sqrt(n) for q, s, n in merged(events))
    return math.hypot(*each)


def merged(events: Sequence[Event]) -> list[Event]:
    """`events` with all draws at rate one as one: together they are one Gaussian release."""
    precision = math.fsum(count / noise**2 for rate, noise, count in events if rate == 1)
    at_rate_one = [(1.0, precision**-0.5, 1)] if precision else []
    return [(q, min(s, _MOST_NOISE), n) for q, s, n in [event for event in events if event[0] < 1] + at_rate_one]


def _one_way(events: list[Event], delta: float, is_removed: bool) -> float:
    # The tails that are cut off each draw are counted as infinite losses: together they take `_LEFT_OUT` of delta.
    left = _LEFT_OUT * delta / sum(count for *_, count in events)
    ends = [_ends(rate, noise, left, is_removed) for rate, noise, _ in events]
    widest = max(high - low for low, high in ends)
    step = max(interval(events), max(4 * widest, 32 * spread(events)) / _MOST_POINTS)
    losses = [_rounded(event, end, step, is_removed) for event, end in zip(events, ends, strict=True)]
    return _Sum(losses, step, spread(events), delta).epsilon()


def _loss(rate: float, noise: float, x: float) -> float:
    exponent = (x - 0.5) / noise**2
    if rate == 1 or exponent > 700:
        return exponent + math.log(rate)
    return math.log1p(rate * math.expm1(exponent))


def _ends(rate: float, noise: float, left: float, is_removed: bool) -> tuple[float, float]:
    """The ends between which the loss of one draw lies, except with probability `left` at most beyond each."""
    reach = -noise * float(scipy.special.ndtri(max(left, 1e-300)))
    low, high = _loss(rate, noise, -reach), _loss(rate, noise, 1 + reach)
    return (low, high) if is_removed else (-high, -low)


def _gaussian(noise: float, epsilon: np.ndarray) -> np.ndarray:
    """Hockey-stick divergence of N(1, s^2) from N(0, s^2), and the other way (Balle and Wang 2018, Theorem 8)."""
    half, middle = 0.5 / noise, epsilon * noise
    return scipy.special.ndtr(half - middle) - np.exp(epsilon + scipy.special.log_ndtr(-half - middle))


def _divergence(rate: float, noise: float, epsilon: np.ndarray, is_removed: bool) -> np.ndarray:
    """Hockey-stick divergence of Q from P, or else of P from Q, at every `epsilon`."""
    if rate == 1:
        return _gaussian(noise, epsilon)
    loss = epsilon if is_removed else -epsilon
    is_there = loss > math.log1p(-rate)  # no outcome has a smaller loss
    # A multiple of the Gaussian's at another epsilon (Balle, Barthe and Gaboardi 2018, Theorem 2).
    exponent = np.log1p(np.expm1(np.where(is_there, np.minimum(loss, 30), 0)) / rate)  # the loss without sampling
    is_large = loss > 30
    exponent[is_large] = loss[is_large] + np.log1p((rate - 1) * np.exp(-loss[is_large])) - math.log(rate)
    if is_removed:
        return np.where(is_there, rate * _gaussian(noise, exponent), -np.expm1(epsilon))
    return np.where(is_there, (rate * np.exp(epsilon) - np.expm1(epsilon)) * _gaussian(noise, -exponent), 0)


@dataclass(frozen=True)
class _Loss:
    """The loss of each of `count` draws: `probabilities` of (first + i) steps, and `infinite`, that of infinity."""

    probabilities: np.ndarray
    first: int
    infinite: float
    count: int

    @property
    def steps(self) -> np.ndarray:
        return self.first + np.arange(len(self.probabilities))

    def cumulant(self, tilt: float) -> float:
        """The log of E e^{tilt steps} of what is finite."""
        exponents = tilt * self.steps
        if exponents[-1] > 300:
            return float(scipy.special.logsumexp(exponents, b=self.probabilities))
        return math.log1p(np.sum(self.probabilities * np.expm1(exponents)) - self.infinite)  # exact where it is near 0

    def tilted(self, tilt: float) -> np.ndarray:
        """The probabilities times e^{tilt steps}, scaled to add to 1."""
        weights = self.probabilities * np.exp(tilt * np.arange(1 - len(self.probabilities), 1))
        return weights / np.sum(weights)


def _rounded(event: Event, ends: tuple[float, float], step: float, is_removed: bool) -> _Loss:
    """The distribution on a grid whose divergences are those of a draw at every point."""
    rate, noise, count = event
    first, last = math.floor(ends[0] / step), math.ceil(ends[1] / step)
    divergence = _divergence(rate, noise, np.arange(first, last + 1) * step, is_removed)
    # Connecting the dots: between two points of the grid the divergence is taken to be linear in e^loss, which is above
    # the convex truth. The probabilities are those of a loss with such a divergence.
    fall = np.diff(divergence)
    probabilities = np.append(1 - divergence[0], fall / math.expm1(-step)) + np.append(fall / math.expm1(step), 0)
    return _Loss(np.maximum(probabilities, 0), first, max(float(divergence[-1]), 0.0), count)


class _Sum:
    """The losses of all draws together, at `delta`.

    Attributes:
        tilts: zero and more than are ever needed, many of them near the best of Chernoff's bounds.
        cumulants: log E e^{tilt loss} of what is finite, at each tilt.
    """

    def __init__(self, losses: list[_Loss], step: float, spread: float, delta: float) -> None:
        # A coarse search for the best tilt, and a fine one around it: the tilt decides how precise a tail can be.
        self.losses, self.step, self.delta = losses, step, delta
        tilts = np.append(0, np.geomspace(1e-4, 1e3, 30) / spread)
        best = int(np.argmin(self._chernoff(tilts, self._cumulants(tilts), delta)))
        self.tilts = np.union1d(tilts, np.linspace(tilts[best - 1], tilts[min(best + 1, 30)], 16))
        self.cumulants = self._cumulants(self.tilts)

    def epsilon(self) -> float:
        """Upper bound on the least epsilon >= 0 whose divergence is at most `delta`."""
        best = int(np.argmin(self._chernoff(self.tilts, self.cumulants, self.delta)))
        high = float(np.min(self._chernoff(self.tilts, self.cumulants, _LEFT_OUT * self.delta)))
        values = []
        for index in range(best, 0, -1):
            value, is_tight = self._epsilon(index, high)
            values.append(value)
            if is_tight:  # else the tilt is past epsilon, where losses of many times that decide
                break
        return min(values)

    def _cumulants(self, tilts: np.ndarray) -> np.ndarray:
        each = [[loss.count * loss.cumulant(tilt * self.step) for tilt in tilts] for loss in self.losses]
        return np.sum(each, axis=0)

    def _chernoff(self, tilts: np.ndarray, cumulants: np.ndarray, share: float) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return (cumulants - math.log(share)) / tilts

    def _epsilon(self, index: int, high: float) -> tuple[float, bool]:
        """Epsilon by losses tilted as in `tilts[index]`, and whether it is tight: whether rounding errors are small."""
        tilt = self.tilts[index]
        last = math.ceil(high / self.step)
        first = math.floor(max(self._low(index, high) / self.step, last - _MOST_POINTS))
        composed = self._composed(tilt, first, last)
        rounding = (sum(loss.count for loss in self.losses) + 16) * 2**-51
        infinite = -math.expm1(sum(loss.count * math.log1p(-loss.infinite) for loss in self.losses))
        log_allowed = math.log(self.delta * (1 - 2 * _LEFT_OUT) - infinite) - self.cumulants[index]

        def tails(point: int) -> tuple[float, float, float]:
            """The probability of a larger loss than at `point` under either distribution, and the one that is allowed.

            All three are multiplied by e^{tilt loss} at `point` and divided by what scales the tilted losses.
            """
            weights = composed[point - first :]
            further = self.step * np.arange(len(weights))
            mine, other = (float(np.sum(weights * np.exp(-power * further))) for power in (tilt, tilt + 1))
            return mine, other, math.exp(min(log_allowed + tilt * self.step * point, 700)) - rounding

        def is_enough(point: int) -> bool:
            mine, other, allowed = tails(point)
            return mine - other <= allowed

        start = max(first, 0)
        point = start + bisect_left(range(start, last + 1), True, key=is_enough)
        mine, other, allowed = tails(point)
        # Between this point and the one before it, e^epsilon is where the divergence is just `allowed`.
        excess = mine - allowed
        within = max(math.log(excess / other), -self.step) if 0 < excess <= other and point > start else 0.0
        return point * self.step + within, allowed > _PRECISE * rounding and last - first < _MOST_POINTS

    def _low(self, index: int, high: float) -> float:
        # Losses below the window wrap to its upper end, so almost none may lie there; above it they do no harm.
        tilt, cumulant = self.tilts[index], self.cumulants[index]
        with np.errstate(invalid="ignore"):
            lowest = np.max((cumulant - self.cumulants[:index] - 40) / (tilt - self.tilts[:index]))
            highest = np.min(
                (self.cumulants[index + 1 :] - cumulant + 40) / (self.tilts[index + 1 :] - tilt), initial=math.inf
            )
        return float(min(lowest, high - highest, 0.0))

    def _composed(self, tilt: float, first: int, last: int) -> np.ndarray:
        size = scipy.fft.next_fast_len(last - first + 1, real=True)
        spectrum = np.ones(size // 2 + 1, complex)
        for loss in self.losses:
            weights = np.bincount(loss.steps % size, loss.tilted(tilt * self.step), size)
            spectrum *= scipy.fft.rfft(weights) ** loss.count
        return np.maximum(scipy.fft.irfft(spectrum, size), 0)[np.arange(first, last + 1) % size]
