"""Run directories: `results/runs/ab/abcd.../` for each cell, `results/suites/NAME/` for what a suite refers to,
`results/{bench,audit}/abcd.../` for what `dpopt bench` and `dpopt audit` measured.

A finished run is one file, `run.json`: its record, which holds the cell, its ledger and its curve under one seal. It is
written last and by one rename. What a run needs before that lies beside it: `cell.json`, `curve.jsonl`,
`checkpoint.pt`, `tries.json` (attempts), `error.json` and `lease` (see `leases`). None of these is read once `run.json`
is there, so a copy of a folder that skips files which exist is a merge. A file that cannot be read is damaged: never
used or overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dpopt import files
from dpopt.errors import ConfigError, Held, unknown
from dpopt.files import Damaged
from dpopt.privacy.ledger import Ledger, Unit
from dpopt.store import leases, manifests

State = Literal["done", "diverged", "failed", "running", "interrupted", "pending", "damaged"]
RESULTS: tuple[State, ...] = ("done", "diverged")
"""The states of a cell that has a result."""
SETTLED: tuple[State, ...] = (*RESULTS, "failed", "damaged")
"""The states of a cell that `dpopt run` leaves alone."""
Failure = Literal["failed", "died", "timeout"]
"""The ways in which a cell fails: by an error in it, with its worker process, or by taking too long."""
RUN = "run.json"
# A process that dies while it removes these leaves `cell.json`, which shows whose the folder was.
_UNFINISHED = ("checkpoint.pt", "tries.json", "error.json", "curve.jsonl", "cell.json")
"""The files of a run that has no `RUN` yet, in the order in which they go."""
_SCHEMA = 1
_RECORD_KEYS = {"schema", "run_id", "cell", "status", "epsilon", "epsilon_target", "delta", "provenance"}
"""Keys without which a record is not read."""
UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)
"""Raised where stored content lacks something, or holds something else than what is read of it."""


class _Tries(NamedTuple):
    """Attempts at a cell that has no result yet: their number, and how and why the last one ended."""

    number: int = 0
    kind: Failure = "died"
    reason: str = ""


class Run(NamedTuple):
    """A finished run, whole: its record, its ledger as plain data, and its curve unless that was not published."""

    record: dict[str, Any]
    ledger: dict[str, Any]
    curve: list[dict[str, Any]] | None

    def line(self, **beside: Any) -> bytes:
        """The run as a sealed line of JSON, with the keys of `beside`."""
        # No key at all, rather than null: a line that is packed again has to have the same bytes.
        curve = {} if self.curve is None else {"curve": self.curve}
        return files.sealed({"record": self.record, "ledger": self.ledger, **curve, **beside})

    @classmethod
    def of(cls, content: Mapping[str, Any], where: object) -> Run:
        """The run of an unsealed line; raises `Damaged` where this version reads no run there."""
        record, ledger, curve = content.get("record"), content.get("ledger"), content.get("curve")
        if not isinstance(record, dict) or not isinstance(ledger, dict) or not isinstance(curve, list | None):
            raise Damaged(f"{where}: no run")
        if missing := _RECORD_KEYS - record.keys():
            raise Damaged(f"{where}: lacks {', '.join(sorted(missing))}")
        if record["schema"] != _SCHEMA:
            raise Damaged(f"{where}: of another version (schema {record['schema']}, this one reads {_SCHEMA})")
        # A seal shows that nothing was changed since, not that dpopt wrote it.
        if record["status"] not in RESULTS or not isinstance(record["cell"], dict):
            raise Damaged(f"{where}: not the record of a run")
        return cls(record, ledger, curve)


class Archive(NamedTuple):
    """The part of a suite that lies in one file: entries as a manifest has them, and runs by their ids."""

    entries: list[dict[str, Any]]
    runs: dict[str, Run]

    @classmethod
    def of(cls, path: Path) -> Archive:
        """The content of a file whose lines hold an entry each, and the run that it names where that has ended.

        Raises `FileNotFoundError` without one; `Damaged`, `TypeError` or `LookupError` where it holds something else.
        """
        entries, runs = list[dict[str, Any]](), dict[str, Run]()
        for number, line in enumerate(manifests.unpack(path), 1):
            where, entry = f"{path}, line {number}", line["entry"]
            if "record" in line:
                run = Run.of(line, where)
                runs[run.record["run_id"]] = run
                entry = {**entry, "run_id": run.record["run_id"]}
            # A run of several labels stands at the first of their entries, its cell in its record.
            if entry["run_id"] in runs:
                entry = {**entry, "cell": runs[entry["run_id"]].record["cell"]}
            if not manifests.is_entry(entry):
                raise Damaged(f"{where}: no entry of a suite")
            entries.append(entry)
        return cls(entries, runs)

    def packed(self) -> bytes:
        """The content of the file."""
        lines, rest = [], dict(self.runs)
        for entry in self.entries:
            run_id = entry["run_id"]
            place = {key: value for key, value in entry.items() if key not in ("cell", "run_id")}
            if (run := rest.pop(run_id, None)) is not None:
                lines.append(run.line(entry=place))
            elif run_id in self.runs:  # which an entry before this one holds
                lines.append(files.sealed({"entry": {**place, "run_id": run_id}}))
            else:
                lines.append(files.sealed({"entry": entry}))
        return manifests.pack(lines)


@dataclass(frozen=True)
class Store:
    """A results folder `root`, or a folder of published suites; it is made when something is written."""

    root: Path
    _kept: dict[str, tuple[Any, Run]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _archives: dict[str, Archive | ConfigError] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_archives": {}}  # a worker that it is sent to reads for itself

    @cached_property
    def is_read_only(self) -> bool:
        """True if this is a folder of published suites, which are in `NAME/` and not in `suites/NAME/`."""
        is_plain = (self.root / "runs").is_dir() or (self.root / "suites").is_dir()
        kinds = (manifests.RUNS, manifests.ABOUT)  # the second alone is left of a suite whose runs are gone
        return not is_plain and any(path for kind in kinds for path in self.root.glob(f"*/{kind}"))

    def folder(self, run_id: str, *inside: str) -> Path:
        """The directory of one run, or what lies inside of it."""
        return Path(self.root, "runs", run_id[:2], run_id, *inside)

    def state(self, run_id: str) -> State:
        """The state of a cell: "done" and "diverged" are results; "interrupted" has files but no end."""
        try:
            return self.record(run_id)["status"]
        except FileNotFoundError:
            pass
        except Damaged:
            return "damaged"
        folder = self.folder(run_id)
        # The failure first: the process that noted it may hold its lease for a moment longer.
        if (folder / "error.json").exists():
            return "failed"
        if (folder / leases.LEASE).exists() and not ((holder := self.holder(run_id)) and holder.is_gone):
            return "running"
        return "interrupted" if (folder / "cell.json").exists() else "pending"

    def is_settled(self, run_id: str) -> bool:
        """True if a cell has ended: it has a result, sound or damaged, or a failure. Reads no file but archives."""
        folder = str(self.folder(run_id))  # texts: a suite of thousands of cells asks this again and again
        is_there = any(os.path.exists(f"{folder}/{name}") for name in (RUN, "error.json", "record.json"))
        return is_there or self._archived(run_id) is not None

    def run(self, run_id: str) -> Run:
        """All of a finished run.

        Raises:
            FileNotFoundError: the cell is not done.
            Damaged: the file is no run of this name, or not as it was written.
        """
        if self.is_read_only and (archived := self._archived(run_id)) is not None:  # it has no directories of runs
            return archived
        path = self.folder(run_id, RUN)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if self.folder(run_id, "record.json").exists():
                raise Damaged(str(manifests.older(self.root))) from None
            if (archived := self._archived(run_id)) is not None:
                return archived
            raise FileNotFoundError(path) from None
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from error
        # A copy from elsewhere may replace the file while this process reads on.
        version = status.st_mtime_ns, status.st_size, status.st_ino
        if (kept := self._kept.get(run_id)) and kept[0] == version:
            return kept[1]
        run = Run.of(files.unsealed(files.content(path), path), path)
        if run.record["run_id"] != run_id:
            raise Damaged(f"{path}: it is that of {run.record['run_id']}")
        # A few are remembered: readers ask for a run's record, ledger and curve one after the other.
        while len(self._kept) >= 64:  # threads share a store, so the key may be gone already
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[run_id] = version, run
        return run

    def record(self, run_id: str) -> dict[str, Any]:
        """A finished cell's record; raises as `run`."""
        return self.run(run_id).record

    def ledger(self, run_id: str) -> Ledger:
        """The ledger that a finished cell left; raises as `run`, and `Damaged` where it is none."""
        run = self.run(run_id)
        try:
            return Ledger.of(run.ledger, Unit.stated(run.record))
        except ConfigError as error:
            raise Damaged(f"{self.place(run_id)}: {error}") from error

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a run's curve; of one that has not ended up to the first line that is not whole."""
        try:
            return self.run(run_id).curve or []
        except Damaged:
            return []
        except FileNotFoundError:
            pass
        entries = []
        with suppress(FileNotFoundError, Damaged):  # the last line is cut off where a process died in it
            for line in files.content(self.folder(run_id, "curve.jsonl")).splitlines():
                entry = files.parse(line, "")
                if not isinstance(entry, dict) or not isinstance(entry.get("draw"), int):
                    break
                entries.append(entry)
        return entries

    def place(self, run_id: str) -> str:
        """The place of a run's content, as messages name it."""
        path = self.folder(run_id, RUN)
        if self._archived_suites and not path.exists():
            for suite, archive in self._archives.items():
                if isinstance(archive, Archive) and run_id in archive.runs:
                    return f"{self.suite_folder(suite) / manifests.RUNS}, {run_id}"
        return str(path)

    def archive(self, suite: str) -> Archive:
        """The entries and finished runs of a suite that lie in one file; `ConfigError` where that is damaged."""
        if suite not in self._archives:
            path = self.suite_folder(suite) / manifests.RUNS
            try:
                self._archives[suite] = Archive.of(path)
            except FileNotFoundError:
                self._archives[suite] = Archive([], {})
            except (Damaged, TypeError, LookupError) as error:  # kept: unpacking it again takes seconds
                self._archives[suite] = ConfigError("suite", suite, f"{error}; copy {path} again, or move it away")
        if isinstance(archive := self._archives[suite], ConfigError):
            raise archive
        return archive

    def _archived(self, run_id: str) -> Run | None:
        """A run of an archive; of several that have it, the one with most of it."""
        # Archives are large: a further one is read only while those that were read do not have the run.
        for further in chain([None], (suite for suite in self._archived_suites if suite not in self._archives)):
            with suppress(ConfigError):  # of a suite that may be another one: who reads that one is told
                if further is not None:
                    self.archive(further)
            read = [archive for archive in self._archives.values() if isinstance(archive, Archive)]
            if holding := [archive.runs[run_id] for archive in read if run_id in archive.runs]:
                return max(holding, key=lambda run: (run.curve is not None, len(run.record)))
        return None

    @cached_property
    def _archived_suites(self) -> list[str]:  # looked for once: `is_settled` asks for every cell
        return sorted(path.parent.name for path in self.suite_folder("*").parent.glob(f"*/{manifests.RUNS}"))

    def error(self, run_id: str) -> dict[str, Any]:
        """Why a cell failed: keys "kind" (see `Failure`), "reason", "traceback"; or what is wrong with that file."""
        content = {"kind": "failed", "reason": "unknown", "traceback": ""}  # an older file may lack a key
        try:
            content |= files.read(self.folder(run_id, "error.json"))
        except (Damaged, FileNotFoundError) as error:
            content["reason"] = str(error)
        return {key: str(content[key]) for key in ("kind", "reason", "traceback")}

    def begin(self, run_id: str, cell: Mapping[str, Any]) -> None:
        """Make the run directory and note its cell; called under the cell's lease, as all that changes a run."""
        files.write(self.folder(run_id, "cell.json"), cell)

    def finish(self, run_id: str, record: Mapping[str, Any], ledger: str) -> None:
        """Write the run with its curve, and remove its `_UNFINISHED` files; raises `Held` where one is there."""
        run = Run(dict(record), json.loads(ledger), self.curve(run_id))
        try:
            files.write(self.folder(run_id, RUN), run.line(), replace=False)
        except FileExistsError as error:  # copied from elsewhere or damaged: it is never overwritten
            raise Held(f"{self.folder(run_id, RUN)} exists") from error
        folder = self.folder(run_id)
        for served in (*(folder / name for name in _UNFINISHED), *folder.glob(".writing-*")):
            served.unlink(missing_ok=True)

    def fail(self, run_id: str, reason: str, traceback: str = "", kind: Failure = "failed") -> None:
        """Note that a cell ended without a result."""
        files.write(self.folder(run_id, "error.json"), {"kind": kind, "reason": reason, "traceback": traceback})
        self.note_tries(run_id, 0)

    def forget_failure(self, run_id: str) -> None:
        """Let a failed cell run again."""
        self.note_tries(run_id, 0)  # first, or a process that looks between the two would give up at once
        self.folder(run_id, "error.json").unlink(missing_ok=True)

    def tries(self, run_id: str) -> _Tries:
        """The attempts at a cell so far; none where nothing of them can be read."""
        try:
            content = files.read(self.folder(run_id, "tries.json"))
            return _Tries(int(content["count"]), content["kind"], str(content["reason"]))
        except (FileNotFoundError, Damaged, *UNREADABLE):
            return _Tries()

    def note_tries(self, run_id: str, count: int, kind: Failure = "died", reason: str = "its worker died") -> None:
        """Note the number of attempts at a cell and the end of the last one, by default that of a sudden death."""
        path = self.folder(run_id, "tries.json")
        if count:
            files.write(path, {"count": count, "kind": kind, "reason": reason})
        else:
            path.unlink(missing_ok=True)

    def append_curve(self, run_id: str, entry: Mapping[str, Any]) -> None:
        """Add one entry at the end of the curve."""
        with self.folder(run_id, "curve.jsonl").open("a") as file:
            file.write(files.dumps(entry) + "\n")

    def restart_curve(self, run_id: str, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace the curve by `entries`: those that a run which continues has already passed."""
        files.write(self.folder(run_id, "curve.jsonl"), "".join(files.dumps(entry) + "\n" for entry in entries))

    def save_checkpoint(self, run_id: str, content: bytes) -> None:
        """Replace a run's checkpoint."""
        files.write_checked(self.folder(run_id, "checkpoint.pt"), content)

    def load_checkpoint(self, run_id: str) -> bytes:
        """The content of a run's checkpoint; raises `FileNotFoundError` without one, `Damaged` where it was changed."""
        return files.read_checked(self.folder(run_id, "checkpoint.pt"))

    def lease(self, run_id: str) -> leases.Lease:
        """The right to run a cell, for a `with` block, which takes it and raises `Held` if another process has it."""
        return leases.Lease(self.folder(run_id, leases.LEASE))

    def holder(self, run_id: str) -> leases.Holder | None:
        """The process that runs a cell, if any, and the part of the cell that is done."""
        holder, curve = leases.read(self.folder(run_id, leases.LEASE)), self.curve(run_id)
        try:
            if holder is None or not curve:
                return holder
            epochs = files.read(self.folder(run_id, "cell.json"))["epochs"]
            # Draws are a whole number, so the last one may lie beyond the epochs that were asked for.
            return replace(holder, fraction=min(1.0, curve[-1]["epoch"] / epochs))
        except (FileNotFoundError, Damaged, *UNREADABLE):
            return holder

    def suite_folder(self, suite: str) -> Path:
        """The folder of a suite's parts and tables."""
        return self.root / suite if self.is_read_only else self.root / "suites" / suite

    def extend_suite(self, suite: str, manifest: Mapping[str, Any]) -> int:
        """Add cells to a suite and replace what else is noted of it; see `manifests.extend`."""
        return manifests.extend(self.suite_folder(suite), manifest, self.archive(suite).entries)

    def manifest(self, suite: str) -> dict[str, Any]:
        """All that is noted of a suite, "cells" too; `ConfigError` if it was never run here, or a file is damaged."""
        if suite not in self.suites():
            raise unknown("suite", suite, self.suites(), f"{self.root} holds nothing of it, `dpopt run` trains it")
        folder = self.suite_folder(suite)
        cells = manifests.by_place(*self.archive(suite).entries, *manifests.entries(folder))
        return {**manifests.about(folder), "cells": list(cells.values())}

    def suites(self) -> list[str]:
        """The suites that were run or are published here; `ConfigError` where an older version has written one."""
        folders = sorted(self.suite_folder("*").parent.glob("*"))
        if any((folder / "manifest.json").exists() for folder in folders) or any(self.root.glob("*/cells.parquet")):
            raise manifests.older(self.root)
        kinds = (manifests.ABOUT, manifests.PARTS, manifests.RUNS)
        return [folder.name for folder in folders if any((folder / kind).exists() for kind in kinds)]

    def cancel(self, suite: str) -> None:
        """Ask the processes that run a suite to stop."""
        self.write(self.suite_folder(suite) / "cancel", secrets.token_hex(8))

    def cancelled(self, suite: str) -> str:
        """A token that changes when someone asks to stop."""
        # Not a time, as the clocks of machines differ, and not a mere file, which someone would have to remove.
        with suppress(FileNotFoundError, Damaged):
            return files.content(self.suite_folder(suite) / "cancel", 1000).decode(errors="replace")
        return ""

    def check_writable(self) -> None:
        """Raise `ConfigError` before any work where results cannot be written, or the layout is an older one."""
        if self.is_read_only:
            raise ConfigError("results", str(self.root), "published results are only read; give another folder")
        self.suites()
        # The commands that only measure need no folder for runs, so none is made beside what is there.
        is_other = self.root.is_dir() and not (self.root / "runs").exists()
        files.check_writable(self.root if is_other else self.root / "runs", "results")

    def write(self, path: Path, content: Mapping[str, Any] | str | bytes) -> None:
        """Write a table, a page, a figure or a mapping in one step; `ConfigError` in a folder of published suites."""
        if self.is_read_only and path.resolve().is_relative_to(self.root.resolve()):
            self.check_writable()
        files.write(path, content)

    def measurements(self) -> list[Path]:
        """The records of what `dpopt bench` and `dpopt audit` measured."""
        return [path for kind in ("bench", "audit") for path in sorted((self.root / kind).glob("*/record.json"))]

    def add(self, kind: Literal["bench", "audit"], record: Mapping[str, Any]) -> Path:
        """Write a measurement; gives its folder, which is named by the `address` of its record."""
        folder = self.root / kind / address(record)
        self.write(folder / "record.json", record)
        return folder

    def foreign(self) -> list[str]:
        """A line for each thing among the run directories that is none."""
        groups = sorted((self.root / "runs").glob("*"))
        entries = [entry for group in groups for entry in (sorted(group.iterdir()) if group.is_dir() else [group])]
        return [f"{entry}: not a run directory" for entry in entries if not _is_run(entry)]

    def run_ids(self) -> list[str]:
        """The names of all run directories, finished or not; not those of runs in archives."""
        return sorted(run.name for run in (self.root / "runs").glob("*/*") if _is_run(run))


def released_score(record: Mapping[str, Any]) -> float:
    """The score by which a search goes: the noised one where that is charged, else on validation; NaN without."""
    if "released_score" in record:
        return float(record["released_score"]["value"])
    return float(record.get(f"validation_{record.get('score', 'accuracy')}", math.nan))


def score_or_worst(score: float, status: str) -> float:
    """A run's score for its selection, or the worst where the run has diverged or has no number."""
    return -math.inf if status == "diverged" or math.isnan(score) else score


def address(record: Mapping[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 over a record's JSON: the name of a measurement's folder."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _is_run(path: Path) -> bool:
    name = path.name
    is_id = len(name) == 16 and set(name) <= set("0123456789abcdef") and name[:2] == path.parent.name
    return is_id and path.is_dir()
