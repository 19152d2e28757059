"""The Wisconsin diagnostic breast cancer data (Street, Wolberg and Mangasarian 1993): 569 tumours, 30 measurements.

Part of scikit-learn, as the digits are, so that a table can be tried without a download.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dpopt.fields import Count
from dpopt.workloads.base import Outline, Split, Workload, mlp, outlined
from dpopt.workloads.data import records

_CHECKSUM = "25e2eb7b7a8745b1bde5ba18bc4969983d2e2f403291ecd5bde4a29ef30c3859"
_TEST = 114
_RANGES = np.array(
    [
        [6.981, 9.71, 43.79, 143.5, 0.053, 0.019, 0, 0, 0.106, 0.05],
        [0.112, 0.36, 0.757, 6.802, 0.002, 0.002, 0, 0, 0.008, 0.001],
        [7.93, 12.02, 50.41, 185.2, 0.071, 0.027, 0, 0, 0.156, 0.055],
        [28.11, 39.28, 188.5, 2501, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097],
        [2.873, 4.885, 21.98, 542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03],
        [36.04, 49.54, 251.2, 4254, 0.223, 1.058, 1.252, 0.291, 0.664, 0.208],
    ]
).reshape(2, 30)
"""The least and the largest value of each column, as the data's description states them since 1995."""


@dataclass(frozen=True)
class BreastCancer(Workload):
    """A 30-`hidden`-2 ReLU network; columns are scaled to [0, 1] by their published ranges, the test split is fixed.

    Args:
        hidden: width of the hidden layer.
        validation: see `Workload`.
    """

    validation: int = 55
    hidden: Count = 16

    pool: ClassVar[int] = 569 - _TEST
    batch_size: ClassVar[int] = 64
    epochs: ClassVar[float] = 20.0
    classes: ClassVar[int] = 2

    def load(self) -> tuple[Split, Split]:
        return _load()

    def outline(self) -> Outline:
        return outlined(self.model, (30,), _TEST)

    def model(self) -> nn.Module:
        return mlp(30, self.hidden, 2)


@cache
def _load() -> tuple[Split, Split]:
    from sklearn.datasets import load_breast_cancer

    bunch: Any = load_breast_cancer()
    columns, labels = bunch.data, bunch.target.astype(np.int64)
    records.verify("breast cancer", records.of_arrays((columns, labels)), _CHECKSUM)
    low, high = _RANGES
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(columns)))
    x = torch.from_numpy(((columns - low) / (high - low)).clip(0, 1)).float()[order]
    y = torch.from_numpy(labels)[order]
    return Split(x[_TEST:], y[_TEST:]), Split(x[:_TEST], y[:_TEST])
