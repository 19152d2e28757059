"""MNIST (LeCun, Cortes and Burges): 60,000 + 10,000 images of 28 x 28 pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from dpopt.errors import Missing
from dpopt.workloads import data
from dpopt.workloads.base import Outline, Split, Workload, mlp, outlined


@dataclass(frozen=True)
class MnistMLP(Workload):
    """ADADP's network: 784-256-256-256-10 without biases, 334,336 parameters (Koskela and Honkela 2020, section 5.1).

    The paper's text says two hidden layers; its parameter count and the authors' code say three.

    Args:
        validation: see `Workload`.
    """

    validation: int = 5000

    data: ClassVar[str] = "mnist"
    pool: ClassVar[int] = 60_000
    batch_size: ClassVar[int] = 200
    epochs: ClassVar[float] = 5.0
    classes: ClassVar[int] = 10

    def missing(self) -> list[Missing]:
        return data.missing(self.data)

    def outline(self) -> Outline:
        return outlined(self.model, (28, 28), data.entry(self.data).part("test").records)

    def load(self) -> tuple[Split, Split]:
        return data.images(self.data, "train"), data.images(self.data, "test")

    def transform(self, x: Tensor) -> Tensor:
        mean, std = self._moments
        return x.float().div_(255).sub_(mean).div_(std)

    @cached_property  # every draw asks for it
    def _moments(self) -> tuple[float, float]:
        (mean,), (std,) = data.entry(self.data).mean, data.entry(self.data).std
        return mean, std

    def model(self) -> nn.Module:
        return mlp(784, 256, 256, 256, 10, bias=False)
