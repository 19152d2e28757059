"""Privacy of persons instead of rows: all rows of a person are one record, sampled together and clipped once.

A person's gradient is the mean over their rows, at most K of them, which needs the mechanism of augmented views
(`clipping.views`) and no other: a record has an axis of rows, [n, K, ...]. Its target holds the target of each row and
whether the row is there, [n, K, 2]; the place of a missing row is taken by the person's first one and does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any
from uuid import UUID

import torch
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


def split_owners(data: Any, column: str) -> tuple[Any, Any]:
    """Columns by name, or a Hugging Face data set, without the column that says whose each row is, and that one."""
    if hasattr(data, "remove_columns") and column in data.column_names:
        return data.remove_columns(column), data.with_format(None)[column][:]
    if not (hasattr(data, "columns") or isinstance(data, Mapping)) or column not in data:
        allowed = "expected a column of a data frame, a mapping or a Hugging Face Dataset, or an owner for each row"
        raise ConfigError("unit", column, allowed)
    return {name: data[name] for name in data if name != column}, data[column]


def rows_of(owners: Any) -> list[list[int]]:
    """The rows of each person, in order, by the owner of each row; persons in the order of their first rows.

    ConfigError unless owners are values of one type that are equal for one person, and each row has one.
    """
    plain = owners.tolist() if hasattr(owners, "tolist") else owners
    listed = plain if isinstance(plain, Iterable) else [plain]
    values = [each.item() if getattr(each, "ndim", 1) == 0 else each for each in listed]
    # By value, as texts of values differ for one person (1 and 1.0) or are equal for two (the digits of a tensor).
    kinds = Counter(type(each) if _is_owner(each) else None for each in values)
    if len(kinds) != 1 or None in kinds:
        shown = ", ".join(f"{count} {kind.__name__ if kind else 'missing or else'}" for kind, count in kinds.items())
        allowed = "one for each row, all of one type: whole numbers (as floats below 2^53), texts, dates or UUIDs"
        raise ConfigError("unit", f"owners: {shown}", f"expected {allowed}")
    rows: dict[Any, list[int]] = {}
    for row, owner in enumerate(values):
        rows.setdefault(owner, []).append(row)
    return list(rows.values())


def _is_owner(value: Any) -> bool:
    # Equal values of these types, and no others, are one person; of floats two whole numbers may be one from 2^53 on.
    is_of_kind = isinstance(value, str | bytes | int | float | date | UUID)
    return is_of_kind and value == value and not (isinstance(value, float) and abs(value) >= 2**53)


def by_person(subject: Subject, of_each: Sequence[list[int]], unit_rows: int) -> Subject:
    """`subject` with a record for each person, of the first `unit_rows` of their rows; `of_each` is of `rows_of`."""
    x, y = subject.train
    if (count := sum(map(len, of_each))) != len(x) or y.ndim != 1 or y.is_complex():
        shown = f"{count} owners, {len(x)} rows, targets {list(y.shape)}"
        raise ConfigError("unit", shown, "expected an owner and one number as target for each row")
    # A person's record depends on their own rows and the order of these, and on nobody else's.
    kept = [rows[:unit_rows] for rows in of_each]
    chosen = torch.tensor([rows + rows[:1] * (unit_rows - len(rows)) for rows in kept])
    is_there = torch.tensor([[place < len(rows) for place in range(unit_rows)] for rows in kept])
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
