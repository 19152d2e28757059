"""What a suite says of its cells beside them, held to what follows from these and from the runs of their search.

A part of a suite is named by the hash of its bytes, which shows damage: whoever writes another part can give it its
name. From no cell follow: a label, which of `self`, `public` and `fixed` a row without a search is, which of `grid` and
`random` a search is, `chosen_on`, `gradients_per_draw`, and the `widen` of a search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from dpopt.cells import identity
from dpopt.results.verify.claims import Finding
from dpopt.store.manifests import searches

_Claim = tuple[str, Any, Any]
"""What is said of, how, and what follows."""
_SEARCHED = ("grid", "random")
_TUNINGS = {
    None: ("self", "public", "fixed"),
    "uncharged": _SEARCHED,
    "composed": _SEARCHED,
    "simulated": _SEARCHED,
    "part": ("linear_scaling",),
    "after": ("linear_scaling",),
}
"""Rule of a cell's search -> the tunings that it is of; all others are private. A point without a rule is uncharged."""


def misstated(suite: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """What the entries of a suite say that their cells, and the runs of their searches, do not."""
    searched = defaultdict[Any, list[Any]](list)
    for entry in entries:
        for search_id in filter(None, searches(entry)):  # older versions told no searches apart
            searched[entry["label"], search_id].append(entry)
    of_cells = ((entry["run_id"], _of_cell(entry)) for entry in entries)
    of_searches = ((label, _of_search(search_id, runs)) for (label, search_id), runs in searched.items())
    for place, claims in chain(of_cells, of_searches):
        for what, claimed, result in claims:
            if claimed != result:
                yield Finding(f"suite {suite}, {place}", what, claimed, result)


def _of_cell(entry: Mapping[str, Any]) -> Iterator[_Claim]:
    """What is said of a cell, and what follows from it."""
    cell, tuned, tuning = entry["cell"], entry["tuned"], entry["tuning"]
    selection = cell.get("selection", {})
    rule = selection.get("rule", "uncharged" if tuned else None)
    tunings = _TUNINGS.get(rule, ("private",))
    yield "tuning", tuning, tuning if tuning in tunings else " or ".join(tunings)
    yield "stage", entry.get("stage", ""), {"part": "search", "after": "final"}.get(rule, "")
    epsilon = cell["epsilon"]
    yield "target", float(entry.get("target", epsilon)), float(selection.get("total", epsilon))
    for key, value in tuned.items():
        yield f"tuned {key}", _plain(value), _plain(cell["optimizer"].get(key, value))


def _of_search(search_id: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[_Claim]:
    """What is said of a search, and what follows from its runs."""
    from dpopt.privacy.sampling import derive  # where torch is; nothing else here needs it

    grid = [entry for entry in runs if not entry.get("widened") and entry.get("stage") != "final"]
    grid.sort(key=lambda entry: entry["cell"].get("search", 0))
    yield "search of these runs", search_id, f"{derive('search', *(entry['run_id'] for entry in grid)):032x}"
    rest = {identity(entry["cell"]["optimizer"] | dict.fromkeys(entry["tuned"])) for entry in runs}
    yield "optimizers but for what is tuned", 1, len(rest)


def _plain(value: Any) -> Any:
    """A value of a suite's file or of a cell: a text that reads as a number is one, and a clip rule is its name."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value.get("rule") if isinstance(value, Mapping) else value
