"""HyFreeDP's releases, read with their noise in mind: the learning rate grows until curvature shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.fields import Factor
from dpopt.optimizers.base import scalar
from dpopt.optimizers.hyfreedp import SATURATED, HyFreeDP
from dpopt.types import Release, Vector


class State(NamedTuple):
    """The state of `HyFreeDP`, and `is_usable`: 1 as soon as one round's losses were not saturated, 0 before."""

    theta: Vector
    base: Any
    eta: Tensor
    bound: Tensor
    is_usable: Tensor


@dataclass(frozen=True)
class NoiseAwareHyFreeDP(HyFreeDP):
    r"""HyFreeDP with another rule for eta, from the same three losses; draws, releases and ledger are HyFreeDP's.

    Losses L_-, L_0, L_+ are released at theta_t - h G_t, theta_t and theta_t + h G_t with noise of standard deviation
    s, which is public. With D_1 = L_+ - L_- and D_2 = L_+ - 2 L_0 + L_-,

        h    = reach eta,   reach = 2 sqrt(3) / phi,   phi = 1 - beta
        eta <- clamp(phi h max(D_1, 0) / (2 D_2), eta/2, growth eta)    where D_2 > sqrt(6) s   (curvature shows)
               eta                                                      else, where D_1 < -sqrt(2) s  (uphill)
               growth eta                                               else
               eta/2                                                    where L_0 >= 0.9 R_l    (saturated losses);
                                                                        eta while all rounds were saturated

    beta is Adam's beta_1 or the momentum of SGD, of the innermost base direction: one gradient acts on about 1/phi
    steps, which share the Newton step. A filter around that direction (DOPPLER, DiSK) makes gradients act for longer,
    which is not counted.

    Why: docs/decisions/optimizers.md.

    Args:
        growth: how much eta grows at most in a round.
        probes: three.
        base, lr, clip, probe_every, noise_inflation, probe_batch, bound, initial_bound: see `HyFreeDP`.

    Deviations: this is not in the HyFreeDP paper, whose rule is `HyFreeDP`. There is no smoothing. Where all of a round
    is noise, eta grows in most rounds; what ends it is curvature, or losses that saturate.
    """

    revision: ClassVar[int] = 2
    growth: Factor = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probes != 3:
            raise ConfigError("NoiseAwareHyFreeDP.probes", self.probes, "expected 3")
        for key, value in {"smoothing": 0.0, "guards": "gen"}.items():
            if getattr(self, key) != value:
                raise ConfigError(f"NoiseAwareHyFreeDP.{key}", getattr(self, key), f"expected {value}")

    @property
    def phi(self) -> float:
        """One over the number of steps on which a gradient acts."""
        return 1 - _decay(self.base)

    @property
    def reach(self) -> float:
        """Distance of the probes, as a multiple of eta."""
        return 2 * math.sqrt(3) / self.phi

    def init(self, theta: Vector) -> State:
        begun = super().init(theta)
        return State(begun.theta, begun.base, begun.eta, begun.bound, scalar(theta))

    def _probe_points(self, theta: Vector, eta: Tensor, direction: Vector) -> list[Vector]:
        return super()._probe_points(theta, self.reach * eta, direction)

    def _adapted(self, state: State, losses: Release) -> State:
        eta, (minus, zero, plus), s = state.eta, losses.value, losses.std
        first, second = plus - minus, plus - 2 * zero + minus
        newton = self.phi * self.reach * eta * first.clamp(min=0) / (2 * second)
        followed = torch.clamp(newton, eta / 2, self.growth * eta)
        unseen = torch.where(first < -math.sqrt(2) * s, eta, self.growth * eta)
        moved = torch.where(second > math.sqrt(6) * s, followed, unseen)

        is_saturated = zero >= SATURATED * state.bound
        kept = torch.where(state.is_usable > 0, eta / 2, eta)
        following = torch.where(is_saturated, kept, moved)
        following = torch.where(following.isfinite() & (following > 0), following, eta)
        usable = torch.where(is_saturated, state.is_usable, torch.ones_like(state.is_usable))
        return state._replace(eta=following, bound=self._next_bound(losses.value), is_usable=usable)


def _decay(base: Any) -> float:
    """The decay of the average of gradients that a direction uses; 0 if it uses none."""
    if hasattr(base, "base"):
        return _decay(base.base)
    return base.betas[0] if hasattr(base, "betas") else getattr(base, "momentum", 0.0)
