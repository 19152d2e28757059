"""What a cell's content says of it beside its fields: its name, and its clipping bound; needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def identity(cell: Mapping[str, Any]) -> str:
    """The run id of a cell's content: the first 16 hex digits of the SHA-256 over its canonical JSON.

    Raises:
        ValueError: the content holds a number that JSON does not know.
    """
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


WITH_BOUND = ("abadi", "normalized")
"""The clip rules that have a clipping bound C; it is their `bound`."""


def clipping_bound(cell: Mapping[str, Any]) -> float:
    """The clipping bound C that a cell is trained with; NaN where its clip rule has none, or finds its own."""
    optimizer = cell["optimizer"]
    rule = optimizer.get("clip")
    while rule is None and isinstance(optimizer := optimizer.get("base"), Mapping):
        rule = optimizer.get("clip")
    has_bound = isinstance(rule, Mapping) and rule.get("rule") in WITH_BOUND
    return float(rule["bound"]) if has_bound else math.nan
