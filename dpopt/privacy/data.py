"""The oracle that answers from data."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.flat import ClippingEngine
from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.ledger import Ledger, Plan
from dpopt.privacy.oracle import BaseOracle, Charged, Transcript
from dpopt.privacy.queries import Asked, Gradient, Space, contributions
from dpopt.types import Number, Release, Vector

_CPU_MULTIPLE = 8
"""On the CPU, physical batches are padded to a multiple of this, so that a run has few different shapes; it costs
almost nothing."""
_GENERATORS = threading.RLock()
"""torch's generators are the process's: an oracle has them to itself while it has set their state."""


_Inputs = tuple[Tensor, Tensor, Tensor]
"""Inputs and targets [n, ...], and the rows that count, bool [n]."""


class Seen(NamedTuple):
    """One physical batch of n examples, as the engine saw it while it summed a gradient. Not private.

    Attributes:
        x, y: inputs as the model takes them and targets, [n, ...].
        mask: which rows count, bool [n].
        norms: L2 norms of the gradients before clipping, shape [n].
        scale: as `ClippingEngine.clipped` takes it.
    """

    draw: int
    points: list[tuple[Number, Vector]]
    x: Tensor
    y: Tensor
    mask: Tensor
    norms: Tensor
    scale: Vector | None = None


@dataclass
class _Drawn:
    """All that is kept of one draw while it is open.

    Attributes:
        inputs: its physical batches; each is made when it is called.
        released: the draw's part of the transcript.
        norms: of the records' gradients in the last query for one, [n] for each physical batch; none before.
        evaluated: place of a point with a gradient -> the point, which so keeps its memory, and the losses there.
    """

    number: int
    inputs: list[Callable[[], _Inputs]]
    released: list[Release] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    evaluated: dict[tuple[object, ...], tuple[Vector, list[Tensor]]] = field(default_factory=dict)


def _place(theta: Vector) -> tuple[object, ...]:
    return theta.data_ptr(), theta.shape, theta.stride(), theta._version


def sums(asked: Asked, losses: Tensor, norms: Tensor, mask: Tensor) -> Tensor:
    """The sums [m] of a query over the n records that `mask` [n] lets count; float64. See `queries.contributions`."""
    # Whatever a query of one's own says, no record contributes more than the sensitivity that the noise is made for.
    each = contributions(asked, losses, norms)
    bound: Any = asked.sensitivity  # torch's annotations know either two numbers or two tensors
    each = torch.where(mask & each.isfinite(), each.double(), 0.0)
    return each.clamp(-bound, bound).contiguous().sum(dim=1)


class DataOracle(BaseOracle):
    """Answers from data: sums of clipped per-example values, plus noise, divided by the expected batch size.

    Args:
        engine: computes the clipped sums and the losses.
        x, y: all training records; row i of both is record i.
        plan: what may be released, and with how much noise.
        draw_seed: decides who is in each draw (and dropout), see `sampling`.
        noise_seed: decides the noise. Secret, if the model is to be published.
        physical_batch: the most examples per call of the engine, which decides by default. Releases are the same for
            any, to rounding or a step of the grid, unless the model or `transform` is random.
        transform: inputs as they are stored, [n, ...] on `device`, -> the model's inputs; may draw random numbers.
        device: where the engine computes; by default where `x` is.
        ledger: draws that an interrupted run has already taken; the oracle goes on after them.
        transcript: where given, every release is kept in it (for `ReplayOracle`).
        watch: where given, called with what the engine sees, for diagnostics; no optimizer can reach it.
        examples: the public number N of records; by default, and but for an audit, that of the rows.
        grid: see `BaseOracle`; on wherever releases are of a user's records.
        processes: those that answer together, each over all records. Making the oracle waits for the others.

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
        examples: int | None = None,
        grid: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        self._device = device or x.device
        with processes.together() as settle:
            super().__init__(
                space=Space(plan.dimension, engine.theta.dtype, self._device, layout=engine.layout),
                rate=plan.rate,
                expected_batch=plan.rate * (len(x) if examples is None else examples),
                draws=plan.draws,
                noise=plan.noise,
                planned=plan.ledger,
                ledger=ledger,
                grid=grid,
            )
            if engine.dimension != plan.dimension:
                raise ConfigError("plan.dimension", plan.dimension, f"the model trains {engine.dimension} parameters")
            if watch is not None and processes.size > 1:
                raise ConfigError("watch", watch, "leave it out: each of several processes sees its part of a draw")
            settle()
        self._engine, self._x, self._y = engine, x, y
        self._draw_seed, self._noise_seed = draw_seed, noise_seed
        self._transform = transform
        self._size = physical_batch or engine.physical_batch(self.expected_batch / processes.size)
        # A GPU is at its best with calls of one shape; a CPU does not mind, so there is next to nothing to pad.
        self._multiple = self._size if self._device.type == "cuda" else _CPU_MULTIPLE
        self._transcript, self._watch = transcript, watch
        self._first = len(self.ledger)
        self.processes = processes
        if processes.size > 1:
            # A record that lies elsewhere in another process could be in two parts of a draw, and count twice.
            processes.agree(
                self._device,
                records=[list(x.shape), list(y.shape), digest(x, y)],
                parameters=digest(engine.theta),
                plan=[dict(plan.noise), plan.rate, plan.draws, plan.ledger.to_json(), grid],
                seeds=[sampling.REVISION, draw_seed, noise_seed],
                ledger=self.ledger.to_json(),
            )

    def _open(self, draw: int) -> _Drawn:
        rows = self.processes.part(sampling.poisson_rows(self._draw_seed, draw, len(self._x), self.rate))
        batches = sampling.physical_batches(rows, self._size, self._multiple)
        gather = [
            partial(self._gather, draw, part, torch.from_numpy(rows), torch.from_numpy(mask))
            for part, (rows, mask) in enumerate(batches)
        ]
        # A draw of one physical batch is gathered once, a larger one again for each query: it may not fit.
        drawn = _Drawn(draw, [cache(gather[0])] if len(gather) == 1 else gather)

        # Other processes wait for the first draw's look, so that all are refused or none.
        with self.processes.together() if draw == self._first else nullcontext(lambda: None) as settle:
            if batches and self._engine.is_to_be_examined(len(batches[0][1])):  # the first is the largest
                x, y, _ = drawn.inputs[0]()
                self._engine.examine(x, y)
            settle()
        if self._transcript is not None:
            self._transcript.append(drawn.released)
        return drawn

    def _gather(self, draw: int, part: int, rows: Tensor, mask: Tensor) -> _Inputs:
        rows = sampling.send(rows, self._x.device)
        taken = self._x.index_select(0, rows), self._y.index_select(0, rows), mask
        x, y, mask = (sampling.send(t, self._device) for t in taken)
        if self._transform is not None:
            with self._randomness("transform", draw, part):
                x = self._transform(x)
        return x, y, mask

    def answer(self, charged: Charged) -> Release:
        asked = charged.asked
        if charged.noise and not isinstance(asked.sensitivity, Tensor) and math.isinf(asked.sensitivity):
            raise ConfigError(f"{asked.kind}.sensitivity", "inf", "expected a finite bound where there is noise")
        release = super().answer(charged)
        charged.records.released.append(release)
        return release

    def _sum(self, asked: Asked, records: _Drawn) -> Tensor:
        if isinstance(asked.query, Gradient):
            return self._clipped(asked.query, asked.sensitivity, records)
        total = torch.zeros(asked.releases, dtype=torch.float64, device=self._device)
        for part, gather in enumerate(records.inputs):
            inputs = gather()
            losses = self._losses(records, part, inputs, asked.query.probed)
            mask = inputs[2]
            norms = records.norms[part] if records.norms else losses.new_full((len(mask),), torch.nan)
            total += sums(asked, losses, norms, mask)
        return total

    def _clipped(self, query: Gradient, sensitivity: Number, drawn: _Drawn) -> Vector:
        rule: Any = query.clip  # as `queries.read` leaves it, `Bounded`
        clip, asked = replace(rule, sensitivity=sensitivity), query.points
        places = [_place(theta) for _, theta in asked] if len(self.noise) > 1 else []
        # The engine copies the points of each call; all calls are to see the same ones.
        points = asked if len(drawn.inputs) == 1 else [(weight, theta.clone()) for weight, theta in asked]
        total, losses, drawn.norms = None, [], []
        for part, inputs in enumerate(drawn.inputs):
            x, y, mask = inputs()
            with self._randomness("dropout", drawn.number, part):
                clipped = self._engine.clipped(points, x, y, mask, clip, query.frame)
            losses.append(clipped.losses)
            drawn.norms.append(clipped.norms)
            if self._watch is not None:
                self._watch(Seen(drawn.number, points, x, y, mask, clipped.norms, query.frame))
            total = clipped.total if total is None else total.add_(clipped.total)
        for k, place in enumerate(places):
            drawn.evaluated[place] = asked[k][1], [values[k] for values in losses]
        return torch.zeros(self.dimension, dtype=self.space.dtype, device=self._device) if total is None else total

    def _losses(self, drawn: _Drawn, part: int, inputs: _Inputs, at: Sequence[Vector]) -> Tensor:
        # A gradient's pass has computed these losses already; a second one would cost as much again.
        evaluated = [drawn.evaluated.get(_place(theta)) for theta in at]
        losses = [each[1][part] if each else None for each in evaluated]
        missing = [theta for theta, values in zip(at, losses, strict=True) if values is None]
        if missing:
            with self._randomness("dropout", drawn.number, part):
                computed = iter(self._engine.losses(missing, *inputs))
            losses = [next(computed) if values is None else values for values in losses]
        if not losses:
            return torch.zeros(0, len(inputs[2]), dtype=torch.float64, device=self._device)
        return torch.stack(losses).double()

    def _add_noise(self, total: Tensor, std: Number, charged: Charged) -> None:
        # Noise from every process would add up, and cost accuracy for no privacy.
        if (isinstance(std, Tensor) or std) and self.processes.is_first:
            sampling.add_gaussian(total, std, self._noise_seed, charged.draw, charged.number)
        self.processes.add_up(total)

    @contextmanager
    def _randomness(self, purpose: str, draw: int, part: int) -> Iterator[None]:
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            generators.append(torch.cuda.default_generators[index])
        number = part * self.processes.size + self.processes.rank  # no two batches of a draw share their numbers
        seed = sampling.derive(self._draw_seed, purpose, draw, number) >> 65
        # torch's generators are the process's: another oracle in another thread waits.
        with _GENERATORS:
            before = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(seed)
                yield
            finally:
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
