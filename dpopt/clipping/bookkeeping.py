"""The book-keeping engine: one forward pass, one backward pass for output gradients only, no per-example gradients.

Bu, Wang, Zha and Karypis, "Differentially private optimization on large model at small cost", ICML 2023. A layer's
inputs and output gradients hold all that is needed of each example: its gradient's norm (`factors`) and, once the norms
of all layers are known, the clipped sum.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpopt.clipping import layers
from dpopt.clipping.factors import Dense, Factor, merged, squared_norm
from dpopt.clipping.flat import (
    FlatModel,
    FullPrecision,
    PerExample,
    WeightedPoints,
    free_memory,
    must_be_sanitized,
)
from dpopt.clipping.losses import Loss
from dpopt.clipping.mixing import Unsupported, in_turn
from dpopt.clipping.state import State
from dpopt.types import Number, Vector

_REENTRANT = (
    "if torch.utils.checkpoint did that, use use_reentrant=False, in Hugging Face's models by "
    "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


class BookkeepingEngine(FlatModel):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; methods are documented by `ClippingEngine`.

    A layer is called as a module, with the examples in the first dimension of its positional arguments (or several rows
    for each example, or one row for all), and returns one tensor. Layers of unknown kind are repeated under
    `torch.func.vmap`; a bare parameter of shape [1, ...] of an unknown module is expanded over the batch.
    Norms and sums are in the parameters' type, also where `precision` runs the model under autocast.
    """

    name = "bookkeeping"
    sees_batches = True

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32", state: State | None = None) -> None:
        super().__init__(model, loss, state)
        self._is_bfloat16 = precision == "bfloat16"
        self._parameters = list(self.trained.values())
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._layers = _layers_of(model)
        # Each backward pass frees much memory, and asking the system for it again costs page faults.
        if self._parameters[0].device.type == "cpu":
            _keep_freed_memory()

    def _per_example(
        self, points: WeightedPoints, x: Tensor, y: Tensor, scale: Vector | None, shift: Vector | None
    ) -> PerExample:
        # One forward and one backward pass a point. The factors of a parameter add up to its weighted gradients.
        losses: list[Tensor] = []
        factors: list[list[Factor]] = [[] for _ in self._parameters]
        precise = FullPrecision(x.device)
        for weight, theta in in_turn(points, x.device):
            with self.at(theta):
                losses.append(self._backward(weight, x, y, factors, precise))
        if shift is not None:  # every example's gradient has one more term
            for group, part in zip(factors, self.split(-shift), strict=True):
                group.append(Dense(part.expand(len(x), *part.shape)))
        factors = [merged(group) for group in factors]

        # The squared norm over all parameters is the sum of theirs; a parameter that nothing uses has none.
        with precise:
            parts = [None] * len(factors) if scale is None else self.split(scale)
            squares = [squared_norm(g, part) if g else None for g, part in zip(factors, parts, strict=True)]
        used = [square for square in squares if square is not None]
        norms = torch.stack(used).sum(0).sqrt() if used else torch.zeros_like(losses[0])

        def weighted_sum(each: Sequence[Tensor]) -> Vector:
            keep = norms.isfinite() if must_be_sanitized(norms) else None
            total = torch.empty(self.dimension, dtype=norms.dtype, device=norms.device)
            with precise:
                for group, weights, out in zip(factors, each, self.split(total), strict=True):
                    for position, factor in enumerate(group):
                        # One at a time: copies of all factors together would double the memory of a step.
                        clean = factor if keep is None else factor.sanitized(keep)
                        clean.weighted_sum(weights, out, is_first=position == 0)
                    if not group:
                        out.zero_()
            return total if scale is None else total.mul_(scale)

        return PerExample(torch.stack(losses), norms, squares, weighted_sum)

    def _backward(
        self, weight: Number, x: Tensor, y: Tensor, factors: list[list[Factor]], precise: FullPrecision
    ) -> Tensor:
        waiting: list[tuple[_Use, Tensor]] = []
        examples = x.shape[0]

        def receive(use: _Use, gradient: Tensor) -> None:
            if use.handler:
                with precise:
                    self._add(factors, use, gradient, weight, examples)
            else:
                # It needs a backward pass of its own, which cannot begin within this one.
                waiting.append((use, gradient))

        with _Recorder(self._layers, examples, receive) as recorder, torch.enable_grad():
            losses = self.loss(self.run(x), y)
            recorder.is_recording = False
            if recorder.hidden:
                self.hint = f"; {recorder.hidden} ran without gradients: {_REENTRANT}"
            if recorder.ends and losses.requires_grad:
                uses, edges = zip(*recorder.ends, strict=True)
                # The gradients of all other uses come to `receive` on the way to these.
                gradients = torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True)
                waiting += [(use, g) for use, g in zip(uses, gradients, strict=True) if use and g is not None]
        with precise, torch.no_grad():  # as in a backward pass
            for use, gradient in waiting:
                self._add(factors, use, gradient, weight, examples)
        return losses.detach()

    def _add(self, factors: list[list[Factor]], use: _Use, gradient: Tensor, weight: Number, examples: int) -> None:
        module, names, kind = use.module, use.names, type(use.module).__name__
        if _versions(use.inputs) != use.versions:
            raise Unsupported(f"an input of {kind} was changed in place after its use")

        # Norms and sums are in the parameters' type, also where autocast ran the layer in another one.
        gradient = gradient.to(self._parameters[0].dtype).reshape(use.shape)
        if weight != 1:
            gradient = gradient * weight
        inputs = tuple([x.to(gradient) if isinstance(x, Tensor) and x.is_floating_point() else x for x in use.inputs])
        if use.handler:
            each = use.handler(module, names, inputs[0] if inputs else gradient, gradient, examples)
        elif not inputs:  # a bare parameter that was expanded over the batch
            each = {names[0]: Dense(gradient)}
        elif any(isinstance(x, Tensor) and len(x) != examples for x in (*inputs, gradient)):
            raise Unsupported(f"{kind} is of unknown kind and called on rows that are no examples")
        else:
            try:
                each = layers.by_vmap(module, names, inputs, use.keywords, gradient)
            except Exception as error:  # a module can fail in any way
                reason = f"{kind} holds {', '.join(names)} and cannot be repeated for one example: {error}"
                raise Unsupported(reason) from error
        for name, factor in each.items():
            factors[self._index[id(module._parameters[name])]].append(factor)
        use.inputs, use.versions = (), []  # the graph refers to the use until it is gone itself

    def _most_examples(self) -> int:
        # Verification measures what an example needs.
        return free_memory(self._parameters[0].device) // max(1, self.example_bytes)

    @contextmanager
    def exact(self) -> Iterator[None]:
        precision, self._is_bfloat16 = self._is_bfloat16, False
        try:
            yield
        finally:
            self._is_bfloat16 = precision

    def run(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self._is_bfloat16):
            output = self.model(x)
        return output.float() if self._is_bfloat16 else output


