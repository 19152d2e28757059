"""The frames that a suite's figures and pages are made of, each made once and only where it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from dpopt.analysis import diagnostics, frames, ranking, tables
from dpopt.analysis.frames import GROUP
from dpopt.store.runs import Store

SWEPT = ["batch_size", "epochs", "clip"]
"""What a suite may vary beside methods, workloads and epsilon."""


@dataclass(frozen=True)
class Frames:
    """What is stored of a suite, as figures need it; a frame that has nothing to show is empty.

    Args:
        store, results: of the suite, see `frames.load`.
    """

    store: Store
    results: frames.Results

    @cached_property
    def every(self) -> pd.DataFrame:
        """One row a replicate of every group: `frames.select`."""
        return frames.select(self.results.cells)

    @cached_property
    def selected(self) -> pd.DataFrame:
        """One row a replicate; of several batch sizes, epochs and clips of a method, those that validate best."""
        return best_setting(self.every)

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """One row a method, workload and target epsilon: `tables.comparison` of `selected`."""
        return tables.comparison(self.store, self.selected)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row a curve entry of the selected runs."""
        return frames.curves(self.store, self.selected)

    @cached_property
    def ranking(self) -> pd.DataFrame:
        """One row a method in a block of equal cost."""
        return ranking.ranking(self.store, self.results.cells)

    @cached_property
    def sweep(self) -> pd.DataFrame:
        """One row a group, of suites that vary the clipping bound and the batch size of a method."""
        every = self.every
        if every.empty or (every.groupby("label")[["clip", "batch_size"]].nunique().max() < 2).any():
            return pd.DataFrame()
        return tables.comparison(self.store, every)

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """One row a curve entry that holds diagnostics, of the selected runs."""
        return diagnostics.curves(self.store, self.selected)

    @cached_property
    def classes(self) -> pd.DataFrame:
        """One row a class and bound C, of the selected runs that were diagnosed."""
        return diagnostics.classes(self.store, self.selected)

    def frame(self, needs: str) -> pd.DataFrame:
        """The frame that a figure `needs`."""
        return getattr(self, needs)


def best_setting(selected: pd.DataFrame) -> pd.DataFrame:
    """The rows of `frames.select` whose group validates best among those that differ in `SWEPT` alone.

    Looks at the mean over seeds. The runs of all those groups are then one search, and charged as such: `runs` and
    `run_ids` are theirs together. Where nothing validates, all rows are kept as they are.
    """
    if selected.empty or selected["validation_score"].isna().all():
        return selected
    rest = [key for key in GROUP if key not in SWEPT]
    means = selected.groupby(GROUP, sort=False, dropna=False)["selection_score"].mean().fillna(-math.inf).reset_index()
    best = means.loc[means.groupby(rest, sort=False)["selection_score"].idxmax(), GROUP]
    searches = selected.groupby([*rest, "seed"], sort=False).agg(
        groups=("runs", "size"), runs=("runs", "sum"), run_ids=("run_ids", "sum")
    )
    chosen = selected.drop(columns=["runs", "run_ids"]).merge(best, on=GROUP).merge(searches, on=[*rest, "seed"])
    # A rule prices one search; of several, all runs are charged.
    chosen["selection"] = chosen["selection"].where(chosen["groups"] == 1, "")
    return chosen.drop(columns="groups")
