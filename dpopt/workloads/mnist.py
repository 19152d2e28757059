"""MNIST (LeCun, Cortes and Burges): 60,000 + 10,000 images of 28 x 28 pixels, hub id `ylecun/mnist`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpopt.errors import ConfigError
from dpopt.workloads.base import Split, Workload, data_folder, mlp, verify

HUB_ID = "ylecun/mnist"
CHECKSUMS = {  # SHA-256 over all decoded pixels in row order
    "train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
}
LABEL_CHECKSUMS = {  # SHA-256 over all labels as int64
    "train": "e474323ac02fc156161b0bbb1f8c9cfeb327a74bcd9f9680a8385269a24f566c",
    "test": "2fd8de6bdb8d11780b4b96dc57847bcfe6953f7c32aa48bfcd8237c3b7847243",
}
COUNTS = {"train": 60_000, "test": 10_000}
MEAN, STD = 0.1307, 0.3081


@dataclass(frozen=True)
class MnistMLP(Workload):
    """ADADP's network: 784-256-256-256-10 without biases, 334,336 parameters (Koskela and Honkela 2020, section 5.1).

    The paper's text says two hidden layers; its parameter count and the authors' code say three.

    Args:
        validation: see `Workload`.
    """

    validation: int = 5000

    pool: ClassVar[int] = COUNTS["train"]
    batch_size: ClassVar[int] = 200
    epochs: ClassVar[float] = 5.0

    def check(self) -> None:
        data_folder("mnist", [f"{split}-*.parquet" for split in COUNTS])

    def load(self) -> tuple[Split, Split]:
        return _load("train"), _load("test")

    def transform(self, x: Tensor) -> Tensor:
        return x.float().div_(255).sub_(MEAN).div_(STD)

    def model(self) -> nn.Module:
        return mlp(784, 256, 256, 256, 10, bias=False)


@cache
def _load(split: str) -> Split:
    records = _records(split)
    if not {"image", "label"} <= set(records.column_names):
        raise ConfigError(f"mnist.{split}", records.column_names, "expected the columns image and label")
    images = np.stack([np.asarray(image, dtype=np.uint8) for image in records["image"]])
    if len(images) != COUNTS[split]:
        raise ConfigError(f"mnist.{split}", len(images), f"expected {COUNTS[split]} records")
    verify(f"mnist.{split}", (images,), CHECKSUMS[split])
    labels = np.asarray(records["label"], dtype=np.int64)
    verify(f"mnist.{split}.label", (labels,), LABEL_CHECKSUMS[split])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _records(split: str) -> Any:
    """The split as an HF data set: from `$DPOPT_DATA/mnist` where that is set, else from the hub (or its cache)."""
    import datasets

    folder = data_folder("mnist")
    try:
        if folder is None:
            return datasets.load_dataset(HUB_ID, split=split)
        return datasets.load_dataset("parquet", data_files={split: f"{folder}/{split}-*.parquet"}, split=split)
    except Exception as error:  # the library raises many kinds, none of them for a user to read
        hint = "set DPOPT_DATA to a folder that holds mnist/*.parquet, or go online once"
        raise ConfigError(
            "mnist", HUB_ID if folder is None else str(folder), f"cannot be loaded ({error}); {hint}"
        ) from error
