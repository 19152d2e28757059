"""What every worker does with a cell, wherever it is."""

from __future__ import annotations

import contextlib
import errno
import logging
import traceback
from dataclasses import dataclass

from dpopt.cells import Cell
from dpopt.errors import Held
from dpopt.runs import stopping
from dpopt.runs.engines.base import Event, Setup
from dpopt.runs.train import Interrupted, run
from dpopt.store.runs import Store

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def attempt(cell: Cell, store: Store, setup: Setup, device: str | None = None) -> Event:
    """Run a cell and say how that ended; an error of its own is noted in the store.

    Args:
        cell, store: see `cell.run`.
        setup: how to run it.
        device: replaces that of `setup`, where a worker has been given one.
    """
    try:
        run(cell, store, device=device or setup.device, physical_batch=setup.physical_batch, isolate=setup.isolate)
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


@dataclass
class Runner:
    """Runs cells in a process that does nothing else; for the arguments see `attempt`."""

    store: Store
    setup: Setup
    device: str | None = None

    def run(self, cell: Cell) -> Event:
        """Run a cell and say how that ended; a signal has it write a checkpoint and end."""
        limit_memory(self.setup.memory)
        with stopping.signals(at_once=False):
            return attempt(cell, self.store, self.setup, self.device)

    def stop(self) -> None:
        """Have the cell that runs in another thread write a checkpoint and end."""
        stopping.ask()


def limit_memory(limit: int | None) -> None:
    """Limit this process to `limit` bytes, so that an allocation fails before the system kills a process."""
    if limit is None:
        return
    try:
        import resource
    except ImportError:  # Windows has none
        logging.getLogger("dpopt").warning("memory: this system cannot limit a process, so the limit is not enforced")
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
