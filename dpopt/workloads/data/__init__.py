"""Real data sets by name: images, texts and tables, checked against what `NAME.yaml` says of them, see `catalogue`.

The records come from the data set's hub through HF `datasets`, or, where the environment variable DPOPT_DATA names a
folder, from the Parquet files `$DPOPT_DATA/NAME/SPLIT-*.parquet` with the hub's columns; those of an entry
`./data/NAME.yaml` also from `./data/NAME/`. Images are decoded once, into the memory-mapped cache, and so are tables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpopt.errors import ConfigError, Missing
from dpopt.workloads import cache
from dpopt.workloads.base import Split
from dpopt.workloads.data import checksums, decoding, tables
from dpopt.workloads.data.catalogue import Column, Entry, SplitEntry, entry, names, pinned
from dpopt.workloads.data.source import Source, absent, identity, open_source, read_column

__all__ = [
    "Column",
    "Entry",
    "SplitEntry",
    "Texts",
    "checkpoint",
    "entry",
    "fingerprint",
    "images",
    "missing",
    "names",
    "pinned",
    "table",
    "texts",
]


class Texts(NamedTuple):
    """The records of a text data set.

    Attributes:
        texts: n texts; of a data set of pairs, two tuples of n texts: (sources, targets).
        labels: class numbers, int64 [n]; of a data set of pairs, zeros.
    """

    texts: tuple[Any, ...]
    labels: Tensor


def missing(name: str) -> list[Missing]:
    """What of a data set is not on this machine: nothing, or the data set and how to get it; cheap, asks no hub.

    Raises:
        ConfigError: an unknown name.
    """
    return absent(entry(name))


def images(name: str, split: str, size: int | None = None) -> Split:
    """One split of an image data set: decoded and checked once, memory-mapped from then on.

    A split whose checksum is not known must agree with what was loaded first on this machine.

    Args:
        name: see `names`.
        split: "train", "test" or another one that the entry has.
        size: height and width of the images. Needed where theirs vary: the shorter side is resized to it (bicubically)
            and the centre cut out.

    Returns:
        uint8 pixels, [n, size, size] (grey) or [n, 3, size, size] (colour), and int64 labels [n].

    Raises:
        ConfigError: an unknown name or split, a size that the data set cannot have, or records that cannot be loaded
            or are not the known ones.
    """
    found, part = _part(name, split, "image")
    side = _size(found, size)
    key = {"kind": "images", "size": side, "revision": decoding.REVISION, **_records(found, split, part)}
    arrays = cache.arrays(key, lambda: _decoded(found, split, side))
    return Split(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def table(name: str, split: str) -> Split:
    """One split of a table: encoded and checked once, memory-mapped from then on.

    Returns:
        float32 inputs [n, width], see `tables.encode`, and int64 labels [n].

    Raises:
        ConfigError: as `images`; also where ranges or values of columns are not stated.
    """
    found, part = _part(name, split, "table")
    columns = {column: [stated.range, stated.values] for column, stated in found.columns.items()}
    key = {"kind": "tables", "columns": columns, "revision": tables.REVISION, **_records(found, split, part)}
    arrays = cache.arrays(key, lambda: _encoded(found, split))
    return Split(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def texts(name: str, split: str) -> Texts:
    """One split of a data set of texts with labels, or of pairs of texts; read and checked anew each time.

    Raises:
        ConfigError: as `images`.
    """
    found, _ = _part(name, split, "text", "pairs")
    source = open_source(found, split)
    inputs = _strings(source, found.inputs)
    if found.kind == "pairs":
        targets = _strings(source, found.targets)
        checksums.confirm(found, split, checksums.of_texts(inputs), checksums.of_texts(targets))
        return Texts((inputs, targets), torch.zeros(len(inputs), dtype=torch.int64))
    labels = _labels(source, found)
    checksums.confirm(found, split, checksums.of_texts(inputs), checksums.of_arrays([labels]))
    return Texts(inputs, torch.from_numpy(labels))


def fingerprint(name: str) -> dict[str, Any]:
    """Plain JSON data that decide the bits of a data set: its checksums, or else the files or the hub's revision."""
    found = entry(name)
    known = {split: [part.inputs, part.targets] for split, part in found.splits.items()}
    unknown = {split: identity(found, split) for split, part in found.splits.items() if not part.inputs}
    resized = {"resizing": decoding.REVISION} if found.kind == "image" and found.size is None else {}
    return {"name": found.name, "splits": known | unknown, **resized}


def checkpoint(file_stem: str) -> Path | None:
    """The one file in `$DPOPT_DATA/checkpoints` whose name starts with `file_stem`; None where DPOPT_DATA is not set.

    Raises:
        Missing: there is no such file, or more than one.
    """
    root = os.environ.get("DPOPT_DATA")
    if not root:
        return None
    held = sorted(file for file in (Path(root) / "checkpoints").glob("*") if file.suffix != ".md")
    found = [file for file in held if file.name.startswith(file_stem)]
    if len(found) != 1:
        listed = ", ".join(file.name for file in found or held) or "no file"
        allowed = f"expected one such file in {root}/checkpoints, not {listed}"
        raise Missing("checkpoint", file_stem, allowed, "weights", file_stem.rstrip("."))
    return found[0]


def _part(name: str, split: str, *kinds: str) -> tuple[Entry, SplitEntry]:
    found = entry(name)
    if found.kind not in kinds:
        raise ConfigError("data", name, f"expected a data set of the kind {' or '.join(kinds)}, not {found.kind}")
    return found, found.part(split)


def _records(found: Entry, split: str, part: SplitEntry) -> dict[str, Any]:
    """What in the key of a cache tells the records of a split from others."""
    known = [part.inputs, part.targets] if part.inputs else identity(found, split)
    return {"name": found.name, "split": split, "data": known}


def _size(found: Entry, size: int | None) -> int:
    """Height and width that the images of a data set are to have."""
    side = found.size if size is None else size
    if side is None or side < 1:
        raise ConfigError(f"{found.name}.size", size, "the images vary in size: expected the one to resize them to")
    if found.size not in (None, side):
        raise ConfigError(f"{found.name}.size", size, f"all images are {found.size} x {found.size}")
    return side


def _decoded(found: Entry, split: str, size: int) -> dict[str, NDArray[Any]]:
    source = open_source(found, split)
    labels = _labels(source, found)
    pixels, digest = decoding.decode(found, source, size)
    checksums.confirm(found, split, digest, checksums.of_arrays([labels]))
    return {"x": pixels, "y": labels}


def _encoded(found: Entry, split: str) -> dict[str, NDArray[Any]]:
    source = open_source(found, split)
    labels, inputs = _labels(source, found), tables.encode(found, source)
    checksums.confirm(found, split, tables.digest(found, source), checksums.of_arrays([labels]))
    return {"x": inputs, "y": labels}


def _labels(source: Source, found: Entry) -> NDArray[np.int64]:
    """The labels [n], from 0 to the number of classes."""
    labels = np.asarray(read_column(source, found.targets))
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= found.classes:
        allowed = f"expected whole numbers from 0 to {found.classes - 1}"
        raise ConfigError(f"{source.name}.{found.targets}", np.unique(labels)[:5].tolist(), allowed)
    return labels.astype(np.int64)


def _strings(source: Source, column: str) -> tuple[str, ...]:
    values = tuple(read_column(source, column))
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ConfigError(f"{source.name}[{row}].{column}", value, "expected a text")
    return values
