"""What a suite's planned cells will cost: counted, and timed by finished runs, real draws or FLOPs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dpopt import registry, sizes, training
from dpopt.harness.cell import Cell, Prepared, finished_at, peak_memory, prepare
from dpopt.harness.engines.local import places
from dpopt.harness.flops import Rate, Work, work_of
from dpopt.harness.planned import Planned
from dpopt.harness.remote import Remote
from dpopt.harness.suite import Suite
from dpopt.markup import duration
from dpopt.store.provenance import provenance
from dpopt.store.runs import RESULTS, SETTLED, Store
from dpopt.workloads.base import Split

SAMPLE = 256
"""Records that a timed cell is evaluated on; the time for all follows from theirs."""
TIMES = {"draws", "seconds_prepare", "seconds_train", "provenance"}
"""What a record says of its run's time."""
RECORDS = 100
"""The most finished cells whose times are averaged for a row."""
CALL = 2e-3
"""Seconds of a gradient that go into calling torch, in an estimate: about those of the digits' network on a CPU."""
LONG = 60.0
"""Seconds after which a timed cell takes no further draw."""


@dataclass(frozen=True)
class Timing:
    """How long a cell of a row takes.

    Attributes:
        prepare: seconds before the first draw.
        draw: seconds per draw.
        evaluate: seconds for all evaluations; 0 where they are part of `draw`.
        memory: most bytes that the process held, or the GPU's allocator; None where it was not measured.
        failure: why nothing was measured; empty if all went well.
        is_estimate: whether the times follow from FLOPs, and nothing was timed.
    """

    prepare: float = 0.0
    draw: float = 0.0
    evaluate: float = 0.0
    memory: int | None = None
    failure: str = ""
    is_estimate: bool = False

    def seconds(self, draws: int) -> float:
        """Seconds of a cell with so many draws."""
        return self.prepare + draws * self.draw + self.evaluate


@dataclass(frozen=True)
class CostRow:
    """The cells of a suite that have label, workload and batch size in common, and so the time of a draw.

    Attributes:
        label, tuning: the row in the suite's tables.
        cells: all of them.
        states: what the store knows of each.
        gradients_per_draw: points at which the optimizer computes gradients.
    """

    label: str
    tuning: str
    cells: tuple[Cell, ...]
    states: tuple[str, ...]
    gradients_per_draw: float

    @property
    def done(self) -> int:
        """Cells with a result."""
        return sum(state in RESULTS for state in self.states)

    @property
    def failed(self) -> int:
        """Cells that `dpopt retry` would run."""
        return self.states.count("failed")

    @property
    def damaged(self) -> int:
        """Cells whose files cannot be read; no command runs them as long as the files are there."""
        return self.states.count("damaged")

    @property
    def waiting(self) -> list[Cell]:
        """Cells that `dpopt run` would run."""
        return [cell for cell, state in zip(self.cells, self.states, strict=True) if state not in SETTLED]

    @property
    def draws(self) -> tuple[int, int]:
        """The least and the most draws of a cell."""
        numbers = [draws(cell) for cell in self.cells]
        return min(numbers), max(numbers)

    @property
    def gradients(self) -> float:
        """Expected gradient evaluations, of one example at one point, of the cells that wait."""
        return sum(_gradients(cell, self.gradients_per_draw) for cell in self.waiting)

    @property
    def work(self) -> Work | None:
        """What a record takes; None where it cannot be counted."""
        return work_of(_key(self.cells[0].workload))

    @property
    def operations(self) -> float | None:
        """FLOPs of all cells that wait; None where they cannot be counted."""
        work = self.work
        return work and self.gradients * work.gradient + len(self.waiting) * self._curve(work)

    def estimate(self, rate: float) -> Timing | None:
        """How long a cell takes at `rate` FLOPs a second; None where they cannot be counted."""
        if (work := self.work) is None:
            return None
        records = self.cells[0].batch_size / self.cells[0].scale_down
        draw = self.gradients_per_draw * (records * work.gradient / rate + CALL)
        return Timing(draw=draw, evaluate=self._curve(work) / rate, is_estimate=True)

    def _curve(self, work: Work) -> int:
        """FLOPs of a cell's curve."""
        return min(work.marks, self.draws[1]) * work.evaluation

    def seconds(self, timing: Timing) -> float:
        """Seconds of all cells that wait, one after the other."""
        return sum(timing.seconds(draws(cell)) for cell in self.waiting)


