"""A cell's run id and clipping bound, from its content alone; needs no torch."""

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
    # Every published run id is a hash of these bytes: another separator or order would orphan all of them.
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


WITH_BOUND = ("abadi", "normalized")
"""The clip rules that have a clipping bound C; it is their `bound`."""


def clipping_bound(cell: Mapping[str, Any]) -> float:
    """The clipping bound C that a cell is trained with; NaN where its clip rule has none, or finds its own."""
    optimizer, rule = cell["optimizer"], None
    # A filter has no clip rule; that of the optimizer inside it is the one that counts.
    while rule is None and isinstance(optimizer, Mapping):
        optimizer, rule = optimizer.get("base"), optimizer.get("clip")
    if not isinstance(rule, Mapping) or rule.get("rule") not in WITH_BOUND:
        return math.nan
    return float(rule["bound"])
