"""DPZero (Zhang, Li, Thekumparampil, Oh and He, "DPZero: Private fine-tuning of language models without
backpropagation", ICML 2024, arXiv 2310.09639).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dpopt.fields import Positive
from dpopt.optimizers.base import Configured, descend, scalar
from dpopt.types import Number, Oracle, Query, Record, Vector

_WORD = 2**32 - 1
"""The bits of a random number."""


class State(NamedTuple):
    """theta_t, shape [d]."""

    theta: Vector


@dataclass(frozen=True)
class Contrast(Query):
    """The mean of (loss at the first point - loss at the second) / distance, clipped to [-bound, bound] per record."""

    kind: ClassVar[str] = "contrasts"
    at: Sequence[Vector]
    distance: Number
    bound: Number

    @property
    def probed(self) -> Sequence[Vector]:
        return self.at

    @property
    def sensitivity(self) -> Number:
        return self.bound

    def contribution(self, record: Record) -> Tensor:
        contrast = (record.losses[:1] - record.losses[1:]) / self.distance
        return contrast.clamp(min=-self.bound).clamp(max=self.bound)


@dataclass(frozen=True)
class DPZero(Configured):
    r"""A step along a random direction u_t, as long as two losses say: no gradient is computed.

        s_t(xi) = (f(theta_t + smoothing u_t; xi) - f(theta_t - smoothing u_t; xi)) / (2 smoothing),    u_t ~ N(0, I)
        r_t = (1/B) sum_xi min(max(s_t(xi), -C), C) + w_t,    w_t ~ N(0, (sigma C / B)^2)
        theta_{t+1} = theta_t - lr r_t u_t

    u_t is public, and the one number r_t is all that is released: its noise does not grow with d. But one direction
    tells little of d, so that the method wants many draws. One draw and two forward passes a step.

    Args:
        lr: step size.
        bound: C, of a record's slope along u_t, which is about as large as the norm of its gradient.
        smoothing: `lam` in the authors' code.

    Deviations: of the paper the abstract alone was read; the rule is that of the authors' code. Poisson sampling, and
    division by the expected batch. u_t is a function of the draw's number and d, the same in all runs. Their script
    `dpzero.py` adds noise to the mean slope anew for each tensor of parameters, and so uses several noised values of
    one number; here there is one.
    """

    lr: Positive = 0.02
    bound: Positive = 5.0
    smoothing: Positive = 1e-3

    def init(self, theta: Vector) -> State:
        return State(theta)

    def step(self, state: State, oracle: Oracle) -> State:
        theta = state.theta
        u = normal(theta, oracle.draws_total - oracle.draws_left)
        points = [theta + self.smoothing * u, theta - self.smoothing * u]
        with oracle.draw() as batch:
            r = batch.ask(Contrast(points, 2 * self.smoothing, self.bound)).value[0]
        return State(descend(theta, u, scalar(theta, self.lr) * r))


def normal(like: Vector, number: int) -> Vector:
    """A standard normal vector [d] such as `like`: a function of `number` and d, on any device."""
    # Whole numbers are hashed, as the generators of two devices differ; the mixing is lowbias32 of hash-prospector.
    place = torch.ones_like(like, dtype=torch.int64).cumsum(0)
    word = _mixed(_mixed(place) ^ (number * 0x9E3779B9 & _WORD))
    # 23 bits, so that float32 holds a uniform number that is neither 0 nor 1.
    return torch.special.ndtri(((word >> 9).to(like.dtype) + 0.5) * 2.0**-23)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ word >> 16) * 0x7FEB352D & _WORD
    word = (word ^ word >> 15) * 0x846CA68B & _WORD
    return word ^ word >> 16
