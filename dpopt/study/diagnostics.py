"""Clipping during a run: gradient norms, the share that is left of each class, and the best bound.

Norms come from the passes that the engine makes anyway; only the best bound needs the gradients themselves.

Not private: everything here is computed from raw gradients. It goes into the run's curve and record, marked so, and no
optimizer can reach it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpopt import fields
from dpopt.clipping.flat import scaled
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.fields import Bound
from dpopt.privacy.data import Seen
from dpopt.study.optimal_clip import mse, optimal_clip

_CLIPS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Bounds C that class weights are computed for, beside the run's own."""
_ESTIMATES = 8
"""Times in a run that it is estimated."""
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""The quantiles that describe a distribution of norms: its ends, 90 % and 50 % of it, and its median."""


class Diagnostics:
    """Watches a `DataOracle`: hand it over as `watch`.

    Args:
        engine: computes the gradients of single examples.
        bound: the bound C above which the run's clip rule shortens gradients; None where it has none.
        noise, expected_batch, draws: of the run; `noise` is its noise multiplier of gradients.
        classes: number of classes; 0 where targets are none.
    """

    def __init__(
        self, engine: VmapEngine, bound: float | None, noise: float, expected_batch: float, draws: int, classes: int
    ) -> None:
        self._engine, self._bound, self._noise = engine, bound, noise
        self._batch, self._draws, self._classes = expected_batch, draws, classes
        self._norms: list[Tensor] = []
        self._last: list[tuple[Tensor, Tensor]] = []
        self._seen: Seen | None = None
        self._estimates = 0

    def __call__(self, seen: Seen) -> None:
        norms = seen.norms[seen.mask]
        self._norms.append(norms)
        if self._classes and seen.draw >= 0.75 * self._draws:  # class weights are those of the last quarter
            self._last.append((norms, seen.y[seen.mask]))
        if len(norms):  # an empty draw has no best bound, and the one before it stands in
            self._seen = seen

    def state(self) -> dict[str, Any]:
        """For `restore`, when a stopped run goes on."""
        return {"norms": self._norms, "last": self._last, "estimates": self._estimates}

    def restore(self, state: dict[str, Any]) -> None:
        self._norms, self._last, self._estimates = state["norms"], state["last"], state["estimates"]

    def entry(self) -> dict[str, Any]:
        """The entry of the curve: about all draws since the last one."""
        norms = torch.cat(self._norms) if self._norms else torch.zeros(0)
        # An entry is of the draws since the one before, and norms of a long run need not stay in memory.
        self._norms = []
        content: dict[str, Any] = {"private": False, "norms": _norm_quantiles(norms)}
        if self._bound is not None and len(norms):
            content["clipped"] = float((norms > self._bound).double().mean())
        seen = self._seen
        if seen is not None and seen.draw * _ESTIMATES >= self._estimates * self._draws:
            self._estimates = seen.draw * _ESTIMATES // self._draws + 1
            content |= self._best_bound(seen)
        return content

    def summary(self) -> dict[str, Any]:
        """The entry of the record: each class's weight w_y(C) in the last quarter of the run, {C: [classes]}."""
        content: dict[str, Any] = {"private": False}
        if self._last:
            norms, labels = (torch.cat(parts) for parts in zip(*self._last, strict=True))
            clips = {*_CLIPS, self._bound} if self._bound else {*_CLIPS}
            weights = {f"{c:g}": class_weights(norms, labels, c, self._classes).tolist() for c in clips}
            parts = [norms[labels == label] for label in range(self._classes)]
            medians = [float(part.median()) if len(part) else math.nan for part in parts]  # torch has none of nothing
            content |= {"class_weights": weights, "class_norms": medians}
        return content

    def _best_bound(self, seen: Seen) -> dict[str, Any]:
        """C* and MSE(C) of the draw's mean gradient, estimated from 128 of its examples as they are clipped."""
        rows = seen.mask.nonzero()[:128, 0]
        x, y = seen.x[rows], seen.y[rows]
        parts = [weight * self._engine.gradients(theta, x, y) for weight, theta in seen.points]
        gradients = scaled(torch.stack(parts).sum(dim=0), seen.scale)
        # An engine leaves these out of its sum, so the bound is not chosen by them.
        gradients = gradients[gradients.isfinite().all(dim=1)]
        if not len(gradients):
            return {}
        # The mean over n examples stands for that over B: as much bias, and noise sigma C / B.
        noise = self._noise * len(gradients) / self._batch
        errors = {"best": optimal_clip(gradients, noise)}
        if self._bound is not None:
            errors["own"] = self._bound, mse(gradients, self._bound, noise)
        squared = len(gradients) ** 2  # errors are those of the sum, and curves show those of the mean
        return {
            name: {"C": c, "bias": error.bias / squared, "noise": error.noise / squared}
            for name, (c, error) in errors.items()
        }


def class_weights(norms: Tensor, labels: Tensor, clip: float, classes: int) -> Tensor:
    """w_y(C) = mean of min(1, C / ||g_i||) over the examples of class y (Section 5, Figures 3 and 4). Not private.

    Args:
        norms: L2 norms of the gradients before clipping, shape [n]. One that is not finite has weight 0, as an engine
            leaves such an example out of its sum.
        labels: classes 0 ... classes - 1, shape [n].
        clip, classes: bound C > 0, and the number of classes.

    Returns:
        float64, shape [classes]; NaN for a class without examples.

    Raises:
        ConfigError: a bound out of range, or labels that are no classes.
    """
    fields.convert(clip, Bound, "clip", {})
    if norms.ndim != 1 or norms.shape != labels.shape:
        shapes = tuple(norms.shape), tuple(labels.shape)
        raise ConfigError("labels", shapes, "expected as many labels as norms, both of shape [n]")
    strange = labels[(labels < 0) | (labels >= classes)]
    if len(strange):
        raise ConfigError("labels", int(strange[0]), f"expected classes from 0 to {classes - 1}")
    weight = torch.where(norms.isfinite(), (clip / norms.double()).clamp(max=1), 0.0)
    total = torch.zeros(classes, dtype=torch.float64, device=norms.device).index_add_(0, labels.long(), weight)
    return total / torch.bincount(labels.long(), minlength=classes)


def _norm_quantiles(norms: Tensor) -> dict[str, float]:
    # Named such as "q5" and "q50"; without finite norms all are NaN.
    finite = norms[norms.isfinite()].double()
    levels = torch.tensor(_QUANTILES, dtype=torch.float64, device=norms.device)
    values = torch.quantile(finite, levels) if len(finite) else torch.full_like(levels, torch.nan)
    return {f"q{100 * level:g}": value for level, value in zip(_QUANTILES, values.tolist(), strict=True)}
