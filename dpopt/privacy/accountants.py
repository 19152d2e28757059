"""Ledger -> epsilon, by four independent libraries. `pld` is the accountant of record, the others are second opinions.

Every accountant is given the same thing: how often each Poisson-subsampled Gaussian occurs, a draw's releases already
collapsed to their effective noise. Neighbouring data sets differ by adding or removing one record.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from dpopt.errors import ConfigError, unknown
from dpopt.privacy.ledger import Ledger

Event = tuple[float, float, int]
"""(rate, effective noise multiplier, number of draws)"""

PLD_INTERVAL = 1e-4
"""Discretisation of the privacy loss; coarser grids are visibly loose on runs of over 10^4 draws."""


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float:
    """Upper bound on the epsilon that `ledger` spends at `delta`.

    Args:
        ledger: the draws of a run.
        delta: in (0, 1); public, usually well below 1/N.
        accountant: "pld" (dp-accounting, Doroshenko et al. 2022), "rdp" (dp-accounting, Mironov et al. 2019),
            "prv" (Opacus, Gopi et al. 2021) or "autodp" (Wang et al. 2019).

    Returns:
        Epsilon under add/remove adjacency; infinity when any release was un-noised, 0 for an empty ledger.

    Raises:
        ConfigError: unknown accountant or delta outside (0, 1).
    """
    check(delta, accountant)
    spent = events(ledger)
    if any(noise == 0 for _, noise, _ in spent):
        return math.inf
    return _epsilon(spent, delta, accountant) if spent else 0.0


def events(ledger: Ledger) -> tuple[Event, ...]:
    """What accountants see of `ledger`: its distinct draws that release anything, in a fixed order."""
    counts: dict[tuple[float, float], int] = {}
    for draw, count in ledger.counts().items():
        key = (draw.rate, draw.effective_noise)
        counts[key] = counts.get(key, 0) + count
    return tuple(sorted((rate, noise, count) for (rate, noise), count in counts.items() if noise < math.inf))


def check(delta: float, accountant: str) -> None:
    """Raise `ConfigError` for a delta or an accountant that cannot be used."""
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    if not 0 < delta < 1:
        raise ConfigError("delta", delta, "expected a probability in (0, 1)")


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[Event, ...], delta: float, accountant: str) -> float:
    with quiet():
        return float(ACCOUNTANTS[accountant](events, delta))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries from reporting what only loosens their bounds."""
    chatter = logging.getLogger("absl")
    level = chatter.level
    chatter.setLevel(logging.ERROR)  # dp-accounting names every Renyi order that it leaves out
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # line searches divide by zero on their way; PRV looks at RDP orders
            yield
    finally:
        chatter.setLevel(level)


def _pld(events: tuple[Event, ...], delta: float) -> float:
    from dp_accounting import pld

    return _dp_accounting(pld.PLDAccountant(value_discretization_interval=PLD_INTERVAL), events, delta)


def _rdp(events: tuple[Event, ...], delta: float) -> float:
    from dp_accounting import rdp

    return _dp_accounting(rdp.RdpAccountant(), events, delta)


def _dp_accounting(accountant: Any, events: tuple[Event, ...], delta: float) -> float:
    return accountant.compose(dp_event(events)).get_epsilon(delta)


def dp_event(events: tuple[Event, ...]) -> Any:
    """`events` as dp-accounting's composition of Poisson-subsampled Gaussians."""
    import dp_accounting

    composed = dp_accounting.DpEventBuilder()
    for rate, noise, count in events:
        event = dp_accounting.GaussianDpEvent(noise)
        composed.compose(dp_accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event, count)
    return composed.build()


def _prv(events: tuple[Event, ...], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, count) for rate, noise, count in events]
    return accountant.get_epsilon(delta)


def _autodp(events: tuple[Event, ...], delta: float) -> float:
    from autodp.mechanism_zoo import GaussianMechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    sample = AmplificationBySampling(PoissonSampling=True)
    mechanisms = [
        sample(GaussianMechanism(sigma=noise), rate, improved_bound_flag=True)
        if rate < 1
        else GaussianMechanism(sigma=noise)
        for rate, noise, _ in events
    ]
    return Composition()(mechanisms, [count for _, _, count in events]).get_approxDP(delta)


ACCOUNTANTS: dict[str, Callable[[tuple[Event, ...], float], float]] = {
    "pld": _pld,
    "rdp": _rdp,
    "prv": _prv,
    "autodp": _autodp,
}
