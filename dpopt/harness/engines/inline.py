"""Runs each lot in this process, when it is asked for news. For debugging: a breakpoint works, a crash is a crash.

What needs a second process is not to be had here: `timeout`, `memory`, and a `dpopt cancel` before the cell's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup, understood
from dpopt.harness.engines.attempt import FailureStore, attempt_lot, without


class InlineEngine:
    """One lot at a time, in the calling process; see `Engine`."""

    def __init__(self, store: FailureStore, setup: Setup) -> None:
        understood(setup, {}, "inline")
        self._store, self._setup = store, setup
        self._queue: deque[Sequence[Cell]] = deque()

    def submit(self, *cells: Cell) -> None:
        self._queue.append(cells)

    def poll(self, timeout: float) -> list[Event]:
        if not self._queue:
            time.sleep(timeout)
            return []
        return attempt_lot(self._queue.popleft(), self._store, self._setup)

    def cancel(self, run_id: str) -> None:
        self._queue = without(run_id, self._queue)

    def close(self) -> None:
        self._queue.clear()
