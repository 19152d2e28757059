"""Searches: the number of their runs, and the cost of releasing the best of them.

Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy", ICLR 2022, after Liu and Talwar, "Private
selection from private candidates", STOC 2019. Releasing the best of a fixed number of runs costs as much as releasing
all of them; a random number hides how often the best candidate had a chance to win.

A rule turns the ledger of one run into the epsilon of the whole procedure; `calibrate(..., selection=rule)` turns that
around and finds the noise of a single run with which the procedure ends at the target. What scores the runs must not
look at the records that they train on: it looks at others, and is charged for those by itself (`score_noise`). As every
record is either trained on or looked at, the procedure as a whole costs the larger of the two, not their sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import scipy  # its modules are imported when they are first used: they take half a second

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Checked, Count, Fraction
from dpopt.privacy import accountants
from dpopt.privacy.accountants import Event
from dpopt.privacy.ledger import Ledger

Number = Literal["logarithmic", "geometric", "poisson"]
"""The distribution of the number of runs."""
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shape of the truncated negative binomial distribution; Poisson is its limit."""
_MOST_RUNS = 10_000
"""The largest mean number of runs."""


class Selection:
    """A rule for the runs of one search."""

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        """The epsilon of the whole procedure on the records that are trained on, where a run leaves `ledger`."""
        raise NotImplementedError

    def scores(self, epsilon: float) -> tuple[Selection, float] | None:
        """Rule and epsilon by which a procedure of cost `epsilon` charges scores; None where none is released."""
        return self, epsilon


@dataclass(frozen=True)
class Composed(Checked, Selection):
    """At most so many runs, each of which might as well be released: their ledgers one after the other.

    A run may follow from what those before it have released, as long as all leave the same ledger.
    """

    runs: Count

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        return accountants.epsilon(repeated(ledger, self.runs), delta, accountant)


@dataclass(frozen=True)
class BestOf(Checked, Selection):
    """The best of a random number of runs, each of a candidate drawn at random (Papernot and Steinke 2022, Theorems 2
    and 6); geometric is Liu and Talwar's random stopping (their Algorithm 2). Renyi divergences price it, whatever the
    accountant.

    Args:
        number: distribution of the number of runs.
        runs: its mean. A Poisson number may be 0: then the untrained model is released.
    """

    number: Number
    runs: float

    def __post_init__(self) -> None:
        if self.number not in SHAPES:
            raise unknown("selection.number", self.number, get_args(Number))
        if not 1 <= self.runs <= _MOST_RUNS:
            raise ConfigError("selection.runs", self.runs, f"expected a mean number of runs from 1 to {_MOST_RUNS:,}")

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        accountants.check(delta, "rdp")
        spent = accountants.events(ledger)
        # Renyi divergences of a release without noise are infinite, and dp-accounting refuses them.
        if any(noise == 0 for _, noise, _ in spent):
            return math.inf
        return _renyi(spent, delta, self.runs, SHAPES[self.number]) if spent else 0.0

    def draw(self, seed: int) -> int:
        """A number of runs, a function of `seed`."""
        # One uniform number, so that a search gives the same number of runs when it is made again.
        uniform, least = np.random.default_rng(seed).random(), 0 if self.number == "poisson" else 1
        return least + int(np.searchsorted(distribution(self.number, self.runs), uniform, side="right"))


@dataclass(frozen=True)
class Simulated(Checked, Selection):
    """DP-hyper as "Towards hyperparameter-free optimization with differential privacy" (section 5) simulates it: a run
    spends `share` of the budget, and a search that is never made is taken to have spent the rest. Not a guarantee: the
    search that is made in its place is free here, and costs what `Composed` says.
    """

    share: Fraction = 0.85

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        return accountants.epsilon(ledger, delta, accountant) / self.share

    def scores(self, epsilon: float) -> None:
        return None


@dataclass(frozen=True)
class Part(Checked, Selection):
    """One of `runs` runs of a search in several parts, which is charged where the search ends (`After`).

    Args:
        runs: whose scores are released, in all parts together.
        total: epsilon of the whole search, which the scores may spend on the records that they look at.
    """

    runs: Count
    total: Bound

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        return accountants.epsilon(ledger, delta, accountant)

    def scores(self, epsilon: float) -> tuple[Selection, float]:
        return Composed(self.runs), self.total


