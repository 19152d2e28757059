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
from dpopt.store import checksums, open_results
from dpopt.store.published import PublishedStore
from dpopt.store.runs import CELLS, MEASUREMENTS, RECORD, Damaged, Run, Store, Track, address, is_published, read

OF_THE_MACHINE = ("provenance", "checksums", "seconds_", "peak_memory", "processes", "isolated")
"""Prefixes of the keys of a record that may differ between two runs of one cell."""
WHERE_BOTH = ("diagnostics", "tested")
"""Keys that a record may lack: published ones have diagnostics where figures show them, older ones not all keys."""
OF_SUITES = ("runs", "suites")
"""The folders of a results folder that are merged beside `MEASUREMENTS`."""
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
    if _leads_away(source, source.shared_files(), merged):
        return merged
    for run_id in track(source.run_ids(), "runs"):
        if not _leads_away(source, source.files(run_id), merged):
            try:
                _merge_run(source, into, run_id, merged)
            except Damaged as error:
                merged.damaged.append(str(error))
    for suite in source.suites():
        if not _leads_away(source, [source.suite_folder(suite) / "manifest.json"], merged):
            _merge_suite(source, into, suite, merged)
    for path in source.measurements():
        if not _leads_away(source, [path], merged):
            _merge_measurement(source, into, path, merged)
    return merged


def results_in(folder: Path, name: str) -> Store:
    """The results in a folder, or in the one folder inside of it that holds some: an archive often has it.

    They may be published: then the folder may also be that of one suite.

    Args:
        folder: where to look; links inside of it are not followed.
        name: what the user calls it.

    Raises:
        ConfigError: there are none, several folders inside hold some, or the files are those of `dpopt collect`.
    """
    if not folder.is_dir():
        raise ConfigError("FROM", name, "no such folder")
    if (folder / CELLS).exists():
        if (folder / checksums.NAME).exists():
            raise ConfigError("FROM", name, "holds collected files: expected the results folder above it")
        return PublishedStore(folder.absolute().parent, only=folder.absolute().name)
    roots = [folder]
    if not (is_published(folder) or _has(folder, (*OF_SUITES, *MEASUREMENTS))):
        inside = [inner for inner in folder.iterdir() if not inner.is_symlink()]
        roots = [inner for inner in inside if is_published(inner) or _has(inner, OF_SUITES)]
    if len(roots) != 1:
        expected = ", ".join((*OF_SUITES, *MEASUREMENTS))
        raise ConfigError(
            "FROM", name, f"holds no results: expected one folder with any of {expected}, or with SUITE/{CELLS}"
        )
    return open_results(roots[0])


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
        theirs = source.run(run_id)
    except FileNotFoundError:
        merged.unfinished += 1
        return
    try:
        ours = into.run(run_id)
    except FileNotFoundError:
        _copy(theirs, into, run_id, merged)
        return
    if _is_same(ours, theirs):
        merged.same += 1
    else:
        merged.conflicts.append(run_id)


def _is_same(ours: Run, theirs: Run) -> bool:
    """Whether two runs of one cell left the same; curves and keys of `WHERE_BOTH` are compared where both have them."""
    if (ours.curve and theirs.curve and ours.curve != theirs.curve) or ours.ledger != theirs.ledger:
        return False
    lacking = set(WHERE_BOTH) - (ours.record.keys() & theirs.record.keys())
    one, other = (
        {key: value for key, value in run.record.items() if not key.startswith((*OF_THE_MACHINE, *lacking))}
        for run in (ours, theirs)
    )
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # in which NaN is NaN


def _copy(run: Run, into: Store, run_id: str, merged: Merged) -> None:
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
