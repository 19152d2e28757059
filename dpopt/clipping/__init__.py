"""Per-example clipped gradient sums: the clip rules, and the engines that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from dpopt.clipping.rules import RULES, Abadi, Automatic, Normalized, clip_rule, clip_spec
from dpopt.clipping.vmap import Loss, VmapEngine, refuse_unsafe
from dpopt.errors import unknown
from dpopt.privacy.protocol import ClipRule, Vector

__all__ = [
    "RULES",
    "Abadi",
    "Automatic",
    "ClippingEngine",
    "Loss",
    "Normalized",
    "clip_rule",
    "clip_spec",
    "engine",
]


class ClippingEngine(Protocol):
    """What the data oracle and the harness need of an engine; `VmapEngine` documents every method."""

    dimension: int

    @property
    def theta(self) -> Vector: ...
    def load(self, theta: Vector) -> None: ...
    def outputs(self, theta: Vector, x: Tensor) -> Tensor: ...
    def physical_batch(self, expected: float) -> int: ...
    def clipped_sum(
        self, points: Sequence[tuple[float, Vector]], x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule
    ) -> Tensor: ...
    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor: ...


ENGINES = {"vmap": VmapEngine}


def engine(model: nn.Module, loss: Loss, name: str = "auto") -> ClippingEngine:
    """The clipping engine `name` for `loss(model(x), y)`.

    Args:
        model: its parameters with `requires_grad` are trained.
        loss: (outputs, targets) -> one loss per example.
        name: "vmap" or "auto" (the fastest that can do it).

    Raises:
        ConfigError: unknown engine, a layer that mixes examples, or nothing to train.
    """
    if name != "auto" and name not in ENGINES:
        raise unknown("engine", name, ["auto", *ENGINES])
    refuse_unsafe(model)
    return ENGINES["vmap" if name == "auto" else name](model, loss)
