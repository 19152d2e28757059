"""One row of a suite on one workload -> the cells that it consists of."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from dpopt import registry
from dpopt.clipping.rules import Abadi, Normalized
from dpopt.errors import ConfigError
from dpopt.harness import refine, tuning, widen
from dpopt.harness.cell import Cell
from dpopt.harness.planned import Planned, all_done, distinct, mean_score, point_of, score_of, tuned_of
from dpopt.harness.suite import Setting, Suite
from dpopt.harness.tuning import Outcome, Run
from dpopt.privacy import accountants, sampling
from dpopt.privacy.calibration import calibrate, cost, require_bounded
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import After, BestOf, Composed, Selection, selection_spec
from dpopt.sizes import default_delta, number_of_draws, sampling_rate
from dpopt.store.runs import Store
from dpopt.workloads.base import Workload

MOST_CELLS = 10**6
"""Cells of a row on a workload that can be planned."""


class Place(NamedTuple):
    """Where in a row a search is made: the suite's epsilon, B, C, epochs and seed."""

    epsilon: float
    epochs: float
    batch_size: int
    clip: float
    seed: int


class Row:
    """One row of a suite on one workload.

    Args:
        suite: what is planned.
        name, workload: registered name and workload.
        label, setting: of the row.

    Raises:
        ConfigError: row, workload and suite do not go together.
    """

    def __init__(self, suite: Suite, name: str, workload: Workload, label: str, setting: Setting) -> None:
        self._suite, self._workload, self._label, self._setting = suite, workload, label, setting
        self._where = f"{suite.name}.settings.{label}"
        self._rule = tuning.check(setting, self._where)
        _check_search(suite, name, workload, setting, self._rule, self._where)
        self._delta = default_delta(workload.examples) if suite.delta is None else suite.delta
        accountants.check(self._delta, suite.accountant)
        self._spec = registry.spec("workload", name, workload)
        self._optimizers: dict[str, dict[str, Any]] = {}
        self._numbers: dict[tuple[float, int], dict[tuple[Any, ...], int]] = {}
        self._points = cost(registry.from_spec("optimizer", _optimizer(setting, {}, 1.0))).gradients_per_draw
        if setting.widen:  # which makes an optimizer of each point, so a value that cannot be used is told first
            _check_alike(setting, f"{self._where}.widen", setting.widen, tuning.REMEDY)
            if not refine.ends(tuning.points(setting.grid)):
                reason = "nothing to widen: no field of the grid has several positive numbers"
                raise ConfigError(f"{self._where}.widen", setting.widen, f"{reason}{tuning.REMEDY}")
        if isinstance(self._rule, BestOf):
            _check_alike(setting, f"{self._where}.grid", sorted(setting.grid), "")

    def cells(self, results: Store | None, journal: refine.Journal | None) -> Iterator[Planned]:
        """All cells; those that follow from the outcome of others only where `results` has it.

        Args:
            results: what is known by now.
            journal: of `refine.open_journal`, where the row is refined.
        """
        made: dict[tuple[float, float], list[Planned]] = {}
        searches: list[tuple[Place, list[Planned], int]] = []
        known = set[str]()
        for place in self._places():
            sampling_rate(place.batch_size / self._suite.scale_down, self._workload.examples)
            number_of_draws(place.epochs, place.batch_size, self._workload.examples)
            found = self._search(place)
            fresh = [entry for entry in found if entry.cell.run_id not in known]
            yield from fresh
            known.update(entry.cell.run_id for entry in found)  # a rule without a bound makes one cell of every C
            if fresh:
                searches.append((place, found, fresh[0].cell.search))
            made.setdefault((place.epsilon, place.epochs), []).extend(found)
            if self._setting.tuning == "linear_scaling":
                number = self._number(len(found), found[0].cell.optimizer, place)  # even where it is not planned yet
                if fresh and results is not None and all_done(found, results):
                    last = self._planned(_last_run(found, results), place, number)
                    yield dataclasses.replace(last, search_id=found[0].search_id)
        if self._setting.refine:
            yield from self._refinement(made, results, journal)
        if self._setting.widen and results is not None:
            for place, found, first in searches:
                if all_done(found, results):
                    yield from self._widened(place, found, first, results)

    def _places(self) -> Iterator[Place]:
        suite, setting = self._suite, self._setting
        lengths = [
            (epsilon, epochs)
            for epsilon in setting.epsilon or suite.epsilon
            for epochs in _epochs(suite, self._workload, setting, epsilon)
        ]
        batch_sizes = setting.batch_size or suite.batch_size or (self._workload.batch_size,)
        clips, seeds = setting.clip or suite.clip or (self._workload.clip,), setting.seeds or suite.seeds
        cells = math.prod(map(len, (lengths, batch_sizes, clips, seeds, *setting.grid.values())))
        if cells > MOST_CELLS:
            raise ConfigError(self._where, f"{cells} cells", f"expected at most {MOST_CELLS:,} on a workload")
        for (epsilon, epochs), size, clip, seed in product(lengths, batch_sizes, clips, seeds):
            yield Place(epsilon, epochs, size, clip, seed)

    def _search(self, place: Place) -> list[Planned]:
        """The runs of one search, without those that follow from others."""
        runs = tuning.runs(self._setting, self._rule, place.epsilon, (self._spec, place.seed))
        found = [self._planned(run, place) for run in runs]
        search_id = f"{derive('search', *(entry.cell.run_id for entry in found)):032x}"
        return [dataclasses.replace(entry, search_id=search_id) for entry in found]

    def _planned(self, run: Run, place: Place, number: int | None = None) -> Planned:
        optimizer, suite = self._optimizer(run.point, place.clip, place.epsilon), self._suite
        cell = Cell(
            workload=self._spec,
            optimizer=optimizer,
            epsilon=run.epsilon,
            delta=self._delta,
            accountant=suite.accountant,
            batch_size=place.batch_size,
            epochs=place.epochs,
            seed=place.seed,
            search=self._number(run.number, optimizer, place) if number is None else number,
            kernel=sampling.REVISION,
            selection=selection_spec(run.selection) if run.selection else None,
            untrained=run.untrained,
            scale_down=suite.scale_down,
            diagnostics=suite.diagnostics,
            average=self._setting.average,
        )
        return Planned(
            cell,
            label=self._label,
            tuning=self._setting.tuning,
            tuned=run.point,
            target=place.epsilon,
            gradients_per_draw=self._points,
            stage=run.stage,
            widen=self._setting.widen,
        )

    def _optimizer(self, point: Mapping[str, Any], clip: float, epsilon: float) -> dict[str, Any]:
        key = str((point, clip, epsilon == math.inf))
        if key not in self._optimizers:
            optimizer = self._optimizers[key] = _optimizer(self._setting, point, clip)
            require_bounded(registry.from_spec("optimizer", optimizer), epsilon)
        return self._optimizers[key]

    def _number(self, run: int, optimizer: Mapping[str, Any], place: Place) -> int:
        """A cell's number within all searches that a seed makes at one epsilon.

        Whoever chooses among several B, C and epochs has made one large search, whose runs must not share their draws
        if they are to be charged one after the other. A rule without a bound makes the same cell of every C.
        """
        own = self._numbers.setdefault((place.epsilon, place.seed), {})
        return own.setdefault((place.batch_size, place.epochs, str(optimizer.get("clip")), run), len(own))

    def _refinement(
        self, made: Mapping[tuple[float, float], list[Planned]], results: Store | None, journal: refine.Journal | None
    ) -> Iterator[Planned]:
        _check_refinement(self._setting, self._workload, self._rule, next(iter(made.values())), f"{self._where}.refine")
        for length, grid in made.items():
            others = [epochs for epsilon, epochs in made if epsilon == length[0]]
            if results is not None and journal is not None and all_done(grid, results):
                yield from _refined(
                    grid, self._setting.refine, partial(self._further, length, others), results, journal
                )

    def _further(
        self, length: tuple[float, float], others: list[float], index: int, point: refine.Point
    ) -> list[Planned]:
        """The cells of one proposal; their numbers follow those of the grid, in turn for each number of epochs."""
        (epsilon, epochs), grid = length, self._setting.grid
        run = Run(0, {key: point[key] for key in grid}, epsilon)
        found = []
        for seed in self._setting.seeds or self._suite.seeds:
            number = len(self._numbers[epsilon, seed]) + index * len(others) + others.index(epochs)
            place = Place(epsilon, epochs, point["B"], point["C"] or 1.0, seed)
            found.append(dataclasses.replace(self._planned(run, place, number), is_refined=True))
        return found

    def _widened(self, place: Place, grid: list[Planned], first: int, results: Store) -> Iterator[Planned]:
        """What follows from a grid that is done; `first` is the number of its first run that no earlier search made.

        Numbers depend on `first` alone and lie above those of all grids, so no two searches of a seed share one. More
        epsilons or seeds change none of them. More epochs, B, C or points of a grid may: the searches after them are
        numbered anew, with their grids and with what follows.
        """
        written = {(key, str(tuned_of(entry)[key])): value for entry in grid for key, value in entry.tuned.items()}

        def planned(index: int, point: refine.Point) -> Planned:
            run = Run(
                0,
                {key: written.get((key, str(value)), value) for key, value in point.items()},
                place.epsilon,
                self._rule,
            )
            entry = self._planned(run, place, MOST_CELLS * (1 + index) + first)
            return dataclasses.replace(entry, is_widened=True, search_id=grid[0].search_id)

        def score(index: int, point: refine.Point) -> float | None:
            entry = planned(index, point)
            return score_of(entry, results) if all_done([entry], results) else None

        def accepts(point: refine.Point) -> bool:
            try:
                self._optimizer(point, place.clip, place.epsilon)
                return self._are_alike((*(entry.tuned for entry in grid), point), place)
            except ConfigError:
                return False

        known = [(tuned_of(entry), score_of(entry, results)) for entry in grid]
        points = widen.further(known, self._setting.widen, accepts, score)
        yield from (planned(index, point) for index, point in enumerate(points))

    def _are_alike(self, points: Iterable[Mapping[str, Any]], place: Place) -> bool:
        """Whether runs of all points leave the same ledger, whatever C is, which none shows."""
        size = place.batch_size / self._suite.scale_down
        rate = sampling_rate(size, self._workload.examples)
        draws = number_of_draws(place.epochs, place.batch_size, self._workload.examples)
        made = (registry.from_spec("optimizer", _optimizer(self._setting, point, 1.0)) for point in points)
        return widen.are_alike(made, rate, draws)


