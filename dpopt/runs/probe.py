"""The time of a suite's cells: from finished runs, from a few real draws, or from FLOPs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dpopt import training
from dpopt.cells import Cell
from dpopt.runs.prepare import Prepared, prepare
from dpopt.runs.remote import Remote
from dpopt.runs.train import finished_at, peak_memory
from dpopt.store.provenance import provenance
from dpopt.store.runs import Store
from dpopt.suites.estimate import CostRow, Timing, flops_per_second
from dpopt.suites.schema import Keys
from dpopt.workloads.base import Split

SAMPLE = 256
"""Records that a timed cell is evaluated on; the time for all follows from theirs."""
LONG = 60.0
"""Seconds after which a timed cell takes no further draw."""


def timings(
    rows: Sequence[CostRow],
    store: Store,
    suite: Keys,
    at_once: int = 1,
    limit: int = 0,
    console: Console | None = None,
    is_estimated: bool = False,
) -> dict[int, Timing]:
    """The times of rows, by their number, as far as there are any.

    Times are taken from finished cells. For a row without a finished cell on this kind of device, and with cells to
    run, one cell is timed for up to `limit` real draws (none by default), `at_once` rows at a time. Timing stores
    nothing but what calibration and `workloads.cache` keep. A row may fail in any way, or lose its process. The other
    rows are estimated by their FLOPs, if `is_estimated`.
    """
    place = training.resolve_device(suite.device)
    here = provenance(place)["device"]
    times = {number: timing for number, row in enumerate(rows) if (timing := row.by_records(store, here))}
    probes = {
        number: Probe(trained[0], limit, suite.device, suite.physical_batch)
        for number, row in enumerate(rows)
        if limit and number not in times and (trained := [cell for cell in row.waiting if not cell.untrained])
    }
    times |= measured(probes, at_once, console)
    left = [number for number in range(len(rows)) if is_estimated and number not in times and rows[number].waiting]
    rate = flops_per_second(place) if left else 0.0
    return times | {number: timing for number in left if (timing := rows[number].by_flops(rate))}


def measured(probes: Mapping[int, Probe], at_once: int, console: Console | None) -> dict[int, Timing]:
    """The times of the cells to be timed, by number, each measured in a process of its own."""
    alive: list[Remote] = []

    def ask(probe: Probe) -> Timing:
        remote = Remote(probe)
        alive.append(remote)
        timing, failure = remote.ask("measure")
        remote.close()
        return timing or Timing(failure=failure)

    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(ask, probe): number for number, probe in probes.items()}
        with Progress(console=console, disable=console is None or not probes, transient=True) as progress:
            for _ in progress.track(as_completed(futures), len(probes), description="timing"):
                pass
        return {number: future.result() for future, number in futures.items()}
    finally:
        for remote in alive:
            remote.close()
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Probe:
    """One cell to be timed, in a process of its own.

    Args:
        cell: the cell; it is run from its beginning, whatever is stored of it.
        limit: the most draws to take.
        device, physical_batch: see `train.train`.
    """

    cell: Cell
    limit: int
    device: str
    physical_batch: int | None

    def measure(self) -> Timing:
        """Prepare the cell twice, as the first time fills caches that all cells share, then draw and evaluate."""
        prepare(self.cell, device=self.device, physical_batch=self.physical_batch)
        started = time.perf_counter()
        ready = prepare(self.cell, device=self.device, physical_batch=self.physical_batch)
        prepared = time.perf_counter() - started
        seconds, state, steps = self.draw(ready)
        evaluate = min(ready.workload.marks, steps) * _evaluation(ready, state)
        return Timing(prepared, seconds, evaluate, peak_memory(ready.engine.theta.device))

    def draw(self, ready: Prepared) -> tuple[float, Any, float]:
        """Seconds per draw, the state that this leaves, and the number of steps that the whole run would have."""
        oracle, state = ready.oracle, ready.state
        clock = [(0, time.perf_counter())]
        for state, _ in training.steps(ready.stepper, oracle, ready.state):
            clock.append((oracle.draws_taken, finished_at(state.theta)))
            if oracle.draws_taken >= self.limit or clock[-1][1] - clock[0][1] > LONG:
                break
        # The first step fills what the others find ready; where it is the only one, it has to do.
        (before, begin), (after, end) = clock[len(clock) > 2], clock[-1]
        return (end - begin) / (after - before), state, oracle.draws_total * (len(clock) - 1) / after


def _evaluation(ready: Prepared, state: Any) -> float:
    """Seconds of one entry of the curve, from the first records of each split."""
    few = {name: Split(split.x[:SAMPLE], split.y[:SAMPLE]) for name, split in ready.watched.items()}
    started = time.perf_counter()
    dataclasses.replace(ready, watched=few).observe(state)
    finished = finished_at(state.theta)
    shares = [len(split.x) / len(few[name].x) for name, split in ready.watched.items()]
    return (finished - started) * sum(shares) / len(shares)
