"""What every worker does with a cell, wherever it is."""

from __future__ import annotations

import contextlib
import errno
import resource
import traceback
from collections.abc import Iterable
from typing import Any

from dpopt.errors import Held
from dpopt.harness.cell import Cell, Interrupted, Report, run
from dpopt.harness.engines import Event, Setup
from dpopt.store.runs import Store

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def attempt(
    cell: Cell, store: Store, setup: Setup, report: Report = lambda fraction: None, device: str | None = None
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
        if isinstance(error, OSError) and error.errno in FULL:
            return Event(cell.run_id, "blocked", reason=reason)
        with contextlib.suppress(OSError):  # where the run directory cannot be written, the reason is still returned
            store.fail(cell.run_id, reason, traceback.format_exc())
        return Event(cell.run_id, "failed", reason=reason)
    return Event(cell.run_id, "done")


def progress(store: Store, run_ids: Iterable[str]) -> list[Event]:
    """How far cells are, of those that have begun, as their leases say."""
    holders = {run_id: store.holder(run_id) for run_id in run_ids}
    return [Event(run_id, "progress", holder.fraction) for run_id, holder in holders.items() if holder is not None]


def limit_memory(setup: Setup) -> None:
    """Have this process fail to get more memory than it may take, before the system chooses a process to kill."""
    if setup.memory is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = setup.memory if hard == resource.RLIM_INFINITY else min(setup.memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
