"""Adaptive clipping (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with adaptive clipping",
NeurIPS 2021, Algorithm 1), over any direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.rules import AtBound
from dpopt.fields import Decay, Inflation, Positive
from dpopt.optimizers.base import Configured, Direction, descend, directed, require_base, scalar
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.types import Oracle, Release, Vector

_SMALLEST = 1e-6
"""The least clipping bound."""


class State(NamedTuple):
    """theta_t, shape [d], the base direction's state, and the clipping bound C_t."""

    theta: Vector
    base: Any
    bound: Tensor


@dataclass(frozen=True)
class AdaptiveClip(Configured):
    r"""The clipping bound follows a quantile of the gradients' norms, by a noised count in each draw.

        g_t     = (1/B) sum_xi clip(grad f(theta_t; xi), C_t) + w_t,    w_t ~ N(0, (sigma C_t / B)^2 I)
        b_t     = (1/B) (sum_xi (1[|grad f(theta_t; xi)| <= C_t] - 1/2) + noise) + 1/2
        C_{t+1} = C_t exp(-clip_lr (b_t - quantile))
        theta_{t+1} = theta_t - lr G_t,    G_t = base direction of g_t

    Gradient and count come from one draw and are charged jointly: the gradient's noise is `noise_inflation` times what
    it needs alone for the same epsilon, and the count spends exactly what is left (the paper's Theorem 1 solves the
    same equation for the gradient's share).

    Args:
        base: any direction; its `lr` and `clip` play no part and must be left alone.
        lr: step size.
        initial_bound: C_0.
        quantile: share of gradients that are to stay unclipped; the paper's gamma, 0.5 for the median.
        clip_lr: eta_C of the geometric update.
        noise_inflation: > 1; see above.

    Deviations from the paper, which is about federated averaging: one record stands for one user; Poisson sampling. It
    sets the count's noise to B/20 and lets the gradient's follow; here one number shares the budget whatever B is. The
    count is centred at 1/2, as there, which halves its sensitivity. b_t is clamped to [0, 1] and C_t to at least 1e-6.
    The public code (`QuantileAdaptiveClipSumQuery` of TensorFlow Privacy) takes all of these and both noises as
    arguments, recommends 0.5, 0.2 and B/20, and leaves their joint cost to its caller.
    """

    base: Direction = DPSGD()
    lr: Positive = 0.5
    initial_bound: Positive = 0.1
    quantile: Decay = 0.5
    clip_lr: Positive = 0.2
    noise_inflation: Inflation = 1.001

    def __post_init__(self) -> None:
        super().__post_init__()
        require_base(self.base, "AdaptiveClip")

    def init(self, theta: Vector) -> State:
        return State(theta, self.base.init(theta), scalar(theta, self.initial_bound))

    def step(self, state: State, oracle: Oracle) -> State:
        theta, base, bound = state
        with oracle.draw() as batch:
            normalized = self.base.observe(base, batch, AtBound(bound))
            share = batch.below(bound).value[0].clamp(0, 1)
        # Clipping at C is normalised clipping (sensitivity 1) times C: so the bound may be a released number.
        direction, base = directed(self.base, base, Release(normalized.value * bound, normalized.std * bound))
        theta = descend(theta, direction, scalar(theta, self.lr))
        bound = (bound * torch.exp(-self.clip_lr * (share - self.quantile))).clamp(min=_SMALLEST)
        return State(theta, base._replace(theta=theta), bound)
