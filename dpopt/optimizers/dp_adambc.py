"""DP-AdamBC (Tang, Shpilevskiy and Lecuyer, "DP-AdamBC: Your DP-Adam is actually DP-SGD (unless you apply bias
correction)", AAAI 2024, arXiv 2312.14334, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpopt.fields import Decay, Positive
from dpopt.optimizers.base import Direction, ema, ema_square, scalar
from dpopt.optimizers.dp_adam import State
from dpopt.types import Release, Vector


@dataclass(frozen=True)
class DPAdamBC(Direction):
    r"""Adam with the variance of the privacy noise taken out of the second moment.

        m_t = beta1 m_{t-1} + (1 - beta1) g_t,      mhat_t = m_t / (1 - beta1^t)
        v_t = beta2 v_{t-1} + (1 - beta2) g_t^2,    vhat_t = v_t / (1 - beta2^t)
        theta_t = theta_{t-1} - lr mhat_t / sqrt(max(vhat_t - sigma_w^2, gamma'))

    where sigma_w = sigma C / B is the standard deviation of the noise in g_t; the paper writes Phi for its square.
    Where the floor gamma' holds, the step is that of momentum SGD with learning rate lr / sqrt(gamma'), so the two are
    to be tuned together.

    Args:
        lr, clip: see `Direction`.
        betas: decays (beta1, beta2) of the moments.
        eps_v: gamma'. The default is `FiBeR`'s; the authors' code has 1e-8, and sets 1e-9 for CIFAR-10 and 7e-9 for
            QNLI in its examples.

    Deviations from the paper: Poisson sampling and division by the expected batch; the default of gamma'. The
    authors' code can also let gamma' decay, which its examples leave off.
    """

    lr: Positive = 3e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps_v: Positive = 1e-6

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta), torch.zeros_like(theta), scalar(theta))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        (beta1, beta2), g, t = self.betas, gradient.value, state.t + 1
        m, v = ema(state.m, g, beta1), ema_square(state.v, g, beta2)
        mhat, vhat = m / (1 - beta1**t), v / (1 - beta2**t)
        corrected = vhat.sub_(gradient.std**2).clamp_(min=self.eps_v)
        return mhat.div_(corrected.sqrt_()), state._replace(m=m, v=v, t=t)
