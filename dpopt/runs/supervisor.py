"""A supervisor keeps the workers of one machine alive: it starts, watches, stops and replaces them.

It has everything imported and forks its workers, so that the first cell begins at once; it computes nothing and touches
no GPU itself. A worker that dies costs the cell that it was running one attempt; another takes its place, and its GPU.
A worker also ends after a cell that fails, so that memory which the cell still holds is freed; another takes its place.

With the engine `span` a worker is a group of `torch.distributed` (see `privacy.distributed`), for cells too large for
one GPU: all of its processes train each cell together. Their number changes what is released only by rounding (of some
coordinates by a step of the grid, where there is one), and by the random numbers that a random model draws. The first
process takes cells and writes. Where anything but a result comes out of a cell, the group is out of step and ends, and
a new one begins.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from dpopt.cells import Cell
from dpopt.privacy.distributed import Left, Processes
from dpopt.runs import stopping
from dpopt.runs.remote import ENDING, guarded_main
from dpopt.runs.train import train
from dpopt.runs.worker import News, Tell, fail, too_long, uncount, work
from dpopt.store.leases import Lease
from dpopt.store.runs import Store
from dpopt.suites.schema import Keys
from dpopt.training import resolve_device

STARTS = 3
"""Workers in a row that end before any cell does, after which a run is given up."""
_POLL = 1.0
"""Seconds between two looks at the clock, and at who has asked to stop."""


@dataclass
class _Slot:
    """Room for one worker: a process, or several that train each cell together, of which the first one tells."""

    devices: tuple[str, ...]  # one for each process
    processes: list[BaseProcess] = field(default_factory=list)  # of the worker that is there
    news: Connection | None = None  # from its first process
    is_ready: bool = False  # it has started
    is_done: bool = False  # it has found nothing left
    run_id: str = ""  # the cell that it runs; "" between cells
    since: float = 0.0  # when it began the cell, by the steady clock


class Supervisor:
    """Worker processes on this machine; see `worker.work`. `devices` are for each worker those of its processes."""

    def __init__(
        self, suite: Keys, store: Store, cells: Sequence[Cell], devices: Sequence[tuple[str, ...]], tell: Tell
    ) -> None:
        self._suite, self._store, self._cells, self._tell = suite, store, cells, tell
        self.slots = [_Slot(each) for each in devices]
        # A process that has used a GPU cannot be forked, nor one of other systems: its workers are started anew.
        is_forked = sys.platform == "linux" and not torch.cuda.is_initialized()
        self._method = "fork" if is_forked else "spawn"
        self._fruitless, self._groups = 0, 0

    def run(self, stop: Callable[[], bool]) -> None:
        """Keep the workers alive until all of them have found nothing left, or until `stop` says so.

        Raises:
            OSError: no worker can be started, or `tell` raises it.
        """
        with TemporaryDirectory(prefix="dpopt-") as self._folder:
            try:
                for slot in self.slots:
                    self._start(slot)
                while self.slots and not stop():
                    self._look()
                self._stop()
            finally:  # where even stopping is interrupted
                for slot in self.slots:
                    is_stopped = slot.run_id and slot.processes[0].exitcode is None
                    self._kill(slot)
                    if is_stopped:  # by no fault of the cell
                        with suppress(OSError):
                            uncount(self._store, slot.run_id, self._suite)

    def _look(self) -> None:
        """Wait for news or ends, and do what follows."""
        ends = [process.sentinel for slot in self.slots for process in slot.processes if process.exitcode is None]
        limit = math.inf if self._suite.timeout is None else self._suite.timeout + self._suite.grace
        wait([*(slot.news for slot in self.slots if slot.news), *ends], _POLL)
        for slot in list(self.slots):
            # Asked before the news are read: what a worker told before its end is then there.
            first, *others = (process.exitcode for process in slot.processes)
            self._read(slot)
            if first is not None or any(others):
                self._replace(slot)
            elif slot.run_id and time.monotonic() > slot.since + limit:
                # Noted before the kill: a worker that takes the cell at once would count a death.
                count = self._store.tries(slot.run_id).number
                self._store.note_tries(slot.run_id, count, "timeout", too_long(self._suite))
                self._kill(slot)

    def _read(self, slot: _Slot) -> None:
        while slot.news:
            try:
                if not slot.news.poll():
                    return
                news: News = slot.news.recv()
            except (EOFError, OSError):  # it has ended, and told everything
                slot.news = None
                return
            if news.kind != "note":
                slot.run_id, slot.since = (news.run_id if news.kind == "begin" else ""), time.monotonic()
            slot.is_done |= news.kind == "bye"
            slot.is_ready = True
            if news.run_id and news.kind not in ("begin", "note") and self._is_noted(news.run_id):
                self._fruitless = 0
            self._tell(news)

    def _replace(self, slot: _Slot) -> None:
        """A worker has ended: start another one, unless there was nothing left to do."""
        code = next((process.exitcode for process in slot.processes if process.exitcode), 0)
        self._kill(slot)
        if slot.is_done:
            self.slots.remove(slot)
            return
        # A death within a cell costs an attempt, and these have an end of their own.
        self._fruitless = 0 if slot.run_id and self._is_noted(slot.run_id) else self._fruitless + 1
        if not slot.is_ready:
            self._method = "spawn"  # whatever kept a fork of this process from working
        if self._fruitless >= STARTS:
            problem = "workers end before any cell does: the last"
            problem = problem if slot.is_ready else "a worker could not be started: its process"
            raise OSError(f"{problem} died (exit code {code})")
        self._start(slot)

    def _is_noted(self, run_id: str) -> bool:
        """True if the store has anything of an attempt at a cell: its end, or that there was one."""
        return self._store.is_settled(run_id) or self._store.tries(run_id).number > 0

    def _start(self, slot: _Slot) -> None:
        context: Any = multiprocessing.get_context(self._method)
        slot.news, theirs = context.Pipe(duplex=False)
        slot.is_ready, slot.run_id, slot.processes = False, "", []
        self._groups += 1
        meeting = f"file://{Path(self._folder, str(self._groups))}"
        with guarded_main() if self._method == "spawn" else nullcontext():
            for rank in range(len(slot.devices)):
                job = (self._suite, self._store, self._cells, None if rank else theirs, os.getpid())
                process = context.Process(target=_serve, args=(rank, slot.devices, meeting, *job), daemon=True)
                process.start()
                slot.processes.append(process)
        theirs.close()

    def _stop(self) -> None:
        """Ask all workers to stop; each cell writes a checkpoint, and what has not ended after the grace is killed."""
        for slot in self.slots:
            slot.processes[0].terminate()
        until = time.monotonic() + self._suite.grace
        for slot in self.slots:
            slot.processes[0].join(max(0.0, until - time.monotonic()))
            self._read(slot)

    def _kill(self, slot: _Slot) -> None:
        for process in slot.processes:
            process.kill()  # a call into a driver does not hear SIGTERM
        for process in slot.processes:
            process.join(ENDING)


def _serve(
    rank: int,
    devices: tuple[str, ...],
    meeting: str,
    suite: Keys,
    store: Store,
    cells: Sequence[Cell],
    news: Connection | None,
    parent: int,
) -> None:
    """The life of a worker process, number `rank` of a group that finds each other at the URL `meeting`."""
    running = [""]

    def tell(message: News) -> None:
        running[0] = message.run_id if message.kind in ("begin", "note") else ""
        if news:
            news.send(message)

    def give_back() -> None:  # that the supervisor was killed is no cell's fault
        if running[0]:
            uncount(store, running[0], suite)

    stopping.forget()  # this process was forked from one that may have been asked
    stopping.end_with(parent, give_back)
    _limit_memory(suite.memory)
    suite = replace(suite, device=devices[rank])
    device = resolve_device(suite.device)
    with stopping.signals(at_once=False), suppress(BrokenPipeError):
        tell(News("ready"))
        if len(devices) == 1:
            work(suite, store, cells, tell, is_replaced=True)
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # NCCL wants a GPU for each process, Gloo can share them.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and len({*devices}) == len(devices) else "gloo"
        forever = timedelta(days=30)  # the supervisor, which sees their ends, is faster than any timeout
        dist.init_process_group(backend, meeting, forever, rank=rank, world_size=len(devices))
        if rank:
            _follow(suite, store)
        else:
            work(suite, store, cells, tell, share=_broadcast)


def _follow(suite: Keys, store: Store) -> None:
    """Train each cell with the first process of a group, which writes and holds the lease, until that one ends."""
    # Stopped each for itself, the processes would stop at different draws: the first one does, which ends all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lease = cast(Lease, SimpleNamespace(check=lambda: None))
    with suppress(Left):  # between cells, or in one, whose attempt then counts as one that has died
        while True:
            cell = _broadcast(None)
            try:
                train(cell, _Silent(store.root), lease, **suite.how, stop=lambda: False)
            except Left:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                fail(store, cell.run_id, suite, "failed", reason, traceback.format_exc())
                raise SystemExit(1) from error


def _broadcast(cell: Cell | None) -> Cell:
    """The first process's cell, in all of them."""
    content, *_ = Processes.of_group().gather(cell.content() if cell else None)
    return cell or Cell.from_content(content)


class _Silent(Store):
    """The store of a process that is not the first: it reads a checkpoint, and writes nothing."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    begin = finish = append_curve = restart_curve = save_checkpoint = _nothing


def _limit_memory(gigabytes: float | None) -> None:
    """Limit this process, so that an allocation fails before the system kills a process."""
    if gigabytes is None:
        return
    try:
        import resource
    except ImportError:  # Windows has none
        logging.getLogger("dpopt").warning("memory: this system cannot limit a process, so the limit is not enforced")
    else:
        limit, (_, hard) = round(1e9 * gigabytes), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
