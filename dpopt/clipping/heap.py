"""Keeping the heap of a CPU run from shrinking and growing at every step."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Let glibc's allocator keep what is freed, as torch's does on a GPU; gives whether that could be set."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
