"""Privacy of persons instead of rows: all rows of a person are one record, sampled together and clipped once.

A person's gradient is the mean over their rows, at most K of them, which needs the mechanism of augmented views
(`clipping.views`) and no other: a record has an axis of rows, [n, K, ...]. Its target holds the target of each row and
whether the row is there, [n, K, 2]; the place of a missing row is taken by the person's first one and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.clipping.losses import RecordLoss
from dpopt.clipping.views import Views
from dpopt.errors import ConfigError
from dpopt.training.subject import Subject
from dpopt.workloads.base import Split


class PersonLoss(RecordLoss):
    """The mean of `function` over the rows of a person that are there; outputs [n, K, ...], targets [n, K, 2]."""

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        is_there = target[..., 1] > 0
        losses = self.each(*self.rows(output, target)).view(is_there.shape)
        return losses.where(is_there, 0).sum(dim=1) / is_there.sum(dim=1)

    def rows(self, output: Any, target: Tensor) -> tuple[Any, Tensor]:
        """Each row as a record of its own."""
        return output.flatten(0, 1), target[..., 0].flatten()


def separated(data: Any, column: str) -> tuple[Any, list[Any]]:
    """Columns by name without the one that says whose each row is, and that one."""
    if not (hasattr(data, "columns") or isinstance(data, Mapping)) or column not in data:
        raise ConfigError("unit", column, "expected a column of a data frame or a mapping, or an owner for each row")
    return {str(name): data[name] for name in data if name != column}, list(data[column])


def rows_of(owners: Sequence[Any]) -> list[NDArray[np.int64]]:
    """The rows of each of `owners`, one of a row, in order; ConfigError where a row has none."""
    if missing := sum(value is None or value != value for value in owners):
        raise ConfigError("unit", f"{missing} of {len(owners)} rows without an owner", "leave them out, or name one")
    numbers, counts = np.unique(np.array([str(value) for value in owners]), return_inverse=True, return_counts=True)[1:]
    return np.split(np.argsort(numbers.reshape(-1), kind="stable"), np.cumsum(counts)[:-1])


def grouped(subject: Subject, owners: Sequence[Any], most: int) -> Subject:
    """`subject` with a record for each of `owners`, one of a row, that has the first `most` of their rows."""
    x, y = subject.train
    if len(owners) != len(x) or y.ndim != 1 or y.is_complex():
        shown = f"{len(owners)} owners, {len(x)} rows, targets {list(y.shape)}"
        raise ConfigError("unit", shown, "expected an owner and one number as target for each row")
    # A person's record depends on their own rows and the order of these, and on nobody else's.
    kept = [rows[:most] for rows in rows_of(owners)]
    chosen = torch.tensor(np.array([np.append(rows, [rows[0]] * (most - len(rows))) for rows in kept])).long()
    is_there = torch.tensor([[place < len(rows) for place in range(most)] for rows in kept])
    targets = torch.stack([y[chosen.to(y.device)], is_there.to(y)], dim=-1)

    def transform(x: Tensor) -> Tensor:
        return subject.transform(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    return replace(
        subject,
        model=Views(subject.model, subject.first.x.ndim),
        loss=PersonLoss(subject.loss, has_views=True),
        transform=transform,
        train=Split(x[chosen.to(x.device)], targets),
    )
