"""Suite -> the cells that it consists of. Whatever is wrong with a suite is refused here, before any work."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

from dpopt import fields, registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError, Missing
from dpopt.privacy.ledger import number_of_draws
from dpopt.store.runs import Store
from dpopt.suites.rows import Row, gradients_per_draw, maker
from dpopt.suites.schema import Keys
from dpopt.suites.searches import Planned, points, setting_of
from dpopt.workloads.base import Workload


def plan(suite: Keys, results: Store | None = None) -> list[Planned]:
    """Every cell of `suite`, paired by seed across optimizers; a pure function, which needs neither data nor weights.

    Cells that follow from the outcome of others are planned once these are done in `results`.

    Raises:
        ConfigError: anything in the suite that cannot be used.
    """
    # A row that is not selected must make sense too.
    settings = {label: setting_of(suite, label) for label in dict.fromkeys((*suite.settings, *suite.optimizers))}
    rows = [(label, *settings[label]) for label in suite.optimizers]
    # Traced once a row, as it takes longer than all else here and is the same on every workload.
    make = maker(suite.isolate)
    points = {label: gradients_per_draw(setting, make) for label, setting, _ in rows}
    planned = []
    for name, workload in _workloads(suite):
        workload.check()
        for label, setting, rule in rows:
            planned += Row(suite, name, workload, label, setting, rule, points[label], make).cells(results)
    return planned


def missing(suite: Keys) -> list[Missing]:
    """The data sets and weights of a suite that are not on this machine, each once; asks no hub."""
    absent = (entry for _, workload in _workloads(suite) for entry in workload.missing())
    return list({(entry.kind, entry.name): entry for entry in absent}.values())


def require(suite: Keys) -> None:
    """Raise `Missing` where a suite needs data or weights that no hub will be asked for."""
    for entry in missing(suite):
        if not entry.hub:
            raise entry


def has_stages(suite: Keys) -> bool:
    """True if some cells of `suite` follow from the outcome of others."""
    settings = [setting_of(suite, label)[0] for label in suite.optimizers]
    return any(setting.widen or setting.tuning == "linear_scaling" for setting in settings)


def draws(cell: Cell) -> int:
    """The number of draws of a cell."""
    examples = _examples(json.dumps(cell.workload))
    return 0 if cell.untrained else number_of_draws(cell.epochs, cell.batch_size, examples)


def gradients(cell: Cell, per_draw: float) -> float:
    """Expected gradient evaluations of a cell, of one example at one point each; `per_draw` points in a draw."""
    return draws(cell) * cell.batch_size * per_draw


@cache
def _examples(workload: str) -> int:
    return registry.from_spec("workload", json.loads(workload)).examples


def cheapest_first(planned: Iterable[Planned]) -> list[Cell]:
    """Planned cells, each once, by their expected gradient evaluations, in their order where these are equal.

    Tables fill early, and what is wrong with a suite shows before much is spent on it.
    """
    ordered = sorted(planned, key=lambda entry: gradients(entry.cell, entry.gradients_per_draw))
    return list({entry.cell.run_id: entry.cell for entry in ordered}.values())


def to_follow(planned: list[Planned], store: Store) -> int:
    """The most cells beyond the ends of grids that may still be planned: of searches with runs that have no result."""
    searches: dict[tuple[Any, ...], list[Planned]] = defaultdict(list)
    for entry in planned:
        if entry.widen:
            searches[entry.label, *entry.search].append(entry)
    unfinished = [runs for runs in searches.values() if not all(entry.is_done(store) for entry in runs)]
    return sum(runs[0].widen - sum(entry.is_widened for entry in runs) for runs in unfinished)


def manifest(suite: Keys, planned: list[Planned]) -> dict[str, Any]:
    """The content of a plan for the store, enough to make every table and figure again."""
    cells = [entry.content() for entry in planned]
    return {"suite": suite.name, "description": suite.description, **suite.presented, "cells": cells}


def _workloads(suite: Keys) -> list[tuple[str, Workload]]:
    """Every workload of a suite with its name; several values of a field are an axis."""
    workloads = list[tuple[str, Workload]]()
    for entry in suite.workloads:
        where = f"{suite.name}.workloads"
        content = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(content, dict) or "name" not in content:
            raise ConfigError(where, entry, "expected a name or {name: ..., field: value or values}")
        values = {key: value if isinstance(value, list) else [value] for key, value in content.items()}
        if empty := [key for key, several in values.items() if not several]:
            raise ConfigError(f"{where}.{empty[0]}", [], "expected a value or a list of values")
        if math.prod(map(len, values.values())) > fields.FEW:
            raise ConfigError(where, content["name"], f"expected at most {fields.FEW:,} of one entry")
        for arguments in points(values):
            name = arguments["name"]
            workload = registry.make("workload", name, {k: v for k, v in arguments.items() if k != "name"})
            if any(workload == other for _, other in workloads):
                raise ConfigError(where, arguments, "it is repeated")
            workloads.append((name, workload))
    return workloads
