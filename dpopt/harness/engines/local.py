"""Persistent worker processes on this machine: each imports torch and loads a workload once, then runs cell after cell.

A worker that dies costs the cell that it was running; another takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from dpopt.harness.cell import Cell, RunStore, attempt
from dpopt.harness.engines import Event

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork


class _Worker:
    """A process and our end of the pipe to it."""

    def __init__(self, store: RunStore, device: str, physical_batch: int | None) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.cell: Cell | None = None
        self.process: BaseProcess = _CONTEXT.Process(
            target=_serve, args=(theirs, store, device, physical_batch), daemon=True
        )
        self.process.start()
        theirs.close()

    def run(self, cell: Cell) -> None:
        self.cell = cell
        self.pipe.send(cell)


class LocalEngine:
    """`workers` processes that take cells from one queue.

    Args:
        store: where results go.
        device: see `training.resolve_device`.
        workers: number of processes; None takes one for each core.
        physical_batch: see `cell.run`.
    """

    def __init__(
        self, store: RunStore, device: str, workers: int | None = None, physical_batch: int | None = None
    ) -> None:
        self._store, self._device, self._physical_batch = store, device, physical_batch
        self._limit = workers or len(os.sched_getaffinity(0))
        self._queue: deque[Cell] = deque()
        self._workers: list[_Worker] = []

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)
        self._dispatch()

    def poll(self, timeout: float) -> list[Event]:
        by_handle: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        events = []
        for handle in wait(by_handle, timeout) if by_handle else []:
            events += self._receive(by_handle[handle])
        self._dispatch()
        return events

    def close(self) -> None:
        self._queue.clear()
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()

    def _dispatch(self) -> None:
        while self._queue:
            idle = next((worker for worker in self._workers if worker.cell is None), None)
            if idle is None:
                if len(self._workers) >= self._limit:
                    return
                idle = _Worker(self._store, self._device, self._physical_batch)
                self._workers.append(idle)
            cell = self._queue.popleft()
            try:
                idle.run(cell)
            except OSError:  # died while it was idle
                self._workers.remove(idle)
                self._queue.appendleft(cell)

    def _receive(self, worker: _Worker) -> list[Event]:
        try:
            event: Event = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker)
        if event.kind != "progress":
            worker.cell = None
        return [event]

    def _bury(self, worker: _Worker) -> list[Event]:
        self._workers.remove(worker)
        worker.process.join()
        if worker.cell is None:
            return []
        reason = f"the worker process died (exit code {worker.process.exitcode})"
        self._store.fail(worker.cell.run_id, reason)
        return [Event(worker.cell.run_id, "failed", reason=reason)]


def _serve(pipe: Connection, store: RunStore, device: str, physical_batch: int | None) -> None:
    """A worker's life: receive a cell, run it, say so; end with the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            cell: Cell = pipe.recv()
            run_id = cell.run_id
            reason = attempt(cell, store, device, partial(_progress, pipe, run_id), physical_batch)
            pipe.send(Event(run_id, "failed", reason=reason) if reason else Event(run_id, "done"))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return


def _progress(pipe: Connection, run_id: str, fraction: float) -> None:
    pipe.send(Event(run_id, "progress", fraction))


def _end_with_parent() -> None:
    """A killed parent must not leave workers that write beside the next parent's."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
