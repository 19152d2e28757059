"""Logistic regression on synthetic data whose difficulty is a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from dpopt.fields import Count, Positive
from dpopt.workloads.base import Outline, Split, Workload, outlined

_TEST = 2000


@dataclass(frozen=True)
class SyntheticLogReg(Workload):
    """Binary labels from a logistic model: P(y = 1) = sigmoid(margin <x, w>), x ~ N(0, I_dim), ||w|| = 1.

    Args:
        dim: number of features.
        margin: scale of the logits; larger is easier.
        validation: see `Workload`.
    """

    validation: int = 1000
    dim: Count = 20
    margin: Positive = 4.0

    pool: ClassVar[int] = 9000
    batch_size: ClassVar[int] = 256
    epochs: ClassVar[float] = 5.0

    def load(self) -> tuple[Split, Split]:
        generator = np.random.default_rng(0)
        w = generator.standard_normal(self.dim)
        x = generator.standard_normal((self.pool + _TEST, self.dim))
        chance = 1 / (1 + np.exp(-self.margin * x @ w / np.linalg.norm(w)))
        y = torch.from_numpy((generator.random(len(x)) < chance).astype(np.int64))
        features = torch.from_numpy(x).float()
        return Split(features[: self.pool], y[: self.pool]), Split(features[self.pool :], y[self.pool :])

    def outline(self) -> Outline:
        return outlined(self.model, (self.dim,), _TEST)

    def model(self) -> nn.Module:
        return nn.Linear(self.dim, 2)
