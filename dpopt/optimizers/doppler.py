"""DOPPLER (Zhang et al., "DOPPLER: Differentially private optimizers with low-pass filter for privacy noise reduction",
NeurIPS 2024, arXiv 2408.13460).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.fields import Finite, Positive
from dpopt.optimizers.base import Direction, directed, require_base
from dpopt.optimizers.dp_adam import DPAdam
from dpopt.types import Release, Vector

UNSETTLED, MOST_STEPS = 1e-6, 10**5
"""c_t has settled where so much of its start is left, or after so many steps."""


class State(NamedTuple):
    """DOPPLER's state, for a filter of order k.

    Attributes:
        theta: shape [d].
        memory: what the filter keeps of the gradients so far, shape [k, d].
        unit: what it keeps of a gradient that is always 1, shape [k].
        covariance: of the noise in `memory`, per coordinate, shape [k, k].
        base: the base direction's state.
    """

    theta: Vector
    memory: Tensor
    unit: Tensor
    covariance: Tensor
    base: Any


@dataclass(frozen=True)
class DOPPLER(Direction):
    r"""A low-pass filter in front of another direction: gradients change slowly, privacy noise does not.

        m_t = -sum_{tau >= 1} a_tau m_{t-tau} + sum_{tau >= 0} b_tau g_{t-tau}
        c_t = -sum_{tau >= 1} a_tau c_{t-tau} + sum_{0 <= tau <= t} b_tau
        theta_{t+1} = theta_t - lr G_t,    G_t the base's direction for the gradient m_t / c_t

    with m, c and g zero before the first step: division by c_t makes the filter pass a constant gradient unchanged from
    the first step on. The base is told the standard deviation of the noise in m_t / c_t, by recursion of the filter's
    covariance.

    The default filter leaves 0.071 of the noise's variance in the end. It also rings: c_t overshoots its limit by 60 %
    at step 69, and plain gradient descent through it is stable on a curvature of lambda for lr lambda < 0.0145 only,
    where without a filter 2 is the limit. So it wants far smaller learning rates than its base alone, and long runs.

    Args:
        base: any direction that looks at theta_t alone; its `lr` and `clip` play no part and must be left alone.
        lr, clip: see `Direction`.
        a: coefficients of the output's past, a_0 = 1 first; the roots of sum_tau a_tau z^-tau must lie inside the unit
            circle, so that the filter forgets.
        b: coefficients of the gradients; c_t, which is divided by, must be positive at every step.

    Deviations from the paper: none in the rule. m_t is computed in the transposed direct form, which keeps k vectors
    where the rule as written keeps 2k.
    """

    base: Direction = DPAdam()
    lr: Positive = 1e-3
    a: tuple[Finite, ...] = (1.0, -1.98342955, 0.98549544)
    b: tuple[Finite, ...] = (1.6332e-4, 3.2665e-4, 1.6332e-4)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_base(self.base, "DOPPLER", sees=("points", "observe"))
        if self.a[0] != 1:
            raise ConfigError("DOPPLER.a", self.a, "expected 1 first")
        if not self._slowest() < 1:
            raise ConfigError("DOPPLER.a", self.a, "expected a stable filter: all roots inside the unit circle")
        if (least := self._least_unit()) <= 0:
            raise ConfigError("DOPPLER.b", self.b, f"expected c_t > 0 at every step, as it divides; one is {least:g}")

    @property
    def _order(self) -> int:
        return max(len(self.a), len(self.b), 2) - 1

    @property
    def _taps(self) -> list[tuple[float, float]]:
        """The pairs (a_tau, b_tau), tau = 0..k, with zeros where one of the two is shorter."""
        a, b = ([*c, *(0.0,) * (self._order + 1 - len(c))] for c in (self.a, self.b))
        return list(zip(a, b, strict=True))

    def init(self, theta: Vector) -> State:
        k = self._order
        unit = theta.new_zeros(k, dtype=torch.float64)
        return State(theta, theta.new_zeros(k, len(theta)), unit, unit.new_zeros(k, k), self.base.init(theta))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        m, memory = self._filter(state.memory, gradient.value)
        c, unit = self._filter(state.unit, torch.ones_like(state.unit[0]))
        variance, covariance = self._noise(state.covariance, gradient.std)
        base = state.base._replace(theta=state.theta)
        direction, base = directed(self.base, base, Release(m.div_(c), variance.sqrt() / c))
        return direction, State(state.theta, memory, unit, covariance, base)

    def _filter(self, memory: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The filter's output for one more `value`, of its shape, and the next memory, shape [k, *value.shape]."""
        (_, b_0), *taps = self._taps
        output = torch.add(memory[0], value, alpha=b_0)
        shifted = [*memory[1:], torch.zeros_like(output)]
        rows = [
            torch.add(row, value, alpha=b).add_(output, alpha=-a) for row, (a, b) in zip(shifted, taps, strict=True)
        ]
        return output, torch.stack(rows)

    def _noise(self, covariance: Tensor, std: float | Tensor) -> tuple[Tensor, Tensor]:
        """The variance of the noise in m_t, and P_t = F P_{t-1} F' + sigma_w^2 h h' of that in the memory."""
        # The filter is linear: without a new gradient it multiplies each column of its memory by F, and a lone
        # gradient of size sigma_w leaves sigma_w h.
        silence = torch.zeros_like(covariance[0])
        spread = self._filter(self._filter(covariance, silence)[1].T, silence)[1]
        output, h = self._filter(silence, silence[0] + std)
        return covariance[0, 0] + output.square(), spread + torch.outer(h, h)

    def _slowest(self) -> float:
        """The factor by which what the filter remembers shrinks in a step, in the long run."""
        k = self._order
        _, transition = self._filter(torch.eye(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64))
        return float(torch.linalg.eigvals(transition).abs().max())

    def _least_unit(self) -> float:
        """The smallest c_t: of the steps until it has settled, and its limit."""
        slowest = self._slowest()
        settled = math.log(UNSETTLED) / math.log(slowest) if slowest > 0 else 0
        least, past = sum(self.b) / sum(self.a), [0.0] * self._order
        (_, b_0), *taps = self._taps
        for _ in range(min(self._order + 1 + math.ceil(settled), MOST_STEPS)):
            c = past[0] + b_0
            past = [kept + b - a * c for kept, (a, b) in zip([*past[1:], 0.0], taps, strict=True)]
            least = min(least, c)
        return least
