"""`checksums.json`: what a folder of collected or published files holds, so that a change of any byte is found.

It says that files are those that were written, not that they are right: who changes a file can change its checksum. The
published folder's file is under version control, where that is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dpopt.files import Damaged, read
from dpopt.store.provenance import source
from dpopt.store.runs import SCHEMA, Store

NAME = "checksums.json"


class Change(NamedTuple):
    """A file that is not the one that was noted.

    Attributes:
        path: of the file.
        claimed, found: SHA-256, in hex digits; None where there is no such entry or file.
    """

    path: Path
    claimed: str | None
    found: str | None


def seal(store: Store, folder: Path, files: Iterable[Path], *, replaces: Path | None = None, **about: Any) -> Path:
    """Note `files` of `folder` in its `checksums.json`, in one step.

    Args:
        store: writes it.
        folder: the folder; names in the file are relative to it.
        files: what to note, with size and, for Parquet, rows.
        replaces: what is noted of files outside of this folder in it stays; by default nothing does.
        about: what else to note, as plain data.

    Returns:
        The path of `checksums.json`.

    Raises:
        Damaged: what is noted cannot be read, and some of it is to stay.
    """
    kept = {}
    if replaces and (folder / NAME).exists():
        known = noted(folder)["files"].items()
        kept = {name: entry for name, entry in known if not (folder / name).is_relative_to(replaces)}
    entries = kept | {path.relative_to(folder).as_posix(): _entry(path) for path in files}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"schema": SCHEMA, "written": written, "source": source(), "files": dict(sorted(entries.items()))}
    path = folder / NAME
    store.write(path, content | about)
    return path


def noted(folder: Path) -> dict[str, Any]:
    """What `seal` wrote.

    Raises:
        FileNotFoundError: the folder has no `checksums.json`.
        Damaged: the file is none that this version reads.
    """
    content = read(folder / NAME)
    files = content.get("files")
    is_known = isinstance(files, dict) and all(isinstance(e, dict) and "sha256" in e for e in files.values())
    if content.get("schema") != SCHEMA or not is_known:
        raise Damaged(f"{folder / NAME}: no checksums of schema {SCHEMA}")
    return content


def changes(folder: Path, *, is_complete: bool) -> Iterator[Change]:
    """The files of `folder` that are missing or are not those that were noted.

    Args:
        folder: a sealed folder.
        is_complete: whether files that are not noted are changes too.

    Raises:
        FileNotFoundError, Damaged: as `noted`.
    """
    claimed = {folder / name: entry["sha256"] for name, entry in noted(folder)["files"].items()}
    for path, checksum in claimed.items():
        found = sha256(path) if path.is_file() else None
        if found != checksum:
            yield Change(path, checksum, found)
    if is_complete:
        yield from (Change(path, None, sha256(path)) for path in contents(folder) if path not in claimed)


def contents(folder: Path) -> list[Path]:
    """Every file below `folder` but its own `checksums.json`."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)


def _entry(path: Path) -> dict[str, Any]:
    rows = {"rows": _rows(path)} if path.suffix == ".parquet" else {}
    return {"sha256": sha256(path), "bytes": path.stat().st_size, **rows}


def _rows(path: Path) -> int:
    from pyarrow import parquet

    return parquet.read_metadata(path).num_rows


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
