"""Rows of a table -> numbers, by the ranges and values that its entry states and by nothing that is in the records."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpopt.errors import ConfigError
from dpopt.workloads.data.catalogue import Entry
from dpopt.workloads.data.source import Source

REVISION = 1
"""Raise it when the same records may become other numbers."""


def encode(dataset: Entry, source: Source) -> NDArray[np.float32]:
    """All rows of a split, float32 [n, width]: the columns in the entry's order, each as one or more numbers.

    A column of numbers is two: the number, moved into its range and scaled to [-1, 1], and 1 where it is missing (the
    number is then 0). A column of categories has one number for each stated value and one for all others, those that
    are missing among them: 1 for the row's and 0 for the rest.

    Raises:
        ConfigError: a column that is not stated, or text where a number should be.
    """
    inputs, at = np.zeros((source.records, dataset.width), np.float32), 0
    for name, column in dataset.columns.items():
        values = [value for batch in source.read(name) for value in batch]
        if isinstance(column.values, tuple):
            # A value that nobody stated counts with the missing ones: the width must not depend on the records.
            place = {value: number for number, value in enumerate(column.values)}
            numbers = [len(place) if value is None else place.get(str(value), len(place)) for value in values]
            encoded: NDArray[Any] = np.eye(len(place) + 1, dtype=np.float32)[numbers]
        else:
            assert isinstance(column.range, tuple)  # `dataset.width` asks for it
            low, high = column.range
            if wrong := next((value for value in values if not isinstance(value, int | float | None)), None):
                allowed = "expected numbers, as a range is stated; categories have `values`"
                raise ConfigError(f"{source.name}.{name}", wrong, allowed)
            raw = np.array([np.nan if value is None else value for value in values], np.float64)
            is_missing = np.isnan(raw)
            scaled = 2 * (np.clip(raw, low, high) - low) / (high - low) - 1
            encoded = np.stack([np.where(is_missing, 0, scaled), is_missing], axis=1)
        inputs[:, at : at + encoded.shape[1]] = encoded
        at += encoded.shape[1]
    return inputs


def digest(dataset: Entry, source: Source) -> str:
    """SHA-256 over the name and the values of every column but the target, as JSON lists, in the file's order."""
    content = hashlib.sha256()
    for name in source.columns:
        if name != dataset.targets:
            values = [value for batch in source.read(name) for value in batch]
            content.update(json.dumps([name, values], default=str).encode())
    return content.hexdigest()
