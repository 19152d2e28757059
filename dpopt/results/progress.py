"""Progress of a suite, and the time that is left, by the times of its finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dpopt.markup import duration
from dpopt.results.tables import number
from dpopt.results.writing import Column, texts, unless_nan
from dpopt.store.leases import Holder


def progress(cells: pd.DataFrame, holders: Mapping[str, Holder]) -> tuple[pd.DataFrame, float]:
    """The runs that processes work on, as people read them, and the seconds until all of the suite is done.

    A run takes as long as the median of the finished runs of its kind, or else of its workload, and as many runs as now
    go on at a time. The seconds are NaN where none is worked on, or no run of a workload that is left is finished.
    """
    took = cells.reindex(columns=["seconds_prepare", "seconds_train"]).sum(axis="columns", skipna=False)
    kind = [cells[column] for column in ("workload", "label", "epochs", "batch_size")]
    alike = took.groupby(kind, dropna=False).transform("median")
    expected = took.fillna(alike).fillna(took.groupby(cells["workload"]).transform("median"))
    rows = cells[cells["run_id"].isin(holders)]
    held = [holders[run_id] for run_id in rows["run_id"]]
    done = pd.Series([holder.fraction for holder in held], rows.index, dtype=float)
    left = expected[rows.index] * (1 - done)
    waiting = expected[cells["state"].isin(["pending", "interrupted"])]
    seconds = waiting.sum(skipna=False) + left.sum(skipna=False)
    columns = [
        Column("run", "run_id"),
        Column("workload", "workload"),
        Column("optimizer", "label"),
        Column("ε", "epsilon_target", number),
        Column("seed", "seed"),
        Column("done", "done", "{:.0%}".format),
        Column("left", "left", unless_nan(duration, "?")),
        Column("holder", "holder"),
        Column("sign of life", "age", "{:.0f} s".format),
    ]
    shown = rows.assign(done=done, left=left, holder=[*map(str, held)], age=[holder.age for holder in held])
    return texts(shown, columns), seconds / len(rows) if len(rows) else math.nan
