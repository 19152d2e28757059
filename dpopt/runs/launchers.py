"""Launchers start jobs on other machines: each job is a supervisor there, which takes cells like any other.

A launcher is a class in a file of its own, of another distribution by an entry point of the group "dpopt.launchers":

    __init__(suite)         raises `ConfigError` for `suite.options` that it does not understand
    room                    how many jobs can run at a time
    start(job, number)      starts as many jobs, each of which calls `job.start()` somewhere and waits for that process
    has_ended(started)      True if a job has ended, in any way
    stop(started)           asks a job to end: SIGTERM for its process, whose cells write checkpoints
    close()                 ends what the launcher has begun, as far as that cannot go on without it

What is to be run is read from the results folder, which all machines share.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpopt.cells import Cell
from dpopt.runs.supervisor import STARTS
from dpopt.runs.worker import News, Tell
from dpopt.store.runs import Store
from dpopt.suites.schema import Keys

_POLL = 1.0
"""Seconds between two looks at the jobs."""


@dataclass(frozen=True)
class Job:
    """Runs a suite's cells where it is started, as if in the folder and the environment in which it was made."""

    suite: Keys
    results: str
    folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith("DPOPT_")}
    )

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, which writes checkpoints and ends at SIGTERM, and ends with its parent."""
        environment = {**os.environ, **self.environment, "DPOPT_PARENT": str(os.getpid())}
        command = [sys.executable, "-c", "from dpopt.runs.run_suite import run_job; run_job()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=self.folder, env=environment)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((self.suite, self.results)))
        process.stdin.close()
        return process


def launch(launcher: Any, job: Job, store: Store, cells: Sequence[Cell], tell: Tell, stop: Callable[[], bool]) -> None:
    """Have jobs run all of `cells`; a job that ends before that is started again.

    Raises:
        OSError: jobs end, and no cell does.
    """
    left, ended = deque(cells), 0
    number = min(filter(None, (job.suite.workers, launcher.room, len(cells))))
    jobs = list(launcher.start(job, number))
    while jobs and not stop():
        time.sleep(_POLL)
        gone, before = [started for started in jobs if launcher.has_ended(started)], len(left)
        jobs = [started for started in jobs if started not in gone]
        for _ in range(min(100, len(left)) if jobs else len(left)):  # a few at a time show how far the suite is
            cell = left.popleft()
            left.extend(() if store.is_settled(cell.run_id) else (cell,))
        tell(News("waiting", reason=f"{len(jobs)} jobs", left=len(left)))
        ended = len(gone) + (0 if len(left) < before else ended)
        if left and not jobs:
            if ended >= STARTS * number:
                raise OSError(f"{ended} jobs have ended, and no cell: see their logs")
            jobs = list(launcher.start(job, min(number, len(left))))
    for started in jobs:
        launcher.stop(started)
    until = time.monotonic() + job.suite.grace
    while time.monotonic() < until and not all(map(launcher.has_ended, jobs)):
        time.sleep(0.1)
