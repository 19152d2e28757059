"""What all oracles share, and the two that hold no data: one traces what would be released, one replays a transcript.

A release is charged to the draw it comes from before it is computed, one that the plan does not hold is refused, and a
draw enters the ledger when it closes, however its block was left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor

from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.queries import Asked, Below, Gradient, Losses, Space, Unseen, read
from dpopt.privacy.unread import unread
from dpopt.types import ClipRule, Number, Points, Query, Release, Vector

Transcript = list[list[Release]]
"""Everything a run released: for each draw its releases, in order."""


class BudgetSpent(RuntimeError):
    """The plan holds no further draw or release."""


class UnplannedRelease(BudgetSpent):
    """The plan does not hold this release, so its noise was never paid for."""


class Asking:
    """A batch's queries, each by its short name; a subclass answers `ask`."""

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None) -> Release:
        return self.ask(Gradient(at, clip, scale))

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


class OpenDraw(Asking):
    """One open draw. Its oracle answers the queries; the batch notes what they cost.

    Attributes:
        number: of the draw, from 0.
        noises, kinds: of the releases so far, each with its noise multiplier.
    """

    def __init__(self, oracle: BaseOracle, number: int, planned: Draw | None) -> None:
        self._oracle = oracle
        self._planned = planned
        self.number = number
        self.noises: list[float] = []
        self.kinds: list[str] = []
        self.is_open = True

    @torch.no_grad()
    def ask(self, query: Query) -> Release:
        asked = read(query, self._oracle.space)
        noise = self.charge(asked)
        return self._oracle.answer(self, asked, noise)

    def charge(self, asked: Asked) -> float:
        """Note the releases that a query makes; gives their noise multiplier.

        Raises:
            UnplannedRelease: the draw is closed, or the plan does not hold them.
        """
        kind = asked.kind
        if not self.is_open:
            raise UnplannedRelease("this draw is closed: query it inside its `with` block")
        if asked.follows is not None and asked.follows not in self.kinds:
            raise UnplannedRelease(f"a query of {kind} tells of the draw's last {asked.follows}, and none was queried")
        if kind not in self._oracle.noise:
            raise UnplannedRelease(f"the plan holds no release of kind {kind!r}")
        noise = self._oracle.noise[kind]
        noises = (*self.noises, *(noise,) * asked.releases)
        if self._planned is not None and self._planned.noises[: len(noises)] != noises:
            raise UnplannedRelease(
                f"draw {self.number}: the plan holds releases with noise {self._planned.noises}, not {noises}"
            )
        self.noises[:] = noises
        self.kinds += [kind] * asked.releases
        return noise


