"""A second opinion on every epsilon: from another library, by another method, and tight like the first.

`prv` (Opacus, after Gopi, Lee and Wutschitz, "Numerical composition of differential privacy", NeurIPS 2021) composes
the privacy loss by Fourier transforms of its density; `pld` (dp-accounting) rounds the loss itself to a grid, from the
safe side. They share no code. A tight bound sees both mistakes: a claim below it is too low to be true, and one by a
tight accountant that is above it is not what its ledger spends. Bounds by Renyi divergences (`rdp`, `autodp`) are up to
40 % above the tight ones on ledgers that occur here, so a claim by those is held to the first test alone.
"""

from __future__ import annotations

import math
from functools import lru_cache

from dpopt.privacy import accountants
from dpopt.privacy.accountants import Event
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import After, Composed, Selection, Simulated, repeated

TIGHT = ("pld", "prv")
"""Accountants whose bounds are the truth but for discretisation."""
ABSOLUTE, RELATIVE = 0.02, 0.002
"""Difference allowed between two tight accountants. `prv` adds its discretisation error of 0.01 to an epsilon that may
itself be wrong by as much; the rest is for the grid of `pld`, which is felt in runs of over 10^4 draws."""


def tight(ledger: Ledger, delta: float, accountant: str) -> float | None:
    """Epsilon by a tight accountant that is not `accountant`; None where it gives none, or nothing is spent."""
    return _tight(accountants.events(ledger), delta, "pld" if accountant == "prv" else "prv")


def disagrees(
    claimed: float, second: float | None, accountant: str, is_bound: bool = False, share: float = 1.0
) -> bool:
    """True if a claim lies further from a second opinion than the errors of both explain.

    Args:
        claimed: by `accountant`.
        second: of `tight` or `of_search`; with None nobody disagrees.
        accountant: of record.
        is_bound: the second opinion is a lower bound, above which a claim may lie.
        share: that both are divided by, and their errors with them (`share_of`).
    """
    if second is None:
        return False
    # A bound that is not tight may lie far above the truth, but no bound may lie below it.
    slack = ABSOLUTE / share + RELATIVE * second
    return claimed < second - slack or (accountant in TIGHT and not is_bound and claimed > second + slack)


def of_search(rule: Selection, ledger: Ledger, delta: float, accountant: str) -> float | None:
    """`tight` for a search whose runs leave `ledger`: what they spend together, or a lower bound on that."""
    match rule:
        case Composed(runs):
            return tight(repeated(ledger, runs), delta, accountant)
        case After(spent):
            return tight(spent + ledger, delta, accountant)
        case _:
            # The best of a random number of runs has no accountant but Renyi divergences. It costs at least one run.
            single = tight(ledger, delta, accountant)
            return None if single is None else single / share_of(rule)


def share_of(rule: Selection) -> float:
    """The part of its search's epsilon that a rule takes a single run to spend; 1 where the runs are charged."""
    return rule.share if isinstance(rule, Simulated) else 1.0


@lru_cache(maxsize=4096)  # the seeds of a row leave one ledger, and a tight bound takes seconds
def _tight(spent: tuple[Event, ...], delta: float, accountant: str) -> float | None:
    ledger = Ledger()
    for rate, noise, count in spent:
        ledger.append(Draw(rate, (noise,)), count)
    if not spent or any(noise == 0 for _, noise, _ in spent):
        return None
    try:
        second = accountants.epsilon(ledger, delta, accountant)
    except (ArithmeticError, ValueError, RuntimeError, MemoryError):  # numerically out of its reach
        return None
    return second if math.isfinite(second) else None
