"""Epsilon of composed Poisson-subsampled Gaussians from the privacy loss itself, with an error that it states.

One record more turns P = N(0, s^2) into Q = (1 - q) N(0, s^2) + q N(1, s^2). The privacy loss of taking the record away
is log Q/P under Q, that of adding it log P/Q under P; the larger epsilon of the two counts. The loss of one draw is
rounded to the nearest point of a grid and then shifted until its mean is exact (Gopi, Lee and Wutschitz 2021, section
5). It is composed by one Fourier transform, multiplied by e^{tilt loss} before: what decides a small delta is then the
middle of the distribution, and the transform's rounding errors are relative to it.

The grid is halved until epsilon settles. Rounding to the nearest point adds h^2 / 12 to the variance of a draw, so each
halving leaves a quarter of the error; the stated error is the larger of the last two changes.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

PRECISION = 2e-5
"""Halving ends when epsilon changes by less, relatively, two times."""
LARGEST = 2**24
"""Points of the largest grid; halving ends there too."""
LEFT_OUT = 1e-5
"""Share of delta that the probabilities which are left out come to."""
Z = np.linspace(-14, 14, 100_001)
NORMAL = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi) * (Z[1] - Z[0])
"""The trapezoidal rule, which is exact to rounding for integrals over a Gaussian."""


def epsilon(draws, delta):
    """(epsilon, error) of `draws`, each (rate, noise, count): the truth is in epsilon +- error."""
    precision = math.fsum(count / noise**2 for rate, noise, count in draws if rate == 1)
    at_rate_one = [(1.0, precision**-0.5, 1)] if precision else []  # together they are one Gaussian
    draws = [draw for draw in draws if draw[0] < 1] + at_rate_one
    ways = [_one_way(draws, delta, is_removed) for is_removed in (True, False)]
    return max(value for value, _ in ways), max(error for _, error in ways)


def _one_way(draws, delta, is_removed):
    count = sum(count for *_, count in draws)
    ends = [_ends(rate, noise, LEFT_OUT * delta / count, is_removed) for rate, noise, _ in draws]
    spread = math.sqrt(sum(count * NORMAL @ _loss(rate, noise, noise * Z) ** 2 for rate, noise, count in draws))
    interval = max(spread / math.sqrt(count) / 4, max(high - low for low, high in ends) / 2**17)
    losses = _rounded(draws, ends, interval, is_removed)
    tilt = _best_tilt(losses, math.log(delta))
    window = _window(losses, tilt)

    def solve(interval):
        return _solve(_rounded(draws, ends, interval, is_removed), tilt, window, delta)

    widest = max(window[1] - window[0], *(high - low for low, high in ends))
    interval = max(min(interval, *(rate / 4 for rate, *_ in draws)), widest / LARGEST * 4)
    found = [solve(interval), solve(interval / 2), solve(interval / 4)]
    while _change(found) > PRECISION * found[-1] and widest / interval < LARGEST / 8:
        interval /= 2
        found.append(solve(interval / 4))
    return found[-1], _change(found) + 3 * LEFT_OUT * found[-1]


def _change(found):
    return max(abs(found[-1] - found[-2]), abs(found[-2] - found[-3]))


def _loss(rate, noise, x):
    """log Q/P at `x`."""
    exponent = (x - 0.5) / noise**2
    if rate == 1:
        return exponent
    small, large = np.minimum(exponent, 30), np.maximum(exponent, 30)
    return np.where(exponent < 30, np.log1p(rate * np.expm1(small)), large + np.log(rate + (1 - rate) * np.exp(-large)))


def _where(rate, noise, loss):
    """The x at which log Q/P is `loss`; -infinity below its infimum."""
    if rate == 1:
        return 0.5 + noise**2 * loss
    small, large = np.minimum(loss, 30), np.maximum(loss, 30)
    with np.errstate(divide="ignore", invalid="ignore"):
        at_small = np.log1p(np.expm1(small) / rate)
        at_large = large + np.log1p((rate - 1) * np.exp(-large)) - math.log(rate)
    return 0.5 + noise**2 * np.where(loss < 30, np.nan_to_num(at_small, nan=-np.inf, neginf=-np.inf), at_large)


def _ends(rate, noise, left, is_removed):
    """Between which the loss of one draw lies, but for a probability `left` beyond each."""
    reach = -special.ndtri(left) * noise
    low, high = _loss(rate, noise, np.array([-reach, 1 + reach]))
    return (low, high) if is_removed else (-high, -low)


@dataclass(frozen=True)
class Loss:
    """`count` draws with the rounded loss of one of them: probabilities of (first + i) interval + shift."""

    probabilities: np.ndarray
    first: int
    interval: float
    shift: float
    count: int

    @property
    def points(self):
        return (self.first + np.arange(len(self.probabilities))) * self.interval + self.shift

    def tilted(self, tilt):
        """Log E e^{tilt loss} of one draw, and the probabilities multiplied by e^{tilt loss} and scaled to add to 1."""
        with np.errstate(divide="ignore"):
            exponent = np.log(self.probabilities) + tilt * self.points
        top = exponent.max()
        weights = np.exp(exponent - top)
        total = weights.sum()
        return top + math.log(total), weights / total


def _rounded(draws, ends, interval, is_removed):
    return [_rounded_draw(*draw, *end, interval, is_removed) for draw, end in zip(draws, ends, strict=True)]


def _rounded_draw(rate, noise, count, low, high, interval, is_removed):
    first, last = math.floor(low / interval), math.ceil(high / interval)
    edges = (np.arange(first, last + 2) - 0.5) * interval
    x = _where(rate, noise, edges if is_removed else -edges)
    join = rate if is_removed else 0.0  # removed: under Q, added: under P

    def tail(x, sign):
        return (1 - join) * special.ndtr(sign * x / noise) + join * special.ndtr(sign * (x - 1) / noise)

    # The difference of the smaller tail keeps its relative precision.
    probabilities = np.where(x[1:] < 0.5, np.abs(np.diff(tail(x, 1))), np.abs(np.diff(tail(x, -1))))
    rounded = probabilities @ ((first + np.arange(len(probabilities))) * interval) / probabilities.sum()
    without, joined = (NORMAL @ _loss(rate, noise, noise * Z + mean) for mean in (0, 1))
    exact = (1 - rate) * without + rate * joined if is_removed else -without
    return Loss(probabilities, first, interval, float(exact - rounded), count)


def _best_tilt(losses, log_delta):
    """The tilt by which Chernoff's bound is `delta`: the tilted loss is then near the epsilon that is looked for."""

    def excess(log_tilt):
        tilt = math.exp(log_tilt)
        total = -log_delta
        for loss in losses:
            cumulant, tilted = loss.tilted(tilt)
            total += loss.count * (cumulant - tilt * (tilted @ loss.points))
        return total

    if excess(-15.0) < 0 or excess(15.0) > 0:
        return 0.0
    return math.exp(optimize.brentq(excess, -15.0, 15.0, xtol=1e-2))


