"""Finding out whether an engine can follow a model, by comparing it with autograd on one example at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpopt.clipping import mixing
from dpopt.clipping.flat import FlatModel, random_states, same_randomness
from dpopt.clipping.recording import Unsupported
from dpopt.errors import ConfigError

_LOG = logging.getLogger(__name__)
DISTINCT = 64
"""Different examples in a batch of the physical size; the others repeat them."""
EXACT, COARSE = 1e-9, 5e-3
"""The largest relative errors: in float64, and in types with fewer digits, of which most may be lost."""


def verify(engine: FlatModel, x: Tensor, y: Tensor, batch: float | None = None) -> bool:
    """Compare what `engine` finds of some examples with plain autograd on one example at a time, and look for mixing.

    It looks at the code and not at the records. Inputs are random numbers of the shape and type of `x`, once of any
    size and sign, else between those of the records; parameters lie beside their present values, so that no initial
    zero hides anything; and all is computed in float64 if the model can be. Norms, sums and losses are compared where
    the model draws no random numbers, in training mode or what comes nearest to it. In training mode, no record may
    change what is found of another: of few, and of as many as a physical batch holds. Two numbers of examples are
    compared, as one may equal another dimension by chance. Afterwards the model is as it was, bit for bit.

    Args:
        engine: what is to compute clipped sums.
        x, y: some records, at least one.
        batch: expected batch size, where it is known.

    Returns:
        Whether there was anything to compare: integers may all be padding, and then other records have to tell.

    Raises:
        Unsupported: they differ, a record changes what is found of another, or the model cannot be run so.
        ConfigError: the loss is not one value per example, or a buffer changes.
    """
    with engine.exact():
        return _most_exactly(lambda dtype: _verify(engine, x, y, batch, dtype))


def _most_exactly(attempt: Callable[[torch.dtype | None], bool]) -> bool:
    """What `attempt` gives for float64 or, where that fails, for None: the model's own type.

    Raises:
        Unsupported: it fails for either.
    """
    try:
        return attempt(torch.float64)
    except ConfigError:
        raise
    except Exception as error:  # a model can fail in any way
        _LOG.info("the model is verified in its own type, as it cannot be run in float64: %s", error)
    try:
        return attempt(None)
    except ConfigError:
        raise
    except Exception as error:
        raise Unsupported.because(error) from error


def _verify(engine: FlatModel, x: Tensor, y: Tensor, batch: float | None, dtype: torch.dtype | None) -> bool:
    extremes = engine.takes_extremes(x, y)
    engine.example_bytes = _saved_bytes(engine, mixing.like(x, 2), _cycled(y, 2))
    x, y = _cast(x, dtype), _cast(y, dtype)
    with mixing.trial(engine.model, dtype), torch.no_grad():
        engine.load(mixing.beside(engine.split(engine.theta)))
        few, some = mixing.like(x, 2), mixing.anything_like(x, 5)
        if not (extremes and _losses(engine, some, _cycled(y, 5))[0].isfinite().all()):
            some = mixing.like(x, 5)
        tolerance, has_gradients = _compare(engine, some, _cycled(y, 5))
        if engine.must_show_gradients and not has_gradients:
            if x.is_floating_point():
                raise Unsupported("its gradients are zero for random inputs, so there is nothing to compare")
            return False
        _compare(engine, few, _cycled(y, 2))
        _must_not_mix(engine, some, y, extremes, _gradients)
        size = engine.physical_batch(max(len(x), batch or 0))
        size = _must_not_mix(engine, _cycled(mixing.like(x, DISTINCT), size), y, extremes, _losses)
        alike = _cycled(few[:1], size), _cycled(y[:1], size)  # where room is shared out, most find none
        with _repeatable(engine, few):
            (together,), (alone,) = _losses(engine, *alike), _losses(engine, few[:1], y[:1])
            _must_agree("losses", together, alone.expand(size), tolerance)
    return True


def _cast(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`values` in the type `dtype`, if there is one and they are real numbers."""
    return values.to(dtype) if dtype and values.is_floating_point() else values


def _cycled(y: Tensor, examples: int) -> Tensor:
    """That many of the records `y`, over and over."""
    return y[torch.arange(examples, device=y.device) % len(y)]


def _saved_bytes(engine: FlatModel, x: Tensor, y: Tensor) -> int:
    """What a forward pass keeps of an example for the backward pass.

    Raises:
        ConfigError: the loss is not one value per example.
    """
    with mixing.trial(engine.model), _repeatable(engine, x):
        saved = _Saved({p.untyped_storage().data_ptr() for p in engine.model.parameters()})
        with saved.hooks, torch.enable_grad():
            shape = tuple(engine.loss(engine.model(x), y).shape)
    if shape != (len(x),):
        raise ConfigError("loss", f"shape {shape}", f"expected one loss per example, ({len(x)},)")
    return saved.total // len(x)


