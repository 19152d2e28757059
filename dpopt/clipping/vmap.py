"""Per-example gradients by `torch.func.vmap`: works for any model without cross-example operations, and materialises
[batch, d] values. The reference that faster engines are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpopt.errors import ConfigError
from dpopt.privacy.protocol import ClipRule, Vector

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per example [n]"""

CHUNK_BYTES = 64 * 2**20
"""Per-example gradients held at once; beyond the caches of a CPU, larger chunks are slower."""


class VmapEngine:
    """Clipped sums of per-example gradients of `loss(model(x), y)`.

    The trained parameters (those with `requires_grad`) are one flat vector in the order of `named_parameters`.

    Args:
        model: any module whose outputs for one example do not depend on the others.
        loss: see `Loss`.

    Attributes:
        dimension: number d of trained parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self._frozen = frozen | dict(model.named_buffers())
        self._sizes = [p.numel() for p in self._trained.values()]
        self.dimension = sum(self._sizes)
        self._losses = vmap(self._example_loss, in_dims=(None, 0, 0), randomness="different")
        self._gradients = vmap(grad(self._example_loss), in_dims=(None, 0, 0), randomness="different")

    @property
    def theta(self) -> Vector:
        """A copy of the model's trained parameters, shape [d]."""
        return torch.cat([p.detach().flatten() for p in self._trained.values()])

    def load(self, theta: Vector) -> None:
        """Write `theta`, shape [d], into the model."""
        with torch.no_grad():
            for parameter, value in zip(self._trained.values(), self._split(theta), strict=True):
                parameter.copy_(value)

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        """The model's outputs for `x` at `theta`, in the model's present mode (train or eval), without gradients."""
        with torch.no_grad():
            return self._call(self._parameters(theta), x)

    def physical_batch(self, expected: float) -> int:
        """Examples per call: enough for almost every draw of `expected` examples, as far as memory allows."""
        return max(1, min(math.ceil(expected + 3 * math.sqrt(expected)), CHUNK_BYTES // (4 * self.dimension)))

    def clipped_sum(
        self, points: Sequence[tuple[float, Vector]], x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule
    ) -> Tensor:
        """sum_i mask_i clip(sum_k w_k grad f_i(theta_k)), shape [d].

        The points are combined per example before clipping, so the sensitivity is `clip`'s whatever the weights. An
        example whose combined gradient is not finite contributes zero. All points see the same dropout.

        Args:
            points: pairs (w_k, theta_k), theta_k of shape [d].
            x, y: one physical batch, shapes [n, ...].
            mask: which rows count, bool [n].
            clip: the clip rule.
        """
        combined: list[Tensor] = []
        for (weight, theta), _ in zip(points, _same_randomness(x.device), strict=False):
            gradients = [g.flatten(1) for g in self._gradients(self._parameters(theta), x, y).values()]
            if combined:
                combined = [c.add_(g, alpha=weight) for c, g in zip(combined, gradients, strict=True)]
            else:
                combined = gradients if weight == 1 else [g.mul_(weight) for g in gradients]
        norm = torch.stack([torch.linalg.vector_norm(c, dim=1) for c in combined]).norm(dim=0)
        finite = norm.isfinite()
        # Whatever the rule says, no example contributes more than the sensitivity that the noise is scaled to.
        factor = torch.minimum(clip.factor(norm), clip.sensitivity / norm)
        factor = torch.where(mask & finite, factor, 0.0)
        if not finite.all():
            # 0 * nan is nan: such rows must hold zeros.
            combined = [torch.where(finite[:, None], c, 0.0) for c in combined]
        return torch.cat([factor @ c for c in combined])

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The loss of every example at every point, shape [k, n]; all points see the same dropout.

        Rows that `mask` leaves out hold a value without meaning.
        """
        # One example at a time, as for gradients: a model that mixes examples cannot carry one record into all losses.
        with torch.no_grad():
            pairs = zip(points, _same_randomness(x.device), strict=False)
            return torch.stack([self._losses(self._parameters(theta), x, y) for theta, _ in pairs])

    def _split(self, theta: Vector) -> list[Tensor]:
        parts = theta.split(self._sizes)
        return [part.view_as(p) for part, p in zip(parts, self._trained.values(), strict=True)]

    def _parameters(self, theta: Vector) -> dict[str, Tensor]:
        return dict(zip(self._trained, self._split(theta), strict=True))

    def _call(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self._model, parameters | self._frozen, (x,))

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self._call(parameters, x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)


def _same_randomness(device: torch.device) -> Iterator[None]:
    """Yield for ever, each time with the random generators as they were at the start."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    while True:
        yield
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def refuse_unsafe(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that no engine can train privately.

    Raises:
        ConfigError: a layer mixes the examples of a batch, or nothing is trainable.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hint = "it mixes the examples of a batch, so no example's gradient is bounded; use GroupNorm or LayerNorm"
            raise ConfigError(f"model.{name}", type(module).__name__, hint)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter with requires_grad")
