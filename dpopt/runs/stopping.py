"""True once this process has been asked to stop: by Ctrl-C, by SIGTERM, or by a supervisor.

Signals belong to a process, so what they say is kept once for it. A cell that is running looks after every step, writes
a checkpoint and ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_asked = threading.Event()
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def is_asked() -> bool:
    """True if this process has been asked to stop."""
    return _asked.is_set()


def ask() -> None:
    """Ask this process to stop."""
    _asked.set()


def forget() -> None:
    """Go on: what was asked is done."""
    _asked.clear()


@contextmanager
def signals(at_once: bool = True) -> Iterator[None]:
    """Take SIGINT and SIGTERM for being asked to stop; outside the main thread, which alone may do that, do nothing.

    With `at_once` the second signal raises `KeyboardInterrupt`. Not for a worker: several processes may ask it to stop,
    each with a signal of its own.
    """
    with undisturbed():
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                signal.signal(number, _on_signal if at_once else lambda number, frame: ask())
        try:
            yield
        finally:
            forget()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let SIGINT and SIGTERM mean afterwards what they mean now, whatever a library makes of them inside."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _STOPPING if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with(parent: int, last: Callable[[], None] = lambda: None) -> None:
    """Have this process end when its parent does, after a call of `last`.

    A killed supervisor must not leave workers that write beside the next one's, or hold its GPU.
    """

    def watch() -> None:
        while os.getppid() == parent:  # a pipe would not tell: processes that are forked later hold its other end too
            time.sleep(0.25)
        last()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_signal(number: int, frame: Any) -> None:
    if is_asked():
        raise KeyboardInterrupt
    ask()
