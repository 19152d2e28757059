"""Suite -> the cells that it consists of. Everything that can be wrong with a suite is found here, before any work."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpopt import fields, registry
from dpopt.errors import ConfigError, Missing
from dpopt.harness import refine, tuning
from dpopt.harness.planned import Planned, all_done
from dpopt.harness.rows import Row
from dpopt.harness.suite import Setting, Suite
from dpopt.store.runs import Store
from dpopt.workloads.base import Workload


def plan(suite: Suite, results: Store | None = None, journal: Callable[[str], Path] | None = None) -> list[Planned]:
    """Every cell of `suite`, paired by seed across optimizers; needs neither data nor weights.

    Args:
        suite: what to plan.
        results: what is known by now; cells that follow from the outcome of others are planned once these are done.
        journal: name of the suite -> the file in which the refinement of rows keeps its journal; without it, nothing is
            refined.

    Raises:
        ConfigError: anything in the suite that cannot be used.
    """
    for label in suite.settings:
        if label not in suite.optimizers and label not in registry.optimizers():
            _setting(suite, label)  # a label that is not selected must still make sense
    settings = {label: _setting(suite, label) for label in suite.optimizers}
    is_refined = results is not None and journal is not None and any(row.refine for row in settings.values())
    opened = refine.open_journal(journal(suite.name)) if journal is not None and is_refined else None
    planned = []
    for name, workload in _workloads(suite):
        workload.check()
        for label, setting in settings.items():
            planned += Row(suite, name, workload, label, setting).cells(results, opened)
    return planned


def preview(suite: Suite, store: Store) -> list[Planned]:
    """`plan` with what `store` holds, which is only read: refinement writes into a copy of its journal."""
    with TemporaryDirectory() as folder:

        def copied(name: str) -> Path:
            path, copy = store.journal_path(name), Path(folder, "refine.journal")
            if path.exists():
                shutil.copy(path, copy)
            return copy

        return plan(suite, store, copied)


def missing(suite: Suite) -> list[Missing]:
    """The data sets and weights of a suite that are not on this machine, each once; asks no hub."""
    found = (entry for _, workload in _workloads(suite) for entry in workload.missing())
    return list({(entry.kind, entry.name): entry for entry in found}.values())


def require(suite: Suite) -> None:
    """Raise `Missing` where a suite needs data or weights that no hub will be asked for."""
    for entry in missing(suite):
        if not entry.hub:
            raise entry


def has_stages(suite: Suite) -> bool:
    """Whether some cells of `suite` follow from the outcome of others."""
    settings = [_setting(suite, label) for label in suite.optimizers]
    return any(setting.refine or setting.widen or setting.tuning == "linear_scaling" for setting in settings)


def to_follow(planned: list[Planned], store: Store) -> int:
    """How many cells beyond the ends of grids may still be planned: of searches with runs that have no result."""
    searches: dict[tuple[Any, ...], list[Planned]] = defaultdict(list)
    for entry in planned:
        if entry.widen:
            searches[entry.label, *entry.search].append(entry)
    left = (found for found in searches.values() if not all_done(found, store))
    return sum(found[0].widen - sum(entry.is_widened for entry in found) for found in left)


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
        if math.prod(map(len, values.values())) > fields.FEW:
            raise ConfigError(
                f"{suite.name}.workloads", content["name"], f"expected at most {fields.FEW:,} of one entry"
            )
        for point in product(*values.values()):
            given = dict(zip(values, point, strict=True))
            workload = registry.make("workload", given["name"], {k: v for k, v in given.items() if k != "name"})
            if any(workload == other for _, other in made):
                raise ConfigError(f"{suite.name}.workloads", given, "it is repeated")
            made.append((given["name"], workload))
    return made


def _setting(suite: Suite, label: str) -> Setting:
    where = f"{suite.name}.settings.{label}"
    content = {key: value for key, value in suite.settings.get(label, {}).items() if value is not None}
    name = content.get("name", label)
    entry = registry.entry("optimizer", name)
    grid, selection = content.get("grid", entry.grid), content.get("selection")
    tuned = content.get("tuning", "grid" if grid else "self")
    default = {"name": name, "fields": {}, "refine": suite.refine}
    default |= {"widen": suite.widen} if tuned not in ("self", "fixed") else {}
    own = {"tuning": tuned, "grid": grid if tuned not in ("self", "fixed") else content.get("grid", {})}
    rule = {"selection": {"rule": selection} if isinstance(selection, str) else selection}
    setting = fields.build(Setting, default | content | own | rule, where)
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, or fixed")
    tuning.check(setting, where)
    return setting
