"""What the engines share: the trained parameters as one flat vector, and clipping by norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dpopt.privacy.protocol import ClipRule, Vector

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per example [n]"""


class FlatModel:
    """A model whose trained parameters (those with `requires_grad`) are read and written as one vector.

    Attributes:
        dimension: number d of trained parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sizes = [p.numel() for p in self._trained.values()]
        self.dimension = sum(self._sizes)

    @property
    def theta(self) -> Vector:
        """A copy of the model's trained parameters, shape [d], in the order of `named_parameters`."""
        return torch.cat([p.detach().flatten() for p in self._trained.values()])

    def load(self, theta: Vector) -> None:
        """Write `theta`, shape [d], into the model."""
        with torch.no_grad():
            for parameter, value in zip(self._trained.values(), self._split(theta), strict=True):
                parameter.copy_(value)

    def _split(self, theta: Vector) -> list[Tensor]:
        """Views into `theta` with the parameters' shapes."""
        parts = theta.split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._trained.values(), strict=True)]


def clip_factors(clip: ClipRule, norm: Tensor, mask: Tensor) -> Tensor:
    """What each example's gradient is multiplied by, shape [n]; zero where it is masked out or not finite."""
    # Whatever the rule says, no example contributes more than the sensitivity that the noise is scaled to; an infinite
    # norm makes that 0, one that is not a number makes it none.
    factor = torch.minimum(clip.factor(norm), clip.sensitivity / norm)
    return factor.nan_to_num_(nan=0.0).mul_(mask)


def must_be_sanitized(norm: Tensor) -> bool:
    """Whether rows that are not finite may have to hold zeros before they are summed, as 0 * nan is nan."""
    return norm.is_cuda or not math.isfinite(norm.sum())  # a GPU is not waited for


def same_randomness(device: torch.device) -> Iterator[None]:
    """Yield for ever, each time with the random generators as they were at the start."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    while True:
        yield
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
