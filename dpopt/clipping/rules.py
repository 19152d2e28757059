"""The clip rules: how one example's gradient is bounded before it is summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Positive
from dpopt.privacy.protocol import ClipRule


class _Checked:
    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class Abadi(_Checked):
    """g * min(1, C/||g||), sensitivity C (Abadi et al. 2016, Algorithm 1). An infinite bound clips nothing."""

    bound: Bound = 1.0

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factor(self, norm: Tensor) -> Tensor:
        return (self.bound / norm).clamp(max=1)


@dataclass(frozen=True)
class Automatic(_Checked):
    """R * g/(||g|| + gamma), sensitivity R (AUTO-S of Bu et al. 2023, Eq. 4). R only rescales the learning rate."""

    bound: Positive = 1.0
    stabilizer: Positive = 0.01

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factor(self, norm: Tensor) -> Tensor:
        return self.bound / (norm + self.stabilizer)


@dataclass(frozen=True)
class Normalized(_Checked):
    """g * min(1/C, 1/||g||), sensitivity 1: Abadi's rule divided by C, which decouples C from the learning rate.

    De et al. 2022; Algorithm 1 of the optimal-hyperparameters study.
    """

    bound: Positive = 1.0

    @property
    def sensitivity(self) -> float:
        return 1.0

    def factor(self, norm: Tensor) -> Tensor:
        return (1 / norm).clamp(max=1 / self.bound)


RULES: dict[str, type[Any]] = {"abadi": Abadi, "automatic": Automatic, "normalized": Normalized}


def clip_rule(value: Any, where: str = "clip") -> ClipRule:
    """A clip rule from plain data: a number (Abadi's bound), a rule's name, or {rule: name, bound: ..., ...}.

    Raises:
        ConfigError: an unknown rule or field, or a bound out of range.
    """
    if isinstance(value, tuple(RULES.values())):
        return value
    if (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("inf", ".inf"):
        value = {"rule": "abadi", "bound": math.inf if isinstance(value, str) else value}
    if isinstance(value, str):
        value = {"rule": value}
    if not isinstance(value, Mapping) or "rule" not in value:
        raise ConfigError(where, value, f"expected a bound, or a rule: {', '.join(RULES)}")
    arguments = dict(value)
    name = arguments.pop("rule")
    if name not in RULES:
        raise unknown(f"{where}.rule", name, RULES)
    return fields.build(RULES[name], arguments, where)


def clip_spec(rule: ClipRule) -> dict[str, Any]:
    """The plain data that `clip_rule` makes `rule` from."""
    name = next(name for name, kind in RULES.items() if type(rule) is kind)
    return {"rule": name, **dataclasses.asdict(rule)}  # type: ignore[call-overload]
