"""Plans: calibration makes one, and an oracle holds a run to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpopt.privacy.ledger import Ledger


@dataclass(frozen=True)
class Plan:
    """The releases that a run may make, and their noise.

    Attributes:
        noise: noise multiplier (noise std / L2 sensitivity) for each kind of release: "gradient", "losses", "counts".
        ledger: the draws that the run will leave.
        epsilon: what `ledger` spends at `delta` by `accountant`; at most the target, unless the plan is scaled down.
        rate: Poisson sampling probability q.
        draws: number of draws T.
        dimension: number d of trained parameters.
        delta: the target's delta.
        accountant: name of the accountant that epsilon is stated by.
    """

    noise: Mapping[str, float]
    ledger: Ledger
    epsilon: float
    rate: float
    draws: int
    dimension: int
    delta: float
    accountant: str


class NonPrivate(Plan):
    """The plan of a run at epsilon = infinity: same draws, same clipping, no noise; its ledger says so."""
