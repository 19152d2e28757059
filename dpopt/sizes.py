"""Sizes of a run that follow from public numbers: its sampling rate, its number of draws, and the usual delta."""

from __future__ import annotations

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import MANY, Positive


def sampling_rate(batch_size: float, examples: int) -> float:
    """Q = B/N.

    Raises:
        ConfigError: B is not in [1, N].
    """
    if not 1 <= batch_size <= examples:
        raise ConfigError("batch_size", batch_size, f"expected 1 to {examples}, the number of training records")
    return batch_size / examples


def number_of_draws(epochs: float, batch_size: float, examples: int) -> int:
    """T = epochs N / B, rounded.

    Raises:
        ConfigError: it is no number, none, or larger than `fields.MANY`.
    """
    fields.convert(epochs, Positive, "epochs", {})
    draws = epochs * examples / batch_size
    # Before `round`, which fails with an error of its own on a product that overflows.
    if draws > MANY:
        raise ConfigError("epochs", epochs, f"makes {draws:.3g} draws, expected at most {MANY:.0e}")
    if round(draws) < 1:
        least = batch_size / examples
        raise ConfigError("epochs", epochs, f"makes no draw: one of B = {batch_size:g} takes {least:.3g} epochs")
    return round(draws)


def default_delta(examples: int) -> float:
    """N^-1.1, where no delta is given: below 1/N, at which publishing one record whole would be private."""
    return examples**-1.1
