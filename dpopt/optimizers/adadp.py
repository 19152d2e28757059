"""ADADP (Koskela and Honkela, "Learning rate adaptation for differentially private learning", AISTATS 2020,
Algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.rules import Abadi
from dpopt.fields import Positive
from dpopt.optimizers.base import Configured, descend, scalar
from dpopt.types import ClipRule, Oracle, Vector


class State(NamedTuple):
    """theta_l, shape [d], and the learning rate eta_l."""

    theta: Vector
    eta: Tensor


@dataclass(frozen=True)
class ADADP(Configured):
    r"""One full step against two half steps; their difference sets the next learning rate.

        G1 = private gradient at theta_l (one draw),                 full = theta_l - eta_l G1
        G2 = private gradient at theta_l - eta_l/2 G1 (a new draw),  half = theta_l - eta_l/2 (G1 + G2)
        err = || |full - half| / max(1, |full|) ||_2                                                  (Eq. 4.1)
        theta_{l+1} = full (or half), or theta_l where `reject` and err > tau
        eta_{l+1} = clip(tau/err, shrink, grow) eta_l

    Two draws a step, so half as many steps as DP-SGD for the same epsilon (Theorem 9). An odd last draw is spent on one
    plain step of size eta.

    Args:
        lr: initial learning rate eta_0.
        tau: tolerance; None means sqrt(d / 2T) for T steps (section 4.2).
        clip: how one example's gradient is bounded.
        shrink, grow: the paper's alpha_min and alpha_max.
        factor: "linear" (paper) or "sqrt" (the authors' code): clip(sqrt(tau/err), ...).
        keep: "full" (paper) or "half" (the authors' code): which point is kept.
        reject: discard steps with err > tau. The paper does so for the mixture model and omits it for networks.
        error_scale: err is multiplied by it; the authors' code carries each weight ten times, which is sqrt(10).

    Deviations from the paper: Poisson sampling; the paper partitions permuted data and accounts for it as Poisson. The
    printed rule (the defaults for `factor`, `keep` and `error_scale`) is not what the authors' code runs.
    """

    conformance_exceptions: ClassVar[Mapping[str, str]] = {
        "every_release_changes_the_end": "the last gradient sets the size of a step that is not taken"
    }

    lr: Positive = 0.1
    tau: Positive | None = 1.0
    clip: ClipRule = Abadi(1.0)
    shrink: Positive = 0.9
    grow: Positive = 1.1
    factor: Literal["linear", "sqrt"] = "linear"
    keep: Literal["full", "half"] = "full"
    reject: bool = False
    error_scale: Positive = 1.0

    def init(self, theta: Vector) -> State:
        return State(theta, scalar(theta, self.lr))

    def step(self, state: State, oracle: Oracle) -> State:
        theta, eta = state
        is_last_odd = oracle.draws_left == 1
        g1 = self._gradient(oracle, theta)
        full = descend(theta, g1, eta)
        if is_last_odd:
            return State(full, eta)
        middle = descend(theta, g1, eta / 2)
        half = descend(middle, self._gradient(oracle, middle), eta / 2)

        tau = math.sqrt(oracle.dimension / (2 * (oracle.draws_total // 2))) if self.tau is None else self.tau
        error = self.error_scale * torch.linalg.vector_norm((full - half).div_(full.abs().clamp_(min=1)))
        kept = full if self.keep == "full" else half
        if self.reject:
            kept = torch.where(error > tau, theta, kept)
        ratio = tau / error.double()
        ratio = ratio.sqrt() if self.factor == "sqrt" else ratio
        return State(kept, ratio.clamp(self.shrink, self.grow) * eta)

    def _gradient(self, oracle: Oracle, theta: Vector) -> Vector:
        with oracle.draw() as batch:
            return batch.gradient(theta, self.clip).value
