"""A search of a row: its setting, the runs that it makes, the cells planned for them, and the scores it goes by.

A grid may be *widened*: further points are run, one at a time, while the point that it would release lies at an end of
it. Which point is next follows from the scores before it, so the search is an adaptive composition. How many runs are
made follows from the scores too, so charging only those would claim too little: all that may be made are charged. The
choice must not change what a run releases (`same_releases`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from dpopt import fields, registry
from dpopt.cells import Cell, clipping_bound
from dpopt.errors import ConfigError, unknown
from dpopt.fields import FEW
from dpopt.privacy.calibration import trace
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import SHAPES, BestOf, Composed, Part, Selection, Simulated, selection_rule
from dpopt.store.runs import RESULTS, Store, released_score, score_or_worst
from dpopt.suites.schema import Keys, Setting
from dpopt.types import Optimizer

_SHARES = (0.1, 0.2)
"""Epsilons of the searches of linear scaling, relative to that of the whole procedure."""
SEARCHED = ("grid", "random", "private", "linear_scaling")
"""The tunings that search a grid."""


def setting_of(suite: Keys, label: str) -> tuple[Setting, Selection | None]:
    """The row `label` of a suite, and the rule by which its searches are charged, if they are.

    Raises:
        ConfigError: a field cannot be used, or tuning, grid, selection and runs do not go together.
    """
    where = f"{suite.name}.settings.{label}"
    content = {key: value for key, value in suite.settings.get(label, {}).items() if value is not None}
    name = content.get("name", label)
    if isinstance(content.get("clip"), dict):
        raise ConfigError(f"{where}.clip", content["clip"], "expected bounds C; a clip rule belongs under `fields`")
    entry = registry.entry("optimizer", name)
    grid, selection = content.get("grid", entry.grid), content.get("selection")
    tuning = content.get("tuning", "grid" if grid else "self")
    is_search = tuning in SEARCHED
    filled = {"name": name, "fields": {}} | ({"widen": suite.widen} if is_search else {}) | content
    filled |= {"tuning": tuning, "grid": grid if is_search else content.get("grid", {})}
    filled["selection"] = {"rule": selection} if isinstance(selection, str) else selection
    setting = fields.build(Setting, filled, where)
    # Most constants begin with the name of a field; a row that sets the field has another constant.
    presets = {key: tasks for key, tasks in entry.chosen_on.items() if key.partition(" ")[0] not in setting.fields}
    setting = replace(setting, chosen_on=presets | setting.chosen_on)
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, public or fixed")
    if setting.tuning == "public" and not setting.chosen_on:
        allowed = "expected each constant of the row, and the tasks that it was chosen on, such as {lr 0.01: []}"
        raise ConfigError(f"{where}.chosen_on", {}, allowed)
    return setting, _check(setting, where)


def points(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every point of a grid; of an empty grid the one that changes nothing."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def _check(setting: Setting, where: str) -> Selection | None:
    """The rule by which the searches of a row are charged; raises `ConfigError` where its parts do not fit."""
    tuning = setting.tuning
    if tuning in SEARCHED and not setting.grid:
        raise ConfigError(f"{where}.grid", setting.grid, "expected field -> values to search")
    if setting.grid and tuning not in SEARCHED:
        allowed = f"the tuning {tuning} searches nothing: leave it out, or write null over one that is inherited"
        raise ConfigError(f"{where}.grid", setting.grid, allowed)
    for key, values in setting.grid.items():
        if key in setting.fields:
            allowed = "the row's grid has values of it: leave one of the two out, or say `tuning: fixed`"
            raise ConfigError(f"{where}.fields.{key}", setting.fields[key], allowed)
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.grid.{key}", values, "expected a list of values")
    if (number := math.prod(map(len, setting.grid.values()))) > FEW:
        raise ConfigError(f"{where}.grid", f"{number} points", f"expected at most {FEW:,}")
    for key, values in setting.grid.items():
        numbers = list(map(_number, values))
        if any(value in numbers[:at] for at, value in enumerate(numbers)):
            raise ConfigError(f"{where}.grid.{key}", values, "a value is repeated")
    if tuning in ("random", "linear_scaling"):
        if setting.runs is None or setting.runs > number:
            allowed = f"expected 1 to {number}, the number of points in the grid"
            raise ConfigError(f"{where}.runs", setting.runs, allowed)
        number = setting.runs
    elif setting.runs is not None:
        raise ConfigError(f"{where}.runs", setting.runs, f"the tuning {tuning} has no such number")
    if tuning == "linear_scaling" and list(setting.grid) != ["lr"]:
        allowed = "linear scaling finds a learning rate: expected lr alone"
        raise ConfigError(f"{where}.grid", list(setting.grid), allowed)
    # A search that may widen is charged for every run that it may make, whether it makes them or not.
    rule = _rule(setting, number + setting.widen, f"{where}.selection")
    reason = ""
    if tuning != "grid":
        reason = f"the tuning {tuning} runs no whole grid"
    elif "clip" in setting.grid:
        reason = "a grid over clip rules makes a row of each bound"
    elif isinstance(rule, Simulated):
        reason = "a simulated search is not charged for the runs that it makes"
    if setting.widen and reason:
        raise ConfigError(f"{where}.widen", setting.widen, f"{reason}; 0 leaves the row as it is")
    return rule


def _number(value: Any) -> Any:
    """A value of a grid; a text that reads as a number is one, as optimizers take it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _rule(setting: Setting, runs: int, where: str) -> Selection | None:
    selection = setting.selection
    if setting.tuning == "private":
        rule = selection_rule(selection, where)
        if not isinstance(rule, BestOf):
            raise unknown(f"{where}.rule", (selection or {}).get("rule"), SHAPES)
        return rule
    if selection is None:
        return None
    if setting.tuning not in ("grid", "random"):
        raise ConfigError(where, selection, f"the tuning {setting.tuning} is not charged by a rule")
    if selection == {"rule": "composed"}:
        return Composed(runs)
    rule = selection_rule(selection, where)
    if isinstance(rule, Composed):
        raise ConfigError(f"{where}.runs", rule.runs, f"the search makes {runs}: say composed alone")
    if not isinstance(rule, Simulated):
        raise unknown(f"{where}.rule", selection.get("rule"), ["composed", "simulated"])
    return rule


