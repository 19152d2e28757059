"""Counter-based randomness: who is in draw t, and the noise of its j-th release, as functions of (seed, t, j) alone.

Nothing here has a state, so a run can stop and go on at any draw, and two optimizers with one seed see the same draws.
On the CPU both come from NumPy's Philox4x64 with a 128-bit key; on a GPU the noise comes from the device's own Philox,
re-seeded for each release with 63 bits of a hash. (torch's CPU generator is not used for noise: it keeps 32 bits of its
seed, so two releases of one long run would soon share their noise.)

What is promised of float32 noise on the CPU: each 64-bit word gives two normals by Box and Muller's transform (1958).
Its upper 40 bits k give the radius sqrt(-2 log u), u = (k + 1/2) 2^-40, so the distribution is normal out to 7.5
standard deviations and ends there; the lower 24 give the angle, one of 2^24 directions. Both are computed in float32,
so the smallest radii lie on a grid (0, 3.5e-4, 4.9e-4, ...; one pair in 20,000 has a radius below 0.01). The bits are
the same on any number of threads; on another kind of processor they may differ in the last places. Float64 noise (all
losses) is NumPy's ziggurat, which has neither end nor grid.

Not promised: these generators are not cryptographic, and noise rounded to floating point is not exactly Gaussian.
Whoever publishes a model keeps the seed secret; the seeds of a benchmark are public, so its models are for measuring.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REVISION = 2
"""Part of every result's identity; raised when the same seeds give other draws or other noise than before."""

CPU_BLOCK, DEVICE_BLOCK = 2**16, 2**24
"""Normals made at once: on the CPU as many as stay in its cache, on a device few calls and little memory."""


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


def physical_batches(
    rows: NDArray[np.int64], size: int, multiple: int
) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut `rows` into as few batches of at most `size` as hold them all, of nearly equal length; none is truncated.

    Args:
        rows: row numbers, shape [n].
        size: the most rows of a batch.
        multiple: lengths are rounded up to a multiple of it (or to `size`); `size` itself gives batches of one shape.

    Returns:
        Pairs (row numbers, mask), all of one length; padding repeats row 0 and is masked out. An empty draw gives none.
    """
    count = math.ceil(len(rows) / size)
    if not count:
        return []
    length = min(size, math.ceil(len(rows) / count / multiple) * multiple)
    padded = np.pad(rows, (0, count * length - len(rows)))
    mask = np.arange(len(padded)) < len(rows)
    return list(zip(padded.reshape(count, length), mask.reshape(count, length), strict=True))


def gaussian(
    seed: int, draw: int, release: int, size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal noise of shape [size] for release number `release` of draw number `draw`."""
    return torch.cat(list(_gaussian_blocks(seed, draw, release, size, dtype, torch.device(device))))


def add_gaussian(total: Tensor, std: float, seed: int, draw: int, release: int) -> None:
    """Add `std * gaussian(...)` to `total`, shape [n], in place; takes the memory of one block."""
    blocks = _gaussian_blocks(seed, draw, release, len(total), total.dtype, total.device)
    start = 0
    for noise in blocks:
        total[start : start + len(noise)].add_(noise, alpha=std)
        start += len(noise)


def _gaussian_blocks(
    seed: int, draw: int, release: int, size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Tensor]:
    """The pieces of `gaussian`, one after the other."""
    is_on_device = device.type != "cpu" and dtype != torch.float64
    block = DEVICE_BLOCK if is_on_device else CPU_BLOCK
    sizes = [min(block, size - start) for start in range(0, max(size, 1), block)]
    if is_on_device:
        generator = torch.Generator(device).manual_seed(derive(seed, draw, release) >> 65)
        yield from (torch.randn(n, dtype=dtype, device=device, generator=generator) for n in sizes)
        return
    stream = _stream(seed, _NOISE, draw, release)
    for n in sizes:
        numbers = stream.standard_normal(n) if dtype == torch.float64 else _box_muller(stream.bit_generator, n)
        yield send(torch.from_numpy(numbers), device)


def _box_muller(source: np.random.BitGenerator, size: int) -> NDArray[np.float32]:
    """`size` standard normals, r cos(phi) and r sin(phi) from each 64-bit word of `source`, r = sqrt(-2 log u)."""
    half = math.ceil(size / 2)
    words = source.random_raw(half)
    radius = (words >> np.uint64(24)).view(np.int64).astype(np.float32)
    radius += 0.5
    radius *= 2.0**-40
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    words &= np.uint64(2**24 - 1)
    angle = words.view(np.int64).astype(np.float32)
    angle *= 2 * math.pi / 2**24
    normals = np.empty((2, half), dtype=np.float32)
    np.cos(angle, out=normals[0])
    np.sin(angle, out=normals[1])
    normals *= radius
    return normals.reshape(-1)[:size]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; a GPU is not waited for."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
