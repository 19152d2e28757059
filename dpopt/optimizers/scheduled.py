"""Learning-rate schedules: any direction with a step size that is a function of the draws taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor

from dpopt.clipping.rules import Abadi
from dpopt.fields import NonNegative, Positive, Range
from dpopt.optimizers.base import Configured, Direction, descend, directed, expected_epoch, require_base, scalar
from dpopt.optimizers.dp_adamw import DPAdamW
from dpopt.types import ClipRule, Oracle, Vector

_INVERSE_TIME = 0.1
"""Decay per epoch of Eq. 5.1."""


class State(NamedTuple):
    """theta_t, shape [d], the base direction's state, and the size eta of the step just taken (at first, lr)."""

    theta: Vector
    base: Any
    eta: Tensor


@dataclass(frozen=True)
class Scheduled(Configured):
    r"""A direction G_t whose step size follows a schedule over the T draws of the plan.

        theta_{t+1} = theta_t - eta_t G_t,    t = 0..T-1,    W = ceil(warmup T)
        eta_t = lr (t + 1)/W                                           for t < W
        eta_t = lr s(p),    p = (t - W)/(T - W)                        for t >= W
        s(p) = 1 (constant),    1 - (1 - final) p (linear),    final + (1 - final) (1 + cos(pi p))/2 (cosine),
               1 for p < 1/2, then 1/(1 + 0.1 k) in the k-th epoch from there (inverse_time)

    Position in the schedule is public: it is read off the oracle's counters. One draw a step.

    Args:
        base: any direction; its `lr` and `clip` play no part and must be left alone.
        lr: largest step size.
        clip: how one example's gradient is bounded.
        schedule: shape of the decay.
        warmup: share of all draws in which the step size rises to lr.
        final: what a linear or cosine decay leads to, as a share of lr; it would be reached at draw T, one after the
            last.

    After the warm-up this is `torch.optim.lr_scheduler.CosineAnnealingLR` (Loshchilov and Hutter, ICLR 2017, without
    restarts) or `LinearLR`; "inverse_time" is that of Koskela and Honkela (AISTATS 2020, Eq. 5.1), in expected epochs,
    draws times rate. The warm-up is that of the transformers library, moved by one step: its first step has
    size 0 and so would spend a draw on nothing.
    """

    base: Direction = DPAdamW()
    lr: Positive = 1e-2
    clip: ClipRule = Abadi(1.0)
    schedule: Literal["constant", "linear", "cosine", "inverse_time"] = "cosine"
    warmup: Annotated[float, Range(0, 1, "[)")] = 0.0
    final: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_base(self.base, "Scheduled")

    def init(self, theta: Vector) -> State:
        return State(theta, self.base.init(theta), scalar(theta, self.lr))

    def step(self, state: State, oracle: Oracle) -> State:
        taken = oracle.draws_total - oracle.draws_left
        eta = scalar(state.theta, self.lr * self.share(taken, oracle.draws_total, oracle.rate))
        with oracle.draw() as batch:
            gradient = self.base.observe(state.base, batch, self.clip)
        direction, base = directed(self.base, state.base, gradient)
        theta = descend(state.theta, direction, eta)
        return State(theta, base._replace(theta=theta), eta)

    def share(self, taken: int, total: int, rate: float) -> float:
        """The step size after `taken` of `total` draws, as a share of lr."""
        rising = math.ceil(self.warmup * total - 1e-9)  # 0.07 * 100 is a hair more than 7
        if taken < rising:
            return (taken + 1) / rising
        progress = (taken - rising) / (total - rising)
        if self.schedule == "inverse_time":
            since = (progress - 0.5) * (total - rising)
            return 1.0 if since < 0 else 1 / (1 + _INVERSE_TIME * expected_epoch(since, rate))
        decayed = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}
        return 1 - (1 - self.final) * decayed[self.schedule]
