"""Private training: `fit` for a model of one's own, and the loop that the harness shares with it."""

from dpopt.training.fitting import FitResult, fit
from dpopt.training.loop import (
    evaluate,
    number_of_draws,
    observe,
    predictor,
    resolve_device,
    sampling_rate,
    steps,
    summary,
)

__all__ = [
    "FitResult",
    "evaluate",
    "fit",
    "number_of_draws",
    "observe",
    "predictor",
    "resolve_device",
    "sampling_rate",
    "steps",
    "summary",
]
