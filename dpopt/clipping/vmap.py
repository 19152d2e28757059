"""Per-example gradients by `torch.func.vmap`: works for any model without cross-example operations, and materialises
[batch, d] values. The reference that faster engines are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from dpopt.clipping.evaluation import of_one
from dpopt.clipping.flat import (
    FlatModel,
    FullPrecision,
    PerExample,
    WeightedPoints,
    free_memory,
    gradient,
    must_be_sanitized,
)
from dpopt.clipping.mixing import forked, in_turn, same_randomness
from dpopt.types import Vector

_CHUNK_BYTES = 64 * 2**20
"""Per-example gradients held at once on a CPU; beyond its caches, larger chunks are slower."""
_COPIES = 4
"""Times the per-example gradients a chunk takes on a GPU: they, their multiples, and what the passes keep."""


class VmapEngine(FlatModel):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; methods are documented by `ClippingEngine`.

    The model sees one example at a time, for its outputs too.
    """

    name = "vmap"
    way = "vmap"
    must_show_gradients = False

    def _most_examples(self) -> int:
        device = next(iter(self.trained.values())).device
        # Every example's whole gradient is held, so memory decides how many fit.
        held = _CHUNK_BYTES if device.type == "cpu" else free_memory(device) // _COPIES
        return held // (4 * self.dimension)

    def _losses(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        if self._loss_needs_loop(theta, x, y):
            return super()._losses(theta, x, y)
        return _each(self._example_loss, self.split(theta.clone()), x, y)

    def _loss_needs_loop(self, theta: Vector, x: Tensor, y: Tensor) -> bool:
        # Tried on one record with the generators forked, so that the pass itself draws the same numbers.
        if self.loss.needs_loop is None:  # its first call tells
            with forked(x.device), self.at(theta):
                self.loss(self.run(x[:1]), y[:1])
        return bool(self.loss.needs_loop)

    def _gradients(self, theta: Vector, x: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        parts = self.split(theta.clone())
        if not self._loss_needs_loop(theta, x, y):
            return _each(grad_and_value(self._example_loss), parts, x, y)
        # `vmap` cannot follow the loss: its own gradients come from autograd, and go back through the model.
        again = same_randomness(x.device)
        next(again)
        outputs = self._outputs(theta, x).detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(outputs, y)
            (back,) = torch.autograd.grad(losses.sum(), outputs)
        next(again)
        return _each(self._example_pull, parts, x, back), losses.detach()

    def _per_example(
        self, points: WeightedPoints, x: Tensor, y: Tensor, scale: Vector | None, shift: Vector | None
    ) -> PerExample:
        losses: list[Tensor] = []
        combined: list[Tensor] = []
        for weight, theta in in_turn(points, x.device):
            with self.state:  # within `vmap`, nothing can be put back
                graded, values = self._gradients(theta, x, y)
            losses.append(values)
            gradients = [weight * g.reshape(len(x), -1) for g in graded]
            combined = [c + g for c, g in zip(combined, gradients, strict=True)] if combined else gradients
        if shift is not None:
            combined = [c - a for c, a in zip(combined, shift.split(self._sizes), strict=True)]
        if scale is not None:
            combined = [c * s for c, s in zip(combined, scale.split(self._sizes), strict=True)]
        each = torch.stack([torch.linalg.vector_norm(c, dim=1) for c in combined])
        norms = each.norm(dim=0)
        return PerExample(torch.stack(losses), norms, list(each.square()), partial(_weighted_sum, combined, norms))

    @torch.no_grad()
    def gradients(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        """Every example's gradient at `theta`, shape [n, d]."""
        with self.running(), self.state:
            graded, _ = self._gradients(theta.detach(), x, y)
        return torch.cat([g.reshape(len(x), -1) for g in graded], dim=1)

    def _example_loss(self, parts: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.loss.alone(self.call(parts, x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)

    def _example_pull(self, parts: list[Tensor], x: Tensor, back: Tensor) -> list[Tensor]:
        return vjp(lambda parts: of_one(partial(self.call, parts), x), parts)[1](back)[0]


def _each(function: Callable[..., Any], parts: list[Tensor], *rows: Any) -> Any:
    """`function(parts, *row)` for each row, with random numbers of its own."""
    return vmap(function, in_dims=(None, *[0] * len(rows)), randomness="different")(parts, *rows)


def _weighted_sum(gradients: list[Tensor], norms: Tensor, each: Sequence[Tensor]) -> Vector:
    if must_be_sanitized(norms):
        gradients[:] = [torch.where(norms.isfinite()[:, None], g, 0.0) for g in gradients]
    with FullPrecision(norms.device):
        return torch.cat([weights @ g for weights, g in zip(each, gradients, strict=True)])


class LoopEngine(VmapEngine):
    """Plain autograd, one record after the other; a step of n records costs n passes.

    For operations without a batching rule, an `if` on a value, a layer that is called on what is no batch.
    """

    name = "loop"
    way = "loop"

    _losses = FlatModel._losses

    def _gradients(self, theta: Vector, x: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        rows, losses = [], []
        for each, target in zip(x.split(1), y.split(1), strict=True):
            with self.at(theta), torch.enable_grad():
                loss = self.loss(self.model(each), target)
                rows.append(gradient(loss.sum(), list(self.trained.values())))
                losses.append(loss.detach())
        return torch.stack(rows).split(self._sizes, dim=1), torch.cat(losses)
