"""What all engines have in common: the queue, cancelling, the grace before a kill, and which workers go on."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from dpopt import fields
from dpopt.store.runs import Store

if TYPE_CHECKING:
    from dpopt.cells import Cell

Kind = Literal["progress", "done", "held", "failed", "died", "unstarted", "interrupted", "blocked"]


class Event(NamedTuple):
    """What an engine reports of a cell.

    Attributes:
        run_id: the cell.
        kind: "progress": it runs, and `fraction` is done; "done": it has a record; "held": another process runs it, or
            has finished it; "failed": an error of its own, noted in the store; "died": its worker did; "unstarted":
            its worker did before it could run anything; "interrupted": it was asked to stop; "blocked": results cannot
            be written, whatever the cell.
        fraction: part of the cell that is done.
        reason: why it ended as it did.
    """

    run_id: str
    kind: Kind
    fraction: float = 1.0
    reason: str = ""


@dataclass(frozen=True)
class Setup:
    """How an engine runs cells; `conf/base/suite.yaml` documents the keys.

    Attributes:
        device, physical_batch, isolate: see `cell.run`.
        workers: cells at a time; None leaves it to the engine.
        memory: bytes that a worker may take; None for no limit.
        grace: seconds that a cell has to write a checkpoint when it is stopped.
        options: what the engine alone understands.
    """

    device: str = "auto"
    physical_batch: int | None = None
    isolate: bool = False
    workers: int | None = None
    memory: int | None = None
    grace: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict)


class Attempt(Protocol):
    """A cell that is being run; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Event:
        """How it has ended; raises an exception where the worker died."""
        ...


@dataclass
class _Place:
    """Room for one cell at a time; an attempt that still runs at `deadline` is ended with its worker."""

    number: int
    worker: Any = None
    attempt: Attempt | None = None
    run_id: str = ""
    deadline: float = math.inf


class Engine:
    """Runs cells in any order; a subclass says how they are started, stopped and killed.

    Attributes:
        survives: how a cell may end so that its worker can run another one.

    Args:
        store: where results go.
        setup: how cells are run.
        room: number of cells at a time.
    """

    survives: tuple[Kind, ...] = ("done", "held", "failed")

    def __init__(self, store: Store, setup: Setup, room: int = 1) -> None:
        self.store, self.setup = store, setup
        self.places = [_Place(number) for number in range(room)]
        self._queue: deque[Cell] = deque()

    def worker(self, place: int) -> Any:
        """Make what runs cells at a place, 0 to `room` - 1, until it dies or is killed; None where nothing stays."""

    def start(self, worker: Any, cell: Cell) -> Attempt:
        """Have a worker run a cell; raises `OSError` where the worker has died before."""
        raise NotImplementedError

    def stop(self, worker: Any, attempt: Any) -> None:
        """Ask a cell to write a checkpoint and to end."""

    def kill(self, worker: Any) -> None:
        """End a worker, whatever it does."""

    def wait(self, attempts: Sequence[Any], timeout: float) -> None:
        """Return when one of `attempts` may have ended, after `timeout` seconds at the latest."""
        futures.wait(attempts, timeout, futures.FIRST_COMPLETED)

    def together(self) -> AbstractContextManager[Any]:
        """Where cells are started that were waiting at the same time."""
        return nullcontext()

    def check(self, cell: Cell) -> None:
        """Raise `ConfigError` for a cell that this engine does not run; by default it runs any."""

    def submit(self, cell: Cell) -> None:
        """Queue a cell; it is reported once as anything but "progress", unless the engine is closed before."""
        self._queue.append(cell)

    def poll(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout` seconds for something to happen."""
        self._dispatch()
        if not (busy := self._busy()):
            time.sleep(timeout)
            return []
        self.wait([place.attempt for place in busy], timeout)
        events = [event for place in busy if (event := self._look(place))]
        for place in self._busy():
            holder = self.store.holder(place.run_id)
            if holder is not None and not holder.is_gone:  # an attempt that died leaves its lease
                events.append(Event(place.run_id, "progress", holder.fraction))
        return events

    def cancel(self, run_id: str) -> None:
        """Have a cell stop: it writes a checkpoint, or is killed after the grace that it is given."""
        self._queue = deque(cell for cell in self._queue if cell.run_id != run_id)
        for place in self._busy():
            if place.run_id == run_id and place.deadline == math.inf:
                place.deadline = time.monotonic() + self.setup.grace
                self.stop(place.worker, place.attempt)

    def close(self) -> None:
        """Stop all cells, each as `cancel` does, and end."""
        self._queue.clear()
        try:
            for place in self._busy():
                self.cancel(place.run_id)
            while self._busy():
                self.poll(0.1)
        finally:  # where even this is interrupted
            with futures.ThreadPoolExecutor() as pool:  # each may take a while
                list(pool.map(self._clear, self.places))

    def _busy(self) -> list[_Place]:
        return [place for place in self.places if place.attempt is not None]

    def _dispatch(self) -> None:
        free = [place for place in self.places if place.attempt is None]
        if not free or not self._queue:
            return
        begun = list[tuple[_Place, Any, str]]()  # places learn of them once all are really submitted
        with self.together():
            for place in sorted(free, key=lambda place: place.worker is None)[: len(self._queue)]:
                cell = self._queue.popleft()
                if place.worker is None:
                    place.worker = self.worker(place.number)
                try:
                    begun.append((place, self.start(place.worker, cell), cell.run_id))
                except OSError:  # the worker died while it was idle, which is not the cell's doing
                    self._clear(place)
                    self._queue.appendleft(cell)
        for place, attempt, run_id in begun:
            place.attempt, place.run_id = attempt, run_id

    def _look(self, place: _Place) -> Event | None:
        """How the cell of a place has ended, if it has; the place is free then."""
        assert place.attempt is not None
        if place.attempt.done():
            event = _result(place.attempt, place.run_id)
        elif time.monotonic() > place.deadline:
            event = Event(place.run_id, "died", reason=f"it did not stop within {self.setup.grace:g} seconds")
        else:
            return None
        if place.deadline < math.inf or event.kind not in self.survives:
            self._clear(place)
        place.attempt, place.deadline = None, math.inf
        return event

    def _clear(self, place: _Place) -> None:
        if place.worker is not None:
            self.kill(place.worker)
        place.worker = None


def _result(attempt: Attempt, run_id: str) -> Event:
    try:
        return attempt.result()
    except Exception as error:  # libraries have many for a worker that is gone
        return Event(run_id, "died", reason=" ".join(str(error).split())[:300])


@dataclass(frozen=True)
class Nothing:
    """The options of an engine that has none."""


T = TypeVar("T")


def options(cls: type[T], setup: Setup, engine: str) -> T:
    """The dataclass `cls` of an engine's options.

    Raises:
        ConfigError: an option is unknown, or has a value that its annotation does not allow.
    """
    return fields.build(cls, setup.options, f"options of engine {engine}")
