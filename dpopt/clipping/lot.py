"""R runs of one model at once: each with parameters and records of its own, all in one pass through the model.

The model goes through `torch.func.vmap` over the runs. What its layers leave of R runs with n examples each is what
they would leave of R n examples, so norms come from `factors` with all of the care that is taken there; sums alone are
taken run by run. For models whose passes are so small that calling torch takes longer than computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpopt.clipping import layers, mixing
from dpopt.clipping.bookkeeping import BookkeepingEngine, _norm
from dpopt.clipping.factors import Dense, Factor, Outer, merged
from dpopt.clipping.flat import Loss, must_be_sanitized
from dpopt.clipping.precision import full_precision
from dpopt.clipping.recording import Recorder, Unsupported
from dpopt.clipping.rules import Abadi
from dpopt.clipping.verification import beside, cast, compare, cycled, most_exactly, tolerated
from dpopt.privacy.protocol import Number, Vector

Matrix = Tensor
"""The parameters of all runs, or something of their shape: [R, d]."""


class _Together(torch.autograd.Function):
    """See `together`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Tensor) -> Any:
        raise RuntimeError("outside of `torch.func.vmap` there is one run, and nothing to be done together")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        function, *tensors = inputs
        pairs = zip(tensors, in_dims[1:], strict=True)
        result = function(*(_first(tensor, dim, info.batch_size) for tensor, dim in pairs))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)


