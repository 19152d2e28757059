"""Per-example gradients by `torch.func.vmap`: works for any model without cross-example operations, and materialises
[batch, d] values. The reference that faster engines are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dpopt.clipping.flat import Clipped, FlatModel, Loss, clip_factors, free_memory, must_be_sanitized, same_randomness
from dpopt.clipping.precision import full_precision
from dpopt.privacy.protocol import ClipRule, Vector

CHUNK_BYTES = 64 * 2**20
"""Per-example gradients held at once on a CPU; beyond its caches, larger chunks are slower."""
COPIES = 4
"""How many times the per-example gradients a chunk takes on a GPU: they, their multiples, and what the passes keep."""


class VmapEngine(FlatModel):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; methods are documented by `ClippingEngine`.

    Args:
        model: any module; it sees one example at a time.
        loss: see `Loss`.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self._frozen = frozen | dict(model.named_buffers())
        self._losses = vmap(self._example_loss, in_dims=(None, 0, 0), randomness="different")
        self._graded = vmap(grad_and_value(self._example_loss), in_dims=(None, 0, 0), randomness="different")

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self._call(self._parameters(theta), x)

    def _most_examples(self) -> int:
        device = next(iter(self._trained.values())).device
        held = CHUNK_BYTES if device.type == "cpu" else free_memory(device) // COPIES
        return held // (4 * self.dimension)

    def clipped(
        self,
        points: Sequence[tuple[float, Vector]],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        clip: ClipRule,
        scale: Vector | None = None,
    ) -> Clipped:
        if not len(x):
            theta = points[0][1]
            return Clipped(torch.zeros_like(theta), theta.new_zeros(len(points), 0), theta.new_zeros(0))
        losses: list[Tensor] = []
        combined: list[Tensor] = []
        for (weight, theta), _ in zip(points, same_randomness(x.device), strict=False):
            graded, values = self._graded(self._parameters(theta), x, y)
            losses.append(values)
            gradients = [weight * g.reshape(len(x), -1) for g in graded.values()]
            combined = [c + g for c, g in zip(combined, gradients, strict=True)] if combined else gradients
        if scale is not None:
            combined = [c * s for c, s in zip(combined, scale.split(self._sizes), strict=True)]
        norm = torch.stack([torch.linalg.vector_norm(c, dim=1) for c in combined]).norm(dim=0)
        if must_be_sanitized(norm):
            combined = [torch.where(norm.isfinite()[:, None], c, 0.0) for c in combined]
        factor = clip_factors(clip, norm, mask)
        with full_precision(norm.device):
            total = torch.cat([factor @ c for c in combined])
        return Clipped(total, torch.stack(losses), norm)

    def gradients(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        """Every example's gradient at `theta`, shape [n, d]."""
        graded, _ = self._graded(self._parameters(theta), x, y)
        return torch.cat([g.reshape(len(x), -1) for g in graded.values()], dim=1)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        # One example at a time, as for gradients: a model that mixes examples cannot carry one record into all losses.
        with torch.no_grad():
            pairs = zip(points, same_randomness(x.device), strict=False)
            return torch.stack([self._losses(self._parameters(theta), x, y) for theta, _ in pairs])

    def _parameters(self, theta: Vector) -> dict[str, Tensor]:
        return dict(zip(self._trained, self._split(theta), strict=True))

    def _call(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self._model, parameters | self._frozen, (x,))

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self._call(parameters, x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)
