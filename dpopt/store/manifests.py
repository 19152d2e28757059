"""A suite's folder: `suite.json`, which says what the suite is, and `parts/`, which say what cells it has.

A part is a list of planned cells. Its name is the SHA-256 of its bytes, so no byte of it can change unseen, two
processes that add cells at the same moment lose nothing, and a copy of two folders' parts is the union of their cells.
Each part has a number above those that were there when it was written; of two entries for one label and cell, that of
the later part holds, and the searches of both are charged (`searches`). A part names its suite and the parts that lay
beside it, so that one that is gone or moved shows (`amiss`). A published suite has one file instead, `runs.jsonl.xz`:
sealed lines of JSON, packed.
"""

from __future__ import annotations

import hashlib
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpopt import files
from dpopt.errors import ConfigError
from dpopt.files import Damaged

ABOUT, PARTS = "suite.json", "parts"
RUNS = "runs.jsonl.xz"
_LARGEST = 2**31
"""Bytes that a file may unpack to: a few kilobytes can stand for terabytes."""
_MOST = 5_000
"""Entries of a part, so that one is a few megabytes."""
_Entries = dict[tuple[str, str], dict[str, Any]]


def about(folder: Path) -> dict[str, Any]:
    """All that is noted of a suite beside its cells; `ConfigError` where the file is damaged."""
    name = folder.name
    try:
        return files.unsealed(files.content(folder / ABOUT), folder / ABOUT)
    except FileNotFoundError:  # copied without it: the cells are what counts
        return {"suite": name, "description": ""}
    except Damaged as error:
        raise ConfigError("suite", name, f"{error}; move it away: `dpopt run suite={name}` makes it again") from error


def extend(folder: Path, manifest: Mapping[str, Any], archived: Iterable[dict[str, Any]] = ()) -> int:
    """Add a part with the cells of `manifest` that a suite does not have, and replace what else is noted of it.

    `archived` are entries that are the suite's already, from elsewhere. Gives the number of cells that it did not have;
    raises `ConfigError` where a part cannot be read.
    """
    parts = _parts(folder)
    present = by_place(*archived, *(entry for part in parts for entry in part["cells"]))
    number, before = parts[-1]["number"] if parts else 0, len(present)
    places = ((present.get(_place(entry)), entry) for entry in manifest["cells"])
    new = [entry for there, entry in places if there is None or _later(there, entry) != there]
    beside = sorted({part["name"] for part in parts} - {name for part in parts for name in part["beside"]})
    for first in range(0, len(new), _MOST):
        number += 1
        content = {"cells": new[first : first + _MOST], "number": number, "suite": folder.name, "beside": beside}
        part = files.dumps(content).encode()
        beside = [hashlib.sha256(part).hexdigest()]
        files.write(folder / PARTS / f"{beside[0]}.json", part)
    # Last: a suite that is noted without its cells would look as if it had none.
    note(folder, {"suite": folder.name, **{key: value for key, value in manifest.items() if key != "cells"}})
    return len(present | by_place(*new)) - before


def note(folder: Path, about: Mapping[str, Any]) -> None:
    """Replace what is noted of a suite beside its cells."""
    line = files.sealed(about)
    with suppress(FileNotFoundError, Damaged):
        if files.content(folder / ABOUT) == line:
            return  # a published folder that is made again stays as it is
    files.write(folder / ABOUT, line)


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of all parts, later parts last."""
    yield from (entry for part in _parts(folder) for entry in part["cells"])


def amiss(folder: Path) -> Iterator[tuple[str, str, object, object]]:
    """Signs that files of a suite are gone or another suite's: place, what, what is claimed of it, what it is."""
    parts = _parts(folder)
    if not parts and not (folder / RUNS).exists():
        yield str(folder), "cells of the suite", f"in {PARTS}/ or {RUNS}", "none"
    if (suite := about(folder).get("suite")) != folder.name:
        yield str(folder / ABOUT), "suite", suite, folder.name
    there = {part["name"] for part in parts}
    for part in parts:
        path = str(folder / PARTS / f"{part['name']}.json")
        if part["suite"] not in (None, folder.name):
            yield path, "suite of the part", part["suite"], folder.name
        else:
            yield from ((path, "part that lay beside it", name, "none") for name in part["beside"] if name not in there)
    for other in sorted((folder / PARTS).glob("[!.]*")):
        if other.suffix != ".json":
            yield str(other), "part", "NAME.json", "another name, so it is not read"


