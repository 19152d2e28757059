"""The error that clipping and noise bring into a gradient, and the bound at which it is least.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616, Theorem 5.2. For gradients g_1 ... g_n in d dimensions, all of them in the batch (Assumption 5.1),

    MSE(C) = || sum_i (g_i - clip_C(g_i)) ||^2 + C^2 sigma^2 d
           = || G - C N ||^2 + C^2 sigma^2 d,      G = sum_{i in I} g_i,  N = sum_{i in I} g_i / ||g_i||,

where I are the gradients longer than C. Everything is a *sum* over examples; of means, divide by n^2.

Not private: computed from raw gradients. Diagnostics only, never an input of a private run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import NonNegative, Range

_CHUNK = 2**17
"""Gradient coordinates that are worked on at once, in float64: about what a CPU's cache holds."""
_Limit = Annotated[float, Range(0, math.inf, "[]")]
"""A clipping bound or one of its limits: 0 leaves nothing of a gradient, infinity all."""


class MSE(NamedTuple):
    """Expected squared distance of the clipped, noised sum from the sum of the gradients, in its two parts."""

    bias: float
    noise: float

    @property
    def total(self) -> float:
        return self.bias + self.noise


def mse(gradients: Tensor, clip: float, noise_multiplier: float) -> MSE:
    """MSE(C) of the sum of `gradients`, at a bound C from 0 to infinity; else as `optimal_clip`. Not private."""
    fields.convert(clip, _Limit, "clip", {})
    norms = _norms(gradients, noise_multiplier)
    cut = torch.where(norms > clip, 1 - clip / norms, 0.0)  # the share of each gradient that clipping takes away
    lost = norms.new_zeros(gradients.shape[1])
    for share, rows in zip(_split(cut, gradients), _split(gradients, gradients), strict=True):
        lost += share @ rows.double()
    noise = (noise_multiplier * clip) ** 2 * gradients.shape[1] if noise_multiplier else 0.0
    return MSE(float(lost @ lost), noise)


def optimal_clip(gradients: Tensor, noise_multiplier: float) -> tuple[float, MSE]:
    """The bound C* that minimises MSE(C), exactly, and MSE(C*). Not private.

    It takes O(n log n + n d) time, and O(n + d) memory beside a chunk of the gradients.

    Between two neighbouring norms I is constant and MSE(C) a parabola, least at G.N / (N.N + sigma^2 d) or, where that
    lies outside, at the nearer norm. The least of these n minima is the global one. Without noise C* is the largest
    norm; where the directions of the gradients cancel, it may be 0.

    Args:
        gradients: one a row, shape [n, d]; of any type, worked on in float64.
        noise_multiplier: sigma >= 0; the noise has standard deviation sigma C in each coordinate.

    Raises:
        ConfigError: a value out of range, or a gradient that is not finite.
    """
    norms = _norms(gradients, noise_multiplier)
    variance = noise_multiplier**2 * gradients.shape[1]
    if not variance:  # the formula below would divide 0 by 0 where directions cancel
        return float(norms.max()), MSE(0.0, 0.0)
    clips, errors = map(torch.cat, zip(*_minima(gradients, norms, variance), strict=True))
    # Computed anew at C*, as the running sums have collected rounding errors.
    clip = float(clips[errors.argmin()])
    return clip, mse(gradients, clip, noise_multiplier)


def _minima(gradients: Tensor, norms: Tensor, variance: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The C of the least MSE between two neighbouring norms, and that MSE, from the longest norms down."""
    # In chunks, so that the running sums of all n gradients are never held at once.
    upper, order = norms.sort(descending=True)
    lower = torch.cat([upper[1:], upper.new_zeros(1)])
    G = N = upper.new_zeros(gradients.shape[1])
    for rows, high, low in zip(*(_split(part, gradients) for part in (order, upper, lower)), strict=True):
        g = gradients[rows].double()
        n = g / high.clamp(min=torch.finfo(high.dtype).tiny)[:, None]  # a gradient of zero has no direction
        G, N = g.cumsum_(0).add_(G), n.cumsum_(0).add_(N)  # row k: sums over all gradients longer than low[k]
        clip = ((G * N).sum(1) / (N.square().sum(1) + variance)).clamp(low, high)
        bias = torch.addcmul(G, clip[:, None], N, value=-1).square().sum(1)
        yield clip, bias + clip.square() * variance
        G, N = G[-1], N[-1]


def _norms(gradients: Tensor, noise_multiplier: float) -> Tensor:
    """The L2 norms in float64, shape [n]; refuses what has none."""
    fields.convert(noise_multiplier, NonNegative, "noise_multiplier", {})
    if gradients.ndim != 2 or not gradients.numel():
        raise ConfigError("gradients", tuple(gradients.shape), "expected at least one gradient: shape [n, d]")
    norms = torch.cat([torch.linalg.vector_norm(g.double(), dim=1) for g in _split(gradients, gradients)])
    if not bool(norms.isfinite().all()):
        bad = int((~norms.isfinite()).nonzero()[0])
        raise ConfigError("gradients", f"row {bad}", "expected finite gradients: leave out what an engine would")
    return norms


def _split(values: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
    """`values`, one for each gradient, in chunks for which `_CHUNK` coordinates are enough."""
    return values.split(max(1, _CHUNK // gradients.shape[1]))
