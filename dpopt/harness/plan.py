"""Suite -> the cells that it consists of. Everything that can be wrong with a suite is found here, before any work."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from dpopt import fields, registry
from dpopt.clipping.rules import Abadi, Normalized
from dpopt.errors import ConfigError, unknown
from dpopt.harness import refine
from dpopt.harness import tuning as tuning_rules
from dpopt.harness.cell import Cell
from dpopt.harness.suite import Setting, Suite, axis
from dpopt.harness.tuning import Outcome, Run
from dpopt.privacy import accountants, sampling
from dpopt.privacy.calibration import calibrate, cost, require_bounded
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import After, BestOf, Composed, Selection, selection_spec
from dpopt.training import number_of_draws, sampling_rate
from dpopt.workloads.base import Workload


@dataclass(frozen=True)
class Planned:
    """One cell of a suite and its place in it.

    Attributes:
        cell: what is run.
        label: the row that it belongs to.
        tuning: see `suite.Setting`.
        tuned: the grid point, field -> value.
        clip: value of the suite's clip axis.
        target: the suite's epsilon, which is not the cell's in the first runs of a search in several parts.
        gradients_per_draw: points at which the optimizer computes gradients.
        stage: see `tuning.Run`.
        is_refined: whether it is none of the suite's grid but a proposal, see `refine`.
    """

    cell: Cell
    label: str
    tuning: str
    tuned: dict[str, Any]
    clip: float
    target: float
    gradients_per_draw: float
    stage: str = ""
    is_refined: bool = False

    def content(self) -> dict[str, Any]:
        """As plain JSON data, for the manifest."""
        rest = {"label": self.label, "tuning": self.tuning, "tuned": self.tuned}
        stage = {"stage": self.stage, "target": self.target} if self.stage else {}
        clip = "inf" if self.clip == math.inf else self.clip
        cost = {"gradients_per_draw": self.gradients_per_draw}
        refined = {"refined": True} if self.is_refined else {}
        own = {"run_id": self.cell.run_id, "clip": clip, **rest, **stage, **refined, **cost}
        return own | {"cell": self.cell.content()}


class Results(Protocol):
    """What planning needs of the store; `dpopt.store.Store` documents the methods."""

    def state(self, run_id: str) -> str: ...
    def record(self, run_id: str) -> dict[str, Any]: ...
    def ledger(self, run_id: str) -> Ledger: ...
    def journal(self, suite: str) -> Path: ...


def plan(suite: Suite, results: Results | None = None) -> list[Planned]:
    """Every cell of `suite`, paired by seed across optimizers.

    Args:
        suite: what to plan.
        results: what is known by now; cells that follow from the outcome of others are planned once these are done.

    Raises:
        ConfigError: anything in the suite that cannot be used; data that cannot be found.
    """
    for label in suite.settings:
        if label not in suite.optimizers and label not in registry.optimizers():
            _setting(suite, label)  # a label that is not selected must still make sense
    settings = {label: _setting(suite, label) for label in suite.optimizers}
    is_refined = results is not None and any(setting.refine for setting in settings.values())
    journal = refine.open_journal(results.journal(suite.name)) if results is not None and is_refined else None
    planned = []
    for name, workload in _workloads(suite):
        for label, setting in settings.items():
            planned += list(_row(suite, name, workload, label, setting, results, journal))
    return planned


def manifest(suite: Suite, planned: list[Planned]) -> dict[str, Any]:
    """What the store keeps of a plan, enough to make every table and figure again."""
    published = {"published": dataclasses.asdict(suite.published)} if suite.published else {}
    cells = [entry.content() for entry in planned]
    return {"suite": suite.name, "description": suite.description, **published, "cells": cells}


def _workloads(suite: Suite) -> list[tuple[str, Workload]]:
    made = []
    for entry in suite.workloads:
        content = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(content, dict) or "name" not in content:
            allowed = "expected a name or {name: ..., field: value or values}"
            raise ConfigError(f"{suite.name}.workloads", entry, allowed)
        values = {key: value if isinstance(value, list) else [value] for key, value in content.items()}
        if empty := [key for key, several in values.items() if not several]:
            raise ConfigError(f"{suite.name}.workloads.{empty[0]}", [], "expected a value or a list of values")
        for point in product(*values.values()):
            given = dict(zip(values, point, strict=True))
            workload = registry.create_workload(**given)
            workload.check()
            made.append((given["name"], workload))
    return made


def _setting(suite: Suite, label: str) -> Setting:
    where = f"{suite.name}.settings.{label}"
    content = dict(suite.settings.get(label, {}))
    known = [f.name for f in dataclasses.fields(Setting)]
    for key in content:
        if key not in known:
            raise unknown(where, key, known)
    name = content.get("name", label)
    entry = registry.entry("optimizer", name) if name in registry.optimizers() or label == name else None
    if entry is None:
        raise unknown(f"{where}.name", name, registry.optimizers())
    grid = content.get("grid", entry.grid)
    tuning = content.get("tuning", "grid" if grid else "self")
    selection = content.get("selection")
    given = {
        "name": name,
        "fields": content.get("fields", {}),
        "tuning": tuning,
        "grid": grid if tuning not in ("self", "fixed") else {},
        "selection": {"rule": selection} if isinstance(selection, str) else selection,
        "runs": content.get("runs"),
        "refine": content.get("refine", suite.refine),
    }
    setting = fields.build(Setting, given, where)
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, or fixed")
    tuning_rules.check(setting, where)
    return dataclasses.replace(
        setting,
        epsilon=axis(content.get("epsilon"), fields.Bound, f"{where}.epsilon"),
        epochs=axis(content.get("epochs"), fields.Positive, f"{where}.epochs"),
        batch_size=axis(content.get("batch_size"), fields.Count, f"{where}.batch_size"),
        clip=axis(content.get("clip"), fields.Bound, f"{where}.clip"),
        seeds=axis(content.get("seeds"), int, f"{where}.seeds"),
    )


def _row(
    suite: Suite, name: str, workload: Workload, label: str, setting: Setting, results: Results | None, journal: Any
) -> Iterator[Planned]:
    """The cells of one row of the suite on one workload."""
    where = f"{suite.name}.settings.{label}"
    rule = tuning_rules.check(setting, where)
    _check_search(suite, name, workload, setting, rule, where)
    delta = workload.examples**-1.1 if suite.delta is None else suite.delta
    accountants.check(delta, suite.accountant)
    lengths = [(e, n) for e in setting.epsilon or suite.epsilon for n in _epochs(suite, workload, setting, e)]
    batch_sizes = setting.batch_size or suite.batch_size or (workload.batch_size,)
    clips, seeds = setting.clip or suite.clip or (workload.clip,), setting.seeds or suite.seeds
    made: dict[tuple[float, float], list[Planned]] = {length: [] for length in lengths}
    workload_spec = registry.spec("workload", name, workload)
    specs: dict[str, dict[str, Any]] = {}
    points = cost(registry.from_spec("optimizer", _optimizer(setting, {}, 1.0))).gradients_per_draw

    def planned(run: Run, epsilon: float, epochs: float, batch_size: int, clip: float, seed: int) -> Planned:
        key = str((run.point, clip))
        specs[key] = specs.get(key) or _optimizer(setting, run.point, clip)
        require_bounded(registry.from_spec("optimizer", specs[key]), epsilon)
        cell = Cell(
            workload_spec,
            specs[key],
            run.epsilon,
            delta,
            suite.accountant,
            batch_size,
            epochs,
            seed,
            run.number,
            sampling.REVISION,
            selection_spec(run.selection) if run.selection else None,
            run.untrained,
            suite.dry_run,
            suite.diagnostics,
        )
        return Planned(cell, label, setting.tuning, run.point, clip, epsilon, points, run.stage)

    for (epsilon, epochs), batch_size, clip, seed in product(lengths, batch_sizes, clips, seeds):
        sampling_rate(batch_size / suite.dry_run, workload.examples)
        number_of_draws(epochs, batch_size, workload.examples)
        place = (epsilon, epochs, batch_size, clip, seed)
        found = [planned(run, *place) for run in tuning_rules.runs(setting, rule, epsilon, (workload_spec, seed))]
        yield from found
        made[epsilon, epochs] += found
        if results is not None and setting.tuning == "linear_scaling" and _all_done(found, results):
            yield planned(_last_run(found, results), *place)

    def further(length: tuple[float, float], index: int, point: refine.Point) -> list[Planned]:
        run = Run(len(tuning_rules.points(setting.grid)) + index, {key: point[key] for key in setting.grid}, length[0])
        cells = [planned(run, *length, point["B"], point["C"], seed) for seed in seeds]
        return [dataclasses.replace(entry, is_refined=True) for entry in cells]

    if setting.refine:
        _check_refinement(setting, workload, rule, made[lengths[0]], f"{where}.refine")
        for length, grid in made.items():
            if results is not None and _all_done(grid, results):
                yield from _refined(grid, setting.refine, partial(further, length), results, journal)


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
    if setting.tuning == "linear_scaling" and suite.dry_run != 1:
        allowed = f"{where} pays for its searches from one budget, which a dry run overspends: expected 1"
        raise ConfigError(f"{suite.name}.dry_run", suite.dry_run, allowed)
    if setting.tuning == "linear_scaling" and math.inf in (setting.epsilon or suite.epsilon):
        raise ConfigError(f"{where}.tuning", setting.tuning, "linear scaling needs a finite epsilon")


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
    elif not refine.ends([_point(entry) for entry in _distinct(grid)]):
        reason = "nothing to refine: one clipping bound (or a rule without one), one batch size, no numbers in a grid"
    else:
        return
    raise ConfigError(where, setting.refine, f"{reason}; 0 leaves the row as it is")


def _refined(
    grid: list[Planned],
    number: int,
    further: Callable[[int, refine.Point], list[Planned]],
    results: Results,
    journal: Any,
) -> Iterator[Planned]:
    """The proposals that follow from a finished grid, each with all seeds: a point's score is the mean over them.

    So every seed has the same points, as a table needs that compares settings over seeds.
    """
    cells, points = _distinct(grid), dict[str, list[Planned]]()
    for entry in cells:
        points.setdefault(json.dumps(_point(entry), sort_keys=True), []).append(entry)
    known = [(_point(entries[0]), _validation(entries, results)) for entries in points.values()]
    first, digest = cells[0], derive(*(entry.cell.run_id for entry in cells))
    name = f"{first.label}, epsilon {first.target:g}, {first.cell.epochs:g} epochs, {digest:032x}"

    def score(index: int, point: refine.Point) -> float | None:
        entries = further(index, point)
        return _validation(entries, results) if _all_done(entries, results) else None

    for index, point in enumerate(refine.proposals(journal, name, known, number, score)):
        yield from further(index, point)


def _distinct(grid: list[Planned]) -> list[Planned]:
    """Each cell once: a rule that has no bound makes the same one of every C."""
    return list({entry.cell.run_id: entry for entry in reversed(grid)}.values())[::-1]


def _point(entry: Planned) -> dict[str, Any]:
    """Where a cell lies in its row's search, numbers as the optimizer has them."""
    tuned = {key: entry.cell.optimizer.get(key, value) for key, value in entry.tuned.items()}
    return {"C": entry.clip, "B": entry.cell.batch_size, **tuned}


