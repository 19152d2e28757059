"""Actors of a Ray cluster, on one machine or on several that share the results folder. Each runs cell after cell.

Options: `address` of a running cluster (by default `$RAY_ADDRESS`, else a cluster is started on this machine and ended
with the run), and `cpus` and `gpus` of a cell; `gpus: 0.25` has four cells share a GPU. An actor that dies costs the
cell that it was running; Ray starts the next one where there is room.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.fields import Positive
from dpopt.runs import stopping
from dpopt.runs.engines.attempt import Runner
from dpopt.runs.engines.base import Engine, Event, Setup, options
from dpopt.store.runs import Store


@dataclass(frozen=True)
class Options:
    """See above; `gpus` is one where the cluster has some."""

    address: str | None = None
    cpus: Positive = 1.0
    gpus: float | None = None

    def needs(self, resources: Mapping[str, float]) -> dict[str, float]:
        """The resources that Ray reserves for a cell."""
        return {"CPU": self.cpus, "GPU": float("GPU" in resources) if self.gpus is None else self.gpus}


class RayEngine(Engine):
    """As many actors as the cluster has room for, or as `workers` says."""

    def __init__(self, store: Store, setup: Setup) -> None:
        chosen = options(Options, setup, "ray")
        self._is_owner = not ray.is_initialized()
        if self._is_owner:
            _connect(chosen.address, setup.workers)
        resources = ray.cluster_resources()
        self._needs = chosen.needs(resources)
        room = min(int(resources.get(name, 0.0) / need) for name, need in self._needs.items() if need)
        super().__init__(store, setup, setup.workers or max(1, room))

    def worker(self, place: int) -> Any:
        # Two threads: one runs cells, the other can ask it to stop.
        reserved = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs["GPU"], "max_concurrency": 2}
        remote: Any = ray.remote(max_restarts=0, max_task_retries=0, **reserved)(_Runner)
        environment = {name: value for name, value in os.environ.items() if name.startswith("DPOPT_")}
        return remote.remote(self.store, self.setup, os.getcwd(), environment)

    def start(self, worker: Any, cell: Cell) -> Future[Event]:
        return worker.run.remote(cell).future()

    def stop(self, worker: Any, attempt: Any) -> None:
        worker.stop.remote()

    def kill(self, worker: Any) -> None:
        ray.kill(worker)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._is_owner:
                ray.shutdown()


class _Runner(Runner):
    """What the actor is over there: where and as this process is."""

    def __init__(self, store: Store, setup: Setup, folder: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        os.chdir(folder)
        super().__init__(store, setup)


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
