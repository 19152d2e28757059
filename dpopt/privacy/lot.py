"""The oracle of R runs that are trained at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.clipping.flat import clip_factors
from dpopt.clipping.lot import Examined, LotEngine, Matrix, together
from dpopt.clipping.rules import Bounded
from dpopt.errors import ConfigError
from dpopt.privacy.data import CPU_MULTIPLE, DataOracle, Known, sums
from dpopt.privacy.oracle import Asking, OpenDraw, released
from dpopt.privacy.protocol import Number, Query, Release, Vector
from dpopt.privacy.queries import Asked, Gradient, read
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


class _LotBatch(Asking):
    """One open draw of each run; see `Batch`. What is named `_..._of_all` has the values of all runs, [R, ...]."""

    def __init__(self, engine: LotEngine, oracles: Sequence[DataOracle], batches: Sequence[OpenDraw]) -> None:
        self._engine, self._oracles, self._batches = engine, oracles, batches
        self._expected = oracles[0].expected_batch
        self._seen: Examined | None = None
        self._norms: Tensor | None = None
        self._known: list[Known] = []

    @torch.no_grad()
    def ask(self, query: Query) -> Release:
        asked = read(query, self._oracles[0].space)
        noises = [batch.charge(asked) for batch in self._batches]
        query = asked.query
        total = self._clipped(query, asked.sensitivity) if isinstance(query, Gradient) else self._summed(asked)

        def noised(totals: Tensor, sensitivities: Tensor) -> tuple[Tensor, Tensor]:
            return self._noised_of_all(totals, sensitivities, noises, asked.releases)

        total, std = together(noised, total, self._number(asked.sensitivity))
        return released(total, std, asked, self._expected)

    def _clipped(self, query: Gradient, sensitivity: Number) -> Vector:
        """The clipped sum of a run, [d]."""
        weights, thetas = zip(*query.points, strict=True)
        scale = query.scale

        def examine(*vectors: Matrix) -> tuple[Tensor, Tensor]:
            return self._examine_of_all(weights, vectors[: len(thetas)], *vectors[len(thetas) :])

        norms, mask = together(examine, *thetas, *([] if scale is None else [scale]))
        self._norms = norms
        factors = clip_factors(Bounded(query.clip, sensitivity), norms, mask).to(norms.dtype)
        return together(self._sums_of_all, factors)

    def _sums_of_all(self, factors: Tensor) -> Matrix:
        assert self._seen is not None
        return self._seen.sums(factors)

    def _summed(self, asked: Asked) -> Tensor:
        """The sums of a run, [m]."""
        norms = [] if self._norms is None else [self._norms]

        def evaluate(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._evaluated_of_all(tensors[len(norms) :], *tensors[: len(norms)])

        return sums(asked, *together(evaluate, *norms, *asked.query.probed))

    def _number(self, value: Number) -> Tensor:
        """A tensor, which differs between runs where `value` does."""
        return torch.as_tensor(value, dtype=torch.float64, device=self._oracles[0].space.device)

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
        self, weights: Sequence[Number], thetas: Sequence[Matrix], scale: Matrix | None = None
    ) -> tuple[Tensor, Tensor]:
        x, y, mask = self._inputs
        seen = self._engine.examined(list(zip(weights, thetas, strict=True)), x, y, scale)
        if len(self._oracles[0].noise) > 1:
            known = zip(thetas, seen.losses, strict=True)
            self._known += [Known(theta, theta._version, [losses]) for theta, losses in known]
        self._seen = seen
        return seen.norms, mask

    def _evaluated_of_all(self, thetas: Sequence[Matrix], norms: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [R, k, n] at k points, norms [R, n] and mask [R, n] of all records."""
        mask = self._inputs[2]
        losses = [self._losses_at(theta).double() for theta in thetas]
        empty = mask.new_zeros(len(mask), 0, mask.shape[1], dtype=torch.float64)
        norms = torch.full(mask.shape, math.nan, device=mask.device) if norms is None else norms
        return torch.stack(losses, 1) if losses else empty, norms, mask

    def _losses_at(self, thetas: Matrix) -> Tensor:
        """Losses [R, n]; those at a point whose gradient the draw has evaluated are not computed again."""
        for known in self._known:
            if known.is_at(thetas):
                return known.losses[0]
        x, y, _ = self._inputs
        return self._engine.lot_losses([thetas], x, y)[0]

    def _noised_of_all(
        self, totals: Tensor, sensitivities: Tensor, noises: Sequence[float], releases: int
    ) -> tuple[Tensor, Tensor]:
        """Sums [R, ...] with the noise of each run, and its standard deviations [R]."""
        pairs = zip(noises, sensitivities.tolist(), strict=True)
        stds = [noise * sensitivity if noise else 0.0 for noise, sensitivity in pairs]
        totals = totals.clone(memory_format=torch.contiguous_format)
        for oracle, batch, total, std in zip(self._oracles, self._batches, totals, stds, strict=True):
            oracle._add_noise(total, std, batch.number, len(batch.noises) - releases)
        return totals, sensitivities.new_tensor(stds)


def _gathered(stored: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    """The `rows` [R, n] of what each run has stored, shape [R, n, ...]."""
    result = stored[0].new_empty(*rows.shape, *stored[0].shape[1:])
    for own, source, out in zip(torch.from_numpy(rows).to(result.device), stored, result, strict=True):
        torch.index_select(source, 0, own, out=out)
    return result
