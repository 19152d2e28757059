"""Per-example gradients by plain autograd, one record after the other: right for whatever autograd can do, and slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpopt.clipping.flat import gradient
from dpopt.clipping.vmap import VmapEngine
from dpopt.types import Vector


class LoopEngine(VmapEngine):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; a step of n records costs n passes.

    For operations without a batching rule, an `if` on a value, a layer that is called on what is no batch.
    """

    name = "loop"

    def _outputs(self, theta: Vector, x: Tensor) -> Tensor:
        with self.at(theta):
            return torch.cat([self.model(each) for each in x.split(1)])

    def _losses(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self._outputs(theta, x), y)

    def _gradients(self, theta: Vector, x: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        rows, losses = [], []
        with self.at(theta), torch.enable_grad():
            for each, target in zip(x.split(1), y.split(1), strict=True):
                loss = self.loss(self.model(each), target)
                rows.append(gradient(loss.sum(), list(self.trained.values())))
                losses.append(loss.detach())
        return torch.stack(rows).split(self._sizes, dim=1), torch.cat(losses)
