"""A search of a row: the runs that it makes, the cells planned for them, and the scores that it goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpopt.cells import Cell
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import After, BestOf, Part, Selection
from dpopt.store.identity import clipping_bound
from dpopt.store.runs import RESULTS, Store, released_score, score_or_worst
from dpopt.suites.schema import Setting
from dpopt.suites.settings import points

SHARES = (0.1, 0.2)
"""Epsilons of the searches of linear scaling, relative to that of the whole procedure."""


class Replicate(NamedTuple):
    """A row is tuned anew for each workload, target epsilon and seed."""

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
        cell, bound = self.cell, clipping_bound(self.cell.content())
        replicate = Replicate(str(cell.workload), self.target, cell.seed)
        return Search(replicate, cell.batch_size, cell.epochs, str(bound))

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
        part = Part(each * len(SHARES), epsilon)
        chosen = [(share, grid[i]) for share in SHARES for i in random.permutation(len(grid))[:each]]
        return [Run(n, point, share * epsilon, part, stage="search") for n, (share, point) in enumerate(chosen)]
    if setting.tuning == "random":
        grid = [grid[i] for i in random.permutation(len(grid))[: setting.runs]]
    if isinstance(rule, BestOf):
        number = rule.draw(derive("number of runs", *named))
        if not number:
            return [Run(0, grid[0], epsilon, rule, untrained=True)]
        grid = [grid[i] for i in random.integers(len(grid), size=number)]
    return [Run(number, point, epsilon, rule) for number, point in enumerate(grid)]


@dataclass(frozen=True)
class Outcome:
    """A finished run of a search: the epsilon that it was to spend, and what it has released."""

    epsilon: float
    lr: float
    score: float
    ledger: Ledger


def linear_scaling(outcomes: list[Outcome], epsilon: float, left: Callable[[Ledger], float]) -> Run:
    """The last run of linear scaling: the learning rate that grows with epsilon as it did over the two searches.

    Panda et al., "A new linear scaling rule for private adaptive hyperparameter optimization", ICML 2024
    (arXiv 2212.04486): the best step size r = eta T is taken to be linear in epsilon, so two cheap searches find it for
    all epsilons. Here T is the suite's, so eta is linear in epsilon. Ours: the searches run at `SHARES` of the whole
    epsilon; eta is kept between the smallest of the grid and the largest, scaled up as epsilon is.

    Args:
        outcomes: of all runs of both searches.
        epsilon: of the whole procedure.
        left: ledgers of all those runs, one after the other -> what the last run may spend alone.
    """
    spent = Ledger()
    for outcome in outcomes:
        spent = spent + outcome.ledger
    rest = left(spent)
    small, large = sorted({outcome.epsilon for outcome in outcomes})
    low, high = (
        max((run for run in outcomes if run.epsilon == level), key=lambda run: run.score) for level in (small, large)
    )
    slope = (high.lr - low.lr) / (high.epsilon - low.epsilon)
    rates = [outcome.lr for outcome in outcomes]
    largest = max(rates) * max(1.0, rest / high.epsilon)
    lr = min(max(low.lr + slope * (rest - low.epsilon), min(rates)), largest)
    return Run(len(outcomes), {"lr": lr}, epsilon, After(spent), stage="final")
