"""What is slow to make and always the same: decoded images, tokenised text, features, pretrained layers.

Kept as memory-mapped arrays under `$DPOPT_CACHE` (by default `~/.cache/dpopt`), in a folder named by the content of the
key that they were made from: another key makes others, nothing is ever changed, and deleting the folder is safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpopt._paths import cache_root

Arrays = dict[str, NDArray[Any]]


def arrays(key: Mapping[str, Any], build: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
    """The arrays that `build` makes, memory-mapped; `build` is called where they are not yet kept.

    Processes that need the same arrays at the same time wait for the one that makes them.

    Args:
        key: plain JSON data that decides every bit of the arrays, checksums of what they are made from included; its
            entry "kind" names the folder.
        build: gives the arrays by name.

    Returns:
        The arrays, mapped copy-on-write: writing to one changes nothing that is kept.
    """
    text = json.dumps(key, sort_keys=True, allow_nan=False)
    folder = cache_root() / str(key["kind"]) / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _make(folder, text, build)
    return {file.stem: np.load(file, mmap_mode="c") for file in sorted(folder.glob("*.npy"))}


def _make(folder: Path, key: str, build: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
    """Fill a folder beside `folder` and rename it, so that `folder` is whole or not there; the lock is held."""
    for abandoned in folder.parent.glob(f"{folder.name}.*/"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name, array in build().items():
            np.save(partial / f"{name}.npy", array)
        (partial / "key.json").write_text(key)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` against other processes; the system frees it where a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
