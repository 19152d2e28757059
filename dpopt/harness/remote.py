"""Objects that live in processes of their own, so that none shares a heap, caches or settings with another."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
ENDING = 10.0
"""Seconds that a killed process may take to end: one that waits for a hanging device does not."""


class Remote:
    """A process that holds `subject`, sent as a pickle, and does nothing but what it is asked; it ends with this one.

    Torch computes there with as many threads as here.
    """

    def __init__(self, subject: object) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, subject, torch.get_num_threads())
        self._process: BaseProcess = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, limit: float | None = None) -> tuple[Any, str]:
        """What a method of the object returns, and why there is nothing: empty if all went well.

        A process that has failed once is gone, with its memory; so is one that takes more than `limit` seconds.
        """
        try:
            self._pipe.send(method)
            if not self._pipe.poll(limit):
                self.close()
                return None, f"it takes more than {limit:g} seconds"
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None, f"the process died (exit code {self._process.exitcode})"

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()  # a call into a driver does not hear SIGTERM
        self._process.join(ENDING)
        self._pipe.close()


def _serve(pipe: Connection, subject: object, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all processes; the one that asks ends the others
    warnings.simplefilter("ignore")  # Opacus' hooks warn at every step
    torch.set_num_threads(threads)
    reason = ""
    with suppress(EOFError, BrokenPipeError):  # there is nobody to ask any more
        while not reason:
            answer, reason = _answer(subject, pipe.recv())
            pipe.send((answer, reason))


def _answer(subject: object, method: str) -> tuple[Any, str]:
    try:
        return getattr(subject, method)(), ""
    except Exception as error:  # other libraries refuse models in many ways, and memory may run out
        return None, f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]
