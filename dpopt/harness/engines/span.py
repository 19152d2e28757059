"""One cell at a time, trained by several processes of this machine together: for cells that are large for one GPU.

The processes are one process group (`dpopt.privacy.distributed`); `workers` is their number, by default one for each
GPU. What is released does not change with it but by rounding, and by what a random model draws. They live on from cell
to cell; where one fails or is stopped, it ends with all of them, and the next cell gets new ones. Only the first
process writes.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dpopt.errors import ConfigError
from dpopt.harness import stopping
from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup, understood
from dpopt.harness.engines.attempt import attempt, limit_memory
from dpopt.harness.engines.local import end_with_parent, places, tell_progress
from dpopt.store.runs import Store
from dpopt.training import resolve_device

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
FOREVER = timedelta(days=30)
"""How long the processes wait for each other: the engine, which sees their ends, is faster than any timeout."""


class SpanEngine:
    """All `workers` processes work on one cell; see `Engine`."""

    def __init__(self, store: Store, setup: Setup) -> None:
        understood(setup, {}, "span")
        self._store, self._setup = store, setup
        self._queue: deque[Cell] = deque()
        self._team: _Team | None = None

    def submit(self, cell: Cell) -> None:
        if cell.diagnostics:
            raise ConfigError("diagnostics", True, "engine 'span' has none: each process sees only its part of a draw")
        self._queue.append(cell)
        self._dispatch()

    def poll(self, timeout: float) -> list[Event]:
        if self._team is None or self._team.cell is None:
            time.sleep(timeout)
            return []
        events = self._team.poll(timeout)
        if self._team.is_spent:
            self._end()
        self._dispatch()
        return events

    def cancel(self, run_id: str) -> None:
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)
        if self._team is not None and self._team.cell is not None and self._team.cell.run_id == run_id:
            self._team.stop(self._setup.grace)

    def close(self) -> None:
        self._queue.clear()
        if self._team is not None:
            self._team.stop(self._setup.grace)
        while self._team is not None and self._team.cell is not None:
            self.poll(0.1)
        self._end()

    def _dispatch(self) -> None:
        if self._queue:
            self._team = self._team or _Team(self._store, self._setup)
            if self._team.cell is None:
                self._team.run(self._queue.popleft())

    def _end(self) -> None:
        if self._team is not None:
            self._team.kill()
            self._team = None


class _Member(NamedTuple):
    """A process and our end of the pipe to it."""

    process: BaseProcess
    pipe: Connection


class _Team:
    """The processes of one group.

    Attributes:
        cell: what they are training; None while they wait for a cell.
        is_spent: whether they can train no other.
    """

    def __init__(self, store: Store, setup: Setup) -> None:
        self.cell: Cell | None = None
        self.is_spent = False
        self._deadline: float | None = None
        self._folder = TemporaryDirectory(prefix="dpopt-")
        meeting, devices = f"file://{Path(self._folder.name) / 'meeting'}", places(setup.device, setup.workers)
        self._members = [_start(rank, devices, meeting, store, setup) for rank in range(len(devices))]
        self._busy: list[_Member] = []

    def run(self, cell: Cell) -> None:
        """Have all members train `cell`."""
        self.cell, self._busy = cell, list(self._members)
        for member in self._members:
            with suppress(OSError):  # it has died, as `poll` will find
                member.pipe.send(cell)

    def poll(self, timeout: float) -> list[Event]:
        """What the first process tells, until all are done; the first thing that goes wrong is the last event."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._members[0].process.kill()
        by_pipe: dict[Any, _Member] = {member.pipe: member for member in self._busy}
        events = []
        for pipe in wait(by_pipe, timeout):
            event = self._receive(by_pipe[pipe])
            if event.kind == "progress":
                events.append(event)
            elif event.kind == "done":
                self._busy.remove(by_pipe[pipe])
            else:
                self.cell, self.is_spent = None, True
                return [*events, event]
        if self.cell is not None and not self._busy:
            events.append(Event(self.cell.run_id, "done"))
            self.cell, self.is_spent = None, self._deadline is not None
        return events

    def stop(self, grace: float) -> None:
        """Have the first process write a checkpoint, which ends the cell for all of them."""
        if self._deadline is None and self.cell is not None:
            self._deadline = time.monotonic() + grace
            self._members[0].process.terminate()

    def kill(self) -> None:
        """End the processes as they are."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.pipe.close()
        self._folder.cleanup()

    def _receive(self, member: _Member) -> Event:
        assert self.cell is not None
        try:
            return member.pipe.recv()
        except (EOFError, OSError):
            member.process.join()
            reason = f"process {self._members.index(member)} died (exit code {member.process.exitcode})"
            return Event(self.cell.run_id, "died", reason=reason)


def _start(rank: int, devices: list[str], meeting: str, store: Store, setup: Setup) -> _Member:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs, rank, devices, meeting, store, setup), daemon=True)
    process.start()
    theirs.close()
    return _Member(process, ours)


def _serve(pipe: Connection, rank: int, devices: list[str], meeting: str, store: Store, setup: Setup) -> None:
    """A member's life: receive a cell, train it with the others, say so; end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    # Stopped each for itself, they would stop at different draws: the first does, and the others are ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda number, frame: stopping.ask())
    limit_memory(setup)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _join(rank, devices, meeting)
    own = store if rank == 0 else Follower(store.root)
    try:
        while True:
            cell: Cell = pipe.recv()
            report = _silent if rank else partial(tell_progress, pipe, cell.run_id)
            report(0.0)
            pipe.send(attempt(cell, own, setup, report, devices[rank]))
    except (EOFError, OSError):  # the parent has closed its end
        return


def _join(rank: int, devices: list[str], meeting: str) -> None:
    """Make the process group. NCCL wants a GPU for each process, Gloo can share them."""
    device = resolve_device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_apart = device.type == "cuda" and len(set(devices)) == len(devices)
    backend = "cpu:gloo,cuda:nccl" if is_apart else "gloo"
    dist.init_process_group(backend, meeting, FOREVER, rank=rank, world_size=len(devices))


def _silent(fraction: float) -> None:
    """Report nothing: the first process does."""


class _NoLease:
    """The first process has the lease."""

    def note(self, fraction: float) -> None:
        pass

    def check(self) -> None:
        pass


class Follower(Store):
    """The store of a process that is not the first: it reads a checkpoint and writes its failures, and nothing else."""

    def lease(self, run_id: str) -> Any:
        return nullcontext(_NoLease())

    def state(self, run_id: str) -> Any:
        return "started"

    def begin(self, run_id: str, cell: Mapping[str, Any]) -> None:
        pass

    def finish(self, run_id: str, record: Mapping[str, Any], ledger: str) -> None:
        pass

    def append_curve(self, run_id: str, entry: Mapping[str, Any]) -> None:
        pass

    def restart_curve(self, run_id: str, entries: Iterable[Mapping[str, Any]]) -> None:
        pass

    def save_checkpoint(self, run_id: str, content: bytes) -> None:
        pass
