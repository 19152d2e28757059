"""Real data sets by name: images, texts and tables, checked against what `NAME.yaml` says of them, see `catalogue`.

The records come from the data set's hub through HF `datasets`, or, where the environment variable DPOPT_DATA names a
folder, from the Parquet files `$DPOPT_DATA/NAME/SPLIT-*.parquet` with the hub's columns; those of an entry
`./data/NAME.yaml` also from `./data/NAME/`. Images are decoded once, into the memory-mapped cache, and so are tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt import fields
from dpopt.errors import ConfigError, Missing
from dpopt.fields import cache_root, data_root
from dpopt.files import regular
from dpopt.workloads import cache
from dpopt.workloads.base import Split
from dpopt.workloads.data import records
from dpopt.workloads.data.catalogue import Entry, entries, entry, pinned
from dpopt.workloads.data.source import Source, files_of, identity, missing, open_source, read_column

__all__ = ["Entry", "checkpoint", "entries", "entry", "fingerprint", "images", "missing", "pinned", "table", "texts"]


def images(name: str, split: str, size: int | None = None) -> Split:
    """One split of an image data set: decoded and checked once, memory-mapped from then on.

    A split whose checksum is not known must agree with what was loaded first on this machine. `size`, height and width,
    is needed where those of the images vary: the shorter side is resized to it (bicubically) and the centre cut out.

    Returns:
        uint8 pixels, [n, size, size] (grey) or [n, 3, size, size] (colour), and int64 labels [n].

    Raises:
        ConfigError: an unknown name or split, a size that the data set cannot have, or records that cannot be loaded
            or are not the known ones.
    """
    dataset = _of_kind(name, "image")
    side = dataset.size if size is None else size
    if side is None or side < 1:
        raise ConfigError(f"{dataset.name}.size", size, "the images vary in size: expected the one to resize them to")
    if dataset.size not in (None, side):
        raise ConfigError(f"{dataset.name}.size", size, f"all images are {dataset.size} x {dataset.size}")

    def decoded(source: Source) -> tuple[NDArray[Any], str]:
        return records.decode(dataset, source, side)

    return _kept({"kind": "images", "size": side, "revision": records.REVISION}, dataset, split, decoded)


def table(name: str, split: str) -> Split:
    """One split of a table: inputs float32 [n, width] by `records.encode`, and int64 labels [n], kept as `images` are.

    `ConfigError` as of `images`; also where ranges or values of columns are not stated.
    """
    dataset = _of_kind(name, "table")
    columns = {column: [stated.range, stated.values] for column, stated in dataset.columns.items()}

    def encoded(source: Source) -> tuple[NDArray[Any], str]:
        return records.encode(dataset, source)[0], records.of_columns(dataset, source)

    return _kept({"kind": "tables", "columns": columns, "revision": records.TABLES}, dataset, split, encoded)


def owners(name: str, split: str) -> list[Any]:
    """The owner of each row of a table whose entry names a `unit`; ConfigError where a row has none."""
    return read_column(open_source(entry(name), split), entry(name).unit)


def incoming(name: str, new: Any, size: int = 0) -> Any:
    """New records as `table`, `texts` or, in `size`, `images` gives them: a data frame, a CSV file, or `files_of`.

    Raises:
        ConfigError: they are none of these, or lack a column.
    """
    import pandas as pd

    dataset = entry(name)
    if dataset.kind == "image":
        stored: list[Any] = [{"bytes": None, "path": str(path)} for path in files_of(new)]
        source = Source("x", (dataset.inputs,), len(stored), lambda column: iter([stored]))
        return torch.from_numpy(records.decode(replace(dataset, size=None), source, size)[0])
    if dataset.kind == "text" and isinstance(new, list | tuple):
        new = {dataset.inputs: new}
    try:
        is_file = isinstance(new, str | Path)
        frame = pd.read_csv(regular(fields.path(new, "x"))) if is_file else pd.DataFrame(new)
    except Exception as error:  # the library raises many kinds, none of them for a user to read
        raise ConfigError("x", str(new), f"expected a data frame or a CSV file: {error}") from error
    wanted = tuple(dataset.columns or (dataset.inputs,))
    if lacking := [column for column in wanted if column not in frame]:
        raise ConfigError("x", [str(column) for column in frame], f"there is no column {', '.join(lacking)}")
    columns = {each: [None if pd.isna(value) else value for value in frame[each].tolist()] for each in wanted}
    source = Source("x", wanted, len(frame), lambda column: iter([columns[column]]))
    if dataset.kind == "table":
        inputs, outside = records.encode(dataset, source)
        if strange := ", ".join(f"{column} {count}" for column, count in outside.items() if count):
            how = "a number counts as the nearer end of its range, a category as a missing one"
            warnings.warn(f"x: values that were not stated for training ({strange}): {how}", stacklevel=5)
        return torch.from_numpy(inputs)
    return _strings(source, dataset.inputs)


def texts(name: str, split: str) -> tuple[tuple[Any, ...], Tensor]:
    """One split of a data set of texts with labels, or of pairs of texts; read and checked anew each time.

    Gives n texts and class numbers, int64 [n]; of pairs (sources, targets), each n texts, and zeros.
    """
    dataset = _of_kind(name, "text", "pairs")
    source = open_source(dataset, split)
    inputs = _strings(source, dataset.inputs)
    if dataset.kind == "pairs":
        targets = _strings(source, dataset.targets)
        _confirm(dataset, split, records.of_texts(inputs), records.of_texts(targets))
        return (inputs, targets), torch.zeros(len(inputs), dtype=torch.int64)
    labels = _labels(source, dataset)
    _confirm(dataset, split, records.of_texts(inputs), records.of_arrays([labels]))
    return inputs, torch.from_numpy(labels)


def fingerprint(name: str) -> dict[str, Any]:
    """Plain JSON data that decide the bits of a data set: its checksums, or else the files or the hub's revision."""
    dataset = entry(name)
    checked = {split: [part.inputs, part.targets] for split, part in dataset.splits.items()}
    unknown = {split: identity(dataset, split) for split, part in dataset.splits.items() if not part.inputs}
    resized = {"resizing": records.REVISION} if dataset.kind == "image" and dataset.size is None else {}
    return {"name": dataset.name, "splits": checked | unknown, **resized}


