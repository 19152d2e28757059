"""Per-example clipped gradient sums: the clip rules, and the engines that compute them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.flat import Clipped, ClippingEngine, Loss
from dpopt.clipping.layers import refuse_unsafe
from dpopt.clipping.recording import Unsupported
from dpopt.clipping.rules import RULES, Abadi, Automatic, Normalized, clip_rule, clip_spec
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError, unknown
from dpopt.privacy.protocol import ClipRule, Vector

__all__ = [
    "RULES",
    "Abadi",
    "Automatic",
    "Clipped",
    "ClippingEngine",
    "Loss",
    "Normalized",
    "clip_rule",
    "clip_spec",
    "engine",
]

_LOG = logging.getLogger(__name__)
ENGINES = ("auto", "bookkeeping", "vmap")
PRECISIONS = ("float32", "bfloat16")


def engine(
    model: nn.Module,
    loss: Loss,
    name: str = "auto",
    *,
    sample: tuple[Tensor, Tensor] | None = None,
    precision: str = "float32",
) -> ClippingEngine:
    """The clipping engine `name` for `loss(model(x), y)`.

    Args:
        model: its parameters with `requires_grad` are trained.
        loss: (outputs, targets) -> one loss per example.
        name: "bookkeeping" (fast), "vmap" (any model, slow), or "auto": bookkeeping where it can follow the model, else
            vmap; the log says why.
        sample: a few records (x, y), to find out now whether bookkeeping can follow the model; without them the first
            batch tells.
        precision: "float32" is the model's own type; "bfloat16" runs the model under autocast, while norms and sums are
            computed in float32 ("bookkeeping" only).

    Raises:
        ConfigError: unknown engine or precision, a layer that mixes examples, nothing to train, or "bookkeeping" for a
            model that it cannot follow.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    refuse_unsafe(model)
    if name == "vmap":
        if precision != "float32":
            raise ConfigError("precision", precision, "the engine 'vmap' knows only float32")
        return VmapEngine(model, loss)
    checked = _Checked(model, loss, precision, falls_back=name == "auto")
    made = checked.decided(*sample) if sample else checked
    return made if checked.is_decided else checked


class _Checked(ClippingEngine):
    """Book-keeping, verified on the first batch that it sees; vmap from then on if it cannot follow the model."""

    def __init__(self, model: nn.Module, loss: Loss, precision: str, falls_back: bool) -> None:
        self._fast = BookkeepingEngine(model, loss, precision)
        self._engine: ClippingEngine = self._fast
        self._slow = VmapEngine(model, loss) if falls_back else None
        self.is_decided = False
        self.dimension = self._engine.dimension

    def decided(self, x: Tensor, y: Tensor) -> ClippingEngine:
        """The engine to use for data such as the records x, y.

        Raises:
            ConfigError: book-keeping cannot follow the model, and nothing else was allowed.
        """
        if self.is_decided or not len(x):
            return self._engine
        try:
            self.is_decided = self._verify(x, y)
        except Unsupported as error:
            if self._slow is None:
                raise
            _LOG.warning("engine vmap, because bookkeeping cannot follow the model: %s", error.reason)
            self._engine, self.is_decided = self._slow, True
        else:
            if self.is_decided:
                _LOG.info("engine bookkeeping: agrees with autograd on one example at a time")
        return self._engine

    def _verify(self, x: Tensor, y: Tensor) -> bool:
        try:
            return self._fast.verify(x, y)
        except ConfigError:
            raise
        except Exception as error:  # a model can fail in any way
            raise Unsupported(f"{type(error).__name__}: {error}") from error

    @property
    def theta(self) -> Vector:
        return self._engine.theta

    def load(self, theta: Vector) -> None:
        self._engine.load(theta)

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        return self._engine.outputs(theta, x)

    def physical_batch(self, expected: float) -> int:
        return self._engine.physical_batch(expected)

    def clipped(
        self,
        points: Sequence[tuple[float, Vector]],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        clip: ClipRule,
        scale: Vector | None = None,
    ) -> Clipped:
        return self.decided(x, y).clipped(points, x, y, mask, clip, scale)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.decided(x, y).losses(points, x, y, mask)
