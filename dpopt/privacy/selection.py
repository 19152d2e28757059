"""What it costs to release the best of several private runs, when how many there are is random.

Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy", ICLR 2022, after Liu and Talwar, "Private
selection from private candidates", STOC 2019. Releasing the best of a fixed number of runs costs as much as releasing
all of them; a random number hides how often the best candidate had a chance to win.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal, get_args

from dp_accounting import dp_event, rdp

from dpopt.errors import ConfigError, unknown
from dpopt.privacy import accountants
from dpopt.privacy.ledger import Ledger

Number = Literal["logarithmic", "geometric", "poisson"]
"""How the number of runs is distributed."""
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shape of the truncated negative binomial distribution; Poisson is its limit."""


def best_of(ledger: Ledger, delta: float, *, runs: float, number: Number = "geometric") -> float:
    """Upper bound on the epsilon of releasing the best of a random number of runs, by Renyi divergences.

    Covers the records that the runs were trained on. What scores the runs must not look at them, or must be part of
    each run's ledger; the records it does look at are not covered.

    Args:
        ledger: what each single run spends.
        delta: see `accountants.epsilon`.
        runs: expected number of runs, at least 1. A Poisson number may be 0: then nothing is released.
        number: distribution of the number of runs.

    Returns:
        Epsilon of the whole procedure under add/remove adjacency; infinity where a release had no noise.

    Raises:
        ConfigError: unknown distribution, fewer than one run, or delta outside (0, 1).
    """
    if number not in SHAPES:
        raise unknown("selection.number", number, get_args(Number))
    if not 1 <= runs < math.inf:
        raise ConfigError("selection.runs", runs, "expected a finite number of runs, at least 1")
    accountants.check(delta, "rdp")
    events = accountants.events(ledger)
    if any(noise == 0 for _, noise, _ in events):
        return math.inf
    single = accountants.dp_event(events)
    return _renyi(dp_event.RepeatAndSelectDpEvent(single, runs, SHAPES[number]), delta) if events else 0.0


def _renyi(event: dp_event.DpEvent, delta: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orders at which a Poisson number of runs has no bound
        return float(rdp.RdpAccountant().compose(event).get_epsilon(delta))
