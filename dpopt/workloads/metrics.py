"""Scores of a trained classifier beside its accuracy."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def classification_report(outputs: Tensor, targets: Tensor, classes: int) -> dict[str, Any]:
    """Scores over one split, as plain data.

    Args:
        outputs: logits [n, classes].
        targets: class numbers [n].
        classes: how many there are.

    Returns:
        macro_accuracy: mean of the per-class accuracies over the classes that have records.
        class_accuracy: share of each class's records whose largest logit is that class's; None where it has none.
        nll: mean negative log-likelihood, in nats.
    """
    # By hand, as importing torchmetrics takes every worker four seconds, as long as some ten small cells.
    outputs, targets = outputs.float(), targets.to(outputs.device)
    counts = targets.bincount(minlength=classes)
    shares = targets[outputs.argmax(dim=1) == targets].bincount(minlength=classes) / counts
    return {
        "macro_accuracy": float(shares[counts > 0].mean()),
        "class_accuracy": [
            share if count else None for share, count in zip(shares.tolist(), counts.tolist(), strict=True)
        ],
        "nll": float(F.cross_entropy(outputs.double(), targets)),
    }
