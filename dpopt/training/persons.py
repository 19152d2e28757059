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
from torch import Tensor

from dpopt.clipping.losses import RecordLoss
from dpopt.clipping.views import Views
from dpopt.errors import ConfigError, unknown
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


def separated(data: Any, column: str) -> tuple[Any, Sequence[Any]]:
    """Columns by name without the one that says whose each row is, and that one."""
    is_frame = hasattr(data, "columns")
    names = list(data.columns if is_frame else data) if is_frame or isinstance(data, Mapping) else []
    if column not in names:
        raise unknown("unit", column, names, "expected a column of a data frame or a mapping, or an owner for each row")
    if is_frame:
        return data.drop(columns=column), data[column].tolist()
    return {name: data[name] for name in names if name != column}, list(data[column])


def grouped(subject: Subject, owners: Sequence[Any], most: int) -> Subject:
    """`subject` with a record for each of `owners`, one of a row, which has its first `most` rows at most.

    Raises:
        ConfigError: a row has no owner, or a target that is no number.
    """
    x, y = subject.train
    values = list(owners)
    if len(values) != len(x):
        raise ConfigError("unit", f"{len(values)} values", f"expected an owner for each of {len(x)} rows")
    if missing := sum(value is None or value != value for value in values):
        raise ConfigError("unit", f"{missing} of {len(values)} rows without an owner", "leave them out, or name one")
    if y.ndim != 1 or y.is_complex():
        raise ConfigError("unit", f"targets {list(y.shape)}", "expected one number for each row")
    # A person's record depends on their own rows and the order of these, and on nobody else's.
    numbers = np.unique(np.array([str(value) for value in values]), return_inverse=True)[1].reshape(-1)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    place = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    kept = place < most
    persons = len(starts)
    rows, is_there = np.repeat(order[starts][:, None], most, axis=1), np.zeros((persons, most), bool)
    rows[numbers[order][kept], place[kept]] = order[kept]
    is_there[numbers[order][kept], place[kept]] = True
    chosen = torch.from_numpy(rows).to(x.device)
    marks = torch.from_numpy(is_there).to(y)
    dims = subject.first.x.ndim

    def transform(x: Tensor) -> Tensor:
        return subject.transform(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    return replace(
        subject,
        model=Views(subject.model, dims),
        loss=PersonLoss(subject.loss, has_views=True),
        transform=transform,
        train=Split(x[chosen], torch.stack([y[chosen.to(y.device)], marks], dim=-1)),
    )


def crowded(owners: Sequence[Any]) -> tuple[int, int]:
    """The number of persons, and the most rows that one of them has."""
    counts = np.unique(np.array([str(value) for value in owners]), return_counts=True)[1]
    return len(counts), int(counts.max())
