"""Tar archives of results folders. They come from elsewhere: nothing is written outside of a folder of their own, nor
more than their size allows for.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from dpopt.errors import ConfigError

SMALL, RATIO = 2**28, 100
"""Bytes that any archive may unpack to, and how many times its size a larger one may: records shrink to a twentieth."""
OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open, b"\x5d\0\0": lzma.open}
"""First bytes of a compressed file -> what reads it."""


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """A temporary folder with what a tar archive holds, compressed or not.

    Raises:
        ConfigError: it cannot be unpacked, or holds something else than plain files below its folder, or too much.
    """
    with TemporaryDirectory() as folder:
        try:
            _unpack(archive, Path(folder).resolve())
        except (
            tarfile.TarError,
            OSError,
            EOFError,
            ValueError,
            lzma.LZMAError,
            zlib.error,
        ) as error:  # a name may hold a NUL
            raise ConfigError("FROM", str(archive), f"no tar archive that can be unpacked ({error})") from error
        yield Path(folder)


def _unpack(archive: Path, folder: Path) -> None:
    """Write an archive's files into `folder`.

    The standard library has filters against archives that mean harm, but not before Python 3.11.4.
    """
    with archive.open("rb") as file:
        start = file.read(8)
    opener = next((opener for first, opener in OPENERS.items() if start.startswith(first)), open)
    limit = max(SMALL, RATIO * archive.stat().st_size)
    with opener(archive, "rb") as content, tarfile.open(fileobj=_Bounded(content, limit), mode="r|") as members:
        for member in members:
            target = (folder / member.name).resolve()
            is_plain = (member.isfile() and not member.issparse()) or member.isdir()  # holes take no room in an archive
            if not is_plain or not target.is_relative_to(folder):
                raise tarfile.TarError(f"{member.name} is no file below the folder")
            if found := members.extractfile(member):
                target.parent.mkdir(parents=True, exist_ok=True)
                with found, target.open("wb") as out:
                    shutil.copyfileobj(found, out)


class _Bounded(io.RawIOBase):
    """Reads a stream up to a number of bytes: headers, names and files of an archive alike.

    Raises:
        TarError: beyond it.
    """

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._limit, self._read = stream, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._read += len(content)
        if self._read > self._limit:
            much = f"it holds more than {self._limit / 1e6:.0f} MB, which is more than {RATIO} times its size"
            raise tarfile.TarError(f"{much}; unpack it yourself if you trust it, and merge the folder")
        return len(content)