def _layers_of(model: nn.Module) -> list[_Layer]:
    result = []
    for module in model.modules():
        names, handler = layers.trained(module), layers.handler(module)
        # A module of unknown kind may use a bare parameter, such as a class token, outside of any layer's call.
        shapes = {name: cast(nn.Parameter, module._parameters[name]).shape for name in names}
        bare = [name for name, shape in shapes.items() if not handler and len(shape) > 1 and shape[0] == 1]
        if names:
            result.append((module, [name for name in names if name not in bare], bare, handler))
    return result


_Layer = tuple[nn.Module, list[str], list[str], layers.Handler | None]
"""A module that holds trained parameters: the names of those in its calls, of bare ones of shape [1, ...], handler."""


@dataclass
class _Use:
    """One call of a layer, or (without inputs) a bare parameter's expansion over the batch; `shape` is the output's."""

    module: nn.Module
    names: list[str]  # of its trained parameters
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]  # none of them tensors
    versions: list[int | None]  # those of the inputs, which show an in-place change since
    shape: torch.Size
    handler: layers.Handler | None


class _Recorder:
    """While it is entered, notes every use of the trained parameters of `layers` on batches of `examples`.

    A use that depends on no other one is where a backward pass may end (`ends`): its output gradient is to be asked
    for. The output gradients of all other uses occur on the way there, and `receive` is called with each at once, so
    that few are in memory at a time. `hidden` is the kind of a layer that was called where no gradients were kept.
    """

    def __init__(self, layers: Sequence[_Layer], examples: int, receive: Callable[[_Use, Tensor], None]) -> None:
        self._layers, self._examples, self._receive = layers, examples, receive
        self._handles: list[Any] = []
        self._bare: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.ends: list[tuple[_Use | None, GradientEdge]] = []
        self.hidden = ""
        self.is_recording = True  # not in the backward pass, where checkpoints call layers again

    def __enter__(self) -> _Recorder:
        for module, names, bare, handler in self._layers:
            for name in bare:
                parameter = cast(nn.Parameter, module._parameters[name])
                self._bare.append((module, name, parameter))
                with torch.enable_grad():
                    expanded = parameter.expand(self._examples, *parameter.shape[1:])
                module._parameters[name] = cast(nn.Parameter, expanded)
                self.ends.append(
                    (_Use(module, [name], (), {}, [], expanded.shape, handler), get_gradient_edge(expanded))
                )
            if names:
                note = partial(self._note, names, handler)
                self._handles.append(module.register_forward_hook(note, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name, parameter in self._bare:
            module._parameters[name] = parameter

    def _note(
        self,
        names: list[str],
        handler: layers.Handler | None,
        module: nn.Module,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            self.hidden = type(module).__name__
            return None
        if not isinstance(output, Tensor) or any(isinstance(x, Tensor) for x in keywords.values()):
            raise Unsupported(f"{type(module).__name__} does not map positional tensors to one tensor")
        if not any(isinstance(x, Tensor) for x in inputs):
            raise Unsupported(f"{type(module).__name__} is called without a tensor")
        if output.shape[0] == 1 != self._examples:
            output = output.expand(self._examples, *output.shape[1:])
            inputs = tuple(x.expand(self._examples, *x.shape[1:]) if isinstance(x, Tensor) else x for x in inputs)
        elif output.shape[0] % self._examples:
            raise Unsupported(f"{type(module).__name__} gives {output.shape[0]} rows for {self._examples} examples")
        if self.is_recording:
            kept = () if names == ["bias"] else tuple([x.detach() if isinstance(x, Tensor) else x for x in inputs])
            use = _Use(module, names, kept, keywords, _versions(kept), output.shape, handler)
            whole = _whole(output)
            needy = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            if needy:
                whole.register_hook(partial(self._receive, use))
                if not self.ends:  # something else than a use requires gradients, such as frozen embeddings for PEFT
                    self.ends += [(None, get_gradient_edge(x)) for x in needy]
            else:
                self.ends.append((use, get_gradient_edge(whole)))
        return output


def _versions(inputs: tuple[Any, ...]) -> list[int | None]:
    return [x._version if isinstance(x, Tensor) else None for x in inputs]


def _whole(output: Tensor) -> Tensor:
    """`output`, or what it is a mere reshaping of: an in-place change of a view goes to its base, around the view."""
    base = output._base
    if base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous():
        return base
    return output


@cache
def _keep_freed_memory() -> None:
    """Let glibc's allocator keep what is freed, as torch's does on a GPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt and mallopt(_TRIM_THRESHOLD, 2**31 - 1):
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
