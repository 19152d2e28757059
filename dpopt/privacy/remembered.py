"""Numbers that take long to compute and are always the same, in small files under `$DPOPT_CACHE`.

A file is named by a hash of all that its numbers follow from, and has a checksum of them: one that is damaged is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpopt._paths import cache_root


def place(kind: str, key: Any) -> Path:
    """The file in the folder `kind` for the numbers that follow from `key`, plain JSON data."""
    return cache_root() / kind / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"


def read(path: Path) -> dict[str, float] | None:
    """The numbers that were written, bit for bit; None where there are none or the file is damaged."""
    try:
        content = json.loads(path.read_text())
        numbers = {str(name): float(value) for name, value in content["numbers"].items()}
        return numbers if content["sha256"] == _checksum(numbers) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def write(path: Path, numbers: Mapping[str, float]) -> None:
    """Keep `numbers` where that is possible; a file that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"numbers": numbers, "sha256": _checksum(numbers)}, file)
        os.replace(file.name, path)
    except OSError:
        pass


def _checksum(numbers: Mapping[str, float]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()
