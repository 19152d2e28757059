"""An average of the parameters on the way: post-processing, so it costs no privacy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.fields import Decay
from dpopt.optimizers.base import Configured
from dpopt.types import ClipRule, Optimizer, Oracle, Vector


class State(NamedTuple):
    """The average, shape [d], the optimizer's own state, and the sum of the weights, decay^0 + ... + decay^(t-1)."""

    theta: Vector
    base: Any
    weight: Tensor

    @property
    def eta(self) -> Tensor:
        """The optimizer's own learning rate, where it has one."""
        return self.base.eta

    @property
    def bound(self) -> Tensor:
        """The optimizer's own clipping bound, where it has one."""
        return self.base.bound


@dataclass(frozen=True)
class Averaged(Configured):
    """Steps as another optimizer does, and averages its parameters theta_1..theta_t with weights that decay.

        average_t = sum_k decay^(t - k) theta_k / sum_k decay^(t - k)

    The start theta_0 has no share in it, so no warm-up is needed (as in Adam's bias correction). What is released, and
    what it costs, is the other optimizer's. De et al. 2022 (arXiv 2204.13650) found that it helps.

    It has no name in the registry: `average` of `fit` and of a suite's row puts it around any optimizer. The
    `averaging` of `torch_optim` is another one, polynomial in t, which belongs to the paper of DoG.

    Args:
        base: the optimizer; it never sees the average.
        decay: with 0 the average is the last theta. It reaches back about 1/(1 - decay) steps.
    """

    base: Optimizer
    decay: Decay

    @property
    def clip(self) -> ClipRule | None:
        """The other optimizer's; so are the next two, which `calibrate` asks for."""
        return getattr(self.base, "clip", None)

    @property
    def noise_inflation(self) -> float | None:
        return getattr(self.base, "noise_inflation", None)

    @property
    def shares(self) -> Mapping[str, float]:
        return getattr(self.base, "shares", {})

    def init(self, theta: Vector) -> State:
        return State(theta, self.base.init(theta), theta.new_zeros(()))

    def step(self, state: State, oracle: Oracle) -> State:
        base = self.base.step(state.base, oracle)
        weight = 1 + self.decay * state.weight
        return State(torch.lerp(state.theta, base.theta, 1 / weight), base, weight)
