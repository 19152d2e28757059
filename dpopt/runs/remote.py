"""Objects that live in processes of their own, so that none shares a heap, caches or settings with another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dpopt.runs import stopping

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
_STARTING = threading.Lock()
ENDING = 10.0
"""Seconds that a killed process may take to end: one that waits for a hanging device does not."""


class Remote:
    """A process that holds `subject`, sent as a pickle, and does nothing but what it is asked; it ends with this one.

    Torch computes there with as many threads as here. The program's main module is imported there where it has a guard,
    `if __name__ == "__main__"`; without one, which would do all again that it does here, `subject` has no class of it.
    """

    def __init__(self, subject: object) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, subject, torch.get_num_threads(), os.getpid())
        self.process: BaseProcess = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        with guarded_main():
            self.process.start()
        theirs.close()

    def ask(self, method: str = "__call__", limit: float | None = None) -> tuple[Any, str]:
        """The result of a method of the object, and why there is none: empty if all went well.

        A process that has failed once is gone, with its memory; one that takes more than `limit` seconds is ended.
        """
        with suppress(OSError):  # it has died, as its answer will say
            self._pipe.send(method)
            if not self._pipe.poll(limit):
                self.close()
                return None, f"it takes more than {limit:g} seconds"
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return None, f"the process died (exit code {self.process.exitcode})"

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        self.process.kill()  # a call into a driver does not hear SIGTERM
        self.process.join(ENDING)


def side_by_side(tasks: Sequence[Callable[[], Any]], at_once: int) -> Generator[tuple[int, Any, str]]:
    """Call each task in a process of its own, `at_once` at a time; yields number, result and failure of each that ends.

    Processes that are left are ended with the iterator.
    """
    alive: list[Remote] = []

    def answer(task: Callable[[], Any]) -> tuple[Any, str]:  # a thread only waits
        try:
            remote = Remote(task)
        except Exception as error:  # there may be no memory for a process, and a task may not be sent
            return None, f"no process could be started: {type(error).__name__}: {error}"[:200]
        alive.append(remote)
        result = remote.ask()
        remote.close()
        return result

    pool = ThreadPoolExecutor(max(1, min(at_once, len(tasks))))
    try:
        futures = {pool.submit(answer, task): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], *future.result()
    finally:  # first no new process, then the end of those that are left
        pool.shutdown(wait=False, cancel_futures=True)
        for remote in alive:
            remote.close()


@contextmanager
def guarded_main() -> Iterator[None]:
    """Processes that are spawned meanwhile find no main module to import, unless it has a guard."""
    with _STARTING:
        main = sys.modules["__main__"]
        try:
            has_guard = b"__main__" in Path(getattr(main, "__file__", None) or "").read_bytes()
        except OSError:  # typed, or piped in
            has_guard = False
        if not has_guard:
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _serve(pipe: Connection, subject: object, threads: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all processes; the one that asks ends the others
    stopping.end_with(parent)
    warnings.simplefilter("ignore")  # Opacus' hooks warn at every step
    torch.set_num_threads(threads)
    reason = ""
    with suppress(EOFError, BrokenPipeError):  # there is nobody to ask any more
        while not reason:
            method = pipe.recv()
            try:
                answer = getattr(subject, method)()
            except Exception as error:  # other libraries refuse models in many ways, and memory may run out
                first = next(iter(str(error).strip().splitlines()), "")
                answer, reason = None, f"{type(error).__name__}: {first}"[:200]
            pipe.send((answer, reason))
