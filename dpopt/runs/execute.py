"""Run the planned cells that are not done, on any engine, and say how it goes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dpopt.cells import Cell
from dpopt.markup import lines
from dpopt.runs import stopping
from dpopt.runs.engines import Engine, Event
from dpopt.store import leases
from dpopt.store.runs import RESULTS, SETTLED, Failure, Store

PLAIN_LINES = 20
"""About how many lines a run prints where there is no terminal to draw a bar on."""
STARTS = 3
"""Workers in a row that end before they could run anything, after which a run is given up."""
POLL = 1.0
"""Seconds between two looks at what an engine does not tell: time that is up, and cells of other processes."""


@dataclass(frozen=True)
class Policy:
    """What follows when a cell ends without a result.

    Args:
        timeout: seconds that one attempt at a cell may take; None for any.
        retries: further attempts at a cell whose failure is one of `retry_on`; each goes on from the last checkpoint.
        retry_on: kinds of failure. An error of the cell is likely to occur again; the loss of a machine is not.
    """

    timeout: float | None = None
    retries: int = 2
    retry_on: Sequence[Failure] = ("died",)


@dataclass
class SuiteOutcome:
    """What became of a suite's cells.

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
    policy: Policy = Policy(),
    stop: Callable[[], bool] = stopping.is_asked,
    further: Callable[[], Iterable[Cell]] = tuple,
) -> SuiteOutcome:
    """Run the cells that have no result yet, and those that follow from them.

    Failed and damaged cells are left alone: `dpopt retry` clears failures, and damaged files are the user's to move.
    Cells that other processes run are waited for.

    Args:
        cells: duplicates run once.
        store: a `dpopt.store.Store`.
        make_engine: called at most once, and only if something is to be run, since workers are slow to start.
        console: where progress goes.
        policy: what follows when a cell ends without a result.
        stop: asked all the time; running cells then write their checkpoints, and the rest is left.
        further: asked for more cells whenever all have ended, and once after a stop, until there are none.

    Raises:
        OSError: results cannot be written any more, or no worker can be started.
    """
    outcome, console, engine = SuiteOutcome(), console or Console(stderr=True), None
    with ExitStack() as opened:
        while (every := {cell.run_id: cell for cell in cells}) and not outcome.is_stopped:
            left = {run_id: cell for run_id, cell in every.items() if not _is_settled(run_id, store, outcome)}
            if left:
                engine = engine or opened.enter_context(closing(make_engine()))
                _drive(Round(left, store, engine, policy, outcome), engine, console, stop)
            if outcome.is_stopped:
                opened.close()  # what runs ends before anything else is done
            cells = list(further())
            outcome.is_stopped |= bool(cells) and stop()
    return outcome


def _is_settled(run_id: str, store: Store, outcome: SuiteOutcome) -> bool:
    """Whether nothing is left to do for a cell; if so, `outcome` says why."""
    state = store.state(run_id)
    if state in RESULTS:
        outcome.skipped += 1
    elif state == "failed":
        outcome.failed[run_id] = store.error(run_id)["reason"]
    elif state == "damaged":
        outcome.damaged.append(run_id)
    return state in SETTLED


class Round:
    """The cells that are left, and what is known of each.

    Args:
        cells: run id -> cell.
        store, engine, policy, outcome: see `execute`.
    """

    def __init__(
        self, cells: dict[str, Cell], store: Store, engine: Engine, policy: Policy, outcome: SuiteOutcome
    ) -> None:
        self.left, self.total = dict(cells), len(cells)
        self.fractions: dict[str, float] = {}
        self._store, self._engine, self._policy, self.outcome = store, engine, policy, outcome
        self._deadlines: dict[str, float] = {}
        self._late: set[str] = set()
        self._tries: Counter[str] = Counter()
        self._unstarted = 0
        self._held: dict[str, leases.Watch] = {}

    def step(self) -> None:
        """See what has happened, and do what follows."""
        for event in self._engine.poll(POLL):
            if event.run_id in self.left:
                self._take(event)
        for run_id in [run_id for run_id, deadline in self._deadlines.items() if time.monotonic() > deadline]:
            del self._deadlines[run_id]
            self._late.add(run_id)
            self._engine.cancel(run_id)
        for run_id, watch in list(self._held.items()):
            if _is_settled(run_id, self._store, self.outcome):
                del self._held[run_id], self.left[run_id]
            elif watch.try_free():
                del self._held[run_id]
                self._engine.submit(self.left[run_id])

    def _take(self, event: Event) -> None:
        run_id = event.run_id
        self._unstarted = self._unstarted + 1 if event.kind == "unstarted" else 0
        if event.kind == "progress":
            self.fractions[run_id] = event.fraction
            if run_id not in self._late:
                self._deadlines.setdefault(run_id, time.monotonic() + (self._policy.timeout or math.inf))
            return
        self.fractions.pop(run_id, None)
        self._deadlines.pop(run_id, None)
        if event.kind == "done":
            self.outcome.ran += 1
            del self.left[run_id]
        elif event.kind == "held":
            self._held[run_id] = self._store.watch(run_id)
        elif event.kind == "blocked":
            raise OSError(f"results cannot be written: {event.reason}; the same command goes on when they can")
        elif self._unstarted == STARTS:
            raise OSError(f"a worker could not be started: {event.reason}")
        elif run_id in self._late:
            self._fail(run_id, "timeout", f"it took longer than {self._policy.timeout:g} seconds")
        elif event.kind in ("unstarted", "interrupted"):  # by someone else's signal
            self._engine.submit(self.left[run_id])
        else:
            self._fail(run_id, event.kind, event.reason)
        self._late.discard(run_id)

    def _fail(self, run_id: str, kind: Failure, reason: str) -> None:
        """Try again or give up a cell that was not finished."""
        if kind in self._policy.retry_on and self._tries[run_id] < self._policy.retries:
            self._tries[run_id] += 1
            self._store.forget_failure(run_id)
            self._engine.submit(self.left[run_id])
            return
        if kind != "failed":  # nobody else could note it
            self._store.fail(run_id, reason, kind=kind)
        self.outcome.failed[run_id] = reason
        del self.left[run_id]


def _drive(cells: Round, engine: Engine, console: Console, stop: Callable[[], bool]) -> None:
    """Have the engine run all cells, and show how far they are."""
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    shown, said = len(cells.outcome.failed), 0
    for cell in cells.left.values():
        engine.submit(cell)
    with bar:
        task = bar.add_task("cells", total=cells.total)
        while cells.left and not stop():
            cells.step()
            for run_id, reason in list(cells.outcome.failed.items())[shown:]:
                bar.console.print(Text.assemble(("failed ", "red"), lines(f"{run_id}: {reason}")))
            shown, done = len(cells.outcome.failed), cells.total - len(cells.left)
            bar.update(task, completed=done + sum(cells.fractions.values()))
            if not console.is_terminal and done // max(1, cells.total // PLAIN_LINES) > said:
                said = done // max(1, cells.total // PLAIN_LINES)
                console.print(f"{done}/{cells.total} cells")
    cells.outcome.is_stopped = bool(cells.left)
