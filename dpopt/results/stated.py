"""What the entry of a suite says beside its cell, held to what follows from the cell and from the runs of its search.

A part of a suite is named by the hash of its bytes, which shows damage: whoever writes another part can give it its
name. Nothing follows of a label, of why a row's constants are what they are (`self`, `public` or `fixed`), whether the
runs of a search without a rule are a grid or drawn from one, and of `chosen_on`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpopt.cells import identity
from dpopt.store.manifests import searches

WIDENED = 10**6
"""Numbers from here on are those of runs beyond the end of a grid: (1 + step) * WIDENED + number of its first run."""
_CONSTANT, _SEARCHED, _SCALED = ("self", "public", "fixed"), ("grid", "random"), ("linear_scaling",)
_TUNINGS = {"": _CONSTANT, "composed": _SEARCHED, "simulated": _SEARCHED, "part": _SCALED, "after": _SCALED}
"""Rule of a cell's search -> the tunings that it is of; all others are private, and without one a point was tuned."""
_STAGES = {"part": "search", "after": "final"}
Misstated = tuple[str, str, Any, Any]
"""Run id, what is said of it, how, and what follows in its place."""


def misstated(entry: Mapping[str, Any]) -> Iterator[Misstated]:
    """What an entry says of its cell that the cell does not."""
    cell, run_id, tuned = entry["cell"], entry["run_id"], entry["tuned"]
    selection = cell.get("selection") or {}
    rule = selection.get("rule", "")
    tunings = _SEARCHED if tuned and not rule else _TUNINGS.get(rule, ("private",))
    if entry["tuning"] not in tunings:
        yield run_id, "tuning", entry["tuning"], " or ".join(tunings)
    follows = {
        "stage": (entry.get("stage", ""), _STAGES.get(rule, "")),
        "target": (entry.get("target", cell["epsilon"]), selection.get("total", cell["epsilon"])),
        "widened": (entry.get("widened", False), cell.get("search", 0) >= WIDENED),
        **{f"tuned {key}": (value, cell["optimizer"].get(key, value)) for key, value in tuned.items()},
    }
    for what, (claimed, result) in follows.items():
        if _plain(claimed) != _plain(result):
            yield run_id, what, claimed, result


def _plain(value: Any) -> Any:
    """A value of a suite's file or of a cell: a text that reads as a number is one, and a clip rule is its name."""
    value = value.get("rule") if isinstance(value, Mapping) else value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def misstated_searches(entries: Iterable[Mapping[str, Any]], name: Callable[..., str]) -> Iterator[Misstated]:
    """What the entries of a suite say of their searches that the runs of these do not.

    `name` gives the id of a search from the run ids of its grid, in the order of their numbers.
    """
    members = defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for entry in entries:
        for search_id in searches(entry):
            members[entry["label"], search_id].append(entry)
    for (label, search_id), runs in members.items():
        grid = [entry for entry in runs if not entry.get("widened") and entry.get("stage") != "final"]
        ordered = sorted(grid, key=lambda entry: entry["cell"].get("search", 0))
        anew, first = name(*(entry["run_id"] for entry in ordered)), runs[0]["run_id"]
        if not search_id:  # planned by a version that told no searches apart
            continue
        if search_id != anew:  # all else is of runs that are not one search
            yield first, f"search of {label}", search_id, anew
            continue
        if len({identity({**entry["cell"]["optimizer"], **dict.fromkeys(entry["tuned"])}) for entry in runs}) > 1:
            yield first, f"tuned of all runs of a search of {label}", "all that differs", "less"
        if len(tunings := {entry["tuning"] for entry in runs}) > 1:
            yield first, f"tuning of all runs of a search of {label}", "one", sorted(tunings)
        selection, widen = runs[0]["cell"].get("selection") or {}, max(searches(entry)[search_id] for entry in runs)
        if selection.get("rule") == "composed" and selection["runs"] != len(grid) + widen:
            yield first, f"widen of a search of {label}", widen, selection["runs"] - len(grid)
