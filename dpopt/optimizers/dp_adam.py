"""DP-Adam: Adam (Kingma and Ba, ICLR 2015, Algorithm 1) on the private gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpopt.fields import Decay, Positive
from dpopt.optimizers.base import Direction, ema, ema_square, scalar
from dpopt.types import Release, Vector


class State(NamedTuple):
    """theta_t, the moments m_t and v_t (shape [d]), and the number t of steps taken."""

    theta: Vector
    m: Vector
    v: Vector
    t: Tensor


@dataclass(frozen=True)
class DPAdam(Direction):
    r"""Adam with the private gradient g_t in place of the gradient.

        m_t = beta1 m_{t-1} + (1 - beta1) g_t,      mhat_t = m_t / (1 - beta1^t)
        v_t = beta2 v_{t-1} + (1 - beta2) g_t^2,    vhat_t = v_t / (1 - beta2^t)
        theta_t = theta_{t-1} - lr mhat_t / (sqrt(vhat_t) + eps)

    Args:
        lr, clip: see `Direction`.
        betas: decays (beta1, beta2) of the moments.
        eps: added outside the root, as `torch.optim.Adam` does.

    The noise inflates v_t by its variance; `fiber` subtracts it.
    """

    lr: Positive = 1e-2
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta), torch.zeros_like(theta), scalar(theta))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        (beta1, beta2), g, t = self.betas, gradient.value, state.t + 1
        m, v = ema(state.m, g, beta1), ema_square(state.v, g, beta2)
        mhat, vhat = m / (1 - beta1**t), v / (1 - beta2**t)
        return mhat.div_(vhat.sqrt_().add_(self.eps)), state._replace(m=m, v=v, t=t)
