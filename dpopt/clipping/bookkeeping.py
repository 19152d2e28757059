"""The book-keeping engine: one forward pass, one backward pass for output gradients only, no per-example gradients.

Bu, Wang, Zha and Karypis, "Differentially private optimization on large model at small cost", ICML 2023. A layer's
inputs and output gradients hold all that is needed of each example: its gradient's norm (`factors`) and, once the norms
of all layers are known, the clipped sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dpopt.clipping import layers
from dpopt.clipping.factors import Factor, merged, scaled_squared_norm, squared_norm
from dpopt.clipping.flat import (
    Clipped,
    FlatModel,
    Loss,
    clip_factors,
    free_memory,
    must_be_sanitized,
    same_randomness,
)
from dpopt.clipping.heap import keep_freed_memory
from dpopt.clipping.precision import full_precision
from dpopt.clipping.recording import Layer, Recorder, Unsupported, Use, factors_of
from dpopt.clipping.verification import SavedBytes, beside, compare, random_like, repeatable
from dpopt.errors import ConfigError
from dpopt.privacy.protocol import ClipRule, Vector


class BookkeepingEngine(FlatModel):
    """Clipped sums of per-example gradients of `loss(model(x), y)`; methods are documented by `ClippingEngine`.

    While the model runs, its trained parameters are views into the flat vector theta, and hooks note what each layer
    that holds some of them sees; afterwards the model is as it was.

    What a layer must be: called as a module, with the examples in the first dimension of its positional arguments (or
    several rows for each example, or one row for all), returning one tensor. Layers of unknown kind are repeated under
    `torch.func.vmap`. A bare parameter of shape [1, ...] of an unknown module is expanded over the batch. Weights may
    be shared, and layers called several times. `verify` finds out whether a model keeps to this.

    Args:
        model: any module whose outputs for one example do not depend on the others.
        loss: see `Loss`.
        precision: "float32" computes in the model's own type; "bfloat16" runs the model under autocast. Norms and sums
            are in the parameters' type either way.

    Attributes:
        dimension: number d of trained parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32") -> None:
        super().__init__(model, loss)
        self._is_bfloat16 = precision == "bfloat16"
        self._parameters = list(self._trained.values())
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._layers = Layer.all_of(model)
        self._example_bytes = 0
        if self._parameters[0].device.type == "cpu":
            keep_freed_memory()

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        with torch.no_grad(), self._at(theta):
            return self._output(x)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if not len(x):
            return points[0].new_zeros(len(points), 0)
        rows = []
        for theta, _ in zip(points, same_randomness(x.device), strict=False):
            with torch.no_grad():
                rows.append(self._loss(self.outputs(theta, x), y))
        return torch.stack(rows)

    @torch.no_grad()
    def clipped(
        self,
        points: Sequence[tuple[float, Vector]],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        clip: ClipRule,
        scale: Vector | None = None,
    ) -> Clipped:
        theta = points[0][1]
        if not len(x):
            return Clipped(torch.zeros_like(theta), theta.new_zeros(len(points), 0), theta.new_zeros(0))
        losses, factors = self._gradients(points, x, y)
        norm = _norm(factors, losses[0], None if scale is None else self._split(scale))
        keep = norm.isfinite() if must_be_sanitized(norm) else None
        total = self._weighted_sum(factors, clip_factors(clip, norm, mask), keep)
        return Clipped(total if scale is None else total.mul_(scale), losses, norm)

    def _weighted_sum(self, factors: list[list[Factor]], weights: Tensor, keep: Tensor | None = None) -> Tensor:
        """sum_i weights_i gradient_i, shape [d]; where `keep`, bool [n], is given, the other examples are zeros."""
        total = torch.empty(self.dimension, dtype=weights.dtype, device=weights.device)
        with full_precision(total.device):
            for group, out in zip(factors, self._split(total), strict=True):
                for position, factor in enumerate(group):
                    # One at a time: copies of all factors together would double the memory of a step.
                    kept = factor if keep is None else factor.sanitized(keep)
                    kept.weighted_sum(weights, out, is_first=position == 0)
                if not group:
                    out.zero_()
        return total

    def _gradients(
        self, points: Sequence[tuple[float, Vector]], x: Tensor, y: Tensor
    ) -> tuple[Tensor, list[list[Factor]]]:
        """The losses [k, n], and for each trained parameter the factors whose sum are its weighted gradients."""
        losses, factors = [], [[] for _ in self._parameters]
        for (weight, theta), _ in zip(points, same_randomness(x.device), strict=False):
            with self._at(theta):
                losses.append(self._backward(weight, x, y, factors))
        return torch.stack(losses), [merged(group) for group in factors]

    def _backward(self, weight: float, x: Tensor, y: Tensor, factors: list[list[Factor]]) -> Tensor:
        """Forward and backward at the present point; adds to `factors`, returns the losses [n]."""

        def forward() -> Tensor:
            return self._loss(self._output(x), y)

        return self._backward_of(forward, Recorder, len(x), weight, factors)

    def _backward_of(
        self,
        forward: Callable[[], Tensor],
        recorder: type[Recorder],
        examples: int,
        weight: float,
        factors: list[list[Factor]],
    ) -> Tensor:
        """The losses that `forward` gives, and backward from them; adds what `recorder` notes to `factors`."""
        waiting: list[tuple[Use, Tensor]] = []

        def receive(use: Use, gradient: Tensor) -> None:
            if layers.handler(use.module):
                self._add(factors, use, gradient, weight, examples)
            else:
                waiting.append((use, gradient))  # it needs a backward pass of its own

        with recorder(self._layers, examples, receive) as recorded, torch.enable_grad():
            losses = forward()
            recorded.is_recording = False
            if recorded.ends and losses.requires_grad:
                uses, edges = zip(*recorded.ends, strict=True)
                gradients = torch.autograd.grad(losses.sum(), edges, allow_unused=True)
                waiting += [(use, g) for use, g in zip(uses, gradients, strict=True) if g is not None]
        for use, gradient in waiting:
            self._add(factors, use, gradient, weight, examples)
        return losses.detach()

    @torch.no_grad()
    def _add(self, factors: list[list[Factor]], use: Use, gradient: Tensor, weight: float, examples: int) -> None:
        """Add the gradients of one use, given its output's, to the factors of its parameters."""
        gradient = gradient.to(self._parameters[0].dtype).reshape(use.shape)
        if weight != 1:
            gradient = gradient * weight
        with full_precision(gradient.device):
            found = factors_of(use, gradient, examples)
        for name, factor in found.items():
            factors[self._index[id(use.module._parameters[name])]].append(factor)
        use.inputs = use.versions = ()  # the graph knows the use until it is gone itself

    def _most_examples(self) -> int:
        # What an example needs is known once the engine was verified.
        return free_memory(self._parameters[0].device) // max(1, self._example_bytes)

    def verify(self, x: Tensor, y: Tensor) -> bool:
        """Compare norms, sums and losses of a few examples with plain autograd on one example at a time.

        This tells that the model does not mix examples and uses its parameters as the class describes. It looks at the
        code and not at the records: inputs are random numbers of the shape and type of `x` (integers are those of `x`
        shuffled), parameters lie beside their present values, so that no initial zero hides anything, and a model that
        draws random numbers has its dropout off (with it, other examples must leave the first one's loss alone). Two
        numbers of examples are tried, as one may equal another dimension by chance.

        Args:
            x, y: some records, at least one.

        Returns:
            Whether there was anything to compare: integers may all be padding, and then other records have to tell.

        Raises:
            Unsupported: they differ, or the model cannot be followed.
            ConfigError: the loss is not one value per example, or a buffer takes up what the model sees.
        """
        theta, precision, self._is_bfloat16 = beside(self._split(self.theta)), self._is_bfloat16, False
        try:
            for examples in (5, 2):
                inputs = random_like(x, examples)
                targets = y[torch.arange(examples, device=y.device) % len(y)]
                forward = partial(self.outputs, theta, inputs)
                with repeatable(self._model, forward, x.device) as is_random, self._at(theta), torch.no_grad():
                    if not self._verify(inputs, targets):
                        return False
                    if is_random:
                        self._verify_in_training(theta, inputs, targets)
        finally:
            self._is_bfloat16 = precision
        return True

    def _verify(self, x: Tensor, y: Tensor) -> bool:
        saved = SavedBytes({p.untyped_storage().data_ptr() for p in self._model.parameters()})
        with saved.hooks, torch.enable_grad():
            shape = tuple(self._loss(self._output(x), y).shape)
        if shape != (len(x),):
            raise ConfigError("loss", f"shape {shape}", f"expected one loss per example, ({len(x)},)")
        self._example_bytes = saved.total // len(x)
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        losses, factors = self._gradients([(1.0, self.theta)], x, y)
        alone, gradients = (torch.cat(each) for each in zip(*map(self._alone, x.split(1), y.split(1)), strict=True))
        for (name, buffer), before in zip(self._model.named_buffers(), buffers, strict=True):
            if not torch.equal(buffer, before):
                raise ConfigError(f"model.{name}", "buffer", "it changes with the records that the model sees")
        weights = torch.arange(1, len(x) + 1).to(gradients)
        expected = weights @ gradients
        if not expected.any() and not x.is_floating_point():
            return False
        if not expected.any():
            raise Unsupported("its gradients are zero for random inputs, so there is nothing to compare")
        compare("losses", losses[0], alone)
        compare("gradient norms", _norm(factors, losses[0]), gradients.norm(dim=1))
        for name, a, b in zip(
            self._trained, self._split(self._weighted_sum(factors, weights)), self._split(expected), strict=True
        ):
            compare(f"gradients of {name}", a, b, 1e-6 * float(expected.norm()))
        return True

    def _verify_in_training(self, theta: Vector, x: Tensor, y: Tensor) -> None:
        """With dropout an example cannot be repeated alone, but under the same random numbers beside others."""
        self._model.train()
        self._gradients([(1.0, theta)], x, y)  # can it be done?
        others = torch.cat([x[:1], x[1:].flip(0) if len(x) > 2 else x[:1]])
        first, second = (
            self._loss(self._output(each), y)[:1]
            for each, _ in zip((x, others), same_randomness(x.device), strict=False)
        )
        compare("losses", first, second)

    def _alone(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss [1] and gradient [1, d] of one example at the present point, by plain autograd."""
        with torch.enable_grad():
            loss = self._loss(self._model(x), y)
            gradients = torch.autograd.grad(loss.sum(), self._parameters, allow_unused=True)
        pairs = zip(gradients, self._parameters, strict=True)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs])
        return loss.detach(), flat.unsqueeze(0)

    @contextmanager
    def _at(self, theta: Vector) -> Iterator[None]:
        """The model's trained parameters are views into `theta` for a while."""
        own = [p.data for p in self._parameters]
        try:
            for parameter, part in zip(self._parameters, self._split(theta.detach()), strict=True):
                parameter.data = part
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data

    def _output(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self._is_bfloat16):
            output = self._model(x)
        return output.float() if self._is_bfloat16 else output


def _norm(factors: list[list[Factor]], like: Tensor, scales: Sequence[Tensor] | None = None) -> Tensor:
    """Norm over all parameters of each example's gradient, each coordinate multiplied by its scale; shape [n]."""
    with full_precision(like.device):
        if scales is None:
            squares = [squared_norm(group) for group in factors if group]
        else:
            pairs = zip(factors, scales, strict=True)
            squares = [scaled_squared_norm(group, scale) for group, scale in pairs if group]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros_like(like)
