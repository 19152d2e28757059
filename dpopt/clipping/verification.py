"""Finding out whether an engine can follow a model, by comparing it with autograd on one example at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dpopt.clipping import joins, mixing
from dpopt.clipping.flat import FlatModel, gradient
from dpopt.clipping.mixing import Unsupported
from dpopt.errors import ConfigError

_LOG = logging.getLogger(__name__)
_SOME = 3
"""Examples that are compared one at a time in float64; two more are compared as training computes them."""
_DISTINCT = 64
"""Different examples in a batch of the physical size; the others repeat them."""
_EXACT, _COARSE = 1e-9, 5e-3
"""The largest relative errors: in float64, and in types with fewer digits, of which most may be lost."""


def verify(engine: FlatModel, x: Tensor, y: Tensor, batch: float | None = None) -> bool:
    """Compare what `engine` finds of some examples with plain autograd on one example at a time, and look for mixing.

    It looks at the code and not at the records: inputs are random numbers like `x`, parameters lie beside their present
    values, and all is computed in float64 if the model can be. They are compared where the model draws no random
    numbers. In training mode, no record may change what is found of another: of few, and of as many as a
    physical batch holds. Afterwards the model is as it was, bit for bit.

    Returns:
        True if there was anything to compare: integers may all be padding, and then other records have to tell.

    Raises:
        Unsupported: they differ, a record changes what is found of another, or the model cannot be run so.
        ConfigError: the loss is not one value per example, or a buffer changes.
    """
    # A hook may change large gradients alone, which made-up records need not have.
    if engine.name != "loop" and any(p._backward_hooks for p in engine.trained.values()):
        raise Unsupported("a trained parameter has a gradient hook, which it does not call")
    extremes, few = engine.takes_extremes(x, y), (mixing.like(x, 2), _cycled(y, 2))
    try:
        with mixing.trial(engine.state), torch.no_grad():
            engine.load(mixing.beside(engine.split(engine.theta)))
            with engine.exact(), engine.running():
                is_on = mixing.quieten(engine.model, partial(engine.outputs, engine.theta, few[0]), x.device)
                engine.example_bytes = _saved_bytes(engine, *few)
            if engine.sees_batches:
                with engine.exact():
                    _must_not_join(engine, mixing.like(x, joins.SIZES[1]))
            engine.model.train()
            engine.compare_in_training(*few)
    except ConfigError:
        raise
    except Exception as error:  # a model can fail in any way
        raise Unsupported.because(error) from error
    # Rounding hides small errors in the model's own type, so float64 comes first.
    for dtype in (torch.float64, None):
        try:
            with engine.exact(), mixing.trial(engine.state, dtype), torch.no_grad():
                return _verify(engine, mixing.cast(x, dtype), mixing.cast(y, dtype), batch, extremes, is_on)
        except ConfigError:
            raise
        except Exception as error:
            if dtype is None:
                raise Unsupported.because(error) from error
            _LOG.info("the model is verified in its own type, as it cannot be run in float64: %s", error)
    raise AssertionError


def _verify(
    engine: FlatModel, x: Tensor, y: Tensor, batch: float | None, extremes: bool, is_on: Callable[[nn.Module], bool]
) -> bool:
    engine.load(mixing.beside(engine.split(engine.theta)))
    some = mixing.anything_like(x, _SOME)
    if not (extremes and _losses(engine, some, _cycled(y, _SOME))[0].isfinite().all()):
        some = mixing.like(x, _SOME)
    mixing.set_modes(engine.model, is_on)
    tolerance, has_gradients = _compare(engine, some, _cycled(y, _SOME))
    if engine.must_show_gradients and not has_gradients:
        if x.is_floating_point():
            raise Unsupported("its gradients are zero for random inputs, so there is nothing to compare")
        # Whole numbers may all be padding: records of the next batch decide.
        return False
    if engine.sees_batches:
        _must_be_alone(engine, mixing.of_all_sizes(x) if extremes else mixing.like(x, _DISTINCT), is_on)
    engine.model.train()
    engine.must_not_mix(engine.losses_and_norms, some, y, extremes)
    # Mixing may show only in a large batch, as a layer that shares out room by rank does.
    size = engine.physical_batch(max(len(x), batch or 0))
    size = engine.must_not_mix(partial(_losses, engine), _cycled(mixing.like(x, _DISTINCT), size), y, extremes)
    mixing.set_modes(engine.model, is_on)
    few = mixing.like(x, 1), y[:1]
    # Equal records must have equal losses: rooms of a mixture of experts may be full for the later ones.
    alike = _cycled(few[0], size), _cycled(few[1], size)  # where room is shared out, most find none
    (together,), (alone,) = _losses(engine, *alike), _losses(engine, *few)
    _must_agree("losses", together, alone.expand(size), tolerance)
    engine.state.must_keep_buffers()
    return True


def _must_not_join(engine: FlatModel, x: Tensor) -> None:
    """Raise `Unsupported` if operations join records x in training; where they do in evaluation, it is one by one."""
    for is_training in (True, False):
        engine.model.train(is_training)
        operation = None
        with engine.running(), suppress(Exception):  # such a model is looked at by values alone
            operation = joins.joined(engine.model, engine.output, x)
        if operation:
            _go_alone(engine, x, f"{operation} joins the examples of a batch", is_training)


def _must_be_alone(engine: FlatModel, x: Tensor, is_on: Callable[[nn.Module], bool]) -> None:
    """The same by values: made-up records x in a batch, and alone."""
    for is_training in (True, False):
        mixing.set_modes(engine.model, is_on if is_training else lambda module: False)
        with engine.running():
            is_apart = engine.are_mapped(engine.theta, x)
            reason = None if is_apart else mixing.company(engine.model, engine.output, x, range(len(x)))
            if reason:
                _go_alone(engine, x, reason, is_training)


def _go_alone(engine: FlatModel, x: Tensor, reason: str, is_training: bool) -> None:
    if is_training:
        raise Unsupported(reason)
    engine.go_alone(x, reason)


def _cycled(y: Tensor, examples: int) -> Tensor:
    return y[torch.arange(examples, device=y.device) % len(y)]


def _saved_bytes(engine: FlatModel, x: Tensor, y: Tensor) -> int:
    """Bytes that a forward pass keeps of an example; ConfigError if the loss is not one value per example."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would keep its graph alive

    with saved_tensors_hooks(note, lambda tensor: tensor), torch.enable_grad(), engine.state:
        shape = tuple(engine.loss(engine.model(x), y).shape)
    if shape != (len(x),):
        raise ConfigError("loss", f"shape {shape}", f"expected one loss per example, ({len(x)},)")
    # Parameters are in memory anyway, however many examples there are.
    held = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    return sum(size for place, size in storages.items() if place not in held) // len(x)


