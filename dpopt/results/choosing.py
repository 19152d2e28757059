"""Which run each replicate would release, and which setting of a suite validates best."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import pandas as pd

from dpopt.results.frames import GROUP, SWEPT
from dpopt.store.runs import RESULTS, score_or_worst

REFINED = ["workload", "label", "epsilon_target", "epochs"]
"""Whose grid, over all batch sizes, bounds and seeds, the points of one refinement follow from."""


def select(cells: pd.DataFrame) -> pd.DataFrame:
    """The run that each replicate would release: its best on the validation split, never on the test split.

    A search that is charged goes by the scores that its runs have released, noise included; one in several parts
    releases its last run. A run that has diverged, or whose score is not a number, is the worst.

    Selection is made for each seed on its own, as someone with one private data set would. A group with a tuning run
    that has no result is left out: the best of what happened to finish is not what the procedure releases.

    Returns:
        One row for each group and seed, with `selected_by` (its score, -inf where that is the worst), `runs` (trained
        runs of that group and seed), `run_ids` (what the search is charged for: those runs, and one again for each that
        a grid which widens might still have made; where a refinement has added a point, all runs of the grid and the
        refinement, of all seeds, as points follow from means over them), `selection` ("" where runs of several searches
        are compared: a rule prices one search, and of several all runs are charged), and `edges`: which of the selected
        numbers are the largest ("lr ↑") or smallest that the label's search tries.
    """
    new = {"widen": 0, "is_widened": False, "search_id": ""}  # what frames that were published before do not have
    cells = cells.assign(**{key: cells.get(key, default) for key, default in new.items()})
    if "search" not in cells:  # nor have the oldest this one, which their cells have
        cells = cells.assign(search=[json.loads(cell).get("search", 0) for cell in cells["cell"]])
    ends = _ends(cells[~cells["is_widened"]])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in cells.to_dict("records"):
        place = tuple("" if pd.isna(row[key]) else row[key] for key in (*GROUP, "seed"))  # two NaN are not equal
        groups.setdefault(place, []).append(row)
    refinements: dict[tuple[Any, ...], list[list[dict[str, Any]]]] = {}
    for rows in groups.values():
        refinements.setdefault(_refinement(rows), []).append(rows)
    chosen = []
    for rows in groups.values():
        last = "final" if any(row["stage"] for row in rows) else ""
        released = [row for row in rows if row["stage"] == last]
        searches = refinements[_refinement(rows)] if any(row["is_refined"] for row in rows) else [rows]
        is_damaged = any(row["state"] == "damaged" for search in searches for row in search)
        if not released or is_damaged or not all(row["state"] in RESULTS for row in rows):
            continue
        best = max(released, key=_selected_by)
        runs, run_ids = sum(row["is_trained"] for row in rows), together(map(_charged, searches))
        edges = "" if last else _edges(best, ends[best["workload"], best["label"]], rows)
        own = {"selected_by": _selected_by(best), "runs": runs, "run_ids": run_ids, "edges": edges}
        chosen.append({**best, **own, "selection": best["selection"] if _is_one_search(rows) else ""})
    return pd.DataFrame(chosen)


def _is_one_search(rows: list[dict[str, Any]]) -> bool:
    """Whether the runs are those of one search, with one rule and with numbers of their own.

    Where plans have not told searches apart, as older ones, numbers alone show it: one that is made again with the same
    batch sizes, bounds and epochs counts from 0 again.
    """
    numbers = [row["search"] for row in rows]
    return len({_search(row) for row in rows}) == 1 and len({*numbers}) == len(numbers)


def _search(row: Mapping[str, Any]) -> tuple[str, str]:
    """What tells the searches of a group and seed apart: the rule, and what the plan called the search."""
    return row["selection"], row["search_id"]


def _selected_by(row: Mapping[str, Any]) -> float:
    return score_or_worst(row["selection_score"], row["state"])


def _refinement(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(rows[0][key] for key in REFINED)


def together(searches: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The runs of several searches: a run that is part of several is named as often as by one of them."""
    named: Iterator[Counter[str]] = map(Counter, searches)
    return tuple(reduce(or_, named, Counter[str]()).elements())


def _charged(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The runs of a group and seed, and the first again for each that a grid which widens might have made and has not.

    How many it makes follows from scores, so that these are charged too, for each search alone: a suite that was run
    again with another grid has two. All runs of one such search release the same. A run without a result has released
    nothing.
    """
    searches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        searches.setdefault(_search(row), []).append(row)
    charged = [row["run_id"] for row in rows if row["state"] in RESULTS]
    for search in searches.values():
        unmade = max(row["widen"] for row in search) - sum(row["is_widened"] for row in search)
        charged += [search[0]["run_id"]] * unmade
    return tuple(charged)


def _ends(cells: pd.DataFrame) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Smallest and largest value of each number that a label is searched over, by workload and label."""
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in cells[["workload", "label", "tuned"]].drop_duplicates().to_dict("records"):
        ends = found.setdefault((row["workload"], row["label"]), {})
        for name, value in _numbers(row["tuned"]):
            low, high = ends.get(name, (value, value))
            ends[name] = min(low, value), max(high, value)
    return found


def _numbers(tuned: str) -> list[tuple[str, float]]:
    return [(name, value) for name, value in json.loads(tuned).items() if type(value) in (int, float)]


def _edges(row: Mapping[str, Any], ends: Mapping[str, tuple[float, float]], rows: list[dict[str, Any]]) -> str:
    """The numbers of a point that are at an end of what its label's grids and the `rows` of its search try; which."""
    marks, tried = [], [dict(_numbers(other["tuned"])) for other in rows]
    for name, value in _numbers(row["tuned"]):
        values = [*ends.get(name, ()), *(point[name] for point in tried if name in point)]
        low, high = min(values), max(values)
        marks += [f"{name} {'↑' if value == high else '↓'}"] if low < high and value in (low, high) else []
    return ", ".join(marks)


def validated_best(settings: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The row of each group whose mean `selected_by` is the best; of equal ones that with the smallest setting.

    None of several rows without a score: nothing but the test split tells them apart.
    """
    own = settings.groupby(list(by))["selected_by"]
    told = settings[(own.transform("size") == 1) | (own.transform("max") > -math.inf)]
    return settings.loc[told.sort_values(SWEPT, kind="stable").groupby(list(by))["selected_by"].idxmax()]
