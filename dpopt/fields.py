"""Annotations that say which values they take, and the one place that checks them.

A hyperparameter is declared as `lr: Positive = 0.1`; `check` looks at an object when it is made, `build` makes one from
plain data (YAML, JSON, keyword arguments), and `checked` holds the arguments of a function to its annotations.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import types
import typing
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

from dpopt.errors import ConfigError, unknown

T = TypeVar("T")
P = ParamSpec("P")
Converters = Mapping[Any, Callable[[Any, str], Any]]
_annotations = cache(partial(typing.get_type_hints, include_extras=True))


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


@dataclass(frozen=True)
class Line:
    """A text of at least one letter, without line breaks and other control characters."""

    def __contains__(self, value: str) -> bool:
        return value.strip() != "" and value.isprintable()

    def __str__(self) -> str:
        return "a text that is not empty and has no control characters"


Finite = Annotated[float, Range(-math.inf, math.inf)]
Positive = Annotated[float, Range(0, math.inf)]
NonNegative = Annotated[float, Range(0, math.inf, "[)")]
Decay = Annotated[float, Range(0, 1, "[)")]
"""A moment decay such as Adam's beta: 0 <= beta < 1."""
Fraction = Annotated[float, Range(0, 1, "(]")]
Probability = Annotated[float, Range(0, 1)]
Factor = Annotated[float, Range(1, math.inf, "[)")]
Inflation = Annotated[float, Range(1, math.inf)]
"""gamma > 1: the noise of the gradients over what they need alone; other kinds of release spend the rest."""
Amount = Annotated[float, Range(0, 1e9, "(]")]
"""Seconds, hours or gigabytes: as many as an operating system can be asked for."""
Bound = Annotated[float, Range(0, math.inf, "(]")]
"""A clipping bound, or a target epsilon; infinity means that nothing is clipped, or no noise."""

LARGEST, MANY, FEW = 10**12, 10**7, 10**4
"""The most of anything that is counted; of what is done one by one (draws, trials); of what is started or made."""
Count = Annotated[int, Range(1, LARGEST, "[]")]
Natural = Annotated[int, Range(0, LARGEST, "[]")]
Many = Annotated[int, Range(1, MANY, "[]")]
Few = Annotated[int, Range(1, FEW, "[]")]
FewOrNone = Annotated[int, Range(0, FEW, "[]")]
Seed = Annotated[int, Range(0, 2**128 - 1, "[]")]
Name = Annotated[str, Line()]
"""A name: a label, a word of the command line."""


@dataclass(frozen=True)
class Axis:
    """Marks a tuple of different values, at least one; plain data may hold a single one in its place."""


Several = Annotated[tuple[T, ...], Axis()]
"""The values of an axis: `Several[Positive]`."""


class Arguments(Mapping[str, Any]):
    """Keyword arguments of a class that dpopt does not know: a mapping that cannot change, and so can be hashed.

    Of name -> number, string, truth value, None or a list of such, which becomes a tuple. A string that reads as a
    number is one, as YAML takes 1e-3 for a string.
    """

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({}), where: str = "arguments") -> None:
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ConfigError(where, values, "expected a mapping from names to values")
        # Sorted, as mappings that are equal must have equal hashes.
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
            return _number(value, float, where)
        except ValueError:
            return value
    if value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(where, value, "expected a number, a string, true, false, null, or a list of such")
    return value


@cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of the dataclass fields of `cls`."""
    resolved = _annotations(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def check(instance: Any) -> None:
    """Raise `ConfigError`, with the first such field, where an instance holds what its annotations do not allow."""
    for name, hint in hints(type(instance)).items():
        value, where = getattr(instance, name), f"{type(instance).__name__}.{name}"
        # Plain data may hold a number as text; an object that is made in Python must not.
        if type(convert(value, hint, where, {})) is not str and type(value) is str:
            raise ConfigError(where, value, "expected a number, and not its text")


class Checked:
    """A dataclass whose values are checked when it is made, see `check`."""

    def __post_init__(self) -> None:
        check(self)


def build(cls: type[T], values: Mapping[str, Any], where: str, converters: Converters = MappingProxyType({})) -> T:
    """Make a dataclass `cls` from field values as YAML or JSON holds them.

    Errors call the object `where`; `converters` are for annotations that plain data cannot express: annotation ->
    function of (value, where).

    Raises:
        ConfigError: an unknown field (with the nearest name), none where one is needed, or a value that its annotation
            does not allow.
    """
    kinds = hints(cls)
    for name in values:
        if name not in kinds:
            raise unknown(f"{where}.{name}", name, kinds)
    # Python would raise a TypeError, which names a method and not the user's key.
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.init and not has_default and field.name not in values:
            raise ConfigError(where, list(values), f"the key `{field.name}` is missing")
    return cls(**{name: convert(v, kinds[name], f"{where}.{name}", converters) for name, v in values.items()})


def key(text: str, default: Any = MISSING) -> Any:
    """A field of a dataclass of keys, with its line in the command's help; without a default the key is needed."""
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata={"text": text})
    return dataclasses.field(default=default, metadata={"text": text})


