"""Objects that live in processes of their own, so that none shares a heap, caches or settings with another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
_STARTING = threading.Lock()
ENDING = 10.0
"""Seconds that a killed process may take to end: one that waits for a hanging device does not."""


class Remote:
    """A process that holds `subject`, sent as a pickle, and does nothing but what it is asked; it ends with this one.

    Torch computes there with as many threads as here. The program's main module is imported there where it has a guard,
    `if __name__ == "__main__"`; without one it would do all again that it does here.

    Args:
        subject: the object; its class is not one of a main module without a guard.
        is_quiet: whether warnings are left out.
    """

    def __init__(self, subject: object, is_quiet: bool = True) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self._started = RawValue("b", 0)
        arguments = (theirs, self._started, subject, torch.get_num_threads(), is_quiet)
        self.process: BaseProcess = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        with _guarded_main():
            self.process.start()
        theirs.close()

    @property
    def has_started(self) -> bool:
        """Whether the process has ever held the object."""
        return bool(self._started.value)

    def begin(self, method: str, *given: Any) -> None:
        """Have a method of the object called; `pipe` can be read when it has returned.

        Raises:
            OSError: the process has died.
        """
        self.pipe.send((method, given))

    def answer(self) -> tuple[Any, str]:
        """What the method returned, when it has, and why there is nothing: empty if all went well.

        A process that has failed once is gone, with its memory.
        """
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return None, f"the process died (exit code {self.process.exitcode})"

    def ask(self, method: str, limit: float | None = None) -> tuple[Any, str]:
        """`begin` and `answer` in one; a process that takes more than `limit` seconds is ended."""
        with suppress(OSError):  # it has died, as its answer will say
            self.begin(method)
            if not self.pipe.poll(limit):
                self.close()
                return None, f"it takes more than {limit:g} seconds"
        return self.answer()

    def close(self, patience: float = 0.0) -> None:
        """End the process, whatever it does; one that does nothing may take `patience` seconds to end by itself."""
        self.pipe.close()
        self.process.join(patience)
        self.process.kill()  # a call into a driver does not hear SIGTERM
        self.process.join(ENDING)


@contextmanager
def _guarded_main() -> Iterator[None]:
    """Processes that start meanwhile find no main module to import, unless it has a guard."""
    with _STARTING:
        main = sys.modules["__main__"]
        if not _has_guard(main):
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _has_guard(main: ModuleType) -> bool:
    try:
        return b"__main__" in Path(getattr(main, "__file__", None) or "").read_bytes()
    except OSError:  # typed, or piped in
        return False


def _serve(pipe: Connection, started: Any, subject: object, threads: int, is_quiet: bool) -> None:
    started.value = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all processes; the one that asks ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if is_quiet:
        warnings.simplefilter("ignore")  # Opacus' hooks warn at every step
    torch.set_num_threads(threads)
    reason = ""
    with suppress(EOFError, BrokenPipeError):  # there is nobody to ask any more
        while not reason:
            method, given = pipe.recv()
            answer, reason = _answer(subject, method, given)
            pipe.send((answer, reason))


def _answer(subject: object, method: str, given: tuple[Any, ...]) -> tuple[Any, str]:
    try:
        return getattr(subject, method)(*given), ""
    except Exception as error:  # other libraries refuse models in many ways, and memory may run out
        return None, f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def _end_with_parent() -> None:
    """A killed parent must not leave processes that write beside the next parent's, or hold its GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
