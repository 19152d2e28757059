"""A suite's records as Parquet that stands on its own: each row has its cell, ledger and record."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.results import frames
from dpopt.results.results import Results
from dpopt.store import checksums
from dpopt.store.published import CELLS, CURVES, sealed
from dpopt.store.runs import RESULTS


def collect(results: Results) -> tuple[dict[Path, int], list[str]]:
    """Write `cells.parquet`, `curves.parquet` and their checksums into the suite's folder.

    Each file is replaced in one step, the checksums last: `dpopt verify` tells where a kill came in between.

    Returns:
        The number of rows of each file, and what is wrong with the records, a line each.
    """
    made = parquet(results)
    for name, frame in made.items():
        results.store.write(results.folder / name, as_bytes(frame))
    written = {results.folder / name: len(frame) for name, frame in made.items()}
    checksums.seal(results.store, results.folder, written, suite=results.suite)
    return written, results.problems


def parquet(results: Results) -> dict[str, pd.DataFrame]:
    """The cells with all that they follow from, and the curves of the selected runs, by the names of their files."""
    return {CELLS: _cells(results), CURVES: _curves(results)}


def about(results: Results) -> dict[str, object]:
    """What `suite.json` says: all of the manifest but its cells."""
    return {key: value for key, value in results.store.manifest(results.suite).items() if key != "cells"}


def as_bytes(frame: pd.DataFrame) -> bytes:
    """A frame as the content of a Parquet file."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, compression="zstd")  # half the size of the default
    return buffer.getvalue()


def _cells(results: Results) -> pd.DataFrame:
    """The cells with the suite's name, and each row's cell as JSON; ledger and record too where it is done.

    Diagnostics are most of a record. They are kept where figures show them: in each method's best setting.
    """
    store, cells = results.store, results.cells
    shown = set() if results.selected.empty else set(results.selected["run_id"])
    planned = {entry["run_id"]: entry["cell"] for entry in store.manifest(results.suite)["cells"]}
    is_done = cells["state"].isin(RESULTS)
    done = [run_id if finished else None for run_id, finished in zip(cells["run_id"], is_done, strict=True)]
    return cells.assign(
        suite=results.suite,
        cell=[json.dumps(planned[run_id], sort_keys=True) for run_id in cells["run_id"]],
        ledger=[None if run_id is None else store.ledger(run_id).to_json() for run_id in done],
        record=[None if run_id is None else _record(store.record(run_id), run_id in shown) for run_id in done],
    )


def _record(record: dict[str, Any], is_shown: bool) -> str:
    """What is published of a record, with the checksum of just that, as `record.json` has its own."""
    kept = record if is_shown else {key: value for key, value in record.items() if key != "diagnostics"}
    return json.dumps(sealed(kept), sort_keys=True)


def _curves(results: Results) -> pd.DataFrame:
    """The curves of the selected runs, with what was diagnosed as JSON."""
    frame = frames.curves(results.store, results.every, with_diagnostics=True)
    if "diagnostics" in frame:
        frame["diagnostics"] = [json.dumps(entry if isinstance(entry, dict) else {}) for entry in frame["diagnostics"]]
    return frame
