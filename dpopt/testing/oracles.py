"""Oracles that watch: one that shows the protocol and nothing else, one that compares neighbouring data sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from dpopt.privacy.data import DataOracle
from dpopt.privacy.oracle import Asking, OpenDraw
from dpopt.privacy.queries import Asked, read
from dpopt.types import Batch, Oracle, Query, Release


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


class Neighbours:
    """An oracle whose queries are noted, and also put to a neighbouring data set, if there is one.

    Attributes:
        queries: all queries so far as they were read, with their releases.
        largest: for each kind of release, how far the one record has moved a sum, as a share of what it may.
    """

    def __init__(self, oracle: DataOracle, neighbour: DataOracle | None = None) -> None:
        self._oracle, self._neighbour = oracle, neighbour
        self.queries: list[tuple[Asked, Release]] = []
        self.largest: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    @contextmanager
    def draw(self) -> Iterator[Asking]:
        with ExitStack() as stack:
            batch = stack.enter_context(self._oracle.draw())
            other = stack.enter_context(self._neighbour.draw()) if self._neighbour else None
            yield _NeighbourBatch(self, batch, other)

    def answer(self, query: Query, batch: OpenDraw, other: OpenDraw | None) -> Release:
        """Ask both, keep the query, and compare the two releases."""
        asked, release = read(query, self.space), batch.ask(query)
        self.queries.append((asked, release))
        if other is not None and self._neighbour is not None:
            # Sums, not means: the two oracles divide by different (public) batch sizes, and some sums are centred.
            offset = asked.centre or 0.0
            mine = (release.value.double() - offset) * self._oracle.expected_batch
            theirs = (other.ask(query).value.double() - offset) * self._neighbour.expected_batch
            moved, allowed = float((mine - theirs).norm()), float(asked.sensitivity) * math.sqrt(asked.releases)
            assert moved <= allowed * (1 + 1e-4) + 1e-4, (
                f"one record moved a query ({asked.kind}) by {moved}, not {allowed}"
            )
            self.largest[asked.kind] = max(self.largest.get(asked.kind, 0.0), moved / allowed)
        return release


class _NeighbourBatch(Asking):
    def __init__(self, parent: Neighbours, batch: OpenDraw, other: OpenDraw | None) -> None:
        self._parent, self._batch, self._other = parent, batch, other

    def ask(self, query: Query) -> Release:
        return self._parent.answer(query, self._batch, self._other)
