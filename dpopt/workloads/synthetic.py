"""Classification of synthetic records: logistic regression whose difficulty is a field, and an unbalanced table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from dpopt.fields import Count, Positive
from dpopt.workloads.base import Outline, Split, Workload, mlp, outlined
from dpopt.workloads.data import records

_TEST = 2000
_TABLE_TEST = 5000
_COLUMNS = 30
_SHARES = [0.40, 0.25, 0.15, 0.10, 0.06, 0.04]
_CHECKSUM = "3106f0ec706781e274edc4f26addc7eee29adcf45366a98bf48e7e61331c5c80"


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


@dataclass(frozen=True)
class SyntheticTable(Workload):
    """A 30-`hidden`-6 ReLU network on a synthetic table: 30 numeric columns, six classes of 40, 25, 15, 10, 6 and 4 %.

    `sklearn.datasets.make_classification` (after Guyon 2003, the data of the NIPS 2003 variable selection benchmark): a
    class is two Gaussian clusters in 12 columns; 8 columns are linear combinations of these, 10 are noise; 3 % of the
    labels are drawn anew, uniformly over the classes. Values are rounded to two decimals, so that machines whose
    arithmetic differs in the last bit have the same table, and divided by 4, a public constant. The splits are 12,000
    records for training and validation, and 5,000 to test.

    Args:
        hidden: width of the hidden layer.
        validation: see `Workload`.

    Raises:
        ConfigError: the installed scikit-learn generates another table.
    """

    validation: int = 2000
    hidden: Count = 64

    pool: ClassVar[int] = 12_000
    batch_size: ClassVar[int] = 256
    epochs: ClassVar[float] = 10.0
    classes: ClassVar[int] = len(_SHARES)

    def load(self) -> tuple[Split, Split]:
        x, y = _table()
        return Split(x[: self.pool], y[: self.pool]), Split(x[self.pool :], y[self.pool :])

    def outline(self) -> Outline:
        return outlined(self.model, (_COLUMNS,), _TABLE_TEST)

    def model(self) -> nn.Module:
        return mlp(_COLUMNS, self.hidden, self.classes)


@cache
def _table() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import make_classification

    x, y = make_classification(
        SyntheticTable.pool + _TABLE_TEST,
        _COLUMNS,
        n_informative=12,
        n_redundant=8,
        n_classes=len(_SHARES),
        weights=_SHARES,
        flip_y=0.03,
        random_state=0,
    )
    hundredths, classes = np.rint(100 * x).astype("<i4"), y.astype("<i8")
    records.verify("synthetic_table", records.of_arrays((hundredths, classes)), _CHECKSUM)
    return torch.from_numpy(hundredths).float() / 400, torch.from_numpy(classes)
