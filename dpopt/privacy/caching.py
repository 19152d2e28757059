"""A cache on disk, under `$DPOPT_CACHE`, of numbers that take long to compute and are always the same.

A file is named by a hash of all that its numbers follow from, and holds a checksum of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dpopt import files
from dpopt.fields import cache_root


def place(kind: str, key: Any) -> Path:
    """The file in the folder `kind` for the numbers that follow from `key`, plain JSON data."""
    return cache_root() / kind / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"


def read(path: Path) -> dict[str, float] | None:
    """The numbers that were written, bit for bit; None where there are none or the file is damaged."""
    with suppress(files.Damaged, OSError, ValueError, TypeError, KeyError, AttributeError):
        content = files.read(path)
        numbers = {str(name): float(value) for name, value in content["numbers"].items()}
        if content["sha256"] == _checksum(numbers):
            return numbers
    return None


def write(path: Path, numbers: Mapping[str, float]) -> None:
    """Keep `numbers` where that is possible."""
    with suppress(OSError):  # a file that cannot be written costs time, nothing else
        # By one rename, so that nobody reads half of it.
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"numbers": numbers, "sha256": _checksum(numbers)}, file)
        os.replace(file.name, path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Inside, no other process computes the numbers of `path`, where the cache can be written."""
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(files.locked(path.with_suffix(".lock")))
        yield


def _checksum(numbers: Mapping[str, float]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()
