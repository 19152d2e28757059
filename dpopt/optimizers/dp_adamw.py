"""DP-AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, Algorithm 2), private gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpopt.fields import NonNegative
from dpopt.optimizers.dp_adam import DPAdam, State
from dpopt.types import Release, Vector


@dataclass(frozen=True)
class DPAdamW(DPAdam):
    r"""`DPAdam` with decoupled weight decay:

        theta_t = (1 - lr weight_decay) theta_{t-1} - lr mhat_t / (sqrt(vhat_t) + eps)

    Args:
        lr, clip, betas, eps: see `DPAdam`.
        weight_decay: lambda; 0.01 is the default of `torch.optim.AdamW`.

    Deviation from the paper: the decay is scaled by lr, as PyTorch does, so it is part of the direction.
    """

    weight_decay: NonNegative = 0.01

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        adam, advanced = super().direction(state, gradient)
        return torch.add(adam, state.theta, alpha=self.weight_decay), advanced
