"""Run directories: `results/runs/ab/abcd.../` for each cell, `results/suites/NAME/` for what a suite refers to,
`results/{bench,audit}/abcd.../` for what `dpopt bench` and `dpopt audit` measured.

A run directory holds `lease.json` while a process runs the cell (see `leases`), `cell.json` (what to run),
`curve.jsonl` (appended), `checkpoint.pt`, and at the end `ledger.json` and, last and atomically, `record.json`. Without
a record the cell is not done; `error.json` says that it failed. Whatever cannot be read is reported as damaged: never
used, never overwritten. So is a record that is not the one that was written; a checkpoint that is not is left out, and
its cell starts over.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from dpopt.errors import ConfigError, unknown
from dpopt.privacy.ledger import Ledger
from dpopt.store import leases
from dpopt.store.identity import identity

State = Literal["done", "diverged", "failed", "running", "interrupted", "pending", "damaged"]
RESULTS: tuple[State, ...] = ("done", "diverged")
"""The states of a cell that has a result."""
SETTLED: tuple[State, ...] = (*RESULTS, "failed", "damaged")
"""The states of a cell that `dpopt run` leaves alone."""
Failure = Literal["failed", "died", "timeout"]
"""How a cell failed: an error of its own, a worker process that died, or too much time."""
Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Gives the elements of a sequence, and shows under a title how far it is."""
RECORD = "record.json"
CELLS = "cells.parquet"
"""The file of a suite's cells that `dpopt collect` and `dpopt publish` write."""
CHECKED = ("cell.json", "curve.jsonl", "ledger.json")
"""The files of a run whose checksums are in its record, beside the record's own."""
DIGEST = hashlib.sha256().digest_size
SCHEMA = 1
RECORD_KEYS = {"schema", "run_id", "cell", "status", "epsilon", "epsilon_target", "delta", "provenance"}
"""What a record holds that can be read at all."""
WHOLE = RECORD_KEYS | {"accountant", "private", "noise", "rate", "draws", "examples", "dimension", "seconds_train"}
"""What every record holds that a run has written."""


UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)
"""What looking at stored content raises that lacks something, or holds something else."""
MEASUREMENTS = ("bench", "audit")
"""The folders of what `dpopt bench` and `dpopt audit` measured."""


class Damaged(Exception):
    """A file in `results/` that dpopt did not write, or not completely."""


class Run(NamedTuple):
    """A finished run, whole.

    Attributes:
        record: without the checksum of its own.
        cell: what was run.
        ledger: as JSON.
        curve: the lines of its curve; empty where there is none.
    """

    record: dict[str, Any]
    cell: Mapping[str, Any]
    ledger: str
    curve: bytes