def rows(planned: Iterable[Planned], store: Store) -> list[CostRow]:
    """The rows of planned cells, in their order; a cell that is in several rows counts in each."""
    groups: dict[tuple[str, str, int], list[Planned]] = {}
    for entry in planned:
        key = (_key(entry.cell.workload), entry.label, entry.cell.batch_size)
        groups.setdefault(key, []).append(entry)
    found = []
    for group in groups.values():
        cells = tuple(entry.cell for entry in group)
        states = tuple(store.state(cell.run_id) for cell in cells)
        found.append(CostRow(group[0].label, group[0].tuning, cells, states, group[0].gradients_per_draw))
    return found


def draws(cell: Cell) -> int:
    """The number of draws of a cell."""
    return 0 if cell.untrained else sizes.number_of_draws(cell.epochs, cell.batch_size, _examples(_key(cell.workload)))


def _gradients(cell: Cell, per_draw: float) -> float:
    """Expected gradient evaluations of a cell."""
    return draws(cell) * cell.batch_size / cell.scale_down * per_draw


def _key(spec: Mapping[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True)


@cache
def _examples(workload: str) -> int:
    return registry.from_spec("workload", json.loads(workload)).examples


def timings(
    rows: Sequence[CostRow],
    store: Store,
    suite: Suite,
    limit: int = 0,
    console: Console | None = None,
    rate: Rate | None = None,
) -> dict[int, Timing]:
    """What is known of the times of rows, by their number.

    Times are taken from finished cells. For a row without a finished cell on this kind of device, and with cells to
    run, one cell is timed for up to `limit` real draws (none by default); as many rows are timed at once as cells run.
    Timing stores nothing but what calibration and `workloads.cache` keep. A row may fail in any way, or lose its
    process. Where a `rate` is given, rows that are still unknown are estimated by their FLOPs; with the rate of another
    device, the finished cells of that device are used.
    """
    here = provenance(training.resolve_device(suite.device))["device"]
    is_one = rate.is_of if rate and rate.device else here.__eq__
    known = {number: found for number, row in enumerate(rows) if (found := _stored(row, store, is_one))}
    asked = {
        number: TimedCell(trained[0], limit, suite.device, suite.physical_batch)
        for number, row in enumerate(rows)
        if limit and number not in known and (trained := [cell for cell in row.waiting if not cell.untrained])
    }
    known |= _answers(asked, workers(suite), console)
    left = (number for number in range(len(rows)) if rate and number not in known and rows[number].waiting)
    return known | {number: found for number in left if rate and (found := rows[number].estimate(rate.flops))}


def _stored(row: CostRow, store: Store, is_one: Callable[[str], bool]) -> Timing | None:
    """The mean times of the first `RECORDS` finished cells of a row on such devices; None where there is none."""
    done = (cell.run_id for cell, state in zip(row.cells, row.states, strict=True) if state == "done")
    records = [store.record(run_id) for run_id in islice(done, RECORDS)]
    timed = [record for record in records if record.keys() >= TIMES and record["draws"]]
    timed = [record for record in timed if is_one(record["provenance"].get("device", ""))]
    if not timed:
        return None
    trained = sum(record["seconds_train"] for record in timed)
    prepared = sum(record["seconds_prepare"] for record in timed)
    return Timing(prepared / len(timed), trained / sum(record["draws"] for record in timed))


def _answers(asked: Mapping[int, TimedCell], at_once: int, console: Console | None) -> dict[int, Timing]:
    """The times of the cells to be timed, each in a process of its own."""
    alive: list[Remote] = []
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(_ask, subject, alive): number for number, subject in asked.items()}
        with _progress(len(asked), console) as advance:
            for _ in as_completed(futures):
                advance()
        return {number: future.result() for future, number in futures.items()}
    finally:
        for remote in alive:
            remote.close()
        pool.shutdown(cancel_futures=True)