def _parts(folder: Path) -> list[dict[str, Any]]:
    """The parts in order, each with its name; of an older version they name neither their suite nor other parts."""
    parts = []
    for path in (folder / PARTS).glob("[!.]*.json"):  # not those that are being written
        try:
            content = files.content(path)
            if hashlib.sha256(content).hexdigest() != path.stem:
                raise Damaged(f"{path}: not what its name says")
            part = {"suite": None, "beside": [], **files.parse(content, path), "name": path.stem}
            part["number"] = int(part["number"])
            if not all(map(is_entry, part["cells"])) or not all(isinstance(name, str) for name in part["beside"]):
                raise Damaged(f"{path}: no part of a suite")
            parts.append(part)
        except (Damaged, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            again = f"move it away: `dpopt run suite={folder.name}` adds its cells again"
            raise ConfigError("suite", folder.name, f"{error}; {again}") from error
    # Two processes may take one number, and all readers need one order.
    return sorted(parts, key=lambda part: (part["number"], part["name"]))


def by_place(*entries: dict[str, Any]) -> _Entries:
    """Each entry by what tells it from others: a run may stand for several labels. Of two for one place the last.

    What raises a charge stays: the last names the searches of all.
    """
    places: _Entries = {}
    for entry in entries:
        before = places.get(place := _place(entry))
        places[place] = _later(before, entry) if before else entry
    return places


def searches(entry: Mapping[str, Any]) -> dict[str, int]:
    """The searches that an entry was ever planned in: id -> the most runs beyond its grid that it may make."""
    return entry.get("searches") or {entry.get("search_id", ""): entry.get("widen", 0)}


def _later(before: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The entry that holds for a place where `before` did, with the searches of both."""
    every = dict(searches(entry))
    for search_id, widen in searches(before).items():
        search_id = search_id or entry.get("search_id", "")  # planned by a version that told no searches apart
        every[search_id] = max(widen, every.get(search_id, 0))
    alone = {key: value for key, value in entry.items() if key != "searches"}
    return alone if every == searches(alone) else {**alone, "searches": every}


def _place(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["label"], entry["run_id"]


def older(root: Path) -> ConfigError:
    """The error for a folder with files of a layout that this version does not read."""
    how = f"`python benchmarks/migrate.py {root}` of dpopt's source tree rewrites it"
    return ConfigError("results", str(root), f"it was written by an older version; {how}")


def is_entry(entry: Any) -> bool:
    """True if an entry has all that is read of it."""
    try:
        cell = entry["cell"]
        names = [cell[key]["name"] for key in ("workload", "optimizer")]
        texts = [entry["run_id"], entry["label"], entry["tuning"], cell["accountant"], *names]
        counts = [cell["batch_size"], cell["seed"], *searches(entry).values()]
        numbers = [entry.get("target", 0), *(cell[key] for key in ("epsilon", "delta", "epochs"))]
        return (
            isinstance(entry["tuned"], dict)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(count, int) for count in counts)
            and all(float(number) > -math.inf for number in numbers)  # nor NaN
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def pack(lines: Iterable[bytes]) -> bytes:
    """The content of the file that holds `lines`."""
    # The library's preset, so that the same runs give the same bytes and a changed file shows.
    return lzma.compress(b"".join(lines))


def unpack(path: Path) -> Iterator[dict[str, Any]]:
    """The content of each line, without its seal; raises as `files.content`, and `Damaged` where it was changed."""
    # Of limited memory, as a file can ask for a dictionary of gigabytes.
    packed, unpacker = files.content(path), lzma.LZMADecompressor(lzma.FORMAT_XZ, 2**28)
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
        if total > _LARGEST or len(rest) > files.LARGEST:
            raise Damaged(f"{path}: it unpacks to more than {_LARGEST} bytes, or to lines of {files.LARGEST}")
        for line in whole:
            number += 1
            yield files.unsealed(line + b"\n", f"{path}, line {number}")
    if rest or unpacker.unused_data:
        raise Damaged(f"{path}: there is more in it than whole lines")
