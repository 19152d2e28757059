"""The clip rules: how one example's gradient is bounded before it is summed."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Checked, Positive
from dpopt.types import ClipRule, Layout, Number


@dataclass(frozen=True)
class Abadi(Checked):
    """g * min(1, C/||g||), sensitivity C (Abadi et al. 2016, Algorithm 1). An infinite bound clips nothing."""

    bound: Bound = 1.0

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factor(self, norm: Tensor) -> Tensor:
        return (self.bound / norm).clamp(max=1)


@dataclass(frozen=True)
class Automatic(Checked):
    """R * g/(||g|| + gamma), sensitivity R (AUTO-S of Bu et al. 2023, Eq. 4). R only rescales the learning rate."""

    bound: Positive = 1.0
    stabilizer: Positive = 0.01

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factor(self, norm: Tensor) -> Tensor:
        return self.bound / (norm + self.stabilizer)


@dataclass(frozen=True)
class PerSample(Checked):
    """R * g/(||g|| + r/(||g|| + r)), sensitivity R (DP-PSAC of Xia et al. 2023, arXiv 2212.00328).

    The factor is R at norm zero, where that of `Automatic`, which is DP-NSGD's too, is R/r.
    """

    bound: Positive = 1.0
    stabilizer: Positive = 0.1

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factor(self, norm: Tensor) -> Tensor:
        return self.bound / (norm + self.stabilizer / (norm + self.stabilizer))


@dataclass(frozen=True)
class Normalized(Checked):
    """g * min(1/C, 1/||g||), sensitivity 1: Abadi's rule divided by C, which decouples C from the learning rate.

    De et al. 2022; Algorithm 1 of the optimal-hyperparameters study.
    """

    bound: Positive = 1.0

    @property
    def sensitivity(self) -> float:
        return 1.0

    def factor(self, norm: Tensor) -> Tensor:
        return (1 / norm).clamp(max=1 / self.bound)


@dataclass(frozen=True)
class AtBound:
    """`Normalized` at a bound that is a tensor, such as a released number."""

    bound: Tensor

    @property
    def sensitivity(self) -> float:
        return 1.0

    def factor(self, norm: Tensor) -> Tensor:
        return torch.minimum(1 / norm, 1 / self.bound)


@dataclass(frozen=True)
class ByGroup(Checked):
    r"""Each of K groups of parameters is clipped by its own norm: g_k -> s rule(g_k / s) with s = 1/sqrt(K).

    Abadi's rule of bound C so clips each at C_k = s C. A record moves the sum by sqrt(sum_k C_k^2) = C at most, so the
    sensitivity is that of the rule inside, and all groups get the noise that it asks for. Per-layer clipping of McMahan
    et al. 2018 (ICLR, "Learning differentially private recurrent language models").

    Args:
        inner: the rule of every group.
        groups: a regular expression, searched for in each parameter's name, such as "blocks\.\d+" or "encoder|head".
            Those where it finds the same text are a group, and those where it finds none are one more. Each of its
            alternatives must find one. By default the parameters of each layer are a group.
    """

    inner: ClipRule = Abadi(1.0)
    groups: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, ByGroup):
            raise ConfigError("ByGroup.inner", self.inner, "expected a rule without groups")
        try:
            re.compile(self.groups or "")
        except re.error as error:
            raise ConfigError("ByGroup.groups", self.groups, f"expected a regular expression: {error}") from error

    @property
    def sensitivity(self) -> Number:
        return self.inner.sensitivity

    def factor(self, norm: Tensor) -> Tensor:
        return factors(self.inner, norm)

    def partition(self, layout: Layout, where: str = "clip") -> tuple[int, ...]:
        """The group of each parameter, from 0; ConfigError if an alternative finds no text in any name."""

        def texts(expression: str) -> list[str]:
            return [(re.search(expression, part.name) or [""])[0] for part in layout]

        keys = [part.layer for part in layout]
        if self.groups is not None:
            keys = texts(self.groups)
            for each in _alternatives(self.groups):
                if not any(texts(each)):
                    allowed = f"{each!r} finds no text in a parameter's name among {', '.join(p.name for p in layout)}"
                    raise ConfigError(f"{where}.groups", self.groups, allowed)
        return tuple(map(list(dict.fromkeys(keys)).index, keys))


def _alternatives(expression: str) -> list[str]:
    """The parts of an expression between its "|"; all of it where they are in brackets."""
    try:
        return [re.compile(part).pattern for part in expression.split("|")]
    except re.error:
        return [expression]


def check_groups(optimizer: Any, layout: Layout) -> None:
    """Raise `ConfigError` for a field of `optimizer`, or of one in it, whose groups are not those of the layout."""
    if not dataclasses.is_dataclass(optimizer):
        return
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if isinstance(value, ByGroup):
            value.partition(layout, field.name)
        else:
            check_groups(value, layout)


@dataclass(frozen=True)
class Bounded:
    """A clip rule as the kernel holds it, and its sensitivity (the largest norm of a clipped gradient), read once.

    With `groups`, the numbers of all parameters' groups, it is the rule in each of them, see `ByGroup`.
    """

    rule: ClipRule
    sensitivity: Number
    groups: tuple[int, ...] | None = None

    def factor(self, norm: Tensor) -> Tensor:
        return factors(self.rule, norm)


def factors(rule: ClipRule, norm: Tensor) -> Tensor:
    """The factor that `rule` gives each of n examples for its own norm, shape [n]; else ConfigError.

    The kernel's rules work element by element. Any other rule is evaluated under `torch.func.vmap`: it is shown one
    norm, shape [], and can tell neither whose it is nor what the others are.
    """
    return rule.factor(norm) if type(rule) in ELEMENTWISE else _one_by_one(rule, norm)


def check_alone(rule: ClipRule) -> None:
    """Raise `ConfigError` for a rule whose factor for one norm depends on other norms; it is tried on made-up norms."""
    # It could do no harm, as `factors` shows it one norm at a time, but would not be what its author wants.
    if type(rule) in ELEMENTWISE:
        return
    alone = _one_by_one(rule, _NORMS)
    try:
        together = rule.factor(_NORMS)
    except Exception:  # it is written for one norm
        return
    if together.shape != alone.shape or not torch.allclose(together.to(alone), alone, equal_nan=True):
        raise ConfigError("clip", rule, "expected a factor that depends on the norm of its own example alone")


_NORMS = torch.tensor([0.3, 100.0, 1.0, 2e-3, 7.0])


class Veiled(Tensor):
    """One record's number under `torch.func.vmap`: a plain tensor there would print those of all records."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{str(self.dtype).removeprefix('torch.')} of one record, shape {list(self.shape)}>"


