"""Persistent worker processes on this machine: each imports torch and loads a workload once, then runs cell after cell.

A worker that dies costs the cell that it was running; another takes its place, and its GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from dpopt.harness import stopping
from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup, understood
from dpopt.harness.engines.attempt import attempt, limit_memory
from dpopt.store.runs import Store
from dpopt.training import resolve_device

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork


class LocalEngine:
    """Processes that take cells from one queue; see `Engine`."""

    def __init__(self, store: Store, setup: Setup) -> None:
        understood(setup, {}, "local")
        self._store, self._setup = store, setup
        self._places = deque(places(setup.device, setup.workers))
        self._queue: deque[Cell] = deque()
        self._workers: list[_Worker] = []

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)
        self._dispatch()

    def poll(self, timeout: float) -> list[Event]:
        if not self._workers:
            time.sleep(timeout)
        by_handle: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        events = []
        for handle in wait(by_handle, timeout) if by_handle else []:
            events += self._receive(by_handle[handle])
        for worker in self._workers:
            worker.enforce()
        self._dispatch()
        return events

    def cancel(self, run_id: str) -> None:
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)
        for worker in self._workers:
            if worker.run_id == run_id:
                worker.stop(self._setup.grace)

    def close(self) -> None:
        self._queue.clear()
        try:
            for worker in self._workers:
                worker.stop(self._setup.grace)
            while self._workers:
                self.poll(0.1)
        finally:  # where even this is interrupted
            for worker in self._workers:
                worker.process.kill()

    def _dispatch(self) -> None:
        while self._queue:
            idle = next((worker for worker in self._workers if worker.is_idle), None)
            if idle is None:
                if not self._places:
                    return
                idle = _Worker(self._store, self._setup, self._places.popleft())
                self._workers.append(idle)
            cell = self._queue.popleft()
            try:
                idle.run(cell)
            except OSError:  # died while it was idle
                self._bury(idle)
                self._queue.appendleft(cell)

    def _receive(self, worker: _Worker) -> list[Event]:
        try:
            event: Event = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker)
        if event.kind != "progress":
            worker.run_id = None
        if event.kind == "interrupted":  # it was asked to stop, by us or by someone else: it ends
            worker.stop(self._setup.grace)
        return [event]

    def _bury(self, worker: _Worker) -> list[Event]:
        self._workers.remove(worker)
        self._places.append(worker.device)
        worker.process.join()
        if worker.run_id is None:
            return []
        return [Event(worker.run_id, "died", reason=f"the worker process died (exit code {worker.process.exitcode})")]


class _Worker:
    """A process and our end of the pipe to it.

    Attributes:
        run_id: the cell that it runs; None while it waits for one.
    """

    def __init__(self, store: Store, setup: Setup, device: str) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.device = device
        self.run_id: str | None = None
        self._deadline: float | None = None
        arguments = (theirs, store, setup, device)
        self.process: BaseProcess = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def is_idle(self) -> bool:
        return self.run_id is None and self._deadline is None

    def run(self, cell: Cell) -> None:
        self.pipe.send(cell)
        self.run_id = cell.run_id

    def stop(self, grace: float) -> None:
        """End the process, after a checkpoint if it is running a cell."""
        if self._deadline is None:
            self._deadline = time.monotonic() + grace
            self.process.terminate()

    def enforce(self) -> None:
        """Kill a process that was to stop and did not."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.process.kill()


def places(name: str, workers: int | None) -> list[str]:
    """The device of each worker: by default one worker for each GPU, or for each core; more share the GPUs in turn.

    Args:
        name: see `training.resolve_device`.
        workers: how many; None for the default.
    """
    device = resolve_device(name)
    if device.type != "cuda" or device.index is not None:
        devices, number = [name], len(os.sched_getaffinity(0)) if device.type == "cpu" else 1
    else:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        number = len(devices)
    return list(islice(cycle(devices), workers or number))


def _serve(pipe: Connection, store: Store, setup: Setup, device: str) -> None:
    """A worker's life: receive a cell, run it, say so; end with the parent, or when it is asked to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.ask())
    limit_memory(setup)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        while not stopping.is_asked():
            if pipe.poll(0.5):
                cell: Cell = pipe.recv()
                report = partial(tell_progress, pipe, cell.run_id)
                report(0.0)
                pipe.send(attempt(cell, store, setup, report, device))
    except (EOFError, OSError):  # the parent has closed its end
        return


def tell_progress(pipe: Connection, run_id: str, fraction: float) -> None:
    """Send the parent the fraction of a cell's draws that are done."""
    pipe.send(Event(run_id, "progress", fraction))


def end_with_parent() -> None:
    """A killed parent must not leave workers that write beside the next parent's."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
