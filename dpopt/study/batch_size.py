"""Cumulative noise of a run over batch sizes, and the batch size that follows.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616. For a fixed number E of epochs a run takes T = E N / B steps, and its noise adds up to sigma sqrt(T), with
sigma calibrated for the same (epsilon, delta). That is nearly constant over large batches (a plateau), while the noise
of one step, sigma / B, goes on falling up to the full batch.

Everything here is a function of public numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Count, NonNegative
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.ledger import number_of_draws, sampling_rate

_TOLERANCE = 0.05
"""The cumulative noise of the plateau may be this share above the least. Our choice."""
_MIN_STEPS = 20
"""The fewest steps; the paper's number for CIFAR-100 and ViT-Tiny. It differs between data sets."""


class Noise(NamedTuple):
    """The noise multiplier sigma of runs of `steps` steps, one draw each, with expected batch size B."""

    batch_size: int
    steps: int
    noise_multiplier: float

    @property
    def cumulative(self) -> float:
        """The standard deviation sigma sqrt(T) of the sum of all steps' noise, in units of the bound C."""
        return self.noise_multiplier * math.sqrt(self.steps)


def noise_table(
    batch_sizes: Iterable[int],
    *,
    examples: int,
    epochs: float,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
) -> Iterator[Noise]:
    """The noise of each of `batch_sizes` B from 1 to N, solved when it is asked for; E `epochs` are E N / B steps.

    Raises:
        ConfigError: a value out of range, or a target that no noise reaches.
    """
    if not epsilon < math.inf:
        raise ConfigError("epsilon", epsilon, "expected a finite target: without noise no batch size is better")
    # Calibration asks for a dimension, and DP-SGD's noise multiplier is the same for all of them.
    target: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "accountant": accountant}
    for size in batch_sizes:
        rate, steps = sampling_rate(size, examples), number_of_draws(epochs, size, examples)
        plan = calibrate(DPSGD(), rate=rate, draws=steps, dimension=1, **target)
        yield Noise(size, steps, plan.noise["gradient"])


def best_batch(table: Sequence[Noise], tolerance: float = _TOLERANCE, min_steps: int = _MIN_STEPS) -> Noise:
    """The paper's rule: of the batches that leave at least `min_steps` steps, the smallest in the plateau.

    The plateau are the rows whose cumulative noise is at most 1 + `tolerance` times the least of those batches.

    Raises:
        ConfigError: an empty table, a negative tolerance, or no batch size that leaves `min_steps` steps.
    """
    fields.convert(min_steps, Count, "min_steps", {})
    fields.convert(tolerance, NonNegative, "tolerance", {})
    if not table:
        raise ConfigError("table", table, "expected at least one batch size")
    allowed = [row for row in table if row.steps >= min_steps]
    if not allowed:
        most = max(row.steps for row in table)
        raise ConfigError("min_steps", min_steps, f"expected at most {most}, which the smallest batch leaves")
    most_noise = (1 + tolerance) * min(row.cumulative for row in allowed)
    return min((row for row in allowed if row.cumulative <= most_noise), key=lambda row: row.batch_size)
