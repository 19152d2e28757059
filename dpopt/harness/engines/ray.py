"""Actors of a Ray cluster, on one machine or on several that share the results folder. Each runs cell after cell.

Options: `address` of a running cluster (by default `$RAY_ADDRESS`, else a cluster is started on this machine and ended
with the run), and `cpus` and `gpus` of a cell; `gpus: 0.25` has four cells share a GPU. An actor that dies costs the
cell that it was running; Ray starts the next one where there is room.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.harness import stopping
from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup, understood
from dpopt.harness.engines.attempt import attempt, limit_memory, progress
from dpopt.store.runs import Store


class RayEngine:
    """As many actors as the cluster has room for, or as `workers` says; see `Engine`."""

    def __init__(self, store: Store, setup: Setup) -> None:
        options = understood(setup, {"address": None, "cpus": 1.0, "gpus": None}, "ray")
        self._store, self._setup = store, setup
        self._is_owner = not ray.is_initialized()
        if self._is_owner:
            _connect(fields.convert(options["address"], str | None, "options.address", {}), setup.workers)
        self._needs = _needs(options, ray.cluster_resources())
        self._limit = setup.workers or _room(self._needs, ray.cluster_resources())
        self._queue: deque[Cell] = deque()
        self._actors: list[_Actor] = []

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)
        self._dispatch()

    def poll(self, timeout: float) -> list[Event]:
        busy = {actor.answer: actor for actor in self._actors if actor.answer is not None}
        if not busy:
            time.sleep(timeout)
        ready, _ = ray.wait(list(busy), timeout=timeout) if busy else ([], [])
        events = [self._receive(busy[answer]) for answer in ready]
        events += progress(self._store, [actor.cell.run_id for actor in self._actors if actor.cell is not None])
        for actor in self._actors:
            actor.enforce()
        self._dispatch()
        return events

    def cancel(self, run_id: str) -> None:
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)
        for actor in self._actors:
            if actor.cell is not None and actor.cell.run_id == run_id:
                actor.stop(self._setup.grace)

    def close(self) -> None:
        self._queue.clear()
        for actor in self._actors:
            if actor.cell is not None:
                actor.stop(self._setup.grace)
        while any(actor.cell is not None for actor in self._actors):
            self.poll(0.1)
        for actor in self._actors:
            actor.kill()
        if self._is_owner:
            ray.shutdown()

    def _dispatch(self) -> None:
        while self._queue:
            idle = next((actor for actor in self._actors if actor.cell is None), None)
            if idle is None:
                if len(self._actors) >= self._limit:
                    return
                idle = _Actor(self._store, self._setup, self._needs)
                self._actors.append(idle)
            idle.run(self._queue.popleft())

    def _receive(self, actor: _Actor) -> Event:
        assert actor.cell is not None
        run_id = actor.cell.run_id
        try:
            event: Event = ray.get(actor.answer)
        except RayError as error:
            self._actors.remove(actor)
            return Event(run_id, "died", reason=f"the actor died ({str(error).splitlines()[0]})")
        actor.rest()
        return event


class _Actor:
    """Our end of an actor.

    Attributes:
        cell: what it runs; None while it waits for a cell.
        answer: where Ray will put how that ended.
    """

    def __init__(self, store: Store, setup: Setup, needs: Mapping[str, float]) -> None:
        # Two threads: one runs cells, the other can ask it to stop.
        options: dict[str, Any] = {"max_concurrency": 2, "max_restarts": 0, "max_task_retries": 0, **needs}
        remote = ray.remote(**options)(_Worker)
        environment = {name: value for name, value in os.environ.items() if name.startswith("DPOPT_")}
        self._handle: Any = remote.remote(store, setup, os.getcwd(), environment)
        self._deadline: float | None = None
        self.rest()

    def run(self, cell: Cell) -> None:
        self.cell, self.answer = cell, self._handle.run.remote(cell)

    def rest(self) -> None:
        """Be ready for another cell."""
        self.cell: Cell | None = None
        self.answer: Any = None
        self._deadline = None

    def stop(self, grace: float) -> None:
        """Have the cell end, after a checkpoint."""
        if self._deadline is None:
            self._deadline = time.monotonic() + grace
            self._handle.stop.remote()

    def enforce(self) -> None:
        """Kill an actor whose cell was to end and did not."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def kill(self) -> None:
        """End the actor as it is."""
        ray.kill(self._handle)


class _Worker:
    """What the actor is over there."""

    def __init__(self, store: Store, setup: Setup, folder: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        os.chdir(folder)
        limit_memory(setup)
        self._store, self._setup = store, setup

    def run(self, cell: Cell) -> Event:
        """Run a cell and say how that ended."""
        stopping.forget()  # what was asked came too late for the last cell
        return attempt(cell, self._store, self._setup)

    def stop(self) -> None:
        """Have the cell that is running end."""
        stopping.ask()


def _connect(address: str | None, workers: int | None) -> None:
    """Raises `ConfigError` where Ray cannot be reached or started."""
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        with stopping.undisturbed():  # Ray has a process end at SIGTERM
            if address is not None or os.environ.get("RAY_ADDRESS"):
                ray.init(address, **quiet)
            else:
                ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
    except Exception as error:  # Ray has no class of its own for these
        raise ConfigError("options.address", address, f"Ray: {str(error).splitlines()[0]}") from error


def _needs(options: Mapping[str, Any], resources: Mapping[str, float]) -> dict[str, float]:
    """What Ray is to reserve for a cell: by default a core, and a GPU where the cluster has some."""
    cpus = fields.convert(options["cpus"], fields.Positive, "options.cpus", {})
    gpus = fields.convert(options["gpus"], float | None, "options.gpus", {})
    return {"num_cpus": cpus, "num_gpus": float("GPU" in resources) if gpus is None else gpus}


def _room(needs: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many cells the cluster has room for, at least one."""
    asked = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
    return max(1, min(int(resources.get(name, 0.0) / need) for name, need in asked.items() if need))
