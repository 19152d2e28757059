"""Suite -> the cells that it consists of. Everything that can be wrong with a suite is found here, before any work."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpopt import fields, registry
from dpopt.errors import ConfigError, Missing, unknown
from dpopt.harness import refine, tuning
from dpopt.harness.rows import Planned, Row
from dpopt.harness.suite import Setting, Suite, axis
from dpopt.store.runs import Store, mended
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
            return mended(copy)

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
    return any(setting.refine or setting.tuning == "linear_scaling" for setting in settings)


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
    content = dict(suite.settings.get(label, {}))
    known = [f.name for f in dataclasses.fields(Setting)]
    for key in content:
        if key not in known:
            raise unknown(where, key, known)
    name = content.get("name", label)
    if name not in registry.optimizers():
        raise unknown(f"{suite.name}.optimizers" if name == label else f"{where}.name", name, registry.optimizers())
    entry = registry.entry("optimizer", name)
    grid = content.get("grid", entry.grid)
    chosen = content.get("tuning", "grid" if grid else "self")
    selection = content.get("selection")
    given = {
        "name": name,
        "fields": content.get("fields", {}),
        "tuning": chosen,
        "grid": grid if chosen not in ("self", "fixed") else {},
        "selection": {"rule": selection} if isinstance(selection, str) else selection,
        "runs": content.get("runs"),
        "refine": content.get("refine", suite.refine),
        "average": content.get("average", 0.0),
    }
    setting = fields.build(Setting, given, where)
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, or fixed")
    tuning.check(setting, where)
    return dataclasses.replace(
        setting,
        epsilon=axis(content.get("epsilon"), fields.Bound, f"{where}.epsilon"),
        epochs=axis(content.get("epochs"), fields.Positive, f"{where}.epochs"),
        batch_size=axis(content.get("batch_size"), fields.Count, f"{where}.batch_size"),
        clip=axis(content.get("clip"), fields.Bound, f"{where}.clip"),
        seeds=axis(content.get("seeds"), fields.Natural, f"{where}.seeds"),
    )
