"""Games between a mechanism, which claims epsilon, and an adversary, who sees all that it releases.

From that the adversary tells whether a record was in the data. In `worst_case` it is the worst record there is, and
the game is played many times. In `one_run_scores` one real training run holds many canaries, each with probability
1/2. Sampling, clipping, noise and division are left to the `DataOracle` under audit; the adversary looks at releases
and public numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.clipping.flat import Clipped, ClippingEngine, Delegate, WeightedPoints, clip_factors, scaled
from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.calibration import trace
from dpopt.privacy.data import DataOracle
from dpopt.privacy.ledger import Ledger, Plan
from dpopt.privacy.oracle import Transcript
from dpopt.privacy.queries import COUNTS, GRADIENT
from dpopt.types import ClipRule, Optimizer, Release, Vector

_HUGE_GRADIENT, _HUGE_LOSS = 1e100, 1e300
"""A loss or gradient of the worst record, in float64: beyond any bound, but finite, as other values count as zero."""
WORST_CASE_DIMENSION = 4
"""Parameters of the worst-case game: more would only add coordinates of pure noise."""
PUBLIC_EXAMPLES = 1000
"""Stated number of examples in the worst-case game; all but the canary contribute nothing, and are left out."""


Make = Callable[..., DataOracle]
"""A class of oracles, or one with arguments such as the grid."""


class Scores(NamedTuple):
    """The adversary's scores of the runs, or canaries, that were in and of those that were not; higher means "in"."""

    inside: NDArray[np.float64]
    outside: NDArray[np.float64]


