"""Run directories: `results/runs/ab/abcd.../` for each cell, `results/suites/NAME/` for what a suite refers to,
`results/{bench,audit}/abcd.../` for what `dpopt bench` and `dpopt audit` measured.

A run directory holds `cell.json` (what to run), `curve.jsonl` (appended), `checkpoint.pt`, and at the end
`ledger.json` and, last and atomically, `record.json`. Without a record the cell is not done; `error.json` says that it
failed. Whatever cannot be read is reported as damaged: never used, never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpopt.errors import ConfigError, unknown
from dpopt.privacy.ledger import Ledger

State = Literal["done", "diverged", "failed", "started", "pending", "damaged"]
SCHEMA = 1
MANIFEST_KEYS = {"run_id", "label", "tuning", "tuned", "clip", "cell"}
RECORD_KEYS = {"schema", "run_id", "cell", "status", "epsilon", "epsilon_target", "delta", "provenance"}


class Damaged(Exception):
    """A file in `results/` that this suite did not write, or not completely."""


@dataclass(frozen=True)
class Store:
    """A results folder; it is made when something is written.

    Args:
        root: the folder, usually `results`.
    """

    root: Path

    def folder(self, run_id: str) -> Path:
        """The directory of one run."""
        return self.root / "runs" / run_id[:2] / run_id

    def state(self, run_id: str) -> State:
        """What is known of a cell: "done" and "diverged" are results; "started" has files but no end."""
        folder = self.folder(run_id)
        try:
            return self.record(run_id)["status"]
        except FileNotFoundError:
            pass
        except Damaged:
            return "damaged"
        if (folder / "error.json").exists():
            return "failed"
        return "started" if (folder / "cell.json").exists() else "pending"

    def record(self, run_id: str) -> dict[str, Any]:
        """A finished cell's record.

        Raises:
            FileNotFoundError: the cell is not done.
            Damaged: the file is no record of this run.
        """
        path = self.folder(run_id) / "record.json"
        content = _read(path)
        missing = RECORD_KEYS - content.keys()
        if missing:
            raise Damaged(f"{path}: lacks {', '.join(sorted(missing))}")
        if content["run_id"] != run_id or content["schema"] != SCHEMA or content["status"] not in ("done", "diverged"):
            raise Damaged(f"{path}: not a record of schema {SCHEMA} for run {run_id}")
        return content

    def error(self, run_id: str) -> dict[str, Any]:
        """Why a cell failed: keys "reason" and "traceback"; a damaged file gives its own story."""
        path = self.folder(run_id) / "error.json"
        try:
            content = _read(path)
            return {key: str(content.get(key, "unknown")) for key in ("reason", "traceback")}
        except Damaged as error:
            return {"reason": str(error), "traceback": ""}

    def ledger(self, run_id: str) -> Ledger:
        """The ledger that a finished cell left.

        Raises:
            Damaged: the file is missing or holds no ledger.
        """
        path = self.folder(run_id) / "ledger.json"
        try:
            return Ledger.from_json(path.read_text())
        except (OSError, ValueError) as error:  # ConfigError and undecodable text are ValueErrors
            raise Damaged(f"{path}: {error}") from error

    def begin(self, run_id: str, cell: Mapping[str, Any]) -> None:
        """Make the run directory and note what runs in it."""
        self.folder(run_id).mkdir(parents=True, exist_ok=True)
        _write(self.folder(run_id) / "cell.json", cell)

    def finish(self, run_id: str, record: Mapping[str, Any], ledger: str) -> None:
        """Write ledger and record, the record last; the checkpoint has served.

        Raises:
            FileExistsError: there is a record already, sound or not; it is never overwritten.
        """
        folder = self.folder(run_id)
        if (folder / "record.json").exists():
            raise FileExistsError(f"{folder / 'record.json'} exists")
        _write(folder / "ledger.json", ledger)
        _write(folder / "record.json", record)
        (folder / "checkpoint.pt").unlink(missing_ok=True)

    def fail(self, run_id: str, reason: str, traceback: str = "") -> None:
        """Note that a cell ended without a result."""
        self.folder(run_id).mkdir(parents=True, exist_ok=True)
        _write(self.folder(run_id) / "error.json", {"reason": reason, "traceback": traceback})

    def forget_failure(self, run_id: str) -> None:
        """Let a failed cell run again."""
        (self.folder(run_id) / "error.json").unlink(missing_ok=True)

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a run's curve, up to the first line that is not whole."""
        entries = []
        try:
            lines = (self.folder(run_id) / "curve.jsonl").read_text(errors="replace").splitlines()
        except FileNotFoundError:
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
        with (self.folder(run_id) / "curve.jsonl").open("a") as file:
            file.write(_dumps(entry) + "\n")

    def restart_curve(self, run_id: str, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace the curve by `entries`: those that a run which continues has already passed."""
        _write(self.folder(run_id) / "curve.jsonl", "".join(_dumps(entry) + "\n" for entry in entries))

    def checkpoint(self, run_id: str) -> Path:
        """Where a run keeps its checkpoint."""
        return self.folder(run_id) / "checkpoint.pt"

    def suite_folder(self, suite: str) -> Path:
        """Where a suite's manifest and tables are."""
        return self.root / "suites" / suite

    def write_manifest(self, suite: str, manifest: Mapping[str, Any]) -> None:
        """Note which cells a suite consists of."""
        _write(self.suite_folder(suite) / "manifest.json", manifest)

    def manifest(self, suite: str) -> dict[str, Any]:
        """The cells of a suite, as planned last.

        Raises:
            ConfigError: the suite was never planned here, or the file is damaged.
        """
        path = self.suite_folder(suite) / "manifest.json"
        try:
            content = _read(path)
        except FileNotFoundError:
            known = [entry.name for entry in (self.root / "suites").glob("*") if entry.is_dir()]
            raise unknown(f"suite in {self.root}", suite, known) from None
        except Damaged as error:
            raise ConfigError("suite", suite, f"{error}; `dpopt plan suite={suite}` writes it anew") from error
        cells = content.get("cells")
        if not isinstance(cells, list) or not all(isinstance(c, dict) and c.keys() >= MANIFEST_KEYS for c in cells):
            raise ConfigError("suite", suite, f"{path} is no manifest; `dpopt plan suite={suite}` writes it anew")
        return content

    def journal(self, suite: str) -> Path:
        """Where the refinement of a suite keeps its journal; whoever it is handed to writes it.

        Whole lines are appended; one that a kill has cut short is taken off, or the next would be lost with it.
        """
        path = self.suite_folder(suite) / "refine.journal"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if not content.endswith(b"\n") and content:
            _write(path, content[: content.rfind(b"\n") + 1])
        return path

    def write(self, path: Path, content: str | bytes) -> None:
        """Write a table, a page or a figure below the results folder."""
        _write(path, content)

    def add(self, kind: Literal["bench", "audit"], record: Mapping[str, Any]) -> Path:
        """Write what `dpopt bench` or `dpopt audit` measured.

        Returns:
            The record's folder, named by the first 16 hex digits of the SHA-256 over its JSON.
        """
        folder = self.root / kind / hashlib.sha256(_dumps(record).encode()).hexdigest()[:16]
        _write(folder / "record.json", record)
        return folder

    def foreign(self) -> list[str]:
        """What lies among the run directories and is not a run's, one line each."""
        found = []
        for group in sorted((self.root / "runs").glob("*")):
            runs = [group] if not group.is_dir() else sorted(group.iterdir())
            found += [f"{run}: not a run directory" for run in runs if not _is_run(run)]
        return found


def _is_run(path: Path) -> bool:
    name = path.name
    is_id = len(name) == 16 and set(name) <= set("0123456789abcdef") and name[:2] == path.parent.name
    return is_id and path.is_dir()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise FileNotFoundError(path) from error
        raise Damaged(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path}: expected a JSON object")
    return content


def _write(path: Path, content: Mapping[str, Any] | str | bytes) -> None:
    """Write in one step: a reader, or the next start, sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _dumps(content, indent=1) + "\n" if isinstance(content, Mapping) else content
    partial = path.with_name(f".writing-{os.getpid()}-{path.name}")
    with partial.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _dumps(content: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, sort_keys=True)
