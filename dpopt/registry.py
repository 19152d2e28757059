"""Names -> optimizers and workloads. One YAML file registers a name; nothing else needs to know of it.

`conf/optimizer/NAME.yaml` and `conf/workload/NAME.yaml` hold `target: module:Class`, a line of description, and preset
fields. Another distribution registers a class through the entry-point group "dpopt.optimizers" or "dpopt.workloads";
a file `NAME.yaml` beside its module may give the rest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, resources
from importlib.metadata import entry_points
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpopt import documents, fields
from dpopt.errors import ConfigError, unknown

FAMILIES = ("sgd", "adam", "filter", "clipping", "step size", "parameter-free")
"""Kinds of optimizer; a filter of noise stands in front of another, a step-size rule over a direction."""


@dataclass(frozen=True)
class Registered:
    """The content of a registered name's YAML file.

    Attributes:
        target: "module:Class" of a frozen dataclass.
        display: the name of an optimizer in tables and figures; by default `name`.
        summary, reference: one line for tables, and the paper.
        family: of an optimizer, one of `FAMILIES`.
        note: what a reader of its results should know, a sentence or two.
        fields: preset values of the class's fields.
        grid: default search grid, field -> values; empty where the method needs no tuning.
        chosen_on: constants of the method that were chosen on data, name and value -> the tasks, as figures name them.
        limits: special cases, checked by `dpopt.testing`: with the values `fields` it equals the optimizer `equals`,
            {name: ..., field: value}.
    """

    name: str
    target: str
    display: str = ""
    summary: str = ""
    reference: str = ""
    family: str = ""
    note: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    chosen_on: dict[str, list[str]] = field(default_factory=dict)
    limits: list[dict[str, Any]] = field(default_factory=list)

    def load(self) -> type[Any]:
        """The class behind the name."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.name}.target", self.target, f"cannot be imported: {error}") from error


@cache
def entries(group: str) -> dict[str, Registered]:
    """All registered names of `group` ("optimizer" or "workload"), sorted, with their entries."""
    files = resources.files("dpopt").joinpath("conf", group).iterdir()
    shipped = [(file.name.removesuffix(".yaml"), file) for file in files if file.name.endswith(".yaml")]
    names = {name: _entry(name, file) for name, file in shipped}
    for point in entry_points(group=f"dpopt.{group}s"):
        top, *inner = point.module.split(".")
        # Never imported for its file: that would run code of optimizers that are for a process of their own.
        spec = find_spec(top)
        folders = (spec.submodule_search_locations or [os.path.dirname(spec.origin or "")]) if spec else []
        places = (Path(folder, *inner[:-1], f"{point.name}.yaml") for folder in folders)
        beside = next((file for file in places if file.is_file()), None)
        names[point.name] = _entry(point.name, beside, point.value) if beside else Registered(point.name, point.value)
    return dict(sorted(names.items()))


def _entry(name: str, file: Traversable, target: str | None = None) -> Registered:
    content, where = documents.mapping(file), str(file)
    if target:
        content.setdefault("target", target)
    if "target" not in content:
        raise ConfigError(where, list(content), "the key `target` (module:Class) is missing")
    return fields.build(Registered, {**content, "name": name}, where)


def entry(group: str, name: str) -> Registered:
    """The entry of `name`; raises `ConfigError` for an unknown name and suggests the nearest."""
    registered = entries(group)
    if not isinstance(name, str) or name not in registered:
        raise unknown(group, name, registered)
    return registered[name]


def optimizers() -> tuple[str, ...]:
    """The names of all registered optimizers, plug-ins included."""
    return tuple(entries("optimizer"))


def create(name: str, **values: Any) -> Any:
    """The registered optimizer `name`, with hyperparameters in Python or as plain data.

    Such as `clip=0.5`, `clip={"rule": "automatic"}`, `base="fiber"`.

    Raises:
        ConfigError: unknown name or field (with the nearest one), or a value that the field does not allow.
    """
    return make("optimizer", name, values)


def create_workload(name: str, **values: Any) -> Any:
    """The registered workload `name`; as `create`."""
    return make("workload", name, values)


def make(group: str, name: str, values: Mapping[str, Any], without: tuple[str, ...] = ()) -> Any:
    """The object `name` of `group` ("optimizer" or "workload"), with `values` in place of its presets; see `create`.

    Presets of the fields `without` do not count.
    """
    registered = entry(group, name)
    presets = {key: value for key, value in registered.fields.items() if key not in without}
    return fields.build(registered.load(), {**presets, **values}, name, converters())


def _base(value: Any, where: str) -> Any:
    """A direction inside another optimizer: an object, a name, or {name: ..., field: value}."""
    from dpopt.optimizers.base import Direction

    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        if "name" not in value:
            raise ConfigError(where, dict(value), "the key `name` is missing")
        arguments = {key: v for key, v in value.items() if key not in ("name", "revision")}
        # The outer optimizer sets these two, so presets for stand-alone use do not apply.
        value = make("optimizer", value["name"], arguments, without=("lr", "clip"))
    if not isinstance(value, Direction):
        raise ConfigError(where, value, "expected a direction such as dp_adam or fiber")
    return value


@cache
def converters() -> dict[Any, Any]:
    """The `converters` of `fields.build` for an optimizer: clip rules, and directions inside others."""
    # Here, because these modules import torch, and a list of names must not wait for it.
    from dpopt.clipping.rules import clip_rule
    from dpopt.optimizers.base import Direction
    from dpopt.types import ClipRule

    return {ClipRule: clip_rule, Direction: _base}


def spec(group: str, name: str, instance: Any) -> dict[str, Any]:
    """`instance` as plain data: its name, its revision and its fields; `from_spec` makes it again."""
    return {"name": name, "revision": instance.revision, **_plain(instance)}


def from_spec(group: str, content: Mapping[str, Any]) -> Any:
    """The optimizer or workload that `spec` described; raises as `create`, and where the revision is not today's."""
    values = {key: value for key, value in content.items() if key not in ("name", "revision")}
    name = fields.convert(content.get("name"), str, f"{group}.name", {})
    # Presets do not count: one that was changed since must not change what is made again.
    instance = fields.build(entry(group, name).load(), values, name, converters())
    if instance.revision != (revision := content.get("revision")):
        raise ConfigError(f"{name}.revision", revision, f"the installed revision is {instance.revision}")
    return instance


def _plain(instance: Any) -> dict[str, Any]:
    values = ((f, getattr(instance, f.name)) for f in dataclasses.fields(instance))
    return {f.name: _value(value) for f, value in values if not ("later" in f.metadata and value == f.default)}


def _value(value: Any) -> Any:
    from dpopt.clipping.rules import clip_name, clip_spec

    if clip_name(value):
        return clip_spec(value)
    if dataclasses.is_dataclass(value):
        target = f"{type(value).__module__}:{type(value).__qualname__}"
        name = next((n for n, e in entries("optimizer").items() if e.target == target), target)
        skipped = ("lr", "clip")  # the outer optimizer's
        revised = getattr(value, "revision", 1)
        # Left out where it is the first: run ids are hashes of this, and older ones were made without it.
        revision = {"revision": revised} if revised != 1 else {}
        return {"name": name} | revision | {key: v for key, v in _plain(value).items() if key not in skipped}
    if isinstance(value, fields.Arguments):
        return {key: _value(v) for key, v in value.items()}
    return [_value(v) for v in value] if isinstance(value, tuple) else value