class Prescribed(ClippingEngine):
    """An engine without a model: record (x_i, y_i) has gradient x_i, shape [d], and loss y_i, at all points; float64.

    Weighted points are taken as already combined: their gradients could be any.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    @property
    def theta(self) -> Vector:
        return torch.zeros(self.dimension)

    def load(self, theta: Vector) -> None:
        pass

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        return x

    def physical_batch(self, expected: float) -> int:
        return PUBLIC_EXAMPLES

    def clipped(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Clipped:
        # In float64, as the worst record's numbers are beyond float32.
        gradients = scaled(x, scale)
        norms = torch.linalg.vector_norm(gradients, dim=1)
        total = (clip_factors(clip, norms, mask) @ gradients).to(points[0][1].dtype)
        return Clipped(total, self.losses([theta for _, theta in points], x, y, mask), norms)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return y.expand(len(points), -1)


def canary(dimension: int) -> tuple[Tensor, Tensor]:
    """The worst record, (x [1, d], y [1]): its clipped contributions are the sensitivities, whatever the clip rule."""
    x = torch.zeros(1, dimension, dtype=torch.float64)
    # Along one axis, so that a scale per coordinate cannot turn it.
    x[0, 0] = _HUGE_GRADIENT
    return x, torch.full((1,), _HUGE_LOSS, dtype=torch.float64)


def played(
    optimizer: Optimizer,
    engine: ClippingEngine,
    records: tuple[Tensor, Tensor],
    plan: Plan,
    seeds: tuple[int, int],
    *,
    oracle: Make = DataOracle,
    examples: int | None = None,
) -> tuple[Transcript, Vector]:
    """All releases of a run, and the last parameters; `seeds` are those of draws and noise."""
    transcript: Transcript = []
    options = {"draw_seed": seeds[0], "noise_seed": seeds[1], "transcript": transcript, "examples": examples}
    answering: Any = oracle(engine, *records, plan, **options)
    state = optimizer.init(engine.theta)
    while answering.draws_left:
        state = optimizer.step(state, answering)
    return transcript, state[0]


def worst_case(optimizer: Optimizer, plan: Plan, *, trials: int, seed: int = 0, oracle: Make = DataOracle) -> Scores:
    """Log-likelihood ratios of whole runs, `trials` with the worst record in the data and as many without it.

    The two data sets are neighbours under add/remove; both divide by the expected batch of the same public number of
    examples. With the score the exact likelihood ratio of all releases, no adversary does better: the true trade-off
    curve of these scores is the one that the ledger of the plan stands for. `oracle` makes one.
    ConfigError for no trial, or no noise.
    """
    require_noise(plan)
    engine, (x, y) = Prescribed(plan.dimension), canary(plan.dimension)
    kinds = kinds_of(optimizer, plan)

    def run(is_in: bool, seeds: tuple[int, int]) -> float:
        # All other records contribute nothing, so they are left out of both runs.
        records = (x, y) if is_in else (x[:0], y[:0])
        transcript, _ = played(optimizer, engine, records, plan, seeds, oracle=oracle, examples=PUBLIC_EXAMPLES)
        return log_likelihood_ratio(transcript, kinds, plan, plan.rate * PUBLIC_EXAMPLES)

    return play_both(run, trials, seed)


def simulated(ledger: Ledger, *, size: int, seed: int = 0) -> Scores:
    """`size` scores of each kind, as `worst_case` gives them if a run is what its ledger says."""
    random = np.random.default_rng(seed)

    def scores(is_in: bool) -> NDArray[np.float64]:
        total = np.zeros(size)
        for draw in ledger:
            u = 1 / draw.effective_noise
            z = random.standard_normal(size) + u * (is_in & (random.random(size) < draw.rate))
            # Of several releases in one draw the likelihood ratio is that of one with the effective noise.
            total += _log_ratio(u * z - u * u / 2, draw.rate)
        return total

    return Scores(scores(True), scores(False))


def _log_ratio(exponents: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):  # at rate 1 the record is never left out
        return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)


def play_both(run: Callable[[bool, tuple[int, int]], float], trials: int | tuple[int, int], seed: int) -> Scores:
    """Scores of runs with the canary and without, `trials` of each kind, or (with, without).

    `run` maps (True if the canary is in, seeds of draws and noise) to a score.
    """
    # Different seeds inside and outside: the estimators take all scores to be independent.
    inside, outside = (trials, trials) if isinstance(trials, int) else trials
    if min(inside, outside) < 1:
        raise ConfigError("trials", trials, "expected at least 1")

    def score(is_in: bool, trial: int) -> float:
        draws, noise = (sampling.derive("audit", seed, is_in, trial, name) for name in ("draws", "noise"))
        return run(is_in, (draws, noise))

    return Scores(
        np.array([score(True, trial) for trial in range(inside)]),
        np.array([score(False, trial) for trial in range(outside)]),
    )


def kinds_of(optimizer: Optimizer, plan: Plan) -> list[tuple[str, ...]]:
    """The kinds of the releases of every draw, found without data."""
    structure = trace(optimizer, rate=plan.rate, draws=plan.draws)
    return list(chain.from_iterable(repeat(kinds, count) for kinds, count in structure))


def require_noise(plan: Plan) -> None:
    """Raise `ConfigError` for a plan that releases something without noise: there is nothing to audit."""
    if not all(noise > 0 for noise in plan.noise.values()):
        # A likelihood ratio of releases without noise is zero or infinite: the answer is there without a game.
        raise ConfigError("plan.noise", dict(plan.noise), "expected noise > 0 for every kind of release")


def log_likelihood_ratio(
    transcript: Transcript, kinds: Sequence[tuple[str, ...]], plan: Plan, expected_batch: float
) -> float:
    """Logarithm of p(releases | the worst record is in the data) / p(releases | it is not).

    The record is in a draw with probability q, and then shifts the draw's j-th release by u_j = +-1/noise_j standard
    deviations. With z_j the releases in standard deviations, the ratio of a draw is 1 - q + q exp(sum_j (u_j z_j -
    u_j^2 / 2)).
    """
    exponents = []
    for releases, of_draw in zip(transcript, kinds, strict=True):
        exponent = 0.0
        for kind, release in _with_kinds(releases, of_draw):
            size, std = 1 / plan.noise[kind], float(release.std)
            # The record's gradient is longer than any bound, so it lowers counts. Losses and counts are centred at
            # their sensitivity, which is std * expected_batch * size.
            u, centre = (-size if kind == COUNTS else size), (0.0 if kind == GRADIENT else expected_batch * size)
            values = [release.value[0].item()] if kind == GRADIENT else release.value.tolist()
            exponent += sum(u * (value / std - centre) - u * u / 2 for value in values)
        exponents.append(exponent)
    return float(_log_ratio(np.array(exponents), plan.rate).sum())


def _with_kinds(releases: Sequence[Release], kinds: Sequence[str]) -> Iterator[tuple[str, Release]]:
    position = 0
    for release in releases:
        yield kinds[position], release
        # A gradient is one release, however long; sums of scalars are one each.
        position += 1 if kinds[position] == GRADIENT else len(release.value)


class _WithCanaries(Delegate):
    """A real engine and its records, with canaries added: the data oracle only knows their row numbers.

    Rows 0..n-1 are the records; row n + j is canary j. A canary that is in (`members`, bool [m]) contributes the clip
    rule's sensitivity along its own of the `coordinates` [m], whatever is asked; one that is out contributes nothing.
    So that only gradients tell them apart, no canary has a loss (the oracle counts it as nothing), and the norms of all
    are infinite and zero by turns, which moves no share of short gradients away from 1/2.
    """

    def __init__(self, engine: ClippingEngine, x: Tensor, y: Tensor, coordinates: Tensor, members: Tensor) -> None:
        super().__init__(engine)
        self._x, self._y, self._coordinates, self._members = x, y, coordinates, members

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        return super().outputs(theta, self._x[x])

    def clipped(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Clipped:
        real = x < len(self._x)
        real_part = self._engine.clipped(points, self._x[x[real]], self._y[x[real]], mask[real], clip, scale)
        drawn = x[~real & mask] - len(self._x)
        sensitivity = torch.as_tensor(clip.sensitivity, dtype=real_part.total.dtype)
        total = real_part.total.index_add_(0, self._coordinates[drawn], self._members[drawn] * sensitivity)
        # Half above and half below any bound, in or out: counts do not tell canaries apart.
        norms = torch.where(x % 2 == 0, 0.0, torch.inf).to(real_part.norms).masked_scatter(real, real_part.norms)
        return Clipped(total, _spread(real_part.losses, real), norms)

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        real = x < len(self._x)
        return _spread(self._engine.losses(points, self._x[x[real]], self._y[x[real]], mask[real]), real)


def one_run_scores(
    optimizer: Optimizer,
    engine: ClippingEngine,
    x: Tensor,
    y: Tensor,
    *,
    plan: Plan,
    canaries: int,
    seed: int = 0,
    oracle: Make = DataOracle,
) -> Scores:
    """Scores of the canaries of one training run (Steinke et al. 2023, with gradient canaries).

    Canary j is in with probability 1/2 on its own, and is then drawn like every record. Its score is the log-likelihood
    ratio of its coordinate of all released gradients, were there no other record:
    sum_t log(1 - q + q exp(u z_t - u^2 / 2)), with z_t the release in standard deviations and u = 1 / noise. The
    other records' gradients only make the attack weaker. ConfigError for more canaries than parameters, fewer than two,
    or a plan without noise.
    """
    require_noise(plan)
    if not 2 <= canaries <= engine.dimension:
        raise ConfigError("canaries", canaries, f"expected 2 to {engine.dimension}, the number of parameters")
    random = np.random.default_rng(sampling.derive("canaries", seed))
    coordinates = torch.from_numpy(random.permutation(engine.dimension)[:canaries]).to(x.device)
    members = torch.from_numpy(random.random(canaries) < 0.5).to(x.device)
    rows = torch.arange(len(x) + canaries, device=x.device)
    draws, noise = (sampling.derive("one run", seed, name) for name in ("draws", "noise"))
    wrapped = _WithCanaries(engine, x, y, coordinates, members)
    transcript, _ = played(optimizer, wrapped, (rows, rows), plan, (draws, noise), oracle=oracle)
    u, scores = 1 / plan.noise[GRADIENT], np.zeros(canaries)
    for releases, of_draw in zip(transcript, kinds_of(optimizer, plan), strict=True):
        exponents = np.zeros_like(scores)
        for kind, release in _with_kinds(releases, of_draw):
            if kind == GRADIENT:
                z = release.value[coordinates].double().cpu().numpy() / float(release.std)
                exponents += u * z - u * u / 2
        scores += _log_ratio(exponents, plan.rate)
    is_in = members.cpu().numpy()
    return Scores(scores[is_in], scores[~is_in])


def _spread(losses: Tensor, real: Tensor) -> Tensor:
    spread = losses.new_full((len(losses), len(real)), math.nan)
    spread[:, real] = losses
    return spread
