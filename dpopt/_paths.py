"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$DPOPT_CACHE`, by default `~/.cache/dpopt`: solved noise, decoded data, features."""
    return Path(os.environ.get("DPOPT_CACHE") or Path.home() / ".cache" / "dpopt")
