"""What one step of DP-SGD can gain, and what it does gain.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616, Theorem 5.4. Let L be the mean loss of n examples, L-smooth with a constant of at most 1/eta, and let the
step use all of them (Assumption 5.1):

    theta+ = theta - eta g~,      g~ = (1/n) (sum_i clip_C(g_i) + sigma C xi),      xi ~ N(0, I_d)
    E L(theta+) <= L(theta) - (eta/2) ||grad L||^2 + (eta/2) MSE

Here MSE = E ||g~ - grad L||^2 is that of the *means*: `optimal_clip`'s MSE of the sums, divided by n^2. For smoothness
1/eta gives L(theta+) <= L - eta <grad L, g~> + (eta/2) ||g~||^2 = L - (eta/2) ||grad L||^2 + (eta/2) ||g~ - grad L||^2.

Not private: computed from raw gradients and losses. Diagnostics only, never an input of a private run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dpopt import fields
from dpopt.clipping import Abadi, ClippingEngine
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, NonNegative, Positive
from dpopt.study.optimal_clip import MSE
from dpopt.types import Vector

POINTS = 8
"""Losses after a step are computed for that many draws of the noise at once."""


class Descent(NamedTuple):
    """One step of DP-SGD from theta, as the theorem bounds it and as it was measured.

    Attributes:
        loss: L(theta), the mean over all examples.
        gradient: ||grad L(theta)||^2.
        mse: expected squared error of the private mean gradient, in its parts.
        bound: the theorem's upper bound on the expected loss after the step, if L is smooth enough.
        measured: mean loss after the step, over draws of the noise.
        std_error: standard error of `measured`.
    """

    loss: float
    gradient: float
    mse: MSE
    bound: float
    measured: float
    std_error: float


def descent_bound(loss: float, gradient: float, mse: float, lr: float) -> float:
    """The bound of Theorem 5.4, for a loss whose gradient is Lipschitz with a constant of at most 1/lr.

    Args:
        loss: L(theta), a mean.
        gradient: ||grad L(theta)||^2.
        mse: expected squared error of the private mean gradient.
        lr: step size eta.
    """
    return loss - lr / 2 * gradient + lr / 2 * mse


def descent(
    engine: ClippingEngine,
    x: Tensor,
    y: Tensor,
    theta: Vector,
    *,
    clip: float,
    noise_multiplier: float,
    lr: float,
    draws: int = 64,
    seed: int = 0,
) -> Descent:
    """Bound and measure the loss after one full-batch step of DP-SGD from `theta`. Not private.

    Args:
        engine: of a model without randomness (in evaluation mode), at whatever parameters.
        x, y: all examples, shapes [n, ...].
        theta: shape [d].
        clip: bound C of Abadi's rule.
        noise_multiplier: sigma >= 0.
        lr: step size eta.
        draws: steps that are measured, each with its own noise; at least 2.
        seed: of the noise.

    Raises:
        ConfigError: a value out of range, or an infinite bound with noise.
    """
    _check(x, clip, noise_multiplier, lr, draws)
    clipped, gradient = (_mean_gradient(engine, x, y, theta, bound) for bound in (clip, math.inf))
    std = noise_multiplier * clip / len(x) if noise_multiplier else 0.0
    error = MSE(float((gradient - clipped).square().sum()), std**2 * engine.dimension)
    noise = torch.Generator(theta.device).manual_seed(seed)
    after = torch.cat(
        [_losses(engine, x, y, theta - lr * (clipped + std * xi)) for xi in _gaussians(draws, clipped, noise)]
    )
    loss, squared = float(_losses(engine, x, y, theta[None])), float(gradient.square().sum())
    bound = descent_bound(loss, squared, error.total, lr)
    return Descent(loss, squared, error, bound, float(after.mean()), float(after.std()) / math.sqrt(draws))


def _check(x: Tensor, clip: float, noise_multiplier: float, lr: float, draws: int) -> None:
    hints = {"clip": (clip, Bound), "noise_multiplier": (noise_multiplier, NonNegative)}
    hints |= {"lr": (lr, Positive), "draws": (draws, Count)}
    for name, (value, hint) in hints.items():
        fields.convert(value, hint, name, {})
    if draws < 2:
        raise ConfigError("draws", draws, "expected at least 2: a single one has no standard error")
    if noise_multiplier and clip == math.inf:
        raise ConfigError("clip", clip, "expected a finite bound where there is noise")
    if not len(x):
        raise ConfigError("x", 0, "expected at least one example")


def _parts(engine: ClippingEngine, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Physical batches (x, y, mask) of all examples, none of them masked out."""
    size = engine.physical_batch(len(x))
    for part, targets in zip(x.split(size), y.split(size), strict=True):
        yield part, targets, torch.ones(len(part), dtype=torch.bool, device=part.device)


def _mean_gradient(engine: ClippingEngine, x: Tensor, y: Tensor, theta: Vector, clip: float) -> Vector:
    """The mean of all examples' gradients, each clipped; shape [d], float64."""
    total = torch.zeros(engine.dimension, dtype=torch.float64, device=theta.device)
    for part, targets, mask in _parts(engine, x, y):
        total += engine.clipped_sum([(1.0, theta)], part, targets, mask, Abadi(clip))
    return total / len(x)


def _losses(engine: ClippingEngine, x: Tensor, y: Tensor, thetas: Tensor) -> Tensor:
    """The mean loss at each of `thetas`, shape [k, d] -> [k], float64."""
    points = list(thetas.to(engine.theta.dtype))
    total = torch.zeros(len(points), dtype=torch.float64, device=thetas.device)
    for part, targets, mask in _parts(engine, x, y):
        total += engine.losses(points, part, targets, mask).double().sum(dim=1)
    return total / len(x)


def _gaussians(count: int, like: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """`count` standard normal vectors in blocks of at most `POINTS`, shape [k, d]."""
    for block in torch.arange(count).split(POINTS):
        size = (len(block), len(like))
        yield torch.randn(size, generator=generator, dtype=like.dtype, device=like.device)
