"""`dpopt verify`: makes every claim in a results folder again, from what lies beneath it.

A run's epsilon is computed anew from its ledger, by the accountant that states it and by one that shares no code with
it; its name from its cell; what it says of the plan from cell and ledger; Parquet and tables from what they were
collected from. What is not verified: that the code released what the ledger says (tests of the oracles and audits look
at that), and scores, which only training again would show. Nor is it verified that no run was removed as a whole, with
record, ledger and Parquet: it would be made again, with the same result.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError
from dpopt.files import Damaged, read
from dpopt.results.verify import opinions, parquet, runs
from dpopt.results.verify.claims import Claims
from dpopt.results.verify.finding import Finding, Verified
from dpopt.store import checksums
from dpopt.store.identity import identity
from dpopt.store.provenance import unknown_commits
from dpopt.store.published import CELLS
from dpopt.store.runs import RESULTS, UNREADABLE, Store, Track, address

WIDENED = 10**6
"""Numbers from here on are those of runs beyond the end of a grid: (1 + step) * WIDENED + number of its first run."""

__all__ = ["Finding", "Verified", "verify"]


def verify(store: Store, suite: str | None = None, track: Track = lambda sequence, title: sequence) -> Verified:
    """Verify all that `store` holds, or one suite.

    Args:
        store: read only.
        suite: look at its runs, its Parquet and what is published of it alone.
        track: see `Track`.

    Raises:
        ConfigError: the suite was never planned here, and nothing of it is published here.
    """
    verified = Verified()
    if suite is None:
        _planned(store, store.run_ids(), store.suites(), track, verified)
        verified.findings += _unplanned(store)
        verified.findings += [Finding(path, "a run directory", "", "something else") for path in store.foreign()]
        for path in store.measurements():
            _note(verified, "measurements", _measurement(path))
    elif suite in store.suites() or not (store.root / "published" / suite / CELLS).exists():
        run_ids = dict.fromkeys(entry["run_id"] for entry in store.manifest(suite)["cells"])
        _planned(store, list(run_ids), [suite], track, verified)
    _published(store, store.root / "published", suite, track, verified)
    return verified


def _planned(store: Store, run_ids: Sequence[str], suites: Sequence[str], track: Track, verified: Verified) -> None:
    _runs(store, run_ids, track, verified)
    for name in track(suites, "suites"):
        _note(verified, "suites", _suite(store, name, verified))


def _note(verified: Verified, kind: str, findings: Iterable[Finding]) -> None:
    verified.checked[kind] += 1
    verified.findings += findings


def _runs(store: Store, run_ids: Sequence[str], track: Track, verified: Verified) -> None:
    origins: Counter[tuple[str | None, bool]] = Counter()
    alone: Counter[bool] = Counter()
    for run_id in track(run_ids, "runs"):
        try:
            loaded = runs.load(store, run_id)
        except FileNotFoundError:
            verified.checked["unfinished"] += 1
        except Damaged as error:
            _note(verified, "runs", [Finding(run_id, "files", "whole", error)])
        else:
            _note(verified, "runs", runs.check(store, loaded))
            origin = loaded.numbers["provenance"]
            origins[origin.get("commit"), bool(origin.get("dirty"))] += 1
            alone[_has_no_second_opinion(loaded)] += 1
    verified.remarks += _remarks(origins)
    if alone[True]:
        verified.remarks.append(f"{alone[True]} runs have an epsilon that no second accountant can find")


def _has_no_second_opinion(of: Claims) -> bool:
    is_private = any(draw.effective_noise > 0 for draw in of.ledger.counts())
    try:
        return is_private and opinions.tight(of.ledger, of.cell["delta"], of.cell["accountant"]) is None
    except UNREADABLE:  # which is a finding of `claims.check`
        return False


def _remarks(origins: Counter[tuple[str | None, bool]]) -> Iterator[str]:
    """What the records' origins leave open, a line each."""
    commits = Counter[str | None]()
    for (commit, _), count in origins.items():
        commits[commit] += count
    if dirty := sum(count for (_, is_dirty), count in origins.items() if is_dirty):
        yield f"{dirty} runs were made with files that differ from their commit"
    if commits[None]:
        yield f"{commits[None]} runs do not know their commit"
    for commit in unknown_commits(filter(None, commits)):
        yield f"{commits[commit]} runs are of commit {commit}, which is not in this history"


def _suite(store: Store, suite: str, verified: Verified) -> Iterator[Finding]:
    try:
        entries = store.manifest(suite)["cells"]
    except ConfigError as error:
        yield Finding(suite, "manifest", "readable", error)
        return
    for entry in entries:
        if (anew := identity(entry["cell"])) != entry["run_id"]:
            yield Finding(f"suite {suite}", "run id of a planned cell", entry["run_id"], anew)
    yield from _gaps(store, suite, entries)
    folder = store.suite_folder(suite)
    if (folder / CELLS).exists():
        yield from _sealed(folder, folder, is_complete=False)
        yield from _frames(store, folder, verified, {entry["run_id"] for entry in entries})


