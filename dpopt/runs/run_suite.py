"""Train the cells of a suite that have no result: `dpopt run` and `dpopt.run_suite`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dpopt import fields
from dpopt.cells import Cell
from dpopt.errors import ConfigError, unknown
from dpopt.markup import lines
from dpopt.runs import launchers, probe, span, stopping
from dpopt.runs.supervisor import Supervisor, places
from dpopt.runs.worker import News, Queue, Setup, work
from dpopt.store import Store
from dpopt.store.runs import RESULTS
from dpopt.suites import engines, estimate
from dpopt.suites import plan as planning
from dpopt.suites.searches import Planned
from dpopt.suites.suite import Suite

TIMED_DRAWS = 5
"""Draws by which a row is timed where the suite has a limit `max_hours`."""
Tell = Callable[[News], None]
PLAIN_LINES = 20
"""About how many lines a run prints where there is no terminal to draw a bar on."""


@dataclass
class SuiteOutcome:
    """The outcome of a suite's cells.

    Attributes:
        ran: cells that were run now and have a result.
        skipped: cells that had a result already, or got one from another process.
        failed: run id -> reason, of this and of earlier attempts.
        damaged: cells whose record cannot be read; left alone.
        is_stopped: True if some cells are left because the run was asked to stop.
    """

    ran: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    is_stopped: bool = False


def run_suite(
    suite: Suite,
    results: str | Path | None = None,
    *,
    engine: str | None = None,
    progress: bool | Console = True,
    retry: bool = False,
) -> SuiteOutcome:
    """Train the cells of `suite` that have no result, and add all of them to what the suite has in `results`.

    A run that was killed goes on where it was. Cells that were planned before, with other overrides, stay the suite's.
    Failed and damaged cells are left alone. Cells that other processes run, on any machine, are waited for.

    Args:
        suite: of `load_suite`.
        results: folder; by default the suite's own key.
        engine: where cells run, such as "local" or "inline"; by default the suite's own key.
        progress: whether to show it on stderr, or the console that shows it.
        retry: run cells again that have failed.

    Returns:
        What became of the cells; where it `is_stopped`, the same call goes on.

    Raises:
        ConfigError: something in the suite cannot be used, data or weights are missing, or it would take longer than
            `max_hours`. The suite's cells and what is noted of failures are then as before.
        OSError: results cannot be written, or no worker can be started.
    """
    store, engine = open_store(suite, results), engine or suite.engine
    engines.check(engine, "engine")
    store.check_writable()
    planning.require(suite)
    devices = places(suite.device, suite.workers)
    planned = planning.plan(suite, store)
    console = progress if isinstance(progress, Console) else Console(stderr=True, quiet=not progress)
    left = [cell for cell in estimate.cheapest_first(planned) if _is_left(cell, store, retry)]
    with ExitStack() as opened:
        # Whatever can be refused is refused before anything is written.
        run = _engine(engine, suite, store, left, devices, opened) if left else None
        _refuse_longer(suite, store, planned, retry, console, 1 if engine in ("inline", "span") else len(devices))
        for cell in left:
            if store.state(cell.run_id) == "failed":
                store.forget_failure(cell.run_id)
        store.extend_suite(suite.name, planning.manifest(suite, planned))

        outcome, before, first = SuiteOutcome(), store.cancelled(suite.name), list(left)

        def stop() -> bool:
            return stopping.is_asked() or store.cancelled(suite.name) != before

        opened.enter_context(stopping.signals())
        while run and left:
            with _Board(console, len(left), outcome) as board:
                run(left, board.tell, stop)
            if planning.has_stages(suite):  # further cells follow from the results
                planned = planning.plan(suite, store)
                store.extend_suite(suite.name, planning.manifest(suite, planned))
            had = {cell.run_id for cell in left}
            left = [cell for cell in estimate.cheapest_first(planned) if _is_left(cell, store)]
            if stop() or had == {cell.run_id for cell in left}:
                break
        outcome.is_stopped = bool(left) and stop()
    if engine not in ("inline", "local", "span"):  # jobs do not tell
        outcome.ran = sum(store.state(cell.run_id) in RESULTS for cell in first)
    for run_id in {entry.cell.run_id: entry for entry in planned}:
        state = store.state(run_id)
        outcome.skipped += state in RESULTS
        if state == "failed":
            outcome.failed[run_id] = store.error(run_id)["reason"]
        elif state == "damaged":
            outcome.damaged.append(run_id)
    outcome.skipped = max(0, outcome.skipped - outcome.ran)
    return outcome


def open_store(suite: Suite, results: str | Path | None = None) -> Store:
    """The store of a suite, which also logs where the suite asks for it."""
    root = suite.results if results is None else fields.path(results, "results")
    if not suite.log:
        return Store(root)
    from dpopt.store.logs import LoggedStore

    return LoggedStore(root, suite.log)


def _is_left(cell: Cell, store: Store, retry: bool = False) -> bool:
    """True if a cell is to be run: it has not ended, or has failed and is to be tried again."""
    return not store.is_settled(cell.run_id) or (retry and store.state(cell.run_id) == "failed")


def _engine(
    name: str, suite: Suite, store: Store, cells: Sequence[Cell], devices: Sequence[str], opened: ExitStack
) -> Callable[[Sequence[Cell], Tell, Callable[[], bool]], None]:
    """The runner of cells: the engine `name`, which is closed with `opened`.

    Raises:
        ConfigError: the engine cannot be had, or does not run one of the cells.
    """
    setup = Setup(
        device=suite.device,
        physical_batch=suite.physical_batch,
        isolate=suite.isolate,
        timeout=math.inf if suite.timeout is None else suite.timeout,
        retries=suite.retries,
        retry_on=suite.retry_on,
        grace=suite.grace,
        workers=suite.workers,
        memory=None if suite.memory is None else round(1e9 * suite.memory),
        options=suite.options,
    )
    if name in ("inline", "local", "span") and suite.options:
        raise unknown(f"options of engine {name}", next(iter(suite.options)), [], "it has none")
    if name == "inline":
        return lambda left, tell, stop: work(suite, store, left, setup, tell, stop=stop)
    if name in ("local", "span"):
        slots = [tuple(devices)] if name == "span" else [(device,) for device in devices]
        if name == "span":
            span.check(cells, len(devices))
        return lambda left, tell, stop: Supervisor(suite, store, left, setup, slots, tell).run(stop)
    launcher = opened.enter_context(closing(launchers.create(name, setup)))
    job = launchers.Job(suite, str(store.root))
    return lambda left, tell, stop: launchers.launch(launcher, job, Queue(store, left), setup, tell, stop)


def _refuse_longer(
    suite: Suite, store: Store, planned: list[Planned], retry: bool, console: Console, at_once: int
) -> None:
    """Raise `ConfigError` where a suite is estimated to take more than its `max_hours`."""
    if suite.max_hours is None:
        return
    rows = estimate.rows(planned, store)
    if retry:  # what has failed is still noted, and is to be run
        rows = [replace(row, states=tuple("pending" if s == "failed" else s for s in row.states)) for row in rows]
    timings = probe.timings(rows, store, suite, at_once, TIMED_DRAWS, console)
    for number, timing in timings.items():
        if timing.failure:
            console.print(f"{rows[number].label} failed: {timing.failure}")
    if estimate.hours(rows, timings, at_once) > suite.max_hours:
        raise ConfigError("max_hours", suite.max_hours, estimate.summary(rows, timings, at_once))


class _Board:
    """Shows how far a suite is: a bar on a terminal, else a line now and then.

    It has no thread of its own, as workers are forked from this process.
    """

    def __init__(self, console: Console, total: int, outcome: SuiteOutcome) -> None:
        self._console, self._total, self._outcome, self._shown = console, total, outcome, 0
        columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        plain = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, **plain)
        self._task = self._bar.add_task("cells", total=total)

    def __enter__(self) -> _Board:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def tell(self, news: News) -> None:
        """Show what a worker tells."""
        self._outcome.ran += news.kind == "done"
        if news.kind == "failed":
            self._console.print(Text.assemble(("failed ", "red"), lines(f"{news.run_id}: {news.reason}")))
        if news.kind == "ready":
            return
        self._total = max(self._total, news.left)  # further cells follow from results
        done = self._total - news.left
        self._bar.update(self._task, completed=done, total=self._total, refresh=True)
        if not self._console.is_terminal and done // max(1, self._total // PLAIN_LINES) > self._shown:
            self._shown = done // max(1, self._total // PLAIN_LINES)
            self._console.print(f"{done}/{self._total} cells")
