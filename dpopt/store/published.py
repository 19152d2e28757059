"""Published suites, read as a results folder is, from `NAME/cells.parquet` and `NAME/curves.parquet`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpopt.errors import ConfigError, unknown
from dpopt.files import Damaged, read
from dpopt.privacy.ledger import Ledger
from dpopt.store.runs import RECORD_KEYS, RESULTS, SCHEMA, SETTLED, UNREADABLE, State, Store

if TYPE_CHECKING:
    import pandas as pd

CELLS, CURVES, ABOUT, RECORD = "cells.parquet", "curves.parquet", "suite.json", "record.json"


@dataclass(frozen=True)
class PublishedStore(Store):
    """A folder of published suites; it is read and never written.

    Args:
        root: the folder, such as `results/published`.
        only: the one suite of it that is looked at, if not all are.
    """

    only: str | None = None
    is_read_only: ClassVar[bool] = True
    _frames: dict[str, list[dict[str, Any]]] = field(default_factory=dict, compare=False, repr=False)
    _runs: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)
    _curves: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict, compare=False, repr=False)

    def suites(self) -> list[str]:
        """The suites that are published here."""
        return sorted(path.parent.name for path in self.root.glob(f"{self.only or '*'}/{CELLS}"))

    def run_ids(self) -> list[str]:
        """The names of all runs that are published here."""
        return sorted({row["run_id"] for suite in self.suites() for row in self._rows(suite)})

    def suite_folder(self, suite: str) -> Path:
        """Where a suite's files are."""
        return self.root / suite

    def manifest(self, suite: str) -> dict[str, Any]:
        """The cells of a suite, with what `suite.json` says of it.

        Raises:
            ConfigError: it is not published here, or cannot be read.
        """
        if suite not in self.suites():
            raise unknown("suite", suite, self.suites(), f"{self.root} holds nothing of it")
        try:
            about = read(self.root / suite / ABOUT)
        except FileNotFoundError:  # published before there was such a file
            about = {"suite": suite, "description": ""}
        except Damaged as error:
            raise ConfigError("suite", suite, str(error)) from error
        return {**about, "cells": [self._planned(suite, row) for row in self._rows(suite)]}

    def is_settled(self, run_id: str) -> bool:
        return self.state(run_id) in SETTLED

    def state(self, run_id: str) -> State:
        """What is known of a cell."""
        row = self._find(run_id)
        return row["state"] if row else "pending"

    def record(self, run_id: str) -> dict[str, Any]:
        """A finished cell's record, as far as it is published.

        Raises:
            FileNotFoundError: the cell is not done.
            Damaged: its row holds none, or not as it was written.
        """
        row = self._find(run_id)
        if not row or row["state"] not in RESULTS:
            raise FileNotFoundError(run_id)
        try:
            return sound_record(_record(row), run_id, self.place(run_id))
        except UNREADABLE as error:
            raise Damaged(f"{self.place(run_id)}: no record: {type(error).__name__} {error}") from error

    def ledger(self, run_id: str) -> Ledger:
        """The ledger that a finished cell left.

        Raises:
            Damaged: there is none.
        """
        row = self._find(run_id) or {}
        try:
            return Ledger.from_json(row["ledger"])
        except UNREADABLE as error:
            raise Damaged(f"{self.place(run_id)}: no ledger: {type(error).__name__} {error}") from error

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a selected run's curve, from the suites that were read; none of another run."""
        for suite in self._frames if self._find(run_id) else []:
            if suite not in self._curves:
                self._curves[suite] = _curves(self.root / suite / CURVES)
            if run_id in self._curves[suite]:
                return self._own(run_id, self._curves[suite][run_id])
        return []

    def _own(self, run_id: str, curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A curve without the constant rate that the frame has for runs which find none: it is no entry's."""
        left_out = set() if "eta" in self.record(run_id) else {"eta"}
        return [{key: value for key, value in entry.items() if key not in left_out} for entry in curve]

    def place(self, run_id: str) -> str:
        """Where a run's record is stored, as messages name it."""
        row = self._find(run_id)
        return f"{self.root}, {run_id}" if row is None else f"{self.root / row['suite'] / CELLS}, {run_id}"

    def measurements(self) -> list[Path]:
        """Nothing: what is published of measurements is for the documentation."""
        return []

    def error(self, run_id: str) -> dict[str, str]:
        """Nothing is published of why a cell failed."""
        return {"kind": "failed", "reason": "not published", "traceback": ""}

    def foreign(self) -> list[str]:
        """Nothing: what else lies in the folder is for `checksums`."""
        return []

    def check_writable(self) -> None:
        """Raise `ConfigError`: what is published is not changed by running more."""
        raise only_read(self.root)

    def write(self, path: Path, content: Mapping[str, Any] | str | bytes) -> None:
        """Write what is made of published suites, such as a page, into another folder.

        Raises:
            ConfigError: the file would lie in the folder itself.
        """
        if path.resolve().is_relative_to(self.root.resolve()):
            raise only_read(self.root)
        super().write(path, content)

    def _rows(self, suite: str) -> list[dict[str, Any]]:
        if suite not in self._frames:
            path = self.root / suite / CELLS
            frame = read_parquet(path)
            if missing := sorted({"run_id", "label", "state"} - set(frame)):
                raise ConfigError("results", str(path), f"not a file of cells: lacks {', '.join(missing)}")
            frame = frame.drop_duplicates(["label", "run_id"]).assign(suite=suite)
            self._frames[suite] = frame.to_dict("records")  # a run that stands for several labels has a row for each
            for row in self._frames[suite]:
                self._runs[row["run_id"]] = _fuller(self._runs.get(row["run_id"]), row)
        return self._frames[suite]

    def _planned(self, suite: str, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            entry = _entry(row)
        except UNREADABLE:
            entry = {}
        if not entry:
            raise ConfigError("suite", suite, f"{self.root / suite / CELLS}: no cell in the row of {row['run_id']}")
        return entry

    def _find(self, run_id: str) -> dict[str, Any] | None:
        for suite in self.suites() if run_id not in self._runs else []:
            self._rows(suite)
        return self._runs.get(run_id)


def read_parquet(path: Path) -> pd.DataFrame:
    """The frame in a Parquet file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except FileNotFoundError as error:
        raise ConfigError("results", str(path), "no such folder or file") from error
    except Exception as error:  # a damaged file makes the readers of Parquet raise many kinds
        raise ConfigError("results", str(path), f"not Parquet: {error}") from error


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a manifest has it."""
    cell = json.loads(row["cell"])
    stage = {"stage": row["stage"]} if row["stage"] else {}
    return {
        "run_id": row["run_id"],
        "label": row["label"],
        "tuning": row["tuning"],
        "tuned": json.loads(row["tuned"]),
        "target": row["epsilon_target"],
        "refined": bool(row.get("is_refined", False)),
        "widen": int(row.get("widen", 0)),
        "widened": bool(row.get("is_widened", False)),
        "search_id": row.get("search_id", ""),
        "gradients_per_draw": row.get("gradients_per_draw", 1.0),
        "cell": cell,
        **stage,
    }


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    """The record that a row was made of.

    Raises:
        one of `UNREADABLE`: the row has none.
    """
    record = json.loads(row["record"])
    if not isinstance(record, dict):
        raise TypeError("expected a JSON object")
    return record


def _fuller(known: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """Of the rows that several suites have of one run, the one with more of its record; of equal ones the first."""
    if known is None:
        return row
    return max(known, row, key=_keys_of_record)


def _keys_of_record(row: Mapping[str, Any]) -> int:
    try:
        return len(_record(row))
    except UNREADABLE:
        return 0


def _curves(path: Path) -> dict[str, list[dict[str, Any]]]:
    if not path.exists():
        return {}
    frame = read_parquet(path)
    place = {"workload", "label", "epsilon_target", "batch_size", "epochs", "clip", "seed", "tuning", "score", "lr"}
    entries: dict[str, list[dict[str, Any]]] = {}
    for run_id, rows in frame.drop_duplicates(["run_id", "draw"]).groupby("run_id", sort=False):
        kept = rows.drop(columns=[*place & set(rows.columns), "run_id"]).dropna(axis="columns", how="all")
        found = kept.to_dict("records")
        if "diagnostics" in kept:
            found = [entry | {"diagnostics": json.loads(entry["diagnostics"])} for entry in found]
        entries[str(run_id)] = found
    return entries


def is_published(root: Path) -> bool:
    """Whether a folder holds published suites, and no runs."""
    is_plain = (root / "runs").is_dir() or (root / "suites").is_dir()
    return not is_plain and any(root.glob(f"*/{CELLS}"))


def only_read(root: Path) -> ConfigError:
    """The error for writing into a folder of published suites."""
    return ConfigError("results", str(root), "published results are only read; give another folder")


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with its own SHA-256 among its checksums, over its canonical JSON without that one."""
    content = json.loads(_text({"checksums": {}, **record}))
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
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)
