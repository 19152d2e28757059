"""ADADP first, then DP-SGD at the decaying learning rate that it found (Koskela and Honkela, "Learning rate adaptation
for differentially private learning", AISTATS 2020, section 5.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dpopt.fields import NonNegative, Positive
from dpopt.optimizers import adadp
from dpopt.optimizers.base import descend, expected_epoch, scalar
from dpopt.types import Oracle, Vector


class State(NamedTuple):
    """ADADPHybrid's state.

    Attributes:
        theta: shape [d].
        eta: effective learning rate: while ADADP runs, that of its next step; after the switch, that of the last step.
        adaptive_eta: ADADP's learning rate; eta_50 after the switch.
    """

    theta: Vector
    eta: Tensor
    adaptive_eta: Tensor


@dataclass(frozen=True)
class ADADPHybrid(adadp.ADADP):
    r"""`ADADP` up to a switch, then DP-SGD:

        theta_{l+1} = theta_l - eta_k G,    eta_k = eta_50 / (1 + decay (k - 50))                     (Eq. 5.1)

    where eta_50 is ADADP's last learning rate, after 50 of 100 epochs, and k the number of the epoch that the step is
    in: a whole number, 51 in the first epoch after the switch. An ADADP step takes two draws, a DP-SGD step one.

    Args:
        lr, tau, clip, shrink, grow, factor, keep, reject, error_scale: see `ADADP`; the T of tau = sqrt(d / 2T) is half
            of all draws here too, though fewer of the steps are ADADP's.
        adaptive_epochs: epochs of ADADP; None means half of all draws, the paper's 50 of 100.
        decay: per epoch.

    Deviations from the paper: epochs are expected ones, draws times rate, counted from the switch. ADADP's share of an
    odd number of draws is one less, and DP-SGD starts with the draw that is left. The authors' public code runs ADADP
    to the end.
    """

    adaptive_epochs: Positive | None = None
    decay: NonNegative = 0.1

    def init(self, theta: Vector) -> State:  # type: ignore[override]
        eta = scalar(theta, self.lr)
        return State(theta, eta, eta)

    def step(self, state: State, oracle: Oracle) -> State:  # type: ignore[override]
        theta, _, adaptive_eta = state
        since_switch = oracle.draws_total - oracle.draws_left - self._switch(oracle)
        if since_switch < 0:
            theta, adaptive_eta = super().step(adadp.State(theta, adaptive_eta), oracle)
            return State(theta, adaptive_eta, adaptive_eta)
        eta = adaptive_eta / (1 + self.decay * expected_epoch(since_switch, oracle.rate))
        return State(descend(theta, self._gradient(oracle, theta), eta), eta, adaptive_eta)

    def _switch(self, oracle: Oracle) -> int:
        """Draws that ADADP takes: an even number."""
        adaptive = oracle.draws_total / 2 if self.adaptive_epochs is None else self.adaptive_epochs / oracle.rate
        return 2 * math.floor(adaptive / 2 + 1e-9)
