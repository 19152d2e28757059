"""DP-MicroAdam (Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and frugal algorithm for training and
fine-tuning", 2025, arXiv 2511.20509).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpopt.fields import Decay, Few, Fraction, Positive
from dpopt.optimizers.base import Direction, scalar
from dpopt.types import Release, Vector


class State(NamedTuple):
    """DPMicroAdam's state.

    Attributes:
        theta: shape [d].
        error: e_t, what was not passed on so far, shape [d].
        places, values: the coordinates I_i of the window's gradients and their V_i, oldest first, shape [window, k].
        t: number of steps taken.
    """

    theta: Vector
    error: Vector
    places: Tensor
    values: Tensor
    t: Tensor


@dataclass(frozen=True)
class DPMicroAdam(Direction):
    r"""Adam over a window of the largest coordinates of private gradients g_t; the others wait for later steps.

        a_t = g_t + e_t;    I_t: the k = ceil(density d) coordinates of largest |a_t|,    V_t = a_t[I_t]
        e_{t+1} = a_t, with zeros at I_t;    e_1 = 0
        mhat_t = (1 - beta1) / (1 - beta1^t) sum_i beta1^(t-i) V_i,    the `window` last i, each V_i at I_i, else 0
        vhat_t = (1 - beta2) / (1 - beta2^t) sum_i beta2^(t-i) V_i^2
        theta_{t+1} = theta_t - lr mhat_t / (sqrt(vhat_t) + eps)

    A coordinate moves only while one of its values is in the window. While it waits, its gradients add up, and their
    noise adds up more slowly.

    Args:
        lr, clip: see `Direction`.
        betas, eps: as in `DPAdam`.
        density: share of the coordinates that a step passes on.
        window: number of gradients that are kept.

    Deviations: the abstract and the authors' code were read. There the k coordinates are chosen in each tensor of
    parameters, here among all of them, and there is weight decay. By summaries of it, the paper keeps e_t in few bits;
    the code does not, nor does this.
    """

    lr: Positive = 1e-2
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    density: Fraction = 0.01
    window: Few = 10

    def init(self, theta: Vector) -> State:
        values = theta.new_zeros(self.window, math.ceil(self.density * len(theta)))
        return State(theta, torch.zeros_like(theta), values.long(), values, scalar(theta))

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        (beta1, beta2), a, t = self.betas, gradient.value + state.error, state.t + 1
        place = a.abs().topk(state.values.shape[1]).indices
        value = a[place]
        places, values = torch.cat([state.places[1:], place[None]]), torch.cat([state.values[1:], value[None]])
        m, v = torch.zeros_like(a), torch.zeros_like(a)
        # One row at a time: none names a coordinate twice (but 0, with zeros), so that a GPU's sums have one order.
        for age, where, what in zip(range(self.window - 1, -1, -1), places, values, strict=True):
            m.scatter_add_(0, where, (1 - beta1) * beta1**age * what)
            v.scatter_add_(0, where, (1 - beta2) * beta2**age * what.square())
        mhat, vhat = m / (1 - beta1**t), v / (1 - beta2**t)
        state = state._replace(error=a.scatter(0, place, 0.0), places=places, values=values, t=t)
        return mhat.div_(vhat.sqrt_().add_(self.eps)), state
