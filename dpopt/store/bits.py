"""One bit for each test record of a run, 1 where its answer is right, as a short text in the run's record."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray


def packed(bits: NDArray[np.bool_]) -> str:
    """Bits [n] as a text that `unpacked` reads."""
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()


def unpacked(text: str, count: int) -> NDArray[np.bool_]:
    """The `count` bits in a text of `packed`; raises ValueError where it does not hold as many."""
    size = -(-count // 8)
    try:
        # one byte more than expected, as a short text can stand for gigabytes
        content = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"expected {count} bits: {error}") from error
    if len(content) != size:
        raise ValueError(f"expected {count} bits, in {size} bytes and not {len(content)}")
    return np.unpackbits(np.frombuffer(content, np.uint8), count=count).astype(bool)
