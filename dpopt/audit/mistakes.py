"""Negative controls: mechanisms that leak more than they claim, each by a mistake that people make, and their repairs.

An audit that does not flag them tests nothing. Each has an adversary who knows the mistake; that the repaired version
passes under the same adversary shows that the audit sees the mistake. Whatever touches data unnoised is here, and
only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpopt.audit.estimators import clopper_pearson
from dpopt.audit.games import (
    PUBLIC_EXAMPLES,
    Prescribed,
    Scores,
    canary,
    kinds_of,
    log_likelihood_ratio,
    play_both,
    played,
)
from dpopt.audit.published import hyfreedp_noise
from dpopt.clipping.rules import Abadi
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.ledger import Draw, Ledger, Plan
from dpopt.privacy.oracle import Charged, Transcript
from dpopt.privacy.queries import LOSSES
from dpopt.types import Number, Oracle, Release, Vector

_WIDTH = 4
"""Parameters of the controls' models, but for those that need more."""
_CLIP = Abadi(1.0)
_Score = Callable[[Transcript, Vector], float]
"""The adversary's score of one run: (its releases, the last parameters, shape [d]) -> a number, high for "in"."""


class _Mechanism(NamedTuple):
    """A mechanism with its claim (`plan`) and its adversary (`score`); the last of the records is the canary."""

    optimizer: Any
    plan: Plan
    score: _Score
    oracle: Callable[..., DataOracle]
    engine: Prescribed
    x: Tensor
    y: Tensor
    examples: int = PUBLIC_EXAMPLES

    def run(self, is_in: bool, seeds: tuple[int, int]) -> float:
        records = (self.x, self.y) if is_in else (self.x[:-1], self.y[:-1])
        options: dict[str, Any] = {"oracle": self.oracle, "examples": self.examples}
        return self.score(*played(self.optimizer, self.engine, records, self.plan, seeds, **options))


@dataclass(frozen=True)
class Control:
    """A mechanism that must be flagged, and the same without its mistake."""

    name: str
    mistake: str
    epsilon: float  # this and `delta`: the claim
    delta: float
    trials: tuple[int, int]  # runs with and without the canary that are enough to see it
    build: Callable[[bool], _Mechanism]  # True repairs the mistake
    threshold: float | None = None  # for `clopper_pearson`, chosen beforehand; None lets the scores choose it

    def scores(self, seed: int = 0, *, is_repaired: bool = False) -> Scores:
        """The adversary's scores of the runs with the canary and without."""
        return play_both(self.build(is_repaired).run, self.trials, seed)

    def bound(self, scores: Scores) -> float:
        """The lower bound on epsilon that `scores` prove at 95 % confidence."""
        return clopper_pearson(*scores, delta=self.delta, threshold=self.threshold)


def controls() -> tuple[Control, ...]:
    """The negative controls; an audit must put a bound above the claim of every one, and of no repaired one."""
    few, many = (200, 200), (10_000, 200_000)
    return (
        Control("realised_batch", "sums are divided by the number of records drawn", 1.0, 1e-5, few, _realised_batch),
        Control("bare_losses", "probed losses are released without noise", 2.0, 1e-5, few, _bare_losses),
        Control("raw_rejection", "a step is accepted or rejected by the raw loss", 2.0, 1e-5, few, _raw_rejection),
        Control("raw_step_size", "the step size is taken from raw gradient norms", 2.0, 1e-5, few, _raw_step_size),
        Control("shared_noise", "two queries of a draw get the same noise", 2.0, 1e-5, few, _shared_noise),
        Control(
            "separate_subsamples",
            "releases of one draw are accounted as if each had its own subsample (HyFreeDP, Theorem 2)",
            8.0,
            0.02,
            many,
            _separate_subsamples,
            threshold=9.5,
        ),
        Control("last_bits", "releases keep all bits of float32 sums", 1.0, 1e-5, few, _last_bits),
    )


