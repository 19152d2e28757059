"""Ledger -> epsilon, by four independent methods. `pld` is the accountant of record, the others are second opinions.

Every accountant is given the same thing: how often each Poisson-subsampled Gaussian occurs, a draw's releases already
collapsed to their effective noise. Neighbouring data sets differ by adding or removing one unit of the ledger.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dpopt.errors import ConfigError, unknown
from dpopt.privacy import privacy_loss
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.privacy_loss import Event

_LEAST_DELTA = 1e-250
"""Shares of a smaller delta are no longer numbers."""
_PRV_POINTS = 2**23
"""The largest grid that `prv` may make, some seconds of work: it grows with epsilon and the root of the draws."""
Charge = Callable[[Ledger, float, str], float]
"""(ledger of one run, delta, accountant) -> epsilon of all that is charged for it"""


@dataclass(frozen=True)
class Accountant:
    """A method of accounting; an entry of `ACCOUNTANTS`.

    Attributes:
        compute: (events, delta) -> epsilon; an error may be an `ArithmeticError`, `RuntimeError` or `ValueError`.
        is_upper_bound: no run spends more than it says. Of what is no bound the number can be computed, not claimed.
        is_tight: it is the truth but for discretisation.
        method: its name and source, for statements.
        packages: distributions that it computes with.
    """

    compute: Callable[[tuple[Event, ...], float], float]
    is_upper_bound: bool
    is_tight: bool
    method: str
    packages: tuple[str, ...]


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float:
    """Upper bound on the epsilon that `ledger` spends at `delta`, if its accountant computes one.

    Args:
        ledger: the draws of a run, all of one unit: epsilon is about that one.
        delta: in (0, 1); public, usually well below 1/N.
        accountant: "pld" (dp-accounting, or `privacy_loss` where that is finer; Doroshenko et al. 2022),
            "rdp" (dp-accounting, Mironov et al. 2019), "prv" (Opacus, Gopi et al. 2021), "autodp" (Wang et al. 2019),
            or another name of `ACCOUNTANTS`.

    Returns:
        Epsilon under add/remove adjacency; infinity when any release was un-noised, 0 for an empty ledger.

    Raises:
        ConfigError: unknown accountant, delta outside [`_LEAST_DELTA`, 1), or a run that the accountant cannot compute.
    """
    check(delta, accountant)
    spent = events(ledger)
    # Neither case is for a library: they divide by the noise, and have no word for a run that releases nothing.
    if any(noise == 0 for _, noise, _ in spent):
        return math.inf
    return _epsilon(spent, delta, accountant) if spent else 0.0


def events(ledger: Ledger) -> tuple[Event, ...]:
    """The distinct draws of `ledger` that release anything, in a fixed order, as accountants see them."""
    counts: dict[tuple[float, float], int] = {}
    for draw, count in ledger.counts().items():
        key = (draw.rate, draw.effective_noise)
        counts[key] = counts.get(key, 0) + count
    return tuple(sorted((rate, noise, count) for (rate, noise), count in counts.items() if noise < math.inf))


def check(delta: float, accountant: str) -> None:
    """Raise `ConfigError` for a delta or an accountant that cannot be used."""
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    if not _LEAST_DELTA <= delta < 1:
        raise ConfigError("delta", delta, f"expected a probability in (0, 1), at least {_LEAST_DELTA:g}")


def check_claim(delta: float, accountant: str) -> None:
    """As `check`, and for an accountant whose epsilon nobody can claim: it is no upper bound."""
    check(delta, accountant)
    if not ACCOUNTANTS[accountant].is_upper_bound:
        bounds = ", ".join(name for name, each in ACCOUNTANTS.items() if each.is_upper_bound)
        reason = f"its epsilon is no upper bound, so nothing can be claimed by it: expected one of {bounds}"
        raise ConfigError("accountant", accountant, reason)


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[Event, ...], delta: float, accountant: str) -> float:
    try:
        with quiet():
            return max(float(ACCOUNTANTS[accountant].compute(events, delta)), 0.0)
    except ConfigError:
        raise  # it is a ValueError too
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        raise ConfigError("accountant", accountant, f"fails on these draws ({error}); ask another one") from error


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
    """By a privacy loss distribution, and by Renyi divergences where that is less or all."""
    if math.fsum(rate * count for rate, _, count in events) <= delta:
        return 0.0  # the record is in any draw at all with no more than this probability
    if _is_ordinary(events, delta):
        from dp_accounting.pld.privacy_loss_distribution import identity

        # As `pld.PLDAccountant`, which makes the loss of a single draw anew each time: runs and searches share it.
        total = identity(privacy_loss.COARSEST)
        for rate, noise, count in events:
            total = total.compose(
                _loss(rate, noise).self_compose(count) if rate < 1 else _loss(rate, noise / math.sqrt(count))
            )
        return total.get_epsilon_for_delta(delta)
    bound = _epsilon(events, delta, "rdp")  # calibration has asked for it
    return min(bound, privacy_loss.epsilon(events, delta)) if bound > 0 and privacy_loss.reaches(events) else bound


@lru_cache(maxsize=64)
def _loss(rate: float, noise: float) -> Any:
    """The loss of a draw as dp-accounting's `from_gaussian_mechanism` makes it, bit for bit, without its loop."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap as connected
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    step, ways = privacy_loss.COARSEST, []
    if rate == 1:
        return pld.from_gaussian_mechanism(noise, value_discretization_interval=step)
    for way, sign in ((AdjacencyType.REMOVE, 1), (AdjacencyType.ADD, -1)):
        loss = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=way)
        ends: Any = loss.connect_dots_bounds()
        first, last = math.floor(ends.epsilon_lower / step), math.ceil(ends.epsilon_upper / step)
        divergence = _divergence(loss, rate, noise, np.arange(first, last + 1) * step, sign)
        ways.append(connected(step, first, last, divergence))
    return pld.PrivacyLossDistribution(*ways)


