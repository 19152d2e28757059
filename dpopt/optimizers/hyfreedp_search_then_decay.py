"""HyFreeDP's releases, spent on a short trial run that finds the learning rate of one with a linear decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dpopt.clipping.rules import Automatic
from dpopt.fields import Count, Inflation, Positive
from dpopt.optimizers.base import Configured, Direction, descend, directed, require_one_point, require_plain, scalar
from dpopt.optimizers.dp_adamw import DPAdamW
from dpopt.optimizers.hyfreedp import LEAST_BOUND, SATURATED
from dpopt.optimizers.scheduled import Scheduled
from dpopt.types import Batch, ClipRule, Oracle, Release, Vector

FAR, NEAR = 16.0, 0.5
"""Distance c of the probes before and after curvature is seen; FAR is also the most that eta changes by in a round."""
DECAY = Scheduled(schedule="linear")


class State(NamedTuple):
    """The state of `HyFreeDPSearchThenDecay`.

    Attributes:
        theta, start: where the run is, and where it began and returns to; shape [d].
        base: the base direction's state.
        eta: largest step size; it is decayed where a step is taken.
        bound: clipping bound R_l of the next round's losses.
        rounds: k, rounds since curvature was seen, that one included.
        is_usable: 1 as soon as the losses of one round were not saturated, 0 before.
    """

    theta: Vector
    start: Vector
    base: Any
    eta: Tensor
    bound: Tensor
    rounds: Tensor
    is_usable: Tensor


@dataclass(frozen=True)
class HyFreeDPSearchThenDecay(Configured):
    r"""A trial run of N draws, each with three losses, finds eta; then training starts again, with a linear decay.

    The trial, in draws t = 0..N-1 of T, N = min(rounds, ceil(T/probe_every)), f_t = 1 - t/T, k = 0 to begin with:

        G_t      base direction, of the private gradient at theta_0 while k = 0, else at theta_t
        Delta    = theta_t - f_t eta G_t - theta_0
        L_-, L_0, L_+   released losses at theta_0 + (1 - c) Delta, theta_0 + Delta, theta_0 + (1 + c) Delta
        D_1      = L_- - L_+,   D_2 = L_- - 2 L_0 + L_+,   s = standard deviation of one loss's noise, which is public
        x        = 1 + c D_1/(2 D_2), the parabola's minimum    where D_2 > z sqrt(6) s         (curvature shows)
                   1/16                                         else, where D_1 < -3 sqrt(2) s  (uphill)
                   16                                           else
                   1/16, or 1 while all rounds were saturated   where L_0 >= 0.9 R_l            (saturated losses)
        x        <- clamp(x, 1/16, 16)^(1/(1 + k)),   eta <- x eta,   theta_{t+1} = theta_0 + x Delta
        R_l      <- L_- + L_0 + L_+
        k        <- k + 1 where curvature shows, or showed before, and L_0 < 0.9 R_l
        c, z     = 16, 4 while k = 0; then 1/2, 1

    After it theta_N = theta_0, while the base's moments stay, and theta_{t+1} = theta_t - f_t eta G_t without losses. A
    trial that takes all draws keeps its end.
    Where no curvature was seen in any round, eta is `lr` again.

    What follows from the noise being known. D_1 and D_2 have standard deviations sqrt(2) s and sqrt(6) s on noise
    alone, and D_2 > 4 sqrt(6) s once in 31,600 rounds. A probe costs the same wherever it lies and moves nothing, while
    D_1 grows with c and D_2 with c^2: so the first probes lie far ahead. While nothing is seen 16 displacements ahead,
    going there does no harm that could be measured, so eta may be 16 times larger. Curvature shows in time: where eta
    has become too large, L_- and L_+ lie on both sides of the valley, or saturate. On noise alone eta grows until then.

    What follows from the displacement. theta_t - theta_0 is eta times the sum of all f_i G_i so far, so x asks how long
    the whole trial should have been. Its signal grows with the number of draws, its noise with their root; the
    minimum along one direction G_t is short-sighted beside it. Asked of a whole run it would be too long, as a clipped
    loss hardly punishes a displacement that is.

    What is a choice. N = 10, which balances the two. The exponent 1/(1 + k): each round changes log eta by its share of
    a mean. FAR, NEAR and the thresholds. Of the trial only the base's moments are kept, as a run of few draws would
    otherwise begin without any. The decay, after which less of the noise stays in theta. R_l begins at 10,
    above log(classes), as saturated rounds are lost; HyFreeDP's begins at 1. All were made on validation records.

    What it cannot do. The trial has N - 1 factors of 16 at most, and several rounds must be left for the mean: from
    1e-8 to 1e-2 that takes T of about 50 and more. Should the first loss lie above 0.9 R_l because `lr` is far too
    large, R_l grows up to it before eta falls.

    Ledger: that of `HyFreeDP` at equal `probe_every` and `noise_inflation`, with its rounds of losses in the first
    draws, and no more of them than `rounds`.

    Args:
        base: any direction that looks at theta_t alone, as the trial does not move by its steps; its `lr` and `clip`
            play no part and must be left alone.
        lr: eta of the first draw.
        clip: of the gradients.
        noise_inflation: gamma > 1: the gradients' noise over what plain DP-SGD needs; losses spend what is left.
        rounds: largest number of draws of the trial.
        probe_every: K: the trial takes at most every K-th of the draws, as many as HyFreeDP probes.
        initial_bound: R_l of the first round.

    After HyFreeDP (Liu and Bu, ICLR 2025), whose paper has no such rule: from there are the private losses as the only
    sight of a learning rate, their clipping at R_l, the division of the budget by gamma, and automatic clipping.
    Deviations: probes are consecutive draws, lie along the displacement in place of the direction and fit x in place of
    eta; the trial is not part of the training; there is a decay; R_l begins at 10 and has a floor of 1e-3. The
    accounting is the joint one, as in `HyFreeDP`.
    """

    revision: ClassVar[int] = 2
    base: Direction = DPAdamW()
    lr: Positive = 1e-4
    clip: ClipRule = Automatic()
    noise_inflation: Inflation = 1.03
    rounds: Count = 10
    probe_every: Count = 5
    initial_bound: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_plain(self.base, "HyFreeDPSearchThenDecay")
        require_one_point(self.base, "HyFreeDPSearchThenDecay")

    def init(self, theta: Vector) -> State:
        eta, bound = scalar(theta, self.lr), scalar(theta, self.initial_bound)
        return State(theta, theta, self.base.init(theta), eta, bound, scalar(theta), scalar(theta))

    def step(self, state: State, oracle: Oracle) -> State:
        total = oracle.draws_total
        draws_taken, trial = total - oracle.draws_left, min(self.rounds, math.ceil(total / self.probe_every))
        size = state.eta * DECAY.share(draws_taken, total, oracle.rate)
        with oracle.draw() as batch:
            if draws_taken >= trial:
                theta, base = self._moved(state, batch, size)
                return state._replace(theta=theta, base=base._replace(theta=theta))
            state = self._tried(state, batch, size)
        is_over = draws_taken == trial - 1 and trial < total
        return self._returned(state) if is_over else state

    def _moved(self, state: State, batch: Batch, size: Tensor) -> tuple[Vector, Any]:
        """The parameters after one step of the base direction, and the base's state."""
        gradient = self.base.observe(state.base, batch, self.clip)
        direction, base = directed(self.base, state.base, gradient)
        return descend(state.theta, direction, size), base

    def _viewpoint(self, state: State) -> Vector:
        """Where a draw of the trial takes its gradient."""
        return torch.where(state.rounds > 0, state.theta, state.start)

    def _tried(self, state: State, batch: Batch, size: Tensor) -> State:
        """The state after a draw of the trial."""
        observed = state.base._replace(theta=self._viewpoint(state))
        theta, base = self._moved(state._replace(base=observed), batch, size)
        displacement, c = theta - state.start, torch.where(state.rounds > 0, NEAR, FAR)
        before, beyond = (descend(state.start, displacement, -at) for at in (1 - c, 1 + c))
        losses = batch.losses([before, theta, beyond], state.bound)
        x, state = self._read(state, losses)
        theta = descend(state.start, displacement, -x)
        return state._replace(theta=theta, base=base._replace(theta=theta))

    def _read(self, state: State, losses: Release) -> tuple[Tensor, State]:
        """The factor x that a round's losses ask for, and the state with eta, R_l and k advanced."""
        (minus, zero, plus), s = losses.value, losses.std
        first, second = minus - plus, minus - 2 * zero + plus
        is_seen, is_saturated = state.rounds > 0, zero >= SATURATED * state.bound
        is_curved = second > torch.where(is_seen, 1.0, 4.0) * math.sqrt(6) * s

        minimum = 1 + torch.where(is_seen, NEAR, FAR) * first / (2 * second)
        unseen = torch.where(first < -3 * math.sqrt(2) * s, 1 / FAR, FAR)
        saturated = torch.where(state.is_usable > 0, 1 / FAR, 1.0)
        x = torch.where(is_saturated, saturated, torch.where(is_curved, minimum, unseen))
        x = x.clamp(1 / FAR, FAR) ** (1 / (1 + state.rounds))

        eta, counts = x * state.eta, (is_curved | is_seen) & ~is_saturated
        return x, state._replace(
            eta=torch.where(eta.isfinite() & (eta > 0), eta, state.eta),
            bound=losses.value.sum().clamp(min=LEAST_BOUND),
            rounds=state.rounds + counts,
            is_usable=torch.where(is_saturated, state.is_usable, 1.0),
        )

    def _returned(self, state: State) -> State:
        """The state in which training begins."""
        eta = torch.where(state.rounds > 0, state.eta, scalar(state.theta, self.lr))
        return state._replace(theta=state.start, base=state.base._replace(theta=state.start), eta=eta)
