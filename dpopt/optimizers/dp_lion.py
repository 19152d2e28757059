"""DP-Lion: Lion (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, arXiv 2302.06675) on the
private gradient; without its betas DP-SignSGD (Monzio Compagnoni et al., ICLR 2026, arXiv 2603.03226).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dpopt.fields import Decay, NonNegative, Positive
from dpopt.optimizers.base import Direction, ema
from dpopt.types import Release, Vector


class State(NamedTuple):
    """theta_t and the momentum m_t, both of shape [d]."""

    theta: Vector
    m: Vector


@dataclass(frozen=True)
class DPLion(Direction):
    r"""The sign of an average of the private gradients g_t: every coordinate moves by lr.

        c_t = beta1 m_{t-1} + (1 - beta1) g_t,    m_t = beta2 m_{t-1} + (1 - beta2) g_t,    m_0 = 0
        theta_t = theta_{t-1} - lr (sign(c_t) + weight_decay theta_{t-1})

    Neither the size of the noise nor the clipping bound changes the length of a step, so one learning rate may serve
    several epsilons. DP-SignSGD is beta1 = 0, where m_t plays no part.

    Args:
        lr, clip: see `Direction`.
        betas: (beta1, beta2).
        weight_decay: decoupled, as Lion's.

    Deviations: Lion's paper is not about privacy, and no rule of DP-Lion's authors was read: this is Lion with g_t in
    place of the gradient. Of the paper of DP-SignSGD the abstract alone was read. That the best learning rate
    hardly depends on epsilon is its claim for DP-SignSGD.
    """

    lr: Positive = 3e-3
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: NonNegative = 0.0

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        (beta1, beta2), g = self.betas, gradient.value
        direction = ema(state.m, g, beta1).sign_()
        if self.weight_decay:
            direction.add_(state.theta, alpha=self.weight_decay)
        return direction, state._replace(m=ema(state.m, g, beta2))
