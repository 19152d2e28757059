"""Oracles that watch: one that shows the protocol and nothing else, one that compares neighbouring data sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpopt.privacy.oracle import COUNTS, GRADIENT, LOSSES, DataOracle
from dpopt.privacy.protocol import Batch, ClipRule, Oracle, Points, Release, Vector


def strict(oracle: Any) -> Any:
    """`oracle` with the attributes that `Oracle` and `Batch` declare; any other raises `AssertionError`."""

    @contextmanager
    def draw() -> Iterator[Any]:
        with oracle.draw() as batch:
            yield _View("batch", _declared(Batch, batch))

    return _View("oracle", _declared(Oracle, oracle) | {"draw": lambda: draw})


def _declared(protocol: type, instance: Any) -> dict[str, Callable[[], Any]]:
    names = [name for name in vars(protocol) if not name.startswith("_")]
    return {name: lambda name=name: getattr(instance, name) for name in names}


class _View:
    """Shows some attributes and takes none."""

    __slots__ = ("_shown", "_what")

    def __init__(self, what: str, shown: Mapping[str, Callable[[], Any]]) -> None:
        object.__setattr__(self, "_what", what)
        object.__setattr__(self, "_shown", shown)

    def __getattribute__(self, name: str) -> Any:
        shown = object.__getattribute__(self, "_shown")
        if name not in shown:
            raise AssertionError(f"`{object.__getattribute__(self, '_what')}.{name}` is not in the protocol")
        return shown[name]()

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"`{object.__getattribute__(self, '_what')}.{name}` is set from outside")


@dataclass(frozen=True)
class Query:
    """One query: its kind, the sensitivity that each of its `count` noised parts is charged with, and the release."""

    kind: str
    sensitivity: float
    count: int
    release: Release


class Neighbours:
    """An oracle whose queries are noted, and also put to a neighbouring data set, if there is one.

    Attributes:
        queries: all queries so far.
        largest: for each kind of release, how far the one record has moved a sum, as a share of what it may.
    """

    def __init__(self, oracle: DataOracle, neighbour: DataOracle | None = None) -> None:
        self._oracle, self._neighbour = oracle, neighbour
        self.queries: list[Query] = []
        self.largest: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    @contextmanager
    def draw(self) -> Iterator[_NeighbourBatch]:
        with self._oracle.draw() as batch:
            if self._neighbour is None:
                yield _NeighbourBatch(self, batch, None)
                return
            with self._neighbour.draw() as other:
                yield _NeighbourBatch(self, batch, other)

    def note(self, query: Query, other: Release | None, offset: float) -> Release:
        """Keep `query`, and compare it with what the neighbour has released for it."""
        self.queries.append(query)
        if other is not None:
            self._compare(query, other, offset)
        return query.release

    def _compare(self, query: Query, other: Release, offset: float) -> None:
        assert self._neighbour is not None
        # Sums, not means: the two oracles divide by different (public) batch sizes, and some sums are centred.
        mine = (query.release.value.double() - offset) * self._oracle.expected_batch
        theirs = (other.value.double() - offset) * self._neighbour.expected_batch
        moved, allowed = float((mine - theirs).norm()), query.sensitivity * math.sqrt(query.count)
        assert moved <= allowed * (1 + 1e-4) + 1e-4, (
            f"one record moved a query ({query.kind}) by {moved}, not {allowed}"
        )
        self.largest[query.kind] = max(self.largest.get(query.kind, 0.0), moved / allowed)


class _NeighbourBatch:
    def __init__(self, parent: Neighbours, batch: Any, other: Any) -> None:
        self._parent, self._batch, self._other = parent, batch, other

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None) -> Release:
        return self._ask(GRADIENT, clip.sensitivity, 1, 0.0, lambda batch: batch.gradient(at, clip, scale))

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        half = float(bound) / 2
        return self._ask(LOSSES, half, len(at), half, lambda batch: batch.losses(at, bound))

    def below(self, bound: float | Tensor) -> Release:
        return self._ask(COUNTS, 0.5, 1, 0.5, lambda batch: batch.below(bound))

    def _ask(self, kind: str, sensitivity: float, count: int, offset: float, ask: Callable[[Any], Release]) -> Release:
        query = Query(kind, sensitivity, count, ask(self._batch))
        return self._parent.note(query, ask(self._other) if self._other else None, offset)
