"""Rules by change: another value of a field, another release, another batch size does to a run what it should."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dpopt import fields
from dpopt.clipping.rules import Abadi
from dpopt.privacy.queries import GRADIENT, Asked
from dpopt.testing.privacy import Neighbours
from dpopt.testing.task import Recording, Task, advance, require_same
from dpopt.types import ClipRule, Optimizer

_Path = tuple[Any, ...]
"""The names of fields, and places in tuples, that lead to a value."""


def clips_as_stated(optimizer: Optimizer) -> None:
    """Gradients are bounded by the field `clip`, and rules in other fields, at any value: a statement prints its C."""
    recording, stated = _recorded(optimizer), getattr(optimizer, "clip", None)
    others = (other for _, other in variants(optimizer) if getattr(other, "clip", None) != stated)
    # Two, as one of them may be the value of a bound that is written out.
    for other in islice(others, 2):
        bounds = {float(rule.sensitivity) for rule in (other.clip, *_parts(other)) if isinstance(rule, ClipRule)}
        asked = {float(each.sensitivity) for each in _replayed(other, recording).asked if each.kind == GRADIENT}
        is_stated = asked <= bounds and float(other.clip.sensitivity) in asked
        assert is_stated, f"gradients are bounded by {sorted(asked)}, where `clip` is {other.clip}"


def every_field_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each field changes the end, what is asked or what is calibrated, maybe beside another change."""
    recording, own = _recorded(optimizer), list(variants(optimizer))
    excepted = getattr(optimizer, "conformance_exceptions", {})
    unused = {path for path, _ in own if f"every_field_changes_the_end.{path[0]}" not in excepted}
    # Some act beside others alone, as the end of a decay where there is a decay; switches tend to be the last.
    for each in [optimizer, *(other for _, other in reversed(own))]:
        if unused and (trail := _replayed(each, recording).trail):
            for path, other in variants(each):
                if path in unused and _replayed(other, recording).trail != trail:
                    unused.remove(path)
    names = sorted(".".join(map(str, path)) for path in unused)
    assert not unused, f"nothing depends on {', '.join(names)}, which results would state"


def every_release_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each release changes the end or what is asked; the last of a kind may steer no further step."""
    recording = _recorded(optimizer)
    asked, trail = _replayed(optimizer, recording)
    kinds = [each.kind for each in asked]
    releases = [release for draw in recording.releases for release in draw]
    for index, (kind, release) in enumerate(zip(kinds, releases, strict=True)):
        is_last = kind in kinds[:index] and kind not in (GRADIENT, *kinds[index + 1 :])
        is_used = any(_replayed(optimizer, recording, release.value, by).trail != trail for by in (-1, 1e3))
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


class _Replay(NamedTuple):
    """The queries of a replay, and `trail`, all that it shows of an optimizer; none, as after an unplanned release."""

    asked: list[Asked]
    trail: list[Any] | None


@lru_cache(maxsize=1)
def _recorded(optimizer: Optimizer) -> Recording:
    return Task().record(optimizer)


def _replayed(optimizer: Any, recording: Recording, release: Any = None, factor: float = 1) -> _Replay:
    """A replay, where the value of one release is multiplied."""
    oracle = Neighbours(recording.oracle(lambda value: factor * value if value is release else value))
    try:
        end = advance(optimizer, optimizer.init(recording.start), oracle)
    except Exception:
        return _Replay([], None)
    asked = [query for query, _ in oracle.queries]
    names = ("noise_inflation", "shares") if len(recording.plan.noise) > 1 else ()
    return _Replay(asked, _leaves([asked, end.theta, *(getattr(optimizer, name, None) for name in names)]))


def _parts(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _leaves(value: Any) -> list[Any]:
    """All that is in dataclasses, lists and tuples; tensors as bytes."""
    if dataclasses.is_dataclass(value):
        value = _parts(value)
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value.numpy().tobytes() if isinstance(value, Tensor) else value]