def _divergence(loss: Any, rate: float, noise: float, epsilon: np.ndarray, sign: int) -> np.ndarray:
    """Hockey-stick divergence at every `epsilon`, shape [points], of a record that is taken away (1) or added (-1)."""
    # As `loss.get_delta_for_epsilon`, which inverts the loss at one point after the other. The loss without sampling is
    # log(1 + (e^epsilon - 1)/q), by the same operations in the same order, as every stored epsilon has their bits.
    is_there = sign * epsilon > math.log1p(-rate)  # no outcome has a smaller loss
    at = epsilon[is_there]
    scaled = sign * at + np.log(1 / rate)
    whole = scaled + np.log1p(-np.exp(np.log(1 / rate - 1) - scaled))
    whole[at == 0] = np.log(1 / rate + (1 - 1 / rate))
    whole[np.isclose(sign * at, math.log(1 - rate), rtol=1e-9, atol=0)] = -math.inf
    x = -0.5 - sign * whole * noise**2 + (sign < 0)
    divergence = -np.expm1(epsilon) if sign > 0 else np.zeros_like(epsilon)
    divergence[is_there] = loss.mu_upper_cdf(x) - np.exp(at + loss.mu_lower_log_cdf(x))
    return np.clip(divergence, 0, 1)


def _is_ordinary(events: tuple[Event, ...], delta: float) -> bool:
    # Its interval has to be fine enough, its rounding errors, about 2^-52 of each draw, below 2^-14 of delta, and its
    # grids smaller than some million points.
    draws = sum(count for *_, count in events)
    is_fine = privacy_loss.interval(events) == privacy_loss.COARSEST
    is_short = privacy_loss.spread(events) <= 5 and min(noise for _, noise, _ in events) >= 0.3
    return is_fine and is_short and draws <= 2**38 * delta


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
    # Opacus makes its grid before it says how large it is: the same formulas tell it beforehand.
    draws, error = sum(count for *_, count in events), 0.01
    step = error / math.sqrt(draws * math.log(12_000 / delta) / 2)
    points = 2 * (_rdp(events, delta / 4000) + 3) / step
    if points > _PRV_POINTS:
        reason = f"these draws need {points:.1g} points of it, expected <= {_PRV_POINTS:,}"
        raise ConfigError("accountant", "prv", reason)
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, count) for rate, noise, count in events]
    return accountant.get_epsilon(delta, eps_error=error)


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


ACCOUNTANTS = {
    "pld": Accountant(
        _pld,
        is_upper_bound=True,
        is_tight=True,
        method="privacy loss distributions (dp-accounting; Doroshenko et al. 2022; where its grid is too coarse or its "
        "rounding too large, the smaller of dpopt's own distributions and Rényi differential privacy)",
        packages=("dp-accounting",),
    ),
    "rdp": Accountant(
        _rdp,
        is_upper_bound=True,
        is_tight=False,
        method="Rényi differential privacy (dp-accounting; Mironov et al. 2019)",
        packages=("dp-accounting",),
    ),
    "prv": Accountant(
        _prv,
        is_upper_bound=True,
        is_tight=True,
        method="privacy random variables (Opacus; Gopi et al. 2021)",
        packages=("opacus", "dp-accounting"),
    ),
    "autodp": Accountant(
        _autodp,
        is_upper_bound=True,
        is_tight=False,
        method="Rényi differential privacy (autodp; Wang et al. 2019)",
        packages=("autodp",),
    ),
}
"""By name. To add one is to add an entry: statements, checks and caches read it here."""
