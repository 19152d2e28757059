"""Encoded images -> one array of pixels, in batches, so that a data set may be larger than memory."""

from __future__ import annotations

import hashlib
from io import BytesIO
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dpopt.errors import ConfigError
from dpopt.fields import cache_root
from dpopt.workloads.data.catalogue import Entry
from dpopt.workloads.data.source import Source
from dpopt.workloads.features import watched

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
    cache_root().mkdir(parents=True, exist_ok=True)
    # The pixels may not fit in memory. A file without a name goes with the array, also where this process is killed.
    with TemporaryFile(dir=cache_root()) as file:
        pixels = np.memmap(file, np.uint8, "w+", shape=(source.records, *channels, size, size))
    digest, mode = hashlib.sha256(), "L" if dataset.channels == 1 else "RGB"
    records = (record for batch in source.read(dataset.inputs) for record in batch)
    for row, record in enumerate(watched(records, source.records, f"decoding {source.name}")):
        where = f"{source.name}[{row}].{dataset.inputs}"
        try:
            content = record["path"] if record["bytes"] is None else BytesIO(record["bytes"])
            image = Image.open(content).convert(mode)
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
