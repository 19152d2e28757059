"""Counter-based randomness: who is in draw t, and the noise of its j-th release, as functions of (seed, t, j) alone.

Nothing here has a state, so a run can stop and go on at any draw, and two optimizers with one seed see the same draws.
On the CPU both come from NumPy's Philox4x64 with a 128-bit key; on a GPU the noise comes from the device's own Philox,
re-seeded for each release with 63 bits of a hash. (torch's CPU generator is not used for noise: it keeps 32 bits of its
seed, so two releases of one long run would soon share their noise.)

Not promised: these generators are not cryptographic, and noise is rounded to float32 (float64 for losses). Whoever
publishes a model keeps the seed secret; the seeds of a benchmark are public, so its models are for measuring only.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from numpy.typing import NDArray


def derive(*parts: object) -> int:
    """A 128-bit seed from anything that JSON can hold; different parts give unrelated seeds."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


_ROWS, _NOISE = 1, 2
"""Last word of the counter: membership and noise never share a stream, even under one seed."""


def _stream(seed: int, purpose: int, draw: int, release: int = 0) -> np.random.Generator:
    # The low counter word is the position inside a stream; the others keep streams 2^64 blocks apart.
    counter = np.array([0, draw, release, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter))


def poisson_rows(seed: int, draw: int, examples: int, rate: float) -> NDArray[np.int64]:
    """Rows of the records in draw number `draw`: each of `examples` joins on its own with probability `rate`.

    Returns:
        Ascending row numbers, shape [n] with n ~ Binomial(examples, rate); may be empty.
    """
    return np.flatnonzero(_stream(seed, _ROWS, draw).random(examples) < rate)


def physical_batches(rows: NDArray[np.int64], size: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut `rows` into batches of exactly `size`, the last one padded; none is ever dropped or truncated.

    Returns:
        Pairs (row numbers [size], mask [size]); padding repeats row 0 and is masked out. An empty draw gives no batch.
    """
    batches = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        padding = size - len(part)
        mask = np.arange(size) < len(part)
        batches.append((np.pad(part, (0, padding)), mask))
    return batches


def gaussian(
    seed: int, draw: int, release: int, size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Standard normal noise of shape [size] for release number `release` of draw number `draw`."""
    if torch.device(device).type == "cpu" or dtype == torch.float64:
        stream = _stream(seed, _NOISE, draw, release)
        numbers = stream.standard_normal(size, dtype=np.float64 if dtype == torch.float64 else np.float32)
        return torch.from_numpy(numbers).to(device)
    generator = torch.Generator(device).manual_seed(derive(seed, draw, release) >> 65)
    return torch.randn(size, dtype=dtype, device=device, generator=generator)