def later(default: Any) -> Any:
    """A field that results are published without: at its default it is no part of a run's identity."""
    return dataclasses.field(default=default, metadata={"later": True})


def checked(function: Callable[P, T], elsewhere: Mapping[str, str] = MappingProxyType({})) -> Callable[P, T]:
    """`function`, whose arguments are converted as its annotations say before it is called.

    A whole number stays one where a `float` is expected: what is made from arguments may tell the two apart.
    `elsewhere` says for arguments that it does not take what there is in their place.

    Raises:
        ConfigError: names the first argument that there is not, or that its annotation does not allow.
    """
    kinds = _annotations(function)
    # What checks alone read would hide the types in a help text.
    function.__annotations__ = typing.get_type_hints(function)
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in signature.parameters:
                problem = f"{function.__name__} takes no such argument"
                if name in elsewhere:
                    raise ConfigError(name, kwargs[name], f"{problem}; {elsewhere[name]}")
                raise unknown(name, name, signature.parameters, problem)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(function.__name__, list(kwargs), str(error)) from error
        for name, value in bound.arguments.items():
            converted = convert(value, kinds[name], name, {})
            # What is derived from arguments, such as noise, tells 5 from 5.0.
            bound.arguments[name] = value if type(value) is int else converted
        return function(*bound.args, **bound.kwargs)

    return call


