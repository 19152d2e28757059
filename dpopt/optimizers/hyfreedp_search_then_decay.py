"""HyFreeDP's releases, spent on a short trial run that finds the learning rate of one with a linear decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpopt.clipping.rules import Automatic
from dpopt.fields import Count, Inflation, Positive
from dpopt.optimizers.base import Configured, Direction, descend, directed, require_base, scalar
from dpopt.optimizers.dp_adamw import DPAdamW
from dpopt.optimizers.hyfreedp import LEAST_BOUND, SATURATED
from dpopt.optimizers.scheduled import Scheduled
from dpopt.types import Batch, ClipRule, Oracle, Release, Vector

FAR, NEAR = 16.0, 0.5
"""Distance c of the probes before and after curvature is seen."""
LARGEST = 4.0
"""The most that eta changes by in a round after curvature is seen; before, it is FAR."""
SHARE = 0.7
"""The share that training takes of the trial's eta."""
_DECAY = Scheduled(schedule="linear")


class State(NamedTuple):
    """The state of `HyFreeDPSearchThenDecay`.

    Attributes:
        theta, start: where the run is, and where it began and returns to; shape [d].
        base: the base direction's state; in the trial that of the path's draws.
        kept: in the trial the base direction's state of all draws; after it `base`.
        eta: largest step size; it is decayed where a step is taken.
        bound: clipping bound R_l of the next round's losses.
        rounds: k, rounds since curvature was seen, that one included, but for saturated ones.
        is_usable: 1 as soon as the losses of one round were not saturated, 0 before.
    """

    theta: Vector
    start: Vector
    base: Any
    kept: Any
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
        x        = 1/b, or 1 while all rounds were saturated         where L_0 >= 0.9 R_l            (saturated losses)
                   1 + c D_1/(2 D_2), the parabola's minimum         else, where D_2 > z sqrt(6) s   (curvature shows)
                   1/b                                               else, where D_1 < -3 sqrt(2) s  (uphill)
                   b                                                 else
        x        <- clamp(x, 1/b, b)^(1/max(k, 1)),   eta <- x eta,   theta_{t+1} = theta_0 + x Delta
        k        <- k + 1 where curvature shows, or showed before, and L_0 < 0.9 R_l
        R_l      <- max(L_- + L_0 + L_+, R_l/2, 1e-3)
        b, c, z  = 16, 16, 4 while k = 0; then 4, 1/2, 2

    Where k becomes 1 in a draw that is not the trial's last, the trial begins anew: eta <- (t + 1) eta, theta_{t+1} =
    theta_0, and the base direction of the later G_t knows no earlier draw. Where N < T, training follows the trial:
    theta_N = theta_0, and eta <- 0.7 eta, or `lr` where k = 0; then theta_{t+1} = theta_t - f_t eta G_t without losses,
    where the base direction knows all draws. Where N = T the trial keeps its end. eta stays as it is where it would be
    no positive number.

    Why, what is a choice, and what it cannot do: docs/decisions/optimizers.md.

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
    eta; the trial is not part of the training; there is a decay; R_l begins at 10 and at most halves in a round. The
    accounting is the joint one, as in `HyFreeDP`.
    """

    revision: ClassVar[int] = 3
    base: Direction = DPAdamW()
    lr: Positive = 1e-4
    clip: ClipRule = Automatic()
    noise_inflation: Inflation = 1.03
    rounds: Count = 10
    probe_every: Count = 5
    initial_bound: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_base(self.base, "HyFreeDPSearchThenDecay", sees=("points",))

    def init(self, theta: Vector) -> State:
        eta, bound, base = scalar(theta, self.lr), scalar(theta, self.initial_bound), self.base.init(theta)
        return State(theta, theta, base, base, eta, bound, rounds=scalar(theta), is_usable=scalar(theta))

    def step(self, state: State, oracle: Oracle) -> State:
        total = oracle.draws_total
        draws_taken, trial = total - oracle.draws_left, min(self.rounds, math.ceil(total / self.probe_every))
        size = state.eta * _DECAY.share(draws_taken, total, oracle.rate)
        with oracle.draw() as batch:
            if draws_taken >= trial:
                return self._trained(state, batch, size)
            after = self._tried(state, batch, size)
        if draws_taken == trial - 1:
            return self._returned(after) if trial < total else after
        return self._continued(after, draws_taken + 1, is_found=(state.rounds == 0) & (after.rounds > 0))

    def _trained(self, state: State, batch: Batch, size: Tensor) -> State:
        gradient = self.base.observe(state.base, batch, self.clip)
        direction, base = directed(self.base, state.base, gradient)
        theta = descend(state.theta, direction, size)
        base = base._replace(theta=theta)
        return state._replace(theta=theta, base=base, kept=base)

    def _tried(self, state: State, batch: Batch, size: Tensor) -> State:
        viewpoint = torch.where(state.rounds > 0, state.theta, state.start)
        path, kept = (seen._replace(theta=viewpoint) for seen in (state.base, state.kept))
        gradient = self.base.observe(path, batch, self.clip)
        direction, base = directed(self.base, path, gradient)
        _, kept = directed(self.base, kept, gradient)
        theta = descend(state.theta, direction, size)
        displacement, c = theta - state.start, torch.where(state.rounds > 0, NEAR, FAR)
        before, beyond = (descend(state.start, displacement, -at) for at in (1 - c, 1 + c))
        losses = batch.losses([before, theta, beyond], state.bound)
        x, state = self._read(state, losses)
        theta = descend(state.start, displacement, -x)
        return state._replace(theta=theta, base=base._replace(theta=theta), kept=kept._replace(theta=theta))

    def _read(self, state: State, losses: Release) -> tuple[Tensor, State]:
        """The factor x that a round's losses ask for, and the state with eta, R_l and k advanced."""
        (minus, zero, plus), s = losses.value, losses.std
        first, second = minus - plus, minus - 2 * zero + plus
        is_seen, is_saturated = state.rounds > 0, zero >= SATURATED * state.bound
        is_curved = second > torch.where(is_seen, 2.0, 4.0) * math.sqrt(6) * s

        largest = torch.where(is_seen, LARGEST, FAR)
        minimum = 1 + torch.where(is_seen, NEAR, FAR) * first / (2 * second)
        unseen = torch.where(first < -3 * math.sqrt(2) * s, 1 / largest, largest)
        saturated = torch.where(state.is_usable > 0, 1 / largest, 1.0)
        x = torch.where(is_saturated, saturated, torch.where(is_curved, minimum, unseen))
        x = x.clamp(1 / largest, largest) ** (1 / state.rounds.clamp(min=1))

        eta, counts = x * state.eta, (is_curved | is_seen) & ~is_saturated
        return x, state._replace(
            eta=_number(eta, state.eta),
            bound=torch.maximum(losses.value.sum(), state.bound / 2).clamp(min=LEAST_BOUND),
            rounds=state.rounds + counts,
            is_usable=torch.where(is_saturated, state.is_usable, 1.0),
        )

    def _continued(self, state: State, draws: int, is_found: Tensor) -> State:
        """The state of a trial after `draws` draws; its path begins anew where curvature was found in the last one."""

        def chosen(anew: Tensor, going_on: Tensor) -> Tensor:
            return torch.where(is_found, anew, going_on)

        theta, eta = chosen(state.start, state.theta), chosen(draws * state.eta, state.eta)
        base = pytree.tree_map(chosen, self.base.init(state.start), state.base)
        return state._replace(theta=theta, base=base, eta=_number(eta, state.eta))

    def _returned(self, state: State) -> State:
        base = state.kept._replace(theta=state.start)
        eta = torch.where(state.rounds > 0, SHARE * state.eta, scalar(state.theta, self.lr))
        return state._replace(theta=state.start, base=base, kept=base, eta=eta)


def _number(value: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(value.isfinite() & (value > 0), value, otherwise)
