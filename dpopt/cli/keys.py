"""Keys of a command: a dataclass, from which come the parser, the help text and what a shell offers on Tab.

A suite, `bench` and `audit` have their keys in a file of `conf/base`, since a suite's file begins with it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml

from dpopt import documents, fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Name, Natural, Several

T = TypeVar("T")
BASE = resources.files("dpopt") / "conf" / "base"


def key(text: str, default: Any = MISSING) -> Any:
    """A field of a dataclass of keys, with its line in the command's help; without a default the key is needed."""
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata={"text": text})
    return dataclasses.field(default=default, metadata={"text": text})


def spelled(name: str) -> str:
    """A field as a key of the command line: `from_` is from=PATH, as `from` is a word of Python."""
    return name.rstrip("_")


def read(cls: type[T], overrides: Sequence[str], where: str) -> T:
    """The keys of a command from KEY=VALUE, and KEY.NAME=VALUE for an entry of a mapping.

    Args:
        cls: a dataclass of keys.
        overrides: of the command line.
        where: the command, for errors.

    Raises:
        ConfigError: an unknown key (with the nearest name), none where one is needed, or a value that its annotation
            does not allow.
    """
    hints = {spelled(name): hint for name, hint in fields.hints(cls).items()}
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
    names = {spelled(field.name): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return fields.build(cls, {names[name]: value for name, value in values.items()}, where)


def _value(text: str, hint: Any, where: str) -> Any:
    # A label may look like a number: where the annotation wants a text, YAML does not read it.
    kinds = set(_kinds(hint))
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
    """The types that an annotation allows; of a list, `list` and not those of its values."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from [tuple] if isinstance(args[1], fields.Axis) else _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is Literal:
        yield str
    elif origin is dict:
        yield from (dict, *_kinds(args[1]))
    else:
        yield origin or hint


def choices(hint: Any) -> list[str]:
    """The values that an annotation names."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [name for each in typing.get_args(hint) for name in choices(each)]
    return ["true", "false"] if hint is bool else []


def described(cls: type) -> str:
    """The keys of a dataclass, a line each: KEY=DEFAULT, or its values, and a text."""
    lines = []
    for field in dataclasses.fields(cls):
        named = "|".join(choices(fields.hints(cls)[field.name]))
        is_needed = field.default is MISSING and field.default_factory is MISSING
        default = "" if field.default in (None, MISSING) else f"{field.default}"
        value = "..." if is_needed else named or default
        lines.append(f"  {spelled(field.name) + '=' + value:<24} {field.metadata['text']}")
    return "\n".join(lines)


def of_document(name: str) -> Mapping[str, list[str]]:
    """The keys of a file of `conf/base`, each with the values that are known of it."""
    content = documents.mapping(BASE / f"{name}.yaml")
    return {name: ["true", "false"] if isinstance(value, bool) else [] for name, value in content.items()}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Keys of the commands that read a suite's results."""

    suite: Name = key("the suite: its name, or its file")
    optimizers: Several[Name] | None = key("[fiber,hyfreedp]: rows with these labels only", None)
    epsilon: Several[Bound] | None = key("[1,3]: rows with these targets only", None)
    seeds: Several[Natural] | None = key("[0,1]: these seeds only", None)
    workloads: Several[Name] | None = key("[digits_mlp]: rows of these workloads only", None)
    results: Path = key("folder, or one of published suites such as results/published", Path("results"))
    plots: Path = key("folder of the figures' files", Path("plots"))

    @property
    def part(self) -> dict[str, Any]:
        """The rows that are chosen, as `load_results` takes them."""
        named = {name: getattr(self, name) for name in ("optimizers", "epsilon", "seeds", "workloads")}
        return {name: list(values) for name, values in named.items() if values is not None}

    @property
    def overrides(self) -> list[str]:
        """The arguments that choose the suite and its rows."""
        texts = {
            name: ",".join(f"{value:g}" if isinstance(value, float) else f"{value}" for value in values)
            for name, values in self.part.items()
        }
        rows = [f"{name}=[{values}]" for name, values in texts.items()]
        folders = {"results": f"{self.results}", "plots": f"{self.plots}"}
        return [f"suite={self.suite}", *rows, *(f"{name}={path}" for name, path in folders.items() if path != name)]


def suite_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `suite=`, and the other overrides, for commands whose keys are a suite's."""
    names = [override.partition("=")[2] for override in overrides if override.startswith("suite=")]
    if len(names) != 1:
        raise ConfigError("suite", names or None, "expected suite=NAME once; `dpopt list` shows the suites")
    return names[0], [override for override in overrides if not override.startswith("suite=")]