def checkpoint(file_stem: str) -> Path | None:
    """The one file in `$DPOPT_DATA/checkpoints` whose name begins with `file_stem`; None without DPOPT_DATA."""
    root = data_root()
    if root is None:
        return None
    held = sorted(file for file in (root / "checkpoints").glob("*") if file.suffix != ".md")
    matching = [file for file in held if file.name.startswith(file_stem)]
    if len(matching) != 1:
        listed = ", ".join(file.name for file in matching or held) or "no file"
        allowed = f"expected one such file in {root}/checkpoints, not {listed}"
        raise Missing("checkpoint", file_stem, allowed, "weights", file_stem.rstrip("."))
    return matching[0]


def _of_kind(name: str, *kinds: str) -> Entry:
    dataset = entry(name)
    if dataset.kind not in kinds:
        raise ConfigError("data", name, f"expected a data set of the kind {' or '.join(kinds)}, not {dataset.kind}")
    return dataset


def _kept(
    key: dict[str, Any], dataset: Entry, split: str, convert: Callable[[Source], tuple[NDArray[Any], str]]
) -> Split:
    """A split as arrays in the cache; `convert` gives the inputs and their checksum."""
    part = dataset.part(split)
    # This part of the key tells the records of a split from others.
    origin = [part.inputs, part.targets] if part.inputs else identity(dataset, split)

    def build() -> dict[str, NDArray[Any]]:
        source = open_source(dataset, split)
        labels = _labels(source, dataset)  # before the inputs, which may take minutes
        inputs, checksum = convert(source)
        _confirm(dataset, split, checksum, records.of_arrays([labels]))
        return {"x": inputs, "y": labels}

    arrays = cache.arrays({**key, "name": dataset.name, "split": split, "data": origin}, build)
    return Split(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def _confirm(dataset: Entry, split: str, inputs: str, targets: str) -> None:
    """Compare checksums with the entry's or, where it has none, with those of the first load, which are kept."""
    part = dataset.part(split)
    expected, origin = {"inputs": part.inputs, "targets": part.targets}, "the known ones"
    if not part.inputs:
        place = {"folder": str(dataset.folder)} if dataset.folder else {}
        key = {"kind": "checksums", "name": dataset.name, "split": split, **place}
        first = cache.arrays(key, lambda: {"inputs": np.array(inputs), "targets": np.array(targets)})
        expected = {name: str(value) for name, value in first.items()}
        origin = f"those loaded first (if they are meant to, delete {cache_root() / 'checksums'})"
    records.verify(f"{dataset.name}.{split}.{dataset.inputs or 'columns'}", inputs, expected["inputs"], origin)
    records.verify(f"{dataset.name}.{split}.{dataset.targets}", targets, expected["targets"], origin)


def _labels(source: Source, dataset: Entry) -> NDArray[np.int64]:
    labels = np.asarray(read_column(source, dataset.targets))
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= dataset.classes:
        allowed = f"expected whole numbers from 0 to {dataset.classes - 1}"
        raise ConfigError(f"{source.name}.{dataset.targets}", np.unique(labels)[:5].tolist(), allowed)
    return labels.astype(np.int64)


def _strings(source: Source, column: str) -> tuple[str, ...]:
    values = tuple(read_column(source, column))
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ConfigError(f"{source.name}[{row}].{column}", value, "expected a text")
    return values
