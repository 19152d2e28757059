"""Run what is not done of a plan, on any engine, and say how it goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dpopt.harness import stopping
from dpopt.harness.cell import Cell
from dpopt.harness.engines import Engine, Event
from dpopt.markup import lines
from dpopt.store import leases
from dpopt.store.runs import Failure, Store

PLAIN_LINES = 20
"""About how many lines a run prints where there is no terminal to draw a bar on."""
POLL = 1.0
"""Seconds between two looks at what an engine does not tell: time that is up, and cells of other processes."""
RESULTS = ("done", "diverged")


@dataclass(frozen=True)
class Policy:
    """What follows when a cell ends without a result.

    Args:
        timeout: seconds that one attempt at a cell may take; None for any.
        retries: further attempts at a cell whose failure is one of `retry_on`; each goes on from the last checkpoint.
        retry_on: kinds of failure. An error comes again if the cell is tried again, a lost machine hardly.
    """

    timeout: float | None = None
    retries: int = 2
    retry_on: Sequence[Failure] = ("died",)


@dataclass
class Outcome:
    """What became of a plan's cells.

    Attributes:
        ran: cells that were run now and have a result.
        skipped: cells that had a result already, or got one from another process.
        failed: run id -> reason, of this and of earlier attempts.
        damaged: cells whose record cannot be read; left alone.
        is_stopped: whether some cells are left because the run was asked to stop.
    """

    ran: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    is_stopped: bool = False


def execute(
    cells: Iterable[Cell],
    store: Store,
    make_engine: Callable[[], Engine],
    console: Console | None = None,
    outcome: Outcome | None = None,
    policy: Policy = Policy(),
    stop: Callable[[], bool] = stopping.is_asked,
) -> Outcome:
    """Run the cells that have no result yet.

    Failed and damaged cells are left alone: `dpopt retry` clears failures, and damaged files are the user's to move.
    Cells that other processes run are waited for.

    Args:
        cells: duplicates run once.
        store: a `dpopt.store.Store`.
        make_engine: called only if something is to be run, since workers are slow to start.
        console: where progress goes.
        outcome: of earlier cells, to go on with.
        policy: what follows when a cell ends without a result.
        stop: asked all the time; running cells then write their checkpoints, and the rest is left.

    Raises:
        OSError: results cannot be written any more.
    """
    outcome, to_run = outcome or Outcome(), {}
    for run_id, cell in {cell.run_id: cell for cell in cells}.items():
        if not _is_settled(run_id, store, outcome):
            to_run[run_id] = cell
    if to_run:
        _drive(Round(to_run, store, make_engine(), policy, outcome), console or Console(stderr=True), stop)
    return outcome


def _is_settled(run_id: str, store: Store, outcome: Outcome) -> bool:
    """Whether nothing is left to do for a cell; if so, `outcome` says why."""
    state = store.state(run_id)
    if state in RESULTS:
        outcome.skipped += 1
    elif state == "failed":
        outcome.failed[run_id] = store.error(run_id)["reason"]
    elif state == "damaged":
        outcome.damaged.append(run_id)
    return state in (*RESULTS, "failed", "damaged")


class Round:
    """The cells that are left, and what is known of each.

    Args:
        cells: run id -> cell.
        store, engine, policy, outcome: see `execute`.
    """

    def __init__(self, cells: dict[str, Cell], store: Store, engine: Engine, policy: Policy, outcome: Outcome) -> None:
        self.left = dict(cells)
        self.total = len(cells)
        self.fractions = dict.fromkeys(cells, 0.0)
        self._store, self._engine, self._policy, self.outcome = store, engine, policy, outcome
        self._began: dict[str, float] = {}
        self._late: set[str] = set()
        self._tries: Counter[str] = Counter()
        self._held: dict[str, leases.Watch] = {}

    def begin(self) -> None:
        """Hand all cells to the engine."""
        for cell in self.left.values():
            self._engine.submit(cell)

    def step(self) -> list[str]:
        """See what has happened, and do what follows; returns a line for each cell that failed."""
        before = len(self.outcome.failed)
        for event in self._engine.poll(POLL):
            if event.run_id in self.left:
                self._take(event)
        self._stop_late_ones()
        self._look_at_held()
        return [f"{run_id}: {reason}" for run_id, reason in list(self.outcome.failed.items())[before:]]

    def close(self) -> None:
        """Have running cells write their checkpoints, and end the engine."""
        self._engine.close()

    def _take(self, event: Event) -> None:
        run_id = event.run_id
        self.fractions[run_id] = event.fraction if event.kind in ("progress", "done") else 0.0
        if event.kind == "progress":
            self._began.setdefault(run_id, time.monotonic())
            return
        self._began.pop(run_id, None)
        if is_late := run_id in self._late:
            self._late.remove(run_id)
        if event.kind == "done":
            self.outcome.ran += 1
            self._settle(run_id)
        elif event.kind == "held":
            self._held[run_id] = self._store.watch(run_id)
        elif event.kind == "blocked":
            raise OSError(f"results cannot be written: {event.reason}; the same command goes on when they can")
        else:
            self._fail(event, is_late)

    def _fail(self, event: Event, is_late: bool) -> None:
        """Try again or give up a cell that was not finished."""
        run_id, kind, reason = event.run_id, event.kind, event.reason
        if is_late:
            kind, reason = "timeout", f"it took longer than {self._policy.timeout:g} seconds"
        if kind == "interrupted":  # by someone else's signal
            self._engine.submit(self.left[run_id])
        elif kind in self._policy.retry_on and self._tries[run_id] < self._policy.retries:
            self._tries[run_id] += 1
            self._store.forget_failure(run_id)
            self._engine.submit(self.left[run_id])
        else:
            if kind in ("died", "timeout"):  # nobody else could note it
                self._store.fail(run_id, reason, kind=kind)
            self.outcome.failed[run_id] = reason
            self._settle(run_id)

    def _settle(self, run_id: str) -> None:
        self.fractions[run_id] = 1.0
        del self.left[run_id]

    def _stop_late_ones(self) -> None:
        limit = self._policy.timeout
        for run_id, began in self._began.items():
            if limit is not None and time.monotonic() - began > limit and run_id not in self._late:
                self._late.add(run_id)
                self._engine.cancel(run_id)

    def _look_at_held(self) -> None:
        for run_id, watch in list(self._held.items()):
            if _is_settled(run_id, self._store, self.outcome):
                del self._held[run_id]
                self._settle(run_id)
            elif watch.is_free():
                del self._held[run_id]
                self._engine.submit(self.left[run_id])


def _drive(cells: Round, console: Console, stop: Callable[[], bool]) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    said = 0
    try:
        cells.begin()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("cells", total=cells.total)
            while cells.left and not stop():
                for line in cells.step():
                    progress.console.print(Text.assemble(("failed ", "red"), lines(line)))
                done = cells.total - len(cells.left)
                progress.update(task, completed=sum(cells.fractions.values()))
                if not console.is_terminal and done // max(1, cells.total // PLAIN_LINES) > said:
                    said = done // max(1, cells.total // PLAIN_LINES)
                    console.print(f"{done}/{cells.total} cells")
        cells.outcome.is_stopped = bool(cells.left)
    finally:
        cells.close()
