"""The name of a cell, which is a function of its content alone; needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def identity(cell: Mapping[str, Any]) -> str:
    """The run id of a cell's content: the first 16 hex digits of the SHA-256 over its canonical JSON.

    Raises:
        ValueError: the content holds a number that JSON does not know.
    """
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
