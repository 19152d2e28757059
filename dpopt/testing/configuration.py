"""Rules for the class and its entry in the registry."""

from __future__ import annotations

import dataclasses
import unittest

import torch
import yaml

from dpopt import fields, registry
from dpopt.testing.task import Task, require_near
from dpopt.types import Optimizer


def is_frozen_configuration(optimizer: Optimizer) -> None:
    """A frozen, hashable dataclass with a revision that equals a copy of itself."""
    assert dataclasses.is_dataclass(optimizer), "not a dataclass"
    copy = dataclasses.replace(optimizer)  # type: ignore[type-var]
    assert copy == optimizer, "a copy is not equal"
    assert hash(copy) == hash(optimizer), "not frozen, so it has no stable hash"
    revision = getattr(optimizer, "revision", None)
    assert isinstance(revision, int), f"`revision` is {revision!r}: a result could not tell which rule it is of"


def survives_yaml(optimizer: Optimizer) -> None:
    """Written as YAML and read again it is the same: a stored result says exactly what was run."""
    names = [entry.name for entry in entries_of(optimizer)]
    for name in names or [""]:
        # Through text, as a stored result is: YAML has no word for some of Python's values.
        content = registry.spec("optimizer", name, optimizer)
        try:
            content = yaml.safe_load(yaml.safe_dump(content))
        except yaml.YAMLError as error:
            raise AssertionError(f"YAML cannot hold its fields: {error}") from error
        if name:
            again = registry.from_spec("optimizer", content)
        else:
            values = {key: value for key, value in content.items() if key not in ("name", "revision")}
            again = fields.build(type(optimizer), values, type(optimizer).__name__, registry.converters())
        assert again == optimizer, f"{optimizer} comes back from YAML as {again}"


def has_a_complete_entry(optimizer: Optimizer) -> None:
    """Its entry in the registry has a summary, a reference, a family, and a grid of values that its fields take."""
    entries = entries_of(optimizer)
    if not entries:
        raise unittest.SkipTest("it is not registered")
    for entry in entries:
        assert entry.summary, f"{entry.name}: the summary is missing"
        assert entry.reference, f"{entry.name}: the reference is missing"
        families = ", ".join(registry.FAMILIES)
        assert entry.family in registry.FAMILIES, f"{entry.name}: family {entry.family!r} is none of {families}"
        for key, values in entry.grid.items():
            built = [getattr(registry.create(entry.name, **{key: value}), key) for value in values]
            assert len(set(built)) == len(values) > 0, f"{entry.name}: the grid of {key} is empty or repeats a value"


def equals_its_declared_limits(optimizer: Optimizer) -> None:
    """The special cases that its entry declares are what they are said to be, on a noisy run."""
    for entry in entries_of(optimizer):
        for limit in entry.limits:
            special, other = registry.create(entry.name, **limit["fields"]), registry.create(**limit["equals"])
            task = Task(dtype=torch.float64)
            one, two = task.record(special), task.record(other)
            complaint = f"{entry.name} with {limit['fields']} is not {limit['equals']}"
            assert one.plan.ledger == two.plan.ledger, f"{complaint}: it releases something else"
            # Both are in float64; 1e-6 of the way is far above their rounding.
            require_near(one.final.theta, two.final.theta, one.start, 1e-6, complaint)


def entries_of(optimizer: Optimizer) -> list[registry.Registered]:
    """The entries of the registry whose class is that of `optimizer`."""
    name = type(optimizer).__qualname__
    candidates = [entry for entry in registry.entries("optimizer").values() if entry.target.endswith(f":{name}")]
    return [entry for entry in candidates if entry.load() is type(optimizer)]
