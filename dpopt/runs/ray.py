"""Jobs on a Ray cluster, on one machine or on several that share the results folder.

Options: `address` of a running cluster (by default `$RAY_ADDRESS`, else a cluster is started on this machine and ended
with the run), and `cpus` and `gpus` of a job; `gpus: 0.25` has four jobs share a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Positive
from dpopt.runs import stopping
from dpopt.runs.launchers import Job
from dpopt.suites.schema import Keys


@dataclass(frozen=True)
class _Options:
    """See above; `gpus` is one where the cluster has some."""

    address: str | None = None
    cpus: Positive = 1.0
    gpus: float | None = None


class Launcher:
    """One job for each place that the cluster has room for; see `launchers`."""

    def __init__(self, suite: Keys) -> None:
        options = fields.build(_Options, suite.options, "options of engine ray")
        self._is_owner = not ray.is_initialized()
        address = options.address or os.environ.get("RAY_ADDRESS") or "local"
        quiet = {"log_to_driver": False, "logging_level": "error"}
        local = {"num_cpus": suite.workers, "include_dashboard": False} if address == "local" else {}
        if self._is_owner:
            try:
                with stopping.undisturbed():  # Ray has a process end at SIGTERM
                    ray.init(address, **quiet, **local)
            except Exception as error:  # Ray has no class of its own for these
                raise ConfigError("options.address", address, f"Ray: {str(error).splitlines()[0]}") from error
        has = ray.cluster_resources()
        gpus = float("GPU" in has) if options.gpus is None else options.gpus
        self.room = max(1, int(min(has.get(k, 0.0) / n for k, n in (("CPU", options.cpus), ("GPU", gpus)) if n)))
        self._run = ray.remote(num_cpus=options.cpus, num_gpus=gpus, max_retries=0)(_run)

    def start(self, job: Job, number: int) -> Sequence[Any]:
        return [self._run.remote(job) for _ in range(number)]

    def has_ended(self, started: Any) -> bool:
        return bool(ray.wait([started], timeout=0)[0])

    def stop(self, started: Any) -> None:
        ray.cancel(started)

    def close(self) -> None:
        if self._is_owner:
            ray.shutdown()


def _run(job: Job) -> int:
    process = job.start()
    try:
        return process.wait()
    finally:  # cancelled: Ray raises KeyboardInterrupt
        process.terminate()
        process.wait()
