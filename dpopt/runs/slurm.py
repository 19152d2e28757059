"""Jobs of Slurm, in an array that submitit submits. The results folder is on a file system that all nodes share.

Options: `folder` for submitit's files, logs included (by default `slurm`), `at_once`, the most jobs that are submitted
(by default the suite's `workers`, else 20), and the keys of submitit's `AutoExecutor` (`timeout_min`, `mem_gb`,
`gpus_per_node`, ...); `cluster: local` runs jobs here. A job takes cell after cell until nothing is left. One whose
time is up writes a checkpoint and goes back to the queue. The others take the cells of one that is killed, and where
all are gone, further ones are submitted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # configuring logs closes the handlers of everyone else
import submitit
from submitit.helpers import DelayedSubmission

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Count
from dpopt.runs.launchers import Job
from dpopt.suites.schema import Keys


class Launcher:
    """An array of jobs; see `launchers`."""

    def __init__(self, suite: Keys) -> None:
        options = {
            "name": "dpopt",
            "cpus_per_task": 1,
            "timeout_min": 5,  # the same on a cluster and in a rehearsal
            "slurm_array_parallelism": suite.workers,
            **suite.options,
        }
        folder, cluster = (str(options.pop(key, "slurm")) for key in ("folder", "cluster"))
        # Each job imports torch, so one for each cell would do little else.
        self.room = fields.convert(options.pop("at_once", suite.workers or 20), Count, "options.at_once", {})
        try:
            often = dict.fromkeys(("slurm_max_num_timeout", "local_max_num_timeout"), 100)  # a job may run out of time
            self._executor = submitit.AutoExecutor(folder, cluster=cluster, **often)
            self._executor.update_parameters(**options)
        except (RuntimeError, ValueError, NameError, AssertionError) as error:
            raise ConfigError("engine slurm", suite.options, str(error).splitlines()[0]) from error

    def start(self, job: Job, number: int) -> Sequence[Any]:
        with self._executor.batch():
            return [self._executor.submit(_Node(job)) for _ in range(number)]

    def has_ended(self, started: submitit.Job[int]) -> bool:
        return started.done()

    def stop(self, started: submitit.Job[int]) -> None:
        started.cancel(check=False)  # SIGTERM, and after Slurm's own grace SIGKILL

    def close(self) -> None:
        pass  # jobs go on by themselves


class _Node:
    """A job on its node: it starts the supervisor and hands on the signals that Slurm sends."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self) -> int:
        """Run cells until nothing is left."""
        self._process = self._job.start()
        signal.signal(signal.SIGTERM, lambda number, frame: self._process.terminate())
        while (ended := self._process.poll()) is None:
            time.sleep(0.1)  # a signal that comes just before a wait without end would not be answered
        return ended

    def checkpoint(self) -> DelayedSubmission:
        """Time is up: end after a checkpoint, and begin again when the job is back from the queue."""
        self._process.terminate()
        with suppress(ChildProcessError):  # `wait` would wait for the `poll` that this signal may have interrupted
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(_Node(self._job))
