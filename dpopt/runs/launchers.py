"""Launchers start jobs on other machines: each job is a supervisor there, which takes cells like any other.

A launcher is a class in a file of its own, of another distribution by an entry point of the group "dpopt.launchers":

    __init__(setup)         raises `ConfigError` for options that it does not understand
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
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from dpopt.runs.supervisor import STARTS
from dpopt.runs.worker import News, Queue, Setup
from dpopt.suites.engines import brought
from dpopt.suites.schema import Keys

POLL = 1.0
"""Seconds between two looks at the jobs."""
LOOKS = 100
"""Cells looked at in one of them, to show how far the suite is."""


@dataclass(frozen=True)
class Job:
    """Runs a suite's cells where it is started, with one worker, until nothing is left.

    Attributes:
        suite: what to run.
        results: the folder.
        folder, environment: as of the process that starts the job.
    """

    suite: Keys
    results: str
    folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith("DPOPT_")}
    )

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, which writes checkpoints and ends at SIGTERM, and ends with its parent."""
        environment = {**os.environ, **self.environment, "DPOPT_PARENT": str(os.getpid())}
        command = [sys.executable, "-m", "dpopt.runs.job"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=self.folder, env=environment)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((self.suite, self.results)))
        process.stdin.close()
        return process


def create(name: str, setup: Setup) -> Any:
    """The launcher `name`.

    Raises:
        ConfigError: it does not understand its options, or finds no cluster.
    """
    if name in brought():
        return brought()[name].load()(setup)
    return import_module(f"dpopt.runs.{name}").Launcher(setup)


def launch(
    launcher: Any, job: Job, queue: Queue, setup: Setup, tell: Callable[[News], None], stop: Callable[[], bool]
) -> None:
    """Have jobs run all cells of `queue`; a job that ends before that is started again.

    Raises:
        OSError: jobs end, and no cell does.
    """
    number = min(filter(None, (setup.workers, launcher.room, queue.left)))
    jobs, ended, settled = list(launcher.start(job, number)), 0, 0
    while jobs and not stop():
        time.sleep(POLL)
        queue.look(LOOKS)
        tell(News("waiting", left=queue.left))
        gone = [started for started in jobs if launcher.has_ended(started)]
        jobs = [started for started in jobs if started not in gone]
        if gone and not jobs:
            queue.look(queue.left)
        if queue.settled > settled:
            ended, settled = 0, queue.settled
        ended += len(gone)
        if gone and not jobs and queue.left:
            if ended >= STARTS * number:
                raise OSError(f"{ended} jobs have ended, and no cell: see their logs")
            jobs = list(launcher.start(job, min(number, queue.left)))
    for started in jobs:
        launcher.stop(started)
    until = time.monotonic() + setup.grace
    while time.monotonic() < until and not all(map(launcher.has_ended, jobs)):
        time.sleep(0.1)