def _check_search(
    suite: Suite, name: str, workload: Workload, setting: Setting, rule: Selection | None, where: str
) -> None:
    """Raise `ConfigError` where the workload or the epsilons do not suit a row's search."""
    if setting.tuning not in ("self", "fixed") and not workload.validation:
        allowed = "its training records are all used: a search needs `validation` records to select on"
        raise ConfigError(f"{suite.name}.workloads.{name}.validation", 0, allowed)
    is_charged = setting.tuning == "linear_scaling" or isinstance(rule, BestOf | Composed)
    if is_charged and not workload.score.endswith("accuracy"):
        allowed = "a charged search needs a score that one record changes by at most one: an accuracy"
        raise ConfigError(f"{where}.tuning", setting.tuning, f"{allowed}, and that of {name} is {workload.score}")
    if setting.tuning == "linear_scaling" and suite.scale_down != 1:
        allowed = (
            f"{where} pays for its searches from one budget, which runs that are scaled down overspend: expected 1"
        )
        raise ConfigError(f"{suite.name}.scale_down", suite.scale_down, allowed)
    if setting.tuning == "linear_scaling" and math.inf in (setting.epsilon or suite.epsilon):
        raise ConfigError(f"{where}.tuning", setting.tuning, "linear scaling needs a finite epsilon")


