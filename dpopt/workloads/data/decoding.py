"""Encoded images -> one array of pixels, in batches, so that a data set may be larger than memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import Progress

from dpopt._paths import cache_root
from dpopt.errors import ConfigError
from dpopt.workloads.data.catalogue import Entry
from dpopt.workloads.data.source import Source

Pixels = NDArray[np.uint8]
REVISION = 1
"""Raise it when the same records may be decoded or resized to other pixels."""


def decode(dataset: Entry, source: Source, size: int) -> tuple[Pixels, str]:
    """All images of a split.

    Returns:
        pixels [n, size, size] (grey) or [n, 3, size, size] (colour), and the SHA-256 over the decoded pixels before
        any resizing, row after row, the channels of a pixel side by side.

    Raises:
        ConfigError: names the record that is no image, or not of the size that all should have.
    """
    channels = () if dataset.channels == 1 else (dataset.channels,)
    pixels, digest = _scratch((source.records, *channels, size, size)), hashlib.sha256()
    records = (record for batch in source.read(dataset.inputs) for record in batch)
    for row, record in enumerate(_watched(records, source)):
        image = _open(record, dataset, f"{source.name}[{row}].{dataset.inputs}")
        digest.update(image.tobytes())
        pixels[row] = _array(square(image, size))
    return pixels, digest.hexdigest()


def _watched(records: Iterable[Any], source: Source) -> Iterator[Any]:
    """The records, with a progress bar where standard error is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(records, source.records, description=f"decoding {source.name}")


def _open(record: Any, dataset: Entry, where: str) -> Image.Image:
    """The image of a record {"bytes", "path"}, in the data set's number of channels."""
    try:
        content = record["path"] if record["bytes"] is None else BytesIO(record["bytes"])
        image = Image.open(content).convert("L" if dataset.channels == 1 else "RGB")
    except Exception as error:  # whatever is in the record or its bytes
        raise ConfigError(where, _shown(record), f"expected an image ({type(error).__name__}: {error})") from error
    if dataset.size is not None and image.size != (dataset.size, dataset.size):
        raise ConfigError(where, image.size, f"expected an image of {dataset.size} x {dataset.size} pixels")
    return image


def _shown(record: Any) -> str:
    """The start of a record, for errors."""
    return f"{str(record)[:40]}..."


def square(image: Image.Image, size: int) -> Image.Image:
    """The image with its shorter side made `size` (bicubically) and cut to the centre square."""
    return image if image.size == (size, size) else ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def _array(image: Image.Image) -> Pixels:
    """Its pixels, [size, size] or [3, size, size]."""
    array = np.asarray(image)
    return array if array.ndim == 2 else array.transpose(2, 0, 1)


def _scratch(shape: tuple[int, ...]) -> Pixels:
    """An array on the cache's disk, in a file without a name that goes when the array does."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=cache_root()) as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)
