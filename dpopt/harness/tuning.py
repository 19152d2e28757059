"""Which runs a row of a suite makes for one replicate: points of its grid, and what all of them are charged together.

How many runs a private search makes, and of which points, is drawn once for each workload, search and seed (rows that
search the same grid of the same optimizer are paired) and so is part of the plan; which of them is released is for
whoever reads the records (`analysis.choosing.select`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from dpopt.errors import ConfigError, unknown
from dpopt.fields import FEW
from dpopt.harness.suite import Setting
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import SHAPES, After, BestOf, Composed, Part, Selection, Simulated, selection_rule

SHARES = (0.1, 0.2)
"""Epsilons of the searches of linear scaling, relative to that of the whole procedure."""
REMEDY = "; 0 leaves the row as it is"
"""Ends the reason why a row cannot be refined or widened."""


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


def points(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every point of a grid; of an empty grid the one that changes nothing."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def check(setting: Setting, where: str) -> Selection | None:
    """The rule by which the searches of a row are charged, if they are.

    Raises:
        ConfigError: tuning, grid, selection and runs do not go together.
    """
    tuning = setting.tuning
    is_search = tuning in ("grid", "random", "private", "linear_scaling")
    if is_search and not setting.grid:
        raise ConfigError(f"{where}.grid", setting.grid, "expected field -> values to search")
    if setting.grid and not is_search:
        allowed = f"the tuning {tuning} searches nothing: leave it out, or write null over one that is inherited"
        raise ConfigError(f"{where}.grid", setting.grid, allowed)
    for key, values in setting.grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.grid.{key}", values, "expected a list of values")
    number = math.prod(map(len, setting.grid.values()))
    if number > FEW:
        raise ConfigError(f"{where}.grid", f"{number} points", f"expected at most {FEW:,}")
    for key, values in setting.grid.items():
        numbers = list(map(_number, values))
        if any(value in numbers[:at] for at, value in enumerate(numbers)):
            raise ConfigError(f"{where}.grid.{key}", values, "a value is repeated")
    if tuning in ("random", "linear_scaling"):
        if setting.runs is None or setting.runs > number:
            raise ConfigError(
                f"{where}.runs", setting.runs, f"expected 1 to {number}, the number of points in the grid"
            )
        number = setting.runs
    elif setting.runs is not None:
        raise ConfigError(f"{where}.runs", setting.runs, f"the tuning {tuning} has no such number")
    if tuning == "linear_scaling" and list(setting.grid) != ["lr"]:
        raise ConfigError(
            f"{where}.grid", list(setting.grid), "linear scaling finds a learning rate: expected lr alone"
        )
    rule = _rule(setting, number + setting.widen, where)
    if setting.widen:
        _check_widen(setting, rule, f"{where}.widen")
    return rule


def _number(value: Any) -> Any:
    """A value of a grid; a text that reads as a number is one, as optimizers take it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _rule(setting: Setting, runs: int, where: str) -> Selection | None:
    given, where = setting.selection, f"{where}.selection"
    if setting.tuning == "private":
        rule = selection_rule(given, where)
        if not isinstance(rule, BestOf):
            raise unknown(f"{where}.rule", (given or {}).get("rule"), SHAPES)
        return rule
    if given is None:
        return None
    if setting.tuning not in ("grid", "random"):
        raise ConfigError(where, given, f"the tuning {setting.tuning} is not charged by a rule")
    if given == {"rule": "composed"}:
        return Composed(runs)
    rule = selection_rule(given, where)
    if isinstance(rule, Composed):
        raise ConfigError(f"{where}.runs", rule.runs, f"the search makes {runs}: say composed alone")
    if not isinstance(rule, Simulated):
        raise unknown(f"{where}.rule", given.get("rule"), ["composed", "simulated"])
    return rule


def _check_widen(setting: Setting, rule: Selection | None, where: str) -> None:
    if setting.tuning != "grid":
        reason = f"the tuning {setting.tuning} runs no whole grid"
    elif "clip" in setting.grid:
        reason = "a grid over clip rules makes a row of each bound"
    elif isinstance(rule, Simulated):
        reason = "a simulated search is not charged for the runs that it makes"
    elif setting.refine:
        reason = "the row is refined, between the ends of its grid"
    else:
        return
    raise ConfigError(where, setting.widen, f"{reason}{REMEDY}")


def runs(setting: Setting, rule: Selection | None, epsilon: float, key: Iterable[Any]) -> list[Run]:
    """The runs of one replicate, without those that depend on the outcome of others.

    Args:
        setting: a row that `check` has passed.
        rule: what `check` gave.
        epsilon: the suite's: of a run, or of the whole search where that is charged.
        key: what decides the random choices.
    """
    grid, named = points(setting.grid), (setting.name, setting.fields, setting.grid, *key)
    if not (setting.tuning in ("linear_scaling", "random") or isinstance(rule, BestOf)):
        return [Run(number, point, epsilon, rule) for number, point in enumerate(grid)]
    random = np.random.default_rng(derive("search", *named))
    if setting.tuning == "linear_scaling":
        return _searches(grid, setting.runs or 0, epsilon, random)
    if setting.tuning == "random":
        grid = [grid[i] for i in random.permutation(len(grid))[: setting.runs]]
    if isinstance(rule, BestOf):
        number = rule.draw(derive("number of runs", *named))
        if not number:
            return [Run(0, grid[0], epsilon, rule, untrained=True)]
        grid = [grid[i] for i in random.integers(len(grid), size=number)]
    return [Run(number, point, epsilon, rule) for number, point in enumerate(grid)]


def _searches(grid: list[dict[str, Any]], each: int, epsilon: float, random: np.random.Generator) -> list[Run]:
    rule = Part(each * len(SHARES), epsilon)
    chosen = [(share, grid[i]) for share in SHARES for i in random.permutation(len(grid))[:each]]
    return [Run(n, point, share * epsilon, rule, stage="search") for n, (share, point) in enumerate(chosen)]


@dataclass(frozen=True)
class Outcome:
    """What a run of a search has released, and the epsilon that it was to spend."""

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
    own = left(spent)
    low, high = (max(group, key=lambda run: run.score) for group in _by_epsilon(outcomes))
    slope = (high.lr - low.lr) / (high.epsilon - low.epsilon)
    rates = [outcome.lr for outcome in outcomes]
    largest = max(rates) * max(1.0, own / high.epsilon)
    lr = min(max(low.lr + slope * (own - low.epsilon), min(rates)), largest)
    return Run(len(outcomes), {"lr": lr}, epsilon, After(spent), stage="final")


def _by_epsilon(outcomes: list[Outcome]) -> list[list[Outcome]]:
    levels = sorted({outcome.epsilon for outcome in outcomes})
    return [[outcome for outcome in outcomes if outcome.epsilon == level] for level in levels]
