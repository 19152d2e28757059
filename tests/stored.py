"""Stored runs: what of them must not depend on the weather, changes to them, and copies of their folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from dpopt.store import Store
from dpopt.store.runs import RUN, Run

VOLATILE = {"seconds_prepare", "seconds_train", "seconds_cpu", "seconds_draw", "peak_memory", "provenance"}


def stable(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what depends on where and how fast the cell ran."""
    return {key: value for key, value in record.items() if key not in VOLATILE}


def finished_runs(root: Path) -> dict[str, str]:
    """Run id -> stable record, curve and ledger of each finished run of a folder, as one text."""
    store, runs = Store(root), {}
    for run_id in (file.parent.name for file in root.glob("runs/*/*/run.json")):
        parts = [stable(store.record(run_id)), store.curve(run_id), store.ledger(run_id).to_json()]
        runs[run_id] = json.dumps(parts, sort_keys=True)
    return runs


def copied(source: Path, target: Path) -> None:
    """`rsync -a --ignore-existing source/ target/`."""
    for file in sorted(source.rglob("*")):
        there = target / file.relative_to(source)
        if file.is_file() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, there)


def rewrite(store, run_id, /, *, ledger=None, curve=None, **changes):
    """Write a finished run again with `changes` of its record, sound but for them, whatever they say."""
    run = store.run(run_id)
    again = Run(
        {**run.record, **changes},
        run.ledger if ledger is None else ledger,
        run.curve if curve is None else curve,
    )
    store.write(store.folder(run_id, RUN), again.line())


def in_child(work) -> int:
    """How a child process ended that did `work`: 0, 1 after an exception, or minus the number of a signal."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