def _window(losses, tilt):
    """Between which the sum of all tilted losses lies, but for a probability of e^-46 beyond each end (Chernoff)."""
    tilted = [(loss, *loss.tilted(tilt)) for loss in losses]
    mean = sum(loss.count * (p @ loss.points) for loss, _, p in tilted)
    spread = math.sqrt(sum(loss.count * (p @ (loss.points - p @ loss.points) ** 2) for loss, _, p in tilted))
    ends = []
    for sign in (-1, 1):
        steps = sign * np.geomspace(0.02, 20, 25) / spread
        further = [sum(loss.count * (loss.tilted(tilt + step)[0] - own) for loss, own, _ in tilted) for step in steps]
        bounds = (np.array(further) + 46) / steps
        ends.append(bounds.min() if sign > 0 else bounds.max())
    return min(ends[0], mean), max(ends[1], mean)


def _solve(losses, tilt, window, delta):
    """The least epsilon >= 0 at which the sum of the rounded losses has the hockey-stick divergence `delta`."""
    points, tilted, log_weight = _composed(losses, tilt, window)

    def divergence(value):
        above = np.searchsorted(points, value, side="right")
        return -np.expm1(value - points[above:]) * np.exp(log_weight[above:]) @ tilted[above:]

    if divergence(0.0) <= delta:
        return 0.0
    return optimize.brentq(lambda value: divergence(value) / delta - 1, 0.0, points[-1], xtol=1e-13, rtol=1e-10)


def _composed(losses, tilt, window):
    """The sum of all losses: its points, ascending, its tilted probabilities, and the log of what undoes the tilt."""
    interval = losses[0].interval
    offset = sum(loss.count * loss.shift for loss in losses)
    first, last = math.floor((window[0] - offset) / interval), math.ceil((window[1] - offset) / interval)
    size = 1 << (last - first + 1).bit_length()
    spectrum, log_total = np.ones(size // 2 + 1, complex), 0.0
    for loss in losses:
        cumulant, tilted = loss.tilted(tilt)
        log_total += loss.count * cumulant
        wrapped = np.bincount((loss.first + np.arange(len(tilted))) % size, weights=tilted, minlength=size)
        spectrum *= np.fft.rfft(wrapped) ** loss.count
    index = first + np.arange(last - first + 1)
    points = index * interval + offset
    tilted = np.maximum(np.fft.irfft(spectrum, size)[index % size], 0)  # far from the middle, rounding errors are left
    return points, tilted, log_total - tilt * points
