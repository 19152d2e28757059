"""Departures of a suite from the protocol by which methods are compared (docs/guide/protocol.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from dpopt import registry
from dpopt.suites.searches import Planned
from dpopt.suites.settings import SEARCHED

SEEDS = 5
"""The fewest replicates from which a difference can be shown."""
BASELINES = {"dp_sgd": "DP-SGD", "dp_adam": "DP-Adam"}
"""The methods with whose searches every other one is compared."""


def departures(planned: Iterable[Planned]) -> list[str]:
    """One line for each rule that a plan does not keep, with the rows that it is about; none for a plan that does.

    Nothing here is an error: a suite may study what the protocol holds still, or cost too much for five seeds.
    """
    rows: dict[str, list[Planned]] = defaultdict(list)
    for entry in planned:
        rows[entry.label].append(entry)
    return [*_seeds(rows), *_clipping(rows), *_budgets(rows), *_charges(rows), *_baselines(rows)]


Rows = dict[str, list[Planned]]


def _seeds(rows: Rows) -> Iterator[str]:
    few: dict[int, list[str]] = defaultdict(list)
    for label, entries in rows.items():
        few[len({entry.cell.seed for entry in entries})].append(label)
    for seeds, labels in sorted(few.items()):
        if seeds < SEEDS:
            number = "1 seed" if seeds == 1 else f"{seeds} seeds"
            yield f"{number}, expected {SEEDS} (10 where a cell takes seconds): {_named(labels, rows)}"


def _clipping(rows: Rows) -> Iterator[str]:
    """Rules differ, among methods that are not about clipping."""
    rules: dict[str, list[str]] = defaultdict(list)
    for label, entries in rows.items():
        optimizer = entries[0].cell.optimizer
        if "clip" in optimizer and registry.entry("optimizer", optimizer["name"]).family != "clipping":
            rules[optimizer["clip"]["rule"]].append(label)
    if len(rules) > 1:
        yield "clip rules differ: " + "; ".join(f"{rule}: {', '.join(labels)}" for rule, labels in rules.items())


def _budgets(rows: Rows) -> Iterator[str]:
    """Searches differ in the number of their runs."""
    sizes: dict[int, list[str]] = defaultdict(list)
    for label, entries in rows.items():
        if entries[0].tuning in SEARCHED:
            sizes[_largest_search(entries)].append(label)
    if len(sizes) > 1:
        listed = "; ".join(f"{size}: {', '.join(labels)}" for size, labels in sorted(sizes.items()))
        yield f"searches differ in their runs: {listed}"


def _largest_search(entries: list[Planned]) -> int:
    """Runs of a seed at one epsilon on one workload; whoever compares several B, C or epochs has searched over them.

    A grid that widens counts with all runs that it may make.
    """
    places = Counter(entry.search.replicate for entry in entries if not entry.is_widened)
    for search, further in {entry.search: entry.widen for entry in entries}.items():
        places[search.replicate] += further
    return max(places.values())


def _charges(rows: Rows) -> Iterator[str]:
    first = {label: entries[0] for label, entries in rows.items()}
    is_private = {label: any(entry.cell.epsilon < math.inf for entry in entries) for label, entries in rows.items()}
    free = [label for label, entry in first.items() if entry.tuning in ("grid", "random") and is_private[label]]
    free = [label for label in free if _is_free(first[label].cell.selection)]
    if free:
        yield f"searches that are not charged, for reference only: {', '.join(free)}"
    by_hand = [label for label, entry in first.items() if entry.tuning == "fixed" and is_private[label]]
    if by_hand:
        yield f"set by hand, and how that was found is not charged: {', '.join(by_hand)}"


def _is_free(selection: dict[str, Any] | None) -> bool:
    """True if a rule pays for nothing: there is none, or it only simulates what a paper states."""
    return selection is None or selection["rule"] == "simulated"


def _baselines(rows: Rows) -> Iterator[str]:
    searched = {_steps(entries[0]) for entries in rows.values() if entries[0].tuning in SEARCHED}
    for name, method in BASELINES.items():
        if name not in searched:
            yield f"no row searches {method}"


def _steps(entry: Planned) -> str:
    """The name of the optimizer, or of what a schedule is laid around."""
    optimizer = entry.cell.optimizer
    return optimizer["base"]["name"] if optimizer["name"] == "scheduled" else optimizer["name"]


def _named(labels: list[str], rows: Rows) -> str:
    return "all rows" if len(labels) == len(rows) else ", ".join(labels)