def _validation(entries: list[Planned], results: Results) -> float:
    """The mean validation score of finished cells; one that is no number makes it the worst."""
    records = [results.record(entry.cell.run_id) for entry in entries]
    scores = [record.get(f"validation_{record.get('score', 'accuracy')}") for record in records]
    return fmean(-math.inf if score is None or math.isnan(score) else score for score in scores)


def _all_done(found: list[Planned], results: Results) -> bool:
    return all(results.state(entry.cell.run_id) in ("done", "diverged") for entry in found)


def _last_run(found: list[Planned], results: Results) -> Run:
    """The run that linear scaling ends with, from the stored outcomes of those before."""
    outcomes = []
    for entry in found:
        record, ledger = results.record(entry.cell.run_id), results.ledger(entry.cell.run_id)
        outcomes.append(Outcome(entry.cell.epsilon, entry.tuned["lr"], record["released_score"]["value"], ledger))
    first, record = found[0].cell, results.record(found[0].cell.run_id)

    def left(spent: Ledger) -> float:
        size = {key: record[key] for key in ("rate", "draws", "dimension", "delta", "accountant")}
        optimizer = registry.from_spec("optimizer", first.optimizer)
        return calibrate(optimizer, epsilon=found[0].target, selection=After(spent), **size).epsilon

    return tuning_rules.linear_scaling(outcomes, found[0].target, left)


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
    optimizer = registry.create(setting.name, **{**setting.fields, **point})
    given = {**registry.entry("optimizer", setting.name).fields, **setting.fields, **point}
    rule = given.get("clip", {})
    is_given = rule not in ("abadi", "normalized") and not (isinstance(rule, Mapping) and "bound" not in rule)
    if not is_given and isinstance(getattr(optimizer, "clip", None), Abadi | Normalized):
        optimizer = dataclasses.replace(optimizer, clip=dataclasses.replace(optimizer.clip, bound=clip))
    return registry.spec("optimizer", setting.name, optimizer)
