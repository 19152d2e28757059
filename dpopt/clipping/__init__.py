"""Per-example clipped gradient sums: the clip rules, and the engines that compute them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.flat import AsWritten, Clipped, ClippingEngine, Delegate, FlatModel, WeightedPoints
from dpopt.clipping.layers import refuse_unsafe, replacements
from dpopt.clipping.losses import Loss, by_record, check_loss
from dpopt.clipping.mixing import Unsupported
from dpopt.clipping.rules import RULES, Abadi, Automatic, ByGroup, Normalized, clip_rule, clip_spec
from dpopt.clipping.verification import verify
from dpopt.clipping.vmap import LoopEngine, VmapEngine
from dpopt.errors import ConfigError, unknown
from dpopt.types import ClipRule, Vector

__all__ = [
    "RULES",
    "Abadi",
    "Automatic",
    "ByGroup",
    "Clipped",
    "ClippingEngine",
    "Loss",
    "Normalized",
    "clip_rule",
    "clip_spec",
    "engine",
]

_LOG = logging.getLogger(__name__)
ENGINES = ("auto", "bookkeeping", "vmap", "loop")
_PRECISIONS = ("float32", "bfloat16")


def engine(
    model: nn.Module,
    loss: Loss,
    name: str = "auto",
    *,
    sample: tuple[Tensor, Tensor] | None = None,
    batch: float | None = None,
    precision: str = "float32",
) -> ClippingEngine:
    """The clipping engine `name` for `loss(model(x), y)`.

    Args:
        model: its parameters with `requires_grad` are trained. Batch and spectral normalisation have to be in
            evaluation mode when the engine is made, and stay so while the engine runs the model.
        loss: (outputs, targets) -> one loss per example.
        name: "bookkeeping" (fast), "vmap" (any model that `torch.func.vmap` can follow, slow), "loop" (plain autograd,
            one record after the other, slowest), or "auto": the first of them that can follow the model.
        sample: a few records (x, y), to find out now whether an engine can follow the model; else at the first batch.
        batch: expected batch size: examples that mix are then looked for among as many as the engine works on at once.
        precision: "float32" is the model's own type; "bfloat16" runs the model under autocast, while norms and sums are
            computed in float32 ("bookkeeping" only).

    Raises:
        ConfigError: unknown engine or precision, a layer that mixes examples, nothing to train, or a model that the
            engine cannot follow.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if precision not in _PRECISIONS:
        raise unknown("precision", precision, _PRECISIONS)
    if name in ("vmap", "loop") and precision != "float32":
        raise ConfigError("precision", precision, f"the engine {name!r} knows only float32")
    # Such layers break the bound whichever engine runs them, so no choice is made first.
    refuse_unsafe(model)
    loss = by_record(loss)  # one for all engines: what is learned of it counts for each
    engines: list[FlatModel] = [BookkeepingEngine(model, loss, precision)] if name in ("auto", "bookkeeping") else []
    engines += [kind(model, loss) for kind in (VmapEngine, LoopEngine) if name in ("auto", kind.name)]
    choice = _Choice(engines, batch)
    chosen = choice.decided(*sample) if sample else choice
    return chosen if choice.is_decided else choice  # until a batch shows gradients it is open


class _Choice(Delegate):
    """The first of some engines that can follow the model; the first batch that shows gradients decides which one."""

    def __init__(self, engines: Sequence[FlatModel], batch: float | None) -> None:
        super().__init__(engines[0])
        self._engines, self._batch = engines, batch
        self.is_decided = False

    def decided(self, x: Tensor, y: Tensor) -> ClippingEngine:
        """The engine for data such as the records x, y; ConfigError if none can follow the model."""
        # An empty draw shows nothing, so the choice waits for a batch that does.
        if not self.is_decided and len(x):
            self._engine, self.is_decided = self._choose(x, y)
        return self._engine

    def _choose(self, x: Tensor, y: Tensor) -> tuple[FlatModel, bool]:
        refusals: dict[str, Unsupported] = {}
        with AsWritten():
            check_loss(self._engines[0].model, self._engines[0].loss, x, y, self._batch)
        replacement = replacements(self._engines[0].model)
        for engine in self._engines:
            if engine.name == "loop" and refusals and replacement:
                break  # a pass for each record is slower than the layer that takes the place
            try:
                with engine.loss.fixed_numbers():
                    is_decided = verify(engine, x, y, self._batch)
            except Unsupported as error:
                refusals[engine.name] = error
                continue
            if is_decided and refusals:
                reasons = [f"{name} cannot follow the model: {error.reason}" for name, error in refusals.items()]
                cost = ", which runs the model once for each record" if engine.name == "loop" else ""
                _LOG.warning("engine %s%s, because %s", engine.name, cost, "; ".join(reasons))
            elif is_decided:
                _LOG.info("engine %s: agrees with autograd on one example at a time", engine.name)
            return engine, is_decided
        name, *others = refusals
        reasons = [f"{error.reason} ({engine})" if others else error.reason for engine, error in refusals.items()]
        raise Unsupported("; ".join(reasons), "auto" if others else name, replacement)

    def examine(self, x: Tensor, y: Tensor) -> None:
        self.decided(x, y).examine(x, y)

    def is_to_be_examined(self, examples: int) -> bool:
        return not self.is_decided or self._engine.is_to_be_examined(examples)

    def clipped(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Clipped:
        return self.decided(x, y).clipped(points, x, y, mask, clip, scale)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.decided(x, y).losses(points, x, y, mask)
