"""The oracle of R runs that are trained at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.clipping.flat import clip_factors
from dpopt.clipping.lot import Examined, LotEngine, Matrix, together
from dpopt.errors import ConfigError
from dpopt.privacy.oracle import COUNTS, CPU_MULTIPLE, GRADIENT, LOSSES, DataOracle, require_finite, weighted
from dpopt.privacy.protocol import ClipRule, Points, Release, Vector
from dpopt.privacy.sampling import send


class LotOracle:
    """Answers R runs at once, each as its own `DataOracle` would; for code under `torch.func.vmap` over the runs.

    Draws, noise, ledger and what is refused are those of each run's own oracle, bit for bit; sums differ from its by
    rounding alone. The records of a draw are one physical batch, padded to the longest draw of all runs.

    Args:
        engine: computes for all runs.
        oracles: one for each run, of one process each, without `watch` and `transcript`, with a `transform` that is the
            same for all and draws no random numbers.

    Raises:
        ConfigError: something that optimizers can see differs between the runs.
    """

    def __init__(self, engine: LotEngine, oracles: Sequence[DataOracle]) -> None:
        self._engine, self._oracles = engine, oracles
        first = oracles[0]
        self.dimension, self.rate, self.expected_batch = first.dimension, first.rate, first.expected_batch
        self.draws_total = first.draws_total
        for name in ("dimension", "rate", "expected_batch", "draws_total", "draws_left"):
            if len(values := {getattr(oracle, name) for oracle in oracles}) > 1:
                raise ConfigError(f"oracles.{name}", sorted(values), "expected the same for all runs of a lot")
        if engine.dimension != self.dimension:
            raise ConfigError("oracles.dimension", self.dimension, f"the model trains {engine.dimension} parameters")

    @property
    def draws_taken(self) -> int:
        return self._oracles[0].draws_taken

    @property
    def draws_left(self) -> int:
        return self._oracles[0].draws_left

    @contextmanager
    def draw(self) -> Iterator[_LotBatch]:
        with ExitStack() as stack:
            batches = [stack.enter_context(oracle.draw()) for oracle in self._oracles]
            yield _LotBatch(self._engine, self._oracles, batches)


class _Known(NamedTuple):
    """Losses [R, n] at one point."""

    thetas: Matrix
    version: int
    losses: Tensor

    def is_at(self, thetas: Matrix) -> bool:
        """Whether that is the point: the same memory, not changed since. It stays alive with this."""
        mine = (self.thetas.data_ptr(), self.thetas.shape, self.thetas.stride(), self.version)
        return mine == (thetas.data_ptr(), thetas.shape, thetas.stride(), thetas._version)


class _LotBatch:
    """One open draw of each run; see `Batch`. What is named `_..._of_all` has the values of all runs, [R, ...]."""

    def __init__(self, engine: LotEngine, oracles: Sequence[DataOracle], batches: Sequence[Any]) -> None:
        self._engine, self._oracles, self._batches = engine, oracles, batches
        self._expected = oracles[0].expected_batch
        self._seen: Examined | None = None
        self._norms: Tensor | None = None
        self._known: list[_Known] = []

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None) -> Release:
        noises = self._charge(GRADIENT, 1)
        weights, thetas = zip(*weighted(at), strict=True)

        def examine(*vectors: Matrix) -> tuple[Tensor, Tensor]:
            return self._examine_of_all(weights, vectors[: len(thetas)], *vectors[len(thetas) :])

        def add_up(factors: Tensor, sensitivities: Tensor) -> tuple[Matrix, Tensor]:
            return self._sums_of_all(factors, sensitivities, noises)

        norms, mask = together(examine, *thetas, *([] if scale is None else [scale]))
        factors = clip_factors(clip, norms, mask).to(norms.dtype)
        self._norms = norms
        return Release(*together(add_up, factors, _number(clip.sensitivity, factors)))

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        require_finite(bound)
        noises = self._charge(LOSSES, len(at))

        def add_up(bounds: Tensor, *thetas: Matrix) -> tuple[Tensor, Tensor]:
            return self._losses_of_all(thetas, bounds, noises)

        return Release(*together(add_up, _number(bound, at[0]), *at))

    def below(self, bound: float | Tensor) -> Release:
        noises = self._charge(COUNTS, 1)
        assert self._norms is not None  # or it would have been refused

        def count(norms: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
            return self._below_of_all(norms, bounds, noises)

        return Release(*together(count, self._norms, _number(bound, self._norms)))

    def _charge(self, kind: str, count: int) -> list[float]:
        """The noise multiplier of each run."""
        return [batch._charge(kind, count) for batch in self._batches]

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets [R, n, ...], and which rows count, bool [R, n]."""
        first, draws = self._oracles[0], [oracle._rows for oracle in self._oracles]
        length = math.ceil(max(1, *map(len, draws)) / CPU_MULTIPLE) * CPU_MULTIPLE
        rows = np.zeros((len(draws), length), dtype=np.int64)  # row 0 stands where no record is
        for own, drawn in zip(rows, draws, strict=True):
            own[: len(drawn)] = drawn
        x, y = (_gathered([getattr(oracle, name) for oracle in self._oracles], rows) for name in ("_x", "_y"))
        mask = torch.from_numpy(np.arange(length) < np.array([[len(drawn)] for drawn in draws]))
        x, y, mask = (send(each, first._device) for each in (x, y, mask))
        return x if first._transform is None else first._transform(x.flatten(0, 1)).unflatten(0, mask.shape), y, mask

    def _examine_of_all(
        self, weights: Sequence[float], thetas: Sequence[Matrix], scale: Matrix | None = None
    ) -> tuple[Tensor, Tensor]:
        x, y, mask = self._inputs
        seen = self._engine.examined(list(zip(weights, thetas, strict=True)), x, y, scale)
        if LOSSES in self._oracles[0].noise:
            known = zip(thetas, seen.losses, strict=True)
            self._known += [_Known(theta, theta._version, losses) for theta, losses in known]
        self._seen = seen
        return seen.norms, mask

    def _sums_of_all(self, factors: Tensor, sensitivities: Tensor, noises: Sequence[float]) -> tuple[Matrix, Tensor]:
        assert self._seen is not None
        totals = self._seen.sums(factors)
        pairs = zip(noises, sensitivities.tolist(), strict=True)
        stds = [noise * sensitivity if noise else 0.0 for noise, sensitivity in pairs]
        for oracle, batch, total, std in zip(self._oracles, self._batches, totals, stds, strict=True):
            oracle._add_noise(total, std, batch.number, len(batch.noises) - 1)
        return totals.div_(self._expected), sensitivities.new_tensor(stds) / self._expected

    def _losses_of_all(
        self, thetas: Sequence[Matrix], bounds: Tensor, noises: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        losses = torch.stack([self._losses_at(theta) for theta in thetas], 1).double()  # [R, k, n]
        bound = bounds[:, None, None]
        centred = losses.clamp(min=0).clamp(max=bound) - bound / 2
        totals = torch.where(self._inputs[2].unsqueeze(1) & losses.isfinite(), centred, 0.0).sum(dim=2)
        stds = bounds.new_tensor(noises) * bounds / 2
        self._add_normals(totals, stds, noises)
        return totals / self._expected + bounds[:, None] / 2, stds / self._expected

    def _losses_at(self, thetas: Matrix) -> Tensor:
        """Losses [R, n]; those at a point whose gradient the draw has evaluated are not computed again."""
        for known in self._known:
            if known.is_at(thetas):
                return known.losses
        x, y, _ = self._inputs
        return self._engine.lot_losses([thetas], x, y)[0]

    def _below_of_all(self, norms: Tensor, bounds: Tensor, noises: Sequence[float]) -> tuple[Tensor, Tensor]:
        is_below = (norms <= bounds[:, None].to(norms.dtype)).double()
        totals = torch.where(self._inputs[2], is_below - 0.5, 0.0).sum(1, keepdim=True)
        stds = bounds.new_tensor(noises) / 2
        self._add_normals(totals, stds, noises)
        return totals / self._expected + 0.5, stds / self._expected

    def _add_normals(self, totals: Tensor, stds: Tensor, noises: Sequence[float]) -> None:
        """Add the noise of the last releases to `totals`, shape [R, k]."""
        for run, (oracle, batch, noise) in enumerate(zip(self._oracles, self._batches, noises, strict=True)):
            count = totals.shape[1]
            if noise:
                totals[run] += stds[run] * oracle._normal(batch.number, len(batch.noises) - count, count)


def _gathered(stored: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    """The `rows` [R, n] of what each run has stored, shape [R, n, ...]."""
    result = stored[0].new_empty(*rows.shape, *stored[0].shape[1:])
    for own, source, out in zip(torch.from_numpy(rows).to(result.device), stored, result, strict=True):
        torch.index_select(source, 0, own, out=out)
    return result


def _number(value: float | Tensor, like: Tensor) -> Tensor:
    """One float64 number for each run, on `like`'s device."""
    if isinstance(value, Tensor):
        return value.double()
    return torch.full((), value, dtype=torch.float64, device=like.device)