def listed(value: Any) -> list[Any]:
    """The elements of a list; a value that is no list is the only one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def several(value: Any, hint: Any, where: str) -> tuple[Any, ...]:
    """The values of an axis, converted, of which none is repeated; a value that is no list is an axis of one."""
    if not isinstance(value, list | tuple):
        return (convert(value, hint, where, {}),)
    if not value:
        raise ConfigError(where, value, "expected at least one value")
    values = _tuple(value, (hint, ...), where, {})
    if len(set(map(repr, values))) < len(values):
        raise ConfigError(where, list(values), "a value is repeated")
    return values


def convert(value: Any, hint: Any, where: str, converters: Converters) -> Any:
    """`value` as the annotation `hint` wants it, or a `ConfigError` that names `where`."""
    # Converters first: they may take over annotations that follow here.
    if hint in converters:
        return converters[hint](value, where)
    if hint is Arguments:
        return Arguments(value, where)
    if hint is Path:
        return path(value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and isinstance(args[1], Axis):
        return several(value, typing.get_args(args[0])[0], where)
    if origin is Annotated and isinstance(args[1], str):  # errors say so of a class whose name says too little
        if not _is_of(value, args[0]):
            raise ConfigError(where, value, f"expected {args[1]}")
        return value
    if origin is Annotated:
        value = convert(value, args[0], where, converters)
        if value not in args[1]:
            raise ConfigError(where, value, f"expected {args[1]}")
        return value
    if origin in (Union, types.UnionType):
        return _either(value, args, where, converters)
    if origin is Literal:
        # True equals 1 to Python, and no reader means the one by the other.
        if not any(type(value) is type(arg) and value == arg for arg in args):
            raise unknown(where, value, args)
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(where, value, "expected a mapping")
        # 1 and "1" may become one key, which then had two values.
        keys = {key: convert(key, args[0], where, {}) for key in value}
        if len(set(keys.values())) < len(keys):
            raise ConfigError(where, list(value), "a key is repeated")
        return {keys[key]: convert(each, args[1], f"{where}.{key}", converters) for key, each in value.items()}
    if origin is list:
        return list(_tuple(value, (args[0], ...), where, converters)) if value != [] else []
    if origin is tuple:
        return _tuple(value, args, where, converters)
    if origin is Callable:
        _require_callable(value, args, where)
        return value
    return _scalar(value, hint, where)


def path(value: Any, where: str) -> Path:
    """A place in the file system, `~` replaced by the home folder; every path that a user gives is read here."""
    try:
        text = os.fspath(value)
        os.fsencode(text)
        if text.strip() and not any(unicodedata.category(sign) == "Cc" for sign in text):
            return Path(text).expanduser()
    except (TypeError, ValueError, RuntimeError):  # a surrogate is a ValueError, an unknown user a RuntimeError
        pass
    raise ConfigError(where, value, "expected a path: not empty, without control characters, `~` for a home folder")


def cache_root() -> Path:
    """`$DPOPT_CACHE`, by default `~/.cache/dpopt`: solved noise, epsilons of stored runs, decoded data, features."""
    return path(os.environ.get("DPOPT_CACHE") or "~/.cache/dpopt", "DPOPT_CACHE")


def data_root() -> Path | None:
    """`$DPOPT_DATA`, the folder of data sets and checkpoints; None where it is not set, and hubs are asked."""
    value = os.environ.get("DPOPT_DATA")
    return path(value, "DPOPT_DATA") if value else None


def _require_callable(value: Any, args: tuple[Any, ...], where: str) -> None:
    # Tried before any work, as it would else fail after a part of it.
    needed = args[0] if args and isinstance(args[0], list) else []
    if callable(value) and not inspect.iscoroutinefunction(value):
        try:
            inspect.signature(value).bind(*needed)
        except TypeError as error:
            count = f"a function of {len(needed)} argument{'s' * (len(needed) > 1)}"
            raise ConfigError(where, value, f"expected {count} ({error})") from error
        except ValueError:  # one written in C may not say what it takes
            pass
        return
    raise ConfigError(where, value, "expected a function, and none that is async")


def _either(value: Any, hints: tuple[Any, ...], where: str, converters: Converters) -> Any:
    if value is None and NoneType in hints:
        return None
    refusals = list[ConfigError]()
    if isinstance(value, dict):  # what is said of its parts is for a mapping alone to say
        hints = tuple(hint for hint in hints if typing.get_origin(hint) is dict) or hints
    for hint in hints:
        try:
            if hint is not NoneType:
                return convert(value, hint, where, converters)
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == 1:  # its reason names the very part that is wrong
        raise refusals[0]
    raise ConfigError(where, value, " or ".join(error.allowed for error in refusals))


def _tuple(value: Any, args: tuple[Any, ...], where: str, converters: Converters) -> tuple[Any, ...]:
    is_open = args[-1] is ...
    length = len(value) if isinstance(value, list | tuple) else 0
    if not length or (not is_open and length != len(args)):
        raise ConfigError(where, value, f"expected a list of {'values' if is_open else f'{len(args)} values'}")
    each = args[:1] * length if is_open else args
    return tuple(convert(v, a, f"{where}[{i}]", converters) for i, (v, a) in enumerate(zip(value, each, strict=True)))


def _scalar(value: Any, hint: Any, where: str) -> Any:
    if hint in (int, float):
        return _number(value, hint, where)
    if hint is Any or not isinstance(hint, type):
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value, where)
    if not _is_of(value, hint):
        quoted = ", in quotes where YAML reads something else, such as on, no or 1e3" if isinstance(value, Real) else ""
        kind = SHOWN.get(hint) or f"an object of the kind {hint.__name__}"
        raise ConfigError(where, value, f"expected {kind}{quoted if hint is str else ''}")
    return value


def _is_of(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, type)  # a class has the methods of its instances


SHOWN = {str: "a text", bool: "true or false"}


def _number(value: Any, hint: type[int] | type[float], where: str) -> int | float:
    """A number, or a text that reads as one, as YAML takes 1e-3 for a text."""
    kind = "a whole number" if hint is int else "a number"
    # True is a number to Python, and never meant as one.
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise ConfigError(where, value, f"expected {kind}")
    try:
        if hint is int and isinstance(value, Integral):
            return int(value)
        number = float(value)
    except (ValueError, OverflowError):
        raise ConfigError(where, value, f"expected {kind}") from None
    # 1e400 reads as infinity, which at a clipping bound or an epsilon means something else.
    if math.isinf(number) and overflows(str(value)):
        raise ConfigError(where, value, f"expected {kind}, and this one is too large; infinity is `inf`")
    if hint is int and not number.is_integer():
        raise ConfigError(where, value, f"expected {kind}")
    return hint(number)


def overflows(text: str) -> bool:
    """True if `text` spells a number that only rounding makes infinite, such as 1e400."""
    try:
        return math.isinf(float(text)) and any(sign.isdigit() for sign in text)
    except ValueError:
        return False