def _gaps(store: Store, suite: str, entries: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """The numbers of a row's runs count from 0, and so do those of each widened search: a gap is a cell that is gone.

    A search in two parts keeps a number for its last run, which is planned when the first ones are done.
    """
    numbers: dict[tuple[Any, ...], set[int]] = {}
    waiting = {entry["label"] for entry in entries if "stage" in entry and store.state(entry["run_id"]) not in RESULTS}
    for entry in (entry for entry in entries if entry["label"] not in waiting):
        cell = entry["cell"]
        step, first = divmod(cell.get("search", 0), WIDENED)
        target, average = entry.get("target", cell["epsilon"]), cell.get("average", 0.0)
        row = entry["label"], json.dumps(cell["workload"], sort_keys=True), str(target), cell["accountant"], average
        numbers.setdefault((*row, cell["seed"], first if step else None), set()).add(step - 1 if step else first)
    for (label, _, target, *_, seed, _), present in numbers.items():
        if missing := sorted(set(range(max(present))) - present):
            where = f"suite {suite}, {label}, epsilon {target}, seed {seed}"
            yield Finding(where, "numbers of its runs", f"0 to {max(present)}", f"none has {missing[0]}")


def _unplanned(store: Store) -> Iterator[Finding]:
    """The runs that no part of a suite holds: a part that is gone lowers what its searches are charged."""
    try:
        planned = {entry["run_id"] for suite in store.suites() for entry in store.manifest(suite)["cells"]}
    except ConfigError:
        return  # which is a finding of its suite, and would make one of every run
    for run_id in sorted(set(store.run_ids()) - planned):
        yield Finding(run_id, "suite that it is a run of", "one in suites/", "none holds it")


def _sealed(folder: Path, part: Path, *, is_complete: bool) -> Iterator[Finding]:
    """What was changed in `part` of a sealed folder."""
    try:
        changes = checksums.changes(folder, is_complete=is_complete)
        for path, claimed, found in (change for change in changes if change.path.is_relative_to(part)):
            yield Finding(str(path), "SHA-256", claimed or "not noted", found or "no such file")
    except FileNotFoundError:
        yield Finding(str(folder / checksums.NAME), "checksums", "all there", "no such file")
    except Damaged as error:
        yield Finding(str(folder / checksums.NAME), "checksums", "readable", error)


def _frames(store: Store, folder: Path, verified: Verified, planned: set[str] | None = None) -> Iterator[Finding]:
    """What is wrong with the Parquet of a folder and, where it is published, with the table beside it.

    Args:
        planned: run ids of the suite; None for a published folder.
    """
    try:
        cells, entries = (pd.read_parquet(folder / f"{kind}.parquet") for kind in ("cells", "curves"))
        verified.checked["rows of Parquet"] += len(parquet.finished(cells))
        moved = Counter[float]()
        yield from _rows(store, folder, cells, entries, planned, moved)
        verified.remarks += _moved(f"{folder}/cells.parquet", moved)
    except Exception as error:  # whatever a damaged file makes of the readers of Parquet
        yield Finding(str(folder), "Parquet", "readable", f"{type(error).__name__}: {error}")
        return
    if not parquet.is_complete(cells):
        verified.remarks.append(
            f"{folder}/cells.parquet: {len(cells)} rows of an older version, without ledgers to find their epsilon from"
        )


def _rows(
    store: Store,
    folder: Path,
    cells: pd.DataFrame,
    entries: pd.DataFrame,
    planned: set[str] | None,
    moved: Counter[float],
) -> Iterator[Finding]:
    where = f"{folder}/cells.parquet"
    for run_id in [] if planned is None else sorted(set(cells["run_id"]) - planned):
        yield Finding(where, "run", run_id, "no cell of the suite")
    if "suite" in cells and set(cells["suite"]) - {folder.name}:
        yield Finding(where, "suite", ", ".join(sorted(set(cells["suite"]))), folder.name)
    if planned is not None:
        yield from parquet.lost(store, where, cells)
    yield from parquet.rows(store, where, cells, moved)
    yield from parquet.curves(f"{folder}/curves.parquet", cells, entries)
    if planned is None and parquet.is_complete(cells) and (folder / "table.md").exists():
        yield from parquet.table(folder / "table.md", cells)  # a suite's may be newer than its Parquet


def _moved(where: str, moved: Counter[float]) -> Iterator[str]:
    """What the runs that were made again elsewhere are held to."""
    exact = "epsilon, noise and draws to the last bit"
    if near := moved[parquet.TOLERANCE]:
        held = f"its scores are held to {parquet.TOLERANCE:g}, absolute or relative, and {exact}"
        yield f"{where}: {near} rows have their run here from another device, CPU or torch: {held}"
    if other := moved[math.inf]:
        kind = "another kind of device, whose noise is another"
        yield f"{where}: {other} rows have their run here from {kind}: only {exact}"


def _measurement(path: Path) -> Iterator[Finding]:
    try:
        found = address(read(path))
    except Damaged as error:
        yield Finding(str(path), "record", "readable", error)
        return
    if found != path.parent.name:
        yield Finding(str(path), "name of its content", path.parent.name, found)


def _published(store: Store, root: Path, suite: str | None, track: Track, verified: Verified) -> None:
    folder = root / suite if suite else root
    if not folder.is_dir():
        return
    verified.checked["published files"] = len(checksums.contents(folder))
    verified.findings += _sealed(root, folder, is_complete=True)
    for path in track(sorted(folder.rglob(CELLS)), "published"):
        verified.findings += _frames(store, path.parent, verified)