@dataclass(frozen=True)
class After(Selection):
    """The last run of a search whose other runs left the ledgers `spent`, one after the other: all are charged."""

    spent: Ledger

    def epsilon(self, ledger: Ledger, delta: float, accountant: str = "pld") -> float:
        return accountants.epsilon(self.spent + ledger, delta, accountant)

    def scores(self, epsilon: float) -> None:
        return None


RULES: dict[str, type[Any]] = {"composed": Composed, "simulated": Simulated, "part": Part, "after": After}
"""By name; the names of `Number` are `BestOf`'s."""


def selection_rule(value: Any, where: str = "selection") -> Selection:
    """A rule from plain data, {rule: name, ...} with its fields; ConfigError names what cannot be used."""
    if not isinstance(value, Mapping) or "rule" not in value:
        raise ConfigError(where, value, f"expected {{rule: one of {', '.join([*SHAPES, *RULES])}, ...}}")
    arguments = dict(value)
    name = arguments.pop("rule")
    if name not in SHAPES and name not in RULES:
        raise unknown(f"{where}.rule", name, [*SHAPES, *RULES])
    arguments |= {"number": name} if name in SHAPES else {}
    kind = RULES.get(name, BestOf)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in arguments:
            raise ConfigError(f"{where}.{field.name}", None, f"the rule {name} needs it")
    return fields.build(kind, arguments, where, {Ledger: lambda text, _: Ledger.from_json(text)})


def selection_spec(rule: Selection) -> dict[str, Any]:
    """The plain data that `selection_rule` makes `rule` from."""
    if isinstance(rule, BestOf):
        return {"rule": rule.number, "runs": rule.runs}
    if isinstance(rule, After):
        return {"rule": "after", "spent": rule.spent.to_json()}
    name = next(name for name, kind in RULES.items() if type(rule) is kind)
    return {"rule": name, **dataclasses.asdict(rule)}  # type: ignore[call-overload]


def repeated(ledger: Ledger, runs: int) -> Ledger:
    """The draws of `runs` runs that each leave `ledger`, in an order that no accountant minds."""
    total = Ledger(unit=ledger.unit)
    for draw, count in ledger.counts().items():
        total.append(draw, count * runs)
    return total


@lru_cache(maxsize=4096)
def _renyi(spent: tuple[Event, ...], delta: float, runs: float, shape: float) -> float:
    from dp_accounting import dp_event, rdp

    # dp-accounting has both theorems of Papernot and Steinke as one event, with the shape of the distribution.
    with accountants.quiet():  # at some orders a Poisson number of runs has no bound
        event = dp_event.RepeatAndSelectDpEvent(accountants.dp_event(spent), runs, shape)
        return float(rdp.RdpAccountant().compose(event).get_epsilon(delta))


@lru_cache(maxsize=64)
def distribution(number: Number, runs: float) -> np.ndarray:
    """Cumulative probabilities of 0, 1, ... runs where Poisson, else of 1, 2, ..., up to 1 - 1e-15; mean `runs`."""
    if number == "poisson":
        k = np.arange(int(runs + 40 * math.sqrt(runs) + 40))
        return np.cumsum(np.exp(scipy.special.xlogy(k, runs) - runs - scipy.special.gammaln(k + 1)))
    # Both others stop after each run with probability gamma, in (0, 1], which their mean decides.
    if number == "geometric" or runs == 1:
        stop = 1 / runs
    else:  # (1/gamma - 1) / log(1/gamma) is the logarithmic mean
        root = scipy.optimize.root_scalar(
            lambda log: math.expm1(-log) / -log - runs, bracket=(-50.0, -1e-9), xtol=1e-14
        )
        stop = math.exp(root.root)
    k = np.arange(1, int(-40 / math.log1p(-stop)) + 2 if stop < 1 else 2)
    if number == "geometric":
        return 1 - (1 - stop) ** k
    return np.cumsum((1 - stop) ** k / k) / -math.log(stop) if stop < 1 else np.ones(1)
