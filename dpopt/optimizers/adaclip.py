"""AdaCliP (Pichapati, Suresh, Yu, Reddi and Kumar, "AdaCliP: Adaptive clipping for private SGD", 2019, arXiv
1908.07643).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dpopt.errors import ConfigError
from dpopt.fields import Decay, Positive
from dpopt.optimizers.base import Direction, ema
from dpopt.types import Batch, ClipRule, Release, Vector


class State(NamedTuple):
    """theta_t, and the moving averages of the gradient and of its variance in each coordinate; all of shape [d]."""

    theta: Vector
    m: Vector
    v: Vector


@dataclass(frozen=True)
class AdaClip(Direction):
    r"""Gradients are clipped after their mean was subtracted and each coordinate divided by its own bound b_t.

        b_t = sqrt(s_t sum_j s_t[j]),   s_t = sqrt(v_t)
        g_t = b_t ((1/B) sum_xi clip((grad f(theta_t; xi) - m_t) / b_t, C) + w_t) + m_t,     w_t ~ N(0, sigma_w^2 I)
        v_{t+1} = beta2 v_t + (1 - beta2) min(max((g_t - m_t)^2 - (sigma_w b_t)^2, least), most)
        m_{t+1} = beta1 m_t + (1 - beta1) g_t
        theta_{t+1} = theta_t - lr g_t

    So a coordinate that varies little gets little noise, and all that steers this was released before. A record that is
    not in a draw contributes nothing, m_t is added back once whatever the draw, and the sensitivity is C.

    Args:
        lr, clip: see `Direction`; `clip` is of the shifted and scaled gradients.
        betas: (beta1, beta2).
        initial_bound: v_0 = initial_bound^2 / d, so that the first gradient is clipped at `initial_bound` C.
        least, most: of an observed variance; h1 and h2 there.

    Raises:
        ConfigError: `least` is above `most`.

    Deviations: of the paper the abstract was read; the rule is that of a public implementation by others and of what
    DP-MacAdam's authors say of it. v_0, `least` and `most` were chosen here, on nothing.
    """

    betas: tuple[Decay, Decay] = (0.99, 0.9)
    initial_bound: Positive = 1.0
    least: Positive = 1e-12
    most: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self)

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta), torch.full_like(theta, self.initial_bound**2 / len(theta)))

    def observe(self, state: State, batch: Batch, clip: ClipRule) -> Release:
        return shifted(self, state, batch, clip, spread(state.v), state.m)

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        (beta1, beta2), g, m = self.betas, gradient.value, state.m
        variance = ((g - m).square() - gradient.std**2).clamp(self.least, self.most)
        return g, state._replace(m=ema(m, g, beta1), v=ema(state.v, variance, beta2))


def check_range(optimizer: Any) -> None:
    """Raise `ConfigError` where `least` is above `most`."""
    if optimizer.least > optimizer.most:
        least = f"{type(optimizer).__name__}.least"
        raise ConfigError(least, optimizer.least, f"expected at most the {optimizer.most} of `most`")


def spread(variance: Vector) -> Vector:
    """The bound of each coordinate: sqrt(s sum_j s[j]) for deviations s, which adds the least noise in all."""
    deviation = variance.sqrt()
    return (deviation * deviation.sum()).sqrt_()


def shifted(base: Direction, state: Any, batch: Batch, clip: ClipRule, bound: Vector, mean: Vector) -> Release:
    """The private gradient at the points of `base`, clipped as (g - mean) / bound."""
    release = batch.gradient(base.points(state), clip, 1 / bound, mean)
    return Release(release.value * bound, release.std * bound)
