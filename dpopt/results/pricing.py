"""The price of a search, recomputed from the ledgers that its runs left."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from itertools import groupby, zip_longest
from typing import Any

from dpopt.privacy import caching
from dpopt.privacy.accountants import ACCOUNTANTS, epsilon, events, quiet
from dpopt.privacy.ledger import Draw, Ledger, Unit
from dpopt.privacy.selection import BestOf, Selection, selection_rule, selection_spec
from dpopt.store.provenance import code, cpu
from dpopt.store.runs import UNREADABLE, Store

ROUNDING = 1 + 1e-6
"""A budget may be overdrawn by this factor: sums of seconds and solved epsilons are not exact."""
_READ = dict[str, float]()
"""What `spent` has computed or read in this process, outside of `computed_anew`."""
_values: ContextVar[dict[str, float]] = ContextVar("values", default=_READ)


def spent(ledger: Ledger, delta: float, accountant: str, rule: Selection | None = None) -> float:
    """Epsilon of a run that leaves `ledger`, or by a rule of its search, for readers: computed once on a machine."""
    key, values = _key(ledger, delta, accountant, rule), _values.get()
    if key not in values:
        path = caching.place("epsilon", key)
        kept = caching.read(path) if values is _READ else None
        if kept is None:
            kept = {"epsilon": (rule.epsilon if rule else epsilon)(ledger, delta, accountant)}
            if values is _READ:
                caching.write(path, kept)
        values[key] = kept["epsilon"]
    return values[key]


def _key(ledger: Ledger, delta: float, accountant: str, rule: Selection | None = None) -> str:
    # It has all that decides the bits of the value; `dpopt verify` takes none that was kept.
    return json.dumps([events(ledger), delta, accountant, rule and selection_spec(rule), _arithmetic()])


def ahead(charges: Iterable[Any]) -> None:
    """Compute what `spent` will be asked for, by its arguments, on all cores."""
    distinct = {_key(*charge): charge for charge in charges}

    def compute(charge: Any) -> None:
        with suppress(*UNREADABLE):  # raised again where it is asked for
            spent(*charge)

    # Threads are enough: most of an accountant's time goes into long operations on arrays.
    cores = min(8, os.cpu_count() or 1)
    with quiet(), ThreadPoolExecutor(cores, initializer=_values.set, initargs=(_values.get(),)) as pool:
        list(pool.map(compute, distinct.values()))


@contextmanager
def computed_anew() -> Iterator[None]:
    """Inside, `spent` takes no value that was kept on this machine, and computes each once: runs have equal ledgers."""
    token = _values.set({})
    try:
        yield
    finally:
        _values.reset(token)


@cache
def _arithmetic() -> list[Any]:
    libraries = sorted({"numpy", "scipy", *(name for each in ACCOUNTANTS.values() for name in each.packages)})
    return [code(), *map(version, libraries), platform.python_version(), platform.platform(), cpu()]


def price(store: Store, selected: Mapping[str, Any]) -> tuple[float, float]:
    """Epsilon of the whole search behind a row of `choosing.select`, and of all of its runs one after the other.

    The best of a random number of runs costs what its rule says. A number that is not random hides nothing: the search
    costs what all of its runs do, whatever a simulation says.
    """
    rule = selection_rule(json.loads(selected["selection"])) if selected["selection"] else None
    together = epsilon_of_runs(store, selected["charges"], selected["delta"], selected["accountant"])
    return (float(selected["epsilon_total"]) if isinstance(rule, BestOf) else together), together


def epsilon_of_runs(store: Store, charges: Mapping[str, int], delta: float, accountant: str) -> float:
    """Epsilon of the runs of `composed`."""
    return spent(composed(store, charges), delta, accountant)


def composed(store: Store, charges: Mapping[str, int]) -> Ledger:
    """The ledger of several runs on the same records, one after the other, as draws in no order; an upper bound.

    Runs with the same seed and number within a search (`search` of a cell) share their sampling, as where a suite was
    run again with other values of a grid. They cost more than runs with draws of their own, and are composed draw by
    draw: the k-th draws of all of them are one, which releases what each of them does, at the largest of their rates.
    The rest of the longest run is charged alone.

    Args:
        charges: run id -> number of runs with its ledger; all but the first have draws of their own.
    """
    sharing, counts = dict[tuple[Any, ...], list[Ledger]](), Counter[Draw]()
    for run_id, times in charges.items():
        cell, ledger = store.record(run_id)["cell"], store.ledger(run_id)
        sharing.setdefault((cell["seed"], cell.get("search", 0)), []).append(ledger)
        for draw, count in ledger.counts().items() if times > 1 else ():
            counts[draw] += (times - 1) * count
    for ledgers in sharing.values():
        counts.update(ledgers[0].counts() if len(ledgers) == 1 else _merged(ledgers))
    total = Ledger(unit=Unit.of_all([each.unit for ledgers in sharing.values() for each in ledgers]))
    for draw, count in counts.items():
        total.append(draw, count)
    return total


def _merged(ledgers: Sequence[Ledger]) -> Counter[Draw]:
    # Sampling at q1 < q2 is sampling at q2 followed by a coin that no data decide, which only weakens a release.
    merged = Counter[Draw]()
    for draws, same in groupby(zip_longest(*ledgers)):
        there = [draw for draw in draws if draw is not None]
        noises = tuple(noise for draw in there for noise in draw.noises)
        merged[Draw(max(draw.rate for draw in there), noises)] += sum(1 for _ in same)
    return merged