def workers(suite: Suite) -> int:
    """How many cells of a suite run at a time; where its engine decides, as many as the local one would run."""
    return 1 if suite.engine in ("inline", "span") else len(places(suite.device, suite.workers))


def hours(rows: Sequence[CostRow], timings: Mapping[int, Timing], workers: int) -> float:
    """Hours on the clock for all cells that wait, of rows whose time is known.

    Args:
        rows: see `rows`.
        timings: of some of them, by number.
        workers: cells at a time.
    """
    known = {number: timing for number, timing in timings.items() if not timing.failure}
    return sum(rows[number].seconds(timing) for number, timing in known.items()) / 3600 / workers


def estimate(rows: list[CostRow], timings: dict[int, Timing], suite: Suite, rate: Rate | None = None) -> str:
    """How long what is to be run will take, in one line: on the device that `rate` names, or on this machine."""
    waiting = [number for number, row in enumerate(rows) if row.waiting]
    known = [number for number in waiting if number in timings and not timings[number].failure]
    counted = sum(rows[number].operations or 0 for number in waiting) if rate else 0
    gradients = f"{sum(row.gradients for row in rows):.1e} gradient evaluations"
    gradients += f", {counted:.1e} FLOPs to run" if counted else " to run"
    if not known:
        return f"{gradients}; timed_draws=20 estimates how long they take" if waiting else "nothing to run"
    at_once = (suite.workers or 1) if rate and rate.device else workers(suite)
    total = hours(rows, timings, at_once)
    missing = f" without {len(waiting) - len(known)} rows that were not timed" if len(known) < len(waiting) else ""
    where = f"on {at_once} {rate.device}" if rate and rate.device else f"with workers = {at_once}"
    each = f" ({duration(3600 * at_once * total)} if it were one)" if at_once > 1 else ""
    return f"{gradients}, about {duration(3600 * total)} {where}{each}{missing}"


def failures(rows: Sequence[CostRow], timings: Mapping[int, Timing]) -> list[str]:
    """Which rows could not be timed, and why, a line each."""
    return [f"{rows[number].label} failed: {timing.failure}" for number, timing in timings.items() if timing.failure]


def cheapest_first(planned: Iterable[Planned]) -> list[Cell]:
    """Planned cells by their expected gradient evaluations, in their order where these are equal.

    Tables fill early, and what is wrong with a suite shows before much is spent on it.
    """
    ordered = sorted(planned, key=lambda entry: _gradients(entry.cell, entry.gradients_per_draw))
    return [entry.cell for entry in ordered]


def _ask(subject: TimedCell, alive: list[Remote]) -> Timing:
    remote = Remote(subject)
    alive.append(remote)
    timing, failure = remote.ask("measure")
    remote.close()
    return timing or Timing(failure=failure)


@dataclass(frozen=True)
class TimedCell:
    """One cell to be timed, in a process of its own.

    Args:
        cell: the cell; it is run from its beginning, whatever is stored of it.
        limit: the most draws to take.
        device, physical_batch: see `cell.run`.
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
        seconds, state, steps = self._draw(ready)
        return Timing(
            prepared,
            seconds,
            min(ready.workload.marks, steps) * _evaluation(ready, state),
            peak_memory(ready.engine.theta.device),
        )

    def _draw(self, ready: Prepared) -> tuple[float, Any, float]:
        """Seconds per draw, the state that this leaves, and the number of steps that the whole run would have."""
        oracle, state = ready.oracle, ready.state
        clock = [(0, time.perf_counter())]
        for state, _ in training.steps(ready.stepper, oracle, ready.state):
            clock.append((oracle.draws_taken, finished_at(state.theta)))
            if oracle.draws_taken >= self.limit or clock[-1][1] - clock[0][1] > LONG:
                break
        # The first step makes what the others find; where it is the only one, it has to do.
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


@contextmanager
def _progress(total: int, console: Console | None) -> Iterator[Callable[[], None]]:
    """Show a bar; gives a function to call when a cell was timed."""
    with Progress(console=console, disable=console is None or not total, transient=True) as progress:
        task = progress.add_task("timing", total=total)
        yield lambda: progress.update(task, advance=1)
