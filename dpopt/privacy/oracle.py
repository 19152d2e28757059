"""Oracles: their common part, and two that hold no data. One traces which releases there would be, one replays them.

A release is charged to the draw it comes from before it is computed. What charges it also numbers it: (draw, number) is
its place in the ledger and names its noise, so that no two releases share theirs. A release that the plan does not hold
is refused, and so is a query while another is being answered. A draw enters the ledger when it closes, however its
block was left.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.ledger import Draw, Ledger, Plan
from dpopt.privacy.opaque import opaque
from dpopt.privacy.queries import Asked, Below, Gradient, Losses, Space, read
from dpopt.types import ClipRule, Layout, Number, Points, Query, Release, Vector, laid_out

Transcript = list[list[Release]]
"""Everything a run released: for each draw its releases, in order."""


class BudgetSpent(RuntimeError):
    """The plan holds no further draw or release."""


class UnplannedRelease(BudgetSpent):
    """The plan does not hold this release, so its noise was never paid for."""


class Asking:
    """A batch's queries, each by its short name; a subclass answers `ask`."""

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None, shift: Vector | None = None) -> Release:
        return self.ask(Gradient(at, clip, scale, shift))

    def losses(self, at: Sequence[Vector], bound: Number) -> Release:
        return self.ask(Losses(at, bound))

    def below(self, bound: Number) -> Release:
        return self.ask(Below(bound))

    def ask(self, query: Query) -> Release:
        """See `Batch.ask`."""
        raise NotImplementedError


class AnyKind(defaultdict[str, float]):
    """One noise multiplier for whatever kind of release is asked for."""

    def __init__(self, noise: float) -> None:
        super().__init__(lambda: noise)

    def __contains__(self, kind: object) -> bool:
        return True


