"""Private training: `fit` for a model of one's own, and the loop that the harness shares with it."""

from dpopt.training.fitting import fit
from dpopt.training.loop import evaluate, observe, predictor, resolve_device, steps, summary
from dpopt.training.saved import FitResult

__all__ = ["FitResult", "evaluate", "fit", "observe", "predictor", "resolve_device", "steps", "summary"]