def _check_alike(setting: Setting, where: str, value: Any, remedy: str) -> None:
    """Raise `ConfigError` where the points of a grid differ in what a run releases, as far as a short run shows it.

    Which run comes next, or is kept, follows from scores; what that costs is known for runs that release alike.
    """
    made = (registry.from_spec("optimizer", _optimizer(setting, point, 1.0)) for point in tuning.points(setting.grid))
    if not widen.are_alike(made, rate=0.1, draws=60):
        reason = "its points differ in what a run releases, which must not follow from scores"
        raise ConfigError(where, value, f"{reason}{remedy}")


def _check_refinement(
    setting: Setting, workload: Workload, rule: Selection | None, grid: list[Planned], where: str
) -> None:
    """Raise `ConfigError` where a row has no search that could go on."""
    if rule is not None or setting.tuning in ("private", "linear_scaling"):
        reason = "its search is charged, and what follows would not be"
    elif setting.tuning == "random":
        reason = "its points are drawn at random, and a grid is refined"
    elif not workload.validation:
        reason = "a search needs `validation` records to select on"
    elif not refine.ends([point_of(entry) for entry in distinct(grid)]):
        reason = "nothing to refine: one clipping bound (or a rule without one), one batch size, no numbers in a grid"
    else:
        return
    raise ConfigError(where, setting.refine, f"{reason}{tuning.REMEDY}")


