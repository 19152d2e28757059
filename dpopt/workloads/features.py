"""Features of a frozen backbone, computed once and then trained on as if they were the data.

Where all that is trained lies above a frozen part of a model, the frozen part gives the same numbers for a record at
every step. A workload then loads those numbers in place of its records and its model is only the rest; a run is the
same as with the whole model, to float rounding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpopt.bars import watched
from dpopt.workloads import cache as kept

_BATCH = 32
"""Records that go through the backbone at once: at 224 pixels in less than 1 GB of memory for each core."""


def cached(
    key: Mapping[str, Any],
    backbone: Callable[[], nn.Module],
    x: Tensor,
    transform: Callable[[Tensor], Tensor] = lambda x: x,
    batch: int = _BATCH,
) -> Tensor:
    """Features of the stored records `x`, memory-mapped, float32 [n, f]; computed where they are not yet kept.

    Args:
        key: plain JSON data that decides them: fingerprint of the records, architecture, checksum of the weights,
            everything that `transform` depends on.
        backbone: makes the frozen part; called only if something is to be computed.
        transform: a batch of stored records, on the device -> the backbone's input; nothing random.
    """
    stored = kept.arrays({"kind": "features", **key}, lambda: {"features": computed(backbone, x, transform, batch)})
    return torch.from_numpy(stored["features"])


def computed(
    backbone: Callable[[], nn.Module],
    x: Tensor,
    transform: Callable[[Tensor], Tensor] = lambda x: x,
    batch: int = _BATCH,
) -> NDArray[np.float32]:
    """Features [n, f] of the records `x`, in evaluation mode: on CUDA where there is one, else on all cores."""
    place = device()
    with torch.random.fork_rng():  # weights that are made only to be overwritten draw random numbers
        frozen = backbone().to(place).eval()

    @torch.no_grad()
    def features(rows: Tensor) -> NDArray[np.float32]:
        return frozen(transform(rows.to(place))).float().cpu().numpy()

    # Each core works on batches of its own: threads that share one operation wait for each other, and its rounding
    # would depend on their number.
    batches, workers = x.split(batch), 1 if place.type == "cuda" else cores()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    # TensorFloat-32 would round the kept features to ten bits, and to others than a card without it.
    with threads(1), torch.backends.cudnn.flags(enabled=True, allow_tf32=False), pool:
        return _joined(watched(pool.map(features, batches), len(x), "computing features", batch), len(x))


def _joined(parts: Iterable[NDArray[np.float32]], rows: int) -> NDArray[np.float32]:
    # Each part is let go once it is copied: it may be a view, as the first of a vision transformer's tokens is.
    whole, done = np.empty((0, 0), np.float32), 0
    for part in parts:
        whole = whole if done else np.empty((rows, *part.shape[1:]), np.float32)
        whole[done : done + len(part)] = part
        done += len(part)
    return whole


def device() -> torch.device:
    """The device that computes features: CUDA where there is one, whatever the cells run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cores() -> int:
    """Processor cores that this process may use; all of them where the system does not say, as macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use that many threads for one operation; cells use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checksum_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, types, shapes and values of `weights`."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
