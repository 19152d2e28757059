"""Dataclass fields that say which values they take, and the one place that checks them.

A hyperparameter is declared as `lr: Positive = 0.1`; `check` refuses a value outside the range when the object is made,
and `build` makes an object from plain data (YAML, JSON, keyword arguments) with errors that name the field.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union

from dpopt.errors import ConfigError, unknown

T = TypeVar("T")
Converters = Mapping[Any, Callable[[Any, str], Any]]


@dataclass(frozen=True)
class Range:
    """An interval of real numbers with open (`(`, `)`) or closed (`[`, `]`) ends."""

    low: float
    high: float
    ends: str = "()"

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        below = value < self.high if self.ends[1] == ")" else value <= self.high
        return above and below

    def __str__(self) -> str:
        return f"a number in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


Finite = Annotated[float, Range(-math.inf, math.inf)]
Positive = Annotated[float, Range(0, math.inf)]
NonNegative = Annotated[float, Range(0, math.inf, "[)")]
Decay = Annotated[float, Range(0, 1, "[)")]
"""A moment decay such as Adam's beta: 0 <= beta < 1."""
Fraction = Annotated[float, Range(0, 1, "(]")]
Count = Annotated[int, Range(1, math.inf, "[)")]
Natural = Annotated[int, Range(0, math.inf, "[)")]
Factor = Annotated[float, Range(1, math.inf, "[)")]
Bound = Annotated[float, Range(0, math.inf, "(]")]
"""A clipping bound; infinity means that nothing is clipped."""


class Arguments(Mapping[str, Any]):
    """Keyword arguments of a class that dpopt does not know: a mapping that cannot change, and so can be hashed.

    Args:
        values: name -> number, string, truth value, None or a list of such, which becomes a tuple. A string that reads
            as a number is one, as YAML takes 1e-3 for a string.
        where: how errors name the mapping.

    Raises:
        ConfigError: not a mapping of names to such values.
    """

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({}), where: str = "arguments") -> None:
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ConfigError(where, values, "expected a mapping from names to values")
        self._values = {name: _plain(values[name], f"{where}.{name}") for name in sorted(values)}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(where, value, "expected a number, a string, true, false, null, or a list of such")
    return value


@cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of the dataclass fields of `cls`."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def check(instance: Any) -> None:
    """Refuse a dataclass instance that holds a value which its annotations do not allow.

    Raises:
        ConfigError: names the first such field.
    """
    for name, hint in hints(type(instance)).items():
        convert(getattr(instance, name), hint, f"{type(instance).__name__}.{name}", {})


def build(cls: type[T], values: Mapping[str, Any], where: str, converters: Converters = MappingProxyType({})) -> T:
    """Make a `cls` from plain data.

    Args:
        cls: a dataclass.
        values: field values as YAML or JSON holds them.
        where: how errors name the object.
        converters: for annotations that plain data cannot express: annotation -> function of (value, where).

    Raises:
        ConfigError: an unknown field (with the nearest name) or a value that its annotation does not allow.
    """
    known = hints(cls)
    for name in values:
        if name not in known:
            raise unknown(f"{where}.{name}", name, known)
    return cls(**{name: convert(v, known[name], f"{where}.{name}", converters) for name, v in values.items()})


def convert(value: Any, hint: Any, where: str, converters: Converters) -> Any:
    """`value` as the annotation `hint` wants it, or a `ConfigError` that names `where`."""
    if hint in converters:
        return converters[hint](value, where)
    if hint is Arguments:
        return Arguments(value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = convert(value, args[0], where, converters)
        if value not in args[1]:
            raise ConfigError(where, value, f"expected {args[1]}")
        return value
    if origin in (Union, types.UnionType):
        return (
            None if value is None else convert(value, next(a for a in args if a is not type(None)), where, converters)
        )
    if origin is Literal:
        if value not in args:
            raise unknown(where, value, args)
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(where, value, "expected a mapping")
        return value
    if origin is tuple:
        return _tuple(value, args, where, converters)
    return _scalar(value, hint, where)


def _tuple(value: Any, args: tuple[Any, ...], where: str, converters: Converters) -> tuple[Any, ...]:
    is_open = args[-1] is ...
    length = len(value) if isinstance(value, list | tuple) else 0
    if not length or (not is_open and length != len(args)):
        raise ConfigError(where, value, f"expected a list of {'values' if is_open else f'{len(args)} values'}")
    each = args[:1] * length if is_open else args
    return tuple(convert(v, a, f"{where}[{i}]", converters) for i, (v, a) in enumerate(zip(value, each, strict=True)))


def _scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # a string too: YAML reads 1e-3 as one
        except ValueError:
            raise ConfigError(where, value, "expected a number") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    expected = hint if isinstance(hint, type) else object
    if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool and hint is not object):
        raise ConfigError(where, value, f"expected {'a whole number' if hint is int else f'a {expected.__name__}'}")
    return value
