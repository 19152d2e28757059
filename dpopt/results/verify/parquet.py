"""Collected and published Parquet: every row holds its cell and its ledger, so that it can be verified on its own."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.files import Damaged
from dpopt.markup import MARKDOWN
from dpopt.privacy.accountants import epsilon
from dpopt.privacy.ledger import Ledger
from dpopt.results import choosing, tables
from dpopt.results.verify import claims
from dpopt.results.verify.claims import Claims
from dpopt.results.verify.finding import Finding, expect, expect_close
from dpopt.store.identity import clipping_bound
from dpopt.store.provenance import is_same_arithmetic, is_same_noise
from dpopt.store.published import unsealed
from dpopt.store.runs import RESULTS, UNREADABLE, Store

CELL = re.compile(r"((?:\\.|[^|\\])*)\|")
"""A cell and the pipe that ends it; a pipe after a backslash is part of the cell."""
STATED = ("epsilon", "epsilon_total", "delta", "accountant", "draws", "examples")
"""Columns that a record has under the same name; they are checked against its ledger and its cell."""
SCORES = ("test_", "validation_", "score_")
"""Prefixes of the columns that another machine computes with other last digits."""
TOLERANCE = 0.02
"""How far scores of a run may be apart that was made on two devices of one kind, or by two versions of torch: in their
unit or relative to them, which is more. The noise is the same, so only rounding differs, which training amplifies."""
PLACE = ("seed", "batch_size", "epochs", "delta", "accountant")
"""Columns that repeat the cell."""


def finished(cells: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a result."""
    return cells[cells["state"].isin(RESULTS)]


def is_complete(cells: pd.DataFrame) -> bool:
    """Whether the rows hold their cells and ledgers; those of older versions do not."""
    return {"cell", "ledger"} <= set(cells)


def rows(store: Store, where: str, cells: pd.DataFrame, moved: Counter[float]) -> Iterator[Finding]:
    """Every claim of the rows that does not hold.

    Args:
        store: where a row's run is here, the row must hold the numbers of its record.
        where: the file.
        cells: of it.
        moved: counts the rows whose run is here, by the tolerance that its scores are held to.
    """
    for row in finished(cells).to_dict("records"):
        here = f"{where}, {row['run_id']}"
        if is_complete(cells):
            yield from _row(here, row)
        yield from _against_record(store, here, row, moved)


def lost(store: Store, where: str, cells: pd.DataFrame) -> Iterator[Finding]:
    """The rows with a result whose run has lost its own and is not being run again.

    If none of the runs of the file are here, the file stands alone, and nothing is lost.
    """
    run_ids = list(finished(cells)["run_id"])
    for run_id in run_ids if any(store.folder(run_id).is_dir() for run_id in run_ids) else []:
        if (state := store.state(run_id)) not in (*RESULTS, "damaged", "running"):
            yield Finding(f"{where}, {run_id}", "record of the run", "there", f"none, the run is {state}")


