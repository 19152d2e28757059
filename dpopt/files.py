"""Files that anyone may have written: read within bounds or refused by one error, and written in one step.

Nothing that is read can make a process wait or grow without end: a file is a regular one of bounded size, and JSON in
it has bounded depth and no number that overflows. Content that decides what is charged ends with its own SHA-256
(`sealed`). Checksums find damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpopt.errors import ConfigError

LARGEST = 2**26
"""Bytes of a text file: 64 MiB, some hundred times what the longest run leaves."""
_DEEPEST = 50
"""Levels of lists and mappings in JSON."""
_DIGEST = hashlib.sha256().digest_size
_SEAL = len(b',"seal":""}\n') + 2 * _DIGEST
"""Bytes with which a sealed line ends."""


class Damaged(Exception):
    """A file that dpopt did not write, or not completely."""


def content(path: Path, largest: float = LARGEST) -> bytes:
    """The bytes of a regular file.

    Raises:
        FileNotFoundError: no such file.
        Damaged: it is a folder, a pipe or a device, cannot be read, or has more than `largest` bytes.
    """
    try:
        # A pipe without a writer would be waited for when it is opened.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path}: not a regular file")
        if status.st_size > largest:
            raise Damaged(f"{path}: {status.st_size} bytes, expected at most {largest}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def regular(path: Path) -> Path:
    """`path`, for a library that opens it; `Damaged` for a folder, a pipe or a device, which it might wait for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Damaged(f"{path}: not a regular file")
    return path


def parse(text: bytes | str, where: object) -> Any:
    """The JSON value in `text`; `where` is what errors call it.

    Raises:
        Damaged: the text is no JSON, deeper than `_DEEPEST`, or holds a number that overflows.
    """
    # NaN and Infinity, which Python writes, are read: scores of a run that diverged are such.
    try:
        value = json.loads(text, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: {error}") from error
    level = [value]
    # By levels and not by recursion, which content from outside could drive beyond Python's limit.
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise Damaged(f"{where}: expected at most {_DEEPEST} levels")


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises as `content` and `parse`, and `Damaged` where it holds something else."""
    value = parse(content(path), path)
    if not isinstance(value, dict):
        raise Damaged(f"{path}: expected a JSON object")
    return value


def dumps(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, floats by `repr`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sealed(value: Mapping[str, Any]) -> bytes:
    """A line of canonical JSON whose last key is "seal": the SHA-256 of all bytes before it."""
    body = dumps(value)[:-1].encode()
    return body + b',"seal":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def unsealed(line: bytes, where: object) -> dict[str, Any]:
    """The mapping that was `sealed`; raises `Damaged` where a byte of it was changed, or it has no seal."""
    body, end = line[:-_SEAL], line[-_SEAL:]
    # Before it is parsed: bytes that were changed are not worth the parser's time.
    if end != b',"seal":"%s"}\n' % hashlib.sha256(body).hexdigest().encode():
        raise Damaged(f"{where}: not as it was written, or not to its end")
    value = parse(line, where)
    del value["seal"]
    return value


def write(path: Path, value: Mapping[str, Any] | str | bytes, replace: bool = True, mode: int = 0o666) -> None:
    """Write in one step: a reader, or the next start, sees the old file or the whole new one.

    A mapping is written as JSON that people can read; `mode` is before the process's mask.

    Raises:
        FileExistsError: there is such a file, and it is not to be replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, sort_keys=True) + "\n" if isinstance(value, Mapping) else value
    partial = path.with_name(f".writing-{secrets.token_hex(8)}-{path.name}")  # process numbers repeat across machines
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()  # and onto the disk before the name is changed, or a power cut leaves an empty file
            os.fsync(file.fileno())
        os.replace(partial, path) if replace else _name(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_checked(path: Path, value: bytes, is_secret: bool = False) -> None:
    """Replace a file in one step; it ends with the value's SHA-256. A secret one its owner alone may read."""
    write(path, value + hashlib.sha256(value).digest(), mode=0o600 if is_secret else 0o666)


def read_checked(path: Path) -> bytes:
    """The value of `write_checked`; raises `FileNotFoundError` without a file, `Damaged` where it was changed."""
    file = content(path, largest=math.inf)
    value, digest = file[:-_DIGEST], file[-_DIGEST:]
    if hashlib.sha256(value).digest() != digest:
        raise Damaged(f"{path}: its content does not have the checksum that it was written with")
    return value


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, this process alone has the lock `path`; others that ask for it wait, and the folder has to exist."""
    with path.open("w") as file:  # the system frees the lock where a process dies
        with suppress(ImportError):  # on Windows two processes may make the same files, of which one's stay
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_writable(folder: Path, key: str, instead: str = "") -> None:
    """Raise `ConfigError` before any work for a folder in which no file can be written; a new one is made.

    Errors call it `key`, and say what may be said `instead`.
    """
    trial = folder / f".writing-{secrets.token_hex(8)}"
    try:
        write(trial, "")
        trial.unlink()
    except OSError as error:
        reason = "; ".join(filter(None, [f"cannot be written: {error.strerror}", instead]))
        raise ConfigError(key, str(folder), reason) from error


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"a number that overflows: {text[:20]}")
    return number


def _name(partial: Path, path: Path) -> None:
    # A link fails where the name is taken; a test before a rename would leave a moment between the two.
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} exists") from None
        os.replace(partial, path)
