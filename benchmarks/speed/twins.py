"""An oracle on two devices at once: each query is put to both, and the answers must agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpopt.privacy.data import DataOracle
from dpopt.privacy.oracle import Asking, OpenDraw
from dpopt.testing.task import Task
from dpopt.types import Optimizer, Query, Release

TOLERANCE, ROUNDING = 1e-4, 1e-5
"""Largest distance of a release from that of the other device: shares of its length and of the query's sensitivity."""


def releases_as_on_the_cpu(optimizer: Optimizer, device: str) -> None:
    """The same queries over the same draws are answered on `device` as on the CPU, noise apart."""
    here, there = Task(), Task(device=device)
    plan = here.plan(optimizer, epsilon=math.inf)
    twins = Twins(here.oracle(plan), there.oracle(plan), torch.device(device))
    here.run(optimizer, twins)
    assert twins.compared, "nothing was released"


class Twins:
    """Gives the answers of `oracle`, after comparing each with that of `other`, which is on `device`.

    Attributes:
        compared: number of releases so far.
    """

    def __init__(self, oracle: DataOracle, other: DataOracle, device: torch.device) -> None:
        self._oracle, self._other, self.device = oracle, other, device
        self.compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    @contextmanager
    def draw(self) -> Iterator[_TwinBatch]:
        with self._oracle.draw() as batch, self._other.draw() as other:
            yield _TwinBatch(self, batch, other)

    def compare(self, query: Query, release: Release, other: Release) -> Release:
        """`release`, which `other` must equal but for rounding."""
        kind = query.kind
        assert other.value.device.type == self.device.type, f"{kind}: the release is on {other.value.device}"
        expected, value = release.value.double(), other.value.double().cpu()
        off, length = float((value - expected).norm()), float(expected.norm())
        where = f"draw {self._oracle.draws_taken}, {kind}"
        # A quotient of differences, as DPZero's, has the rounding of its parts, of which little is left in its length.
        assert off <= TOLERANCE * length + ROUNDING * float(query.sensitivity), (
            f"{where}: {off:.3g} apart from a release of length {length:.3g}"
        )
        stds = float(release.std), float(other.std)
        assert math.isclose(*stds, rel_tol=TOLERANCE), f"{where}: the stated stds are {stds}"
        self.compared += 1
        return release


class _TwinBatch(Asking):
    def __init__(self, parent: Twins, batch: OpenDraw, other: OpenDraw) -> None:
        self._parent, self._batch, self._other = parent, batch, other

    def ask(self, query: Query) -> Release:
        # Each oracle brings what it is given to its own device.
        return self._parent.compare(query, self._batch.ask(query), self._other.ask(query))
