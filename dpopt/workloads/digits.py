"""scikit-learn's handwritten digits (Alpaydin and Kaynak 1998, UCI optdigits test set): 1,797 images of 8 x 8 pixels.

Part of scikit-learn, so the suite can be tried without a download.
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

_CHECKSUM = "f6d9e39f37dc45d327f6db33428ee58970ccceabb2535a5c179de35886b70443"
_TEST = 360


@dataclass(frozen=True)
class DigitsMLP(Workload):
    """A 64-`hidden`-10 ReLU network on the digits, pixels scaled to [0, 1]; the test split is fixed.

    Args:
        hidden: width of the hidden layer.
        validation: see `Workload`.
    """

    validation: int = 180
    hidden: Count = 64

    pool: ClassVar[int] = 1797 - _TEST
    batch_size: ClassVar[int] = 128
    epochs: ClassVar[float] = 20.0
    classes: ClassVar[int] = 10

    def load(self) -> tuple[Split, Split]:
        return _load()

    def outline(self) -> Outline:
        return outlined(self.model, (64,), _TEST)

    def model(self) -> nn.Module:
        return mlp(64, self.hidden, 10)


@cache
def _load() -> tuple[Split, Split]:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images, labels = bunch.data, bunch.target.astype(np.int64)
    records.verify("digits", records.of_arrays((images, labels)), _CHECKSUM)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    x, y = torch.from_numpy(images / 16).float()[order], torch.from_numpy(labels)[order]
    return Split(x[_TEST:], y[_TEST:]), Split(x[:_TEST], y[:_TEST])
