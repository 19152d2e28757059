"""Per-example clipped gradient sums: the clip rules, and the engines that compute them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpopt.clipping import evaluation, mixing
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.evaluation import Way
from dpopt.clipping.flat import AsWritten, Clipped, ClippingEngine, Delegate, FlatModel, WeightedPoints
from dpopt.clipping.layers import refuse_unsafe, replacements
from dpopt.clipping.losses import Loss, by_record, check_loss
from dpopt.clipping.mixing import Unsupported
from dpopt.clipping.rules import RULES, Abadi, Automatic, ByGroup, Normalized, clip_rule, clip_spec
from dpopt.clipping.state import State
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
_TIMED = 64
"""Records by which it is measured what outputs one at a time cost."""
_ALONE = 16
"""Those of them that are compared with themselves alone."""
_MOST_TIMES = 10
"""The most that outputs one at a time may cost, where `auto` chooses: as a multiple of those of a batch."""


def engine(
    model: nn.Module,
    loss: Loss,
    name: str = "auto",
    *,
    sample: tuple[Tensor, Tensor] | None = None,
    batch: float | None = None,
    precision: str = "float32",
    state: State | None = None,
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
        state: of the model and all that sees records with it, where it was noted before; by default it is noted now.

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
    # One for all engines: what is learned of it counts for each.
    loss = by_record(loss)
    state = state or State(model, loss=None if loss.is_trusted else loss.function)
    engines: list[FlatModel] = []
    if name in ("auto", "bookkeeping"):
        engines.append(BookkeepingEngine(model, loss, precision, state))
    engines += [kind(model, loss, state) for kind in (VmapEngine, LoopEngine) if name in ("auto", kind.name)]
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
            self.way = self._engine.way
        return self._engine

    def _choose(self, x: Tensor, y: Tensor) -> tuple[FlatModel, bool]:
        refusals: dict[str, Unsupported] = {}
        with AsWritten():
            first = self._engines[0]
            check_loss(first.state, first.model, first.loss, x, y, self._batch)
        replacement = replacements(self._engines[0].model)
        for engine in self._engines:
            if engine.name == "loop" and refusals and replacement:
                break  # a pass for each record is slower than the layer that takes the place
            try:
                with engine.loss.fixed_numbers():
                    is_decided = verify(engine, x, y, self._batch)
                if engine.name == "loop" and refusals:
                    _must_be_cheap(engine, x, y)
            except Unsupported as error:
                refusals[engine.name] = error
                continue
            if is_decided and refusals:
                reasons = [f"{name} cannot follow the model: {error.reason}" for name, error in refusals.items()]
                how = "runs the model once for each record" if engine.name == "loop" else "maps it over the records"
                text = "engine %s, which %s in training, evaluation and predict, because %s"
                _LOG.warning(text, engine.name, how, "; ".join(reasons))
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


@torch.no_grad()
def _must_be_cheap(engine: FlatModel, x: Tensor, y: Tensor) -> None:
    """Raise `Unsupported` for a model that needs evaluation one record at a time, which costs too much."""
    make = mixing.of_all_sizes if engine.takes_extremes(x, y) else mixing.like
    some = make(x, _TIMED)

    def seconds(way: Way) -> float:
        start = time.thread_time()
        evaluation.outputs(engine.output, some, way)
        return time.thread_time() - start

    with mixing.trial(engine.state), engine.running():
        engine.model.eval()
        if not mixing.company(engine.model, engine.output, some, range(_ALONE)):
            return
        times = min(seconds("loop") for _ in range(2)) / min(seconds("batch") for _ in range(2))
    if times > _MOST_TIMES:
        reason = f"its outputs depend on the batch, and one record at a time cost {times:.0f} times as much, expected"
        raise Unsupported(f"{reason} at most {_MOST_TIMES}; with engine='loop' it is done all the same")
