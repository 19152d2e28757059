"""What every worker does with a cell, wherever it is."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from dpopt.errors import Held
from dpopt.harness import lots
from dpopt.harness.cell import Cell, Interrupted, Report, RunStore, run
from dpopt.harness.engines import Event, Setup

_LOG = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class FailureStore(RunStore, Protocol):
    """What an attempt needs of the store; `dpopt.store.Store` documents the methods."""

    def fail(self, run_id: str, reason: str, traceback: str = "", kind: Literal["failed"] = "failed") -> None: ...


class SharedStore(FailureStore, Protocol):
    """What an engine needs of the store whose workers tell of themselves through it alone."""

    def holder(self, run_id: str) -> Holder | None: ...


class Holder(Protocol):
    """Who runs a cell; see `dpopt.store.leases.Holder`."""

    @property
    def fraction(self) -> float: ...


def attempt(
    cell: Cell, store: FailureStore, setup: Setup, report: Report = lambda fraction: None, device: str | None = None
) -> Event:
    """Run a cell and say how that ended; an error of its own is noted in the store.

    Args:
        cell, store, report: see `cell.run`.
        setup: how to run it.
        device: replaces that of `setup`, where a worker has been given one.
    """
    try:
        options: dict[str, Any] = {"physical_batch": setup.physical_batch, "isolate": setup.isolate}
        run(cell, store, device=device or setup.device, report=report, **options)
    except Held as error:
        return Event(cell.run_id, "held", reason=str(error))
    except Interrupted:
        return Event(cell.run_id, "interrupted")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if _is_full(error):
            return Event(cell.run_id, "blocked", reason=reason)
        with contextlib.suppress(OSError):  # where the run directory cannot be written, the reason is still returned
            store.fail(cell.run_id, reason, traceback.format_exc())
        return Event(cell.run_id, "failed", reason=reason)
    return Event(cell.run_id, "done")


def attempt_lot(
    cells: Sequence[Cell],
    store: FailureStore,
    setup: Setup,
    report: Callable[[str, float], None] = lambda run_id, fraction: None,
    device: str | None = None,
) -> list[Event]:
    """Run cells as one lot and say how that ended for each; one cell is run as `attempt` does.

    Where a lot fails, nothing is noted of its cells: which of them is the cause, if one is, shows when they run alone.

    Args:
        cells, store, report: see `lots.run`.
        setup, device: see `attempt`.
    """
    if len(cells) == 1:
        (cell,) = cells
        return [attempt(cell, store, setup, partial(report, cell.run_id), device)]
    kind, reason = "held", "another process runs it"
    try:
        lots.run(cells, store, device=device or setup.device, report=report, physical_batch=setup.physical_batch)
    except Interrupted:
        kind, reason = "interrupted", ""
    except Exception as error:
        kind, reason = "blocked" if _is_full(error) else "split", f"{type(error).__name__}: {error}"
        _LOG.info("%d cells are to run one by one: %s", len(cells), reason)
    is_done = {cell.run_id: store.state(cell.run_id) in ("done", "diverged") for cell in cells}
    return [Event(run_id, "done") if done else Event(run_id, kind, reason=reason) for run_id, done in is_done.items()]


def without(run_id: str, queue: Iterable[Sequence[Cell]]) -> deque[Sequence[Cell]]:
    """The lots of `queue` without a cell."""
    left = ([cell for cell in lot if cell.run_id != run_id] for lot in queue)
    return deque(lot for lot in left if lot)


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def progress(store: SharedStore, run_ids: Iterable[str]) -> list[Event]:
    """How far cells are, of those that have begun, as their leases say."""
    holders = {run_id: store.holder(run_id) for run_id in run_ids}
    return [Event(run_id, "progress", holder.fraction) for run_id, holder in holders.items() if holder is not None]


def limit_memory(setup: Setup) -> None:
    """Have this process fail to get more memory than it may take, before the system chooses a process to kill."""
    if setup.memory is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = setup.memory if hard == resource.RLIM_INFINITY else min(setup.memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
