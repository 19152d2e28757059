"""HyFreeDP (Liu and Bu, "Towards hyperparameter-free optimization with differential privacy", ICLR 2025, Algorithm 1),
with the learning rate of GeN (Bu and Xu, "Gradient descent with generalized Newton's method", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.rules import Automatic
from dpopt.errors import ConfigError
from dpopt.fields import Count, Decay, Inflation, Positive, later
from dpopt.optimizers.base import Configured, Direction, descend, directed, require_base, scalar, scalars
from dpopt.optimizers.dp_adamw import DPAdamW
from dpopt.types import ClipRule, Oracle, Release, Vector

SATURATED = 0.9
"""Losses from this share of R_l on are taken for clipped ones, which say nothing."""
LEAST_BOUND = 1e-3
"""The smallest R_l."""


class State(NamedTuple):
    """HyFreeDP's state.

    Attributes:
        theta: shape [d].
        base: the base direction's state.
        eta: learning rate.
        bound: clipping bound R_l of the next probe round's losses.
    """

    theta: Vector
    base: Any
    eta: Tensor
    bound: Tensor


@dataclass(frozen=True)
class HyFreeDP(Configured):
    r"""The learning rate is the minimiser of a parabola through privatised losses along the update direction.

    Every step takes G_t = base direction of the private gradient, and

        theta_{t+1} = theta_t - eta G_t.

    Each K-th step first probes L_j = private mean loss at theta_t + j eta G_t, j = -m..m (m = 1: three probes), fits

        slope      b = sum_j j L_j / (eta sum_j j^2)                        m = 1: (L_+ - L_-)/(2 eta)
        curvature  a = 2 sum_j c_j L_j / (eta^2 sum_j c_j^2),
                   c_j = j^2 - mean(j^2)                                    m = 1: (L_+ - 2 L_0 + L_-)/eta^2

    (least squares with a free intercept), and sets eta <- b/a, used in this very step. L_- lies in the descent
    direction, so b > 0 where G_t descends. The next round clips its losses at R_l = sum of this round's losses.

    The gradient noise is `noise_inflation` times what plain DP-SGD needs for the same epsilon; the losses spend exactly
    what is left, all releases of one draw composed *before* subsampling amplification. Cost of a step: 1 + 2/(3K) of
    the base's.

    Args:
        base: any direction; its `lr` and `clip` play no part and must be left alone.
        lr: initial eta.
        clip: of the gradients; automatic clipping stands for "R_g -> 0+".
        probe_every: K, in steps.
        probes: 2m + 1, odd, at least 3.
        noise_inflation: gamma > 1 of Eq. 10.
        probe_batch: "same" probes the draw that the gradient came from; "fresh" takes a draw of its own, which costs
            one of the plan's draws and is skipped where none is left.
        bound: "conservative" sets R_l to the sum of the round's losses (section 4.1, in practice), "literal" to L_0
            (Algorithm 1), which can never grow, as E[L_0] <= R_l.
        initial_bound: R_l of the first round.
        smoothing: eta <- smoothing eta + (1 - smoothing) b/a; GeN's code uses 0.9.
        guards: "signs": eta changes only if a > 0, b > 0 and L_0 < 0.9 R_l (a concave or uphill fit has no minimum
            ahead, and saturated losses make equal probes); "clamp": b/a is clamped to [eta/2, 2 eta], as in GeN's code;
            "gen": both; "none": Algorithm 1 as printed.

    Deviations from the paper, which states no guards: those of `guards`, but for "none"; and eta changes only if b/a is
    a number other than 0 (an eta that noise has shrunk below 1e-300 leaves none). With five probes or more the
    parabola's intercept is free, while Eq. 6 holds it at L_0, which gives other rates: losses of 1.0, 1.3, 1.5, 1.9 and
    2.6 at eta = 0.1 give 0.266 here and 0.248 there. R_l has a floor of 1e-3. Losses are clipped to [0, R_l]
    and centred at R_l/2, which halves their sensitivity. The accounting is the joint one; the paper's
    (`dpopt.audit.published`) spends more than it states. Algorithm 1 as printed pairs eta_j with L(theta + eta_j G)
    while Eq. 6 models L(theta - eta_j m); taken literally together, b changes its sign.
    """

    base: Direction = DPAdamW()
    lr: Positive = 1e-4
    clip: ClipRule = Automatic()
    probe_every: Count = 5
    probes: Count = 3
    noise_inflation: Inflation = 1.01
    probe_batch: Literal["same", "fresh"] = "same"
    bound: Literal["conservative", "literal"] = "conservative"
    initial_bound: Positive = 1.0
    smoothing: Decay = 0.0
    guards: Literal["gen", "clamp", "signs", "none"] = later("gen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probes < 3 or self.probes % 2 == 0:
            raise ConfigError("HyFreeDP.probes", self.probes, "expected an odd number, at least 3")
        require_base(self.base, "HyFreeDP")

    def init(self, theta: Vector) -> Any:
        return State(theta, self.base.init(theta), scalar(theta, self.lr), scalar(theta, self.initial_bound))

    def step(self, state: Any, oracle: Oracle) -> Any:
        theta, base, eta, bound = state.theta, state.base, state.eta, state.bound
        is_probing, losses = self._is_probing(oracle), None
        with oracle.draw() as batch:
            gradient = self.base.observe(base, batch, self.clip)
            direction, base = directed(self.base, base, gradient)
            if is_probing and self.probe_batch == "same":
                losses = batch.losses(self._probe_points(theta, eta, direction), bound)
        if is_probing and self.probe_batch == "fresh" and oracle.draws_left:
            with oracle.draw() as batch:
                losses = batch.losses(self._probe_points(theta, eta, direction), bound)
        if losses is not None:
            state = self._adapted(state, losses)
        theta = descend(theta, direction, state.eta)
        return state._replace(theta=theta, base=base._replace(theta=theta))

    def _is_probing(self, oracle: Oracle) -> bool:
        """True if this step is a multiple of K; a fresh probe draw makes a round of K steps K + 1 draws long."""
        draws_taken = oracle.draws_total - oracle.draws_left
        draws_per_round = self.probe_every + (self.probe_batch == "fresh")
        return draws_taken % draws_per_round == 0

    def _probe_points(self, theta: Vector, eta: Tensor, direction: Vector) -> list[Vector]:
        # The middle point is theta itself: its losses are known from the gradient's forward pass.
        m = self.probes // 2
        return [descend(theta, direction, -j * eta) if j else theta for j in range(-m, m + 1)]

    def _adapted(self, state: Any, losses: Release) -> Any:
        """The state with the eta and R_l that follow from a round's losses, shape [2m + 1], at j = -m..m."""
        m, value, eta = self.probes // 2, losses.value, state.eta
        j = scalars(value, range(-m, m + 1))
        c = j.square() - j.square().mean()
        b = (j * value).sum() / (eta * j.square().sum())
        a = 2 * (c * value).sum() / (eta.square() * c.square().sum())

        newton = torch.clamp(b / a, eta / 2, 2 * eta) if self.guards in ("gen", "clamp") else b / a
        is_usable = newton.isfinite() & (newton != 0)
        if self.guards in ("gen", "signs"):
            is_usable &= (a > 0) & (b > 0) & (value[m] < SATURATED * state.bound)
        smoothed = self.smoothing * eta + (1 - self.smoothing) * newton
        return state._replace(eta=torch.where(is_usable, smoothed, eta), bound=self._next_bound(value))

    def _next_bound(self, losses: Tensor) -> Tensor:
        bound = losses.sum() if self.bound == "conservative" else losses[self.probes // 2]
        return bound.clamp(min=LEAST_BOUND)
