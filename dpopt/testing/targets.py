"""Functions without data or noise that every optimizer should make smaller, and an oracle that answers from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.flat import clip_factors
from dpopt.privacy.data import sums
from dpopt.privacy.oracle import AnyKind, BaseOracle
from dpopt.privacy.queries import Asked, Gradient, Space
from dpopt.types import Vector


class Target(NamedTuple):
    """A function of a vector of shape [d], whose least value is 0, and where to start."""

    name: str
    start: Vector
    objective: Callable[[Vector], Tensor]


def _quadratic(theta: Vector) -> Tensor:
    """|theta - (1, -1, 1, -1, ...)|^2 / 2."""
    return (theta - _signs(theta)).square().sum() / 2


def _ill_conditioned(theta: Vector) -> Tensor:
    """A quadratic whose curvatures go from 0.01 to 1."""
    return (torch.logspace(-2, 0, len(theta)) * (theta - _signs(theta)).square()).sum() / 2


def _matrix_regression(theta: Vector) -> Tensor:
    """|X W - Y|^2 / 2n for W [4, 3] and n = 6 rows of X, with Y = X W for the W of ones and minus ones."""
    x = torch.cos(torch.arange(24.0).square()).view(6, 4)
    return (x @ (theta - _signs(theta)).view(4, 3)).square().sum() / 12


def _mixed_shapes(theta: Vector) -> Tensor:
    """A sum for a scalar s, a vector b [3] and a matrix W [4, 3] in one vector, of curvatures 3, 1/3 and W's above."""
    scalar, vector, _ = (theta - _signs(theta)).tensor_split([1, 4])
    return 1.5 * scalar.square().sum() + vector.square().sum() / 6 + _matrix_regression(theta[4:])


class Exact(BaseOracle):
    """Answers with one function's own gradients and values, clipped as those of the only record; nothing is noised."""

    def __init__(self, target: Target, draws: int) -> None:
        space = Space(len(target.start), target.start.dtype, target.start.device)
        super().__init__(space=space, rate=1.0, expected_batch=1.0, draws=draws, noise=AnyKind(0.0))
        self._objective = target.objective
        self._norm = torch.full((1,), torch.nan)

    def _sum(self, asked: Asked, records: Any) -> Tensor:
        query, counts = asked.query, torch.ones(1, dtype=torch.bool)
        if not isinstance(query, Gradient):
            values = [self._objective(theta) for theta in query.probed]
            losses = torch.stack(values).double().unsqueeze(1) if values else torch.zeros(0, 1, dtype=torch.float64)
            return sums(asked, losses, self._norm, counts)
        gradient = torch.stack([weight * self._slope(theta) for weight, theta in query.points]).sum(dim=0)
        gradient = gradient if query.scale is None else gradient * query.scale
        # A query of counts refers to the last gradient.
        self._norm = gradient.norm().view(1)
        return (clip_factors(query.clip, self._norm, counts) * gradient).nan_to_num()

    def _slope(self, theta: Vector) -> Vector:
        with torch.enable_grad():
            point = theta.detach().requires_grad_()
            return torch.autograd.grad(self._objective(point), point)[0]


def _signs(like: Tensor) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(len(like), device=like.device) % 2).to(like.dtype)


TARGETS = (
    Target("a quadratic", torch.zeros(10), _quadratic),
    Target("an ill-conditioned quadratic", torch.zeros(10), _ill_conditioned),
    Target("a matrix regression", torch.zeros(12), _matrix_regression),
    Target("a sum over mixed shapes", torch.zeros(16), _mixed_shapes),
)
