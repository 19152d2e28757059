"""The oracles: one that answers from data, one that only traces what would be released, one that replays a transcript.

All three share the bookkeeping of `_Oracle`: a release is charged to the draw it comes from before it is computed, one
that the plan does not hold is refused, and a draw enters the ledger when it closes, however its block was left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.protocol import ClipRule, Points, Release, Vector

if TYPE_CHECKING:
    from dpopt.clipping import ClippingEngine

GRADIENT, LOSSES = "gradient", "losses"
"""The kinds of release; a plan has one noise multiplier for each kind that it holds."""

Transcript = list[list[Release]]
"""Everything a run released: for each draw its releases, in order."""


class BudgetSpent(RuntimeError):
    """The plan holds no further draw or release."""


class UnplannedRelease(BudgetSpent):
    """The plan does not hold this release, so its noise was never paid for."""


def weighted(at: Points) -> list[tuple[float, Vector]]:
    """`at` as weighted points; a single vector counts with weight one."""
    return [(1.0, at)] if isinstance(at, Tensor) else list(at)


class _Oracle:
    """Counters, ledger and refusal; a subclass says how a release is computed."""

    def __init__(
        self,
        *,
        dimension: int,
        rate: float,
        expected_batch: float,
        draws: int,
        noise: Mapping[str, float],
        planned: Ledger | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.dimension = dimension
        self.rate = rate
        self.expected_batch = expected_batch
        self.draws_total = draws
        self.noise = noise
        self.ledger = Ledger() + (ledger or Ledger())  # a copy: the caller's stays as it is
        self.draws_taken = len(self.ledger)
        self._is_drawing = False
        self._planned = islice(planned, self.draws_taken, None) if planned is not None else None

    @property
    def draws_left(self) -> int:
        return self.draws_total - self.draws_taken

    @contextmanager
    def draw(self) -> Iterator[_Batch]:
        if self.draws_left <= 0:
            raise BudgetSpent(f"all {self.draws_total} draws of the plan are taken")
        if self._is_drawing:
            # Its queries would see the inner draw's records and be charged as if they had a subsample of their own.
            raise UnplannedRelease("a draw is open: leave its `with` block before the next")
        self._is_drawing = True
        batch = _Batch(self, self.draws_taken, next(self._planned) if self._planned else None)
        self.draws_taken += 1
        self._open(batch.number)
        try:
            yield batch
        finally:
            batch.is_open = self._is_drawing = False
            self.ledger.append(Draw(self.rate, tuple(batch.noises)))
            self._close(batch)

    def _open(self, draw: int) -> None:
        """Called when a draw begins."""

    def _close(self, batch: _Batch) -> None:
        """Called when a draw has ended."""

    def _gradient(self, draw: int, release: int, at: Points, clip: ClipRule, noise: float) -> Release:
        raise NotImplementedError

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        raise NotImplementedError


class _Batch:
    """One open draw. Queries go through `_charge`, which notes the noise and refuses what was not planned."""

    def __init__(self, oracle: _Oracle, number: int, planned: Draw | None) -> None:
        self._oracle = oracle
        self._planned = planned
        self.number = number
        self.noises: list[float] = []
        self.kinds: list[str] = []
        self.is_open = True

    def gradient(self, at: Points, clip: ClipRule) -> Release:
        noise = self._charge(GRADIENT, 1)
        return self._oracle._gradient(self.number, len(self.noises) - 1, at, clip, noise)

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        if not isinstance(bound, Tensor) and not 0 < bound < float("inf"):
            raise ConfigError("losses.bound", bound, "expected a finite bound > 0")
        noise = self._charge(LOSSES, len(at))
        return self._oracle._losses(self.number, len(self.noises) - len(at), at, bound, noise)

    def _charge(self, kind: str, count: int) -> float:
        if not self.is_open:
            raise UnplannedRelease("this draw is closed: query it inside its `with` block")
        if kind not in self._oracle.noise:
            raise UnplannedRelease(f"the plan holds no release of kind {kind!r}")
        noise = self._oracle.noise[kind]
        noises = (*self.noises, *(noise,) * count)
        if self._planned is not None and self._planned.noises[: len(noises)] != noises:
            raise UnplannedRelease(
                f"draw {self.number}: the plan holds releases with noise {self._planned.noises}, not {noises}"
            )
        self.noises[:] = noises
        self.kinds += [kind] * count
        return noise


class TraceOracle(_Oracle):
    """Answers with zeros and notes which releases each draw would make; holds no data.

    Values live on the `meta` device by default, so an optimizer whose control flow reads a released value fails here:
    its ledger would depend on the data, and no noise could be calibrated for it.

    Attributes:
        kinds: for each draw taken, the kinds of its releases in order.
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
        noise = {GRADIENT: 1.0, LOSSES: 1.0} if noise is None else noise
        super().__init__(dimension=dimension, rate=rate, expected_batch=expected_batch, draws=draws, noise=noise)
        self.device = device
        self.kinds: list[tuple[str, ...]] = []

    @property
    def theta(self) -> Vector:
        """A start vector for `Optimizer.init`, shape [dimension]."""
        return torch.zeros(self.dimension, device=self.device)

    def _close(self, batch: _Batch) -> None:
        self.kinds.append(tuple(batch.kinds))

    def _gradient(self, draw: int, release: int, at: Points, clip: ClipRule, noise: float) -> Release:
        std = noise * clip.sensitivity / self.expected_batch if noise else 0.0
        return Release(torch.zeros(self.dimension, device=self.device), std)

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        value = torch.zeros(len(at), dtype=torch.float64, device=self.device)
        return Release(value, noise * bound / 2 / self.expected_batch)


