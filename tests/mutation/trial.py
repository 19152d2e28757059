"""Tests in a process of its own, forked from one that has imported what takes long, but nothing of this project."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import pytest

HEAVY = [
    "pytest",
    "torch",
    "hypothesis",
    "numpy",
    "scipy.stats",
    "opacus.layers",
    "timm",
    "torchvision",
    "transformers",
    "peft",
]
NOT_FOUND = f"pytest: {pytest.ExitCode.USAGE_ERROR.name}"
"""What happens where there is no test of a name that is asked for, or a file of tests cannot be imported."""

MOST_MEMORY = 2**33
"""Bytes; a mutant may ask for any number."""


class Seen(NamedTuple):
    """What is known of one test.

    Attributes:
        seconds: that it took.
        functions: of the package that it called in its own process, "privacy/queries.py Losses.contribution".
    """

    seconds: float
    functions: list[str]


class Outcome(NamedTuple):
    """How tests ended.

    Attributes:
        failed: the first that failed; what happened instead, where none was run; "" where all passed.
        seen: each test that was run, where that was asked for.
    """

    failed: str
    seen: dict[str, Seen]


def start() -> None:
    """Say what the process is to import from which all trials are forked. To be called once, at the beginning."""
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(HEAVY)


def outcome(tests: list[str], tree: Path, seconds: float, *, is_watched: bool = False) -> Outcome:
    """Run tests of the copy of this project at `tree` until one fails, or does not end within `seconds`."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_run, args=(tests, tree, is_watched, send))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(seconds) else Outcome("takes too long", {})
    except EOFError:
        return Outcome("ends the process", {})
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _run(tests: list[str], tree: Path, is_watched: bool, send: Connection) -> None:
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = False  # thousands of asserts are rewritten once, not for each mutant
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    watch = _Watch(f"{tree}/dpopt/" if is_watched else "")
    status = pytest.main(["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests], plugins=[watch])
    is_fine = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # a file may hold slow ones alone
    send.send(Outcome(watch.failed or ("" if is_fine else f"pytest: {status.name}"), watch.seen))  # type: ignore[union-attr]


class _Watch:
    """Notes which test fails and, of the package in `folder`, which functions each test calls."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.failed = ""
        self.seen: dict[str, Seen] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if not self._folder:
            return (yield)
        functions: set[str] = set()

        def note(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if code.co_filename.startswith(self._folder):
                functions.add(f"{code.co_filename.removeprefix(self._folder)} {code.co_qualname.split('.<locals>')[0]}")

        began = perf_counter()
        threading.settrace(note)  # type: ignore[arg-type]
        sys.settrace(note)  # type: ignore[arg-type]
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seen[item.nodeid] = Seen(perf_counter() - began, sorted(functions))
