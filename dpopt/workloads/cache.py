"""A cache of arrays that are slow to make and always the same: images, tokens, features, pretrained layers.

Kept as memory-mapped arrays under `$DPOPT_CACHE` (by default `~/.cache/dpopt`), in a folder named by the content of the
key that they were made from: another key makes others, nothing is ever changed, and deleting the folder is safe.

Before a process uses a file, and again when the file has changed, it compares the file's SHA-256 with that of its
making. What is damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpopt import files
from dpopt.fields import cache_root

_Arrays = dict[str, NDArray[Any]]
_CHECKSUMS = "checksums.json"
"""The file that names the others of a folder, with their SHA-256."""


def arrays(key: Mapping[str, Any], build: Callable[[], Mapping[str, NDArray[Any]]]) -> _Arrays:
    """The arrays that `build` makes by name; it is called where they are not yet kept, or are damaged.

    Processes that need the same arrays at the same time wait for the one that makes them. They are mapped
    copy-on-write: writing to one changes nothing that is kept.

    Args:
        key: plain JSON data that decides every bit of the arrays, checksums of what they are made from included; its
            entry "kind" names the folder.
    """
    text = json.dumps(key, sort_keys=True, allow_nan=False)
    folder = cache_root() / str(key["kind"]) / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        return _mapped(folder)
    except (FileNotFoundError, ValueError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(folder.with_suffix(".lock")):
            try:
                return _mapped(folder)  # another process may have made it while this one waited
            except FileNotFoundError:
                _make(folder, text, build)
            except ValueError as error:
                print(f"cache {folder}: {error}; making it again", flush=True)
                _make(folder, text, build)
            return _mapped(folder)


def checksum(file: Path) -> str:
    """SHA-256 of a file; read once in each process, and again when the file has changed."""
    status = file.stat()
    return _checksum(file, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _checksum(file: Path, *state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _mapped(folder: Path) -> _Arrays:
    """The arrays of `folder`; FileNotFoundError where there is none, ValueError where its files are not those made."""
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        noted = json.loads((folder / _CHECKSUMS).read_bytes())
        if noted != {file.name: checksum(file) for file in folder.glob("*.npy")}:
            raise ValueError("its files do not have the checksums that they were made with")
        return {Path(name).stem: np.load(folder / name, mmap_mode="c") for name in sorted(noted)}
    except OSError as error:
        raise ValueError(error) from error


def _make(folder: Path, key: str, build: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
    # The folder is filled beside its place and then renamed, so that it is whole or not there.
    for abandoned in folder.parent.glob(f"{folder.name}.*/"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    damaged = partial.with_name(f"{partial.name}.damaged")
    try:
        for name, array in build().items():
            np.save(partial / f"{name}.npy", array)
        sums = {file.name: checksum(file) for file in partial.glob("*.npy")}
        (partial / _CHECKSUMS).write_text(json.dumps(sums, sort_keys=True))
        (partial / "key.json").write_text(key)
        if folder.exists():  # taken away last: other processes may use its files, and `build` may fail
            os.replace(folder, damaged)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)
