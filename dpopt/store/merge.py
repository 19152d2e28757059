"""Bring the results of another folder into this one. A run is copied whole or not at all, and never over another.

The other folder may also be one of published suites. Its runs come without the curves that are not published, and are
compared with runs that are here but for their curves.

Unfinished runs stay where they are, and so do links and files that no command writes: the other folder may be someone
else's. Each run is copied under its lease, its record last, so that a merge that was stopped can be started again, and
a harness may run in the folder meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpopt.errors import ConfigError, Held
from dpopt.store.identity import identity
from dpopt.store.published import CURVES, PublishedStore
from dpopt.store.runs import (
    CELLS,
    CHECKED,
    RECORD,
    WHOLE,
    Damaged,
    Store,
    Track,
    address,
    is_published,
    line,
    read,
    sha256,
)

OF_THE_MACHINE = ("provenance", "checksums", "seconds_", "peak_memory", "processes", "isolated")
"""Prefixes of the keys of a record that may differ between two runs of one cell."""
OF_SUITES, OF_MEASUREMENTS = ("runs", "suites"), ("bench", "audit")
"""The folders of a results folder that are merged."""
OF_PUBLISHED = (CELLS, CURVES)
"""The files of a published suite that runs are made of."""
MEASURED = (RECORD, "table.md")
DRAWN = (".svg", ".png")
"""What the folder of a measurement holds: these files, and figures with these endings."""


@dataclass
class Merged:
    """What a merge did.

    Attributes:
        copied: run ids.
        same: runs that are here with the same results.
        unfinished: runs that have no result there.
        running: run ids that another process is running here, and that were left to it.
        conflicts: run ids with different results here and there; both were left as they are.
        damaged: what cannot be read, a line each; left as it is.
        suites: how many planned cells came to which suite.
        measurements: folders of `dpopt bench` and `dpopt audit` that were copied.
        left_out: what is a link there, or a file that no command writes, by its path in the folder.
    """

    copied: list[str] = field(default_factory=list)
    same: int = 0
    unfinished: int = 0
    running: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    suites: dict[str, int] = field(default_factory=dict)
    measurements: int = 0
    left_out: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Run:
    """The files of a finished run; the curve is empty where it was not published."""

    record: dict[str, Any]
    ledger: str
    cell: bytes | Mapping[str, Any]
    curve: bytes

    def has_results_of(self, other: _Run) -> bool:
        """Whether two runs of one cell left the same; curves and diagnostics are compared where both have them."""
        is_same_curve = self.curve == other.curve or not (self.curve and other.curve)
        lacking = {"diagnostics"} - (self.record.keys() & other.record.keys())
        is_same_record = self._numbers(lacking) == other._numbers(lacking)
        return is_same_record and self.ledger == other.ledger and is_same_curve

    def _numbers(self, lacking: set[str]) -> str:
        """The record without what differs between machines, and without the keys that one of the two lacks."""
        left_out = (*OF_THE_MACHINE, *lacking)
        kept = {key: value for key, value in self.record.items() if not key.startswith(left_out)}
        return json.dumps(kept, sort_keys=True)


def merge(source: Store, into: Store, track: Track = lambda sequence, title: sequence) -> Merged:
    """Copy what `into` does not hold: finished runs, planned cells of suites, measurements.

    Args:
        source: read only.
        into: where it goes.
        track: see `Track`.

    Raises:
        ConfigError: both are the same folder.
    """
    if into.root.exists() and source.root.samefile(into.root):
        raise ConfigError("results", str(into.root), "is the folder to be merged into itself")
    merged = Merged()
    published = source.suites() if isinstance(source, PublishedStore) else []
    if _leads_away(source, [source.suite_folder(suite) / name for suite in published for name in OF_PUBLISHED], merged):
        return merged
    for run_id in track(source.run_ids(), "runs"):
        if not _leads_away(source, [source.folder(run_id, name) for name in (*CHECKED, RECORD)], merged):
            try:
                _merge_run(source, into, run_id, merged)
            except Damaged as error:
                merged.damaged.append(str(error))
    for suite in source.suites():
        if not _leads_away(source, [source.suite_folder(suite) / "manifest.json"], merged):
            _merge_suite(source, into, suite, merged)
    measured = () if isinstance(source, PublishedStore) else OF_MEASUREMENTS
    for path in (path for kind in measured for path in sorted((source.root / kind).glob(f"*/{RECORD}"))):
        if not _leads_away(source, [path], merged):
            _merge_measurement(source, into, path, merged)
    return merged


def results_in(folder: Path, name: str) -> Store:
    """The results in a folder, or in the one folder inside of it that holds runs or suites: an archive often has it.

    Of published results the folder may be that of one suite, or the one above.

    Args:
        folder: where to look; links inside of it are not followed.
        name: what the user calls it.

    Raises:
        ConfigError: there are none, or several folders inside hold some.
    """
    if (folder / CELLS).exists():
        return PublishedStore(folder.absolute().parent, only=folder.absolute().name)
    if is_published(folder):
        return PublishedStore(folder)
    roots = [folder]
    if not _has(folder, OF_SUITES + OF_MEASUREMENTS):
        roots = [inner for inner in folder.iterdir() if not inner.is_symlink() and _has(inner, OF_SUITES)]
    if len(roots) != 1:
        expected = ", ".join(OF_SUITES + OF_MEASUREMENTS)
        raise ConfigError("FROM", name, f"holds no results: expected one folder with any of {expected}")
    return Store(roots[0])


def _has(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_dir() for name in names)


def _leads_away(source: Store, paths: Iterable[Path], merged: Merged) -> bool:
    """Whether a link in the folder is on the way to any of `paths`; it is noted."""
    names = (path.relative_to(source.root) for path in paths)
    steps = ((*reversed(name.parents[:-1]), name) for name in names)
    links = [next((step for step in each if (source.root / step).is_symlink()), None) for each in steps]
    found = {str(link) for link in links if link}
    merged.left_out |= found
    return bool(found)


def _merge_run(source: Store, into: Store, run_id: str, merged: Merged) -> None:
    try:
        theirs = _load(source, run_id)
    except FileNotFoundError:
        merged.unfinished += 1
        return
    try:
        ours = _load(into, run_id)
    except FileNotFoundError:
        _copy(theirs, into, run_id, merged)
        return
    if ours.has_results_of(theirs):
        merged.same += 1
    else:
        merged.conflicts.append(run_id)


def _load(store: Store, run_id: str) -> _Run:
    """A finished run.

    Raises:
        FileNotFoundError: it is not finished.
        Damaged: its files are not those of one run of this name.
    """
    record, folder = store.record(run_id), store.folder(run_id)
    if isinstance(store, PublishedStore):
        return _published(store, run_id, record)
    try:
        cell = read(folder / "cell.json")
    except FileNotFoundError as error:
        raise Damaged(f"{error} is missing") from error
    if record["cell"] != cell or identity(cell) != run_id:
        raise Damaged(f"{folder}: run id, cell.json and the cell of record.json do not belong together")
    for name, claimed in record.get("checksums", {}).items():
        if not (folder / name).is_file() or sha256(folder / name) != claimed:
            raise Damaged(f"{folder / name}: not the file that the record was written with")
    store.ledger(run_id)  # or it is damaged
    curve = folder / "curve.jsonl"
    texts = (folder / "ledger.json").read_text(), (folder / "cell.json").read_bytes()
    return _Run(record, *texts, curve.read_bytes() if curve.exists() else b"")


def _published(store: PublishedStore, run_id: str, record: Mapping[str, Any]) -> _Run:
    """A finished run, from the row that stands for it.

    Raises:
        Damaged: the row does not belong to a run of this name, or holds a part of its record, as it did once.
    """
    if missing := sorted(WHOLE - record.keys()):
        raise Damaged(f"{store.root}: published without all of the record of {run_id}, it lacks {', '.join(missing)}")
    if not run_id == record["run_id"] == identity(record["cell"]):
        raise Damaged(f"{store.root}: run id {run_id}, its record and its cell do not belong together")
    own = {key: value for key, value in record.items() if key != "checksums"}  # of files that are written anew
    curve = "".join(map(line, store.curve(run_id)))
    return _Run(own, store.ledger(run_id).to_json(), record["cell"], curve.encode())


def _copy(run: _Run, into: Store, run_id: str, merged: Merged) -> None:
    """The record comes last and makes the run a finished one."""
    folder = into.folder(run_id)
    try:
        with into.lease(run_id):
            if (folder / "record.json").exists():
                raise FileExistsError(folder)
            into.write(folder / "cell.json", run.cell)
            if run.curve:
                into.write(folder / "curve.jsonl", run.curve)
            into.finish(run_id, run.record, run.ledger)
    except (Held, FileExistsError):  # another process has it, or has just finished it
        merged.running.append(run_id)
    else:
        merged.copied.append(run_id)


def _merge_suite(source: Store, into: Store, suite: str, merged: Merged) -> None:
    """Add the planned cells that are not planned here; what else a manifest says is this folder's."""
    is_new = not (into.suite_folder(suite) / "manifest.json").exists()
    try:
        theirs = source.manifest(suite)
        ours: Mapping[str, Any] = {"cells": []} if is_new else into.manifest(suite)
    except ConfigError as error:
        merged.damaged.append(str(error))
        return
    known = {(entry["run_id"], entry["label"]) for entry in ours["cells"]}
    added = [entry for entry in theirs["cells"] if (entry["run_id"], entry["label"]) not in known]
    if added or is_new:
        into.extend_suite(suite, {**theirs, **ours, "cells": added})
    merged.suites[suite] = len(added)


def _merge_measurement(source: Store, into: Store, path: Path, merged: Merged) -> None:
    """Copy a folder of `dpopt bench` or `dpopt audit`, its record last; the name of one is its content."""
    folder = path.parent
    target = into.root / folder.relative_to(source.root)
    try:
        record = read(path)
    except Damaged as error:
        merged.damaged.append(str(error))
        return
    if address(record) != path.parent.name:
        merged.damaged.append(f"{path}: is not what its folder is named by")
    elif not (target / "record.json").exists():
        for file in sorted(folder.iterdir(), key=lambda file: (file == path, file)):
            is_known = file.is_file() and (file.name in MEASURED or file.suffix in DRAWN)
            if not is_known:
                merged.left_out.add(str(file.relative_to(source.root)))
            elif not _leads_away(source, [file], merged):
                into.write(target / file.name, file.read_bytes())
        merged.measurements += 1
