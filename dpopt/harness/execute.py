"""Run what is not done of a plan, and say how it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpopt.harness.cell import Cell
from dpopt.harness.engines import Engine, Event

PLAIN_LINES = 20
"""About how many lines a run prints where there is no terminal to draw a bar on."""


class StateStore(Protocol):
    """What deciding what to run needs of the store."""

    def state(self, run_id: str) -> str: ...


@dataclass
class Outcome:
    """What became of a plan's cells.

    Attributes:
        ran: cells that were run now and have a result.
        skipped: cells that had a result already.
        failed: run id -> reason, of this and of earlier attempts.
        damaged: cells whose record cannot be read; left alone.
    """

    ran: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def execute(
    cells: Iterable[Cell],
    store: Any,
    make_engine: Callable[[], Engine],
    console: Console | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run the cells that have no result yet.

    Failed and damaged cells are left alone: `dpopt retry` clears failures, and damaged files are the user's to move.

    Args:
        cells: duplicates run once.
        store: a `dpopt.store.Store`.
        make_engine: called only if something is to be run, since workers are slow to start.
        console: where progress goes.
        outcome: of earlier cells, to go on with.
    """
    outcome, to_run = outcome or Outcome(), {}
    for run_id, cell in {cell.run_id: cell for cell in cells}.items():
        state = store.state(run_id)
        if state in ("done", "diverged"):
            outcome.skipped += 1
        elif state == "failed":
            outcome.failed[run_id] = store.error(run_id)["reason"]
        elif state == "damaged":
            outcome.damaged.append(run_id)
        else:
            to_run[run_id] = cell
    if to_run:
        _drive(to_run, make_engine(), outcome, console or Console(stderr=True))
    return outcome


def _drive(to_run: dict[str, Cell], engine: Engine, outcome: Outcome, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    total, done, partial = len(to_run), 0, dict.fromkeys(to_run, 0.0)
    try:
        for cell in to_run.values():
            engine.submit(cell)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("cells", total=total)
            while done < total:
                for event in engine.poll(1.0):
                    partial[event.run_id] = event.fraction
                    if event.kind != "progress":
                        done += 1
                        _note(event, outcome, progress.console)
                        if not console.is_terminal and done % max(1, total // PLAIN_LINES) == 0:
                            console.print(f"{done}/{total} cells")
                    progress.update(task, completed=sum(partial.values()))
    finally:
        engine.close()


def _note(event: Event, outcome: Outcome, console: Console) -> None:
    if event.kind == "done":
        outcome.ran += 1
    else:
        outcome.failed[event.run_id] = event.reason
        console.print(f"[red]failed[/red] {event.run_id}: {event.reason}", highlight=False)
