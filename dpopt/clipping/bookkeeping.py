"""The book-keeping engine: one forward pass, one backward pass for output gradients only, no per-example gradients.

Bu, Wang, Zha and Karypis, "Differentially private optimization on large model at small cost", ICML 2023. A layer's
inputs and output gradients hold all that is needed of each example: its gradient's norm (`factors`) and, once the norms
of all layers are known, the clipped sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpopt.clipping import layers
from dpopt.clipping.factors import Dense, Factor, merged, scaled_squared_norm, squared_norm
from dpopt.clipping.flat import FlatModel, PerExample, WeightedPoints, free_memory, must_be_sanitized, same_randomness
from dpopt.clipping.heap import keep_freed_memory
from dpopt.clipping.losses import Loss
from dpopt.clipping.precision import full_precision
from dpopt.clipping.recording import Recorder, Unsupported, Use, layers_of, version
from dpopt.types import Number, Vector

_REENTRANT = (
    "if torch.utils.checkpoint did that, use use_reentrant=False, in Hugging Face's models by "
    "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)


class BookkeepingEngine(FlatModel):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; methods are documented by `ClippingEngine`.

    A layer is called as a module, with the examples in the first dimension of its positional arguments (or several rows
    for each example, or one row for all), and returns one tensor. Layers of unknown kind are repeated under
    `torch.func.vmap`; a bare parameter of shape [1, ...] of an unknown module is expanded over the batch.

    Args:
        model: any module whose outputs for one example do not depend on the others.
        loss: see `Loss`.
        precision: "float32" computes in the model's own type; "bfloat16" runs the model under autocast. Norms and sums
            are in the parameters' type either way.
    """

    name = "bookkeeping"
    sees_batches = True

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32") -> None:
        super().__init__(model, loss)
        self._is_bfloat16 = precision == "bfloat16"
        self._parameters = list(self.trained.values())
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._layers = layers_of(model)
        # Each backward pass frees much memory, and asking the system for it again costs page faults.
        if self._parameters[0].device.type == "cpu":
            keep_freed_memory()

    def _outputs(self, theta: Vector, x: Tensor) -> Tensor:
        with self.at(theta):
            return self._output(x)

    def _losses(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self._outputs(theta, x), y)

    def _per_example(self, points: WeightedPoints, x: Tensor, y: Tensor, scale: Vector | None) -> PerExample:
        # One forward and one backward pass a point. The factors of a parameter add up to its weighted gradients.
        losses: list[Tensor] = []
        factors: list[list[Factor]] = [[] for _ in self._parameters]
        for (weight, theta), _ in zip(points, same_randomness(x.device), strict=False):
            with self.at(theta):
                losses.append(self._backward(weight, x, y, factors))
        factors = [merged(group) for group in factors]

        # The squared norm over all parameters is the sum of theirs; a parameter that nothing uses has none.
        with full_precision(x.device):
            if scale is None:
                squares = [squared_norm(group) for group in factors if group]
            else:
                pairs = zip(factors, self.split(scale), strict=True)
                squares = [scaled_squared_norm(group, part) for group, part in pairs if group]
        norms = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros_like(losses[0])

        def weighted_sum(weights: Tensor) -> Vector:
            keep = norms.isfinite() if must_be_sanitized(norms) else None
            total = torch.empty(self.dimension, dtype=weights.dtype, device=weights.device)
            with full_precision(total.device):
                for group, out in zip(factors, self.split(total), strict=True):
                    for position, factor in enumerate(group):
                        # One at a time: copies of all factors together would double the memory of a step.
                        clean = factor if keep is None else factor.sanitized(keep)
                        clean.weighted_sum(weights, out, is_first=position == 0)
                    if not group:
                        out.zero_()
            return total if scale is None else total.mul_(scale)

        return PerExample(torch.stack(losses), norms, weighted_sum)

    def _backward(self, weight: Number, x: Tensor, y: Tensor, factors: list[list[Factor]]) -> Tensor:
        waiting: list[tuple[Use, Tensor]] = []

        def receive(use: Use, gradient: Tensor) -> None:
            if layers.handler(use.module):
                self._add(factors, use, gradient, weight, len(x))
            else:
                waiting.append(
                    (use, gradient)
                )  # it needs a backward pass of its own, which cannot begin within this one

        with Recorder(self._layers, len(x), receive) as recorder, torch.enable_grad():
            losses = self.loss(self._output(x), y)
            recorder.is_recording = False
            if recorder.hidden:
                self.hint = f"; {recorder.hidden} ran without gradients: {_REENTRANT}"
            if recorder.ends and losses.requires_grad:
                uses, edges = zip(*recorder.ends, strict=True)
                # The gradients of all other uses come to `receive` on the way to these.
                gradients = torch.autograd.grad(losses.sum(), edges, allow_unused=True)
                waiting += [(use, g) for use, g in zip(uses, gradients, strict=True) if use and g is not None]
        for use, gradient in waiting:
            self._add(factors, use, gradient, weight, len(x))
        return losses.detach()

    @torch.no_grad()
    def _add(self, factors: list[list[Factor]], use: Use, gradient: Tensor, weight: Number, examples: int) -> None:
        module, names, kind = use.module, use.names, type(use.module).__name__
        if tuple(version(x) for x in use.inputs) != use.versions:
            raise Unsupported(f"an input of {kind} was changed in place after its use")

        # Norms and sums are in the parameters' type, also where autocast ran the layer in another one.
        gradient = gradient.to(self._parameters[0].dtype).reshape(use.shape)
        if weight != 1:
            gradient = gradient * weight
        inputs = tuple(x.to(gradient) if isinstance(x, Tensor) and x.is_floating_point() else x for x in use.inputs)
        handler = layers.handler(module)
        with full_precision(gradient.device):
            if handler:
                each = handler(module, names, inputs[0] if inputs else gradient, gradient, examples)
            elif (
                not inputs
            ):  # a bare parameter that was expanded over the batch: its gradient has a row for each example
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
        use.inputs = use.versions = ()  # the graph refers to the use until it is gone itself

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

    def _output(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self._is_bfloat16):
            output = self.model(x)
        return output.float() if self._is_bfloat16 else output
