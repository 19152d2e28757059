"""Convolutions as outer products: one unfolded input patch on the right of each output position's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.clipping.factors import Dense, Factor, OuterProducts, blocks, is_cheaper_dense, rounding, zeroed

_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class _Convolved(OuterProducts):
    """The gradients of the weight of `module` for n examples, of r images each."""

    x: Tensor  # padded inputs [n r, C, ...]
    gradient: Tensor  # output gradients [n r, O, ...]
    module: _Convolution
    count: int  # n
    is_centred: bool = False  # from each patch its mean is subtracted

    @property
    def examples(self) -> int:
        return self.count

    @property
    def device(self) -> torch.device:
        return self.gradient.device

    @property
    def gram_size(self) -> tuple[int, int]:
        return self.module.groups, self._images * self.gradient.shape[2:].numel()

    @cached_property
    def _images(self) -> int:
        return len(self.x) // max(1, self.examples)

    def pair(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        left, right = self._sides(rows)
        return left.mT, right.mT

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        _put(self.summed(weights), out, is_first)

    def summed(self, weights: Tensor) -> Tensor:
        scaled = self.gradient * weights.repeat_interleave(self._images).view(-1, *[1] * (self.gradient.dim() - 1))
        m, dims = self.module, self.gradient.dim() - 2
        arguments: tuple[Any, ...] = (m.stride, (0,) * dims, m.dilation, False, (0,) * dims, m.groups)
        kernel = self.x.new_empty(()).expand(m.weight.shape)  # only its shape is read
        backward = torch.ops.aten.convolution_backward
        return backward(scaled, self.x, kernel, None, *arguments, (False, True, False))[1]

    def sanitized(self, keep: Tensor) -> _Convolved:
        keep = keep.repeat_interleave(self._images)
        return replace(self, x=zeroed(self.x, keep), gradient=zeroed(self.gradient, keep))

    def dense(self, rows: slice = slice(None)) -> Tensor:
        left, right = self._sides(rows)
        return (left @ right.mT).flatten(1)

    def all_dense(self) -> Tensor:
        """Every example's gradient, in blocks that stay in cache; shape [n, groups, p, q]."""
        (groups, length), (channels, *kernel) = self.gram_size, self.module.weight.shape
        q = math.prod(kernel)
        result = self.gradient.new_empty(self.examples, groups, channels // groups, q)
        # Unfolded patches of all examples at once would leave a CPU's caches.
        for part in blocks(self.examples, groups * length * q, self.device):
            left, right = self._sides(part)
            torch.matmul(left, right.mT, out=result[part])
        return result

    def _sides(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Left [n, groups, p, T] and right [n, groups, q, T] of the examples `rows`."""
        images = self._images
        part = slice(images * (rows.start or 0), None if rows.stop is None else images * rows.stop)
        x, gradient, groups = self.x[part], self.gradient[part], self.module.groups
        # The padded input under the kernel at each of its T places.
        batch, channel, *space = x.stride()
        steps = [stride * step for stride, step in zip(space, self.module.stride, strict=True)]
        taps = [stride * step for stride, step in zip(space, self.module.dilation, strict=True)]
        kernel, places = self.module.weight.shape[1:], gradient.shape[2:]
        windows = x.as_strided((*x.shape[:2], *kernel[1:], *places), (batch, channel, *taps, *steps))
        right = windows.reshape(x.shape[0], groups, kernel.numel(), places.numel())
        left = gradient.reshape(x.shape[0], groups, -1, right.shape[3])
        if images > 1:
            left, right = (s.unflatten(0, (-1, images)).permute(0, 2, 3, 1, 4).flatten(3) for s in (left, right))
        return left, right - right.mean(2, keepdim=True) if self.is_centred else right


def _put(value: Tensor, out: Tensor, is_first: bool) -> None:
    if is_first:
        out.copy_(value)
    else:
        out.add_(value)


def _pad(module: _Convolution, x: Tensor) -> Tensor:
    """The input as the kernel sees it."""
    padding: list[int] = module._reversed_padding_repeated_twice  # also for "same"
    if not any(padding):
        return x
    return F.pad(x, padding) if module.padding_mode == "zeros" else F.pad(x, padding, mode=module.padding_mode)


def convolved(module: _Convolution, x: Tensor, gradient: Tensor, examples: int) -> Factor:
    """The gradients of the weight of `module`, in the cheaper form."""
    factor = _Convolved(_pad(module, x), gradient, module, examples)
    return Dense(factor.all_dense()) if _is_dense(factor) else factor


def _is_dense(factor: _Convolved) -> bool:
    groups, length = factor.gram_size
    # A gradient takes T p q products; Gram matrices take T^2 (p + q), and the weighted sum T p q after them.
    p, q = factor.module.weight.shape[0] // groups, factor.module.weight.shape[1:].numel()
    return is_cheaper_dense(length, p, q) or 2 * p * q <= length * (p + q)


@dataclass(frozen=True)
class _Standardized(Factor):
    """The gradients of a weight W that is standardised for each output channel before the convolution.

    With kernel = (W - mean)/s, s = sqrt(var + eps), a gradient G' of the kernel, already multiplied by gain/s, becomes
    P G', P = I - 1 1^T/q - kernel kernel^T/q (the backward pass of batch normalisation over a channel's q weights).
    """

    scaled: _Convolved  # the gradients G'
    kernel: Tensor  # the standardised weight, without the gain
    projection: Tensor  # (G' . kernel)/sqrt(q) of each example and output channel [n, O]

    @property
    def examples(self) -> int:
        return self.scaled.examples

    @cached_property
    def _fan_in(self) -> int:
        return self.kernel.shape[1:].numel()

    def squared_norm(self) -> tuple[Tensor, Tensor | None]:
        # Centred patches are the first projection of P; the second is subtracted from the squared norm.
        square, error = replace(self.scaled, is_centred=True).squared_norm()
        share = 2 - self.kernel.flatten(1).square().mean(1)
        removed = (share * self.projection.square()).sum(1)
        return square - removed, rounding(removed) + (rounding(square) if error is None else error)

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        _put(_projected(self.scaled.summed(weights).flatten(1), self.kernel).view_as(out), out, is_first)

    def sanitized(self, keep: Tensor) -> _Standardized:
        return replace(self, scaled=self.scaled.sanitized(keep), projection=zeroed(self.projection, keep))

    def dense(self, rows: slice = slice(None)) -> Tensor:
        return _projected(self.scaled.dense(rows).unflatten(1, (-1, self._fan_in)), self.kernel).flatten(1)


def standardized(module: Any, x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    """The gradients of the weight, and of the gain where there is one, of timm's `StdConv2d` and `ScaledStdConv2d`."""
    x, weight = _pad(module, x), module.weight.detach().flatten(1)
    centred = weight - weight.mean(1, keepdim=True)  # in two passes: torch's `var_mean` is many times slower
    deviation = (centred.square().mean(1, keepdim=True) + module.eps).sqrt()
    kernel = centred.div_(deviation).view_as(module.weight)
    gain = getattr(module, "gain", None)
    scale = gain.detach().view(-1) * module.scale if gain is not None else 1.0

    factor = scale / deviation.view(-1)
    plain = _Convolved(x, gradient, module, examples)
    if _is_dense(plain):
        dense = plain.all_dense().flatten(1, 2)  # [n, O, q]
        along = torch.linalg.vecdot(dense, kernel.flatten(1))
        result: Factor = Dense(_projected(dense.mul_(factor[:, None]), kernel).view(examples, *kernel.shape))
    else:
        output = F.conv2d(x, kernel, None, module.stride, 0, module.dilation, module.groups)
        along = (gradient * output).flatten(2).sum(2).view(examples, -1, len(kernel)).sum(1)
        scaled = replace(plain, gradient=gradient * factor.view(1, -1, 1, 1))
        result = _Standardized(scaled, kernel, along * factor / kernel[0].numel() ** 0.5)
    factors: dict[str, Factor] = {"weight": result}
    if gain is not None:
        factors["gain"] = Dense(along * module.scale)
    return factors


def _projected(gradient: Tensor, kernel: Tensor) -> Tensor:
    """P G' of `_Standardized`, for gradients [..., O, q] of the kernel, which are changed."""
    kernel = kernel.flatten(1)
    gradient.sub_(gradient.mean(-1, keepdim=True))
    return gradient.addcmul_(kernel, torch.linalg.vecdot(gradient, kernel).unsqueeze(-1), value=-1 / kernel.shape[1])