class ReplayOracle(_Oracle):
    """Hands out the releases of a recorded run again; holds no data.

    An optimizer that ends at the same parameters as the recorded run used nothing but the releases.
    """

    def __init__(self, transcript: Transcript, plan: Plan, *, expected_batch: float = 1.0) -> None:
        super().__init__(
            dimension=plan.dimension,
            rate=plan.rate,
            expected_batch=expected_batch,
            draws=plan.draws,
            noise=plan.noise,
            planned=plan.ledger,
        )
        self._transcript = transcript
        self._next: Iterator[Release] = iter(())

    def _open(self, draw: int) -> None:
        self._next = iter(self._transcript[draw])

    def _gradient(self, draw: int, release: int, at: Points, clip: ClipRule, noise: float) -> Release:
        return next(self._next)

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        return next(self._next)


class DataOracle(_Oracle):
    """Answers from data: sums of clipped per-example values, plus noise, divided by the expected batch size.

    Args:
        engine: computes the clipped sums and the losses.
        x, y: all training records; row i of both is record i. The number of rows is public.
        plan: what may be released, and with how much noise.
        draw_seed: decides who is in each draw (and dropout), see `sampling`.
        noise_seed: decides the noise. Secret, if the model is to be published.
        physical_batch: examples per call of the engine; by default the engine decides from its memory.
        ledger: draws that an interrupted run has already taken; the oracle goes on after them.
        transcript: where given, every release is kept in it (for `ReplayOracle`).
    """

    def __init__(
        self,
        engine: ClippingEngine,
        x: Tensor,
        y: Tensor,
        plan: Plan,
        *,
        draw_seed: int,
        noise_seed: int,
        physical_batch: int | None = None,
        ledger: Ledger | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        super().__init__(
            dimension=plan.dimension,
            rate=plan.rate,
            expected_batch=plan.rate * len(x),
            draws=plan.draws,
            noise=plan.noise,
            planned=plan.ledger,
            ledger=ledger,
        )
        if engine.dimension != plan.dimension:
            raise ConfigError("plan.dimension", plan.dimension, f"the model trains {engine.dimension} parameters")
        self._engine, self._x, self._y = engine, x, y
        self._draw_seed, self._noise_seed = draw_seed, noise_seed
        self._size = physical_batch or engine.physical_batch(self.expected_batch)
        self._transcript = transcript
        self._batches: list[tuple[Tensor, Tensor]] = []

    def _open(self, draw: int) -> None:
        rows = sampling.poisson_rows(self._draw_seed, draw, len(self._x), self.rate)
        self._batches = [
            (torch.from_numpy(part).to(self._x.device), torch.from_numpy(mask).to(self._x.device))
            for part, mask in sampling.physical_batches(rows, self._size)
        ]
        if self._transcript is not None:
            self._transcript.append([])

    def _gradient(self, draw: int, release: int, at: Points, clip: ClipRule, noise: float) -> Release:
        total = torch.zeros(self.dimension, device=self._x.device)
        for part, (rows, mask) in enumerate(self._batches):
            with self._randomness(draw, part):
                total += self._engine.clipped_sum(weighted(at), self._x[rows], self._y[rows], mask, clip)
        std = noise * clip.sensitivity if noise else 0.0
        return self._release(draw, release, total, std)

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        half = torch.as_tensor(bound, dtype=torch.float64, device=self._x.device) / 2
        total = torch.zeros(len(at), dtype=torch.float64, device=self._x.device)
        for part, (rows, mask) in enumerate(self._batches):
            with self._randomness(draw, part):
                losses = self._engine.losses(at, self._x[rows], self._y[rows], mask).double()
            # Centred at bound/2, a record moves the sum by at most bound/2 under add/remove: half of the plain bound.
            centred = torch.minimum(losses.clamp(min=0), 2 * half) - half
            total += torch.where(mask & losses.isfinite(), centred, 0.0).sum(dim=1)
        return self._release(draw, release, total, noise * half, offset=half)

    def _release(
        self, draw: int, release: int, total: Tensor, std: float | Tensor, offset: float | Tensor = 0.0
    ) -> Release:
        noise = sampling.gaussian(self._noise_seed, draw, release, len(total), total.dtype, total.device)
        result = Release((total + std * noise) / self.expected_batch + offset, std / self.expected_batch)
        if self._transcript is not None:
            self._transcript[-1].append(result)
        return result

    @contextmanager
    def _randomness(self, draw: int, part: int) -> Iterator[None]:
        """Dropout as a function of (seed, draw, physical batch), whatever the global generators hold."""
        devices = [self._x.device] if self._x.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(sampling.derive(self._draw_seed, "dropout", draw, part) >> 65)
            yield