def _one_by_one(rule: ClipRule, norm: Tensor) -> Tensor:
    try:
        factor = vmap(lambda norm: rule.factor(norm.as_subclass(Veiled)).as_subclass(Tensor))(norm)
    except Exception as error:  # a rule can fail in any way
        reason = f"expected a factor from one norm, by torch's operations ({type(error).__name__}: {error})"
        raise ConfigError("clip", rule, reason) from error
    if factor.shape != norm.shape or factor.is_complex():
        kind = f"{factor.dtype} of shape {list(factor.shape[1:])}"
        raise ConfigError("clip", rule, f"expected one real factor for a norm, not a tensor of {kind}")
    return factor.to(norm.dtype)


ELEMENTWISE: frozenset[type[Any]] = frozenset({Abadi, Automatic, PerSample, Normalized, AtBound, ByGroup, Bounded})
RULES: dict[str, type[Any]] = {
    "abadi": Abadi,
    "automatic": Automatic,
    "by_group": ByGroup,
    "normalized": Normalized,
    "psac": PerSample,
}
"""The kernel's rules by name; the entry points "dpopt.clip_rules" of other distributions name more."""


@cache
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="dpopt.clip_rules") if point.name not in RULES}


def clip_name(rule: Any) -> str | None:
    """The name of a rule's class; None for one that has none, and for what is no rule. It imports nothing."""
    loaded = {name: getattr(sys.modules.get(point.module), point.attr, None) for name, point in _points().items()}
    return next((name for name, kind in {**RULES, **loaded}.items() if type(rule) is kind), None)


def _loaded(point: EntryPoint) -> type[Any]:
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"clip rule {point.name}", point.value, f"cannot be imported: {error}") from error
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"clip rule {point.name}", point.value, "expected a frozen dataclass")
    return kind


def clip_rule(value: Any, where: str = "clip") -> ClipRule:
    """A clip rule from plain data: a number (Abadi's bound), a rule's name, or {rule: name, bound: ..., ...}.

    Raises:
        ConfigError: an unknown rule or field, or a bound out of range.
    """
    if clip_name(value):
        return value
    if (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("inf", ".inf"):
        value = {"rule": "abadi", "bound": math.inf if isinstance(value, str) else value}
    if isinstance(value, str):
        value = {"rule": value}
    names = [*RULES, *_points()]
    if not isinstance(value, Mapping) or "rule" not in value:
        raise ConfigError(where, value, f"expected a bound, or a rule: {', '.join(names)}")
    arguments = dict(value)
    name = arguments.pop("rule")
    if name not in names:
        raise unknown(f"{where}.rule", name, names)
    kind = RULES[name] if name in RULES else _loaded(_points()[name])
    return fields.build(kind, arguments, where, {ClipRule: clip_rule})


def clip_spec(rule: ClipRule) -> dict[str, Any]:
    """The plain data that `clip_rule` makes `rule` from."""
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
    return {"rule": clip_name(rule)} | {k: clip_spec(v) if isinstance(v, ClipRule) else v for k, v in values.items()}
