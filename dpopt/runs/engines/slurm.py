"""Cells as jobs of Slurm, in arrays that submitit submits. The results folder is on a file system that all nodes share.

Options: `folder` for submitit's files (by default `slurm`), `at_once`, how many jobs are in Slurm's queue at most, and
whatever submitit's `AutoExecutor` understands: `timeout_min`, `mem_gb`, `gpus_per_node`, `slurm_partition`, ...;
`cluster: local` runs jobs on this machine, for tests. `workers` bounds how many jobs of an array run at a time.

Before its time is up, a job writes a checkpoint and goes back to the queue (submitit's signal); one that is preempted
with SIGTERM writes a checkpoint and is submitted again. Jobs outlive this process: whoever runs the suite next waits
for them, as their leases say that they run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # configuring logs closes the handlers of everyone else
import submitit
from submitit.helpers import DelayedSubmission

from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.fields import Count
from dpopt.runs import stopping
from dpopt.runs.engines.attempt import Runner
from dpopt.runs.engines.base import Engine, Event, Setup
from dpopt.runs.engines.base import options as read
from dpopt.store.runs import Store

REQUEUES = 100
"""How often a job may run out of time: each time it goes on from its checkpoint."""


@dataclass(frozen=True)
class Options:
    """The options that are not submitit's, see above."""

    folder: str = "slurm"
    cluster: str = "slurm"
    at_once: Count = 1000


class SlurmEngine(Engine):
    """Jobs of one cell each."""

    def __init__(self, store: Store, setup: Setup) -> None:
        own = {name: value for name, value in setup.options.items() if name in Options.__dataclass_fields__}
        others = {name: value for name, value in setup.options.items() if name not in own}
        chosen = read(Options, replace(setup, options=own), "slurm")
        self._executor = _executor(chosen.folder, chosen.cluster, setup.workers, others)
        super().__init__(store, setup, chosen.at_once)

    def start(self, worker: Any, cell: Cell) -> submitit.Job[Event]:
        return self._executor.submit(NodeRunner(self.store, self.setup), cell)

    def stop(self, worker: Any, attempt: submitit.Job[Event]) -> None:
        attempt.cancel(check=False)  # SIGTERM, and after Slurm's own grace SIGKILL

    def wait(self, attempts: Any, timeout: float) -> None:
        time.sleep(timeout)

    def together(self) -> AbstractContextManager[Any]:
        """An array of jobs."""
        return self._executor.batch()


class NodeRunner(Runner):
    """What a node does. The cell runs in a second thread, as the first one has to answer submitit's signal."""

    def __call__(self, cell: Cell) -> Event:
        """Run a cell and say how that ended."""
        with stopping.signals(at_once=False), ThreadPoolExecutor(1) as pool:
            self._event: Future[Event] = pool.submit(self.run, cell)
            self._wait()
            return self._event.result()

    def checkpoint(self, cell: Cell) -> DelayedSubmission:
        """Have the cell end after a checkpoint; returns what is to run when the job is started again."""
        self.stop()
        self._wait()
        return DelayedSubmission(NodeRunner(self.store, self.setup), cell)

    def _wait(self) -> None:
        while not self._event.done():  # `result` would not let a signal's handler wait as well
            time.sleep(0.05)


def _executor(folder: str, cluster: str, workers: int | None, options: Mapping[str, Any]) -> submitit.AutoExecutor:
    """Raises `ConfigError` where there is no Slurm, or for an option that submitit does not understand."""
    given = {"name": "dpopt", "cpus_per_task": 1, "slurm_array_parallelism": workers, **options}
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**given)
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        raise ConfigError("engine slurm", options or cluster, str(error).splitlines()[0]) from error
    return executor
