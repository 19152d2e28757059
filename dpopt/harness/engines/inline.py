"""Runs each cell in this process, when it is asked for news. For debugging: a breakpoint works, a crash is a crash.

What needs a second process is not to be had here: `timeout`, `memory`, and a `dpopt cancel` before the cell's end.
"""

from __future__ import annotations

import time
from collections import deque

from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup, understood
from dpopt.harness.engines.attempt import attempt
from dpopt.store.runs import Store


class InlineEngine:
    """One cell at a time, in the calling process; see `Engine`."""

    def __init__(self, store: Store, setup: Setup) -> None:
        understood(setup, {}, "inline")
        self._store, self._setup = store, setup
        self._queue: deque[Cell] = deque()

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)

    def poll(self, timeout: float) -> list[Event]:
        if not self._queue:
            time.sleep(timeout)
            return []
        return [attempt(self._queue.popleft(), self._store, self._setup)]

    def cancel(self, run_id: str) -> None:
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)

    def close(self) -> None:
        self._queue.clear()
