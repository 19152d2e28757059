"""The oracles: one that answers from data, one that only traces what would be released, one that replays a transcript.

All three share the bookkeeping of `_Oracle`: a release is charged to the draw it comes from before it is computed, one
that the plan does not hold is refused, and a draw enters the ledger when it closes, however its block was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.protocol import ClipRule, Points, Release, Vector
from dpopt.privacy.unread import unread

if TYPE_CHECKING:
    from dpopt.clipping import ClippingEngine

GRADIENT, LOSSES, COUNTS = "gradient", "losses", "counts"
"""The kinds of release; a plan has one noise multiplier for each kind that it holds."""

CPU_MULTIPLE = 8
"""On the CPU, physical batches are padded to a multiple of it: the shapes of a run stay few, at next to no cost."""

Transcript = list[list[Release]]
"""Everything a run released: for each draw its releases, in order."""


class BudgetSpent(RuntimeError):
    """The plan holds no further draw or release."""


class UnplannedRelease(BudgetSpent):
    """The plan does not hold this release, so its noise was never paid for."""


def weighted(at: Points) -> list[tuple[float, Vector]]:
    """`at` as weighted points; a single vector counts with weight one."""
    return [(1.0, at)] if isinstance(at, Tensor) else list(at)


def require_finite(bound: float | Tensor) -> None:
    """Raise `ConfigError` for a bound of losses that is a number out of range."""
    if not isinstance(bound, Tensor) and not 0 < bound < float("inf"):
        raise ConfigError("losses.bound", bound, "expected a finite bound > 0")


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

    def _gradient(
        self, draw: int, release: int, at: Points, clip: ClipRule, scale: Vector | None, noise: float
    ) -> Release:
        raise NotImplementedError

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        raise NotImplementedError

    def _below(self, draw: int, release: int, bound: float | Tensor, noise: float) -> Release:
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

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None) -> Release:
        noise = self._charge(GRADIENT, 1)
        return self._oracle._gradient(self.number, len(self.noises) - 1, at, clip, scale, noise)

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        require_finite(bound)
        noise = self._charge(LOSSES, len(at))
        return self._oracle._losses(self.number, len(self.noises) - len(at), at, bound, noise)

    def below(self, bound: float | Tensor) -> Release:
        noise = self._charge(COUNTS, 1)
        return self._oracle._below(self.number, len(self.noises) - 1, bound, noise)

    def _charge(self, kind: str, count: int) -> float:
        """Note `count` releases of one kind; gives their noise multiplier."""
        if not self.is_open:
            raise UnplannedRelease("this draw is closed: query it inside its `with` block")
        if kind == COUNTS and GRADIENT not in self.kinds:
            raise UnplannedRelease("`below` tells of the draw's last gradient, and none was queried")
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

    The zeros cannot be read by default (see `privacy.unread`), so an optimizer whose control flow reads a released
    value fails here: its ledger would depend on the data, and no noise could be calibrated for it.

    Args:
        dimension: length of the vectors; each step computes with them, unread or not.
        rate, draws: as the run has them.
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
        noise = dict.fromkeys((GRADIENT, LOSSES, COUNTS), 1.0) if noise is None else noise
        super().__init__(dimension=dimension, rate=rate, expected_batch=expected_batch, draws=draws, noise=noise)
        self.device = device
        self.kinds: list[tuple[str, ...]] = []
        self.points = 0

    @property
    def theta(self) -> Vector:
        """A start vector for `Optimizer.init`, shape [dimension]."""
        return self._zeros(self.dimension)

    def _zeros(self, length: int, dtype: torch.dtype | None = None) -> Tensor:
        if torch.device(self.device).type == "meta":
            return unread(torch.zeros(length, dtype=dtype))
        return torch.zeros(length, dtype=dtype, device=self.device)

    def _close(self, batch: _Batch) -> None:
        self.kinds.append(tuple(batch.kinds))

    def _gradient(
        self, draw: int, release: int, at: Points, clip: ClipRule, scale: Vector | None, noise: float
    ) -> Release:
        self.points += len(weighted(at))
        std = noise * clip.sensitivity / self.expected_batch if noise else 0.0
        return Release(self._zeros(self.dimension), std)

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        return Release(self._zeros(len(at), torch.float64), noise * bound / 2 / self.expected_batch)

    def _below(self, draw: int, release: int, bound: float | Tensor, noise: float) -> Release:
        return Release(self._zeros(1, torch.float64), noise / 2 / self.expected_batch)


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

    def _gradient(
        self, draw: int, release: int, at: Points, clip: ClipRule, scale: Vector | None, noise: float
    ) -> Release:
        return next(self._next)

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        return next(self._next)

    def _below(self, draw: int, release: int, bound: float | Tensor, noise: float) -> Release:
        return next(self._next)


class _Inputs(NamedTuple):
    """One physical batch, ready for the engine: inputs and targets [n, ...], and which rows count, bool [n]."""

    x: Tensor
    y: Tensor
    mask: Tensor


class Seen(NamedTuple):
    """What the engine saw of one physical batch of n examples while it summed a gradient. Not private.

    Attributes:
        draw: the draw's number.
        points: weights and parameters that the gradient was asked at.
        x, y: inputs as the model takes them and targets, [n, ...].
        mask: which rows count, bool [n].
        norms: L2 norms of the gradients before clipping, shape [n].
    """

    draw: int
    points: list[tuple[float, Vector]]
    x: Tensor
    y: Tensor
    mask: Tensor
    norms: Tensor


class _Known(NamedTuple):
    """Losses of one point that its gradient has left behind: [n] for each physical batch of the open draw."""

    version: int
    losses: list[Tensor]


class DataOracle(_Oracle):
    """Answers from data: sums of clipped per-example values, plus noise, divided by the expected batch size.

    Where the plan holds losses, those at a point whose gradient the same draw has evaluated are not computed again.

    Args:
        engine: computes the clipped sums and the losses.
        x, y: all training records; row i of both is record i. The number of rows is public.
        plan: what may be released, and with how much noise.
        draw_seed: decides who is in each draw (and dropout), see `sampling`.
        noise_seed: decides the noise. Secret, if the model is to be published.
        physical_batch: the most examples per call of the engine; by default the engine decides from its memory. The
            releases are the same for any, to rounding, unless the model or `transform` is random: what is random in a
            physical batch is a function of (seed, draw, its number).
        transform: inputs as they are stored, [n, ...] on `device`, -> the model's inputs; may draw random numbers.
        device: where the engine computes; by default where `x` is.
        ledger: draws that an interrupted run has already taken; the oracle goes on after them.
        transcript: where given, every release is kept in it (for `ReplayOracle`).
        watch: where given, called with what the engine sees, for diagnostics; no optimizer can reach it.
        processes: those that answer together. Each has such an oracle, over all records, is asked the same queries and
            gets the same releases. Making the oracle waits for the others.

    Raises:
        ConfigError: the model is not the plan's; the processes differ in records, parameters, plan, seeds or ledger; or
            `watch` with several of them, as each sees only its part of a draw.
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
        transform: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | None = None,
        ledger: Ledger | None = None,
        transcript: Transcript | None = None,
        watch: Callable[[Seen], None] | None = None,
        processes: Processes = ALONE,
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
        self._device, self._transform = device or x.device, transform
        self._size = physical_batch or engine.physical_batch(self.expected_batch / processes.size)
        # A GPU is at its best with calls of one shape; a CPU does not mind, so there is next to nothing to pad.
        self._multiple = self._size if self._device.type == "cuda" else CPU_MULTIPLE
        self._transcript, self._watch = transcript, watch
        self._parts: list[Callable[[], _Inputs]] | None = None
        self._rows = np.zeros(0, dtype=np.int64)
        self._known = WeakTensorKeyDictionary()
        self._norms: list[tuple[Tensor, Tensor]] = []
        self.processes = processes
        if processes.size > 1:
            self._require_agreement(plan)

    def _require_agreement(self, plan: Plan) -> None:
        # A record that lies elsewhere in another process could be in two parts of a draw, and count twice.
        if self._watch is not None:
            raise ConfigError(
                "watch", self._watch, "each of several processes sees only its part of a draw: leave it out"
            )
        self.processes.agree(
            self._device,
            records=[list(self._x.shape), list(self._y.shape), digest(self._x, self._y)],
            parameters=digest(self._engine.theta),
            plan=[dict(plan.noise), plan.rate, plan.draws, plan.ledger.to_json()],
            seeds=[sampling.REVISION, self._draw_seed, self._noise_seed],
            ledger=self.ledger.to_json(),
        )

    def _open(self, draw: int) -> None:
        self._rows = self.processes.part(sampling.poisson_rows(self._draw_seed, draw, len(self._x), self.rate))
        self._parts = None
        if self._transcript is not None:
            self._transcript.append([])

    def _close(self, batch: _Batch) -> None:
        self._parts, self._norms = None, []
        self._known.clear()

    @property
    def _inputs(self) -> list[Callable[[], _Inputs]]:
        """What gathers each physical batch of the open draw."""
        if self._parts is None:
            draw = self.draws_taken - 1
            batches = sampling.physical_batches(self._rows, self._size, self._multiple)
            gather = [
                partial(self._gather, draw, part, torch.from_numpy(rows), torch.from_numpy(mask))
                for part, (rows, mask) in enumerate(batches)
            ]
            # A draw of one physical batch is gathered once, a larger one again for each query: it may not fit.
            self._parts = [cache(gather[0])] if len(gather) == 1 else gather
        return self._parts

    def _gather(self, draw: int, part: int, rows: Tensor, mask: Tensor) -> _Inputs:
        rows = sampling.send(rows, self._x.device)
        x, y, mask = (sampling.send(t, self._device) for t in (self._x[rows], self._y[rows], mask))
        if self._transform is not None:
            with self._randomness("transform", draw, part):
                x = self._transform(x)
        return _Inputs(x, y, mask)

    def _gradient(
        self, draw: int, release: int, at: Points, clip: ClipRule, scale: Vector | None, noise: float
    ) -> Release:
        total = self._clipped_sum(draw, weighted(at), clip, scale)
        std = noise * clip.sensitivity if noise else 0.0
        self._add_noise(total, std, draw, release)
        self.processes.add_up(total)
        return self._released(total.div_(self.expected_batch), std / self.expected_batch)

    def _clipped_sum(
        self, draw: int, points: list[tuple[float, Vector]], clip: ClipRule, scale: Vector | None
    ) -> Tensor:
        """What this process has of the sum, [d]: the engine's own tensor, so that no other of its size is needed."""
        total, losses = None, []
        self._norms = []
        for part, inputs in enumerate(self._inputs):
            x, y, mask = inputs()
            with self._randomness("dropout", draw, part):
                clipped = self._engine.clipped(points, x, y, mask, clip, scale)
            losses.append(clipped.losses)
            self._norms.append((clipped.norms, mask))
            if self._watch is not None:
                self._watch(Seen(draw, points, x, y, mask, clipped.norms))
            total = clipped.total if total is None else total.add_(clipped.total)
        if LOSSES in self.noise:
            for k, (_, theta) in enumerate(points):
                self._known[theta] = _Known(theta._version, [values[k] for values in losses])
        return torch.zeros_like(points[0][1]) if total is None else total

    def _losses(self, draw: int, release: int, at: Sequence[Vector], bound: float | Tensor, noise: float) -> Release:
        bound = bound.double() if isinstance(bound, Tensor) else bound
        total = torch.zeros(len(at), dtype=torch.float64, device=self._device)
        for part in range(len(self._inputs)):
            losses, mask = self._losses_of(draw, part, at)
            # Centred at bound/2, a record moves the sum by at most bound/2 under add/remove: half of the plain bound.
            centred = losses.clamp(min=0).clamp(max=bound) - bound / 2
            total += torch.where(mask & losses.isfinite(), centred, 0.0).sum(dim=1)
        std = noise * bound / 2
        if noise and self.processes.is_first:
            total += std * self._normal(draw, release, len(at))
        self.processes.add_up(total)
        return self._released(total / self.expected_batch + bound / 2, std / self.expected_batch)

    def _below(self, draw: int, release: int, bound: float | Tensor, noise: float) -> Release:
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for norm, mask in self._norms:
            # Centred at 1/2, a record moves the sum by 1/2; a norm that is not a number is not below anything.
            total += torch.where(mask, (norm <= bound).double() - 0.5, 0.0).sum()
        if noise and self.processes.is_first:
            total += noise / 2 * self._normal(draw, release, 1)
        self.processes.add_up(total)
        return self._released(total / self.expected_batch + 0.5, noise / 2 / self.expected_batch)

    def _losses_of(self, draw: int, part: int, at: Sequence[Vector]) -> tuple[Tensor, Tensor]:
        """Losses [k, n] of one physical batch, float64, and its mask [n]; only points not yet known are computed."""
        x, y, mask = self._inputs[part]()
        known = [self._recall(theta, part) for theta in at]
        missing = [theta for theta, losses in zip(at, known, strict=True) if losses is None]
        if missing:
            with self._randomness("dropout", draw, part):
                computed = iter(self._engine.losses(missing, x, y, mask))
            known = [next(computed) if losses is None else losses for losses in known]
        return torch.stack(known).double(), mask

    def _recall(self, theta: Vector, part: int) -> Tensor | None:
        """Losses [n] at `theta` if this draw has evaluated this very tensor, and it was not changed since."""
        known = self._known.get(theta)
        return known.losses[part] if known is not None and known.version == theta._version else None

    def _add_noise(self, total: Vector, std: float, draw: int, release: int) -> None:
        """Add the noise of a gradient's release to `total`, shape [d], in place, where this process has to."""
        if std and self.processes.is_first:
            sampling.add_gaussian(total, std, self._noise_seed, draw, release)

    def _normal(self, draw: int, release: int, size: int) -> Tensor:
        """The standard normal numbers of a release of losses or counts; float64, shape [size]."""
        return sampling.gaussian(self._noise_seed, draw, release, size, torch.float64, self._device)

    def _released(self, value: Tensor, std: float | Tensor) -> Release:
        release = Release(value, std)
        if self._transcript is not None:
            self._transcript[-1].append(release)
        return release

    @contextmanager
    def _randomness(self, purpose: str, draw: int, part: int) -> Iterator[None]:
        """Random numbers as a function of (seed, purpose, draw, physical batch), whatever the generators hold."""
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            generators.append(torch.cuda.default_generators[index])
        number = part * self.processes.size + self.processes.rank  # no two batches of a draw share their numbers
        seed = sampling.derive(self._draw_seed, purpose, draw, number) >> 65
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