def _gradients(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms [n] at the model's parameters."""
    found = engine.per_example([(1.0, engine.theta)], x, y)
    return found.losses[0], found.norms


def _losses(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Losses [n] at the model's parameters."""
    return (engine.losses([engine.theta], x, y, torch.ones(len(x), dtype=torch.bool, device=x.device))[0],)


def _must_not_mix(
    engine: FlatModel, x: Tensor, y: Tensor, extremes: bool, find: Callable[[FlatModel, Tensor, Tensor], Any]
) -> int:
    """See `mixing.must_not_mix`; in training mode, each time with the same random numbers."""
    again = same_randomness(x.device)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        next(again)
        return find(engine, x, _cycled(y, len(x)))

    engine.model.train()
    with mixing.constant_buffers(engine.model):
        return mixing.must_not_mix(run, x, extremes)


def _compare(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """Raise `Unsupported` if the engine finds something else than autograd.

    Returns the error that was tolerated, and whether any gradient is not zero.
    """
    saved = _Saved(set())
    with _repeatable(engine, x), mixing.constant_buffers(engine.model):
        together, (losses,) = engine.per_example([(1.0, engine.theta)], x, y), _losses(engine, x, y)
        with saved.hooks:
            pairs = [_alone(engine, *each) for each in zip(x.split(1), y.split(1), strict=True)]
    alone, gradients = (torch.cat(each) for each in zip(*pairs, strict=True))
    weights = torch.arange(1, len(x) + 1).to(gradients)
    expected = weights @ torch.where(gradients.isfinite().all(1, keepdim=True), gradients, 0.0)  # as an engine does
    tolerance = _tolerated(saved.types)
    _must_agree("losses", together.losses[0], alone, tolerance)
    _must_agree("losses", losses, alone, tolerance)
    _must_agree("gradient norms", together.norms, gradients.norm(dim=1), tolerance)
    parts = engine.split(together.weighted_sum(weights)), engine.split(expected)
    for name, part, truth in zip(engine.trained, *parts, strict=True):
        _must_agree(f"gradients of {name}", part, truth, tolerance, 1e-3 * tolerance * float(expected.norm()))
    return tolerance, bool(expected.any())


def _alone(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [1] and gradient [1, d] of one example at the model's parameters, by plain autograd."""
    engine.freeze()
    parameters = list(engine.trained.values())
    with torch.enable_grad():
        loss = engine.loss(engine.model(x), y)
        gradients = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs])
    return loss.detach(), flat.unsqueeze(0)


class _Saved:
    """Notes what forward passes keep for their backward passes: how many bytes, but for the storages `ignored`, and of
    which types of real numbers.
    """

    def __init__(self, ignored: set[int]) -> None:
        self._storages: dict[int, int] = {}
        self._ignored = ignored
        self.types: set[torch.dtype] = set()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self._storages[storage.data_ptr()] = storage.nbytes()
        if tensor.is_floating_point():
            self.types.add(tensor.dtype)
        return tensor.detach()  # the tensor itself would keep its graph alive

    @property
    def total(self) -> int:
        return sum(self._storages.values())


@contextmanager
def repeatable(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Iterator[None]:
    """`model` in training mode, or in what comes nearest to that and draws no random numbers in `forward`.

    Modes and random generators are as before afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    all_on, dropout_off, all_off = (lambda m: True), (lambda m: "Drop" not in type(m).__name__), (lambda m: False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for is_on in (all_on, dropout_off, all_off):
                for module, _ in modes:
                    module.training = is_on(module)
                before = random_states(device)
                forward()
                if all(torch.equal(a, b) for a, b in zip(before, random_states(device), strict=True)):
                    break
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _repeatable(engine: FlatModel, x: Tensor) -> AbstractContextManager[None]:
    return repeatable(engine.model, partial(engine.outputs, engine.theta, x), x.device)


def _tolerated(types: set[Any]) -> float:
    """The largest relative error for a model that computes in these types."""
    return EXACT if types == {torch.float64} else COARSE


def _must_agree(what: str, together: Tensor, alone: Tensor, tolerance: float, slack: float = 0.0) -> None:
    """Raise `Unsupported` where the two differ by more than rounding."""
    is_number = together.isfinite() | alone.isfinite()  # where neither is, they agree
    together, alone = together[is_number], alone[is_number]
    if not (together - alone).norm() <= tolerance * alone.norm() + slack:
        raise Unsupported(f"the {what} of a batch are not those of its examples one at a time")
