"""Rules by change: another value of a field, another release, another batch size does to a run what it should."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpopt import fields
from dpopt.clipping.rules import Abadi
from dpopt.privacy.queries import GRADIENT, Asked
from dpopt.testing.privacy import Neighbours
from dpopt.testing.task import Recording, Task, advance, require_same
from dpopt.types import ClipRule, Optimizer


def clips_as_stated(optimizer: Optimizer) -> None:
    """Gradients are bounded by the field `clip`, or rules in other fields, at any value: a statement prints its C."""
    recording = _recorded(optimizer)
    for path, other in variants(optimizer):
        if path.startswith("clip."):
            stated = {float(rule.sensitivity) for rule in vars(other).values() if isinstance(rule, ClipRule)}
            asked, _ = _replayed(other, recording)
            used = {float(each.sensitivity) for each in asked if each.kind == GRADIENT}
            assert used <= stated, f"gradients are bounded by {sorted(used)}, where `clip` is {other.clip}"


def every_field_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each field changes the end, what is asked or what is calibrated, maybe beside another change."""
    recording, own = _recorded(optimizer), list(variants(optimizer))
    unused = {path for path, _ in own}
    # Some act beside others alone, as the end of a decay where there is a decay; switches tend to be the last.
    for each in (optimizer, *(other for _, other in reversed(own))):
        _, end = _replayed(each, recording) if unused else ([], None)
        for path, other in variants(each) if end else ():
            if path in unused and _replayed(other, recording)[1] != end:
                unused.remove(path)
    assert not unused, f"nothing depends on {', '.join(sorted(unused))}, which results would state"


def every_release_changes_the_end(optimizer: Optimizer) -> None:
    """Another value of each release changes the end or what is asked; the last of a kind may steer no further step."""
    recording = _recorded(optimizer)
    asked, end = _replayed(optimizer, recording)
    kinds = [each.kind for each in asked]
    for index, (kind, release) in enumerate(zip(kinds, chain(*recording.releases), strict=True)):
        is_last = kind in kinds[:index] and kind not in (GRADIENT, *kinds[index + 1 :])
        is_used = is_last or any(_replayed(optimizer, recording, release.value, by)[1] != end for by in (-1, 1e3))
        assert is_used, f"release {index} ({kind}) is paid for and not used"


def leaves_the_batch_size_to_the_oracle(optimizer: Optimizer) -> None:
    """The same releases under twice the expected batch lead to the same end: they are means already."""
    recording = _recorded(optimizer)
    doubled = recording._replace(expected_batch=2 * recording.expected_batch)
    require_same(doubled.replay(optimizer), recording.final, "the end depends on the expected batch")


def variants(value: Any, hint: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """A path of names, and `value` with another value there that its class takes: for all fields, also of its parts."""
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            for where, other in variants(part, path=f"{path}.{place}"):
                yield where, (*value[:place], other, *value[place + 1 :])
    elif dataclasses.is_dataclass(value):
        for name, kind in fields.hints(type(value)).items():
            for where, other in variants(getattr(value, name), kind, f"{path}.{name}".lstrip(".")):
                with suppress(Exception):  # its class refuses in its own way
                    yield where, dataclasses.replace(value, **{name: other})  # type: ignore[type-var]
    else:
        yield from ((path, other) for other in _others(value, hint) if other != value)


def _others(value: Any, hint: Any) -> Sequence[Any]:
    """Other values to try; none for texts and mappings, which can be anything."""
    if value is None:
        return [0.5, 2, Abadi(0.5)]
    if isinstance(value, int | float):  # a whole number may be a length: none is large
        numbers = (0, 0.5, 1, 1e-6 * value, value + 1, value + 2)
        return [type(value)(number) for number in numbers]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else []


@lru_cache(maxsize=1)
def _recorded(optimizer: Optimizer) -> Recording:
    return Task().record(optimizer)


def _replayed(optimizer: Any, recording: Recording, release: Any = None, factor: float = 1) -> tuple[list[Asked], Any]:
    """The queries of a replay, where one release is multiplied, and all that it shows; nothing if it cannot end."""
    oracle = Neighbours(recording.oracle(lambda value: factor * value if value is release else value))
    try:
        shown: list[Any] = [advance(optimizer, optimizer.init(recording.start), oracle).theta]
    except Exception:  # as after a release that is not planned
        return [], None
    asked = [query for query, _ in oracle.queries]
    if len(recording.plan.noise) > 1:
        shown += [getattr(optimizer, name, None) for name in ("noise_inflation", "shares")]
    leaves = tree_leaves([shown, [vars(each.query) for each in asked]])
    return asked, [leaf.numpy().tobytes() if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves]
