"""The share of each class, and of each example, that clipping leaves; and norms of gradients.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616, Section 5 and Figures 3 and 4.

Not private: computed from raw gradient norms. Diagnostics only, never an input of a private run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Bound

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""The quantiles that describe a distribution of norms: its ends, 90 % and 50 % of it, and its median."""


def class_weights(norms: Tensor, labels: Tensor, clip: float, classes: int) -> Tensor:
    """w_y(C) = mean of min(1, C / ||g_i||) over the examples of class y. Not private.

    Args:
        norms: L2 norms of the gradients before clipping, shape [n], as engines give them. A norm that is not finite
            counts with weight 0: an engine leaves such an example out of its sum.
        labels: classes 0 ... classes - 1, shape [n].
        clip: bound C > 0.
        classes: number of classes.

    Returns:
        float64, shape [classes]; NaN for a class without examples.

    Raises:
        ConfigError: a bound out of range, or labels that are no classes.
    """
    fields.convert(clip, Bound, "clip", {})
    _check(norms, labels, classes)
    weight = torch.where(norms.isfinite(), (clip / norms.double()).clamp(max=1), 0.0)
    total = torch.zeros(classes, dtype=torch.float64, device=norms.device).index_add_(0, labels.long(), weight)
    return total / torch.bincount(labels.long(), minlength=classes)


def relative_weights(norms: Tensor, labels: Tensor, clip: float, classes: int, reference: float = 1.0) -> Tensor:
    """Class weights as the paper's Figure 4 shows them: w_y(C) / w_r(C). Not private.

    The class r is the one with the largest weight at the bound `reference`, the same for every C: a weight of 1 is as
    much as the class has that a small bound favours. Dividing by its weight at the same C is our reading.

    Args:
        norms, labels, clip, classes: see `class_weights`.
        reference: the bound that decides r.

    Raises:
        ConfigError: as `class_weights`.
    """
    # A class without examples has no weight and must not be the one that all are divided by.
    favoured = class_weights(norms, labels, reference, classes).nan_to_num(nan=-1.0).argmax()
    weights = class_weights(norms, labels, clip, classes)
    return weights / weights[favoured]


def norm_quantiles(norms: Tensor) -> dict[str, float]:
    """The `QUANTILES` of finite gradient norms, by names such as "q5" and "q50". Not private.

    Args:
        norms: shape [n]; values that are not finite are left out, and where none is left all quantiles are NaN.
    """
    finite = norms[norms.isfinite()].double()
    levels = torch.tensor(QUANTILES, dtype=torch.float64, device=norms.device)
    values = torch.quantile(finite, levels) if len(finite) else torch.full_like(levels, torch.nan)
    return {f"q{100 * level:g}": value for level, value in zip(QUANTILES, values.tolist(), strict=True)}


def _check(norms: Tensor, labels: Tensor, classes: int) -> None:
    if norms.ndim != 1 or norms.shape != labels.shape:
        shapes = tuple(norms.shape), tuple(labels.shape)
        raise ConfigError("labels", shapes, "expected as many labels as norms, both of shape [n]")
    strange = labels[(labels < 0) | (labels >= classes)]
    if len(strange):
        raise ConfigError("labels", int(strange[0]), f"expected classes from 0 to {classes - 1}")
