"""The HyFreeDP paper's own noise rules, to show what they claim and what they spend. Not for training.

Liu and Bu, "Towards hyperparameter-free optimization with differential privacy", ICLR 2025, Eq. 9-10 and Algorithm 2.
"""

from __future__ import annotations

import math
from typing import Literal

from dpopt import fields
from dpopt.fields import Count, Inflation, Many, Positive
from dpopt.privacy.accountants import epsilon as spent
from dpopt.privacy.calibration import solve_noise
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import repeated


@fields.checked
def hyfreedp_noise(
    *,
    rule: Literal["independent", "additive"],
    rate: float,
    draws: Many,
    epsilon: Positive,
    delta: float,
    probe_every: Count = 5,
    noise_inflation: Inflation = 1.01,
    accountant: str = "rdp",
) -> tuple[float, float, float]:
    """Noise for HyFreeDP by the paper's rules, which treat releases of one draw as if each had its own subsample.

    Args:
        rule: "independent" composes 3T/K separately subsampled loss releases with the T gradients (Theorem 2, Eq. 9);
            "additive" adds the two parts' epsilons at one delta (Appendix C).
        rate, draws, epsilon, delta, accountant: as for `calibrate`.
        probe_every: K, draws between probe rounds.
        noise_inflation: gamma of Eq. 10.

    Returns:
        The noise multipliers of gradients and losses, and the epsilon that they really spend.
    """
    rounds = math.ceil(draws / probe_every)

    def releases(count: int, *noises: float) -> Ledger:
        return repeated(Ledger([Draw(rate, noises)]), count) if count else Ledger()

    plain = solve_noise(lambda noise: releases(draws, noise), epsilon, delta, accountant)
    gradient = noise_inflation * plain
    gradients = releases(draws, gradient)
    if rule == "independent":
        losses = solve_noise(lambda noise: gradients + releases(3 * rounds, noise), epsilon, delta, accountant)
    else:
        left = epsilon - spent(gradients, delta, accountant)
        losses = solve_noise(lambda noise: releases(3 * rounds, noise), left, delta, accountant)
    # The truth: a draw with probes is one Gaussian release of all four values.
    truth = releases(rounds, gradient, losses, losses, losses) + releases(draws - rounds, gradient)
    return gradient, losses, spent(truth, delta, accountant)
