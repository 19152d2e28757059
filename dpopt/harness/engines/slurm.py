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
import signal
import threading
import time
from collections import deque
from typing import Any

os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # configuring logs closes the handlers of everyone else
import submitit
from submitit.helpers import DelayedSubmission

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.harness import stopping
from dpopt.harness.cell import Cell
from dpopt.harness.engines import Event, Setup
from dpopt.harness.engines.attempt import attempt, limit_memory, progress
from dpopt.store.runs import Store

REQUEUES = 100
"""How often a job may run out of time: each time it goes on from its checkpoint."""


class SlurmEngine:
    """Jobs of one cell each; see `Engine`."""

    def __init__(self, store: Store, setup: Setup) -> None:
        self._store, self._setup = store, setup
        options = {"folder": "slurm", "cluster": "slurm", "at_once": 1000, **setup.options}
        self._at_once = fields.convert(options.pop("at_once"), fields.Count, "options.at_once", {})
        self._executor = _executor(options.pop("folder"), options.pop("cluster"), setup.workers, options)
        self._queue: deque[Cell] = deque()
        self._jobs: dict[str, Any] = {}

    def submit(self, cell: Cell) -> None:
        self._queue.append(cell)

    def poll(self, timeout: float) -> list[Event]:
        self._dispatch()
        until = time.monotonic() + timeout
        while not (done := [run_id for run_id, job in self._jobs.items() if job.done()]) and time.monotonic() < until:
            time.sleep(min(timeout, 0.2))
        events = [_outcome(run_id, self._jobs.pop(run_id)) for run_id in done]
        return events + progress(self._store, self._jobs)

    def cancel(self, run_id: str) -> None:
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)
        if run_id in self._jobs:
            self._jobs[run_id].cancel(check=False)

    def close(self) -> None:
        self._queue.clear()
        for run_id in self._jobs:
            self.cancel(run_id)

    def _dispatch(self) -> None:
        """Submit as many cells as there is room for, as one array."""
        cells = [self._queue.popleft() for _ in range(min(len(self._queue), self._at_once - len(self._jobs)))]
        if not cells:
            return
        with self._executor.batch():
            jobs = [self._executor.submit(Job(self._store, self._setup), cell) for cell in cells]
        self._jobs |= {cell.run_id: job for cell, job in zip(cells, jobs, strict=True)}


class Job:
    """What a node does. The cell runs in a second thread, as the first one has to answer submitit's signal."""

    def __init__(self, store: Store, setup: Setup) -> None:
        self._store, self._setup = store, setup

    def __call__(self, cell: Cell) -> Event:
        """Run a cell and say how that ended."""
        signal.signal(signal.SIGTERM, lambda number, frame: stopping.ask())
        limit_memory(self._setup)
        events: list[Event] = []
        self._thread = threading.Thread(target=lambda: events.append(attempt(cell, self._store, self._setup)))
        self._thread.start()
        self._wait()
        return events[0]

    def checkpoint(self, cell: Cell) -> DelayedSubmission:
        """Have the cell end after a checkpoint; returns what is to run when the job is started again."""
        stopping.ask()
        self._wait()
        return DelayedSubmission(Job(self._store, self._setup), cell)

    def _wait(self) -> None:
        while self._thread.is_alive():  # `join` would not let a signal's handler wait as well
            time.sleep(0.05)


def _executor(folder: Any, cluster: Any, workers: int | None, options: dict[str, Any]) -> submitit.AutoExecutor:
    """Raises `ConfigError` where there is no Slurm, or for an option that submitit does not understand."""
    given = {"name": "dpopt", "cpus_per_task": 1, "slurm_array_parallelism": workers, **options}
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**given)
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        raise ConfigError("engine slurm", options or cluster, str(error).splitlines()[0]) from error
    return executor


def _outcome(run_id: str, job: Any) -> Event:
    try:
        return job.result()
    except Exception as error:  # whatever became of the job, it left no event
        reason = f"job {job.job_id} ended without a result: {str(error).splitlines()[0]} See {job.paths.stderr}"
        return Event(run_id, "died", reason=reason)
