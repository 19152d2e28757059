"""Progress of a suite, and the time that is left, by the times of its finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dpopt.markup import duration
from dpopt.results.writing import Column, texts, unless_nan
from dpopt.store.leases import Holder


def expected_seconds(cells: pd.DataFrame) -> pd.Series:
    """Seconds that each run takes or took: the median over finished runs of its kind, or else over all finished runs.

    Args:
        cells: the suite's frame `cells`; `seconds_prepare` and `seconds_train` where a run is finished.

    Returns:
        One value for each row; NaN for all while nothing is finished.
    """
    if "seconds_train" not in cells:
        return pd.Series(math.nan, cells.index)
    took = cells["seconds_prepare"] + cells["seconds_train"]
    kind = [cells[column] for column in ("workload", "label", "epochs", "batch_size")]  # about as long as each other
    alike = took.groupby(kind, dropna=False).transform("median")
    return took.fillna(alike).fillna(took.median())


def running(cells: pd.DataFrame, holders: Mapping[str, Holder], expected: pd.Series) -> pd.DataFrame:
    """One row a run that a process works on: what it is, the share that is done, the seconds that are left.

    Args:
        cells: one row a run.
        holders: run id -> who runs it.
        expected: of `expected_seconds`.
    """
    rows = cells[cells["run_id"].isin(holders)]
    done = rows["run_id"].map(lambda run_id: holders[run_id].fraction).astype(float)
    return pd.DataFrame(
        {
            "run": rows["run_id"],
            "workload": rows["workload"],
            "optimizer": rows["label"],
            "ε": rows["epsilon_target"],
            "seed": rows["seed"],
            "done": done,
            "seconds_left": expected[rows.index] * (1 - done),
            "holder": rows["run_id"].map(lambda run_id: str(holders[run_id])),
            "silent": rows["run_id"].map(lambda run_id: holders[run_id].age),
        }
    )


def seconds_left(cells: pd.DataFrame, at_work: pd.DataFrame, expected: pd.Series) -> float:
    """Seconds until all of the suite is done if as many runs as now go on at a time; NaN where that is not known."""
    waiting = cells["state"].isin(["pending", "interrupted"])
    left = expected[waiting].sum(skipna=False) + at_work["seconds_left"].sum(skipna=False)
    return left / len(at_work) if len(at_work) else math.nan


def readable(at_work: pd.DataFrame) -> pd.DataFrame:
    """The frame of `running` as texts."""
    columns = [
        *(Column(name, name) for name in ("run", "workload", "optimizer")),
        Column("ε", "ε", "{:g}".format),
        Column("seed", "seed"),
        Column("done", "done", "{:.0%}".format),
        Column("left", "seconds_left", unless_nan(duration, "?")),
        Column("holder", "holder"),
        Column("sign of life", "silent", "{:.0f} s".format),
    ]
    return texts(at_work, columns)
