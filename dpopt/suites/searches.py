"""A search of a row: the runs that it makes, the cells planned for them, and the scores that it goes by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpopt.cells import Cell, clipping_bound
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import BestOf, Part, Selection
from dpopt.store.runs import RESULTS, Store, released_score, score_or_worst
from dpopt.suites.schema import Setting
from dpopt.suites.settings import points

_SHARES = (0.1, 0.2)
"""Epsilons of the searches of linear scaling, relative to that of the whole procedure."""


class Search(NamedTuple):
    """A search of one row, which is tuned anew for each workload, epsilon and seed, and for all that a suite varies."""

    workload: str
    target: float
    seed: int
    batch_size: int
    epochs: float
    clip: str  # as a text, which is equal to itself if the rule has no bound


@dataclass(frozen=True)
class Planned:
    """One cell of a suite and its place in it.

    Attributes:
        cell: the run.
        label: the row that it belongs to.
        tuning: see `schema.Setting`.
        tuned: the grid point, field -> value.
        target: the suite's epsilon, which is not the cell's in the first runs of a search in several parts.
        gradients_per_draw: points at which the optimizer computes gradients.
        stage: see `Run`.
        widen: number of runs beyond its grid that the search may make.
        is_widened: True for one of those, see `widening`.
        search_id: what the runs of one search have in common, and no others. A search with another grid, or with runs
            of other numbers, has another one.
    """

    cell: Cell
    label: str
    tuning: str
    tuned: dict[str, Any]
    target: float
    gradients_per_draw: float
    stage: str = ""
    widen: int = 0
    is_widened: bool = False
    search_id: str = ""

    @property
    def search(self) -> Search:
        """The search, as a key: the same for all of its runs."""
        cell, bound = self.cell, str(clipping_bound(self.cell.content()))
        return Search(str(cell.workload), self.target, cell.seed, cell.batch_size, cell.epochs, bound)

    def point(self) -> dict[str, Any]:
        """The grid point, numbers as the optimizer has them."""
        return {key: self.cell.optimizer.get(key, value) for key, value in self.tuned.items()}

    def is_done(self, results: Store) -> bool:
        """True if the cell has a result."""
        return results.state(self.cell.run_id) in RESULTS

    def score(self, results: Store) -> float:
        """The score of the finished cell that its search goes by; minus infinity where it has diverged."""
        record = results.record(self.cell.run_id)
        return score_or_worst(released_score(record), record["status"])

    def content(self) -> dict[str, Any]:
        """As plain JSON data, for the manifest."""
        entry = {"run_id": self.cell.run_id, "label": self.label, "tuning": self.tuning, "tuned": self.tuned}
        stage = {"stage": self.stage, "target": self.target} if self.stage else {}
        further = {"widen": self.widen, "widened": self.is_widened, "search_id": self.search_id}
        further = {key: value for key, value in further.items() if value}
        return entry | stage | further | {"gradients_per_draw": self.gradients_per_draw, "cell": self.cell.content()}


@dataclass(frozen=True)
class Run:
    """One run of a search.

    Attributes:
        number: within the search; runs of several numbers have draws of their own.
        point: field -> value.
        epsilon: the cell's.
        selection: how the search is charged; None where the run alone is.
        untrained: see `Cell`.
        stage: "search" for a run that is never released itself, "final" for the one that is in its place; else "".
    """

    number: int
    point: dict[str, Any]
    epsilon: float
    selection: Selection | None = None
    untrained: bool = False
    stage: str = ""


def runs(setting: Setting, rule: Selection | None, epsilon: float, key: Iterable[Any]) -> list[Run]:
    """The runs of one replicate, without those that depend on the outcome of others.

    Which points a random search tries, how many runs a private one makes and of which points, is drawn once for each
    workload, search and seed (rows that search the same grid of the same optimizer are paired), and so is part of the
    plan. Which of the runs is released is for whoever reads the records (`results.choosing`).

    Args:
        setting, rule: of `settings.setting_of`.
        epsilon: the suite's: of a run, or of the whole search where that is charged.
        key: what decides the random choices, beside optimizer and grid.
    """
    grid, named = points(setting.grid), (setting.name, setting.fields, setting.grid, *key)
    if not (setting.tuning in ("linear_scaling", "random") or isinstance(rule, BestOf)):
        return [Run(number, point, epsilon, rule) for number, point in enumerate(grid)]
    random = np.random.default_rng(derive("search", *named))
    if setting.tuning == "linear_scaling":
        each = setting.runs or 0
        part = Part(each * len(_SHARES), epsilon)
        chosen = [(share, grid[i]) for share in _SHARES for i in random.permutation(len(grid))[:each]]
        return [Run(n, point, share * epsilon, part, stage="search") for n, (share, point) in enumerate(chosen)]
    if setting.tuning == "random":
        grid = [grid[i] for i in random.permutation(len(grid))[: setting.runs]]
    if isinstance(rule, BestOf):
        number = rule.draw(derive("number of runs", *named))
        if not number:
            return [Run(0, grid[0], epsilon, rule, untrained=True)]
        grid = [grid[i] for i in random.integers(len(grid), size=number)]
    return [Run(number, point, epsilon, rule) for number, point in enumerate(grid)]


def linear_scaling(outcomes: list[tuple[float, float, float]], epsilon: float) -> float:
    """The learning rate that grows with epsilon as it did over two searches.

    Panda et al., "A new linear scaling rule for private adaptive hyperparameter optimization", ICML 2024
    (arXiv 2212.04486): the best step size r = eta T is taken to be linear in epsilon, so two cheap searches find it for
    all epsilons. Here T is the suite's, so eta is linear in epsilon. Ours: the searches run at `_SHARES` of the whole
    epsilon; eta is kept between the smallest of the grid and the largest, scaled up as epsilon is.

    Args:
        outcomes: epsilon, learning rate and score of each run of both searches.
        epsilon: what the last run may spend alone.
    """
    low, high = (
        max((run for run in outcomes if run[0] == level), key=lambda run: run[2])
        for level in sorted({run[0] for run in outcomes})
    )
    slope = (high[1] - low[1]) / (high[0] - low[0])
    rates = [rate for _, rate, _ in outcomes]
    largest = max(rates) * max(1.0, epsilon / high[0])
    return min(max(low[1] + slope * (epsilon - low[0]), min(rates)), largest)
