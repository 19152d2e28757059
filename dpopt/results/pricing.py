"""What a search spends, recomputed from the ledgers that its runs left."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from dpopt.privacy import remembered
from dpopt.privacy.accountants import epsilon, events
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import BestOf, Selection, selection_rule, selection_spec
from dpopt.privacy.solving import Charge
from dpopt.store.provenance import code, cpu
from dpopt.store.runs import Store

LIBRARIES = ("dp-accounting", "opacus", "autodp", "numpy", "scipy")
"""What accountants compute with."""


class Price(NamedTuple):
    """What a search spends on the records that are trained on.

    Attributes:
        with_tuning: all of it. The best of a random number of runs costs what its rule says. A number that is not
            random hides nothing: the search costs what all of its runs do, whatever a simulation says.
        composed: all of its runs, one after the other.
    """

    with_tuning: float
    composed: float


def spent(ledger: Ledger, delta: float, accountant: str, rule: Selection | None = None) -> float:
    """What a run spends that leaves `ledger`, or by a rule its search, for readers: computed once on a machine.

    The value is kept by all that decides its bits. `dpopt verify` takes none that was kept.
    """
    key = [events(ledger), delta, accountant, rule and selection_spec(rule), _arithmetic()]
    path = remembered.place("epsilon", key)
    known = remembered.read(path)
    if known is None:
        known = {"epsilon": (rule.epsilon if rule else epsilon)(ledger, delta, accountant)}
        remembered.write(path, known)
    return known["epsilon"]


@cache
def _arithmetic() -> list[Any]:
    """What decides the bits of an epsilon beside its ledger: code, libraries, Python, system and CPU."""
    return [code(), *map(version, LIBRARIES), platform.python_version(), platform.platform(), cpu()]


def epsilon_with_tuning(store: Store, selected: Mapping[str, Any]) -> float:
    """What the search behind a row of `select` spends in all."""
    return price(store, selected).with_tuning


def price(store: Store, selected: Mapping[str, Any], charge: Charge = spent) -> Price:
    """What the search behind a row of `select` spends; `charge` as in `composed`."""
    rule = selection_rule(json.loads(selected["selection"])) if selected["selection"] else None
    total = composed(store, selected["run_ids"], selected["delta"], selected["accountant"], charge)
    return Price(float(selected["epsilon_total"]) if isinstance(rule, BestOf) else total, total)


def composed(store: Store, run_ids: Sequence[str], delta: float, accountant: str, charge: Charge = spent) -> float:
    """What runs cost one after the other, each on the same data.

    Runs with the same seed and number within a search (`search` of a cell) share their draws, as where a suite was run
    again with other values of a grid: what they cost is more than if their draws were independent. So their k-th draws
    are charged as one, which releases what all of them do, at the largest of their rates. That is an upper bound: to be
    in a smaller draw is to be in the larger one and to win a coin that depends on no data, and a release that is left
    to a coin is a degraded one. What is left of the longest run is charged alone. A run that is named again stands for
    a further one with draws of its own, see `select`.

    Args:
        store: that holds the runs.
        run_ids: of them.
        delta, accountant: see `accountants.epsilon`.
        charge: what the ledger of all of them costs.
    """
    ledgers, named = dict[tuple[Any, ...], list[Ledger]](), Counter[str]()
    for run_id in run_ids:
        cell, again = store.record(run_id)["cell"], named[run_id]
        draws = (run_id, again) if again else (cell["seed"], cell.get("search", 0))
        ledgers.setdefault(draws, []).append(store.ledger(run_id))
        named[run_id] += 1
    counts, total = Counter[Draw](), Ledger()
    for alike in ledgers.values():
        counts.update(alike[0].counts() if len(alike) == 1 else _merged(alike))
    for draw, count in counts.items():
        total.append(draw, count)
    return charge(total, delta, accountant)


def _merged(ledgers: Sequence[Ledger]) -> Counter[Draw]:
    """How often each draw occurs where the k-th draws of all ledgers are one; see `composed`."""
    merged = Counter[Draw]()
    for draws, same in groupby(zip_longest(*ledgers)):
        there = [draw for draw in draws if draw is not None]
        noises = tuple(noise for draw in there for noise in draw.noises)
        merged[Draw(max(draw.rate for draw in there), noises)] += sum(1 for _ in same)
    return merged
