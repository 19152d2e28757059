"""Runs each cell in this process, when it is asked for news. For debugging: a breakpoint works, a crash is a crash.

What needs a second process is not to be had here: `timeout`, `memory`, and a `dpopt cancel` before the cell's end.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from dpopt.cells import Cell
from dpopt.runs.engines.attempt import attempt
from dpopt.runs.engines.base import Engine, Event, Nothing, Setup, options
from dpopt.store.runs import Store


class InlineEngine(Engine):
    """One cell at a time, in the calling process."""

    def __init__(self, store: Store, setup: Setup) -> None:
        options(Nothing, setup, "inline")
        super().__init__(store, setup)

    def start(self, worker: Any, cell: Cell) -> Future[Event]:
        future: Future[Event] = Future()
        future.set_result(attempt(cell, self.store, self.setup))
        return future
