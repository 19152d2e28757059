"""DiSK (Zhang et al., "DiSK: Differentially private optimizer with simplified Kalman filter for noise reduction", ICLR
2025, arXiv 2410.03883).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.fields import Fraction, Positive
from dpopt.optimizers.base import Direction, directed, require_base, scalar, two_points
from dpopt.optimizers.dp_adam import DPAdam
from dpopt.types import Release, Vector


class State(NamedTuple):
    """DiSK's state; vectors have shape [d].

    Attributes:
        theta, previous: theta_t and theta_{t-1}.
        filtered: the filtered gradient g_t.
        variance: of the noise in each coordinate of `filtered`.
        base: the base direction's state.
    """

    theta: Vector
    previous: Vector
    filtered: Vector
    variance: Tensor
    base: Any


@dataclass(frozen=True)
class DiSK(Direction):
    r"""A two-point observation and a Kalman filter of constant gain, in front of another direction.

        u_t(xi) = a grad f(theta_t + gamma d_{t-1}; xi) + (1 - a) grad f(theta_t; xi),   d_{t-1} = theta_t - theta_{t-1}
        u_t     = (1/B) sum_xi clip(u_t(xi), C) + w_t,    w_t ~ N(0, sigma_w^2 I),        a = (1 - kappa)/(kappa gamma)
        g_t     = (1 - kappa) g_{t-1} + kappa u_t
        theta_{t+1} = theta_t - lr G_t,    G_t the base's direction for the gradient g_t

    The second point predicts how the gradient has changed since the last step, so that the filter lags less. The base
    is told the standard deviation of the noise in g_t, sigma_t^2 = (1 - kappa)^2 sigma_{t-1}^2 + kappa^2 sigma_w^2. One
    draw and two gradient evaluations a step.

    Args:
        base: any direction that looks at theta_t alone; its `lr` and `clip` play no part and must be left alone.
        lr, clip: see `Direction`.
        kappa: gain of the filter; kappa = 1 is the base alone.
        gamma: how far ahead the second point lies, in steps; both defaults are the paper's code's.

    Deviations from the paper: none in the rule. From the authors' code in Opacus's research folder: here g_{-1} = 0,
    there the filter starts at the first gradient. There, one variant combines the two gradients of an example and then
    clips, the one for fast gradient clipping clips at each point and then combines, which has sensitivity
    (|a| + |1 - a|) C; both divide the noise by sqrt(a^2 + (1 - a)^2), and so add too little where a > 1 and more than
    needed where 0 < a < 1. Here the combination is clipped once: its sensitivity is C for any a.
    """

    base: Direction = DPAdam()
    lr: Positive = 1e-2
    kappa: Fraction = 0.7
    gamma: Positive = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_base(self.base, "DiSK", sees=("points", "observe"))

    def init(self, theta: Vector) -> State:
        return State(theta, theta, torch.zeros_like(theta), scalar(theta), self.base.init(theta))

    def points(self, state: State) -> Sequence[tuple[float, Vector]]:
        return two_points(state.theta, state.previous, self.kappa, self.gamma)

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        theta, kappa = state.theta, self.kappa
        filtered = torch.lerp(state.filtered, gradient.value, kappa)
        variance = (1 - kappa) ** 2 * state.variance + (kappa * gradient.std) ** 2
        base = state.base._replace(theta=theta)
        direction, base = directed(self.base, base, Release(filtered, variance.sqrt()))
        return direction, State(theta, theta, filtered, variance, base)
