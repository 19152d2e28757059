"""The HyFreeDP paper's own noise rules, to show what they claim and what they spend. Not for training.

Liu and Bu, "Towards hyperparameter-free optimization with differential privacy", ICLR 2025, Eq. 9-10 and Algorithm 2.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from dpopt import fields
from dpopt.errors import unknown
from dpopt.fields import Count, Inflation, Many, Positive
from dpopt.privacy.accountants import epsilon as spent
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.solving import solve_noise


class PublishedNoise(NamedTuple):
    """Noise multipliers as the paper sets them, and the epsilon that a run with them really spends."""

    gradient: float
    losses: float
    true_epsilon: float


def hyfreedp_noise(
    *,
    rule: Literal["independent", "additive"],
    rate: float,
    draws: int,
    epsilon: float,
    delta: float,
    probe_every: int = 5,
    noise_inflation: float = 1.01,
    accountant: str = "rdp",
) -> PublishedNoise:
    """Noise for HyFreeDP by the paper's rules, which treat releases of one draw as if each had its own subsample.

    Args:
        rule: "independent" composes 3T/K separately subsampled loss releases with the T gradients (Theorem 2, Eq. 9);
            "additive" adds the two parts' epsilons at one delta (Appendix C).
        rate, draws, epsilon, delta, accountant: as for `calibrate`.
        probe_every: K, draws between probe rounds.
        noise_inflation: gamma of Eq. 10.

    Returns:
        The noise multipliers and, as `true_epsilon`, what they cost when the releases of a draw are composed first.

    Raises:
        ConfigError: unknown rule, or a value out of range.
    """
    if rule not in ("independent", "additive"):
        raise unknown("rule", rule, ["independent", "additive"])
    draws = fields.convert(draws, Many, "draws", {})
    epsilon = fields.convert(epsilon, Positive, "epsilon", {})
    probe_every = fields.convert(probe_every, Count, "probe_every", {})
    noise_inflation = fields.convert(noise_inflation, Inflation, "noise_inflation", {})
    rounds = math.ceil(draws / probe_every)
    plain = solve_noise(lambda noise: _repeat(Draw(rate, (noise,)), draws), epsilon, delta, accountant)
    gradient = noise_inflation * plain
    gradients = _repeat(Draw(rate, (gradient,)), draws)

    def probes(noise: float) -> Ledger:
        return _repeat(Draw(rate, (noise,)), 3 * rounds)

    if rule == "independent":
        losses = solve_noise(lambda noise: gradients + probes(noise), epsilon, delta, accountant)
    else:
        left = epsilon - spent(gradients, delta, accountant)
        losses = solve_noise(probes, left, delta, accountant)
    truth = _repeat(Draw(rate, (gradient, *(losses,) * 3)), rounds) + _repeat(Draw(rate, (gradient,)), draws - rounds)
    return PublishedNoise(gradient, losses, spent(truth, delta, accountant))


def _repeat(draw: Draw, count: int) -> Ledger:
    ledger = Ledger()
    if count:
        ledger.append(draw, count)
    return ledger
