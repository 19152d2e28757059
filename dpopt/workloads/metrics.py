"""Scores of a trained classifier beside its accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def classification_report(outputs: Tensor, targets: Tensor, classes: int) -> dict[str, Any]:
    """Scores of logits [n, classes] for class numbers [n]; a record whose outputs are not all finite counts as wrong.

    Returns:
        macro_accuracy: mean of the per-class accuracies over the classes that have records.
        class_accuracy: share of each class's records whose largest logit is that class's; None where it has none.
        nll: mean negative log-likelihood, in nats; NaN where outputs of a record are not all finite.
        And what each function (outputs, targets) of the entry-point group "dpopt.metrics" gives, by its name there.
    """
    # By hand, as importing torchmetrics takes every worker four seconds, as long as some ten small cells.
    outputs, targets = outputs.float(), targets.to(outputs.device)
    counts, is_scored = targets.bincount(minlength=classes), outputs.isfinite().all(1)
    shares = targets[(outputs.argmax(dim=1) == targets) & is_scored].bincount(minlength=classes) / counts
    return {name: score(outputs, targets) for name, score in _of_packages().items()} | {
        "macro_accuracy": float(shares[counts > 0].mean()),
        "class_accuracy": [
            share if count else None for share, count in zip(shares.tolist(), counts.tolist(), strict=True)
        ],
        "nll": float(F.cross_entropy(outputs.double(), targets)) if bool(is_scored.all()) else math.nan,
    }


@cache
def _of_packages() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    return {point.name: point.load() for point in entry_points(group="dpopt.metrics")}


def area_under_curve(outputs: Tensor, targets: Tensor) -> float | None:
    """Area under the ROC curve of logits [n, 2] for class numbers [n] (Hanley and McNeil 1982).

    The share of the pairs (record of class 1, record of class 0) in which the first has the larger difference of
    logits, ties counted half; None where a class has no records. A record whose outputs are not all finite is on the
    wrong side of every other.
    """
    score, targets = outputs[:, 1].double() - outputs[:, 0].double(), targets.to(outputs.device)
    score = score.where(outputs.isfinite().all(1), torch.where(targets == 1, -math.inf, math.inf).to(score))
    above, below = score[targets == 1], score[targets == 0].sort().values
    if not len(above) or not len(below):
        return None
    smaller, up_to = torch.searchsorted(below, above), torch.searchsorted(below, above, right=True)
    return float((smaller + up_to).double().mean() / (2 * len(below)))
