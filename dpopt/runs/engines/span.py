"""One cell at a time, trained by several processes of this machine together: for cells that are large for one GPU.

The processes are one process group (`dpopt.privacy.distributed`); `workers` is their number, by default one for each
GPU. Their number changes what is released only by rounding, and by the random numbers that a random model draws. They
live on from cell to cell; where one fails or is stopped, it ends with all of them, and the next cell gets new ones.
Only the first process writes.
"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dpopt import registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.runs.engines.attempt import Runner, attempt, limit_memory
from dpopt.runs.engines.base import Event, Setup
from dpopt.runs.engines.local import LocalEngine, Team
from dpopt.store.runs import Store
from dpopt.training import resolve_device

FOREVER = timedelta(days=30)
"""How long the processes wait for each other: the engine, which sees their ends, is faster than any timeout."""


class SpanEngine(LocalEngine):
    """All processes work on one cell."""

    survives = ("done",)

    def __init__(self, store: Store, setup: Setup) -> None:
        super().__init__(store, setup, "span")
        del self.places[1:]
        self._folder, self._teams = TemporaryDirectory(prefix="dpopt-"), 0

    def check(self, cell: Cell) -> None:
        if cell.diagnostics:
            raise ConfigError("diagnostics", True, "engine 'span' has none: each process sees only its part of a draw")
        if len(self.devices) > 1 and registry.from_spec("workload", cell.workload).shares_randomness:
            name, number = cell.workload["name"], len(self.devices)
            allowed = f"{number} processes, and records of {name} share random numbers: say workers=1"
            raise ConfigError("engine", "span", allowed)

    def worker(self, place: int) -> Team:
        self._teams += 1
        meeting = f"file://{Path(self._folder.name) / str(self._teams)}"
        first = Member(self.store, self.setup, meeting=meeting, devices=tuple(self.devices))
        others = (replace(first, rank=rank, store=Follower(self.store.root)) for rank in range(1, len(self.devices)))
        return Team([first, *others])

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._folder.cleanup()


@dataclass
class Member(Runner):
    """Runs its part of a cell.

    Attributes:
        meeting: where the processes find each other, a URL for `torch.distributed`.
        devices: one for each process.
        rank: the number of this one.
    """

    meeting: str = ""
    devices: tuple[str, ...] = ()
    rank: int = 0

    def run(self, cell: Cell) -> Event:
        """Run a cell with the others and say how that ended here."""
        if not dist.is_initialized():
            self._join()
        return attempt(cell, self.store, self.setup, self.device) if self.rank else super().run(cell)

    def _join(self) -> None:
        """Make the process group. NCCL wants a GPU for each process, Gloo can share them."""
        limit_memory(self.setup.memory)
        if self.rank:  # stopped each for itself, they would stop at different draws: the first does, which ends all
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.device = self.devices[self.rank]
        device = resolve_device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        is_apart = device.type == "cuda" and len(set(self.devices)) == len(self.devices)
        backend = "cpu:gloo,cuda:nccl" if is_apart else "gloo"
        dist.init_process_group(backend, self.meeting, FOREVER, rank=self.rank, world_size=len(self.devices))


class Follower(Store):
    """The store of a process that is not the first: it reads a checkpoint and writes its failures, and nothing else."""

    def lease(self, run_id: str) -> Any:
        return nullcontext(SimpleNamespace(note=lambda fraction: None, check=lambda: None))

    def state(self, run_id: str) -> Any:
        return "started"

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    begin = finish = append_curve = restart_curve = save_checkpoint = _nothing
