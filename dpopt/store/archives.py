"""`runs.jsonl.xz`: sealed lines of JSON, packed. The same lines give the same bytes."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpopt import files
from dpopt.files import Damaged

RUNS = "runs.jsonl.xz"
LARGEST = 2**31
"""Bytes that a file may unpack to: a few kilobytes can stand for terabytes."""
_MEMORY = 2**28
"""Bytes that unpacking may use; a file can ask for a dictionary of gigabytes."""


def pack(lines: Iterable[bytes]) -> bytes:
    """The content of the file that holds `lines`."""
    # The library's preset, so that the same runs give the same bytes and a changed file shows.
    return lzma.compress(b"".join(lines))


def unpack(path: Path) -> Iterator[dict[str, Any]]:
    """The content of each line, without its seal; raises as `files.content`, and `Damaged` where it was changed."""
    packed, unpacker = files.content(path), lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY)
    rest, total, number = b"", 0, 0
    while not unpacker.eof:
        try:
            part = unpacker.decompress(packed, files.LARGEST)
        except (lzma.LZMAError, EOFError) as error:
            raise Damaged(f"{path}: {error}") from error
        if not part and unpacker.needs_input and not unpacker.eof:
            raise Damaged(f"{path}: it ends too early")
        packed, total = b"", total + len(part)
        *whole, rest = (rest + part).split(b"\n")
        # Looked at after each piece: the size that the file states of itself may be false.
        if total > LARGEST or len(rest) > files.LARGEST:
            raise Damaged(f"{path}: it unpacks to more than {LARGEST} bytes, or to lines of {files.LARGEST}")
        for line in whole:
            number += 1
            yield files.unsealed(line + b"\n", f"{path}, line {number}")
    if rest or unpacker.unused_data:
        raise Damaged(f"{path}: there is more in it than whole lines")
