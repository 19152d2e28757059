"""Counter-based randomness: who is in draw t, and the noise of its j-th release, as functions of (seed, t, j) alone.

Nothing here has a state, so a run can stop and go on at any draw, and two optimizers with one seed see the same draws.
Who is in a draw comes from NumPy's Philox4x64 with a 128-bit key. Noise on the CPU comes from AES-128 in counter mode
(float32), which is both the faster and the harder to foresee, or from Philox (float64); on a GPU from the device's own
Philox, re-seeded for each release with 63 bits of a hash. (torch's CPU generator is not used for noise: it keeps 32
bits of its seed, so two releases of one long run would soon share their noise.)

Float32 noise on the CPU: each 64-bit word gives two normals by Box and Muller's transform (1958). Its upper 40 bits k
give the radius sqrt(-2 log u), u = (k + 1/2) 2^-40; where k = 0, beyond 7.4 standard deviations, the upper 40 bits of a
further word give u in (0, 2^-40), and so on, so that the tail does not end. The lower 24 bits give the angle. Both are
computed in float32: of the 2^24 directions 92 % remain distinct, and the smallest radii lie on a grid (0, 3.5e-4,
4.9e-4, ...; one pair in 20,000 has a radius below 0.01). The bits are the same on any number of threads; on another
kind of processor they may differ in the last places. Float64 noise (all losses and counts) is NumPy's ziggurat, with 52
random bits a number and an end beyond 12 standard deviations. A tail that ends breaks a claim whose delta is as small
as the mass beyond: torch's normals on a GPU end at 6.8, so each number there is the sum of two of them over sqrt(2).

Last bits tell: where a sum is 0, sum + noise has all of the noise's small bits, and elsewhere it lies on a coarser grid
(Mironov 2012, for Laplace noise). `round_to_grid` makes that grid one for all sums.

Not promised: exactness ((epsilon, delta) is proved for real numbers, while noise and sums are float32, see
`docs/guide/sharp_edges.md` for what that leaves); secrecy of a public seed (an accountant's
epsilon assumes that nobody can compute the noise, nor who is in a draw: `secret_seed` is for models that are
published, while the seeds of a benchmark are public, and its models for measuring); cryptography everywhere (Philox is
no cipher, a GPU's is seeded with 63 bits, and the key of float64 noise is the noise seed itself); even timing (how
long a draw takes tells how many records are in it).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor

REVISION = 2
"""Part of every result's identity; raised when the same seeds give other draws or other noise than before."""

CPU_BLOCK, DEVICE_BLOCK = 2**15, 2**24
"""Normals made at once: on the CPU as many as stay in its cache, on a device few calls and little memory."""


_LEAST_STD, _MOST_STD = 2.0**-114, 2.0**127
"""The range of a std whose grid's step, and one over it, are normal float32 numbers."""
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def derive(*parts: object) -> int:
    """A 128-bit seed from anything that JSON can hold; different parts give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(_JSON.encode(parts).encode()).digest()[:16], "big")


def secret_seed() -> int:
    """A 128-bit seed from the operating system's entropy: whoever does not store it cannot have it again."""
    return secrets.randbits(128)


_ROWS, _NOISE = 1, 2
"""Last word of the counter: membership and noise never share a stream, even under one seed."""


class _Key(ISeedSequence):
    """A Philox key of 128 bits; as an argument `key`, NumPy would ask the system for random numbers beside it."""

    def __init__(self, seed: int) -> None:
        self._bytes = seed.to_bytes(16, "little")

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._bytes, "<u8").astype(np.uint64)


def _stream(seed: int, purpose: int, draw: int, release: int = 0) -> np.random.Generator:
    # The low counter word is the position inside a stream; the others keep streams 2^64 blocks apart.
    counter = np.array([0, draw, release, purpose], dtype=np.uint64)
    key: Any = _Key(seed)  # NumPy's annotations know no other kind of seed sequence than its own
    return np.random.Generator(np.random.Philox(key, counter=counter))


def poisson_rows(seed: int, draw: int, examples: int, rate: float) -> NDArray[np.int64]:
    """Ascending rows [n] of the records in a draw: each of `examples` joins on its own with probability `rate`."""
    return np.flatnonzero(_stream(seed, _ROWS, draw).random(examples) < rate)


