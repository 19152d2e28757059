"""Persistent worker processes on this machine: each imports torch and loads a workload once, then runs cell after cell.

A worker that dies costs the cell that it was running; another takes its place, and its GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from multiprocessing.connection import wait

import torch

from dpopt.cells import Cell
from dpopt.runs.engines.attempt import Runner
from dpopt.runs.engines.base import Engine, Event, Nothing, Setup, options
from dpopt.runs.remote import Remote
from dpopt.store.runs import Store
from dpopt.training import resolve_device
from dpopt.workloads.features import cores

LEAVING = 5.0
"""Seconds that an idle process may take to end: it may still log something."""


class LocalEngine(Engine):
    """A process for each device of `places`."""

    def __init__(self, store: Store, setup: Setup, name: str = "local") -> None:
        options(Nothing, setup, name)
        self.devices = places(setup.device, setup.workers)
        super().__init__(store, setup, len(self.devices))

    def worker(self, place: int) -> Team:
        return Team([Runner(self.store, self.setup, self.devices[place])])

    def start(self, worker: Team, cell: Cell) -> Team:
        worker.begin(cell)
        return worker

    def stop(self, worker: Team, attempt: Team) -> None:
        worker.members[0].process.terminate()

    def kill(self, worker: Team) -> None:
        for member in worker.members:
            member.close(0.0 if member in worker.busy else LEAVING)

    def wait(self, attempts: Sequence[Team], timeout: float) -> None:
        wait([member.pipe for team in attempts for member in team.busy], timeout)


class Team:
    """Processes that run a cell together, most often one; the first one writes, and stops for all of them.

    Attributes:
        members: the processes.
        busy: those that have not ended the cell.
    """

    def __init__(self, runners: Iterable[Runner]) -> None:
        self.members = [Remote(runner, is_quiet=False) for runner in runners]
        self.busy: list[Remote] = []
        self._events: list[Event] = []

    def begin(self, cell: Cell) -> None:
        """Have all of them run a cell."""
        self.busy, self._events = list(self.members), []
        self._run_id = cell.run_id
        for member in self.members:
            member.begin("run", cell)

    def done(self) -> bool:
        """Whether all are done, or something went wrong in one of them."""
        for member in [member for member in self.busy if member.pipe.poll()]:
            self.busy.remove(member)
            event, failure = member.answer()
            kind = "died" if member.has_started else "unstarted"
            self._events.append(Event(self._run_id, kind, reason=failure) if failure else event)
        return not self.busy or any(event.kind != "done" for event in self._events)

    def result(self) -> Event:
        """The first thing that went wrong, or that all are done."""
        return next((event for event in self._events if event.kind != "done"), self._events[0])


def places(name: str, workers: int | None) -> list[str]:
    """The device of each worker: by default one worker for each GPU, or for each core; more share the GPUs in turn.

    Args:
        name: see `training.resolve_device`.
        workers: how many; None for the default.
    """
    device = resolve_device(name)
    if device.type != "cuda" or device.index is not None:
        devices, number = [name], cores() if device.type == "cpu" else 1
    else:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        number = len(devices)
    return list(islice(cycle(devices), workers or number))
