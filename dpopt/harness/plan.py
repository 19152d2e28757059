"""Suite -> the cells that it consists of. Everything that can be wrong with a suite is found here, before any work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dpopt import fields, registry
from dpopt.clipping.rules import Abadi, Normalized
from dpopt.errors import ConfigError, unknown
from dpopt.harness.cell import Cell
from dpopt.harness.suite import Setting, Suite, axis
from dpopt.privacy import accountants, sampling
from dpopt.privacy.calibration import require_bounded
from dpopt.training import number_of_draws, sampling_rate
from dpopt.workloads.base import Workload


@dataclass(frozen=True)
class Planned:
    """One cell of a suite and its place in it.

    Attributes:
        cell: what is run.
        label: the row that it belongs to.
        tuning: "self", "grid" or "fixed".
        tuned: the grid point, field -> value.
        clip: value of the suite's clip axis.
    """

    cell: Cell
    label: str
    tuning: str
    tuned: dict[str, Any]
    clip: float

    def content(self) -> dict[str, Any]:
        """As plain JSON data, for the manifest."""
        rest = {"label": self.label, "tuning": self.tuning, "tuned": self.tuned}
        clip = "inf" if self.clip == math.inf else self.clip
        return {"run_id": self.cell.run_id, "clip": clip, **rest, "cell": self.cell.content()}


def plan(suite: Suite) -> list[Planned]:
    """Every cell of `suite`, paired by seed across optimizers.

    Raises:
        ConfigError: anything in the suite that cannot be used; data that cannot be found.
    """
    for label in suite.settings:
        if label not in suite.optimizers and label not in registry.optimizers():
            _setting(suite, label)  # a label that is not selected must still make sense
    settings = {label: _setting(suite, label) for label in suite.optimizers}
    planned = []
    for name, workload in _workloads(suite):
        for label, setting in settings.items():
            planned += list(_row(suite, name, workload, label, setting))
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
    setting = fields.build(
        Setting,
        {"name": name, "fields": content.get("fields", {}), "tuning": tuning, "grid": grid if tuning == "grid" else {}},
        where,
    )
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, or fixed")
    if setting.tuning == "grid" and not setting.grid:
        raise ConfigError(f"{where}.grid", setting.grid, "expected field -> values to search")
    for key, values in setting.grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.grid.{key}", values, "expected a list of values")
    return dataclasses.replace(
        setting,
        epsilon=axis(content.get("epsilon"), fields.Bound, f"{where}.epsilon"),
        epochs=axis(content.get("epochs"), fields.Positive, f"{where}.epochs"),
        seeds=axis(content.get("seeds"), int, f"{where}.seeds"),
    )


def _row(suite: Suite, name: str, workload: Workload, label: str, setting: Setting) -> Iterator[Planned]:
    """The cells of one row of the suite on one workload."""
    if setting.tuning == "grid" and not workload.validation:
        allowed = "its training records are all used: a grid search needs `validation` records to select on"
        raise ConfigError(f"{suite.name}.workloads.{name}.validation", 0, allowed)
    delta = workload.examples**-1.1 if suite.delta is None else suite.delta
    accountants.check(delta, suite.accountant)
    points = [dict(zip(setting.grid, values, strict=True)) for values in product(*setting.grid.values())]
    axes = product(
        [
            (epsilon, n)
            for epsilon in setting.epsilon or suite.epsilon
            for n in _epochs(suite, workload, setting, epsilon)
        ],
        suite.batch_size or (workload.batch_size,),
        suite.clip or (workload.clip,),
        enumerate(points),
        setting.seeds or suite.seeds,
    )
    specs: dict[tuple[str, float], dict[str, Any]] = {}
    workload_spec = registry.spec("workload", name, workload)
    for (epsilon, epochs), batch_size, clip, (search, point), seed in axes:
        sampling_rate(batch_size, workload.examples)
        number_of_draws(epochs, batch_size, workload.examples)
        key = (str(point), clip)
        specs[key] = specs.get(key) or _optimizer(setting, point, clip)
        require_bounded(registry.from_spec("optimizer", specs[key]), epsilon)
        privacy = (epsilon, delta, suite.accountant)
        cell = Cell(workload_spec, specs[key], *privacy, batch_size, epochs, seed, search, sampling.REVISION)
        yield Planned(cell, label, setting.tuning, point, clip)


def _epochs(suite: Suite, workload: Workload, setting: Setting, epsilon: float) -> tuple[float, ...]:
    """The numbers of epochs that a row has at `epsilon`."""
    epochs = setting.epochs or suite.epochs or (workload.epochs,)
    if isinstance(epochs, tuple):
        return epochs
    if epsilon not in epochs:
        raise ConfigError(f"{suite.name}.epochs", epochs, f"expected a number for epsilon {epsilon:g} too")
    return (epochs[epsilon],)


def _optimizer(setting: Setting, point: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """The optimizer of one grid point; the clip axis sets the bound of a rule that has one and was not given."""
    optimizer = registry.create(setting.name, **{**setting.fields, **point})
    is_given = "clip" in {**registry.entry("optimizer", setting.name).fields, **setting.fields, **point}
    if not is_given and isinstance(getattr(optimizer, "clip", None), Abadi | Normalized):
        optimizer = dataclasses.replace(optimizer, clip=dataclasses.replace(optimizer.clip, bound=clip))
    return registry.spec("optimizer", setting.name, optimizer)
