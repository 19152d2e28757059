"""One row of a suite as its file describes it: completed from the registry, and refused where its parts do not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from dpopt import fields, registry
from dpopt.errors import ConfigError, unknown
from dpopt.fields import FEW
from dpopt.privacy.selection import SHAPES, BestOf, Composed, Selection, Simulated, selection_rule
from dpopt.suites.schema import Keys, Setting

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
    entry = registry.entry("optimizer", name)
    grid, selection = content.get("grid", entry.grid), content.get("selection")
    tuning = content.get("tuning", "grid" if grid else "self")
    is_search = tuning not in ("self", "fixed")
    filled = {"name": name, "fields": {}} | ({"widen": suite.widen} if is_search else {}) | content
    filled |= {"tuning": tuning, "grid": grid if is_search else content.get("grid", {})}
    filled["selection"] = {"rule": selection} if isinstance(selection, str) else selection
    setting = fields.build(Setting, filled, where)
    if setting.tuning == "self" and entry.grid:
        raise ConfigError(f"{where}.tuning", "self", f"{name} has learning rates to search: say grid, or fixed")
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
    rule = _rule(setting, number + setting.widen, where)
    if setting.widen:
        _check_widen(setting, rule, where)
    return rule


def _number(value: Any) -> Any:
    """A value of a grid; a text that reads as a number is one, as optimizers take it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _rule(setting: Setting, runs: int, where: str) -> Selection | None:
    selection, where = setting.selection, f"{where}.selection"
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


def _check_widen(setting: Setting, rule: Selection | None, where: str) -> None:
    if setting.tuning != "grid":
        reason = f"the tuning {setting.tuning} runs no whole grid"
    elif "clip" in setting.grid:
        reason = "a grid over clip rules makes a row of each bound"
    elif isinstance(rule, Simulated):
        reason = "a simulated search is not charged for the runs that it makes"
    else:
        return
    raise ConfigError(f"{where}.widen", setting.widen, f"{reason}; 0 leaves the row as it is")
