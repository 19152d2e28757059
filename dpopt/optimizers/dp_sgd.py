"""DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dpopt.fields import Decay, NonNegative, Positive
from dpopt.optimizers.base import Direction
from dpopt.types import Release, Vector


class State(NamedTuple):
    """theta_t and the momentum buffer b_t, both of shape [d]; without momentum the buffer is empty."""

    theta: Vector
    momentum: Vector


@dataclass(frozen=True)
class DPSGD(Direction):
    r"""Stochastic gradient descent on the private gradient g_t.

        b_t     = momentum b_{t-1} + (g_t + weight_decay theta_t),   b_{-1} = 0
        theta_{t+1} = theta_t - lr b_t

    Args:
        lr, clip: see `Direction`.
        momentum: 0 gives plain SGD.
        weight_decay: L2 penalty, added to the gradient as `torch.optim.SGD` does.

    Deviations from the paper: Poisson sampling (the paper's analysis, not its code) and division by the expected batch.
    Momentum and weight decay are not in the paper.
    """

    lr: Positive = 0.5
    momentum: Decay = 0.0
    weight_decay: NonNegative = 0.0

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta) if self.momentum else theta.new_zeros(0))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        g = gradient.value
        if self.weight_decay:
            g = torch.add(g, state.theta, alpha=self.weight_decay)
        if not self.momentum:
            return g, state
        b = torch.add(g, state.momentum, alpha=self.momentum)
        return b, state._replace(momentum=b)
