"""Where cells run. An engine takes cells and reports what becomes of them; the store alone knows what is done."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from dpopt.harness.cell import Cell


class Event(NamedTuple):
    """What an engine reports.

    Attributes:
        run_id: the cell.
        kind: "progress" (with the fraction that is done), "done", or "failed" (with the reason).
        fraction: part of the cell that is done.
        reason: why it failed.
    """

    run_id: str
    kind: Literal["progress", "done", "failed"]
    fraction: float = 1.0
    reason: str = ""


class Engine(Protocol):
    """Runs cells in any order."""

    def submit(self, cell: Cell) -> None:
        """Queue a cell."""
        ...

    def poll(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout` seconds for something to happen."""
        ...

    def close(self) -> None:
        """Stop at once; cells that are running stay as they are in the store."""
        ...
