"""Classification of the rows of a table by a small network, or by logistic regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from dpopt import fields
from dpopt.errors import ConfigError, Missing
from dpopt.fields import Few, FewOrNone
from dpopt.workloads import data, models
from dpopt.workloads.base import Outline, Predict, Split, Workload, mlp, outlined
from dpopt.workloads.data import records
from dpopt.workloads.metrics import area_under_curve


@dataclass(frozen=True)
class TableClassification(Workload):
    """A ReLU network on a table's columns, which are scaled by the public ranges of its entry, see `records.encode`.

    Args:
        data: name of a table.
        hidden: width of the hidden layer, 0 for logistic regression, or the widths of several.
        architecture: a model of another package in place of the network, see `models.make_outside`.
        validation: see `Workload`.
    """

    data: str = ""
    hidden: FewOrNone | tuple[Few, ...] = 64
    architecture: str | None = fields.later(None)

    batch_size: ClassVar[int] = 256
    epochs: ClassVar[float] = 10.0
    revision: ClassVar[int] = records.TABLES

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("workload.data", self.data, "expected the name of a table; `dpopt new data` makes one")
        object.__setattr__(self, "data", data.pinned(self.data, "table"))
        super().__post_init__()

    @property
    def pool(self) -> int:  # type: ignore[override]
        return data.entry(self.data).part("train").records

    @property
    def classes(self) -> int:  # type: ignore[override]
        return data.entry(self.data).classes

    def check(self) -> None:
        self.outline()
        if unit := data.entry(self.data).unit:  # whoever trains a suite counts rows
            how = "a suite protects single rows: use `dpopt fit`, or take `unit` out of its entry to protect rows alone"
            raise ConfigError("workload.data", self.data, f"{unit} says whose its rows are, and {how}")

    def missing(self) -> list[Missing]:
        return data.missing(self.data)

    def outline(self) -> Outline:
        dataset = data.entry(self.data)
        return outlined(self.model, (dataset.width,), dataset.part("test").records)

    def load(self) -> tuple[Split, Split]:
        return data.table(self.data, "train"), data.table(self.data, "test")

    def read(self, new: Any) -> Tensor:
        return data.incoming(self.data, new)

    def model(self) -> nn.Module:
        if self.architecture:
            return models.make_outside(self.architecture, self.classes, data.entry(self.data).width)
        hidden = self.hidden if isinstance(self.hidden, tuple) else (self.hidden,) * bool(self.hidden)
        return mlp(data.entry(self.data).width, *hidden, self.classes)

    def report(self, predict: Predict, split: Split) -> dict[str, Any]:
        outputs = predict(split.x)
        report = super().report(lambda x: outputs, split)
        return report if self.classes > 2 else {**report, "auc": area_under_curve(outputs, split.y)}