@dataclass(frozen=True)
class Store:
    """A results folder; it is made when something is written.

    Args:
        root: the folder, usually `results`.
    """

    root: Path
    is_read_only: ClassVar[bool] = False

    def folder(self, run_id: str, *inside: str) -> Path:
        """The directory of one run, or what lies inside of it."""
        return Path(self.root, "runs", run_id[:2], run_id, *inside)

    def state(self, run_id: str) -> State:
        """What is known of a cell: "done" and "diverged" are results; "interrupted" has files but no end."""
        try:
            return self.record(run_id)["status"]
        except FileNotFoundError:
            pass
        except Damaged:
            return "damaged"
        folder = self.folder(run_id)
        if (folder / "error.json").exists():
            return "failed"
        if (folder / "lease.json").exists() and not ((holder := self.holder(run_id)) and holder.is_gone):
            return "running"
        return "interrupted" if (folder / "cell.json").exists() else "pending"

    def record(self, run_id: str) -> dict[str, Any]:
        """A finished cell's record, without the checksum of its own, which older records do not have.

        Raises:
            FileNotFoundError: the cell is not done.
            Damaged: the file is no record of this run, or not as it was written, or a file beside it is missing.
        """
        record = sound_record(read(self.folder(run_id, RECORD)), run_id, self.place(run_id))
        for path in (self.folder(run_id, name) for name in record.get("checksums", ())):
            if not path.is_file():
                raise Damaged(f"{path}: no such file, and the record beside it was written with one")
        return record

    def error(self, run_id: str) -> dict[str, Any]:
        """Why a cell failed: keys "kind" (see `Failure`), "reason", "traceback"; or what is wrong with that file."""
        path = self.folder(run_id, "error.json")
        try:
            content = {"kind": "failed", "reason": "unknown", "traceback": "", **read(path)}
        except (Damaged, FileNotFoundError) as error:
            content = {"kind": "failed", "reason": str(error), "traceback": ""}
        return {key: str(content[key]) for key in ("kind", "reason", "traceback")}

    def ledger(self, run_id: str) -> Ledger:
        """The ledger that a finished cell left.

        Raises:
            Damaged: the file is missing or holds no ledger.
        """
        path = self.folder(run_id, "ledger.json")
        try:
            return Ledger.from_json(path.read_text())
        except (OSError, ValueError) as error:  # ConfigError and undecodable text are ValueErrors
            raise Damaged(f"{path}: {error}") from error

    def run(self, run_id: str) -> Run:
        """All of a finished run, whose parts belong together.

        Raises:
            FileNotFoundError: the cell is not done.
            Damaged: they do not, or one of them is missing or cannot be read.
        """
        record = self.record(run_id)
        try:
            if not run_id == identity(record["cell"]) == record["run_id"]:
                raise Damaged(f"{self.place(run_id)}: the run id, the record and its cell do not belong together")
            return self._run(run_id, record)
        except (*UNREADABLE, OSError) as error:
            raise Damaged(f"{self.place(run_id)}: {type(error).__name__} {error}") from error

    def _run(self, run_id: str, record: dict[str, Any]) -> Run:
        folder = self.folder(run_id)
        if record["cell"] != read(folder / "cell.json"):
            raise Damaged(f"{folder}: cell.json and the cell of record.json do not belong together")
        for name, claimed in record.get("checksums", {}).items():
            if sha256(folder / name) != claimed:
                raise Damaged(f"{folder / name}: not the file that the record was written with")
        self.ledger(run_id)  # or it is damaged
        curve = folder / "curve.jsonl"
        content = curve.read_bytes() if curve.exists() else b""
        return Run(record, record["cell"], (folder / "ledger.json").read_text(), content)

    def place(self, run_id: str) -> str:
        """Where a run's record is stored, as messages name it."""
        return str(self.folder(run_id, RECORD))

    def files(self, run_id: str) -> list[Path]:
        """The files that `run` reads, beside `shared_files`."""
        return [self.folder(run_id, name) for name in (*CHECKED, RECORD)]

    def shared_files(self) -> list[Path]:
        """The files that all runs are read from."""
        return []

    def measurements(self) -> list[Path]:
        """The records of what `dpopt bench` and `dpopt audit` measured."""
        return [path for kind in MEASUREMENTS for path in sorted((self.root / kind).glob(f"*/{RECORD}"))]

    def begin(self, run_id: str, cell: Mapping[str, Any]) -> None:
        """Make the run directory and note what runs in it; called under the cell's lease, as all that changes a run."""
        self.folder(run_id).mkdir(parents=True, exist_ok=True)
        if not self.folder(run_id, RECORD).exists():
            self.folder(run_id, "ledger.json").unlink(missing_ok=True)  # of a record that was lost: it is made again
        _write(self.folder(run_id, "cell.json"), cell)

    def finish(self, run_id: str, record: Mapping[str, Any], ledger: str) -> None:
        """Write ledger and record, the record last, with checksums of the other files; the checkpoint has served.

        Raises:
            FileExistsError: there is a record already, sound or not; it is never overwritten.
        """
        folder = self.folder(run_id)
        if (folder / RECORD).exists():
            raise FileExistsError(f"{folder / RECORD} exists")
        try:
            _write(folder / "ledger.json", ledger)
            sums = {name: sha256(folder / name) for name in CHECKED if (folder / name).exists()}
            _write(folder / RECORD, sealed({**record, "checksums": sums}), replace=False)
        except BaseException:
            if not (folder / RECORD).exists():  # a ledger alone would say that a record was lost
                (folder / "ledger.json").unlink(missing_ok=True)
            raise
        for served in (folder / "checkpoint.pt", folder / "error.json", *folder.glob(".writing-*")):
            served.unlink(missing_ok=True)

    def has_lost_its_record(self, run_id: str) -> bool:
        """Whether a run has ended and its record is gone.

        The ledger is written right before the record, while the run has its lease: a ledger alone is one that has lost
        its record, unless the process is at it or was killed in between, whose lease is then still there. In this order
        of looking, a run that ends meanwhile is not mistaken for one.
        """
        is_held, has_record, has_ledger = (
            self.folder(run_id, name).exists() for name in ("lease.json", RECORD, "ledger.json")
        )
        return has_ledger and not has_record and not is_held

    def fail(self, run_id: str, reason: str, traceback: str = "", kind: Failure = "failed") -> None:
        """Note that a cell ended without a result."""
        self.folder(run_id).mkdir(parents=True, exist_ok=True)
        _write(self.folder(run_id, "error.json"), {"kind": kind, "reason": reason, "traceback": traceback})

    def forget_failure(self, run_id: str) -> None:
        """Let a failed cell run again."""
        self.folder(run_id, "error.json").unlink(missing_ok=True)

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a run's curve, up to the first line that is not whole."""
        entries = []
        try:
            lines = self.folder(run_id, "curve.jsonl").read_text(errors="replace").splitlines()
        except OSError:  # none, or something that is no file
            return []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not isinstance(entry, dict) or not isinstance(entry.get("draw"), int):
                break
            entries.append(entry)
        return entries

    def append_curve(self, run_id: str, entry: Mapping[str, Any]) -> None:
        """Add one entry at the end of the curve."""
        with self.folder(run_id, "curve.jsonl").open("a") as file:
            file.write(line(entry))

    def restart_curve(self, run_id: str, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace the curve by `entries`: those that a run which continues has already passed."""
        _write(self.folder(run_id, "curve.jsonl"), "".join(map(line, entries)))

    def checkpoint(self, run_id: str) -> Path:
        """Where a run keeps its checkpoint."""
        return self.folder(run_id, "checkpoint.pt")

    def save_checkpoint(self, run_id: str, content: bytes) -> None:
        """Replace a run's checkpoint."""
        write_checked(self.checkpoint(run_id), content)

    def load_checkpoint(self, run_id: str) -> bytes:
        """The content of a run's checkpoint.

        Raises:
            FileNotFoundError: there is none.
            Damaged: the file is not as it was written.
        """
        return read_checked(self.checkpoint(run_id))

    def lease(self, run_id: str) -> leases.Lease:
        """Take the right to run a cell; it is released at the end of the `with` block.

        Raises:
            Held: another process has it.
        """
        return leases.Lease(self.folder(run_id, "lease.json"))

    def watch(self, run_id: str) -> leases.Watch:
        """What finds out when a cell that another process runs is free again."""
        return leases.Watch(self.folder(run_id, "lease.json"))

    def holder(self, run_id: str) -> leases.Holder | None:
        """Who runs a cell, if anyone."""
        return leases.read(self.folder(run_id, "lease.json"))

    def suite_folder(self, suite: str) -> Path:
        """Where a suite's manifest and tables are."""
        return self.root / "suites" / suite

    def extend_suite(self, suite: str, manifest: Mapping[str, Any]) -> int:
        """Add the cells of `manifest` to those that a suite has, and replace all else that is noted of it.

        Two processes that do so at the same moment may lose what one has added; each adds its cells again when they are
        trained.

        Returns:
            How many cells it did not have.

        Raises:
            ConfigError: there is a manifest that cannot be read.
        """
        is_new = not (self.suite_folder(suite) / "manifest.json").exists()
        cells = {_place(entry): entry for entry in ([] if is_new else self.manifest(suite)["cells"])}
        before = len(cells)
        cells.update((_place(entry), entry) for entry in manifest["cells"])
        self.write_manifest(suite, {**manifest, "cells": list(cells.values())})
        return len(cells) - before

    def write_manifest(self, suite: str, manifest: Mapping[str, Any]) -> None:
        """Note which cells a suite consists of."""
        self.write(self.suite_folder(suite) / "manifest.json", _dumps(manifest))  # indented, 10,000 cells take seconds

    def cancel(self, suite: str) -> None:
        """Ask the processes that run a suite to stop."""
        self.write(self.suite_folder(suite) / "cancel", secrets.token_hex(8))

    def cancelled(self, suite: str) -> str:
        """A token that changes when someone asks to stop: no clock is compared, nothing has to be removed."""
        try:
            return (self.suite_folder(suite) / "cancel").read_text(errors="replace")
        except OSError:
            return ""

    def check_writable(self) -> None:
        """Find out before any work whether results can be written.

        Raises:
            ConfigError: they cannot, or the folder holds published suites, which are only read.
        """
        if is_published(self.root):
            raise only_read(self.root)
        folder = self.root / "runs"
        if self.root.is_dir() and not folder.exists():  # the commands that only measure need no folder for runs
            folder = self.root
        check_writable(folder, "results")

    def manifest(self, suite: str) -> dict[str, Any]:
        """The cells of a suite: of all its runs here, whatever their overrides.

        Raises:
            ConfigError: the suite was never run here, or the file is damaged.
        """
        path = self.suite_folder(suite) / "manifest.json"
        anew = f"move it away: `dpopt run suite={suite}` makes it again"
        try:
            content = read(path)
        except FileNotFoundError:
            known = [entry.name for entry in (self.root / "suites").glob("*") if entry.is_dir()]
            raise unknown("suite", suite, known, f"{self.root} holds nothing of it, `dpopt run` trains it") from None
        except Damaged as error:
            raise ConfigError("suite", suite, f"{error}; {anew}") from error
        cells = content.get("cells")
        if not isinstance(cells, list) or not all(map(is_planned, cells)):
            raise ConfigError("suite", suite, f"{path} is no manifest; {anew}")
        return content

    def journal_path(self, suite: str) -> Path:
        """Where the refinement of a suite keeps its journal, if there is one."""
        return self.suite_folder(suite) / "refine.journal"

    def write(self, path: Path, content: Mapping[str, Any] | str | bytes) -> None:
        """Write a table, a page or a figure, or a mapping as JSON, in one step."""
        _write(path, content)

    def add(self, kind: Literal["bench", "audit"], record: Mapping[str, Any]) -> Path:
        """Write what `dpopt bench` or `dpopt audit` measured.

        Returns:
            The record's folder, named by the first 16 hex digits of the SHA-256 over its JSON.
        """
        folder = self.root / kind / address(record)
        self.write(folder / "record.json", record)
        return folder

    def foreign(self) -> list[str]:
        """What lies among the run directories and is not a run's, one line each."""
        found = []
        for group in sorted((self.root / "runs").glob("*")):
            runs = [group] if not group.is_dir() else sorted(group.iterdir())
            found += [f"{run}: not a run directory" for run in runs if not _is_run(run)]
        return found

    def run_ids(self) -> list[str]:
        """The names of all run directories, finished or not."""
        return sorted(run.name for run in (self.root / "runs").glob("*/*") if _is_run(run))

    def suites(self) -> list[str]:
        """The suites that were run here."""
        return sorted(path.parent.name for path in (self.root / "suites").glob("*/manifest.json"))


def is_published(root: Path) -> bool:
    """Whether a folder holds published suites, and no runs."""
    is_plain = (root / "runs").is_dir() or (root / "suites").is_dir()
    return not is_plain and any(root.glob(f"*/{CELLS}"))


def only_read(root: Path) -> ConfigError:
    """The error for writing into a folder of published suites."""
    return ConfigError("results", str(root), "published results are only read; give another folder")


def mended(journal: Path) -> Path:
    """A journal without a last line that a kill has cut short."""
    content = journal.read_bytes() if journal.exists() else b""
    if not content.endswith(b"\n") and content:
        _write(journal, content[: content.rfind(b"\n") + 1])
    return journal


def released_score(record: Mapping[str, Any]) -> float:
    """What a search knows of a run: its noised score where that is charged, else its validation score; NaN without."""
    if "released_score" in record:
        return float(record["released_score"]["value"])
    return float(record.get(f"validation_{record.get('score', 'accuracy')}", math.nan))


def score_or_worst(score: float, status: str) -> float:
    """What a run is selected by: its score, or the worst where the run has diverged or has no number."""
    return -math.inf if status == "diverged" or math.isnan(score) else score


def _place(entry: Mapping[str, Any]) -> tuple[str, str]:
    """What tells the entries of a manifest apart: a run may stand for several labels."""
    return entry["label"], entry["run_id"]


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with its own SHA-256 among its checksums, over its canonical JSON without that one."""
    content = json.loads(_dumps({"checksums": {}, **record}))
    return {**content, "checksums": {**content["checksums"], RECORD: _digest(content)}}


def sound_record(content: dict[str, Any], run_id: str, place: str) -> dict[str, Any]:
    """The record that was written for a run at `place`, without the checksum of its own.

    Raises:
        Damaged: the content is no record of this run, or not as it was written.
    """
    if missing := RECORD_KEYS - content.keys():
        raise Damaged(f"{place}: lacks {', '.join(sorted(missing))}")
    if content["schema"] != SCHEMA:
        raise Damaged(f"{place}: written by another version (schema {content['schema']}, this one reads {SCHEMA})")
    if content["run_id"] != run_id or content["status"] not in RESULTS:
        raise Damaged(f"{place}: not a record of schema {SCHEMA} for run {run_id}")
    if not isinstance(content.get("checksums", {}), dict):
        raise Damaged(f"{place}: `checksums` is not a mapping")
    return unsealed(content, place)


def unsealed(content: dict[str, Any], place: str) -> dict[str, Any]:
    """What was `sealed`, or a record of a version that did not: then the checksum is nowhere, not under another key.

    Raises:
        Damaged: it was changed.
    """
    key = next((key for key, value in content.items() if isinstance(value, dict) and RECORD in value), None)
    if key is None:
        return content
    record = {**content, key: {name: value for name, value in content[key].items() if name != RECORD}}
    if key != "checksums" or _digest(record) != content[key][RECORD]:
        raise Damaged(f"{place}: its content does not have the checksum that it was written with")
    return record


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dumps(content).encode()).hexdigest()


def address(record: Mapping[str, Any]) -> str:
    """The name of a measurement's folder: see `Store.add`."""
    return _digest(record)[:16]


def is_planned(entry: Any) -> bool:
    """Whether an entry of a manifest has all that is read of it."""
    try:
        cell = entry["cell"]
        names = [cell[key]["name"] for key in ("workload", "optimizer")]
        texts = [entry["run_id"], entry["label"], entry["tuning"], cell["accountant"], *names]
        counts = [cell["batch_size"], cell["seed"]]
        numbers = [entry.get("target", 0), *(cell[key] for key in ("epsilon", "delta", "epochs"))]
        return (
            isinstance(entry["tuned"], dict)
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(count, int) for count in counts)
            and all(float(number) > -math.inf for number in numbers)  # nor not a number
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _is_run(path: Path) -> bool:
    name = path.name
    is_id = len(name) == 16 and set(name) <= set("0123456789abcdef") and name[:2] == path.parent.name
    return is_id and path.is_dir()


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: no such file.
        Damaged: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise FileNotFoundError(path) from error
        raise Damaged(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path}: expected a JSON object")
    return content


def write_checked(path: Path, content: bytes, is_secret: bool = False) -> None:
    """Replace a file in one step; it ends with the content's SHA-256. A secret one its owner alone may read."""
    _write(path, content + hashlib.sha256(content).digest(), mode=0o600 if is_secret else 0o666)


def read_checked(path: Path) -> bytes:
    """What `write_checked` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is not as it was written.
    """
    file = path.read_bytes()
    content, digest = file[:-DIGEST], file[-DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        raise Damaged(f"{path}: its content does not have the checksum that it was written with")
    return content


def check_writable(folder: Path, key: str, instead: str = "") -> None:
    """Find out before any work whether files can be written into `folder`, which is made where there is none.

    Args:
        folder: where files are to go.
        key: what errors call it.
        instead: what whoever gave it may say instead.

    Raises:
        ConfigError: they cannot.
    """
    trial = folder / f".writing-{secrets.token_hex(8)}"
    try:
        _write(trial, "")
        trial.unlink()
    except OSError as error:
        reason = "; ".join(filter(None, [f"cannot be written: {error.strerror}", instead]))
        raise ConfigError(key, str(folder), reason) from error


def _write(path: Path, content: Mapping[str, Any] | str | bytes, replace: bool = True, mode: int = 0o666) -> None:
    """Write in one step: a reader, or the next start, sees the old file or the whole new one.

    Args:
        path, content: what is written where; a mapping as JSON.
        replace: whether there may be such a file already.
        mode: who may read and write it, before the process's mask.

    Raises:
        FileExistsError: there is such a file, and it is not to be replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _dumps(content, indent=1) + "\n" if isinstance(content, Mapping) else content
    partial = path.with_name(f".writing-{secrets.token_hex(8)}-{path.name}")  # process numbers repeat across machines
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path) if replace else _publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _publish(partial: Path, path: Path) -> None:
    """Give a whole file its name, unless there is one of that name."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} exists") from None
        os.replace(partial, path)


def line(entry: Mapping[str, Any]) -> str:
    """An entry of a curve as its file has it."""
    return _dumps(entry) + "\n"


def _dumps(content: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, sort_keys=True)