class _RealisedBatch(DataOracle):
    def _add_noise(self, total: Tensor, std: Number, charged: Charged) -> None:
        super()._add_noise(total, std, charged)
        drawn = sum(int(gather()[2].sum()) for gather in charged.records.inputs)
        total *= self.expected_batch / max(1, drawn)


def _realised_batch(is_repaired: bool) -> _Mechanism:
    """Records without gradients: the length of the released noise gives away how many there are."""
    optimizer, d = _Plain(), 200
    x, y = torch.zeros(2, d, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    oracle = DataOracle if is_repaired else _RealisedBatch

    def score(transcript: Transcript, theta: Vector) -> float:
        return -float(transcript[0][0].value.norm())

    return _Mechanism(optimizer, _one_draw(optimizer, d, 1.0), score, oracle, Prescribed(d), x, y, examples=2)


class _BareLosses(DataOracle):
    def answer(self, charged: Charged) -> Release:
        return super().answer(charged._replace(noise=0.0) if charged.asked.kind == LOSSES else charged)


@dataclass(frozen=True)
class _Plain(DPSGD):
    """Plain steps of size one, or those of a `rule`, (oracle, theta) -> the next theta.

    With `probes`, that many losses are released too, the first before the step.
    """

    noise_inflation: float = 1.1
    probes: int = 0
    is_rejecting: bool = False
    rule: Any = None

    def step(self, state: Any, oracle: Any) -> Any:
        theta = state.theta
        if self.rule:
            return state._replace(theta=self.rule(oracle, theta))
        with oracle.draw() as batch:
            after = theta - batch.gradient(theta, _CLIP).value
            if self.probes:
                before, *_, last = batch.losses([theta] + [after] * (self.probes - 1), 1.0).value
                if self.is_rejecting:
                    after = torch.where(last > before, theta, after)
        return state._replace(theta=after)


def _bare_losses(is_repaired: bool) -> _Mechanism:
    """The canary's loss is huge, no other record has any."""

    def score(transcript: Transcript, theta: Vector) -> float:
        return float(transcript[0][1].value[0])

    return _with_canary(_Plain(probes=2), score, DataOracle if is_repaired else _BareLosses)


class _Barrier(Prescribed):
    """Records whose loss is 0 at the origin and y_i everywhere else."""

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([y * bool(theta.any()) for theta in points])


class _Peeking(DataOracle):
    """Also answers without noise."""

    _batch: Any  # of the open draw

    def raw_loss(self, theta: Vector) -> Tensor:
        rows = [inputs() for inputs in self._batch._records.inputs]
        return torch.stack([self._engine.losses([theta], *row)[0].sum() for row in rows] or [torch.zeros(())]).sum()

    def raw_norm(self) -> float:
        return max((float(norm.max()) for norm in self._batch._records.norms), default=0.0)


def _unless_the_loss_rises(oracle: Any, theta: Vector) -> Vector:
    with oracle.draw() as batch:
        after = theta - batch.gradient(theta, _CLIP).value
        return torch.where(oracle.raw_loss(after) > oracle.raw_loss(theta), theta, after)


def _raw_rejection(is_repaired: bool) -> _Mechanism:
    """The canary wants to stay where it is. The repaired version looks at noised losses and pays for them."""
    optimizer = _Plain(probes=2, is_rejecting=True) if is_repaired else _Plain(rule=_unless_the_loss_rises)
    return _with_canary(optimizer, _stayed, DataOracle if is_repaired else _Peeking, _Barrier)


def _shorter_by_the_longest_gradient(oracle: Any, theta: Vector) -> Vector:
    with oracle.draw() as batch:
        gradient = batch.gradient(theta, _CLIP).value
        return theta - gradient / (1 + oracle.raw_norm())


def _raw_step_size(is_repaired: bool) -> _Mechanism:
    """The canary's gradient is huge, so the step is not. The repaired version has steps of size one."""
    optimizer = _Plain() if is_repaired else _Plain(rule=_shorter_by_the_longest_gradient)
    return _with_canary(optimizer, _stayed, DataOracle if is_repaired else _Peeking)


class _SharedNoise(DataOracle):
    """Gives every gradient of a draw the noise of the first."""

    def _add_noise(self, total: Tensor, std: Number, charged: Charged) -> None:
        super()._add_noise(total, std, charged._replace(number=0))


def _with_two_queries(oracle: Oracle, theta: Vector) -> Vector:
    """The second gradient is without its first coordinate."""
    scale = torch.ones_like(theta)
    scale[0] = 0
    with oracle.draw() as batch:
        first, second = batch.gradient(theta, _CLIP), batch.gradient(theta, _CLIP, scale)
    return theta - first.value - second.value


def _shared_noise(is_repaired: bool) -> _Mechanism:
    """The canary is in one of the two gradients only: their difference has no noise."""

    def score(transcript: Transcript, theta: Vector) -> float:
        first, second = (float(release.value[0]) for release in transcript[0])
        return first - second

    return _with_canary(_Plain(rule=_with_two_queries), score, DataOracle if is_repaired else _SharedNoise)


def _last_bits(is_repaired: bool) -> _Mechanism:
    """The canary alone moves coordinates, each by g. Sums near 0 are then g plus noise near -g.

    As float32 numbers, these are multiples of g 2^-24, while noise alone has smaller bits.
    """
    optimizer, d, examples = _Plain(), 2**18, 96

    def score(transcript: Transcript, theta: Vector) -> float:
        in_g = transcript[0][0].value.double() * examples * d**0.5
        multiples = in_g[in_g.abs() < 1 / 8] * 2**24
        # As 96 is no power of two, the division was rounded, which moves these by 1/8 at most.
        return -float(((multiples - multiples.round()).abs() > 1 / 8).sum())

    x, y = torch.ones(1, d, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    oracle = partial(DataOracle, grid=is_repaired)
    return _Mechanism(optimizer, _one_draw(optimizer, d, 1.0), score, oracle, Prescribed(d), x, y, examples)


def _with_canary(
    optimizer: Any, score: _Score, oracle: type[DataOracle], engine: type[Prescribed] = Prescribed
) -> _Mechanism:
    claimed = _Plain() if oracle is _Peeking else optimizer  # what it peeks at, it does not account for
    return _Mechanism(optimizer, _one_draw(claimed, _WIDTH, 2.0), score, oracle, engine(_WIDTH), *canary(_WIDTH))


@cache
def _one_draw(optimizer: Any, dimension: int, epsilon: float) -> Plan:
    """A plan of one draw of all records: nothing is amplified, so what is seen is the mistake."""
    return calibrate(optimizer, rate=1.0, draws=1, dimension=dimension, epsilon=epsilon, delta=1e-5, accountant="rdp")


def _stayed(transcript: Transcript, theta: Vector) -> float:
    return -float(theta.norm())


def _separate_subsamples(is_repaired: bool) -> _Mechanism:
    """One draw, one gradient and three losses, and noise by HyFreeDP's own rule; scored by the likelihood ratio."""
    optimizer = _Plain(probes=3, noise_inflation=1.3)
    common: dict[str, Any] = {"rate": 0.2, "draws": 1, "epsilon": 8.0, "delta": 0.02, "accountant": "prv"}
    plan = calibrate(optimizer, dimension=_WIDTH, **common)
    if not is_repaired:
        gradient, losses, _ = hyfreedp_noise(rule="independent", probe_every=1, noise_inflation=1.3, **common)
        ledger = Ledger([Draw(plan.rate, (gradient, losses, losses, losses))])
        plan = replace(plan, noise={"gradient": gradient, "losses": losses}, ledger=ledger)
    kinds, examples = kinds_of(optimizer, plan), 50

    def score(transcript: Transcript, theta: Vector) -> float:
        return log_likelihood_ratio(transcript, kinds, plan, plan.rate * examples)

    return _Mechanism(optimizer, plan, score, DataOracle, Prescribed(_WIDTH), *canary(_WIDTH), examples)
