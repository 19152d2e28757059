"""What the engines share: their interface, the trained parameters as one flat vector, and clipping by norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.clipping.rules import factors
from dpopt.privacy.protocol import ClipRule, Number, Vector

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per example [n]"""


class Clipped(NamedTuple):
    """What an engine finds out of one physical batch of n examples.

    Attributes:
        total: the clipped sum, shape [d]; a new tensor, the caller's to change.
        losses: at each of the k points, shape [k, n].
        norms: L2 norms of the combined and scaled gradients, before clipping, shape [n].
    """

    total: Tensor
    losses: Tensor
    norms: Tensor


class ClippingEngine(Protocol):
    """What the data oracle and the harness need of an engine.

    Attributes:
        dimension: number d of trained parameters, which are one flat vector in the order of `named_parameters`.
    """

    dimension: int

    @property
    def theta(self) -> Vector:
        """A copy of the model's trained parameters, shape [d]."""
        ...

    def load(self, theta: Vector) -> None:
        """Write `theta`, shape [d], into the model."""
        ...

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        """The model's outputs for `x` at `theta`, in the model's present mode (train or eval), without gradients."""
        ...

    def physical_batch(self, expected: float) -> int:
        """Examples per call: enough for almost every draw of `expected` examples, as far as memory allows."""
        ...

    def clipped_sum(
        self,
        points: Sequence[tuple[Number, Vector]],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        clip: ClipRule,
        scale: Vector | None = None,
    ) -> Tensor:
        """The clipped sum alone, shape [d]; see `clipped`."""
        return self.clipped(points, x, y, mask, clip, scale).total

    def clipped(
        self,
        points: Sequence[tuple[Number, Vector]],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        clip: ClipRule,
        scale: Vector | None = None,
    ) -> Clipped:
        """sum_i mask_i clip(s * sum_k w_k grad f_i(theta_k)), with the losses and norms of the same passes.

        The points are combined and scaled per example before clipping, so the sensitivity is `clip`'s whatever the
        weights. An example whose combined gradient is not finite contributes zero. All points see the same dropout.

        Args:
            points: pairs (w_k, theta_k), theta_k of shape [d].
            x, y: one physical batch, shapes [n, ...].
            mask: which rows count, bool [n].
            clip: the clip rule.
            scale: the factor s >= 0 of each coordinate, shape [d]; by default 1.
        """
        ...

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The loss of every example at every point, shape [k, n]; all points see the same dropout.

        Rows that `mask` leaves out hold a value without meaning.
        """
        ...


class FlatModel(ClippingEngine):
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

    def physical_batch(self, expected: float) -> int:
        needed = math.ceil(expected + 3 * math.sqrt(expected))
        return max(1, min(needed, self._most_examples()))

    def _most_examples(self) -> int:
        """How many examples a call has memory for."""
        raise NotImplementedError

    def _split(self, theta: Vector) -> list[Tensor]:
        """Views into `theta` with the parameters' shapes."""
        parts = theta.split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._trained.values(), strict=True)]


def clip_factors(clip: ClipRule, norm: Tensor, mask: Tensor) -> Tensor:
    """What each example's gradient is multiplied by, shape [n]; zero where it is masked out or not finite."""
    # Whatever the rule says, no example contributes more than the sensitivity that the noise is scaled to; an infinite
    # norm makes that 0, one that is not a number makes it none. Squares of a norm below `least` may have been too small
    # for the type, so it may be longer than it seems; a factor below `tiny` has few digits, and may be too large.
    number = torch.finfo(norm.dtype)
    least = number.tiny**0.5 / number.eps
    factor = torch.minimum(factors(clip, norm), clip.sensitivity / norm.clamp(min=least))
    return F.threshold(factor.nan_to_num_(nan=0.0), number.tiny, 0.0).mul_(mask)


def must_be_sanitized(norm: Tensor) -> bool:
    """Whether rows that are not finite may have to hold zeros before they are summed, as 0 * nan is nan."""
    return norm.is_cuda or not math.isfinite(norm.sum())  # a GPU is not waited for


def free_memory(device: torch.device) -> int:
    """Bytes that one physical batch may take. On the CPU a constant, so that results do not depend on the machine."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**30


def same_randomness(device: torch.device) -> Iterator[None]:
    """Yield for ever, each time with the random generators as they were at the start."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    while True:
        yield
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
