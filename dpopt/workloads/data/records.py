"""Records as arrays, and their SHA-256: encoded images -> pixels, rows of a table -> numbers.

A table's numbers follow from the ranges and values that its entry states and from nothing that is in the records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dpopt import files
from dpopt.bars import watched
from dpopt.errors import ConfigError
from dpopt.fields import cache_root
from dpopt.workloads.data.catalogue import Entry
from dpopt.workloads.data.source import Source

REVISION, TABLES = 1, 2
"""Raise them when the same records may become other pixels, or the same rows other numbers."""


def of_arrays(arrays: Iterable[NDArray[Any]]) -> str:
    """SHA-256 over the bytes of `arrays`, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def of_texts(texts: Sequence[str]) -> str:
    """SHA-256 over the lengths of the UTF-8 texts as little-endian int64, all lengths first, then over the texts."""
    encoded = [text.encode() for text in texts]
    digest = hashlib.sha256(np.array([len(text) for text in encoded], "<i8").tobytes())
    digest.update(b"".join(encoded))
    return digest.hexdigest()


def of_columns(dataset: Entry, source: Source) -> str:
    """SHA-256 over the name and the values of every column but the target, as JSON lists, in the file's order."""
    digest = hashlib.sha256()
    for name in watched(source.columns, len(source.columns), f"{source.name}: checksum of columns"):
        if name != dataset.targets:
            digest.update(json.dumps([name, source.values(name)], default=str).encode())
    return digest.hexdigest()


def verify(name: str, computed: str, expected: str, origin: str = "the known ones") -> None:
    """Raise `ConfigError` unless the SHA-256 `computed` of the data `name` is the `expected` one, that of `origin`."""
    if computed != expected:
        raise ConfigError(name, computed, f"the data differ from {origin}: SHA-256 {expected}")


def encoded(record: Mapping[str, Any]) -> bytes:
    """The file of an image, from the record or from where the record says; `Damaged` where it is no regular file."""
    return files.content(Path(record["path"]), math.inf) if record["bytes"] is None else record["bytes"]


def decode(dataset: Entry, source: Source, size: int) -> tuple[NDArray[np.uint8], str]:
    """All images of a split, in batches, so that a data set may be larger than memory.

    Returns:
        pixels [n, size, size] (grey) or [n, 3, size, size] (colour), and the SHA-256 over the decoded pixels before
        any resizing, row after row, the channels of a pixel side by side.
    """
    channels = () if dataset.channels == 1 else (dataset.channels,)
    cache_root().mkdir(parents=True, exist_ok=True)
    # The pixels may not fit in memory. A file without a name goes with the array, also where this process is killed.
    with TemporaryFile(dir=cache_root()) as file:
        pixels = np.memmap(file, np.uint8, "w+", shape=(source.records, *channels, size, size))
    digest, mode = hashlib.sha256(), "L" if dataset.channels == 1 else "RGB"
    records = (record for batch in source.read(dataset.inputs) for record in batch)
    for row, record in enumerate(watched(records, source.records, f"decoding {source.name}")):
        where = f"{source.name}[{row}].{dataset.inputs}"
        try:
            image = Image.open(BytesIO(encoded(record))).convert(mode)
        except Exception as error:  # whatever is in the record or its bytes
            allowed = f"expected an image ({type(error).__name__}: {error})"
            raise ConfigError(where, f"{str(record)[:40]}...", allowed) from error
        if dataset.size is not None and image.size != (dataset.size, dataset.size):
            raise ConfigError(where, image.size, f"expected an image of {dataset.size} x {dataset.size} pixels")
        # Of the decoded image: a checksum then holds whatever size a workload asks for.
        digest.update(image.tobytes())
        array = np.asarray(square(image, size))
        pixels[row] = array if array.ndim == 2 else array.transpose(2, 0, 1)
    return pixels, digest.hexdigest()


def square(image: Image.Image, size: int) -> Image.Image:
    """The image with its shorter side made `size` (bicubically) and cut to the centre square."""
    return image if image.size == (size, size) else ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def encode(dataset: Entry, source: Source) -> tuple[NDArray[np.float32], dict[str, int]]:
    """All rows of a split, float32 [n, width]: the columns in the entry's order, each as one or more numbers.

    A column of numbers is two: the number, moved into its range and scaled to [-1, 1], and 1 where it is missing (the
    number is then 0). A column of categories has one number for each stated value and one for all others, those that
    are missing among them: 1 for the row's and 0 for the rest.

    Also column -> how many of its values the entry does not state, without those that are missing.
    """
    inputs, outside, at = np.zeros((source.records, dataset.width), np.float32), dict[str, int](), 0
    for name, column in dataset.columns.items():
        values = source.values(name)
        if isinstance(column.values, tuple):
            # A value that nobody stated counts with the missing ones: the width must not depend on the records.
            place = {value: number for number, value in enumerate(column.values)}
            numbers = [len(place) if value is None else _category(value, place) for value in values]
            encoded: NDArray[Any] = np.eye(len(place) + 1, dtype=np.float32)[numbers]
            outside[name] = numbers.count(len(place)) - values.count(None)
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
            outside[name] = int(((raw < low) | (raw > high)).sum())
        inputs[:, at : at + encoded.shape[1]] = encoded
        at += encoded.shape[1]
    return inputs, outside


def _category(value: Any, place: Mapping[str, int]) -> int:
    """The number of a category; a whole number may be spelt 1 or 1.0, as a column with a missing value has it."""
    texts = [str(value)]
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        texts += [f"{value:.0f}", f"{value:.1f}"]
    return next((place[text] for text in texts if text in place), len(place))
