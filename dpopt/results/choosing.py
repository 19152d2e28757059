"""The run that each replicate would release, the setting that validates best, and the runs that are charged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import pandas as pd

from dpopt.results.frames import GROUP, SWEPT
from dpopt.store.runs import RESULTS, score_or_worst

Row = dict[str, Any]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that agree in `keys`, in the order of their first; NaN equals NaN, and is ""."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_place(row, keys), []).append(row)
    return groups


def _place(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple("" if row[key] != row[key] else row[key] for key in keys)  # two NaN are not equal


def select(cells: pd.DataFrame) -> pd.DataFrame:
    """The run that each replicate would release: its best on the validation split, never on the test split.

    A search that is charged goes by the scores that its runs have released, noise included; one in several parts
    releases its last run. A run that has diverged, or whose score is not a number, is the worst. Selection is made for
    each seed on its own, as someone with one private data set would. A group with a run without a result is left out.

    Returns:
        One row for each group and seed, with `selected_by` (its score, -inf where that is the worst), `runs` (trained
        ones), `charges` (run id -> runs with its ledger that are paid for), `selection` ("" where runs of several
        searches are compared: a rule prices one), and `edges`: selected numbers at an end of the grid ("lr ↑").
    """
    rows = cells.to_dict("records")
    in_grids = grouped((row for row in rows if not row["is_widened"]), ["workload", "label"])
    grids = {place: [*map(_numbers, {row["tuned"] for row in of_label})] for place, of_label in in_grids.items()}
    chosen = []
    for runs in grouped(rows, [*GROUP, "seed"]).values():
        last = "final" if any(row["stage"] for row in runs) else ""
        candidates = [row for row in runs if row["stage"] == last]
        # The best of what happened to finish is not what the procedure releases.
        if not candidates or not all(row["state"] in RESULTS for row in runs):
            continue
        best = max(candidates, key=_score)
        # Numbers of one search differ: the same number twice is a search made again, by plans that named no searches.
        numbers = [row["search"] for row in runs]
        is_one_search = len({*chain.from_iterable(map(_searches, runs))}) == 1 and len({*numbers}) == len(numbers)
        tried = [*grids.get((best["workload"], best["label"]), ()), *(_numbers(row["tuned"]) for row in runs)]
        edges = "" if last else _edges(_numbers(best["tuned"]), tried)
        trained = sum(row["is_trained"] for row in runs)
        more = {"selected_by": _score(best), "runs": trained, "charges": _charges(runs), "edges": edges}
        chosen.append({**best, **more, "selection": best["selection"] if is_one_search else ""})
    return pd.DataFrame(chosen)


def tuning(runs: Sequence[Row]) -> str:
    """How the runs of a row were tuned: "fixed" if one of them was set by hand, as such a row is never ranked."""
    every = [run["tuning"] for run in runs]
    return "fixed" if "fixed" in every else every[0]


def _score(row: Row) -> float:
    return score_or_worst(row["selection_score"], row["state"])


def _searches(row: Row) -> dict[tuple[str, str], int]:
    """The searches that a run is part of, each with the most runs beyond its grid that it may make."""
    return {(row["selection"], search_id): widen for search_id, widen in row["searches"]}


def _charges(runs: Sequence[Row]) -> Counter[str]:
    charges = Counter(row["run_id"] for row in runs if row["state"] in RESULTS)  # others have released nothing
    searches: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        for search in _searches(row):
            searches.setdefault(search, []).append(row)
    for search, of_search in searches.items():
        # How many runs a widening grid makes follows from scores: it pays for its maximum, by its first run's ledger.
        unmade = max(_searches(row)[search] for row in of_search) - sum(row["is_widened"] for row in of_search)
        charges[of_search[0]["run_id"]] += max(0, unmade)
    return charges


def together(searches: Iterable[Counter[str]]) -> Counter[str]:
    """The charges of several searches: a run that is part of several is charged as often as by one of them."""
    return reduce(or_, searches, Counter())


def best_setting(selected: pd.DataFrame) -> pd.DataFrame:
    """The rows of `select` whose group validates best among those that differ in `SWEPT` alone.

    The mean over the seeds that a setting has decides; of equal ones it is the smallest. Where a method has several
    settings, the runs of all its groups and seeds are one search, and charged as such in `charges`; `runs` are those of
    the groups and one seed. A method with several settings of which none validates is left out.
    """
    if selected.empty:
        return selected
    rest, rows = [key for key in GROUP if key not in SWEPT], selected.to_dict("records")
    best = grouped(validated_best(mean_scores(selected), rest).to_dict("records"), GROUP)
    for of_method in grouped(rows, rest).values():
        # A rule prices one search; of several, all runs are charged.
        changes = {"charges": together(row["charges"] for row in of_method), "selection": ""}
        changes = changes if len(grouped(of_method, GROUP)) > 1 else {}
        for of_seed in grouped(of_method, ["seed"]).values():
            trained = sum(row["runs"] for row in of_seed)
            for row in of_seed:
                row.update(changes, runs=trained)
    return pd.DataFrame([row for row in rows if _place(row, GROUP) in best])


def mean_scores(selected: pd.DataFrame) -> pd.DataFrame:
    """One row a group of `select`'s frame, with the mean of `selected_by` over its seeds."""
    return selected.groupby(GROUP, sort=False, dropna=False)["selected_by"].mean().reset_index()


def validated_best(settings: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The row of each group whose mean `selected_by` is the best; of equal ones that with the smallest setting.

    None of several rows without a score: nothing but the test split tells them apart.
    """
    scores = settings.groupby(list(by))["selected_by"]
    eligible = settings[(scores.transform("size") == 1) | (scores.transform("max") > -math.inf)]
    return settings.loc[eligible.sort_values(SWEPT, kind="stable").groupby(list(by))["selected_by"].idxmax()]


def _numbers(tuned: str) -> Row:
    return {name: value for name, value in json.loads(tuned).items() if type(value) in (int, float)}


def _edges(best: Row, tried: Sequence[Row]) -> str:
    marks = []
    for name, value in best.items():
        values = [point[name] for point in tried if name in point]
        low, high = min(values), max(values)
        marks += [f"{name} {'↑' if value == high else '↓'}"] if low < high and value in (low, high) else []
    return ", ".join(marks)