def physical_batches(
    rows: NDArray[np.int64], size: int, multiple: int
) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut `rows` into as few batches of at most `size` as hold them all, of nearly equal length; none is truncated.

    Gives pairs (row numbers, mask) of one length, a multiple of `multiple` or `size`; `size` for both gives one shape.
    Padding repeats row 0 and is masked out. An empty draw gives none.
    """
    # Equal parts: a full batch and a tiny rest would cost two calls for one call's work.
    count = math.ceil(len(rows) / size)
    if not count:
        return []
    length = min(size, math.ceil(len(rows) / count / multiple) * multiple)
    padded = np.zeros(count * length, dtype=rows.dtype)
    padded[: len(rows)] = rows
    mask = np.arange(len(padded)) < len(rows)
    return list(zip(padded.reshape(count, length), mask.reshape(count, length), strict=True))


def add_gaussian(total: Tensor, std: float | Tensor, seed: int, draw: int, release: int) -> None:
    """Add the noise of release number `release` of draw number `draw` to `total`, contiguous of shape [n], in place."""
    # Losses and counts are float64, and few; a gradient is float32, made by the block on the CPU, or on its own device.
    if total.dtype == torch.float64:
        noise = _stream(seed, _NOISE, draw, release).standard_normal(len(total))
        total += std * send(torch.from_numpy(noise), total.device)
    elif total.device.type == "cpu":
        words, values = _Words(seed, draw, release), total.numpy()
        for start in range(0, len(values), CPU_BLOCK):
            part = values[start : start + CPU_BLOCK]
            part += _box_muller(words, len(part), std)
    else:
        generator = torch.Generator(total.device).manual_seed(derive(seed, draw, release) >> 65)
        for part in total.split(DEVICE_BLOCK):
            part.add_(_long_tailed(part, generator).mul_(std))


def grid_step(std: float | Tensor) -> float | Tensor:
    """The step of the grid for releases with noise of this `std`: a power of two in (std 2^-13, std 2^-12].

    A std is taken as at least 2^-114, as float32 has no normal number for a smaller one's step.
    """
    # By the mantissa, in [1/2, 1): a logarithm could be rounded up to the next whole number.
    if not isinstance(std, Tensor):
        return 2.0 ** (math.frexp(min(max(std, _LEAST_STD), _MOST_STD))[1] - 13)
    # Not looked at, as a GPU would be waited for.
    std = std.double().clamp(_LEAST_STD, _MOST_STD)
    return std / torch.frexp(std).mantissa * 2.0**-13


def round_to_grid(values: Tensor, std: float | Tensor) -> None:
    """Round released `values` [n], in place, to whole multiples of `grid_step(std)`.

    Float32 numbers beyond 2^11 std, or a little earlier, are such multiples already.

    Args:
        std: of their noise, one for all, or [n]. A float that is 0 or not finite has no grid; a
            tensor is positive, as sensitivities are.
    """
    if isinstance(std, Tensor) or 0 < std < math.inf:
        step = grid_step(std)
        # Powers of two: nothing is rounded but by `round_`. Adding 0 leaves one zero, without a sign.
        values.mul_(1 / step).round_().mul_(step).add_(0.0)


def _long_tailed(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normals such as `like`, out to sqrt(2) times as far as torch's."""
    first, second = (
        torch.randn(len(like), dtype=like.dtype, device=like.device, generator=generator) for _ in range(2)
    )
    # A tail that ends breaks a claim whose delta is as small as the mass beyond.
    return first.add_(second).mul_(math.sqrt(0.5))


class _Words:
    """Random 64-bit words: AES-128 in counter mode with the seed as its key, a stream for each (draw, release)."""

    def __init__(self, seed: int, draw: int, release: int) -> None:
        self._cipher, self._place = AES(seed.to_bytes(16)), draw.to_bytes(6) + release.to_bytes(3)
        self._stream = self._counting(bytes(7))

    def _counting(self, start: bytes) -> CipherContext:
        return Cipher(self._cipher, CTR(self._place + start)).encryptor()

    def take(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words, in memory that is the caller's."""
        words = bytearray(8 * count)
        self._stream.update_into(words, words)
        return np.frombuffer(words, dtype="<u8")

    @cached_property
    def further(self) -> _Words:
        """Words that `take` never gives, for the tail: those from block 2^55 on."""
        words = copy(self)
        # A stream far away, so that a rare tail does not shift the words of all later numbers.
        words._stream = self._counting(b"\x80" + bytes(6))
        return words


def _box_muller(source: _Words, size: int, std: float | Tensor) -> NDArray[np.float32]:
    """`size` normals: std r cos(phi) and std r sin(phi) from each word of `source`, r = sqrt(-2 log u)."""
    half = math.ceil(size / 2)
    words, normals = source.take(half), np.empty((2, half), dtype=np.float32)
    radius = (words >> np.uint64(24)).view(np.int64).astype(np.float32)
    rows = () if radius.min() else np.flatnonzero(radius == 0)  # once in 2^40 words
    radius += 0.5
    radius *= 2.0**-40
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    for row in rows:
        radius[row] = _tail_radius(source.further)
    radius *= np.float32(std)
    cosine, angle = normals
    angle[...] = (words.view("<u4")[::2] & np.uint32(2**24 - 1)).view(np.int32)  # which are faster than 64 bits
    angle *= 2 * math.pi / 2**24
    np.cos(angle, out=cosine)
    np.sin(angle, out=angle)
    normals *= radius
    return normals.reshape(-1)[:size]


def _tail_radius(source: _Words) -> float:
    """sqrt(-2 log u) of a u in (0, 2^-40)."""
    level, upper = 1, 0
    while not upper:
        level, upper = level + 1, int(source.take(1)[0]) >> 24
    return math.sqrt(2 * (40 * level * math.log(2) - math.log(upper + 0.5)))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; a GPU is not waited for."""
    if tensor.device == device:
        return tensor
    # Only pinned memory is copied without waiting for the device.
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
