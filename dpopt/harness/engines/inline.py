"""Runs each cell in this process, when it is asked for news. For debugging: a breakpoint works, a crash is a crash."""

from __future__ import annotations

from collections import deque

from dpopt.harness.cell import Cell, RunStore, attempt
from dpopt.harness.engines import Event


class InlineEngine:
    """One cell at a time, in the calling process.

    Args:
        store: where results go.
        device: see `training.resolve_device`.
        physical_batch: see `cell.run`.
    """

    def __init__(self, store: RunStore, device: str, physical_batch: int | None = None) -> None:
        self._store, self._device, self._physical_batch = store, device, physical_batch
        self._queue: deque[Cell] = deque()

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)

    def poll(self, timeout: float) -> list[Event]:
        if not self._queue:
            return []
        cell = self._queue.popleft()
        reason = attempt(cell, self._store, self._device, lambda fraction: None, self._physical_batch)
        return [Event(cell.run_id, "failed", reason=reason) if reason else Event(cell.run_id, "done")]

    def close(self) -> None:
        self._queue.clear()
