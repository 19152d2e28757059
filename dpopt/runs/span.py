"""A worker that is a process group: all of its processes train each cell together, for cells too large for one GPU.

The processes are one group of `torch.distributed` (see `privacy.distributed`). Their number changes what is released
only by rounding, and by the random numbers that a random model draws. The first process is the worker: it takes cells
and writes. Where anything but a result comes out of a cell, the group is out of step and ends, and a new one begins.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from dpopt import registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.runs.train import train
from dpopt.runs.worker import News, ended_badly, work
from dpopt.store.leases import Lease
from dpopt.store.runs import Store
from dpopt.suites.schema import Keys
from dpopt.training import resolve_device

_FOREVER = timedelta(days=30)
"""Limit of the processes' wait for each other: the supervisor, which sees their ends, is faster than any timeout."""


def check(cells: Iterable[Cell], processes: int) -> None:
    """Raise `ConfigError` for cells that several processes cannot train together."""
    for cell in cells:
        if cell.diagnostics:
            reason = "engine 'span' has none: each process sees only its part of a draw"
            raise ConfigError("diagnostics", True, reason)
        if processes > 1 and registry.from_spec("workload", cell.workload).shares_randomness:
            name = cell.workload["name"]
            allowed = f"{processes} processes, and records of {name} share random numbers: say workers=1"
            raise ConfigError("engine", "span", allowed)


@dataclass(frozen=True)
class Place:
    """A process's place in its group."""

    rank: int  # its number
    devices: tuple[str, ...]  # one for each process
    meeting: str  # where they find each other, a URL for `torch.distributed`


def work_together(place: Place, suite: Keys, store: Store, cells: Iterable[Cell], tell: Callable[[News], None]) -> None:
    """Work as one process of a group; see `worker.work`."""
    device = resolve_device(suite.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL wants a GPU for each process, Gloo can share them.
    is_apart = device.type == "cuda" and len(set(place.devices)) == len(place.devices)
    backend = "cpu:gloo,cuda:nccl" if is_apart else "gloo"
    size = len(place.devices)
    dist.init_process_group(backend, place.meeting, _FOREVER, rank=place.rank, world_size=size)
    if place.rank == 0:
        work(suite, store, cells, tell, share=_broadcast)
        return
    # Stopped each for itself, the processes would stop at different draws: the first one does, which ends all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lease = cast(Lease, SimpleNamespace(check=lambda: None))  # the first process has it
    how: dict[str, Any] = {"device": suite.device, "physical_batch": suite.physical_batch, "isolate": suite.isolate}
    while True:
        cell = _broadcast(None)
        try:
            train(cell, _Silent(store.root), lease, **how, stop=lambda: False)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            ended_badly(store, cell.run_id, suite, "failed", reason, traceback.format_exc())
            raise SystemExit(1) from error


def _broadcast(cell: Cell | None) -> Cell:
    """The first process's cell, in all of them."""
    box = [cell.content() if cell else None]
    dist.broadcast_object_list(box, 0)
    return cell or Cell.from_content(cast(dict[str, Any], box[0]))


class _Silent(Store):
    """The store of a process that is not the first: it reads a checkpoint, and writes nothing."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    begin = finish = append_curve = restart_curve = save_checkpoint = _nothing
