"""A command is a dataclass of its keys, from which come the parser, the help text and what a shell offers on Tab.

A suite, `bench` and `audit` have their keys in a file of `conf/base`, since a suite's file begins with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

import yaml

from dpopt import documents, fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Name, Natural, Several, key

if TYPE_CHECKING:
    from dpopt.results.results import Results

T = TypeVar("T")
_BASE = resources.files("dpopt") / "conf" / "base"


def read(cls: type[T], overrides: Sequence[str], where: str) -> T:
    """The keys of a command, a dataclass `cls`, from KEY=VALUE, and KEY.NAME=VALUE for an entry of a mapping.

    Raises:
        ConfigError: an unknown key (with the nearest name), none where one is needed, or a value that its annotation
            does not allow.
    """
    # `from_` is from=PATH, as `from` is a word of Python.
    hints = {name.rstrip("_"): hint for name, hint in fields.hints(cls).items()}
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        name, *below = path.split(".")
        if name not in hints or not equals or (below and typing.get_origin(hints[name]) is not dict):
            raise unknown("override", path if equals else override, hints)
        place, *way = values, *path.split(".")[:-1]
        for part in way:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(path, text, f"`{part}` has a value already")
        hint = hints[name] if not below else typing.get_args(hints[name])[1] if len(below) == 1 else Any
        place[path.rpartition(".")[2]] = _value(text, hint, path)
    names = {field.name.rstrip("_"): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return fields.build(cls, {names[name]: value for name, value in values.items()}, where)


def _value(text: str, hint: Any, where: str) -> Any:
    # A label may look like a number: where the annotation wants a text, YAML does not read it.
    kinds = {str if typing.get_origin(kind) is Literal else kind for kind in _kinds(hint)}
    if text == "null" and (types.NoneType in kinds or dict in kinds):
        return None if types.NoneType in kinds else {}
    if kinds <= {str, Path, types.NoneType}:
        return text
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    try:
        is_deep = text.count("[") + text.count("{") > 50  # YAML recurses
        if is_deep or not text.strip() or any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise yaml.YAMLError("nothing, aliases, or too many levels")
        return yaml.load(text, yaml.SafeLoader if Any in kinds else yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(where, text, "expected a value such as 3, label or [0, 100]") from error


def _kinds(hint: Any) -> Iterator[Any]:
    """The types that an annotation allows, and literals; of a list, `list` and not those of its values."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from [tuple] if isinstance(args[1], fields.Axis) else _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is dict:
        yield from (dict, *_kinds(args[1]))
    else:
        yield hint if origin is Literal else origin or hint


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    # A dataclass of keys, called when it has been read, or a function of the arguments; gives the exit code or None.
    run: type[Any] | Callable[[Sequence[str]], int | None]
    text: str  # a line for the list of commands
    keys: type | None = None  # of a function, as a dataclass
    files: tuple[str, ...] = ()  # of `conf/base`, that hold keys of a function with their defaults
    words: tuple[str, ...] = ()  # that the first argument may be
    usage: str = "KEY=VALUE"  # of the arguments

    def __call__(self, arguments: Sequence[str], name: str) -> int:
        run = read(self.run, arguments, name) if isinstance(self.run, type) else lambda: self.run(arguments)
        return run() or 0

    def _fields(self) -> Iterator[tuple[str, dataclasses.Field[Any], list[str]]]:
        keys = self.run if isinstance(self.run, type) else self.keys
        for field in dataclasses.fields(keys) if keys else ():
            named: list[str] = []  # values that the annotation names
            for kind in _kinds(fields.hints(keys)[field.name]):
                named += ["true", "false"] if kind is bool else typing.get_args(kind)
            yield field.name.rstrip("_"), field, named

    @property
    def description(self) -> str:
        """The command in full."""
        return inspect.getdoc(self.run) or self.text  # so that help and source cannot disagree

    @property
    def help(self) -> str:
        """The keys, a line each: KEY=DEFAULT, or its values, and a text."""
        lines = []
        for name, field, named in self._fields():
            default = "" if field.default in (None, MISSING) else f"{field.default}"
            is_needed = field.default is MISSING and field.default_factory is MISSING
            value = "..." if is_needed else "|".join(named) or default
            shown = f"{name}={value}"  # a long one, which lists the values that there are, has a line for itself
            gap = "" if len(shown) <= 24 else f"\n{27 * ' '}"
            lines.append(f"  {shown:<24}{gap or ' '}{field.metadata['text']}")
        files = [(_BASE / f"{name}.yaml").read_text("utf-8") for name in self.files]
        return "\n\n".join(filter(None, ["\n".join(lines), *files]))

    def values(self) -> dict[str, list[str]]:
        """The keys that the command takes, each with the values that it names."""
        values: dict[str, list[str]] = {}
        for file in self.files:
            for name, value in documents.mapping(_BASE / f"{file}.yaml").items():
                values[name] = ["true", "false"] if isinstance(value, bool) else []
        return values | {name: named for name, _, named in self._fields()}


@dataclass(frozen=True, kw_only=True)
class OfSuite:
    """Keys of the commands that read a suite's results."""

    suite: Name = key("the suite: its name, or its file")
    optimizers: Several[Name] | None = key("[fiber,hyfreedp]: rows with these labels only", None)
    epsilon: Several[Bound] | None = key("[1,3]: rows with these targets only", None)
    seeds: Several[Natural] | None = key("[0,1]: these seeds only", None)
    workloads: Several[Name] | None = key("[digits_mlp]: rows of these workloads only", None)
    results: Path = key("folder, or one of published suites such as results/published", Path("results"))
    plots: Path = key("folder of the figures' files", Path("plots"))

    @property
    def _part(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("optimizers", "epsilon", "seeds", "workloads")}
        return {name: list(values) for name, values in named.items() if values is not None}

    def stored(self, suite: str = "") -> Results:
        """The results of the suite, or of another one; imports no torch."""
        from dpopt.results.results import load_results

        return load_results(self.results, Path((suite or self.suite).removesuffix(".yaml")).name, **self._part)

    @property
    def overrides(self) -> list[str]:
        """The arguments that choose the suite and its rows."""
        rows = []
        for name, values in self._part.items():
            rows.append(f"{name}=[{','.join(f'{value}'.removesuffix('.0') for value in values)}]")
        folders = {"results": f"{self.results}", "plots": f"{self.plots}"}
        return [f"suite={self.suite}", *rows, *(f"{name}={path}" for name, path in folders.items() if path != name)]


def suite_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `suite=`, and the other overrides, for commands whose keys are a suite's."""
    names = [override.partition("=")[2] for override in overrides if override.startswith("suite=")]
    if len(names) != 1:
        raise ConfigError("suite", names or None, "expected suite=NAME once; `dpopt list suites` shows them")
    return names[0], [override for override in overrides if not override.startswith("suite=")]
