"""Training what is not done of a suite: what `dpopt run` and `dpopt.run_suite` do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dpopt import fields
from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.runs import engines, probe, stopping
from dpopt.runs.engines.local import places
from dpopt.runs.execute import Policy, SuiteOutcome, execute
from dpopt.store import Store, open_results
from dpopt.store.runs import SETTLED
from dpopt.suites import estimate
from dpopt.suites import plan as planning
from dpopt.suites.engines import check
from dpopt.suites.searches import Planned
from dpopt.suites.suite import Suite
from dpopt.training import resolve_device

TIMED_DRAWS = 5
"""Draws by which a row is timed where the suite has a limit `max_hours`."""


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
    store = open_store(suite, results)
    if engine is not None:
        check(engine, "engine")
    store.check_writable()
    planning.require(suite)
    resolve_device(suite.device)
    planned = planning.plan(suite, store)
    shown = progress if isinstance(progress, Console) else Console(stderr=True, quiet=not progress)
    _try_engine(suite, engine or suite.engine, store, planned, retry)
    _refuse_longer(suite, store, planned, retry, shown)
    if retry:
        _forget_failures(planned, store)
    store.extend_suite(suite.name, planning.manifest(suite, planned))
    return _run(suite, engine or suite.engine, store, planned, shown)


def open_store(suite: Suite, results: str | Path | None = None) -> Store:
    """The store of a suite, which also logs where the suite asks for it."""
    root = suite.results if results is None else fields.path(results, "results")
    if not suite.log:
        return open_results(root)
    from dpopt.store.logs import LoggedStore

    return LoggedStore(root, suite.log)


def _try_engine(suite: Suite, engine: str, store: Store, planned: list[Planned], retry: bool) -> None:
    """Raise `ConfigError` where cells are to be run and the engine cannot be had, or does not run one of them."""
    left_alone = {*SETTLED} - ({"failed"} if retry else set())
    cells = [entry.cell for entry in planned if store.state(entry.cell.run_id) not in left_alone]
    if not cells:
        return
    tried = engines.create(engine, store, _setup(suite))
    try:
        for cell in cells:
            tried.check(cell)
    finally:
        tried.close()


def _forget_failures(planned: list[Planned], store: Store) -> None:
    for entry in planned:
        if store.state(entry.cell.run_id) == "failed":
            store.forget_failure(entry.cell.run_id)


def _run(suite: Suite, engine: str, store: Store, planned: list[Planned], console: Console) -> SuiteOutcome:
    before = store.cancelled(suite.name)
    policy = Policy(suite.timeout, suite.retries, suite.retry_on)

    def make_engine() -> engines.Engine:
        return engines.create(engine, store, _setup(suite))

    def is_stopped() -> bool:
        return stopping.is_asked() or store.cancelled(suite.name) != before

    def further() -> list[Cell]:
        """Cells that follow from the outcome of others."""
        nonlocal planned
        known = {entry.cell.run_id for entry in planned}
        planned = planning.plan(suite, store) if planning.has_stages(suite) else planned
        # At the end too: another process may have noted its cells in between, after it had read what there was before.
        store.extend_suite(suite.name, planning.manifest(suite, planned))
        return estimate.cheapest_first(entry for entry in planned if entry.cell.run_id not in known)

    with stopping.signals():
        return execute(estimate.cheapest_first(planned), store, make_engine, console, policy, is_stopped, further)


def _refuse_longer(suite: Suite, store: Store, planned: list[Planned], retry: bool, console: Console) -> None:
    """Raise `ConfigError` where a suite is estimated to take more than its `max_hours`."""
    if suite.max_hours is None:
        return
    rows = estimate.rows(planned, store)
    if retry:  # what has failed is still noted, and is to be run
        rows = [replace(row, states=tuple("pending" if s == "failed" else s for s in row.states)) for row in rows]
    at_once = workers(suite)
    timings = probe.timings(rows, store, suite, at_once, TIMED_DRAWS, console)
    for number, timing in timings.items():
        if timing.failure:
            console.print(f"{rows[number].label} failed: {timing.failure}")
    if estimate.hours(rows, timings, at_once) > suite.max_hours:
        raise ConfigError("max_hours", suite.max_hours, estimate.summary(rows, timings, at_once))


def workers(suite: Suite) -> int:
    """How many cells of a suite run at a time; where its engine decides, as many as the local one would run."""
    return 1 if suite.engine in ("inline", "span") else len(places(suite.device, suite.workers))


def _setup(suite: Suite) -> engines.Setup:
    return engines.Setup(
        device=suite.device,
        physical_batch=suite.physical_batch,
        isolate=suite.isolate,
        workers=suite.workers,
        memory=None if suite.memory is None else round(1e9 * suite.memory),
        grace=suite.grace,
        options=suite.options,
    )