def _first(tensor: Tensor, dim: int | None, runs: int) -> Tensor:
    return tensor.expand(runs, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def together(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Under `torch.func.vmap` over runs: what a run has of `function`, which is called once for all of them.

    Args:
        function: tensors [R, ...] -> a tensor [R, ...] or several; not differentiable by `torch.func`, but recorded by
            ordinary autograd.
        tensors: what one run has of its arguments, [...]; at least one of them differs between runs.
    """
    return _Together.apply(function, *tensors)


class _LotRecorder(Recorder):
    """Notes the layers of a model under `vmap` over runs; the examples of all runs are those of one batch."""

    def _note(
        self, names: list[str], module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        if not all(isinstance(each, Tensor) for each in (output, *inputs)):
            raise Unsupported(f"{type(module).__name__} does not map positional tensors to one tensor")
        note = super()._note

        def noted(output: Tensor, *inputs: Tensor) -> Tensor:
            # What is changed in place from here on is the copy, and the gradient of the copy is the output's.
            rows = output.flatten(0, 1).clone()
            note(names, module, tuple(x.flatten(0, 1) for x in inputs), keywords, rows)
            return rows.unflatten(0, output.shape[:2])

        return together(noted, output, *inputs)


@dataclass(frozen=True)
class Examined:
    """What R runs found out of n examples each.

    Attributes:
        losses: at each of the k points, shape [k, R, n].
        norms: L2 norms of the combined and scaled gradients, before clipping, shape [R, n].
        factors, shapes: for each trained parameter, of the gradients of R n examples, and its shape.
        scale: of each coordinate, shape [R, d], or None.
    """

    losses: Tensor
    norms: Tensor
    factors: list[list[Factor]]
    shapes: list[torch.Size]
    scale: Matrix | None

    def sums(self, weights: Tensor) -> Matrix:
        """sum_i weights_i gradient_i of each run, shape [R, d], for weights [R, n]; a new tensor."""
        pairs = zip(self.factors, self.shapes, strict=True)
        with full_precision(weights.device):
            total = torch.cat([_weighted_sums(group, weights, shape) for group, shape in pairs], 1)
        return total if self.scale is None else total.mul_(self.scale)


class LotEngine(BookkeepingEngine):
    """Per-example gradients for R runs at once; for one run, all that `BookkeepingEngine` does.

    Args:
        model: any module whose trained layers are all of a known kind, that draws no random numbers, and that
            `BookkeepingEngine` can follow; its own values are replaced by the runs', but for frozen parameters.
        loss: see `Loss`.

    Raises:
        Unsupported: a trained layer is of another kind.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        for layer in self._layers:
            if layers.handler(layer.module) is None or layers.reads_parameters(layer.module):
                raise Unsupported(f"{type(layer.module).__name__} cannot have the parameters of several runs")
        self._forward = vmap(self._losses_of_run, randomness="error")

    @torch.no_grad()
    def examined(
        self, points: Sequence[tuple[Number, Matrix]], x: Tensor, y: Tensor, scale: Matrix | None = None
    ) -> Examined:
        """Losses and norms of every example, and what clipped sums are made of.

        Args:
            points: pairs (w_k, thetas_k), thetas_k of shape [R, d].
            x, y: n records of each run, shapes [R, n, ...], n at least 1.
            scale: the factor s >= 0 of each coordinate, shape [R, d]; by default 1.
        """
        if self.is_to_be_watched(x[0]):
            first = None if scale is None else scale[0]
            everyone = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
            self.clipped([(w, thetas[0]) for w, thetas in points], x[0], y[0], everyone, Abadi(math.inf), first)
        return self._examined(points, x, y, scale)

    def _examined(
        self, points: Sequence[tuple[Number, Matrix]], x: Tensor, y: Tensor, scale: Matrix | None = None
    ) -> Examined:
        runs, examples = x.shape[:2]
        losses, factors = [], [[] for _ in self._parameters]
        self.freeze()
        for weight, thetas in points:
            forward = partial(self._forward, self._views(thetas.detach().requires_grad_()), x, y)
            losses.append(self._backward_of(forward, _LotRecorder, runs * examples, float(weight), factors))
        factors = [merged(group) for group in factors]
        norms = self._norms(factors, losses[0], scale)
        if must_be_sanitized(norms):
            factors = [[factor.sanitized(norms.isfinite().flatten()) for factor in group] for group in factors]
        return Examined(torch.stack(losses), norms, factors, [p.shape for p in self._parameters], scale)

    def lot_losses(self, points: Sequence[Matrix], x: Tensor, y: Tensor) -> Tensor:
        """The loss of every example of every run at every point, shape [k, R, n]; arguments as for `examined`."""
        with torch.no_grad():
            return torch.stack([self._forward(self._views(thetas), x, y) for thetas in points])

    def verify_lot(self, x: Tensor, y: Tensor) -> None:
        """Compare norms, sums and losses of three runs with those of one run at a time, as `verify` does.

        Args:
            x, y: some records, at least one.

        Raises:
            Unsupported: they differ, or the model cannot be run so.
        """
        most_exactly(partial(self._verify_lot, x, y))

    def _verify_lot(self, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> None:
        runs, examples = 3, 4
        x, y = cast(x, dtype), cast(y, dtype)
        inputs = mixing.anything_like(x, runs * examples).unflatten(0, (runs, examples))
        targets = cycled(y, runs * examples).unflatten(0, (runs, examples))
        tolerance = tolerated({dtype})
        with mixing.trial(self.model, dtype), torch.no_grad():
            own, near = self.theta, beside(self.split(self.theta))
            thetas = torch.stack([torch.lerp(own, near, 1.0 + run) for run in range(runs)])
            seen, losses = self._examined([(1.0, thetas)], inputs, targets), self.lot_losses([thetas], inputs, targets)
            totals = seen.sums(torch.ones_like(seen.norms))
            for run, (theta, total) in enumerate(zip(thetas, totals, strict=True)):
                alone = self.per_example([(1.0, theta)], inputs[run], targets[run])
                compare("gradient norms", seen.norms[run], alone.norms, tolerance)
                compare("gradients", total, alone.weighted_sum(torch.ones_like(alone.norms)), tolerance)
                compare("losses", seen.losses[0, run], alone.losses[0], tolerance)
                compare("losses", losses[0, run], alone.losses[0], tolerance)

    def _losses_of_run(self, parts: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.call(parts, x), y)

    def _views(self, thetas: Matrix) -> list[Tensor]:
        parts = zip(self.trained.values(), thetas.split(self._sizes, dim=1), strict=True)
        return [part.unflatten(1, p.shape) if p.dim() else part.squeeze(1) for p, part in parts]

    def _norms(self, factors: list[list[Factor]], like: Tensor, scale: Matrix | None) -> Tensor:
        """Norm of each example's gradient, shape [R, n]."""
        if scale is None:
            return _norm(factors, like.flatten()).view_as(like)
        return torch.stack([self._scaled_norm(factors, run, like[run], row) for run, row in enumerate(scale)])

    def _scaled_norm(self, factors: list[list[Factor]], run: int, like: Tensor, scale: Vector) -> Tensor:
        rows = slice(run * len(like), (run + 1) * len(like))
        return _norm([[factor.part(rows) for factor in group] for group in factors], like, self.split(scale))


def _weighted_sums(group: list[Factor], weights: Tensor, shape: torch.Size) -> Tensor:
    """sum_i weights_i gradient_i of one parameter for each run, [R, numel], for weights [R, n]."""
    total = weights.new_zeros(len(weights), shape.numel())
    for factor in group:
        total += _weighted_sum(factor, weights, shape)
    return total


def _weighted_sum(factor: Factor, weights: Tensor, shape: torch.Size) -> Tensor:
    runs, examples = weights.shape
    if isinstance(factor, Dense):
        return torch.bmm(weights.unsqueeze(1), factor.dense().unflatten(0, (runs, examples))).squeeze(1)
    if isinstance(factor, Outer):
        scale = weights[:, :, None, None, None]
        left, right = (side.unflatten(0, (runs, examples)) for side in (factor.left, factor.right))
        left, right = (left * scale, right) if left.shape[4] <= right.shape[4] else (left, right * scale)
        left, right = left.flatten(1, 3), right.flatten(1, 3)
        return torch.bmm(*((right.mT, left) if factor.is_transposed else (left.mT, right))).flatten(1)
    total = weights.new_empty(runs, *shape)
    for run, out in enumerate(total):
        factor.part(slice(run * examples, (run + 1) * examples)).weighted_sum(weights[run], out, is_first=True)
    return total.flatten(1)
