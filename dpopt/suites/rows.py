"""One row of a suite on one workload -> the cells that it consists of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from dpopt import registry
from dpopt.cells import Cell, bounded_rule
from dpopt.clipping.flat import layout_of
from dpopt.clipping.rules import ByGroup
from dpopt.errors import ConfigError
from dpopt.privacy import accountants, sampling
from dpopt.privacy.calibration import calibrate, cost, require_bounded
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger, default_delta, number_of_draws, sampling_rate
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import After, BestOf, Composed, Selection, selection_spec
from dpopt.store.runs import Store
from dpopt.suites.schema import Keys, Setting
from dpopt.suites.searches import SEARCHED, Planned, Run, beyond, ends, linear_scaling, points, runs, same_releases
from dpopt.types import Layout
from dpopt.workloads.base import Workload

_MOST_CELLS = 10**6
"""Cells of a row on a workload that can be planned."""

Make = Callable[[tuple[str, dict[str, Any]] | dict[str, Any]], Any]
"""See `maker`."""


class _Place(NamedTuple):
    """The place of a search in a row: the suite's epsilon, epochs, B, C and seed."""

    epsilon: float
    epochs: float
    batch_size: int
    clip: float
    seed: int


@dataclass(frozen=True)
class Row:
    """One row of a suite on one workload.

    Raises:
        ConfigError: row, workload and suite do not go together.
    """

    suite: Keys  # the suite that is planned
    name: str  # of the workload
    workload: Workload
    label: str  # of the row
    setting: Setting  # this and `rule`: of `setting_of`
    rule: Selection | None
    gradients_per_draw: float  # of `gradients_per_draw`
    make: Make  # of `maker`
    _optimizers: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _numbers: dict[tuple[float, int], dict[tuple[Any, ...], int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        setting = self.setting
        self._check_search()
        accountants.check_claim(self._delta, self.suite.accountant)
        if setting.widen:  # it makes an optimizer of each point, so a value that cannot be used is refused first
            self._check_releases("widen", setting.widen, "; 0 leaves the row as it is")
            if not ends(points(setting.grid)):
                reason = "nothing to widen: no field of the grid has several positive numbers"
                raise ConfigError(f"{self._where}.widen", setting.widen, f"{reason}; 0 leaves the row as it is")
        if isinstance(self.rule, BestOf):
            self._check_releases("grid", sorted(setting.grid), "")

    @property
    def _where(self) -> str:
        return f"{self.suite.name}.settings.{self.label}"

    @property
    def _delta(self) -> float:
        return default_delta(self.workload.examples) if self.suite.delta is None else self.suite.delta

    @cached_property
    def _spec(self) -> dict[str, Any]:
        return registry.spec("workload", self.name, self.workload)

    def cells(self, results: Store | None) -> Iterator[Planned]:
        """All cells; those that follow from the outcome of others only where `results` has that outcome."""
        searches: list[tuple[_Place, list[Planned], int]] = []
        planned = set[str]()
        for place in self._places():
            # Both raise for sizes that the workload's records do not allow, before anything is planned from them.
            sampling_rate(place.batch_size, self.workload.examples)
            number_of_draws(place.epochs, place.batch_size, self.workload.examples)
            drawn = runs(self.setting, self.rule, place.epsilon, (self._spec, place.seed))
            entries = [self._cell(run, place) for run in drawn]
            search_id = f"{derive('search', *(entry.cell.run_id for entry in entries)):032x}"
            entries = [dataclasses.replace(entry, search_id=search_id) for entry in entries]
            fresh = [entry for entry in entries if entry.cell.run_id not in planned]
            yield from fresh
            planned.update(entry.cell.run_id for entry in entries)  # a rule without a bound makes one cell of every C
            if fresh:
                searches.append((place, entries, fresh[0].cell.search))
            if self.setting.tuning == "linear_scaling":
                # Numbered even where it is not planned yet.
                number = self._number(len(entries), entries[0].cell.optimizer, place)
                if fresh and results is not None and _all_done(entries, results):
                    last = self._cell(_last_run(entries, results, self.make), place, number)
                    yield dataclasses.replace(last, search_id=search_id)
        if self.setting.widen and results is not None:
            for place, entries, first in searches:
                if _all_done(entries, results):
                    yield from self._widened(place, entries, first, results)

    def _places(self) -> Iterator[_Place]:
        suite, setting, workload = self.suite, self.setting, self.workload
        lengths = list[tuple[float, float]]()
        for epsilon in setting.epsilon or suite.epsilon:
            epochs = setting.epochs or suite.epochs or (workload.epochs,)
            if not isinstance(epochs, tuple):
                if epsilon not in epochs:
                    allowed = f"expected a number for epsilon {epsilon:g} too"
                    raise ConfigError(f"{suite.name}.epochs", epochs, allowed)
                epochs = (epochs[epsilon],)
            lengths += [(epsilon, each) for each in epochs]
        batch_sizes = setting.batch_size or suite.batch_size or (workload.batch_size,)
        clips, seeds = setting.clip or suite.clip or (workload.clip,), setting.seeds or suite.seeds
        cells = math.prod(map(len, (lengths, batch_sizes, clips, seeds, *setting.grid.values())))
        if cells > _MOST_CELLS:
            raise ConfigError(self._where, f"{cells} cells", f"expected at most {_MOST_CELLS:,} on a workload")
        for (epsilon, epochs), size, clip, seed in product(lengths, batch_sizes, clips, seeds):
            yield _Place(epsilon, epochs, size, clip, seed)

    def _cell(self, run: Run, place: _Place, number: int | None = None) -> Planned:
        optimizer, suite = self._optimizer(run.point, place.clip, place.epsilon), self.suite
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
            diagnostics=suite.diagnostics,
            average=self.setting.average,
            grid=not self.workload.is_public,
        )
        return Planned(
            cell,
            label=self.label,
            tuning=self.setting.tuning,
            tuned=run.point,
            target=place.epsilon,
            gradients_per_draw=self.gradients_per_draw,
            chosen_on=self.setting.chosen_on,
            stage=run.stage,
            widen=self.setting.widen,
        )

    def _optimizer(self, point: Mapping[str, Any], clip: float, epsilon: float) -> dict[str, Any]:
        key = str((point, clip, epsilon == math.inf))
        if key not in self._optimizers:
            optimizer = _optimizer(self.setting, point, clip, self.make)
            require_bounded(self.make(optimizer), epsilon)
            # By what describes it, as an isolated optimizer shows no rule.
            match optimizer.get("clip"):
                case {"rule": "by_group", "groups": str(groups)} if self._layout is not None:
                    ByGroup(groups=groups).partition(self._layout, f"{self._where}.clip")
            self._optimizers[key] = optimizer
        return self._optimizers[key]

    @cached_property
    def _layout(self) -> Layout | None:
        """That of the workload's model; None where files have to be there first, as when a cell is prepared."""
        with suppress(ConfigError):
            return layout_of(self.workload.outline().model)

    def _number(self, run: int, optimizer: Mapping[str, Any], place: _Place) -> int:
        """A cell's number within all searches that a seed makes at one epsilon.

        Whoever chooses among several B, C and epochs has made one large search, whose runs must not share their draws
        if they are to be charged one after the other. A rule without a bound makes the same cell of every C.
        """
        numbers = self._numbers.setdefault((place.epsilon, place.seed), {})
        return numbers.setdefault((place.batch_size, place.epochs, str(optimizer.get("clip")), run), len(numbers))

    def _widened(self, place: _Place, grid: list[Planned], first: int, results: Store) -> Iterator[Planned]:
        """The runs that follow from a grid that is done; `first` is the number of its first run that is new.

        Numbers depend on `first` alone and lie above those of all grids, so no two searches of a seed share one. More
        epsilons or seeds change none of them. More epochs, B, C or points of a grid may: the searches after them are
        numbered anew, with their grids and with what follows.
        """
        # A value that the grid has keeps the form in which the suite's file writes it.
        written = {(key, str(entry.point()[key])): value for entry in grid for key, value in entry.tuned.items()}

        def planned(index: int, point: dict[str, Any]) -> Planned:
            tuned = {key: written.get((key, str(value)), value) for key, value in point.items()}
            run = Run(0, tuned, place.epsilon, self.rule)
            entry = self._cell(run, place, _MOST_CELLS * (1 + index) + first)
            return dataclasses.replace(entry, is_widened=True, search_id=grid[0].search_id)

        def accepts(point: dict[str, Any]) -> bool:
            try:
                self._optimizer(point, place.clip, place.epsilon)
                rate = sampling_rate(place.batch_size, self.workload.examples)
                draws = number_of_draws(place.epochs, place.batch_size, self.workload.examples)
                return self._same_releases((*(entry.tuned for entry in grid), point), rate, draws)
            except ConfigError:
                return False

        scored = [(entry.point(), entry.score(results)) for entry in grid]
        for index in range(self.setting.widen):
            # A point that cannot be run ends the search in its direction.
            point = next(filter(accepts, beyond(scored)), None)
            if point is None:
                return
            yield (entry := planned(index, point))
            if not entry.is_done(results):  # what follows it depends on its score
                return
            scored.append((point, entry.score(results)))

    def _same_releases(self, tuned: Iterable[Mapping[str, Any]], rate: float, draws: int) -> bool:
        """True if all grid points release the same kinds in the same draws; C does not enter the ledger."""
        optimizers = (self.make(_optimizer(self.setting, point, 1.0, self.make)) for point in tuned)
        return same_releases(optimizers, rate, draws)

    def _check_releases(self, key: str, value: Any, remedy: str) -> None:
        """Raise `ConfigError` where the points of the grid differ in what a run releases, as far as a short run shows.

        Which run comes next, or is kept, follows from scores; what that costs is defined for runs that release alike.
        """
        if not self._same_releases(points(self.setting.grid), rate=0.1, draws=60):
            reason = "its points differ in what a run releases, which must not follow from scores"
            raise ConfigError(f"{self._where}.{key}", value, f"{reason}{remedy}")

    def _check_search(self) -> None:
        """Raise `ConfigError` where the workload or the epsilons do not suit the row's search."""
        suite, workload, setting, name = self.suite, self.workload, self.setting, self.name
        if setting.tuning in SEARCHED and not workload.validation:
            allowed = "its training records are all used: a search needs `validation` records to select on"
            raise ConfigError(f"{suite.name}.workloads.{name}.validation", 0, allowed)
        is_charged = setting.tuning == "linear_scaling" or isinstance(self.rule, BestOf | Composed)
        if is_charged and not workload.score.endswith("accuracy"):
            allowed = "a charged search needs a score that one record changes by at most one: an accuracy"
            allowed = f"{allowed}, and that of {name} is {workload.score}"
            raise ConfigError(f"{self._where}.tuning", setting.tuning, allowed)
        if setting.tuning == "linear_scaling" and math.inf in (setting.epsilon or suite.epsilon):
            raise ConfigError(f"{self._where}.tuning", setting.tuning, "linear scaling needs a finite epsilon")


def maker(isolate: bool) -> Make:
    """Makes an optimizer from its name and fields, or from its spec.

    With `isolate` in one process of its own, since whoever plans may hold data, or fork those who do. There each takes
    the place of the one before.
    """
    process: Isolated | None = None

    def make(content: tuple[str, dict[str, Any]] | dict[str, Any]) -> Any:
        nonlocal process
        if isolate:
            if process is None:
                process = Isolated(content)
            else:
                process.remake(content)
            return process
        if isinstance(content, tuple):
            return registry.make("optimizer", *content)
        return registry.from_spec("optimizer", content)

    return make


def gradients_per_draw(setting: Setting, make: Make) -> float:
    """Points at which the optimizer of a row computes gradients, which no workload changes."""
    return cost(make(_optimizer(setting, {}, 1.0, make))).gradients_per_draw


def _all_done(entries: Iterable[Planned], results: Store) -> bool:
    return all(entry.is_done(results) for entry in entries)


def _last_run(searched: list[Planned], results: Store, make: Make) -> Run:
    """The run that linear scaling ends with, from the stored outcomes of those before."""
    target, first = searched[0].target, results.record(searched[0].cell.run_id)
    spent = sum((results.ledger(entry.cell.run_id) for entry in searched), Ledger())
    size = {key: first[key] for key in ("rate", "draws", "dimension", "delta", "accountant")}
    left = calibrate(make(searched[0].cell.optimizer), epsilon=target, selection=After(spent), **size).epsilon
    outcomes = [(entry.cell.epsilon, entry.point()["lr"], entry.score(results)) for entry in searched]
    return Run(len(searched), {"lr": linear_scaling(outcomes, left)}, target, After(spent), stage="final")


def _optimizer(setting: Setting, point: Mapping[str, Any], clip: float, make: Make) -> dict[str, Any]:
    """The optimizer of one grid point; the clip axis sets the bound of a rule whose bound neither file nor row sets."""
    name = setting.name
    optimizer = make((name, {**setting.fields, **point}))
    spec = optimizer.spec(name) if isinstance(optimizer, Isolated) else registry.spec("optimizer", name, optimizer)
    stated = {**registry.entry("optimizer", name).fields, **setting.fields, **point}.get("clip", {})
    if (used := bounded_rule(spec.get("clip"))) is None:
        return spec
    if is_grouped := used is not spec["clip"]:
        stated = stated.get("inner", {}) if isinstance(stated, Mapping) else {}
    if stated in ("abadi", "normalized") or (isinstance(stated, Mapping) and "bound" not in stated):
        bounded = {**used, "bound": clip}
        spec = spec | {"clip": spec["clip"] | {"inner": bounded} if is_grouped else bounded}
    return spec
