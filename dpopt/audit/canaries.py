"""The one-run game: a real training run whose data hold many canaries, each with probability 1/2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.audit.games import Scores, kinds_of, log_ratio, played, require_noise, with_kinds
from dpopt.clipping.flat import Clipped, ClippingEngine, Request
from dpopt.errors import ConfigError
from dpopt.privacy import sampling
from dpopt.privacy.oracle import Transcript
from dpopt.privacy.plan import Plan
from dpopt.privacy.queries import GRADIENT
from dpopt.types import Optimizer, Vector


class WithCanaries(ClippingEngine):
    """A real engine and its records, with canaries added: the data oracle only knows their row numbers.

    Rows 0..n-1 are the records; row n + j is canary j. A canary that is in contributes the clip rule's sensitivity
    along its own coordinate, whatever is asked; one that is out contributes nothing. So that only gradients tell them
    apart, no canary has a loss (the oracle counts it as nothing), and the norms of all are infinite and zero by turns,
    which moves no share of short gradients away from 1/2.

    Args:
        engine: of the model.
        x, y: the records.
        coordinates: of the canaries, all different, shape [m].
        members: which canaries are in, bool [m].
    """

    def __init__(self, engine: ClippingEngine, x: Tensor, y: Tensor, coordinates: Tensor, members: Tensor) -> None:
        self._engine, self._x, self._y = engine, x, y
        self._coordinates, self._members = coordinates, members
        self.dimension = engine.dimension

    @property
    def theta(self) -> Vector:
        return self._engine.theta

    def load(self, theta: Vector) -> None:
        self._engine.load(theta)

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        return self._engine.outputs(theta, self._x[x])

    def physical_batch(self, expected: float) -> int:
        return self._engine.physical_batch(expected)

    def answer(self, request: Request) -> Clipped:
        points, x, _, mask, clip, scale = request
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
) -> Scores:
    """Scores of the canaries of one training run (Steinke et al. 2023, with gradient canaries).

    Canary j is in with probability 1/2 on its own, and is then drawn like every record. Its score is the log-likelihood
    ratio of its coordinate of all released gradients, were there no other record:
    sum_t log(1 - q + q exp(u z_t - u^2 / 2)), with z_t the release in standard deviations and u = 1 / noise. The
    other records' gradients only make the attack weaker.

    Args:
        optimizer: trained to the end of the plan, from the engine's parameters.
        engine: of the model; its parameters stay as they are.
        x, y: the records; the public number of examples is theirs and all canaries'.
        plan: made for the engine's dimension, with noise.
        canaries: at most the engine's dimension.
        seed: of the coins, the coordinates, sampling and noise.

    Raises:
        ConfigError: more canaries than parameters, or fewer than two; a plan without noise.
    """
    require_noise(plan)
    if not 2 <= canaries <= engine.dimension:
        raise ConfigError("canaries", canaries, f"expected 2 to {engine.dimension}, the number of parameters")
    random = np.random.default_rng(sampling.derive("canaries", seed))
    coordinates = torch.from_numpy(random.permutation(engine.dimension)[:canaries]).to(x.device)
    members = torch.from_numpy(random.random(canaries) < 0.5).to(x.device)
    rows = torch.arange(len(x) + canaries, device=x.device)
    draws, noise = (sampling.derive("one run", seed, name) for name in ("draws", "noise"))
    wrapped = WithCanaries(engine, x, y, coordinates, members)
    transcript, _ = played(optimizer, wrapped, (rows, rows), plan, (draws, noise))
    scores = _canary_scores(transcript, kinds_of(optimizer, plan), coordinates, plan)
    is_in = members.cpu().numpy()
    return Scores(scores[is_in], scores[~is_in])


def _canary_scores(
    transcript: Transcript, kinds: Sequence[tuple[str, ...]], coordinates: Tensor, plan: Plan
) -> NDArray[np.float64]:
    u, scores = 1 / plan.noise[GRADIENT], np.zeros(len(coordinates))
    for releases, of_draw in zip(transcript, kinds, strict=True):
        exponents = np.zeros_like(scores)
        for kind, release in with_kinds(releases, of_draw):
            if kind == GRADIENT:
                z = release.value[coordinates].double().cpu().numpy() / float(release.std)
                exponents += u * z - u * u / 2
        scores += log_ratio(exponents, plan.rate)
    return scores


def _spread(losses: Tensor, real: Tensor) -> Tensor:
    spread = losses.new_full((len(losses), len(real)), math.nan)
    spread[:, real] = losses
    return spread