@dataclass(frozen=True)
class Planned:
    """One cell of a suite and its place in it."""

    cell: Cell
    label: str  # the row that it belongs to
    tuning: str  # see `schema.Setting`
    tuned: dict[str, Any]  # the grid point, field -> value
    target: float  # the suite's epsilon; the cell's is another one in the first runs of a search in several parts
    gradients_per_draw: float  # points at which the optimizer computes gradients
    chosen_on: Mapping[str, list[str]] = field(default_factory=dict)  # see `schema.Setting`
    stage: str = ""  # see `Run`
    widen: int = 0  # number of runs beyond its grid that the search may make
    is_widened: bool = False  # it is one of those
    search_id: str = ""  # of a search with these points, whose runs have these numbers, and of no other

    @property
    def search(self) -> tuple[Any, ...]:
        """The search, as a key: a row is tuned anew for each workload, epsilon and seed, and each B, epochs and C."""
        cell, bound = self.cell, str(clipping_bound(self.cell.content()))  # a text: NaN is not equal to itself
        return str(cell.workload), self.target, cell.seed, cell.batch_size, cell.epochs, bound

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
        further = {"chosen_on": self.chosen_on} | {key: value for key, value in further.items() if value}
        return entry | stage | further | {"gradients_per_draw": self.gradients_per_draw, "cell": self.cell.content()}


@dataclass(frozen=True)
class Run:
    """One run of a search."""

    number: int  # within the search; runs of several numbers have draws of their own
    point: dict[str, Any]  # field -> value
    epsilon: float  # the cell's
    selection: Selection | None = None  # how the search is charged; None where the run alone is
    untrained: bool = False  # see `Cell`
    stage: str = ""  # "search" for a run that is never released itself, "final" for the one in its place; else ""


def runs(setting: Setting, rule: Selection | None, epsilon: float, key: Iterable[Any]) -> list[Run]:
    """The runs of one replicate, without those that depend on the outcome of others.

    Which points a random search tries, how many runs a private one makes and of which points, is drawn once for each
    workload, search and seed (rows that search the same grid of the same optimizer are paired), and so is part of the
    plan. Which of the runs is released is for whoever reads the records (`results.choosing`).

    `epsilon` is the suite's: of a run, or of the whole search where that is charged; `key` decides the random choices,
    beside optimizer and grid.
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
    """The learning rate for a run that may spend `epsilon` alone: it grows with epsilon as over two searches.

    Panda et al., "A new linear scaling rule for private adaptive hyperparameter optimization", ICML 2024
    (arXiv 2212.04486): the best step size r = eta T is taken to be linear in epsilon, so two cheap searches find it for
    all epsilons. Here T is the suite's, so eta is linear in epsilon. Ours: the searches run at `_SHARES` of the whole
    epsilon; eta is kept between the smallest of the grid and the largest, scaled up as epsilon is. `outcomes` are
    epsilon, learning rate and score of each run of both searches.
    """
    low, high = (
        max((run for run in outcomes if run[0] == level), key=lambda run: run[2])
        for level in sorted({run[0] for run in outcomes})
    )
    slope = (high[1] - low[1]) / (high[0] - low[0])
    rates = [rate for _, rate, _ in outcomes]
    largest = max(rates) * max(1.0, epsilon / high[0])
    return min(max(low[1] + slope * (epsilon - low[0]), min(rates)), largest)


def ends(grid: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The fields in which a grid has ends, with the smallest and the largest value: several positive numbers."""
    columns = {name: [point[name] for point in grid] for name in grid[0]}
    return {
        name: (min(values), max(values))
        for name, values in columns.items()
        if all(type(value) in (int, float) and 0 < value < math.inf for value in values) and min(values) < max(values)
    }


def beyond(scored: Sequence[tuple[dict[str, Any], float]]) -> Iterator[dict[str, Any]]:
    """The best point moved beyond each end that it lies at, in the order of the fields.

    An end is the smallest or largest value that was tried of a field; fields are those of `ends`. The ratio of the end
    to its neighbour is continued, to 3 significant digits: 0.1, 0.3, 1 are followed by 3.33. Whole numbers stay whole.
    """
    points, best = [point for point, _ in scored], max(scored, key=lambda pair: pair[1])[0]
    for name, (low, high) in ends(points).items():
        values = sorted({point[name] for point in points})
        for end, neighbour in ((low, values[1]), (high, values[-2])):
            value = float(f"{end * end / neighbour:.3g}")
            value = round(value) if isinstance(end, int) else value
            if best[name] == end and 0 < value < math.inf and not low <= value <= high:
                yield best | {name: value}


def same_releases(optimizers: Iterable[Optimizer], rate: float, draws: int) -> bool:
    """True if runs of all `optimizers` leave the same ledger at one target; raises as `calibration.trace`.

    Calibration goes by what each draw releases and by how the noise is divided among the kinds, so these are compared.
    """
    releases = {
        (
            trace(optimizer, rate=rate, draws=draws),
            getattr(optimizer, "noise_inflation", None),
            tuple(sorted(getattr(optimizer, "shares", {}).items())),
        )
        for optimizer in optimizers
    }
    return len(releases) == 1