class _Single:
    """An object of which there is one, as it counts what is released: it cannot be copied or pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # `copy`, `deepcopy` and `pickle` all come here
        raise TypeError(f"{type(self).__name__} cannot be copied: the copy would release the same noise, uncharged")


class Charged(NamedTuple):
    """A query that was charged, and the place of its releases in the ledger, which names their noise.

    Attributes:
        noise: noise multiplier of each of its releases.
        draw, number: number of the draw, and of the first of its releases in that draw; both from 0.
    """

    asked: Asked
    noise: float
    draw: int
    number: int
    records: Any


class OpenDraw(Asking, _Single):
    """One open draw, of a `number` from 0: it notes what its queries cost, and its oracle answers them."""

    def __init__(self, oracle: BaseOracle, number: int, planned: Draw | None, records: Any) -> None:
        self._oracle, self._planned = oracle, planned
        self._records = records  # what the oracle answers from: this draw's alone, and gone with it
        self._noises: tuple[float, ...] = ()
        self._kinds: tuple[str, ...] = ()
        self._is_open = True
        self.number = number

    @torch.no_grad()
    def ask(self, query: Query) -> Release:
        oracle = self._oracle
        # Reading a query runs code of the optimizer, and so does answering it: neither may ask, and no other thread.
        if not oracle._answering.acquire(blocking=False):
            raise UnplannedRelease("another query is being answered: an oracle answers one after the other")
        try:
            return oracle.answer(self._charge(read(query, oracle.space)))
        finally:
            oracle._answering.release()

    def _charge(self, asked: Asked) -> Charged:
        """The only place where a release is counted; UnplannedRelease if the plan does not hold it."""
        kind, oracle = asked.kind, self._oracle
        # A fork would take the same draws with the same noise, and no ledger would hold both.
        if os.getpid() != oracle._process:
            raise UnplannedRelease("the oracle belongs to another process, which this one was forked from")
        with oracle._counting:  # the draw may be closing in another thread
            if not self._is_open:
                raise UnplannedRelease("this draw is closed: query it inside its `with` block")
            if asked.follows is not None and asked.follows not in self._kinds:
                reason = f"a query of {kind} tells of the draw's last {asked.follows}, and none was queried"
                raise UnplannedRelease(reason)
            if kind not in oracle.noise:
                raise UnplannedRelease(f"the plan holds no release of kind {kind!r}")
            noise, number = oracle.noise[kind], len(self._noises)
            noises = (*self._noises, *(noise,) * asked.releases)
            if self._planned is not None and self._planned.noises[: len(noises)] != noises:
                raise UnplannedRelease(
                    f"draw {self.number}: the plan holds releases with noise {self._planned.noises}, not {noises}"
                )
            self._noises, self._kinds = noises, (*self._kinds, *(kind,) * asked.releases)
            if not self._is_open:  # the garbage collector has closed it in between
                raise UnplannedRelease("this draw is closed")
            return Charged(asked, noise, self.number, number, self._records)


def whole(dimension: int) -> Layout:
    """The layout of a vector as one parameter."""
    return laid_out([("theta", (dimension,), "")])


class BaseOracle(_Single):
    """Counters, ledger, refusal, and the way from a sum to a release; a subclass says what is summed.

    Attributes:
        dimension, rate, expected_batch, draws_total, draws_left: see `Oracle`.
        layout: see `Oracle`; by default that of `space`, or `whole`.
        noise: noise multiplier of each kind of release.
        ledger: the draws that are taken; its length is the number of the next one.
        space: how vectors and numbers are read.
        grid: True if releases with noise are rounded to a public grid (`sampling.round_to_grid`).
    """

    def __init__(
        self,
        *,
        space: Space,
        rate: float,
        expected_batch: float,
        draws: int,
        noise: Mapping[str, float],
        planned: Ledger | None = None,
        ledger: Ledger | None = None,
        layout: Layout | None = None,
        grid: bool = False,
    ) -> None:
        self.space, self.dimension = space, space.dimension
        self.layout = layout or space.layout or whole(space.dimension)
        self.rate = rate
        self.expected_batch = expected_batch
        self.draws_total = draws
        self.noise = MappingProxyType(noise)
        self.grid = grid
        # The plan's own, so that unit and noise are what is planned; the caller's stays as it is.
        self.ledger = (planned or Ledger()).first(len(ledger or ()))
        if ledger and self.ledger != ledger:
            raise ConfigError("ledger", repr(ledger), f"expected how the plan begins: {self.ledger!r}")
        self._planned = islice(planned, len(self.ledger), None) if planned is not None else None
        self._batch: OpenDraw | None = None
        self._process = os.getpid()
        self._drawing, self._answering, self._counting = threading.Lock(), threading.Lock(), threading.RLock()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and (name in vars(self) or hasattr(type(self), name)):
            raise ConfigError(f"oracle.{name}", value, "it can be read, not set")
        super().__setattr__(name, value)

    @property
    def draws_taken(self) -> int:
        """Draws that have been taken, the open one among them."""
        return len(self.ledger) + (self._batch is not None)

    @property
    def draws_left(self) -> int:
        return self.draws_total - self.draws_taken

    @contextmanager
    def draw(self) -> Iterator[OpenDraw]:
        if not self._drawing.acquire(blocking=False):
            # Its queries would see the inner draw's records and be charged as if they had a subsample of their own.
            raise UnplannedRelease("a draw is open: leave its `with` block before the next")
        try:
            if self.draws_left <= 0:
                raise BudgetSpent(f"all {self.draws_total} draws of the plan are taken")
            records = self._open(len(self.ledger))  # what is refused here has spent nothing
            batch = OpenDraw(self, len(self.ledger), next(self._planned) if self._planned else None, records)
            self._batch = batch
            try:
                yield batch
            finally:
                with self._counting:
                    batch._is_open = False
                    # Also after an error: what was released stays released.
                    self.ledger.append(Draw(self.rate, batch._noises))
                    self._close(batch)
                    self._batch = batch._records = None
        finally:
            self._drawing.release()

    def answer(self, charged: Charged) -> Release:
        """The release for a charged query: (sum + noise) / expected batch, rounded, and the public centre."""
        asked = charged.asked
        total = self._sum(asked, charged.records)
        # An infinite sensitivity without noise would be 0 * inf, which is not a number.
        std = charged.noise * asked.sensitivity if charged.noise else 0.0
        self._add_noise(total, std, charged)
        # A tensor of its own over the same memory: how often a sum was changed in place tells how many records it had.
        mean = total.div_(self.expected_batch).data
        std = std / self.expected_batch
        # Of the sum over all processes, so that all have the same bits.
        if self.grid:
            sampling.round_to_grid(mean, std)
        return Release(mean if asked.centre is None else mean.add_(asked.centre), std)

    def _sum(self, asked: Asked, records: Any) -> Tensor:
        """The sums of a query over the records of a draw: a new tensor, [d] for a gradient, else [m] float64."""
        raise NotImplementedError

    def _add_noise(self, total: Tensor, std: Number, charged: Charged) -> None:
        """Add the noise of a release to `total`, in place."""

    def _open(self, draw: int) -> Any:
        """The records that the queries of a draw are answered from; called before it is charged."""

    def _close(self, batch: OpenDraw) -> None:
        """Called when a draw ends."""


class TraceOracle(BaseOracle):
    """Answers with zeros and notes which releases each draw would make; holds no data.

    The zeros cannot be read by default (see `privacy.opaque`), so an optimizer whose control flow reads a released
    value fails here: its ledger would depend on the data, and no noise could be calibrated for it.

    Args:
        dimension: length of the vectors.
        rate, draws: as the run has them.
        noise: noise multiplier of each kind; by default 1 for any kind.
        device: where the zeros lie; `meta` for those that cannot be read.
        layout: of the vectors.

    Attributes:
        kinds: for each draw taken, the kinds of its releases in order.
        points: number of points of each gradient that was asked for.
    """

    def __init__(
        self,
        dimension: int,
        rate: float,
        draws: int,
        *,
        expected_batch: float = 1.0,
        noise: Mapping[str, float] | None = None,
        device: torch.device | str = "meta",
        layout: Layout | None = None,
    ) -> None:
        self.device = torch.device(device)
        space = Space(dimension, torch.get_default_dtype(), self.device, has_values=self.device.type != "meta")
        noise = AnyKind(1.0) if noise is None else noise
        super().__init__(space=space, rate=rate, expected_batch=expected_batch, draws=draws, noise=noise, layout=layout)
        self.kinds: list[tuple[str, ...]] = []
        self.points: list[int] = []

    @property
    def theta(self) -> Vector:
        """A start vector for `Optimizer.init`, shape [dimension]."""
        return self._zeros(self.dimension)

    def _zeros(self, length: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "meta":
            return opaque(torch.zeros(length, dtype=dtype))
        return torch.zeros(length, dtype=dtype, device=self.device)

    def _sum(self, asked: Asked, records: Any) -> Tensor:
        if not isinstance(asked.query, Gradient):
            return self._zeros(asked.releases, torch.float64)
        self.points.append(len(asked.query.points))
        return self._zeros(self.dimension)

    def _close(self, batch: OpenDraw) -> None:
        self.kinds.append(batch._kinds)


class ReplayOracle(BaseOracle):
    """Hands out the releases of a recorded run again; holds no data.

    An optimizer that ends at the same parameters as the recorded run used nothing but the releases.
    """

    def __init__(
        self, transcript: Transcript, plan: Plan, *, expected_batch: float = 1.0, layout: Layout | None = None
    ) -> None:
        values = (release.value for releases in transcript for release in releases)
        like = next((value for value in values if len(value) == plan.dimension), torch.empty(0))
        super().__init__(
            space=Space(plan.dimension, like.dtype, like.device),
            rate=plan.rate,
            expected_batch=expected_batch,
            draws=plan.draws,
            noise=plan.noise,
            planned=plan.ledger,
            layout=layout,
        )
        self._transcript = transcript

    def answer(self, charged: Charged) -> Release:
        return next(charged.records)

    def _open(self, draw: int) -> Iterator[Release]:
        return iter(self._transcript[draw])
