"""Rewrite results of the layout before 0.2: `python benchmarks/migrate.py FOLDER [DOCUMENTS...]`.

FOLDER is a results folder or one of published suites. A run's record, ledger and curve become `run.json`, a manifest
becomes parts, and a published suite's Parquet becomes `runs.jsonl.xz`, with the whole runs of `records.tar.xz` where
that lies beside it. Old seals are checked first, run ids and numbers stay, and what was rewritten is removed. Of
published figures those stay that a page of DOCUMENTS (files or folders, such as `README.md docs`) links; `suite.json`
names all.
A folder that is converted already is left as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt import files
from dpopt.store import manifests
from dpopt.store.runs import RESULTS, Archive, Run, released_score

RECORD = "record.json"
PLACE = {
    "workload",
    "label",
    "epsilon_target",
    "batch_size",
    "epochs",
    "clip",
    "seed",
    "tuning",
    "score",
    "lr",
    "run_id",
}
"""Columns of a curve that say where it belongs."""


def unsealed(record: dict[str, Any], where: object) -> dict[str, Any]:
    """A record without its checksums, of which its own must be right where it has one."""
    sums = record.pop("checksums", {})
    claimed = sums.pop(RECORD, None)
    if claimed is not None:
        text = json.dumps({**record, "checksums": sums}, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != claimed:
            raise files.Damaged(f"{where}: not the record that was written")
    return record


def stored(folder: Path) -> Run:
    """The run of an old run directory; its files must be those that its record names."""
    content = json.loads((folder / RECORD).read_text())
    for name, claimed in content.get("checksums", {}).items():
        if name != RECORD and hashlib.sha256((folder / name).read_bytes()).hexdigest() != claimed:
            raise files.Damaged(f"{folder / name}: not the file that the record was written with")
    curve = folder / "curve.jsonl"
    lines = curve.read_text().splitlines() if curve.exists() else None
    ledger = json.loads((folder / "ledger.json").read_text())
    return Run(
        unsealed(content, folder / RECORD), ledger, None if lines is None else [json.loads(line) for line in lines]
    )


def runs(root: Path) -> int:
    """Rewrite the run directories and manifests of a results folder; how many runs."""
    records = sorted(root.glob(f"runs/*/*/{RECORD}"))
    for path in records:
        folder = path.parent
        files.write(folder / "run.json", stored(folder).line(), replace=False)
        for name in (RECORD, "ledger.json", "curve.jsonl", "cell.json", "error.json", "checkpoint.pt"):
            (folder / name).unlink(missing_ok=True)
    for path in sorted(root.glob("suites/*/manifest.json")):
        manifest = json.loads(path.read_text())
        path.unlink()
        manifests.extend(path.parent, manifest)
        for name in ("cells.parquet", "curves.parquet", "checksums.json"):
            (path.parent / name).unlink(missing_ok=True)
    return len(records)


def entry(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the old table of cells as a manifest has it."""
    further = {
        "stage": row["stage"],
        "widen": int(row.get("widen", 0)),
        "widened": bool(row.get("is_widened", False)),
        "search_id": row.get("search_id", ""),
    }
    return {
        **{key: row[key] for key in ("run_id", "label", "tuning")},
        "tuned": json.loads(row["tuned"]),
        "target": row["epsilon_target"],
        "gradients_per_draw": row.get("gradients_per_draw", 1.0),
        **{key: value for key, value in further.items() if value},
        "cell": json.loads(row["cell"]),
    }


def curves(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries of each published curve, by run id."""
    by_run = {}
    for run_id, rows in pd.read_parquet(path).drop_duplicates(["run_id", "draw"]).groupby("run_id", sort=False):
        kept = rows.drop(columns=[*PLACE & set(rows.columns)]).dropna(axis="columns", how="all").to_dict("records")
        for line in kept:
            if "diagnostics" in line:
                line["diagnostics"] = json.loads(line["diagnostics"])
        by_run[str(run_id)] = kept
    return by_run


def whole(folder: Path) -> dict[str, Run]:
    """The runs of a folder's `records.tar.xz`, if it has one."""
    if not (folder / "records.tar.xz").exists():
        return {}
    with tempfile.TemporaryDirectory() as place, tarfile.open(folder / "records.tar.xz") as archive:
        archive.extractall(place, filter="data")
        return {path.parent.name: stored(path.parent) for path in Path(place).glob(f"runs/*/*/{RECORD}")}


def agreed(published: Run, kept: Run, folder: Path) -> Run:
    """The whole run, which must be the one that was published of it."""
    added = {key: value for key, value in published.record.items() if key == "tested"}  # which older records lack
    record = {**added, **kept.record}
    computed = ("scores", "score", "released_score")  # made of columns when these records were published
    differ = [key for key, value in published.record.items() if key not in computed and record[key] != value]
    if differ or released_score(published.record) != released_score(record) or published.ledger != kept.ledger:
        raise files.Damaged(f"{folder}, {record['run_id']}: records.tar.xz has another run, in {differ}")
    return kept._replace(record=record)


def suite(folder: Path, linked: set[str]) -> None:
    """Rewrite the folder of a published suite."""
    cells = pd.read_parquet(folder / "cells.parquet").drop_duplicates(["label", "run_id"])
    by_id, stored_runs, complete = curves(folder / "curves.parquet"), dict[str, Run](), whole(folder)
    for row in cells[cells["state"].isin(RESULTS)].to_dict("records"):
        run_id, record = row["run_id"], unsealed(json.loads(row["record"]), f"{folder}, {row['run_id']}")
        curve = by_id.get(run_id)
        if curve is not None and "eta" not in record:  # the table of curves had the constant rate of every run
            curve = [{key: value for key, value in line.items() if key != "eta"} for line in curve]
        run = Run(record, json.loads(row["ledger"]), curve)
        stored_runs[run_id] = run if run_id not in complete else agreed(run, complete[run_id], folder)
    about = json.loads((folder / "suite.json").read_text())
    drawn = sorted(path.stem for path in folder.glob("*.svg"))
    packed = Archive([entry(row) for row in cells.to_dict("records")], stored_runs).packed()
    files.write(folder / manifests.RUNS, packed)
    manifests.note(folder, {**about, "figures": drawn})
    for name in ("cells.parquet", "curves.parquet", "records.tar.xz"):
        (folder / name).unlink(missing_ok=True)
    for name in drawn:
        if f"{folder.name}/{name}.svg" not in linked:
            (folder / f"{name}.svg").unlink()


def main(root: str, *documents: str) -> None:
    """Rewrite a folder; `documents` are the pages whose figures stay."""
    began, folder = time.perf_counter(), Path(root)
    print(f"{runs(folder)} runs rewritten")
    pages = [page for each in map(Path, documents) for page in ([each] if each.is_file() else each.rglob("*.md"))]
    linked = {name for page in pages for name in re.findall(r"([\w.-]+/[\w.-]+\.svg)", page.read_text())}
    for path in sorted(folder.glob("*/cells.parquet")):
        suite(path.parent, linked)
        print(f"{path.parent}: {(path.parent / manifests.RUNS).stat().st_size:,} bytes")
    (folder / "checksums.json").unlink(missing_ok=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
