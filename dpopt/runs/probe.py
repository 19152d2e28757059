"""The time of a suite's cells: from finished runs, from a few real draws, or from FLOPs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

from rich.console import Console

from dpopt import bars, training
from dpopt.cells import Cell
from dpopt.runs.prepare import Prepared, prepare
from dpopt.runs.remote import side_by_side
from dpopt.runs.train import finished_at, peak_memory
from dpopt.store.provenance import provenance
from dpopt.store.runs import Store
from dpopt.suites.estimate import CostRow, Timing, flops_per_second
from dpopt.suites.schema import Keys
from dpopt.workloads.base import Split

_SAMPLE = 256
"""Records that a timed cell is evaluated on; the time for all follows from theirs."""


def find_times(
    rows: Sequence[CostRow],
    store: Store,
    suite: Keys,
    at_once: int = 1,
    limit: int = 0,
    console: Console | None = None,
) -> None:
    """Set `timing` of rows, as far as there are any times.

    Times are taken from finished cells. For a row without a finished cell on this kind of device, and with cells to
    run, one cell is timed for up to `limit` real draws (none by default), `at_once` rows at a time. Timing stores
    nothing but what calibration and `workloads.cache` keep. A row may fail in any way, or lose its process. The other
    rows are estimated by their FLOPs.
    """
    place = training.resolve_device(suite.device)
    here = provenance(place)["device"]
    for row in rows:
        row.timing = row.by_records(store, here)
    untimed = [row for row in rows if row.timing is None] if limit else []
    # One cell stands for its row.
    first = ((row, next((cell for cell in row.waiting if not cell.untrained), None)) for row in untimed)
    probed = [(row, cell) for row, cell in first if cell is not None]
    probes = [partial(_measure, cell, limit, suite.device, suite.physical_batch, suite.isolate) for _, cell in probed]
    bar = bars.bar(console if probes else None)
    with bar as show, closing(side_by_side(probes, at_once)) as ended:
        for done, (number, timing, failure) in enumerate(ended, 1):
            show("timing rows", done, len(probes))
            probed[number][0].timing = timing or Timing(failure=failure)
    left = [row for row in rows if row.timing is None and row.waiting]
    rate = flops_per_second(place) if left else 0.0
    for row in left:
        row.timing = row.by_flops(rate)


def _measure(cell: Cell, limit: int, device: str, physical_batch: int | None, isolate: bool) -> Timing:
    """Time a cell from its beginning, whatever is stored of it, for up to `limit` draws; see `train.train`."""
    # Twice, as the first time fills caches that all cells share.
    prepare(cell, device=device, physical_batch=physical_batch, isolate=isolate)
    started = time.perf_counter()
    ready = prepare(cell, device=device, physical_batch=physical_batch, isolate=isolate)
    prepared = time.perf_counter() - started
    seconds, state, steps = _draw(ready, limit)
    few = {name: Split(split.x[:_SAMPLE], split.y[:_SAMPLE]) for name, split in ready.watched.items()}
    started = time.perf_counter()
    dataclasses.replace(ready, watched=few).observe(state)
    entry = finished_at(state.theta) - started
    shares = [len(split.x) / len(few[name].x) for name, split in ready.watched.items()]
    evaluate = min(ready.workload.marks, steps) * entry * sum(shares) / len(shares)
    return Timing(prepared, seconds, evaluate, peak_memory(ready.engine.theta.device))


def _draw(ready: Prepared, limit: int) -> tuple[float, Any, float]:
    """Seconds per draw, the state that this leaves, and the number of steps that the whole run would have."""
    oracle, state = ready.oracle, ready.state
    clock = [(0, time.perf_counter())]
    for state, _ in training.steps(ready.stepper, oracle, ready.state):
        clock.append((oracle.draws_taken, finished_at(state.theta)))
        if oracle.draws_taken >= limit or clock[-1][1] - clock[0][1] > 60:  # seconds
            break
    # The first step fills what the others find ready; where it is the only one, it has to do.
    (before, begin), (after, end) = clock[len(clock) > 2], clock[-1]
    return (end - begin) / (after - before), state, oracle.draws_total * (len(clock) - 1) / after
