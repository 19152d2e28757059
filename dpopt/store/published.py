"""Published suites, read as a results folder is, from `NAME/cells.parquet` and `NAME/curves.parquet`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpopt.errors import ConfigError, unknown
from dpopt.privacy.ledger import Ledger
from dpopt.store.runs import CELLS, RESULTS, SCHEMA, Damaged, State, Store, only_read, read

if TYPE_CHECKING:
    import pandas as pd

CURVES, ABOUT = "curves.parquet", "suite.json"
KEPT = ("test_", "validation_", "seconds_")
"""Prefixes of the numbers of a record that are columns of their own, as those in `NUMBERS` are."""
NUMBERS = ("epsilon", "epsilon_total", "draws", "examples", "dimension", "eta")
OF_FRAME = ("test_score", "validation_score")
"""Columns of a frame that no record has."""


@dataclass(frozen=True)
class PublishedStore(Store):
    """A folder of published suites; it is read and never written.

    Args:
        root: the folder, such as `results/published`.
        only: the one suite of it that is looked at, if not all are.
    """

    only: str | None = None
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
            ConfigError: it is not published here.
        """
        if suite not in self.suites():
            raise unknown("suite", suite, self.suites(), f"{self.root} holds nothing of it")
        try:
            about = read(self.root / suite / ABOUT)
        except FileNotFoundError:  # published before there was such a file
            about = {"suite": suite, "description": ""}
        except Damaged as error:
            raise ConfigError("suite", suite, str(error)) from error
        return {**about, "cells": [_entry(row) for row in self._rows(suite)]}

    def state(self, run_id: str) -> State:
        """What is known of a cell."""
        row = self._find(run_id)
        return row["state"] if row else "pending"

    def record(self, run_id: str) -> dict[str, Any]:
        """A finished cell's record, as far as it is published.

        Raises:
            FileNotFoundError: the cell is not done.
        """
        row = self._find(run_id)
        if not row or row["state"] not in RESULTS:
            raise FileNotFoundError(run_id)
        return _record(row)

    def ledger(self, run_id: str) -> Ledger:
        """The ledger that a finished cell left.

        Raises:
            Damaged: there is none.
        """
        row = self._find(run_id)
        if not row or not isinstance(row["ledger"], str):
            raise Damaged(f"{self.root}: no ledger of {run_id}")
        return Ledger.from_json(row["ledger"])

    def curve(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of a selected run's curve; none of another run."""
        for suite in self._frames:
            if suite not in self._curves:
                self._curves[suite] = _curves(self.root / suite / CURVES)
            if run_id in self._curves[suite]:
                return self._curves[suite][run_id]
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
            frame = read_parquet(self.root / suite / CELLS).drop_duplicates(["label", "run_id"])
            self._frames[suite] = frame.to_dict("records")  # a run that stands for several labels has a row for each
            self._runs.update({row["run_id"]: row for row in self._frames[suite]})
        return self._frames[suite]

    def _find(self, run_id: str) -> dict[str, Any] | None:
        for suite in [] if self._frames else self.suites():
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
    """A row as the record that it was made of, as far as it holds it."""
    if isinstance(row.get("record"), str):
        return json.loads(row["record"])
    there = {key: value for key, value in row.items() if not _is_nothing(value)}
    numbers = {k: v for k, v in there.items() if (k.startswith(KEPT) and k not in OF_FRAME) or k in NUMBERS}
    score = there["score"]
    return {
        "schema": SCHEMA,
        "run_id": row["run_id"],
        "cell": json.loads(row["cell"]),
        "status": row["state"],
        "score": score,
        "epsilon_target": row["epsilon_target"],
        "delta": row["delta"],
        f"test_{score}": row[f"test_{score}"],  # which may be no number
        **numbers,
        "noise": _below(there, "noise_"),
        "scores": _below(there, "score_"),
        "released_score": {"value": row["selection_score"]},
        "provenance": {key: row.get(key) for key in ("commit", "dirty", "device", "python")}
        | {"versions": _below(there, "version_")},
    }


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _below(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def _curves(path: Path) -> dict[str, list[dict[str, Any]]]:
    if not path.exists():
        return {}
    frame = read_parquet(path)
    place = {"workload", "label", "epsilon_target", "batch_size", "epochs", "clip", "seed", "tuning", "score", "lr"}
    entries: dict[str, list[dict[str, Any]]] = {}
    for run_id, rows in frame.drop_duplicates(["run_id", "draw"]).groupby("run_id", sort=False):
        kept = rows.drop(columns=[*place & set(rows.columns), "run_id"]).dropna(axis="columns", how="all")
        if {"lr", "eta"} <= {*rows} and list(rows["eta"]) == list(rows["lr"]):
            kept = kept.drop(columns="eta", errors="ignore")  # a constant rate, which is the row's and no entry's
        found = kept.to_dict("records")
        if "diagnostics" in kept:
            found = [entry | {"diagnostics": json.loads(entry["diagnostics"])} for entry in found]
        entries[str(run_id)] = found
    return entries
