"""The audit of one optimizer: what it claims, and what the games can prove that it spends at least."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from dpopt.audit.estimators import clopper_pearson, likely_threshold, one_run
from dpopt.audit.games import WORST_CASE_DIMENSION, one_run_scores, require_noise, simulated, worst_case
from dpopt.clipping.flat import ClippingEngine
from dpopt.errors import ConfigError
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.types import Optimizer


@dataclass(frozen=True)
class Result:
    """A claim and lower bounds on what is spent."""

    epsilon: float  # what the accountant says that the training run, and a run of the game, spend at most, at `delta`
    delta: float
    worst_case: float  # from runs with and without the worst record; n runs prove no more than about log n
    one_run: float | None  # from the canaries of one training run, see `one_run`; None if there was none
    one_run_fdp: float | None  # the same for a Gaussian trade-off curve
    trials: int  # runs of each kind in the worst-case game
    canaries: int  # of the training run, in and out together
    significance: float  # probability with which each bound may exceed the truth
    seconds: float

    @property
    def is_refuted(self) -> bool:
        """True if a bound exceeds the claim; the Gaussian one assumes more than the claim says, and does not count."""
        return max(self.worst_case, self.one_run or 0.0) > self.epsilon


def audit(
    optimizer: Optimizer,
    *,
    epsilon: float,
    delta: float,
    rate: float,
    draws: int,
    accountant: str = "pld",
    trials: int = 300,
    canaries: int = 1000,
    engine: ClippingEngine | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    seed: int = 0,
    significance: float = 0.05,
    game_draws: int | None = None,
    grid: bool = False,
) -> Result:
    """Calibrate `optimizer` and try to prove that it spends more than it claims.

    Args:
        epsilon, delta, rate, draws, accountant: as for `calibrate`.
        trials: runs of each kind in the worst-case game.
        canaries: in the one training run.
        engine, x, y: the model and its records; without them there is no training run.
        significance: probability with which each bound may exceed the truth.
        game_draws: of a run in the worst-case game, for the same epsilon; fewer make it quicker. None: `draws`.
        grid: see `DataOracle`.

    Raises:
        ConfigError: a value out of range, an epsilon that needs no noise, or an engine without records.
    """
    if (engine is None) != (x is None) or (x is None) != (y is None):
        raise ConfigError("engine", type(engine).__name__, "expected engine, x and y together, or none of them")
    target: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "accountant": accountant}
    planned = partial(calibrate, optimizer, rate=rate, dimension=WORST_CASE_DIMENSION, **target)
    plan, game = planned(draws=draws), planned(draws=min(draws, game_draws or draws))
    require_noise(game)
    start = time.perf_counter()
    level: dict[str, Any] = {"delta": delta, "significance": significance}
    # Chosen on a simulation of the ledger, the threshold costs none of the runs.
    threshold = likely_threshold(*simulated(game.ledger, size=10_000), trials=trials, **level)
    # What is audited is what a user runs: its grid, and in the training run the plan's noise.
    play: dict[str, Any] = {"seed": seed, "oracle": partial(DataOracle, grid=grid)}
    worst = clopper_pearson(*worst_case(optimizer, game, trials=trials, **play), threshold=threshold, **level)
    single = single_fdp = None
    if engine is not None and x is not None and y is not None:
        trained = replace(plan, dimension=engine.dimension)
        scores = one_run_scores(optimizer, engine, x, y, plan=trained, canaries=canaries, **play)
        single, single_fdp = one_run(*scores, **level), one_run(*scores, **level, is_gaussian=True)
    return Result(
        epsilon=max(plan.epsilon, game.epsilon),
        delta=delta,
        worst_case=worst,
        one_run=single,
        one_run_fdp=single_fdp,
        trials=trials,
        canaries=canaries if engine is not None else 0,
        significance=significance,
        seconds=time.perf_counter() - start,
    )
