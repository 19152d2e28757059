"""Who is best over many tasks at equal total epsilon, from one suite with many workloads or from several suites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from dpopt.errors import ConfigError
from dpopt.results import choosing, ranking, statistics, tables
from dpopt.results.budgets import BLOCK, reached
from dpopt.results.naming import readable_names, workload_names
from dpopt.results.results import Results, best_setting
from dpopt.store.runs import Store

SELF, CHARGED, FREE = "self-tuned", "searched, charged", "not charged"
"""The tracks; methods of the last are for reference and have no rank."""


@dataclass(frozen=True)
class Leaderboard:
    """What suites say of methods. A method is a label; of several suites that have it on a workload, the first counts.

    Args:
        known: the suites, of one results folder.

    Raises:
        ConfigError: they lie in several folders, or no private row is finished.
    """

    known: Sequence[Results]

    def __post_init__(self) -> None:
        folders = {str(results.store.root) for results in self.known}
        if len(folders) > 1:
            raise ConfigError("results", sorted(folders), "expected suites of one folder")
        if self.cells.empty or self.scores.empty:
            raise ConfigError("suite", [results.suite for results in self.known], "no finished private rows")

    @property
    def store(self) -> Store:
        """Which holds the suites."""
        return self.known[0].store

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The private cells of all suites, their workloads named alike."""
        known = [replace(results, store=self.store) for results in self.known]  # which reads each of them once
        specs = [[entry["cell"]["workload"] for entry in self.store.manifest(each.suite)["cells"]] for each in known]
        names, parts, seen = readable_names([spec for own in specs for spec in own]), [], set[tuple[str, str]]()
        for each, own in zip(known, specs, strict=True):
            called = {name: names[key] for key, name in workload_names(own).items()}
            cells = each.cells.assign(workload=each.cells["workload"].map(called))
            places = list(zip(cells["workload"], cells["label"], strict=True))
            parts.append(cells[[place not in seen for place in places]])
            seen |= set(places)
        cells = pd.concat(parts, ignore_index=True)
        return cells[cells["epsilon_target"] < math.inf]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """One row a method, workload and target epsilon: `tables.comparison`, of several settings the chosen one."""
        return tables.comparison(self.store, best_setting(choosing.select(self.cells)))

    @cached_property
    def tracks(self) -> dict[str, str]:
        """What is charged of each method."""
        own = self.scores.groupby("label", sort=False)
        is_free, is_self = own["is_reference"].any(), own["tuning"].agg(lambda tuning: (tuning == "self").all())
        return {label: FREE if is_free[label] else SELF if is_self[label] else CHARGED for label in is_free.index}

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The cells of the methods that have a rank."""
        return self.cells[self.cells["label"].map(self.tracks).isin([SELF, CHARGED])]

    @cached_property
    def entries(self) -> pd.DataFrame:
        """What each seed reaches in each block: `budgets.reached`."""
        return reached(self.store, self.ranked)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """One row a ranked method and block: `ranking.ranking`."""
        return ranking.of_entries(self.entries, "epsilon")

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row a method, the best first and those without a rank last.

        Returns:
            `label`, `track`, `rank` with `low` and `high` (a bootstrap interval over workloads and seeds), `first` (the
            share of its samples in which the rank is the best), `draws` and `gradients` (the average ranks by these),
            `cpu_hours`, `blocks` that it is in, `is_best`: whether its rank may be the best.
        """
        cost = self.cells.drop_duplicates(["label", "run_id"]).assign(
            cpu=lambda cells: cells.get("seconds_cpu", pd.Series(math.nan, cells.index))
        )
        frame = pd.DataFrame({"track": self.tracks}).rename_axis("label")
        frame["cpu_hours"] = cost.groupby("label")["cpu"].sum(min_count=1) / 3600
        frame["blocks"] = self.scores.groupby("label").size()
        frame = frame.join(self._averages()).join(self._by("draws")).join(self._by("gradients"))
        return frame.sort_values("rank", kind="stable").reset_index()

    def _averages(self) -> pd.DataFrame:
        columns = ["rank", "low", "high", "first", "is_best"]
        if self.blocks.empty:
            return pd.DataFrame(columns=columns)
        rows, test = ranking.everywhere(self.blocks), ranking.rank_test(self.blocks)
        if rows.empty:  # no method is in every block
            return pd.DataFrame(columns=columns)
        averages = ranking.average_ranks(self.blocks).set_index("label")["rank"]
        samples = statistics.rank_samples(_scores_by_workload(self.entries, rows, list(averages.index)))
        low, high = np.quantile(samples, [(1 - statistics.CONFIDENCE) / 2, (1 + statistics.CONFIDENCE) / 2], axis=0)
        is_first = samples == samples.min(axis=1, keepdims=True)
        first = (is_first / is_first.sum(axis=1, keepdims=True)).mean(axis=0)
        is_best = (averages - averages.min() < test.critical) if test else False
        return pd.DataFrame({"rank": averages}).assign(low=low, high=high, first=first, is_best=is_best)

    def _by(self, budget: str) -> pd.Series:
        """Average ranks at equal cost of another kind."""
        frame = ranking.ranking(self.store, self.ranked, budget)
        known = pd.Series(dtype=float) if frame.empty else ranking.average_ranks(frame).set_index("label")["rank"]
        return known.rename(budget)


def _scores_by_workload(entries: pd.DataFrame, rows: pd.DataFrame, labels: list[str]) -> list[list[np.ndarray]]:
    """For each workload the scores [seeds, methods] of each block of `rows`, as they are ranked."""
    found: dict[str, list[np.ndarray]] = {}
    kept = entries.merge(rows[BLOCK].drop_duplicates(), on=BLOCK)
    for (workload, *_), block in kept.groupby(BLOCK):
        found.setdefault(workload, []).append(ranking.imputed(block)[labels].to_numpy())
    return list(found.values())
