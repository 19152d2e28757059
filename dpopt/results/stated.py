"""What the entry of a suite says beside its cell, held to what follows from the cell and from the runs of its search.

A part of a suite is named by the hash of its bytes, which shows damage: whoever writes another part can give it its
name. From no cell follow: a label, which of `self`, `public` and `fixed` a row without a search is, which of `grid` and
`random` a search is, `chosen_on`, `gradients_per_draw`, and the `widen` of a search without a rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpopt.cells import identity
from dpopt.store.manifests import searches

_CONSTANT, _SEARCHED, _SCALED = ("self", "public", "fixed"), ("grid", "random"), ("linear_scaling",)
_TUNINGS = {"": _CONSTANT, "composed": _SEARCHED, "simulated": _SEARCHED, "part": _SCALED, "after": _SCALED}
"""Rule of a cell's search -> the tunings that it is of; all others are private, and without one a point was tuned."""
_STAGES = {"part": "search", "after": "final"}
Misstated = tuple[str, str, Any, Any]
"""Run id, what is said of it, how, and what follows in its place."""


def misstated(entry: Mapping[str, Any]) -> Iterator[Misstated]:
    """What an entry says of its cell that the cell does not."""
    cell, tuned, optimizer = entry["cell"], entry["tuned"], entry["cell"]["optimizer"]
    selection = cell.get("selection") or {}
    rule = selection.get("rule", "")
    tunings = _SEARCHED if tuned and not rule else _TUNINGS.get(rule, ("private",))
    follows = {
        "tuning": (entry["tuning"], entry["tuning"] if entry["tuning"] in tunings else " or ".join(tunings)),
        "stage": (entry.get("stage", ""), _STAGES.get(rule, "")),
        "target": (entry.get("target", cell["epsilon"]), selection.get("total", cell["epsilon"])),
        **{f"tuned {key}": (value, optimizer.get(key, value)) for key, value in tuned.items()},
    }
    for what, (claimed, result) in follows.items():
        if _plain(claimed) != _plain(result):
            yield entry["run_id"], what, claimed, result


def misstated_searches(entries: Iterable[Mapping[str, Any]], name: Callable[..., str]) -> Iterator[Misstated]:
    """What the entries of a suite say of their searches that the runs of these do not.

    `name` gives the id of a search from the run ids of its grid, in the order of their numbers.
    """
    members = defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for entry in entries:
        for search_id in searches(entry):
            members[entry["label"], search_id].append(entry)
    for (label, search_id), runs in members.items():
        if not search_id:  # planned by a version that told no searches apart
            continue
        grid = [entry for entry in runs if not entry.get("widened") and entry.get("stage") != "final"]
        ordered = sorted(grid, key=lambda entry: entry["cell"].get("search", 0))
        anew, selection = name(*(entry["run_id"] for entry in ordered)), runs[0]["cell"].get("selection") or {}
        rest = {identity({**entry["cell"]["optimizer"], **dict.fromkeys(entry["tuned"])}) for entry in runs}
        widen = max(searches(entry)[search_id] for entry in runs)
        first, of_search = runs[0]["run_id"], f"of a search of {label}"
        if search_id != anew:
            yield first, f"runs {of_search}", search_id, anew
        elif len(rest) > 1:
            yield first, f"tuned {of_search}", "all that differs", "less"
        elif selection.get("rule") == "composed" and selection["runs"] != len(grid) + widen:
            yield first, f"widen {of_search}", widen, selection["runs"] - len(grid)


def _plain(value: Any) -> Any:
    """A value of a suite's file or of a cell: a text that reads as a number is one, and a clip rule is its name."""
    value = value.get("rule") if isinstance(value, Mapping) else value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
