"""A suite's records as Parquet that stands on its own: each row with the cell and the ledger that it follows from."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dpopt.analysis import frames
from dpopt.store import checksums
from dpopt.store.runs import Store


def collect(store: Store, suite: str, labels: Sequence[str] | None = None) -> tuple[dict[Path, int], list[str]]:
    """Write `cells.parquet`, `curves.parquet` and their checksums into the suite's folder.

    Each file is replaced in one step, the checksums last: `dpopt verify` tells where a kill came in between.

    Args:
        labels: these rows only.

    Returns:
        The number of rows of each file, and what is wrong with the records, a line each.

    Raises:
        ConfigError: the suite was never planned in this store.
    """
    results = frames.load(store, suite, labels)
    folder, selected = store.suite_folder(suite), frames.select(results.cells)
    made = {"cells": _on_its_own(store, suite, results.cells), "curves": frames.curves(store, selected)}
    written = {folder / f"{kind}.parquet": len(frame) for kind, frame in made.items()}
    for path, frame in zip(written, made.values(), strict=True):
        store.write(path, _parquet(frame))
    checksums.seal(store, folder, written, suite=suite)
    return written, results.problems


def _on_its_own(store: Store, suite: str, cells: pd.DataFrame) -> pd.DataFrame:
    """`cells` with the suite's name, and each row's cell and ledger as JSON; no ledger where there is no result."""
    planned = {entry["run_id"]: entry["cell"] for entry in store.manifest(suite)["cells"]}
    is_done = cells["state"].isin(["done", "diverged"])
    ledgers = [
        store.ledger(run).to_json() if done else None for run, done in zip(cells["run_id"], is_done, strict=True)
    ]
    return cells.assign(
        suite=suite, cell=[json.dumps(planned[run_id], sort_keys=True) for run_id in cells["run_id"]], ledger=ledgers
    )


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()
