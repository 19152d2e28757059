"""A cell of a suite with its place there, and what its result is worth in a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from dpopt.harness.cell import Cell
from dpopt.store.identity import clipping_bound
from dpopt.store.runs import RESULTS, Store, released_score, score_or_worst


class Replicate(NamedTuple):
    """Where a row is tuned anew: for each workload, target epsilon and seed."""

    workload: str
    target: float
    seed: int


class Search(NamedTuple):
    """A search of one row: a replicate at one setting of what a suite may vary; the bound is as text, NaN included."""

    replicate: Replicate
    batch_size: int
    epochs: float
    clip: str


@dataclass(frozen=True)
class Planned:
    """One cell of a suite and its place in it.

    Attributes:
        cell: what is run.
        label: the row that it belongs to.
        tuning: see `suite.Setting`.
        tuned: the grid point, field -> value.
        target: the suite's epsilon, which is not the cell's in the first runs of a search in several parts.
        gradients_per_draw: points at which the optimizer computes gradients.
        stage: see `tuning.Run`.
        is_refined: whether it is none of the suite's grid but a proposal, see `refine`.
        widen: how many runs beyond its grid the search may make.
        is_widened: whether it is one of those, see `widen`.
        search_id: what the runs of one search have in common, and no others. A search with another grid, or with runs
            of other numbers, has another one. "" where a cell follows from several searches, as in a refinement.
    """

    cell: Cell
    label: str
    tuning: str
    tuned: dict[str, Any]
    target: float
    gradients_per_draw: float
    stage: str = ""
    is_refined: bool = False
    widen: int = 0
    is_widened: bool = False
    search_id: str = ""

    @property
    def search(self) -> Search:
        """What the runs of one search in a row have in common."""
        cell, bound = self.cell, clipping_bound(self.cell.content())
        replicate = Replicate(str(cell.workload), self.target, cell.seed)
        return Search(replicate, cell.batch_size, cell.epochs, str(bound))

    def content(self) -> dict[str, Any]:
        """As plain JSON data, for the manifest."""
        rest = {"label": self.label, "tuning": self.tuning, "tuned": self.tuned}
        stage = {"stage": self.stage, "target": self.target} if self.stage else {}
        cost = {"gradients_per_draw": self.gradients_per_draw}
        further = {"refined": self.is_refined, "widen": self.widen, "widened": self.is_widened}
        further |= {"search_id": self.search_id}
        further = {key: value for key, value in further.items() if value}
        own = {"run_id": self.cell.run_id, **rest, **stage, **further, **cost}
        return own | {"cell": self.cell.content()}


def distinct(grid: list[Planned]) -> list[Planned]:
    """Each cell once: a rule that has no bound makes the same one of every C."""
    return list({entry.cell.run_id: entry for entry in reversed(grid)}.values())[::-1]


def point_of(entry: Planned) -> dict[str, Any]:
    """Where a cell lies in its row's search, numbers as the optimizer has them; C is None without a bound."""
    bound = clipping_bound(entry.cell.content())
    return {"C": None if math.isnan(bound) else bound, "B": entry.cell.batch_size, **tuned_of(entry)}


def tuned_of(entry: Planned) -> dict[str, Any]:
    """The grid point of a cell, numbers as the optimizer has them."""
    return {key: entry.cell.optimizer.get(key, value) for key, value in entry.tuned.items()}


def mean_score(entries: list[Planned], results: Store) -> float:
    """The mean score of finished cells."""
    return fmean(score_of(entry, results) for entry in entries)


def score_of(entry: Planned, results: Store) -> float:
    """The score of a finished cell that its search goes by, as whoever selects one of its runs does."""
    record = results.record(entry.cell.run_id)
    return score_or_worst(released_score(record), record["status"])


def all_done(found: list[Planned], results: Store) -> bool:
    """Whether all of some cells have a result."""
    return all(results.state(entry.cell.run_id) in RESULTS for entry in found)
