"""The noise for a target epsilon, where it is known which ledger it leads to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import scipy  # its modules are imported when they are first used: they take half a second

from dpopt.errors import ConfigError
from dpopt.privacy import accountants
from dpopt.privacy.ledger import Ledger

Charge = Callable[[Ledger, float, str], float]
"""(ledger of one run, delta, accountant) -> epsilon of all that is charged for it"""
TOLERANCE = 2e-5
"""The most that a calibrated epsilon may stay below its target, relative to it."""
FAR = 50.0
"""An epsilon by RDP that is above every target worth a privacy loss distribution."""
NOISE_RANGE = (0.05, 1e6)
"""Noise multipliers that calibration considers."""


def solve_noise(
    ledger_of: Callable[[float], Ledger],
    epsilon: float,
    delta: float,
    accountant: str,
    charge: Charge = accountants.epsilon,
) -> float:
    """The smallest noise whose ledger costs at most `epsilon`, to `TOLERANCE`, from the safe side.

    Args:
        ledger_of: noise multiplier -> ledger; epsilon must not grow with the noise.
        epsilon, delta, accountant: see `calibrate`.
        charge: what a ledger costs.

    Raises:
        ConfigError: even the largest noise of `NOISE_RANGE` spends more than `epsilon`.
    """

    def spent(log_noise: float, by: str) -> float:
        return charge(ledger_of(math.exp(log_noise)), delta, by)

    def excess(log_noise: float, far: float) -> float:
        # A numerical privacy loss distribution grows with epsilon; where RDP is far above the target, so is the truth.
        quick = spent(log_noise, "rdp")
        over = (quick if quick > far else spent(log_noise, accountant)) / epsilon - 1
        return 0.0 if -TOLERANCE <= over <= 0 else over + TOLERANCE / 2

    low, high = (math.log(noise) for noise in NOISE_RANGE)
    least = spent(high, accountant)
    if least > epsilon:
        is_loose = accountant != "pld" and spent(high, "pld") <= epsilon
        instead = ": accountant=pld reaches it, with less noise" if is_loose else ""
        raise ConfigError("epsilon", epsilon, f"not reached by a noise multiplier up to {NOISE_RANGE[1]:g}{instead}")
    # RDP is cheap and shaped like the others: its root, for a target scaled to its own floor, is a good first guess.
    floor = spent(high, "rdp")
    target = epsilon * floor / least if floor > epsilon and least > 0 else epsilon
    guess = _root(lambda s: spent(s, "rdp") - target, low, high)
    root = high
    for far in (2 * epsilon + 0.5, FAR):  # the second where RDP is loose, as it is for a delta near rate * draws
        function = partial(excess, far=far)
        root = _root(function, *_bracket(function, guess, low, high))
        if spent(root, accountant) >= (1 - 2 * TOLERANCE) * epsilon:
            break
    # The safe side: a root is where the sign changes, to rounding, and may spend a little more than the target.
    while spent(root, accountant) > epsilon:
        root += TOLERANCE / 4
    return math.exp(root)


def _bracket(function: Callable[[float], float], guess: float, low: float, high: float) -> tuple[float, float]:
    step = 0.03 if function(guess) > 0 else -0.03
    end = guess
    while low < end < high and (function(end) > 0) == (step > 0):
        guess, end, step = end, min(max(end + step, low), high), 2 * step
    return min(guess, end), max(guess, end)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    if function(low) <= 0:
        return low
    if function(high) > 0:
        return high
    return scipy.optimize.root_scalar(function, bracket=(low, high), method="brentq", xtol=1e-9).root
