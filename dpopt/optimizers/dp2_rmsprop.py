"""DP2-RMSProp (Li, Zaheer, Liu, Reddi, McMahan and Smith, "Differentially private adaptive optimization with delayed
preconditioners", ICLR 2023, arXiv 2212.00309).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dpopt.clipping.rules import Abadi
from dpopt.fields import Decay, Positive
from dpopt.optimizers.base import Configured, descend, ema_square, scalar
from dpopt.types import ClipRule, Oracle, Vector


class State(NamedTuple):
    """theta_t, the sum G of the private gradients of this phase, and the preconditioner's A; all of shape [d]."""

    theta: Vector
    total: Vector
    a: Vector


@dataclass(frozen=True)
class DP2RMSProp(Configured):
    r"""DP-SGD, whose averaged gradients make a preconditioner, and RMSProp with it, in turns of s draws each.

        DP-SGD:   g_t = (1/B) sum_xi clip(grad f(theta_t; xi), C_1) + w_t,    theta_{t+1} = theta_t - lr g_t
                  after s draws:  A <- gamma A + (1 - gamma) (mean of the s last g_t)^2,    A = 0 at first
        RMSProp:  g_t = (1/B) sum_xi clip(grad f(theta_t; xi) / (sqrt(A) + eps), C_2) + w_t
                  theta_{t+1} = theta_t - scaled_lr g_t,    the same A for s draws

    The noise in the mean is sqrt(s) times smaller than in one gradient, and noise is added after scaling, so a small
    sqrt(A) does not amplify it. A is a function of earlier releases, so the sensitivity is C_2. One draw a step.

    Args:
        lr, clip: of the draws of DP-SGD; C_1.
        scaled_lr: of the draws with a preconditioner; None means `lr`.
        scaled_clip: of scaled gradients; C_2. None means `clip`.
        interval: s in expected epochs, at least one draw.
        gamma: decay of A.
        eps: added to the root.

    Deviations: of the paper the abstract alone was read; the rule, gamma and eps are those of the authors' code, which
    also has one s for both kinds of turn, and takes lr for a `scaled_lr` that is not set. Its C_2 has a default of its
    own, and its interval is a number of steps. Poisson sampling, and division by the expected batch.
    """

    lr: Positive = 0.5
    scaled_lr: Positive | None = None
    clip: ClipRule = Abadi(1.0)
    scaled_clip: ClipRule | None = None
    interval: Positive = 1.0
    gamma: Decay = 0.9
    eps: Positive = 1e-8

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta), torch.zeros_like(theta))

    def step(self, state: State, oracle: Oracle) -> State:
        theta, total, a = state
        s = max(1, round(self.interval / oracle.rate))
        place = (oracle.draws_total - oracle.draws_left) % (2 * s)
        with oracle.draw() as batch:
            if place >= s:
                scale = 1 / a.sqrt().add_(self.eps)
                g = batch.gradient(theta, self.scaled_clip or self.clip, scale).value
                return State(descend(theta, g, scalar(theta, self.scaled_lr or self.lr)), total, a)
            g = batch.gradient(theta, self.clip).value
        total = total + g
        if place == s - 1:
            total, a = torch.zeros_like(total), ema_square(a, total / s, self.gamma)
        return State(descend(theta, g, scalar(theta, self.lr)), total, a)
