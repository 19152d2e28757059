"""Departures of a suite from the protocol by which methods are compared (docs/guide/protocol.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from dpopt import registry
from dpopt.suites.searches import SEARCHED, Planned

_SEEDS = 5
"""The fewest replicates from which a difference can be shown."""


def departures(planned: Iterable[Planned]) -> list[str]:
    """One line for each rule that a plan does not keep, with the rows that it is about; none for a plan that does.

    Nothing here is an error: a suite may study what the protocol holds still, or cost too much for five seeds.
    """
    rows: dict[str, list[Planned]] = defaultdict(list)
    for entry in planned:
        rows[entry.label].append(entry)
    first, lines = {label: entries[0] for label, entries in rows.items()}, []

    few: dict[int, list[str]] = defaultdict(list)
    for label, entries in rows.items():
        few[len({entry.cell.seed for entry in entries})].append(label)
    for seeds, labels in sorted(few.items()):
        if seeds < _SEEDS:
            number = "1 seed" if seeds == 1 else f"{seeds} seeds"
            named = "all rows" if len(labels) == len(rows) else ", ".join(labels)
            lines.append(f"{number}, expected {_SEEDS} (10 where a cell takes seconds): {named}")

    rules: dict[str, list[str]] = defaultdict(list)
    for label, entry in first.items():
        optimizer = entry.cell.optimizer
        # A method that is about clipping cannot have the others' rule.
        if "clip" in optimizer and registry.entry("optimizer", optimizer["name"]).family != "clipping":
            rules[optimizer["clip"]["rule"]].append(label)
    if len(rules) > 1:
        lines.append("clip rules differ: " + "; ".join(f"{rule}: {', '.join(each)}" for rule, each in rules.items()))

    sizes: dict[int, list[str]] = defaultdict(list)
    for label, entry in first.items():
        if entry.tuning in SEARCHED:
            sizes[_largest_search(rows[label])].append(label)
    if len(sizes) > 1:
        listed = "; ".join(f"{size}: {', '.join(labels)}" for size, labels in sorted(sizes.items()))
        lines.append(f"searches differ in their runs: {listed}")

    private = [label for label, entries in rows.items() if any(entry.cell.epsilon < math.inf for entry in entries)]
    searching = {label: first[label].cell.selection for label in private if first[label].tuning in ("grid", "random")}
    # A rule that only simulates what a paper states pays for nothing.
    free = [label for label, rule in searching.items() if rule is None or rule["rule"] == "simulated"]
    if free:
        remedy = "`selection: composed` charges them"
        lines.append(f"searches that are not charged, for reference only ({remedy}): {', '.join(free)}")
    if by_hand := [label for label in private if first[label].tuning == "fixed"]:
        lines.append(f"set by hand, and how that was found is not charged: {', '.join(by_hand)}")

    optimizers = [entry.cell.optimizer for entry in first.values() if entry.tuning in SEARCHED]
    # Of a schedule the method that it is laid around counts.
    searched = {each["base"]["name"] if each["name"] == "scheduled" else each["name"] for each in optimizers}
    baselines = {"dp_sgd": "DP-SGD", "dp_adam": "DP-Adam"}  # with whose searches every other one is compared
    return lines + [f"no row searches {method}" for name, method in baselines.items() if name not in searched]


def _largest_search(entries: list[Planned]) -> int:
    """Runs of a seed at one epsilon on one workload; whoever compares several B, C or epochs has searched over them.

    A grid that widens counts with all runs that it may make.
    """
    replicates = Counter(entry.search[:3] for entry in entries if not entry.is_widened)
    for search, further in {entry.search: entry.widen for entry in entries}.items():
        replicates[search[:3]] += further
    return max(replicates.values())
