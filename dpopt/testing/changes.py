"""Rules by change: another value of a field, another release, another batch size does to a run what it should."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from dpopt import fields
from dpopt.clipping.rules import Abadi, factors
from dpopt.privacy.queries import GRADIENT, Asked
from dpopt.testing.privacy import Neighbours
from dpopt.testing.task import Recording, Task, advance, require_same
from dpopt.types import ClipRule, Optimizer

_Path = tuple[Any, ...]
"""The names of fields, and places in tuples, that lead to a value."""
_NORMS = torch.logspace(-3, 3, 7)


def clips_as_stated(optimizer: Optimizer) -> None:
    """Gradients are clipped by the rules in its fields, and by `clip`, whatever its value: a statement prints its C."""
    recording, stated = _recorded(optimizer), getattr(optimizer, "clip", None)
    for path, other in variants(optimizer):
        if "clip" not in path or getattr(other, "clip", None) == stated:
            continue
        owner = reduce(getattr, path[: path.index("clip")], other)
        rules = [_bounds(rule) for rule in _parts(owner) if isinstance(rule, ClipRule)]
        queries: list[Any] = [each.query for each in _replayed(other, recording)[0] if each.kind == GRADIENT]
        asked = [_bounds(query.clip) for query in queries]
        is_stated = _bounds(owner.clip) in asked and all(bounds in rules for bounds in asked)
        assert is_stated, f"gradients are not clipped by the {owner.clip} of its field `clip`"


def every_field_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each field changes the end, what is asked or what is calibrated, maybe beside another change."""
    recording, own = _recorded(optimizer), list(variants(optimizer))
    excepted = getattr(optimizer, "conformance_exceptions", {})
    unused = {path for path, _ in own if f"every_field_changes_the_end.{path[0]}" not in excepted}
    # Some act beside others alone, as the end of a decay where there is a decay; switches tend to be the last.
    for each in [optimizer, *(other for _, other in reversed(own))]:
        if unused and (trail := _trail(each, recording)) is not None:
            for path, other in variants(each):
                if path in unused and _trail(other, recording) != trail:
                    unused.remove(path)
    names = sorted(".".join(map(str, path)) for path in unused)
    assert not unused, f"nothing depends on {', '.join(names)}, which results would state"


def every_release_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each release changes the end or what is asked; the last of a kind may steer no further step."""
    recording = _recorded(optimizer)
    trail, asked = _trail(optimizer, recording), _replayed(optimizer, recording)[0]
    releases = [release for draw in recording.releases for release in draw]
    kinds = [each.kind for each in asked]
    for index, (kind, release) in enumerate(zip(kinds, releases, strict=True)):
        is_last = kind in kinds[:index] and kind not in (GRADIENT, *kinds[index + 1 :])
        is_used = any(_trail(optimizer, recording, release.value, factor) != trail for factor in (-1, 1e3))
        assert is_used or is_last, f"release {index} ({kind}) is paid for and not used"


def leaves_the_batch_size_to_the_oracle(optimizer: Optimizer) -> None:
    """The same releases under twice the expected batch lead to the same end: they are means already."""
    recording = _recorded(optimizer)
    doubled = recording._replace(expected_batch=2 * recording.expected_batch)
    require_same(doubled.replay(optimizer), recording.final, "the end depends on the expected batch")


def variants(value: Any, hint: Any = None) -> Iterator[tuple[_Path, Any]]:
    """A path, and `value` with another value there that its class takes: for all fields, also those of its parts."""
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            for path, other in variants(part):
                yield (place, *path), (*value[:place], other, *value[place + 1 :])
    if not dataclasses.is_dataclass(value):
        yield from (((), other) for other in _others(value, hint) if other != value)
        return
    for name, kind in fields.hints(type(value)).items():
        for path, other in variants(getattr(value, name), kind):
            try:
                changed = dataclasses.replace(value, **{name: other})  # type: ignore[type-var]
            except Exception:  # its class refuses in its own way
                continue
            yield (name, *path), changed


def _others(value: Any, hint: Any) -> Sequence[Any]:
    """Other values to try; none for texts and mappings, which can be anything."""
    if value is None:
        return [0.5, 2, Abadi(0.5)]
    if isinstance(value, float):
        return [value / 2, 2 * value, 0.5, 1e-6 * value, 1e6 * value]
    if isinstance(value, int):  # small, as it may be a length; of a truth value the other one is among them
        return [type(value)(number) for number in (0, 1, 2, value + 1, value + 2)]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else []


@lru_cache(maxsize=1)
def _recorded(optimizer: Optimizer) -> Recording:
    return Task().record(optimizer)


def _replayed(
    optimizer: Optimizer, recording: Recording, release: Any = None, factor: float = 1
) -> tuple[list[Asked], Any]:
    """What a replay asks for, and its end, where the value of one release is multiplied."""
    oracle = Neighbours(recording.oracle(lambda value: factor * value if value is release else value))
    end = advance(optimizer, optimizer.init(recording.start), oracle)
    return [asked for asked, _ in oracle.queries], end


def _trail(optimizer: Any, recording: Recording, *change: Any) -> list[Any] | None:
    """All that a replay shows of an optimizer, to be compared; None where it fails, as by an unplanned release."""
    try:
        asked, end = _replayed(optimizer, recording, *change)
    except Exception:
        return None
    names = ("noise_inflation", "shares") if len(recording.plan.noise) > 1 else ()
    return _leaves([asked, end.theta, *(getattr(optimizer, name, None) for name in names)])


def _parts(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _leaves(value: Any) -> list[Any]:
    """All that is in dataclasses, lists and tuples; tensors as bytes."""
    if dataclasses.is_dataclass(value):
        value = _parts(value)
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value.numpy().tobytes() if isinstance(value, Tensor) else value]


def _bounds(rule: ClipRule) -> list[float]:
    return [float(rule.sensitivity), *factors(rule, _NORMS).tolist()]