def _row(where: str, row: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        cell, ledger = json.loads(row["cell"]), Ledger.from_json(row["ledger"])
    except (ValueError, TypeError) as error:
        yield Finding(where, "cell and ledger", "readable", error)
        return
    numbers: dict[str, Any] = {key: row[key] for key in STATED if pd.notna(row.get(key))}
    noise = {key: value for key, value in row.items() if key.startswith("noise_") and pd.notna(value)}
    numbers |= {"noise": noise} if noise else {}
    yield from claims.check(Claims(where, row["run_id"], cell, ledger, numbers))
    yield from _of_its_record(where, row)
    for key in PLACE:
        yield from expect(where, key, row[key], cell.get(key))
    stated, bound = float(row["clip"]), clipping_bound(cell)
    if stated != bound and not (math.isnan(stated) and math.isnan(bound)):
        yield Finding(where, "clip", bound, stated)


def _of_its_record(where: str, row: Mapping[str, Any]) -> Iterator[Finding]:
    """The record that a row holds is the one that its columns were made of; rows of older versions hold none."""
    if not isinstance(row.get("record"), str):
        return
    try:
        record = unsealed(json.loads(row["record"]), where)
        yield from expect(where, "cell of its record", json.loads(row["cell"]), record["cell"])
        yield from expect(where, "run id of its record", row["run_id"], record["run_id"])
        numbers = _numbers(record)
    except (Damaged, *UNREADABLE) as error:
        yield Finding(where, "record", "readable", f"{type(error).__name__} {error}")
        return
    for key in numbers.keys() & row.keys():
        yield from expect(where, f"{key} of its record", row[key], numbers[key])


def _against_record(store: Store, where: str, row: Mapping[str, Any], moved: Counter[float]) -> Iterator[Finding]:
    try:
        record = store.record(row["run_id"])
    except (FileNotFoundError, Damaged):
        return
    tolerance = _tolerance(row, record["provenance"])
    moved[tolerance] += 1
    for key, value in _numbers(record).items():
        what = f"{key} of the record"
        if key in row and tolerance and key.startswith(SCORES):
            claimed = math.nan if row[key] is None else row[key]
            yield from expect_close(where, what, claimed, value, tolerance, tolerance) if tolerance < math.inf else ()
        elif key in row:
            yield from expect(where, what, row[key], value)


def _tolerance(row: Mapping[str, Any], origin: Mapping[str, Any]) -> float:
    """How far the scores of a row may be from those of its run here: infinitely where these have other noise."""
    own = {"device": row.get("device"), "cpu": row.get("cpu"), "versions": {"torch": row.get("version_torch")}}
    if is_same_arithmetic(own, origin):
        return 0.0
    return TOLERANCE if is_same_noise(own, origin) else math.inf


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What a record says that does not depend on the machine, by the columns of a frame."""
    flat = {key: value for key, value in record.items() if key.startswith(("test_", "validation_", "epsilon", "draws"))}
    flat |= {f"noise_{kind}": value for kind, value in record.get("noise", {}).items()}
    flat |= {f"score_{name}": value for name, value in record.get("scores", {}).items()}
    flat.pop("epsilon_target", None)  # of a row: the search's, of which a run may be but a part
    return {key: float(value) for key, value in flat.items() if isinstance(value, int | float | str)}


def curves(where: str, cells: pd.DataFrame, entries: pd.DataFrame) -> Iterator[Finding]:
    """Every curve is of a run in `cells`, and ends with that run's numbers."""
    by_run = finished(cells).drop_duplicates("run_id").set_index("run_id")
    metrics = [key for key in entries if key in by_run and key.startswith(("test_", "validation_"))]
    if entries.empty:
        return
    for run_id, curve in entries.groupby("run_id", sort=False):
        here = f"{where}, {run_id}"
        if run_id not in by_run.index:
            yield Finding(here, "run", "one of cells.parquet", "none of that name")
            continue
        final, row = curve.iloc[-1], by_run.loc[run_id]
        yield from expect(here, "last draw", row["draws"], final["draw"])
        for key in metrics:
            yield from expect(here, f"{key} at the end", row[key], final[key])


class Ledgers:
    """What making a table needs of a store, from Parquet."""

    def __init__(self, cells: pd.DataFrame) -> None:
        self._rows = cells.drop_duplicates("run_id").set_index("run_id")[["cell", "ledger"]]

    def ledger(self, run_id: str) -> Ledger:
        """The ledger of a run."""
        return Ledger.from_json(self._rows.at[run_id, "ledger"])

    def record(self, run_id: str) -> dict[str, Any]:
        """What pricing needs of a run's record."""
        return {"cell": json.loads(self._rows.at[run_id, "cell"])}


def table(path: Path, cells: pd.DataFrame) -> Iterator[Finding]:
    """A Markdown table agrees with one made anew from the Parquet beside it, in every column that both have."""
    comparison = tables.comparison(Ledgers(cells), choosing.select(cells), epsilon)
    found = tables.as_table(comparison, "", tables.further_scores(comparison)).styled(MARKDOWN)
    claimed = _markdown(path.read_text("utf-8"))
    yield from expect(str(path), "rows", len(claimed), len(found))
    for number, (stated, row) in enumerate(zip(claimed, found.to_dict("records"), strict=False), 1):
        for key in row.keys() & stated.keys():
            yield from expect(str(path), f"row {number}, {key}", stated[key], row[key])


def _markdown(text: str) -> list[dict[str, str]]:
    """The rows of the first table in `text`."""
    lines = [[cell.strip() for cell in CELL.findall(line)[1:]] for line in text.splitlines() if "|" in line]
    header, _, *body = lines or [[], []]
    return [dict(zip(header, row, strict=False)) for row in body]
