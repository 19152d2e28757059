"""SHA-256 over records, and the one place that compares it with the expected one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpopt.errors import ConfigError
from dpopt.fields import cache_root
from dpopt.workloads import cache
from dpopt.workloads.data.catalogue import Entry


def of_arrays(arrays: Iterable[NDArray[Any]]) -> str:
    """SHA-256 over the bytes of `arrays`, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def of_texts(texts: Sequence[str]) -> str:
    """SHA-256 over the lengths of the UTF-8 texts as little-endian int64, all lengths first, then over the texts."""
    encoded = [text.encode() for text in texts]
    digest = hashlib.sha256(np.array([len(text) for text in encoded], "<i8").tobytes())
    digest.update(b"".join(encoded))
    return digest.hexdigest()


def verify(name: str, arrays: Iterable[NDArray[Any]], expected: str) -> None:
    """Raise `ConfigError` unless the SHA-256 over the bytes of `arrays` is `expected`."""
    _compare(name, of_arrays(arrays), expected, "the known ones")


def confirm(dataset: Entry, split: str, inputs: str, targets: str) -> None:
    """Compare checksums with the entry's or, where it has none, with those of the first load, which are kept.

    Raises:
        ConfigError: they differ.
    """
    part = dataset.part(split)
    expected, origin = {"inputs": part.inputs, "targets": part.targets}, "the known ones"
    if not part.inputs:
        place = {"folder": str(dataset.folder)} if dataset.folder else {}
        key = {"kind": "checksums", "name": dataset.name, "split": split, **place}
        first = cache.arrays(key, lambda: {"inputs": np.array(inputs), "targets": np.array(targets)})
        expected = {name: str(value) for name, value in first.items()}
        origin = f"those loaded first (if they are meant to, delete {cache_root() / 'checksums'})"
    _compare(f"{dataset.name}.{split}.{dataset.inputs or 'columns'}", inputs, expected["inputs"], origin)
    _compare(f"{dataset.name}.{split}.{dataset.targets}", targets, expected["targets"], origin)


def _compare(name: str, computed: str, expected: str, origin: str) -> None:
    if computed != expected:
        raise ConfigError(name, computed, f"the data differ from {origin}: SHA-256 {expected}")