class BaseOracle:
    """Counters, ledger, refusal, and the way from a sum to a release; a subclass says what is summed.

    Attributes:
        dimension, rate, expected_batch, draws_total, draws_left: see `Oracle`.
        noise: noise multiplier of each kind of release.
        ledger: the draws that are taken.
        space: how vectors and numbers are read.
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
    ) -> None:
        self.space, self.dimension = space, space.dimension
        self.rate = rate
        self.expected_batch = expected_batch
        self.draws_total = draws
        self.noise = MappingProxyType(noise)
        self.ledger = Ledger() + (ledger or Ledger())  # a copy: the caller's stays as it is
        self._taken = len(self.ledger)
        self._is_drawing = False
        self._planned = islice(planned, self._taken, None) if planned is not None else None

    @property
    def draws_taken(self) -> int:
        """Draws that have been taken, the open one among them."""
        return self._taken

    @property
    def draws_left(self) -> int:
        return self.draws_total - self._taken

    @contextmanager
    def draw(self) -> Iterator[OpenDraw]:
        if self.draws_left <= 0:
            raise BudgetSpent(f"all {self.draws_total} draws of the plan are taken")
        if self._is_drawing:
            # Its queries would see the inner draw's records and be charged as if they had a subsample of their own.
            raise UnplannedRelease("a draw is open: leave its `with` block before the next")
        self._is_drawing = True
        try:
            self._open(self._taken)  # what is refused here has spent nothing
        except BaseException:
            self._is_drawing = False
            raise
        batch = OpenDraw(self, self._taken, next(self._planned) if self._planned else None)
        self._taken += 1
        try:
            yield batch
        finally:
            batch.is_open = self._is_drawing = False
            self.ledger.append(Draw(self.rate, tuple(batch.noises)))
            self._close(batch)

    def answer(self, batch: OpenDraw, asked: Asked, noise: float) -> Release:
        """The release for a query that was read and charged: (sum + noise) / expected batch, and the public centre."""
        total = self._sum(asked)
        std = noise * asked.sensitivity if noise else 0.0
        self._add_noise(total, std, batch.number, len(batch.noises) - asked.releases)
        mean = total.div_(self.expected_batch)
        return Release(mean if asked.centre is None else mean.add_(asked.centre), std / self.expected_batch)

    def _sum(self, asked: Asked) -> Tensor:
        """The sums of a query over the records of the open draw: a new tensor, [d] for a gradient, else [m] float64."""
        raise NotImplementedError

    def _add_noise(self, total: Tensor, std: Number, draw: int, release: int) -> None:
        """Add the noise of a release to `total`, in place."""

    def _open(self, draw: int) -> None:
        """Called before a draw is charged."""

    def _close(self, batch: OpenDraw) -> None:
        """Called when a draw has ended."""


class TraceOracle(BaseOracle):
    """Answers with zeros and notes which releases each draw would make; holds no data.

    The zeros cannot be read by default (see `privacy.unread`), so an optimizer whose control flow reads a released
    value fails here: its ledger would depend on the data, and no noise could be calibrated for it.

    Args:
        dimension: length of the vectors; each step computes with them, unread or not.
        rate, draws: as the run has them.
        noise: noise multiplier of each kind; by default 1 for any kind.
        device: where the zeros lie; `meta` for those that cannot be read.

    Attributes:
        kinds: for each draw taken, the kinds of its releases in order.
        points: number of points at which gradients were asked for, in all draws together.
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
    ) -> None:
        self.device = torch.device(device)
        kind = Unseen if self.device.type == "meta" else Space
        space = kind(dimension, torch.get_default_dtype(), self.device)
        noise = AnyKind(1.0) if noise is None else noise
        super().__init__(space=space, rate=rate, expected_batch=expected_batch, draws=draws, noise=noise)
        self.kinds: list[tuple[str, ...]] = []
        self.points = 0

    @property
    def theta(self) -> Vector:
        """A start vector for `Optimizer.init`, shape [dimension]."""
        return self.zeros(self.dimension)

    def zeros(self, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """What is released: zeros [length]."""
        if self.device.type == "meta":
            return unread(torch.zeros(length, dtype=dtype))
        return torch.zeros(length, dtype=dtype, device=self.device)

    def _sum(self, asked: Asked) -> Tensor:
        if not isinstance(asked.query, Gradient):
            return self.zeros(asked.releases, torch.float64)
        self.points += len(asked.query.points)
        return self.zeros(self.dimension)

    def _close(self, batch: OpenDraw) -> None:
        self.kinds.append(tuple(batch.kinds))


class ReplayOracle(BaseOracle):
    """Hands out the releases of a recorded run again; holds no data.

    An optimizer that ends at the same parameters as the recorded run used nothing but the releases.
    """

    def __init__(self, transcript: Transcript, plan: Plan, *, expected_batch: float = 1.0) -> None:
        values = (release.value for releases in transcript for release in releases)
        like = next((value for value in values if len(value) == plan.dimension), torch.empty(0))
        super().__init__(
            space=Space(plan.dimension, like.dtype, like.device),
            rate=plan.rate,
            expected_batch=expected_batch,
            draws=plan.draws,
            noise=plan.noise,
            planned=plan.ledger,
        )
        self._transcript = transcript
        self._next: Iterator[Release] = iter(())

    def answer(self, batch: OpenDraw, asked: Asked, noise: float) -> Release:
        return next(self._next)

    def _open(self, draw: int) -> None:
        self._next = iter(self._transcript[draw])
