"""The digits and the breast cancer table of scikit-learn, with which suites can be tried without a download.

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak 1998, UCI optdigits test set), and 30 measurements of 569 tumours
(Street, Wolberg and Mangasarian 1993).
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

_CHECKSUMS = {
    "digits": "f6d9e39f37dc45d327f6db33428ee58970ccceabb2535a5c179de35886b70443",
    "breast_cancer": "25e2eb7b7a8745b1bde5ba18bc4969983d2e2f403291ecd5bde4a29ef30c3859",
}
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
"""The least and the largest value of each column of the tumours, as their description has stated them since 1995."""


@dataclass(frozen=True)
class _Bundled(Workload):
    """A ReLU network of one hidden layer on a data set of scikit-learn; the test split is fixed.

    Args:
        hidden: width of the hidden layer.
        validation: see `Workload`.
    """

    hidden: Count = 64

    width: ClassVar[int]
    tested: ClassVar[int]
    epochs: ClassVar[float] = 20.0

    def outline(self) -> Outline:
        return outlined(self.model, (self.width,), self.tested)

    def model(self) -> nn.Module:
        return mlp(self.width, self.hidden, self.classes)


@dataclass(frozen=True)
class DigitsMLP(_Bundled):
    """A 64-`hidden`-10 ReLU network on the digits, pixels scaled to [0, 1]; the test split is fixed."""

    validation: int = 180

    width: ClassVar[int] = 64
    tested: ClassVar[int] = 360
    pool: ClassVar[int] = 1797 - 360
    batch_size: ClassVar[int] = 128
    classes: ClassVar[int] = 10

    def load(self) -> tuple[Split, Split]:
        return _load("digits", self.tested)


@dataclass(frozen=True)
class BreastCancer(_Bundled):
    """A 30-`hidden`-2 ReLU network; columns are scaled to [0, 1] by their published ranges, the test split is fixed."""

    validation: int = 55
    hidden: Count = 16

    width: ClassVar[int] = 30
    tested: ClassVar[int] = 114
    pool: ClassVar[int] = 569 - 114
    batch_size: ClassVar[int] = 64
    classes: ClassVar[int] = 2

    def load(self) -> tuple[Split, Split]:
        return _load("breast_cancer", self.tested)


@cache
def _load(name: str, tested: int) -> tuple[Split, Split]:
    from sklearn import datasets

    bunch: Any = getattr(datasets, f"load_{name}")()
    inputs, labels = bunch.data, bunch.target.astype(np.int64)
    records.verify(name, records.of_arrays((inputs, labels)), _CHECKSUMS[name])
    low, high = (0, 16) if name == "digits" else _RANGES
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(inputs)))
    x = torch.from_numpy(((inputs - low) / (high - low)).clip(0, 1)).float()[order]
    y = torch.from_numpy(labels)[order]
    return Split(x[tested:], y[tested:]), Split(x[:tested], y[:tested])
