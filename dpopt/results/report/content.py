"""The content of a suite's page: the best methods, the plan, failures, and provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from dpopt.results import tables
from dpopt.results.frames import Stored
from dpopt.results.report.sheet import text
from dpopt.results.scores import shown
from dpopt.store.runs import RESULTS, SETTLED, Store

_STATES = (*SETTLED, "running", "interrupted", "pending")
_AXES = {"batch_size": "B", "epochs": "epochs", "clip": "C"}
_ORIGIN = {"code": "commit", "python": "Python", "device": "device"}


class Failure(NamedTuple):
    """Why some cells have no result.

    Attributes:
        reason: the error.
        traceback: the last lines of the first cell's.
        cells: run ids, with their places in the suite.
    """

    reason: str
    traceback: str
    cells: list[str]


HEADLINE_NOTE = (
    "Best private method: the highest mean test score of a workload and target ε, among the rows whose whole search "
    "keeps to the target. The search includes B, C and epochs: of several settings of a method, the one that validates "
    "best counts. For reference: the best of the other private rows, whose search spends more than the target, or "
    "which have a value that was set by hand and is not charged. Whether a difference is more than chance is not "
    "tested here."
)


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """The best private rows for each workload and target epsilon, as people read them; empty where there are none.

    Args:
        table: of `tables.comparison`, with one setting for each method (`choosing.best_setting`): choosing one is
            charged there.
    """
    private = table[table["epsilon_target"] < math.inf]
    blocks = private.groupby(["workload", "epsilon_target"])
    rows = [_best_of_block(block, table) for _, block in blocks if block["mean"].notna().any()]
    return pd.DataFrame(rows).replace("", None).dropna(axis="columns", how="all").fillna("")


def _best_of_block(block: pd.DataFrame, table: pd.DataFrame) -> dict[str, str]:
    first = block.iloc[0]
    best, score = _best(block[~block["is_reference"]]), shown(first["score"])
    reference = _best(block[block["is_reference"]])
    ceiling = table[(table["workload"] == first["workload"]) & (table["epsilon_target"] == math.inf)]
    return {
        "workload": first["workload"],
        "target ε": f"{first['epsilon_target']:g}",
        "best private method": _named(best, table) if best else "",
        f"test {score.label}": score.text(best["mean"], best["std"]) if best else "",
        "ε with tuning": tables.upper(best["epsilon_with_tuning"]) if best else "",
        "for reference": _with_score(reference, table, is_charged=True),
        "without privacy": _with_score(_best(ceiling), table),
    }


def _best(rows: pd.DataFrame) -> dict[str, Any] | None:
    finite = rows[rows["mean"].notna()]
    return None if finite.empty else finite.loc[finite["mean"].idxmax()].to_dict()


def _with_score(row: dict[str, Any] | None, table: pd.DataFrame, is_charged: bool = False) -> str:
    if row is None:
        return ""
    price = f", ε with tuning {tables.charged(row)}" if is_charged else ""
    return f"{_named(row, table)}: {shown(row['score']).text(row['mean'], row['std'])}{price}"


def _named(row: dict[str, Any], table: pd.DataFrame) -> str:
    varied = [key for key in _AXES if table[key].nunique() > 1 and not math.isnan(row[key])]
    place = [f"{_AXES[key]} = {row[key]:g}" for key in varied]
    return f"{row['label']} ({', '.join(place)})" if place else row["label"]


def states(cells: pd.DataFrame) -> str:
    """The number of cells, and of those in each state."""
    counts = cells.drop_duplicates("run_id")["state"].value_counts()
    listed = [f"{counts[state]} {state}" for state in _STATES if state in counts]
    return f"{counts.sum()} {'cell' if counts.sum() == 1 else 'cells'}: {', '.join(listed)}."


def failures(store: Store, cells: pd.DataFrame) -> list[Failure]:
    """Why cells failed."""
    rows = cells[cells["state"] == "failed"].to_dict("records")
    named = {row["run_id"]: place(row["label"], row["workload"], row["epsilon_target"], row["seed"]) for row in rows}
    return explained(store, named)


def explained(store: Store, places: Mapping[str, str]) -> list[Failure]:
    """Why runs failed; those that failed for the same reason stand together.

    Args:
        places: run id -> what is said of its place in the suite.
    """
    failures: dict[str, Failure] = {}
    for run_id, place in places.items():
        error = store.error(run_id)
        end = "\n".join(error["traceback"].strip().splitlines()[-6:])  # which name place and reason
        failure = failures.setdefault(error["reason"], Failure(error["reason"], end, []))
        failure.cells.append(f"{run_id}: {place}")
    return list(failures.values())


def place(label: str, workload: str, epsilon: float, seed: int) -> str:
    """A cell's place in its suite, in words."""
    return f"{label} on {workload}, target ε = {epsilon:g}, seed {seed}"


def damages(results: Stored) -> list[str]:
    """Problems with damaged and foreign files: all but those of failed cells."""
    failed = set(results.cells.loc[results.cells["state"] == "failed", "run_id"])
    return [problem for problem in results.problems if problem.split(" ")[0] not in failed]


def setting(cells: pd.DataFrame) -> dict[str, str]:
    """The values that were planned on each axis."""
    keys = {"workload": "workloads", "label": "rows", "epsilon_target": "target ε", "delta": "δ", **_AXES}
    keys |= {"seed": "seeds", "accountant": "accountant"}
    # A dash is a value too: a suite may have rows with a clipping bound and rows without.
    values = {name: [*map(text, sorted(cells[key].dropna().unique()))] for key, name in keys.items()}
    dashes = {name: ["–"] if cells[key].isna().any() else [] for key, name in keys.items()}
    return {name: ", ".join(values[name] + dashes[name]) for name in values}


def provenance(cells: pd.DataFrame) -> pd.DataFrame:
    """With which code, versions and devices cells were run, and how many cells with each: what, value, cells."""
    cells = cells[cells["state"].isin(RESULTS)].drop_duplicates("run_id")
    if "commit" in cells:
        # Files that are tracked and were changed make the commit say less than it seems to.
        pairs = zip(cells["commit"], cells["dirty"], strict=True)
        code = [f"{commit} with changed files" if dirty else commit for commit, dirty in pairs]
        cells = cells.assign(code=pd.Series(code, cells.index, dtype=object).where(cells["commit"].notna()))
    names = _ORIGIN | {key: key.removeprefix("version_") for key in cells if key.startswith("version_")}
    rows = []
    for key, name in names.items():
        counts = cells.get(key, pd.Series(dtype=str)).dropna().astype(str).value_counts().sort_index()
        rows += [{"what": name, "value": value, "cells": str(count)} for value, count in counts.items()]
    return pd.DataFrame(rows, columns=["what", "value", "cells"])