def _losses(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (engine.losses([engine.theta], x, y, torch.ones(len(x), dtype=torch.bool, device=x.device))[0],)


def _compare(engine: FlatModel, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """Raise `Unsupported` if autograd differs; gives the error tolerated, and whether a gradient is not zero."""
    types: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        types.update([tensor.dtype] if tensor.is_floating_point() else [])
        return tensor.detach()

    together, (losses,) = engine.per_example([(1.0, engine.theta)], x, y), _losses(engine, x, y)
    rows: list[Tensor] = []
    ones: list[Tensor] = []
    with saved_tensors_hooks(note, lambda tensor: tensor), engine.running(), torch.enable_grad():
        for each, target in zip(x.split(1), y.split(1), strict=True):
            with engine.state:
                loss = engine.loss(engine.model(each), target)
                rows.append(gradient(loss.sum(), list(engine.trained.values())))
                ones.append(loss.detach())
    alone, gradients = torch.cat(ones), torch.stack(rows)
    # Unequal weights, so that two exchanged gradients show in the sum.
    weights = torch.arange(1, len(x) + 1).to(gradients)
    expected = weights @ torch.where(gradients.isfinite().all(1, keepdim=True), gradients, 0.0)  # as an engine does
    tolerance = _EXACT if types == {torch.float64} else _COARSE
    _must_agree("losses", together.losses[0], alone, tolerance)
    _must_agree("losses", losses, alone, tolerance)
    _must_agree("gradient norms", together.norms, gradients.norm(dim=1), tolerance)
    parts = engine.split(together.weighted_sum([weights] * len(engine.trained))), engine.split(expected)
    for name, part, truth in zip(engine.trained, *parts, strict=True):
        _must_agree(f"gradients of {name}", part, truth, tolerance, 1e-3 * tolerance * float(expected.norm()))
    return tolerance, bool(expected.any())


def _must_agree(what: str, together: Tensor, alone: Tensor, tolerance: float, slack: float = 0.0) -> None:
    is_number = together.isfinite() | alone.isfinite()  # where neither is, they agree
    together, alone = together[is_number], alone[is_number]
    if not (together - alone).norm() <= tolerance * alone.norm() + slack:
        raise Unsupported(f"the {what} of a batch are not those of its examples one at a time")