def _refined(
    grid: list[Planned],
    number: int,
    further: Callable[[int, refine.Point], list[Planned]],
    results: Store,
    journal: refine.Journal,
) -> Iterator[Planned]:
    """The proposals that follow from a finished grid, each with all seeds: a point's score is the mean over them.

    So every seed has the same points, as a table needs that compares settings over seeds.
    """
    cells, points = distinct(grid), dict[str, list[Planned]]()
    for entry in cells:
        points.setdefault(json.dumps(point_of(entry), sort_keys=True), []).append(entry)
    known = [(point_of(entries[0]), mean_score(entries, results)) for entries in points.values()]
    first, digest = cells[0], derive(*(entry.cell.run_id for entry in cells))
    name = f"{first.label}, epsilon {first.target:g}, {first.cell.epochs:g} epochs, {digest:032x}"

    def score(index: int, point: refine.Point) -> float | None:
        entries = further(index, point)
        return mean_score(entries, results) if all_done(entries, results) else None

    for index, point in enumerate(refine.proposals(journal, name, known, number, score)):
        yield from further(index, point)


def _last_run(found: list[Planned], results: Store) -> Run:
    """The run that linear scaling ends with, from the stored outcomes of those before."""
    outcomes = []
    for entry in found:
        score, ledger = score_of(entry, results), results.ledger(entry.cell.run_id)
        outcomes.append(Outcome(entry.cell.epsilon, tuned_of(entry)["lr"], score, ledger))
    first, record = found[0].cell, results.record(found[0].cell.run_id)

    def left(spent: Ledger) -> float:
        size = {key: record[key] for key in ("rate", "draws", "dimension", "delta", "accountant")}
        optimizer = registry.from_spec("optimizer", first.optimizer)
        return calibrate(optimizer, epsilon=found[0].target, selection=After(spent), **size).epsilon

    return tuning.linear_scaling(outcomes, found[0].target, left)


def _epochs(suite: Suite, workload: Workload, setting: Setting, epsilon: float) -> tuple[float, ...]:
    """The numbers of epochs that a row has at `epsilon`."""
    epochs = setting.epochs or suite.epochs or (workload.epochs,)
    if isinstance(epochs, tuple):
        return epochs
    if epsilon not in epochs:
        raise ConfigError(f"{suite.name}.epochs", epochs, f"expected a number for epsilon {epsilon:g} too")
    return (epochs[epsilon],)


def _optimizer(setting: Setting, point: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """The optimizer of one grid point; the clip axis sets the bound of a rule that has one and was not given it."""
    optimizer = registry.make("optimizer", setting.name, {**setting.fields, **point})
    given = {**registry.entry("optimizer", setting.name).fields, **setting.fields, **point}
    rule = given.get("clip", {})
    is_given = rule not in ("abadi", "normalized") and not (isinstance(rule, Mapping) and "bound" not in rule)
    if not is_given and isinstance(getattr(optimizer, "clip", None), Abadi | Normalized):
        optimizer = dataclasses.replace(optimizer, clip=dataclasses.replace(optimizer.clip, bound=clip))
    return registry.spec("optimizer", setting.name, optimizer)
