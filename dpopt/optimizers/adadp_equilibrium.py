"""DP-SGD at the constant learning rate at which ADADP comes to rest where noise is all it sees (Koskela and Honkela,
"Learning rate adaptation for differentially private learning", AISTATS 2020, section 4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpopt.clipping.rules import Abadi
from dpopt.fields import Positive
from dpopt.optimizers.adadp import State
from dpopt.optimizers.base import Configured, descend, scalar
from dpopt.types import ClipRule, Oracle, Vector


@dataclass(frozen=True)
class ADADPEquilibrium(Configured):
    r"""DP-SGD whose learning rate makes the expected error estimate of ADADP equal to its tolerance.

        eta* = tau sqrt(2) / (sigma_w sqrt(d)),    sigma_w = sigma C / B
        theta_{t+1} = theta_t - min(eta*, lr) g_t

    By Theorem 10, E err^2 = eta^2 d sigma_w^2 / 2 where the two gradients of a step differ by their noise alone. What
    ADADP gains over this constant is what its adaptation is worth. Needs public numbers only, and one draw a step.

    A constant rate keeps the noise of its last steps in theta. An average of the parameters takes most of that away and
    costs no privacy: `average` of `fit` and of a suite's row, 0.95 say, which reaches back about twenty steps.

    Args:
        tau: ADADP's tolerance.
        lr: the largest learning rate; without noise, where there is no equilibrium, it is the learning rate.
        clip: how one example's gradient is bounded.

    The state's eta is that of the step just taken; at first, `lr`. An ablation, not in the paper.
    """

    tau: Positive = 1.0
    lr: Positive = 10.0
    clip: ClipRule = Abadi(1.0)

    def init(self, theta: Vector) -> State:
        return State(theta, scalar(theta, self.lr))

    def step(self, state: State, oracle: Oracle) -> State:
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip)
        noise = scalar(state.theta, math.sqrt(oracle.dimension / 2)) * gradient.std
        eta = (self.tau / noise).clamp(max=self.lr)
        return State(descend(state.theta, gradient.value, eta), eta)
