"""DP-MacAdam (Tasnim, Sankar and Kosut, "DP-MacAdam: Differentially private mechanism with adaptive clipping and
adaptive momentum", 2026, arXiv 2606.05435).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.fields import Positive
from dpopt.optimizers.adaclip import check_range, shifted, spread
from dpopt.optimizers.base import ema, scalar
from dpopt.optimizers.dp_adam import DPAdam
from dpopt.types import Batch, ClipRule, Release, Vector


class State(NamedTuple):
    """theta_t, Adam's moments, the number t of steps taken, the average s_t of squared deviations, the bounds b_t."""

    theta: Vector
    m: Vector
    v: Vector
    t: Tensor
    s: Vector
    b: Vector


@dataclass(frozen=True)
class DPMacAdam(DPAdam):
    r"""Adam, whose first moment is subtracted before clipping, and whose gradients' spread scales each coordinate.

        g_t = b_{t-1} ((1/B) sum_xi clip((grad f(theta_{t-1}; xi) - mhat_{t-1}) / b_{t-1}, C) + w_t) + mhat_{t-1}
        s_t = beta1 s_{t-1} + (1 - beta1) (g_t - mhat_t)^2,     kappa_t = 2 (beta1 - beta1^t) / (1 + beta1)
        shat_t = min(max(s_t / kappa_t - (sigma_w b_{t-1})^2, least), most),     w_t ~ N(0, sigma_w^2 I)
        b_t = sqrt(sqrt(shat_t) sum_j sqrt(shat_t[j])),     b_0 = b_1 = 1
        m_t, v_t, mhat_t, theta_t: Adam's, see `DPAdam`

    Args:
        lr, eps: see `DPAdam`.
        betas: see `DPAdam`; beta1 > 0, as it averages s_t too.
        clip: of the shifted and scaled gradients.
        least, most: of a variance; h1 and h2 there.

    Raises:
        ConfigError: beta1 is 0, or `least` is above `most`.

    Deviations: of the paper the abstract was read, and a summary by others of its algorithm, from which the rule is.
    kappa_1 is 0, so b_1 is b_0; `least` and `most` were chosen here, on nothing.
    """

    least: Positive = 1e-10
    most: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self)
        if not self.betas[0]:
            raise ConfigError("DPMacAdam.betas", self.betas, "expected a first decay > 0")

    def init(self, theta: Vector) -> Any:
        zeros = torch.zeros_like(theta)
        return State(theta, zeros, zeros, scalar(theta), zeros, torch.ones_like(theta))

    def observe(self, state: Any, batch: Batch, clip: ClipRule) -> Release:
        beta1 = self.betas[0]
        mean = state.m / (1 - beta1**state.t).clamp(min=1 - beta1)  # m_0 is 0
        return shifted(self, state, batch, clip, state.b, mean)

    def direction(self, state: Any, gradient: Release) -> tuple[Vector, Any]:
        direction, state = super().direction(state, gradient)
        beta1, t = self.betas[0], state.t
        s = ema(state.s, (gradient.value - state.m / (1 - beta1**t)).square(), beta1)
        kappa = 2 * (beta1 - beta1**t) / (1 + beta1)
        b = spread((s / kappa - gradient.std**2).clamp(self.least, self.most))
        return direction, state._replace(s=s, b=torch.where(t > 1, b, state.b))
