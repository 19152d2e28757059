"""Private training: `fit` for a model of one's own, and the loop that the harness shares with it."""

from dpopt.training.fitting import FitResult, fit
from dpopt.training.loop import (
    evaluate,
    observe,
    predictor,
    resolve_device,
    steps,
    summary,
)

__all__ = [
    "FitResult",
    "evaluate",
    "fit",
    "observe",
    "predictor",
    "resolve_device",
    "steps",
    "summary",
]
